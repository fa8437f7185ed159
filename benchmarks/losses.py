"""Where we lose: found in the samples, not chosen."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.claims import MISSED, OURS, size
from benchmarks.goals import claims
from benchmarks.samples import Run, Sample, median, pairs
from benchmarks.tables import PLACES, TITLES

SLOWER = 1.1
"""From which ratio on a slower time is a loss: below it, a busy moment decides."""
HEAVIER = 32 * 1024 * 1024
"""From how many bytes more on a higher peak of memory is a loss."""


def losses(run: Run) -> Iterator[str]:
    """One line for each loss against a rival with the same durability, and each goal that is not reached."""
    for work, where, state, mib, durable in run.tables():
        samples = run.select(work=work, where=where, state=state, mib=mib, durable=durable)
        ours = [s for s in samples if s.rival == OURS]
        if ours:
            others = [name for name in dict.fromkeys(s.rival for s in samples) if not name.startswith(OURS)]
            yield from _slower(run, ours, samples, others)
            yield from _heavier(ours, samples, others)
            yield from _larger(ours, samples, others)
    for claim in claims(run):
        if claim.verdict == MISSED:
            yield f"Goal {claim.goal} is not reached: {claim.what}: {claim.measured}, promised {claim.target}."


def _name(one: Sample) -> str:
    place = f" ({PLACES[one.where]})" if one.where != "memory" else ""
    return f"{TITLES[one.work]}{place}, {one.state}, {size(one.mib)}"


def _slower(run: Run, ours: list[Sample], samples: list[Sample], others: list[str]) -> Iterator[str]:
    found = {}
    for name in others:
        ratios = pairs(ours, [s for s in samples if s.rival == name])
        if ratios and statistics.median(ratios) >= SLOWER:
            kind = " (no checkpoint: a limit)" if run.rivals.get(name, {}).get("limit") else ""
            found[f"{name}{kind}"] = statistics.median(ratios)
    if found:
        told = ", ".join(f"{ratio:.1f} times as long as {name}" for name, ratio in found.items())
        yield f"{_name(ours[0])}: takes {told}."


def _heavier(ours: list[Sample], samples: list[Sample], others: list[str]) -> Iterator[str]:
    mine = median(ours, "peak")
    found = {}
    for name in others:
        theirs = median([s for s in samples if s.rival == name], "peak")
        if mine - theirs >= HEAVIER:
            found[name] = theirs
    if found and ours[0].work != "codec":
        told = ", ".join(f"{name} +{theirs / 1e6:.0f} MB" for name, theirs in found.items())
        yield f"{_name(ours[0])}: needs +{mine / 1e6:.0f} MB of memory, more than {told}."


def _larger(ours: list[Sample], samples: list[Sample], others: list[str]) -> Iterator[str]:
    mine = median(ours, "stored")
    for name in others:
        theirs = median([s for s in samples if s.rival == name], "stored")
        if theirs and mine > 1.005 * theirs and ours[0].work in ("save", "codec"):
            yield f"{_name(ours[0])}: stores {mine / 1e6:.1f} MB, {name} {theirs / 1e6:.1f} MB."
