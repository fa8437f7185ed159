"""The works that are measured, each on one rival, one state and one place. Called in a fresh process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import states
from benchmarks.codec import codec
from benchmarks.guards import guards
from benchmarks.process import Cost, WrongBytesError, drop_page_cache, measured
from benchmarks.repositories import big, latest
from benchmarks.rivals import ALL, Rival
from benchmarks.samples import Job, Sample

PART = "layers.0."
STALLS = 3


def sample(job: Job, rival: Rival, cost: Cost, nbytes: int, **more: Any) -> Sample:
    """A sample of what was measured."""
    found = rival.facts()
    # Fewer than the store was called: another client than s3fs's carried some, and nobody counted those.
    counted = job.place.remote and cost.requests >= max(found.get("verbs", 1), 1)
    return Sample(
        work=job.work,
        where=job.place.where,
        state=job.state,
        mib=job.mib,
        rival=job.rival,
        round=job.round,
        durable=rival.durable,
        seconds=cost.seconds,
        cpu=cost.cpu,
        nbytes=nbytes,
        requests=cost.requests if counted else None,
        **{"peak": cost.peak, "facts": found, **more},
    )


def facts(job: Job) -> dict[str, Any]:
    """What the state is: bytes, tensors, and the digests that restores must give."""
    state = states.build(job.state, job.mib)
    part = {f"model.{name}": state["model"][name] for name in part_names(state)} if "model" in state else {}
    return {
        "state": job.state,
        "mib": job.mib,
        "nbytes": states.size(state),
        "tensors": len(states.tensors(state)),
        "about": states.ABOUT[job.state],
        "digest": states.digest(state),
        "digest of a part": states.digest(dict(sorted(part.items()))),
    }


def part_names(state: states.State) -> list[str]:
    """The tensors of the model's first layer: what a partial restore asks for."""
    return sorted(name for name in state["model"] if PART in name)


def save(job: Job) -> Sample:
    """Save into an empty place, so that nothing can be reused."""
    state = states.build(job.state, job.mib)
    rival = ALL[job.rival](job.place)
    rival.prepare()
    cost = measured(lambda: rival.save(state, 1))
    if rival.limit and not rival.durable:
        cost = measured(lambda: rival.save(state, 1))  # memcpy: the second one, into pages that exist
    found = sample(job, rival, cost, states.size(state), stored=job.place.stored() if rival.durable else 0)
    rival.close()
    return found


def restore(job: Job) -> Sample:
    """Restore what a save left: in place where the rival can; files from the page cache unless ``cold``."""
    kind = ALL[job.rival]
    target = states.blank(job.state, job.mib) if kind.in_place else None
    rival = kind(job.place)
    rival.prepare()
    if job.work == "restore cold":
        drop_page_cache(job.place.path)
    cost = measured(lambda: rival.restore(target))
    found = cost.result
    nbytes = states.size(found)
    if states.digest(found) != job.expected:
        raise WrongBytesError(f"{job.rival} restored other bytes than were saved")
    peak = cost.peak if kind.in_place else max(cost.peak - nbytes, 0)
    taken = sample(job, rival, cost, nbytes, peak=peak)
    rival.close()
    return taken


def partial(job: Job) -> Sample:
    """Restore the first layer of the model and nothing else."""
    names = part_names(states.build(job.state, job.mib))
    rival = ALL[job.rival](job.place)
    rival.prepare()
    cost = measured(lambda: rival.partial(names))
    found = dict(sorted(cost.result.items()))
    if states.digest(found) != job.expected:
        raise WrongBytesError(f"{job.rival} restored other bytes than were saved")
    taken = sample(job, rival, cost, states.size(found))
    rival.close()
    return taken


def again(job: Job) -> Sample:
    """Save, change 1 %, and save once more: the second save is measured."""
    state = states.build(job.state, job.mib)
    rival = ALL[job.rival](job.place)
    rival.prepare()
    rival.save(state, 1)
    before = job.place.stored() if rival.durable else 0
    changed = states.change(job.state, state)
    cost = measured(lambda: rival.save(state, 2))
    stored = max(job.place.stored() - before, 0) if rival.durable else 0
    found = {"changed": changed, **rival.facts()}
    taken = sample(job, rival, cost, states.size(state), stored=stored, facts=found)
    rival.close()
    return taken


def stall(job: Job) -> Sample:
    """How long training stands still for a save in the background: the median of calls after the first."""
    state = states.build(job.state, job.mib)
    rival = ALL[job.rival](job.place)
    rival.prepare()
    first = measured(lambda: rival.stall(state, 1)())  # allocates the staging copy
    costs, totals = [], []
    for number in range(2, 2 + STALLS):
        cost = measured(lambda number=number: rival.stall(state, number))  # type: ignore[misc]
        start = time.perf_counter()
        cost.result()
        totals.append(cost.seconds + time.perf_counter() - start)
        costs.append(cost)
    middle = sorted(costs, key=lambda cost: cost.seconds)[STALLS // 2]
    found = {"until durable": statistics.median(totals), "first call": first.seconds, **rival.facts()}
    taken = sample(job, rival, middle, states.size(state), peak=first.peak, facts=found)
    rival.close()
    return taken


WORKS: dict[str, Callable[[Job], Any]] = {
    "facts": facts,
    "save": save,
    "restore": restore,
    "restore cold": restore,
    "partial": partial,
    "again": again,
    "stall": stall,
    "codec": codec,
    "latest": latest,
    "prune": big,
    "gc": big,
    "guards": guards,
}
