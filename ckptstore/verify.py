"""Verify: is every object of every epoch what it should be? Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import CorruptionError, EpochNotFoundError
from ckptstore.pipeline import Progress
from ckptstore.reader import Problem


@dataclass(frozen=True, slots=True)
class EpochHealth:
    """The state of one committed epoch. ``bytes_state`` is what its arrays and files take before the codec."""

    epoch: int
    generation: int
    bytes_state: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the epoch."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``Repository.verify`` found. ``deep`` tells whether bytes were read, ``sample`` what share of the chunks."""

    epochs: tuple[EpochHealth, ...]
    deep: bool
    sample: float = 1.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with any epoch that was checked."""
        return all(health.ok for health in self.epochs)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong, in all epochs together."""
        return tuple(problem for health in self.epochs for problem in health.problems)


def verify(
    catalog: Catalog, epoch: int | None, *, deep: bool, progress: Progress | None, sample: float = 1.0
) -> VerifyReport:
    """Check one epoch, or all. Damage is reported, never raised; a store that fails raises StoreError.

    A chunk that several epochs share is read once.
    """
    commits: Sequence[Committed] = catalog.committed(epoch)
    if epoch is not None and not commits:
        raise EpochNotFoundError(f"there is no epoch {epoch}", epoch=epoch)
    health = []
    good: set[str] = set()
    for commit, manifest in catalog.manifests(commits):
        if isinstance(manifest, CorruptionError):
            problem = Problem(commit.key, manifest.message)
            health.append(EpochHealth(commit.epoch, commit.generation, 0, (problem,)))
            continue
        problems = catalog.problems(manifest, deep=deep, progress=progress, sample=sample, good=good)
        if not problems or catalog.exists(manifest):
            health.append(EpochHealth(commit.epoch, commit.generation, manifest.bytes_state, tuple(problems)))
    return VerifyReport(tuple(health), deep, sample)
