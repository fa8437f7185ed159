"""The documents are true: every example in README.md and docs/ is run, and what they point at exists.

In a document, in order and sharing one folder and one namespace:

* ``python`` blocks are executed,
* the lines ``$ ckptstore ...`` of ``console`` blocks are run and must exit with 0,
* other languages (``text``, ``json``, ...) are only shown; a block without a language is an error.

A comment right above a block changes this: ``<!-- test: skip REASON -->``, ``<!-- test: s3 -->`` (run against
the S3 test server, where the buckets that the block names are made first), ``<!-- test: torch -->`` (or another of
FRAMEWORKS: run where that is installed; a page of which nothing is left is skipped by name), ``<!-- exit: N -->`` (the
last command of the block exits with N).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = {"python", "console"}
SHOWN = {"diff", "dockerfile", "ini", "json", "makefile", "mermaid", "text", "toml", "yaml"}
COMMAND_SECONDS = 240
FRAMEWORKS = {"accelerate", "flax", "jax", "keras", "orbax", "pytorch_lightning", "torch", "torchdata", "transformers"}

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([^`]*)$")
_DIRECTIVE = re.compile(r"^\s*<!--\s*(test|exit):\s*(.*?)\s*-->\s*$")
_CLI = "import sys; sys.argv[0] = 'ckptstore'; from ckptstore.cli import main; sys.exit(main())"


class DocumentError(Exception):
    """A document that cannot be tested as it is written."""


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is that of its first line of content, ``orders`` the comments above it."""

    language: str
    line: int
    lines: list[str]
    orders: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    @property
    def needs(self) -> str:
        """First word of the ``test`` comment."""
        return self.orders.get("test", "").split(" ")[0]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a document.

    Raises:
        DocumentError: with the line, for a block without a known language, one that does not end, or a comment
            that orders something unknown or stands above no block.
    """
    orders: dict[str, str] = {}
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        order, fence = _DIRECTIVE.match(line), _FENCE.match(line)
        if order:
            orders[order[1]] = _checked_order(order[1], order[2], number)
        elif fence:
            language = fence[3].split(" ")[0].strip()
            if language not in RUN | SHOWN:
                raise DocumentError(f"line {number}: block in {language or 'no language'!r}: use {sorted(RUN | SHOWN)}")
            body = list(_until_fence(lines, fence[1], fence[2], number))
            yield Block(language, number + 1, body, orders)
            orders = {}
        elif orders and line.strip():
            raise DocumentError(f"line {number}: the comment above belongs to no block")


def _checked_order(kind: str, value: str, number: int) -> str:
    good = "|".join([r"skip \S.*", "s3", *FRAMEWORKS]) if kind == "test" else r"\d+"
    if not re.fullmatch(good, value):
        raise DocumentError(f"line {number}: unknown order {kind}: {value!r}")
    return value


def _until_fence(lines: Iterator[tuple[int, str]], indent: str, fence: str, start: int) -> Iterator[str]:
    for _, line in lines:
        stripped = line.strip()
        if stripped.startswith(fence) and not stripped.strip(fence[0]):
            return
        yield line.removeprefix(indent)
    raise DocumentError(f"line {start}: the block does not end")


def commands(block: Block) -> Iterator[tuple[int, list[str]]]:
    """``(line, words)`` of each ``$ ckptstore ...`` in a console block, with ``\\`` at the end continued."""
    number = 0
    while number < len(block.lines):
        first, line = number, block.lines[number]
        while line.endswith("\\") and number + 1 < len(block.lines):
            number += 1
            line = line[:-1] + block.lines[number].strip()
        number += 1
        if line.startswith("$ ckptstore"):
            words = list(shlex.shlex(line[2:], posix=True, punctuation_chars=True))
            if any(set(word) <= set("|&;<>()") for word in words if word):
                raise DocumentError(f"line {block.line + first}: write plain commands: no pipe, no redirection")
            yield block.line + first, shlex.split(line[2:], comments=True)[1:]


def run(path: Path, folder: Path, request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> int:
    """Run a document's blocks in ``folder``; how many commands and blocks were run."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    patch.chdir(folder)
    patch.setenv("PYTHONPATH", str(ROOT))  # for the commands, in a folder that is not the project's
    patch.setenv("COLUMNS", "120")
    count, missing = 0, set()
    for block in blocks(path.read_text("utf-8")):
        if block.needs in FRAMEWORKS and importlib.util.find_spec(block.needs) is None:
            missing.add(block.needs)
        if block.needs == "skip" or block.needs in missing:
            continue
        if block.needs == "s3":
            _provide_s3(request.getfixturevalue("s3"), block, patch)
        if block.language == "python":
            # The empty lines give a traceback the document's own line numbers.
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec", dont_inherit=True)
            with warnings.catch_warnings():
                if block.needs in FRAMEWORKS:
                    warnings.simplefilter("ignore")  # those of the frameworks' own code are not ours to mend
                exec(code, namespace)
            count += 1
        elif block.language == "console":
            found = list(commands(block))
            for line, words in found:
                wanted = int(block.orders.get("exit", 0)) if (line, words) == found[-1] else 0
                _run_command(words, wanted, f"{path.name}:{line}")
            count += len(found)
    if missing and not count:
        pytest.skip(f"needs {', '.join(sorted(missing))}: make test-adapters")
    return count


