"""What one measurement found, and all of a run's together. They are the JSON file; everything shown is made from it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.rivals.base import Place

VERSION = 2


@dataclass(frozen=True)
class Job:
    """One measurement to make, in a process of its own."""

    work: str
    state: str
    mib: int
    rival: str
    place: Place
    round: int = 0
    expected: str = ""
    """Digest that a restore must give."""


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        durable: whether what was saved survives a crash of the machine.
        cpu: seconds of all threads of this process, not of a server.
        peak: bytes of memory at the peak beyond what was there before and beyond the state itself.
        requests: HTTP requests that were really sent; None where nobody counted them.
        facts: other numbers, by name.
    """

    work: str
    where: str
    state: str
    mib: int
    rival: str
    round: int
    durable: bool
    seconds: float
    cpu: float
    peak: int
    nbytes: int
    stored: int = 0
    requests: int | None = None
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trouble:
    """What was not measured, and why. ``error`` tells a failure from a rival that is not installed."""

    work: str
    where: str
    state: str
    rival: str
    reason: str
    error: bool


@dataclass
class Run:
    """A whole run, as it is in the JSON file."""

    profile: str
    machine: dict[str, Any]
    command: str = ""
    seconds: float = 0
    states: list[dict[str, Any]] = field(default_factory=list)
    rivals: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)

    def select(self, **wanted: Any) -> list[Sample]:
        """The samples whose fields have these values."""
        return [s for s in self.samples if all(getattr(s, name) == value for name, value in wanted.items())]

    def tables(self) -> Iterator[tuple[str, str, str, int, bool]]:
        """Each work, place, state, size and durability that there are samples of, once, in the order of the run."""
        yield from dict.fromkeys((s.work, s.where, s.state, s.mib, s.durable) for s in self.samples)

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")


def read(path: Path) -> Run:
    """A run from its JSON file.

    Raises:
        ValueError: the file is of another version of the harness.
    """
    found = json.loads(path.read_text())
    if found.pop("version", None) != VERSION:
        raise ValueError(f"{path} was not written by this version of the harness: measure again")
    known = {one.name for one in fields(Run)}
    found = {name: value for name, value in found.items() if name in known}
    found["samples"] = [Sample(**sample) for sample in found["samples"]]
    found["troubles"] = [Trouble(**trouble) for trouble in found["troubles"]]
    return Run(**found)


def median(samples: list[Sample], what: str = "seconds") -> float:
    """The median of a field."""
    return float(statistics.median(getattr(sample, what) for sample in samples))


def pairs(ours: list[Sample], theirs: list[Sample]) -> list[float]:
    """Ratios of the times within each round: a slow moment of the machine hits both."""
    others = {sample.round: sample.seconds for sample in theirs}
    return [sample.seconds / others[sample.round] for sample in ours if others.get(sample.round)]
