"""Where the time of a save and a restore goes: ``python -m benchmarks.stages``.

CPU milliseconds of one core for 256 MiB of fp32 numbers such as weights are, in chunks of 32 MiB, stage by stage, each
alone. What the goals compare with (a copy in memory, a read from the page cache, a write with fsync) stands beside
them: a stage that takes longer than its limit cannot be hidden by any order of the others.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ckptstore import codecs
from ckptstore.manifest import hasher
from ckptstore.planes import BLOCK, merge, split

CHUNK = 32 << 20
TIMES = 256 // 32
ROUNDS = 9


def cpu(stage: Callable[[], object]) -> float:
    """Median CPU milliseconds for all chunks."""
    stage()
    taken = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        stage()
        taken.append(time.process_time() - begin)
    return statistics.median(taken) * 1e3 * TIMES


def stages(folder: Path) -> dict[str, Callable[[], object]]:
    """Each stage on one chunk."""
    rng = np.random.default_rng(0)
    raw = (rng.standard_normal(CHUNK // 4, np.float32) * np.float32(0.02)).view(np.uint8)
    room, back, own = np.empty(codecs.room_for(CHUNK), np.uint8), np.empty(CHUNK, np.uint8), np.empty(BLOCK, np.uint8)
    length = CHUNK // 4
    planes = [room[i * length : (i + 1) * length] for i in range(4)]
    exponents = raw[3::4].copy()
    packed = codecs._tools.entropy.compress(exponents.data)
    frame = codecs.encode(raw.data, 4)
    path = folder / "chunk"

    def split_blocks() -> None:
        for at in range(0, CHUNK, BLOCK):
            np.copyto(own, raw[at : at + BLOCK])
            split(own, [plane[at // 4 : (at + BLOCK) // 4] for plane in planes])

    def write() -> None:
        with open(path, "wb", buffering=0) as file:
            file.write(raw.data)
            os.fsync(file.fileno())

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            file.readinto(back.data)

    def digest() -> None:
        hasher().update(raw.data)

    return {
        "limit: copy in memory": lambda: np.copyto(back, raw),
        "limit: write + fsync": write,
        "limit: read from the page cache": read,
        "digest (BLAKE3)": digest,
        "save: copy and split into planes": split_blocks,
        "save: choose coders by samples": lambda: codecs._plan(raw, 4, "auto"),
        "save: entropy-code one plane of four": lambda: codecs._tools.entropy.compress(exponents.data),
        "save: all of it": lambda: codecs.encode_into(raw.data, 4, "auto", room.data, hasher().update),
        "restore: decode one plane of four": lambda: codecs._tools.decompressor.decompress(packed),
        "restore: merge planes": lambda: merge(planes, back),
        "restore: all of it": lambda: codecs.decode(frame, back.data, CHUNK, "chunk", hasher().update),
    }


def main() -> None:
    """Measure and print."""
    view = Table(title="CPU of one core for 256 MiB of fp32 weights", title_justify="left")
    view.add_column("stage")
    view.add_column("ms", justify="right")
    view.add_column("GB/s", justify="right")
    with tempfile.TemporaryDirectory(prefix="ckptstore-bench-") as folder:
        for name, stage in stages(Path(folder)).items():
            taken = cpu(stage)
            view.add_row(name, f"{taken:.0f}", f"{CHUNK * TIMES / taken / 1e6:.1f}")
    Console(width=100).print(view)


if __name__ == "__main__":
    main()
