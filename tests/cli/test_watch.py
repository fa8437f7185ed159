"""``watch`` and ``import``: what they save, say and exit with, and what ``restore`` makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Run
from tests.watching.fake_burn import whole_file

NAMES = ("model", "optim", "scheduler")
QUICK = ("--once", "--quiet", "0.05", "--interval", "0.01")


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """Two epochs as burn leaves them."""
    folder = tmp_path / "artifacts" / "checkpoint"
    folder.mkdir(parents=True)
    for epoch in (1, 2):
        for name in NAMES:
            (folder / f"{name}-{epoch}.bpk").write_bytes(whole_file(1, epoch, name, "bpk"))
    return tmp_path / "artifacts"


def test_import_and_restore(run: Run, artifacts: Path, tmp_path: Path) -> None:
    """Dry run, import, import again, and back: the same names below the folder, the same bytes."""
    place = tmp_path / "repo"
    dry = run("import", artifacts, place, "--dry-run")
    assert (dry.code, dry.out.count("due  3 files")) == (0, 2)
    assert not place.exists()
    done = run("import", artifacts, place)
    assert (done.code, done.out.count("saved")) == (0, 3)
    again = run("import", artifacts, place, "--json").json
    assert [(e["epoch"], e["kind"]) for e in again["epochs"]] == [(1, "there"), (2, "there")]
    assert again["ok"]
    assert again["epochs"][0]["files"]["optimizer"] == "checkpoint/optim-1.bpk"
    assert "ckptstore.files" not in run("ls", place).out
    back = tmp_path / "back"
    restored = run("restore", place, "--epoch", 1, "--to", back, "--json")
    assert restored.code == 0
    assert len(restored.json["files"]) == 3
    assert sorted(p.relative_to(back).as_posix() for p in back.rglob("*") if p.is_file()) == sorted(
        f"checkpoint/{name}-1.bpk" for name in NAMES
    )
    for name in NAMES:
        assert (back / "checkpoint" / f"{name}-1.bpk").read_bytes() == whole_file(1, 1, name, "bpk")
    assert run("restore", place, "--epoch", 1, "--to", back).code == 1  # they exist
    assert run("restore", place, "--epoch", 1, "--to", back, "--force").code == 0


def test_import_of_what_is_not_whole(run: Run, artifacts: Path, tmp_path: Path) -> None:
    """The others are imported; the exit code and the message name the file."""
    os.truncate(artifacts / "checkpoint" / "optim-2.bpk", 1000)
    result = run("import", artifacts, tmp_path / "repo")
    assert result.code == 4
    assert "checkpoint/optim-2.bpk is not whole" in result.out
    (artifacts / "checkpoint" / "optim-2.bpk").unlink()
    result = run("import", artifacts, tmp_path / "repo")
    assert result.code == 1
    assert "missing: optimizer (--need says" in result.out
    with ckptstore.open(tmp_path / "repo") as repo:
        assert repo.epochs() == [1]
    assert run("import", artifacts, tmp_path / "repo", "--need", "model").code == 0


def test_import_errors(run: Run, artifacts: Path, tmp_path: Path) -> None:
    """One line each, and the exit code of its kind."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.mpk").write_bytes(b"\xc0")
    for arguments, code, text in [
        ((tmp_path / "none",), 3, "does not exist"),
        ((tmp_path / "empty",), 3, "no checkpoint"),
        ((artifacts, "--epoch", "9"), 3, "no epoch 9"),
        ((artifacts, "--layout", "keras"), 1, "layout must be"),
        ((artifacts, "--pattern", "x"), 1, "epoch"),
        ((artifacts, "--as", "pickles"), 1, "--as must be"),
        ((tmp_path / "weights.mpk",), 1, "which epoch"),
    ]:
        result = run("import", arguments[0], tmp_path / "repo", *arguments[1:])
        assert (result.code, result.out) == (code, "")
        assert text in result.err
        assert result.err.count("\n") == 1


def test_watch_once(run: Run, artifacts: Path, tmp_path: Path) -> None:
    """A line for each epoch; as JSON, a line for each change."""
    place = tmp_path / "repo"
    result = run("watch", artifacts, place, *QUICK)
    assert result.code == 0
    assert [line.split("  ")[0] for line in result.out.splitlines()] == ["epoch 1: saved", "epoch 2: saved"]
    os.truncate(artifacts / "checkpoint" / "model-2.bpk", 1000)
    lines = [json.loads(line) for line in run("watch", artifacts, place, *QUICK, "--json").out.splitlines()]
    assert (lines[0]["epoch"], lines[0]["kind"]) == (1, "there")
    assert (lines[-1]["epoch"], lines[-1]["kind"]) == (2, "waiting")
    assert "written again" in lines[-1]["reason"]
    assert run("watch", tmp_path / "none", place, *QUICK).code == 3
    assert run("watch", artifacts, place, "--quiet", "-1", "--once").code == 1


def test_watch_keeps_what_the_policy_says(run: Run, artifacts: Path, tmp_path: Path) -> None:
    """``--keep`` prunes after each save."""
    assert run("watch", artifacts, tmp_path / "repo", *QUICK, "--keep", "KeepLast(1)").code == 0
    with ckptstore.open(tmp_path / "repo") as repo:
        assert repo.epochs() == [2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end(artifacts: Path, tmp_path: Path, number: int) -> None:
    """What is finished is committed before it ends, with exit code 0."""
    command = [sys.executable, "-m", "ckptstore.cli", "watch", str(artifacts), str(tmp_path / "repo")]
    command += ["--quiet", "0.5", "--interval", "0.1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stderr is not None
        assert "watching" in watcher.stderr.readline()
        time.sleep(0.1)
        watcher.send_signal(number)
        out, err = watcher.communicate(timeout=60)
    assert watcher.returncode == 0, err
    assert "epoch 2: saved" in out
    assert "ended: 2 saved" in err
