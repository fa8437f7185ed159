"""Ratio and speed of the codec, one thread, beside memcpy: ``python benchmarks/codec.py [MiB]``.

Speeds are CPU time of the best of three runs, in MB of raw bytes a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore import codecs

Array = npt.NDArray[Any]


def datasets(nbytes: int) -> Iterator[tuple[str, Array, int]]:
    """Name, array and item size of states like those of a training run."""
    rng = np.random.default_rng(7)
    n = nbytes // 4
    scales = rng.choice([0.01, 0.02, 0.03, 0.05, 0.3], 32).repeat(-(-n // 32))[:n]
    weights = (rng.standard_normal(n) * scales).astype(np.float32)
    moments = (rng.standard_normal(n) * np.exp(rng.standard_normal(n) * 1.5 - 9)).astype(np.float32)
    rows = moments[: n // 256 * 256].reshape(-1, 256).copy()
    rows[rng.random(len(rows)) < 0.7] = 0
    yield "fp32 weights", weights, 4
    yield "Adam exp_avg", moments, 4
    yield "Adam exp_avg_sq", moments * moments, 4
    yield "bf16 weights", (weights.view(np.uint32) >> 16).astype(np.uint16), 2
    yield "bf16 in fp32", weights.view(np.uint32) >> 16 << 16, 4
    yield "sparse rows", rows, 4
    yield "sparse elements", np.where(rng.random(n) < 0.9, np.float32(0), weights), 4
    yield "int64 tokens", rng.integers(0, 50_000, n // 2), 8
    yield "zeros", np.zeros(n, np.float32), 4
    yield "random bytes", rng.integers(0, 256, nbytes, np.uint8), 1


def speed(nbytes: int, work: Callable[..., object], *args: object) -> float:
    """MB/s of CPU time, the best of three."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        work(*args)
        best = min(best, time.process_time() - start)
    return nbytes / max(best, 1e-9) / 1e6


def report(nbytes: int) -> None:
    """Print one line for each dataset and method."""
    key = "benchmark"
    print(f"{'data':16} {'method':8} {'width':>5} {'ratio':>9} {'encode':>8} {'decode':>8}   MB/s")
    for name, array, item_size in datasets(nbytes):
        raw = np.ascontiguousarray(array).data.cast("B")
        source = np.frombuffer(raw, np.uint8)
        out = np.zeros(len(raw), np.uint8)
        copy = speed(len(raw), np.copyto, out, source)
        print(f"{name:16} {'memcpy':8} {'':>5} {1:9.3f} {copy:8.0f} {copy:8.0f}")
        for method, width, mode in (("auto", item_size, "auto"), ("probe", 0, "auto"), ("max", item_size, "max")):
            frame = codecs.encode(raw, width, mode)
            put = speed(len(raw), codecs.encode, raw, width, mode)
            get = speed(len(raw), codecs.decode, frame, out.data, len(raw), key)
            if not np.array_equal(out, source):
                raise AssertionError(f"{name}, {method}: decoded other bytes")
            print(f"{'':16} {method:8} {frame[6]:5} {len(raw) / len(frame):9.3f} {put:8.0f} {get:8.0f}")


if __name__ == "__main__":
    report((int(sys.argv[1]) if len(sys.argv) > 1 else 16) * 1024 * 1024)
