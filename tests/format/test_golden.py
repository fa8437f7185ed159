"""Repositories written by every released format stay readable, bit for bit."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ckptstore

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
if TYPE_CHECKING:
    from tests.format.make_golden import golden_arrays, golden_shards, golden_state, in_pieces
else:
    from make_golden import (  # importlib mode: tests are no package
        golden_arrays,
        golden_shards,
        golden_state,
        in_pieces,
    )

VERSIONS = sorted(path.name for path in (HERE / "golden").iterdir())


def same(found: Any, expected: Any) -> bool:
    """Equal in type, order, dtype, shape and bits."""
    if isinstance(expected, np.ndarray):
        return (
            isinstance(found, np.ndarray)
            and (found.dtype, found.shape) == (expected.dtype, expected.shape)
            and found.tobytes() == expected.tobytes()
        )
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def check_shards(checkpoint: ckptstore.Checkpoint, expected: dict[str, Any]) -> None:
    """Sharded arrays load whole, and into other pieces."""
    assert same(checkpoint.load("shards"), expected)
    fresh = {name: np.zeros_like(array) for name, array in expected.items()}
    checkpoint.load("shards", into={name: in_pieces(array, 1, 3) for name, array in fresh.items()})
    assert same(fresh, expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_repository_loads_bit_for_bit(version: str, tmp_path: Path) -> None:
    """P7: every epoch of a golden repository is intact and loads as it was saved."""
    root = tmp_path / "repo"
    shutil.copytree(HERE / "golden" / version, root)
    with ckptstore.open(root, create=False) as repo:
        assert repo.epochs() == [1, 2]
        assert repo.verify().ok
        for epoch in (1, 2):
            checkpoint = repo.checkpoint(epoch)
            for name, state in golden_state(epoch).items():
                assert same(checkpoint.load(name), state)
            if version != "v1":
                check_shards(checkpoint, golden_arrays(epoch))
            assert checkpoint.load("notes") == b"hello, golden\n" * 100
            assert checkpoint.metadata["loss"] == 0.5 / epoch
            assert math.isnan(checkpoint.metadata["nan"])


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_repository_can_be_continued(version: str, tmp_path: Path) -> None:
    """A new epoch can be saved on top of a golden repository and reuses what has not changed."""
    root = tmp_path / "repo"
    shutil.copytree(HERE / "golden" / version, root)
    with ckptstore.open(root, chunk_size=64 * 1024) as repo:
        shards = {} if version == "v1" else {"shards": golden_shards(2)}
        report = repo.save(3, {**golden_state(2), **shards}).report
        assert report is not None
        assert report.bytes_reused == report.bytes_state
        assert repo.verify().ok
