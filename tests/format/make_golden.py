"""Writes the golden repository of the current format. Run once per format version, by hand; never over an old one.

python tests/format/make_golden.py tests/format/golden/v1
"""

from __future__ import annotations

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
                txn.write_file("notes", source)
    source.unlink()


if __name__ == "__main__":
    main()
