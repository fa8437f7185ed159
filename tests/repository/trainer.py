"""The program that is killed: it resumes from ``latest()``, checks every bit, and saves epoch after epoch.

Started once, it forks a new trainer for each line of JSON on its standard input, so that a hundred kills do not cost a
hundred imports. Trainers report on standard output: ``resumed E``, ``begin E``, ``done E <bytes reused> <bytes sent>``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from functools import lru_cache
from typing import Any

import numpy as np
import s3fs  # noqa: F401  (before the fork: importing it takes longer than a round)

import ckptstore

PARTS = 4
PART_BYTES = 16 * 1024 * 1024
CHUNK_SIZE = 4 * 1024 * 1024


@lru_cache(maxsize=2 * PARTS)
def part(number: int, version: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """16 MiB that do not shrink, from its number and the epoch that last changed it."""
    noise = np.random.Generator(np.random.SFC64([number, version]))
    return np.frombuffer(noise.bytes(PART_BYTES), dtype=np.float32)


def content(epoch: int) -> dict[str, dict[str, Any]]:
    """The 64 MiB of an epoch. Half of it differs from the epoch before."""
    arrays = {f"p{number}": part(number, epoch - (epoch + number) % 2) for number in range(PARTS)}
    return {
        "model": {k: arrays[k] for k in ("p0", "p1")},
        "optim": {k: arrays[k] for k in ("p2", "p3")} | {"epoch": epoch},
    }


def is_content(epoch: int, state: dict[str, dict[str, Any]]) -> bool:
    """Whether a loaded state is that of the epoch, bit for bit."""
    wanted = content(epoch)
    if state.keys() != wanted.keys() or any(state[name].keys() != wanted[name].keys() for name in wanted):
        return False
    pairs = [(state[name][key], wanted[name][key]) for name in wanted for key in wanted[name]]
    return all(type(a) is type(b) and is_same(a, b) for a, b in pairs)


def is_same(a: Any, b: Any) -> bool:
    if not isinstance(a, np.ndarray):
        return bool(a == b)
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a.view(np.uint8), b.view(np.uint8))


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(job: dict[str, Any]) -> None:
    repo = ckptstore.open(job["url"], storage_options=job["options"], chunk_size=CHUNK_SIZE)
    latest = repo.latest()
    epoch = 0
    if latest is not None:
        epoch = latest.epoch
        if latest.skipped or not is_content(epoch, latest.load()):
            say("wrong", epoch, latest.skipped)
            return
    say("resumed", epoch)
    while True:
        epoch += 1
        state = content(epoch)
        say("begin", epoch)
        report = repo.save(epoch, state).report
        assert report is not None
        say("done", epoch, report.bytes_reused, report.bytes_sent)
        repo.prune(ckptstore.KeepLast(2), deep=False)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                train(json.loads(line))
            except BaseException:  # noqa: BLE001  (told to the parent, whatever it is)
                say("failed", traceback.format_exc().replace("\n", " | ")[-2000:])
            os._exit(1)
        say("pid", child)
        os.waitpid(child, 0)
        say("ended", child)


if __name__ == "__main__":
    main()