def _provide_s3(server: Any, block: Block, patch: pytest.MonkeyPatch) -> None:
    """Point the environment at the test server and make the buckets that the block names."""
    import s3fs

    options = server.storage_options
    patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    patch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    patch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    files = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    for bucket in sorted(set(re.findall(r"s3://([a-z0-9][a-z0-9.-]+)", block.text))):
        if not files.exists(bucket):
            files.call_s3("create_bucket", Bucket=bucket)


def _run_command(words: list[str], wanted: int, where: str) -> None:
    command = [sys.executable, "-c", _CLI, *words]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if done.returncode != wanted:
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        pytest.fail(f"{where}: ckptstore {shlex.join(words)}: exit {done.returncode}, not {wanted}:\n{said}")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_examples_run(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every python block and every ckptstore command of the document works as written."""
    run(path, tmp_path, request, monkeypatch)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_blocks_have_a_language(path: Path) -> None:
    """Nothing escapes the test above: each block says a language that is run or one that is only shown."""
    list(blocks(path.read_text("utf-8")))


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_and_named_tests_exist(path: Path) -> None:
    """A link inside the project leads to a file; a test that a document names as proof is there."""
    text = path.read_text("utf-8")
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    proofs = re.findall(r"\b(tests/[\w/]+\.py)((?:::\w+)*)", text)
    assert [f"{file}{names}" for file, names in proofs if not _is_there(ROOT / file, names)] == []


FIELD = 78


def test_every_report_of_the_field_has_a_row() -> None:
    """docs/guarantees.md has one row for each report: a number, a link, what happens, and tests that are there."""
    text = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    section = text.partition("## The field")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "| [" in line]
    assert len(rows) == len({row[0] for row in rows}) == FIELD
    assert [int(row[0]) for row in rows] == sorted(int(row[0]) for row in rows)
    link = r"\[[\w.-]+ #\d+\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)"
    for number, report, failure, outcome, proof in rows:
        assert re.fullmatch(link, report), number
        assert failure, number
        assert outcome, number
        tests = re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)*)`", proof)
        assert tests or outcome.startswith("does not apply: "), number
        assert [f"{file}{names}" for file, names in tests if not _is_there(ROOT / file, names)] == [], number


def _is_there(file: Path, names: str) -> bool:
    if not file.is_file():
        return False
    source = file.read_text("utf-8")
    return all(re.search(rf"^\s*(?:def|class) {name}\b", source, re.MULTILINE) for name in names.split("::")[1:])


def test_readme_names_every_page() -> None:
    """Who reads the README finds all pages; index.md is the site's own beginning."""
    readme = (ROOT / "README.md").read_text("utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert [name for name in sorted(pages) if f"](docs/{name}" not in readme] == []


def test_readme_has_examples() -> None:
    """The README shows at least one Python example and one command, so the tests above are not empty."""
    shown = list(blocks((ROOT / "README.md").read_text("utf-8")))
    assert [block for block in shown if block.language == "python" and block.needs != "skip"]
    assert [words for block in shown if block.language == "console" for _, words in commands(block)]


SAMPLE = """\
# A document

```python
x = 1
```

```console
$ pip install ckptstore
$ ckptstore ls \\
      "my runs"   # a comment
epoch 7
```

<!-- test: skip needs a cluster -->

```python
raise SystemExit
```

1. In a list

   <!-- exit: 3 -->
   ```console
   $ ckptstore show nothing
   ```

```python
assert x == 1
Path = x + 1
```

```text
not run
```
"""


def test_blocks_are_found() -> None:
    """Languages, lines, orders, continued commands and indented blocks are read as a reader would."""
    found = list(blocks(SAMPLE))
    assert [block.language for block in found] == ["python", "console", "python", "console", "python", "text"]
    assert [block.line for block in found] == [4, 8, 17, 24, 28, 33]
    assert list(commands(found[1])) == [(9, ["ls", "my runs"])]
    assert list(commands(found[3])) == [(24, ["show", "nothing"])]
    assert (found[2].needs, found[3].orders) == ("skip", {"exit": "3"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```\nx\n```\n", "no language"),
        ("~~~\nx\n~~~\n", "no language"),
        ("```bash\nls\n```\n", "'bash'"),
        ("```python\nx\n", "does not end"),
        ("<!-- test: skip -->\n```python\n```\n", "unknown order"),
        ("<!-- test: slow -->\n```python\n```\n", "unknown order"),
        ("<!-- exit: 3 -->\nWords.\n", "belongs to no block"),
        ("```console\n$ ckptstore ls runs | head\n```\n", "plain commands"),
        ("```console\n$ ckptstore ls runs > out\n```\n", "plain commands"),
    ],
)
def test_untestable_documents_are_refused(text: str, expected: str) -> None:
    """A block that would silently not be run is an error that says the line."""
    with pytest.raises(DocumentError, match=r"line \d.*" + expected):
        [list(commands(block)) for block in blocks(text)]


def test_runner_shares_folder_and_namespace(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one document follow on each other, and a failing one shows the document's line."""
    folder = tmp_path / "work"
    folder.mkdir()
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("```python\nopen('f', 'w').close()\nx = 1\n```\n\n```python\nopen('f').close()\nx += 1\n```\n")
    bad.write_text("# Words\n\n```python\nx = 1\n\n1 / 0\n```\n")
    assert run(good, folder, request, monkeypatch) == 2
    assert os.listdir(folder) == ["f"]
    with pytest.raises(ZeroDivisionError) as caught:
        run(bad, folder, request, monkeypatch)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno) == (bad, 5)  # lineno counts from 0
