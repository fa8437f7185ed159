"""``ckptstore report``: a page on what is there, what is broken and what can go."""

from __future__ import annotations

import os
import shlex
import uuid
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ckptstore.cli._common import (
    Debug,
    Json,
    Options,
    Unsafe,
    Url,
    open_repository,
    out,
    print_json,
    progress_bar,
)
from ckptstore.cli._format import clean, size, to_json
from ckptstore.cli.prune import Keep, Records, Run, policy_of
from ckptstore.errors import InvalidArgumentError
from ckptstore.placing import writing
from ckptstore.report import as_dict, collect, page

_Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Where to write the page (HTML)."),
]
_Verify = Annotated[
    str | None,
    typer.Option(
        "--verify",
        metavar="HOW",
        show_default=False,
        help="Check every epoch, not only the newest: quick (names and sizes), a share such as 5% (of the chunks), or "
        "full (every byte).",
    ),
]


def report(
    url: Url,
    output: _Output = None,
    keep: Keep = None,
    record: Records = None,
    run: Run = "",
    verify: _Verify = None,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Write a page on a repository: is the newest epoch good, what takes the space, and what can go.

    One file without scripts, that needs no network: epochs on a time line, metrics, sizes, reuse, health, what a prune
    by --keep or --record would do and why, pins, the largest arrays. Nothing is written to the repository. With --json
    the same facts go to stdout. The exit code is 0 also where something is damaged: the page says so.

    Example: [cyan]ckptstore report s3://runs/llama -o report.html --keep 'KeepLast(5)'[/cyan]
    """
    if output is None and not json:
        raise InvalidArgumentError("say where the page is to go: -o report.html, or --json")
    given = keep is not None or bool(record)
    policy = policy_of(keep, record) if given else None
    words = [f"--keep {shlex.quote(keep)}"] if keep is not None else []
    words += [f"--record {shlex.quote(pair)}" for pair in record or ()]
    check = _check(verify)
    opened = open_repository(url, option, unsafe, create=False, run=run)
    with opened as repo, progress_bar("counting", counting=True) as move:
        facts = collect(repo, policy, policy_text=" ".join(words), check=check, progress=move)
    found = as_dict(facts)
    if output is not None:
        text = page(facts).encode()
        _write(output, text)
        if not json:
            out().print(Text(clean(found["verdict"]["text"])))
            out().print(Text(f"{clean(str(output))}: {size(len(text))}"))
    if json:
        print_json(to_json(found))


def _check(verify: str | None) -> float | None:
    """None: only the newest epoch. 0: names and sizes of all. More: so much of their chunks."""
    if verify is None or verify == "quick":
        return None if verify is None else 0.0
    if verify == "full":
        return 1.0
    try:
        share = float(verify.removesuffix("%")) / (100 if verify.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidArgumentError(f"--verify {clean(verify)!r}: use quick, full, or a share such as 5%")
    return share


def _write(path: Path, text: bytes) -> None:
    """Complete, or as it was: a browser may be looking at it, and the disk may be full."""
    if not path.parent.is_dir() or path.is_dir():
        raise InvalidArgumentError(
            f"{clean(str(path))} is no file that can be written: name one in a folder that exists"
        )
    path = Path(os.path.realpath(path))  # /dev/stdout is a link too, and must stay one
    with writing(path):
        if path.exists() and not path.is_file():  # a terminal, a pipe
            path.write_bytes(text)
            return
        scratch = path.with_name(f".{uuid.uuid4().hex}.part")
        try:
            scratch.write_bytes(text)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
