"""What the guards cost when nothing fails: retries, limits, the watch over a mount, the look at free space, ...

One process saves the same state by turns, with a repository that has all of them and with one that has none: no
wrappers, no reserve, no look ahead, no writer number. A few per cent are less than what two processes differ by, so
the pairs are made within one, and many of them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import numpy as np

import ckptstore
from benchmarks import states
from benchmarks.rivals.base import Place
from benchmarks.samples import Job, Sample
from ckptstore.stores.local import LocalStore

PAIRS = 96  # of 0.25 GiB; larger states take fewer, so that a run stays within minutes

Taken = tuple[float, float]


def guards(job: Job) -> Sample:
    """``PAIRS`` pairs of saves (a quarter of them with 1 GiB).

    The ratios are medians of the ratios within the pairs: of time and of CPU time.
    """
    state = states.build(job.state, job.mib)
    pairs = max(8, PAIRS * 256 // max(256, job.mib))
    path = job.place.path
    guarded = Place(f"{path}/guarded").open(run_id="guarded", on_error="warn", max_failures=3)
    unguarded = ckptstore.Repository(_Blind(f"{path}/unguarded"))
    for each in (guarded, unguarded):
        each._pace.spare_room = True  # the same work for both: by itself each stops compressing when its disk is fast
    taken: tuple[list[Taken], list[Taken]] = ([], [])
    for number in range(pairs + 1):
        _touch(state)
        for which in (0, 1) if number % 2 else (1, 0):
            found = _guarded(guarded, number, state) if which == 0 else _unguarded(unguarded, number, state)
            if number:  # the first save of a process makes folders and asks what the store can do
                taken[which].append(found)
    times, loads = ([ours[of] / bare[of] for ours, bare in zip(*taken, strict=True)] for of in (0, 1))
    low, middle, high = statistics.quantiles(times, n=4)
    guarded.close()
    unguarded.close()
    seconds, cpu = (statistics.median(one[of] for one in taken[0]) for of in (0, 1))
    bare = statistics.median(one[0] for one in taken[1])
    facts = {"unguarded": bare, "ratio": middle, "low": low, "high": high, "pairs": pairs}
    facts["ratio of CPU"] = statistics.median(loads)
    return Sample(
        work=job.work, where=job.place.where, state=job.state, mib=job.mib, rival=job.rival, round=job.round,
        durable=True, seconds=seconds, cpu=cpu, peak=0, nbytes=states.size(state), facts=facts,
    )  # fmt: skip


def _touch(state: states.State) -> None:
    """Change every chunk of every array, so that nothing is taken over from the epoch before."""
    for tensor in states.tensors(state):
        tensor.detach().numpy().reshape(-1).view(np.uint8)[:: 1 << 16] ^= 1


class _Blind(LocalStore):
    """Cannot tell what space is left, so nobody looks, and nothing is set aside."""

    def space(self) -> None:
        return None


def _guarded(repo: ckptstore.Repository, epoch: int, state: states.State) -> Taken:
    taken = _timed(lambda: repo.save(epoch, state))
    _delete_older(repo)
    return taken


def _unguarded(repo: ckptstore.Repository, epoch: int, state: states.State) -> Taken:
    def save() -> None:
        with repo.begin(epoch) as txn:
            for name, record in state.items():
                txn.write(name, record)

    taken = _timed(save)
    _delete_older(repo)
    return taken


def _delete_older(repo: ckptstore.Repository) -> None:
    for epoch in repo.epochs()[:-1]:
        repo.delete(epoch)


def _timed(save: Callable[[], object]) -> Taken:
    """Seconds, and CPU seconds, on a disk that has nothing left to write."""
    os.sync()
    start, busy = time.perf_counter(), time.process_time()
    save()
    return time.perf_counter() - start, time.process_time() - busy
