"""Every command: its ``--json`` is one strict document, and its error one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Run
from tests.cli.test_commands import COMMANDS

ROOT = Path(__file__).parents[2]

# A good run of each: on {r}, a repository of states with the epochs 1 to 3, and {f}, one of files with 1 and 2; {n} is
# a place where nothing is yet, {t} a folder with the files of a trainer.
GOOD = {
    "ls": "{r}",
    "show": "{r} 1",
    "save": "{n} --epoch 1 model={t}/model-1.npz",
    "restore": "{f} --epoch 1 --to {t}/out",
    "rm": "{r} 1 --yes",
    "verify": "{r}",
    "plan": "{r} --keep KeepLast(1)",
    "prune": "{r} --keep KeepLast(1) --yes",
    "gc": "{r} --yes",
    "pin": "{r} 1 --reason why",
    "unpin": "{r} 1",
    "scrub": "{r}",
    "repair": "{r} --yes",
    "quarantine": "{r} 1 --reason why",
    "mirror": "{r} {n}",
    "cp": "{r} {n} 1",
    "tiers": "{r} {f}",
    "du": "{r}",
    "diff": "{r} 1 2",
    "import": "{t} {n}",
    "watch": "{t} {n} --once --quiet 0",
    "export": "{r} 1 --to {t}/out",
    "report": "{r} -o {t}/report.html",
    "preflight": "{r}",
    "doctor": "{r} --no-speed",
}
ELSEWHERE = {"bench": "tests/cli/test_bench.py", "demo": "tests/cli/test_demo.py"}  # they take their time
MADE = {"save", "bench", "demo", "doctor", "import", "preflight", "watch"}  # a place that is not there is no error


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """The folder of a trainer that has finished epoch 1."""
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("model", "optim", "scheduler"):
        np.savez(folder / f"{name}-1.npz", w=np.arange(3))
    return folder


def test_none_is_left_out() -> None:
    """A new command needs a line here, or tests of its own that take their time."""
    assert set(GOOD) | set(ELSEWHERE) == set(COMMANDS)
    for command, path in ELSEWHERE.items():
        text = (ROOT / path).read_text("utf-8")
        assert f'"{command}"' in text
        assert '"--json"' in text


@pytest.mark.parametrize("command", GOOD)
def test_json(run: Run, command: str, tmp_path: Path, state_repo: Path, file_repo: Path, trainer: Path) -> None:
    """Exit code 0, and nothing but one JSON object on stdout."""
    line = GOOD[command].format(r=state_repo, f=file_repo, n=tmp_path / "new", t=trainer)
    done = run(command, *line.split(), "--json")
    assert done.code == 0, done.err
    assert isinstance(done.json, dict)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in MADE])
def test_a_place_that_is_not_there(run: Run, command: str, tmp_path: Path) -> None:
    """Exit code 3 and one line on stderr that names it, also with ``--json``; nothing is made."""
    gone = tmp_path / "gone"
    line = GOOD[command].format(r=gone, f=gone, n=tmp_path / "new", t=tmp_path)
    for more in ([], ["--json"]):
        done = run(command, *line.split(), *more)
        assert (done.code, done.out) == (3, ""), done.err
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1
        assert str(gone) in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_url_of_no_store(run: Run, command: str, tmp_path: Path, trainer: Path) -> None:
    """Exit code 1, and one line that says which URLs there are; nothing is made."""
    bad = "gopher://bucket/run"
    lines = {"demo": f"--url {bad}", "bench": bad}
    line = lines.get(command) or GOOD[command].format(r=bad, f=bad, n=bad, t=trainer)
    before = sorted(tmp_path.rglob("*"))
    done = run(command, *line.split(), "--json")
    assert (done.code, done.out) == (1, ""), done.err
    assert done.err.startswith("error: no store for gopher:// URLs: use ")
    assert done.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
