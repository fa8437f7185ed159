"""What the guards cost when nothing fails: retries, limits, the watch over a mount, the look at free space, ...

One process saves the same state by turns, with a repository as ``ckptstore.open`` makes it and with one that has none
of these. A few per cent are less than what two processes differ by, so the pairs are made within one, and many of them.
"""

from __future__ import annotations

import os
import statistics
import time

import numpy as np

import ckptstore
from benchmarks import states
from benchmarks.rivals.base import Place
from benchmarks.samples import Job, Sample
from ckptstore.stores.local import LocalStore

ABOUT = "saves by turns, as `ckptstore.open` makes a repository and `Repository(LocalStore(path))`: no guards at all"
PAIRS = 24

Taken = tuple[float, float]


def guards(job: Job) -> Sample:
    """``PAIRS`` pairs of saves; the ratios are medians of the ratios within the pairs: of time and of CPU time."""
    state = states.build(job.state, job.mib)
    path = job.place.path
    guarded = Place(f"{path}/guarded").open()
    unguarded = ckptstore.Repository(LocalStore(f"{path}/unguarded"))
    taken: tuple[list[Taken], list[Taken]] = ([], [])
    for number in range(PAIRS + 1):
        _touch(state)
        for which in (0, 1) if number % 2 else (1, 0):
            found = _save((guarded, unguarded)[which], number, state)
            if number:  # the first save of a process makes folders and asks what the store can do
                taken[which].append(found)
    times, loads = ([ours[of] / bare[of] for ours, bare in zip(*taken, strict=True)] for of in (0, 1))
    low, middle, high = statistics.quantiles(times, n=4)
    guarded.close()
    unguarded.close()
    seconds, cpu = (statistics.median(one[of] for one in taken[0]) for of in (0, 1))
    bare = statistics.median(one[0] for one in taken[1])
    facts = {"unguarded": bare, "ratio": middle, "low": low, "high": high, "pairs": PAIRS}
    facts["ratio of CPU"] = statistics.median(loads)
    return Sample(
        work=job.work, where=job.place.where, state=job.state, mib=job.mib, rival=job.rival, round=job.round,
        durable=True, seconds=seconds, cpu=cpu, peak=0, nbytes=states.size(state), facts=facts,
    )  # fmt: skip


def _touch(state: states.State) -> None:
    """Change every chunk of every array, so that nothing is taken over from the epoch before."""
    for tensor in states.tensors(state):
        tensor.detach().numpy().reshape(-1).view(np.uint8)[:: 1 << 16] ^= 1


def _save(repo: ckptstore.Repository, epoch: int, state: states.State) -> Taken:
    """Seconds, and CPU seconds, of one save, on a disk that has nothing left to write."""
    os.sync()
    start, busy = time.perf_counter(), time.process_time()
    repo.save(epoch, state)
    taken = time.perf_counter() - start, time.process_time() - busy
    for older in repo.epochs()[:-1]:
        repo.delete(older)
    return taken
