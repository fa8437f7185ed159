"""A claim: one promised number, what was measured, and the verdict. What ``goals.py`` builds its goals from."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.samples import Run, Sample, median, pairs

REACHED, MISSED, UNKNOWN, SHOWN = "reached", "not reached", "not measured", "shown"
MIB = 1024 * 1024
OURS = "ckptstore"
Samples = list[Sample]


@dataclass(frozen=True)
class Claim:
    """One promise and what became of it."""

    goal: int
    what: str
    target: str
    measured: str
    verdict: str
    detail: str = ""


def unmeasured(run: Run, goal: int, what: str, target: str, work: str, *rivals: str) -> Claim:
    """A claim without samples, with the reason where the run knows one. It is never taken for reached."""
    known = [f"{t.rival}: {t.reason}" for t in run.troubles if work in t.work.split(", ") and t.rival in rivals]
    reason = "; ".join(dict.fromkeys(known)) or "not part of this run"
    return Claim(goal, what, target, "", UNKNOWN, reason)


def at_most(goal: int, what: str, value: float, limit: float, shown: str, detail: str = "") -> Claim:
    """A claim about a number that must be ``limit`` or less."""
    return Claim(goal, what, f"≤ {limit:g}", shown, REACHED if value <= limit else MISSED, detail)


def at_least(goal: int, what: str, value: float, limit: float, shown: str, detail: str = "") -> Claim:
    """A claim about a number that must be ``limit`` or more."""
    return Claim(goal, what, f"≥ {limit:g}", shown, REACHED if value >= limit else MISSED, detail)


def ratio(goal: int, what: str, ours: Samples, theirs: Samples, limit: float) -> Claim:
    """A claim about our time as a multiple of theirs: the median of the ratios within each round."""
    found = pairs(ours, theirs)
    value = statistics.median(found)
    return at_most(goal, what, value, limit, f"{value:.2f}", _spread(found, ours, theirs))


def faster(goal: int, what: str, ours: Samples, theirs: Samples, limit: float) -> Claim:
    """A claim about how many times as fast we are: the median of the ratios within each round."""
    found = pairs(theirs, ours)
    value = statistics.median(found)
    return at_least(goal, what, value, limit, f"{value:.2f} times as fast", _spread(found, ours, theirs))


def beside(run: Run, ours: str, theirs: str, **wanted: object) -> Iterator[tuple[int, Samples, Samples]]:
    """``(size, our samples, their samples)`` of each size at which both were measured in the same rounds."""
    for mib in sorted({s.mib for s in run.select(rival=ours, **wanted)}):
        mine = run.select(rival=ours, mib=mib, **wanted)
        other = run.select(rival=theirs, mib=mib, **wanted)
        if pairs(mine, other):
            yield mib, mine, other


def time(seconds: float) -> str:
    """Seconds with three digits."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def size(mib: int) -> str:
    """A size of a state."""
    return f"{mib / 1024:g} GiB" if mib >= 256 else f"{mib} MiB"


def _spread(found: list[float], ours: Samples, theirs: Samples) -> str:
    many = f"; {min(found):.2f}–{max(found):.2f} in {len(found)} rounds" if len(found) > 1 else "; one round"
    return f"{time(median(ours))} to {time(median(theirs))}{many}"
