"""Scenes of disks that are full, of bytes or of files: whole saves, on real file systems of a few megabytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import StoreFullError
from tests.repository.helpers import assert_same

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

Mount = Callable[[str], Path]


def noise(seed: int, mib: float) -> dict[str, Any]:
    """What no codec makes smaller."""
    return {"m": {"w": np.random.default_rng(seed).integers(0, 256, int(mib * MIB), dtype=np.uint8)}}


def used(folder: Path) -> int:
    stat = os.statvfs(folder)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def test_a_save_that_does_not_fit(mount: Mount) -> None:
    """20, 21: lack of space is named, with its errno; the space comes back, the state and earlier epochs are as they
    were, and what fits is saved.
    """
    folder = mount("size=32m")
    with ckptstore.open(folder / "r", chunk_size=MIB) as repo:
        repo.save(1, noise(1, 10))
        before = used(folder)
        state, same = noise(2, 30), noise(2, 30)
        with pytest.raises(StoreFullError) as caught:
            repo.save(2, state)
        assert caught.value.errno == errno.ENOSPC
        assert str(folder) in str(caught.value)
        assert "MiB are needed" in str(caught.value)
        assert used(folder) < before + MIB
        assert_same(state, same)
        assert repo.epochs() == [1]
        assert_same(repo.checkpoint(1).load(), noise(1, 10))
        repo.save(2, noise(3, 5))
        assert repo.verify().ok


def test_the_last_save_of_a_run(mount: Mount) -> None:
    """21: where the oldest epochs may go to make room, as many do as are needed, and the last good one never."""
    folder = mount("size=26m")
    with ckptstore.open(folder / "r", chunk_size=MIB, on_full="oldest") as repo:
        for epoch in (1, 2):
            repo.save(epoch, noise(epoch, 8))
        repo.save(3, noise(3, 12))
        assert repo.epochs() == [2, 3]
        with pytest.raises(StoreFullError):
            repo.save(4, noise(4, 20))
        assert repo.epochs()[-1] == 3
        assert_same(repo.checkpoint(3).load(), noise(3, 12))
        assert repo.verify().ok
    folder = mount("size=26m")
    with ckptstore.open(folder / "r", chunk_size=MIB) as repo:  # by default no epoch goes that the policy keeps
        for epoch in (1, 2):
            repo.save(epoch, noise(epoch, 8))
        with pytest.raises(StoreFullError):
            repo.save(3, noise(3, 12))
        assert repo.epochs() == [1, 2]
        assert repo.verify().ok


def test_many_small_arrays_need_few_files(mount: Mount) -> None:
    """23: 20,000 tiny arrays and three of 8 MiB are a handful of files; a disk without room for more files says so."""
    state = {"m": {f"p{number}": np.full(4, number, np.float32) for number in range(20_000)}}
    state["m"] |= {f"big{number}": noise(number, 8)["m"]["w"] for number in range(3)}
    folder = mount("size=64m,nr_inodes=64")
    with ckptstore.open(folder / "r") as repo:
        repo.save(1, state)
        assert_same(repo.checkpoint(1).load(), state)
        assert sum(len(files) for _, _, files in os.walk(folder)) <= 8
    folder = mount("size=64m,nr_inodes=12")
    with pytest.raises(StoreFullError, match="inodes"), ckptstore.open(folder / "r", chunk_size=MIB) as repo:
        repo.save(1, state)


NOBODY_ASKS = """
import sys
import numpy as np
import ckptstore
repo = ckptstore.open(sys.argv[1], chunk_size=1 << 20)
state = {"m": {"w": np.random.default_rng(1).integers(0, 256, 8 << 20, dtype=np.uint8)}}
if sys.argv[2] == "with":
    with repo:
        repo.save_async(1, state)
else:
    repo.save_async(1, state)
"""


@pytest.mark.parametrize("leave", ["with", "without"])
def test_a_lost_save_is_never_a_success(mount: Mount, leave: str) -> None:
    """24: a background save onto a full disk that nobody asks about: its exit status says so."""
    folder = mount("size=4m")
    done = subprocess.run(
        [sys.executable, "-c", NOBODY_ASKS, str(folder / "r"), leave],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == (1 if leave == "with" else 120)
    assert "StoreFullError" in done.stderr
