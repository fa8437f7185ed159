"""Errors from the kernel itself in a save to a folder: a sample of all cases. See ``strace.py``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ckptstore
from tests.mounts.strace import KEEP, Saver, missing, run_matrix, state

if TYPE_CHECKING:
    from tests.conftest import Count

CASES = 40


@pytest.fixture(scope="module", autouse=True)
def _strace() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def saver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saver]:
    with Saver(tmp_path_factory.mktemp("saver")) as saver:
        yield saver


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, where syncs cost nothing."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


def test_a_sample(memory: Path, count: Count) -> None:
    """Whatever call fails with whatever error: saved, or a typed error; earlier epochs load; the next save works."""
    counts = run_matrix(memory, limit=CASES, seed=7)
    assert (counts.cases, counts.lost, counts.problems) == (CASES, 0, [])
    assert counts.hit > CASES // 3
    assert counts.saved > CASES // 4
    assert counts.typed
    for name in ("cases", "hit", "saved"):
        count(f"system calls that failed: {name}", getattr(counts, name))


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("?link,?linkat:error=ENOSPC:when=1+", "StoreFullError"),
        ("fsync:error=EDQUOT:when=1+", "StoreFullError"),
        ("write:error=EIO:when=1+", "RetriesExhaustedError"),
        ("write:error=EIO:when=2+3", "saved"),
        ("?link,?linkat:error=ESTALE:when=1", "saved"),
        ("?unlink,?unlinkat:error=EBUSY:when=1+", "saved"),
        ("?rmdir,?unlinkat:error=ENOTEMPTY:when=200", "saved"),
        ("?mkdir,?mkdirat:error=EACCES:when=1+", "AccessError"),
        ("close:error=EINTR:when=5", "saved"),
    ],
)
def test_named_faults(saver: Saver, memory: Path, fault: str, outcome: str) -> None:
    """What each kind of fault comes to."""
    root = memory / "run"
    for epoch in range(1, KEEP + 1):
        assert saver.save(root, epoch) == ("saved", True)
    with saver.traced(f"trace={fault.partition(':')[0]}", f"inject={fault}"):
        assert saver.save(root, KEEP + 1) == (outcome, True)
    assert saver.save(root, KEEP + 2) == ("saved", True)
    with ckptstore.open(root) as repo:
        for epoch in repo.epochs():
            loaded = repo.checkpoint(epoch).load()
            np.testing.assert_array_equal(loaded["model"]["new"], state(epoch)["model"]["new"])


def test_a_lost_case_is_noticed(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix fails where an epoch is another one, or gone, than the one that was saved."""
    monkeypatch.setattr("tests.mounts.strace.state", lambda epoch: {**state(epoch), "optimizer": {"old": 0}})
    counts = run_matrix(memory, limit=3, strict=False)
    assert counts.lost == counts.cases == 3
    assert "is another one" in counts.problems[0]
    with pytest.raises(AssertionError, match="is another one"):
        run_matrix(memory / "again", limit=1)
