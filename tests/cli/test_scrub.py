"""``scrub`` and ``verify --resume``: what they read, show and remember."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore import keys
from ckptstore.cli._common import seconds_of
from ckptstore.cli.scrub import size_of
from ckptstore.errors import InvalidArgumentError
from tests.cli.conftest import Run, chunks_of, flip

ROOT = Path(__file__).parents[2]


def test_scrub(run: Run, state_repo: Path) -> None:
    """A part at a time, until all is read; then nothing is left that is older."""
    first = run("scrub", state_repo, "--max-bytes", "1kB", "--older-than", "1d", "--json")
    assert (first.code, first.json["complete"], first.json["chunks_read"]) == (0, False, 1)
    assert "the next one goes on from here" in run("scrub", state_repo, "--max-bytes", "1kB", "--older-than", "1d").out
    rest = run("scrub", state_repo, "--older-than", "1d", "--json").json
    assert rest["complete"]
    assert rest["chunks_read"] == rest["chunks"] - 2
    last = run("scrub", state_repo, "--older-than", "1d")
    assert "0 of" in last.out
    assert "every chunk was read within the last" in last.out


def test_scrub_finds_damage(run: Run, state_repo: Path) -> None:
    """Exit code 4, the object and its epoch; with --quarantine the epoch is set aside."""
    victim = chunks_of(state_repo, 3)[0]
    flip(victim)
    result = run("scrub", state_repo, "--limit", "10GB/s", "--max-time", "1h")
    assert result.code == 4
    assert victim.name in result.out
    found = run("scrub", state_repo, "--older-than", "7d", "--max-bytes", "1B", "--quarantine", "--json")
    assert found.code == 4
    assert victim.name in found.json["damaged"][-1]["problems"][0]["key"]
    assert run("ls", state_repo, "--json").json["epochs"][-1]["quarantined"].startswith("damaged")
    resumed = run("verify", state_repo, "--resume")
    assert resumed.code == 4
    assert victim.name in resumed.out


@pytest.mark.parametrize("line", ["--max-bytes 5", "--max-bytes x", "--max-time 5x", "--older-than soon", "--limit 5"])
def test_scrub_refuses_nonsense(run: Run, state_repo: Path, line: str) -> None:
    """The message shows how to write it."""
    result = run("scrub", state_repo, *line.split())
    assert result.code == 1
    assert "use e.g." in result.err


def test_resume_stands_alone(run: Run, state_repo: Path) -> None:
    """It is for every byte of all epochs."""
    for more in (["--quick"], ["--sample", "5%"], ["--epoch", 1]):
        assert run("verify", state_repo, "--resume", *more).code == 1
    assert run("verify", state_repo, "--resume").code == 0


def test_sizes_and_times() -> None:
    """Decimal and binary sizes; seconds to days."""
    assert (size_of("200GB"), size_of("1.5 KiB"), size_of("7B")) == (200 * 10**9, 1536, 7)
    assert (seconds_of("90s"), seconds_of("1.5h"), seconds_of("7d")) == (90.0, 5400.0, 604_800.0)
    with pytest.raises(InvalidArgumentError):
        size_of("5 bananas")


def test_a_scrub_that_is_killed_goes_on(run: Run, state_repo: Path) -> None:
    """SIGKILL: what it noted counts, and a half-written note is none."""
    code = (
        "import sys, ckptstore.scrub as s; s._SAVE_SECONDS = 0.0; s._BATCH_CHUNKS = 1; "
        "from ckptstore.cli import main; main(sys.argv[1:])"
    )
    size = chunks_of(state_repo, 3)[0].stat().st_size
    process = subprocess.Popen(
        [sys.executable, "-c", code, "scrub", str(state_repo), "--limit", f"{size}B/s"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    note = state_repo / keys.CHECKED
    try:
        for _ in range(6000):
            if note.exists() or process.poll() is not None:
                break
            time.sleep(0.01)
        assert note.exists()
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    rest = run("scrub", state_repo, "--older-than", "1d", "--json").json
    assert rest["complete"]
    assert rest["chunks_read"] < rest["chunks"]
