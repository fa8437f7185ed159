"""``mirror`` and ``cp``: tables, JSON, exit codes; and a mirror that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.cli._copies import chosen_epochs, rate
from ckptstore.errors import InvalidArgumentError
from ckptstore.stores import LocalStore
from tests.cli.conftest import Run, chunks_of, flip
from tests.repository.helpers import assert_no_debris, assert_same

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "bytes_a_second"),
    [
        ("50MB/s", 50e6),
        ("50MBps", 50e6),
        ("1.5 GiB/s", 1.5 * 2**30),
        ("20MiB", 20 * 2**20),
        ("400Mbit/s", 50e6),
        ("8kbit/s", 1000.0),
        ("10B/s", 10.0),
        (None, None),
    ],
)
def test_rates(text: str | None, bytes_a_second: float | None) -> None:
    """Bytes and bits, decimal and binary."""
    assert rate(text) == bytes_a_second


@pytest.mark.parametrize("text", ["", "fast", "-5MB/s", "5", "0MB/s", "5MB/h", "5XB/s", "inf B/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    """The message shows how to write one."""
    with pytest.raises(InvalidArgumentError, match="50MB/s"):
        rate(text)


def test_lists_of_epochs() -> None:
    """A range takes what is there; a number stands for itself."""
    there = [1, 2, 5, 9, 100]
    assert chosen_epochs(None, there) is None
    assert chosen_epochs("7", there) == [7]
    assert chosen_epochs("1, 2-9", there) == [1, 2, 5, 9]
    assert chosen_epochs("9-", there) == [9, 100]
    for text in ("", "a", "1-2-3", "-3", "1,,2"):
        with pytest.raises(InvalidArgumentError, match="names no epochs"):
            chosen_epochs(text, there)


def test_mirror(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """All epochs, then nothing; the JSON says the same; ``verify`` is content with the copy."""
    target = tmp_path / "two"
    first = run("mirror", state_repo, target)
    assert first.code == 0
    assert first.out.count("copied") == 4  # three epochs, and the sum
    again = run("mirror", state_repo, target, "--json")
    assert again.code == 0
    assert again.json["ok"] is True
    assert [(c["epoch"], c["outcome"]) for c in again.json["epochs"]] == [(1, "there"), (2, "there"), (3, "there")]
    assert again.json["bytes_sent"] == 0
    assert run("verify", target).code == 0
    assert "3 there already" in run("mirror", state_repo, target).out


def test_mirror_names_what_it_leaves_out(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """A quarantined epoch is not copied unless it is named, and that is said."""
    target = tmp_path / "two"
    assert run("mirror", state_repo, target, "--epochs", "9").code == 3
    assert not target.exists()
    with ckptstore.open(state_repo, create=False) as repo:
        repo.quarantine(2, "it diverged")
    assert "epoch 2 was left out: quarantined: it diverged" in run("mirror", state_repo, target).out
    planned = run("mirror", state_repo, target, "--dry-run", "--json").json
    assert planned["left_out"] == {"2": "it diverged"}
    assert planned["target"] == target.as_uri()
    named = run("mirror", state_repo, target, "--epochs", "2", "--json").json
    assert named["left_out"] == {}
    assert [copy["epoch"] for copy in named["epochs"]] == [2]


def test_mirror_dry_run(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """It says what would be copied, and writes nothing: not even the folder."""
    target = tmp_path / "two"
    planned = run("mirror", state_repo, target, "--dry-run", "--json")
    assert planned.code == 0
    assert planned.json["dry_run"] is True
    assert [(c["epoch"], c["outcome"]) for c in planned.json["epochs"]] == [(1, "copied"), (2, "copied"), (3, "copied")]
    assert not target.exists()
    assert run("mirror", state_repo, target, "--epochs", "2").code == 0
    assert "2 to copy, 1 there already" in run("mirror", state_repo, target, "--dry-run").out
    with ckptstore.open(target, create=False) as repo:
        assert repo.epochs() == [2]


def test_mirror_tells_of_pins(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """Those that it takes along, and in a dry run those that it would."""
    assert run("pin", state_repo, 2, "--reason", "the paper").code == 0
    line = ("mirror", state_repo, tmp_path / "two")
    assert "epoch 2 would be pinned there too: the paper" in run(*line, "--dry-run").out
    assert not (tmp_path / "two").exists()
    assert run(*line, "--json").json["pins"] == {"2": "the paper"}
    assert run(*line, "--json").json["pins"] == {}
    assert run("unpin", tmp_path / "two", 2).code == 0
    assert "epoch 2 is now pinned there too: the paper" in run(*line).out


def test_mirror_of_some(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """``--epochs`` chooses; a number that is not there is exit code 3, and then no target is made."""
    missing = run("mirror", state_repo, tmp_path / "two", "--epochs", "2,7", "--json")
    assert missing.code == 3
    assert "no epoch 7" in missing.err
    result = run("mirror", state_repo, tmp_path / "two", "--epochs", "2-7", "--limit", "1GB/s", "--json")
    assert [c["epoch"] for c in result.json["epochs"]] == [2, 3]
    kept = run("mirror", state_repo, tmp_path / "kept", "--keep", "KeepLast(1) | KeepEvery(2)", "--json")
    assert [c["epoch"] for c in kept.json["epochs"]] == [2, 3]
    assert run("mirror", state_repo, tmp_path / "two", "--keep", "KeepAll").code == 1
    assert run("mirror", state_repo, tmp_path / "two", "--limit", "fast").code == 1
    assert run("mirror", tmp_path / "nowhere", tmp_path / "three").code == 3
    assert not (tmp_path / "three").exists()


def test_mirror_reports_damage_and_conflicts(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """Damage in the source is exit code 4 and names the object, another content of the target's own is 1."""
    target = tmp_path / "two"
    with ckptstore.open(target) as repo:
        repo.save(1, {"mine": np.arange(3)})
    conflict = run("mirror", state_repo, target)
    assert conflict.code == 1
    assert "epoch of its own" in conflict.out
    chunk = chunks_of(state_repo, 3)[0]
    flip(chunk)
    with ckptstore.open(target) as repo:
        repo.delete(3)
    damaged = run("mirror", state_repo, target, "--json")
    assert damaged.code == 4
    assert {c["epoch"]: c["outcome"] for c in damaged.json["epochs"]} == {1: "conflict", 2: "there", 3: "damaged"}
    assert damaged.json["epochs"][2]["key"].endswith(chunk.name)
    assert "1 damaged in the source" in run("mirror", state_repo, target).out
    with ckptstore.open(target) as repo:
        assert repo.epochs() == [1, 2]


