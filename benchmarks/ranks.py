"""Measurements on one or several ranks: fresh processes with a gloo group, and what they found as one sample."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import process, sharded, states
from benchmarks.process import Cost, Failure, WrongBytesError, measured
from benchmarks.rivals import RANKS
from benchmarks.rivals.ranks import OfRanks
from benchmarks.samples import Job, Sample
from benchmarks.works import STALLS, sample

TINY = {"model": {"w": torch.arange(64.0)}}
"""Saved and loaded before the clock starts."""


def measure(context: Any, job: Job, patience: float) -> Sample | Failure:
    """Run all ranks of a measurement, each in a fresh process, and make one sample of theirs."""
    world = sharded.split_name(job.state)[1]
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(prefix="ckptstore-bench-") as folder:
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                started = context.Process(target=run, args=(theirs, job, rank, world, folder))
                started.start()
                theirs.close()
                pipes.append(ours)
                processes.append(started)
            return _joined(_received(pipes, processes, patience))
        finally:
            for started in processes:
                started.kill()
                started.join()


def _received(pipes: list[Connection], processes: list[Any], patience: float) -> list[Sample | Failure]:
    end = time.monotonic() + patience
    found: list[Sample | Failure] = []
    for rank, pipe in enumerate(pipes):
        try:
            ready = pipe.poll(max(end - time.monotonic(), 0))
            found.append(pipe.recv() if ready else Failure(f"rank {rank} was not done after {patience:.0f} s", ""))
        except EOFError:
            processes[rank].join()
            code = processes[rank].exitcode
            found.append(Failure(f"the process of rank {rank} died with exit code {code}", ""))
    return found


def _joined(found: list[Sample | Failure]) -> Sample | Failure:
    """The time is that of the slowest rank; what all ranks used is added up."""
    samples = []
    for one in found:
        if isinstance(one, Failure):
            return one
        samples.append(one)
    requests = [s.requests for s in samples if s.requests is not None]
    facts = {name: max(s.facts[name] for s in samples) for name in samples[0].facts}
    if "verbs" in facts:
        facts["verbs"] = sum(s.facts["verbs"] for s in samples)
    return dataclasses.replace(
        samples[0],
        seconds=max(s.seconds for s in samples),
        cpu=sum(s.cpu for s in samples),
        peak=sum(s.peak for s in samples),
        nbytes=sum(s.nbytes for s in samples),
        stored=max(s.stored for s in samples),
        requests=sum(requests) if len(requests) == len(samples) else None,
        facts=facts,
    )


# ---- in the process of a rank ------------------------------------------------------------------------------------


def run(pipe: Connection, job: Job, rank: int, world: int, folder: str) -> None:
    """The body of one rank's process; the ranks meet in ``folder``."""
    if job.place.remote:
        process.watch_wire()
    if world > 1:
        torch.set_num_threads(1)  # as torchrun does
    found: Sample | Failure
    try:
        store = dist.FileStore(str(Path(folder) / "rendezvous"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        found = WORKS[job.work](job)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 (whatever a rival raises is a finding)
        found = Failure(" ".join(f"{type(error).__name__}: {error}".split())[:300], traceback.format_exc())
    pipe.send(found)
    pipe.close()


def together(work: Callable[[], Any]) -> Cost:
    """Do the work as soon as all ranks are ready, and measure it."""

    def timed() -> tuple[float, Any]:
        dist.barrier()
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result

    cost = measured(timed)
    seconds, result = cost.result
    return dataclasses.replace(cost, seconds=seconds, result=result)


def _state(job: Job) -> states.State:
    """This rank's share of the state."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    return sharded.build(sharded.split_name(job.state)[0], job.mib, dist.get_rank(), world, mesh)


def _ready(job: Job) -> OfRanks:
    """The rival of this rank; the first one makes what all share."""
    rival = RANKS[job.rival](job.place)
    if dist.get_rank() == 0:
        rival.prepare()
    dist.barrier()
    if dist.get_rank() != 0:
        rival.prepare()
    return rival


def _stored(job: Job) -> int:
    dist.barrier()
    found = job.place.stored() if dist.get_rank() == 0 else 0
    dist.barrier()
    return found


def save(job: Job) -> Sample:
    """Save number 1, of which nothing is there already."""
    state = _state(job)
    rival = _ready(job)
    rival.save(TINY, 0)
    before = _stored(job)
    cost = together(lambda: rival.save(state, 1))
    stored = _stored(job) - before
    found = sample(job, rival, cost, states.size(sharded.local(state)), stored=stored)
    rival.close()
    return found


def restore(job: Job) -> Sample:
    """Load number 1 in place, from the page cache."""
    target = _state(job)
    expected = states.digest(sharded.local(target))
    sharded.blank(target)
    rival = _ready(job)
    rival.load({"model": {"w": torch.zeros(64)}}, 0)
    cost = together(lambda: rival.load(target, 1))
    if states.digest(sharded.local(target)) != expected:
        raise WrongBytesError(f"{job.rival} restored other bytes than were saved")
    taken = sample(job, rival, cost, states.size(sharded.local(target)))
    rival.close()
    return taken


def stall(job: Job) -> Sample:
    """How long training stands still for a save in the background: the median of calls after the first."""
    state = _state(job)
    rival = _ready(job)
    first = together(lambda: rival.stall(state, 101)())  # allocates the staging copy; its place may have an epoch 1
    costs, totals = [], []
    for number in range(102, 102 + STALLS):
        for tensor in states.tensors(sharded.local(state)):
            tensor.mul_(1.001)  # as training does: no save may find the bytes of the last one
        cost = together(lambda number=number: rival.stall(state, number))  # type: ignore[misc]
        start = time.perf_counter()
        cost.result()
        totals.append(cost.seconds + time.perf_counter() - start)
        costs.append(cost)
    middle = sorted(costs, key=lambda cost: cost.seconds)[STALLS // 2]
    found = {"until durable": statistics.median(totals), "first call": first.seconds, **rival.facts()}
    taken = sample(job, rival, middle, states.size(sharded.local(state)), peak=first.peak, facts=found)
    rival.close()
    return taken


WORKS: dict[str, Callable[[Job], Sample]] = {"save": save, "restore": restore, "stall": stall}
