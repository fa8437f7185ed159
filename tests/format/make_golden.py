"""Writes the golden repository of the current format. Run once per format version, by hand; never over an old one.

python tests/format/make_golden.py tests/format/golden/v2
"""

from __future__ import annotations

import shutil
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ckptstore


def golden_state(epoch: int) -> dict[str, Any]:
    """The state of an epoch: the same values on every machine (no random generator, no float rounding)."""
    ramp = np.arange(40_000, dtype=np.uint32) * np.uint32(2_654_435_761) + np.uint32(epoch)
    return {
        "model": OrderedDict(
            w=(ramp >> 9 | 0x3F000000).view("f4").reshape(200, 200),
            bf16=np.arange(64, dtype=np.uint16).view(ml_dtypes.bfloat16),
            empty=np.zeros((0, 3), "f8"),
            scalar=np.array(7, "i8"),
            big_endian=np.arange(5, dtype=">f4"),
            flags=np.array([True, False]),
        ),
        "optimizer": {
            "state": {0: {"step": epoch, "exp_avg": np.full(1000, -0.0, "f4")}, (1, "x"): None},
            "plain": [1, 2.5, float("inf"), -(2**80), b"bytes", "text/with.é", (1, [2]), {3}, 1 + 2j, np.float64(0.1)],
        },
    }


def golden_arrays(epoch: int) -> dict[str, Any]:
    """The arrays of the record "shards", which is in format 2 and later."""
    ramp = np.arange(3000, dtype=np.uint32) * np.uint32(2_654_435_761) + np.uint32(epoch)
    grid = (ramp >> 9 | 0x3F000000).view("f4").reshape(50, 60)
    return {
        "rows": grid,
        "columns": grid * 2,
        "bf16": np.arange(96, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(4, 4, 6),
    }


def in_pieces(array: Any, axis: int, *borders: int) -> ckptstore.ShardedArray:
    """An array cut along an axis."""
    parts = np.split(array, borders, axis)
    offsets = [tuple(at if k == axis else 0 for k in range(array.ndim)) for at in (0, *borders)]
    return ckptstore.ShardedArray(array.shape, array.dtype, list(zip(offsets, parts, strict=True)))


def golden_shards(epoch: int) -> dict[str, Any]:
    """The record "shards" as it is saved."""
    found = golden_arrays(epoch)
    return {
        "rows": in_pieces(found["rows"], 0, 10, 35),
        "columns": in_pieces(found["columns"], 1, 7, 20, 59),
        "bf16": in_pieces(found["bf16"], 2, 5),
    }


def main() -> None:
    target = Path(sys.argv[1])
    target.parent.mkdir(exist_ok=True)
    source = target.parent / "hello.txt"
    source.write_bytes(b"hello, golden\n" * 100)
    with ckptstore.open(target, chunk_size=64 * 1024) as repo:
        for epoch in (1, 2):
            with repo.begin(epoch, metadata={"loss": 0.5 / epoch, "nan": float("nan")}) as txn:
                for name, state in golden_state(epoch).items():
                    txn.write(name, state)
                txn.write("shards", golden_shards(epoch))
                txn.write_file("notes", source)
    source.unlink()
    shutil.rmtree(target / "reserve", ignore_errors=True)  # means nothing


if __name__ == "__main__":
    main()