def test_cp(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """One epoch; it is there, it is another, it is damaged, there is none."""
    target = tmp_path / "two"
    assert run("cp", state_repo, target, 9).code == 3
    assert not target.exists()
    result = run("cp", state_repo, target, 2, "--json")
    assert (result.code, result.json["outcome"], result.json["epoch"]) == (0, "copied", 2)
    assert "already" in run("cp", state_repo, target, 2).out
    with ckptstore.open(target) as repo:
        repo.save(2, {"mine": np.arange(3)}, replace=True)
        repo.save(1, {"mine": np.arange(3)})
    refused = run("cp", state_repo, target, 1)
    assert refused.code == 1
    assert "use --replace" in refused.err
    assert run("cp", state_repo, target, 1, "--replace").code == 0
    with ckptstore.open(target) as two, ckptstore.open(state_repo) as one:
        assert_same(one.checkpoint(1).load(), two.checkpoint(1).load())
    flip(chunks_of(state_repo, 3)[0])
    damaged = run("cp", state_repo, target, 3)
    assert damaged.code == 4
    assert "digest" in damaged.err or "damaged" in damaged.err


def test_a_killed_mirror_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    """SIGKILL in the middle of an epoch: nothing half is there, and only what is missing is sent."""
    source, target = tmp_path / "one", tmp_path / "two"
    rng = np.random.default_rng(5)
    with ckptstore.open(source, chunk_size=64 * 1024, codec="raw") as repo:
        for epoch in (1, 2):
            repo.save(epoch, {"model": {"w": rng.integers(0, 256, 40 * 64 * 1024, dtype=np.uint8)}})
    # 2.6 MB an epoch at 1 MB/s: it is still at the first when a quarter of that is there.
    line = [sys.executable, "-m", "ckptstore.cli", "mirror", str(source), str(target), "--limit", "1MB/s"]
    process = subprocess.Popen(line, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    try:
        while sum("." not in path.name for path in target.glob("attempts/*/chunks/*")) < 10:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with ckptstore.open(target) as repo:
        assert repo.epochs() == []
    left = {path.name for path in target.glob("attempts/*/chunks/*") if "." not in path.name}
    assert 10 <= len(left) < 40
    result = run("mirror", source, target, "--json")
    assert result.code == 0
    older, newer = result.json["epochs"]
    assert newer["bytes_reused"] == len(left) * 64 * 1024
    assert newer["bytes_sent"] < (41 - len(left)) * 64 * 1024 + 16_384
    assert older["bytes_reused"] == 0
    with ckptstore.open(source) as one, ckptstore.open(target) as two:
        assert two.epochs() == [1, 2]
        for epoch in (1, 2):
            assert_same(one.checkpoint(epoch).load(), two.checkpoint(epoch).load())
    assert run("verify", target).code == 0
    assert_no_debris(LocalStore(str(target)))
