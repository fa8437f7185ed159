"""Spill: a second store takes the saves that the first cannot, and is looked at whenever the newest is asked for.

It is a whole repository of its own, with its own commits; nothing is ever half in one and half in the other. Of two
epochs with one number that of the first store counts. Nothing is copied back: the run goes on in the first store as
soon as that is well again, and what was spilled stays until somebody deletes it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CorruptionError, EpochExistsError, EpochNotFoundError, InvalidArgumentError
from ckptstore.failures import is_of_the_store
from ckptstore.locks import ForkLock
from ckptstore.pickling import Opener
from ckptstore.pipeline import Progress
from ckptstore.repository import Repository
from ckptstore.rescue import Work
from ckptstore.stores import Store
from ckptstore.verify import VerifyReport

log = logging.getLogger("ckptstore")


class SpillRepository(Repository):
    """A repository with a second one to turn to; made by ``ckptstore.open(.., spill=URL)``."""

    def __init__(self, store: Store, *, spill: Opener, **options: Any) -> None:
        super().__init__(store, **options)
        self._second = spill
        self._opened: Repository | None = None
        self._opening = ForkLock()
        self._away = False  # whether the last save went there
        self._rescue.spill = self._save_there

    @property
    def spill(self) -> Repository:
        """The repository in the second store. Opened when it is first needed."""
        with self._opening:
            if self._opened is None:
                repo: Repository = self._second()
                if repo.id == self.id:
                    repo.close()
                    raise InvalidArgumentError(f"spill is the same repository ({self.url}): use another store")
                self._opened = repo
                self._flights.others.append(repo._flights)
            return self._opened

    def _save(self, work: Work, cores: int | None = None) -> Checkpoint | Exception:
        before, self._away = self._away, False
        outcome = super()._save(work, cores)
        if not isinstance(outcome, Checkpoint):
            self._away = before
        elif before and not self._away:
            log.warning("%s takes saves again; what was spilled stays in %s", self.url, self.spill.url)
        return outcome

    def _save_there(self, work: Work, error: Exception) -> Checkpoint | None:
        """Save to the second store what the first could not take. None where that fails too."""
        if work.replace:
            return None  # the old content stays where it is; which of two is newer could not be told later
        try:
            outcome = self.spill._save(replace(work))
        except Exception as second:
            if not is_of_the_store(second) and not isinstance(second, EpochExistsError):
                raise
            log.warning("the second store, %s, cannot take epoch %d either: %s", self.spill.url, work.epoch, second)
            return None
        assert isinstance(outcome, Checkpoint)  # its errors are never forgiven
        self._away = True
        self._failures.note(outcome.epoch, outcome.created)
        log.warning("epoch %d lies in %s, because the first store failed: %s", work.epoch, self.spill.url, error)
        return outcome

    def latest(
        self,
        deep: bool = False,
        progress: Progress | None = None,
        run_id: str | None = None,
        need: Collection[str] = (),
    ) -> Checkpoint | None:
        """As of any repository, but the newest of both stores. One that does not answer raises StoreError."""
        problem: CorruptionError | None = None
        found = []
        for look in (super().latest, self.spill.latest):
            try:
                found.append(look(deep, progress, run_id, need))
            except CorruptionError as error:
                log.warning("skipped a store: %s", error)
                problem = error
        here = [checkpoint for checkpoint in found if checkpoint is not None]
        if not here:
            if problem is not None:
                raise problem
            return None
        newest = max(here, key=lambda checkpoint: checkpoint.epoch)  # of equals the first
        self._failures.note(newest.epoch, newest.created)
        if newest.url != self.url:
            log.warning("the newest epoch, %d, lies in %s", newest.epoch, newest.url)
        return newest

    def checkpoint(self, epoch: int) -> Checkpoint:
        """The checkpoint of one epoch, in the first store or else the second."""
        with suppress(EpochNotFoundError):
            return super().checkpoint(epoch)
        return self.spill.checkpoint(epoch)

    def epochs(self) -> list[int]:
        """The numbers of all epochs in both stores, ascending. Two listings."""
        return sorted({*super().epochs(), *self.spill.epochs()})

    def verify(
        self,
        epoch: int | None = None,
        deep: bool = True,
        progress: Progress | None = None,
        sample: float = 1.0,
        *,
        quarantine: bool = False,
        resume: bool = False,
    ) -> VerifyReport:
        """Check one epoch, wherever it lies, or all of both stores."""
        looks = [
            partial(look, epoch, deep, progress, sample, quarantine=quarantine, resume=resume)
            for look in (super().verify, self.spill.verify)
        ]
        if epoch is None:
            reports = [look() for look in looks]
            return VerifyReport(tuple(health for report in reports for health in report.epochs), deep, sample)
        with suppress(EpochNotFoundError):
            return looks[0]()
        return looks[1]()

    def quarantine(self, epoch: int, reason: str) -> None:
        """Set an epoch aside, in the first store or else the second."""
        try:
            super().quarantine(epoch, reason)
        except EpochNotFoundError:
            self.spill.quarantine(epoch, reason)

    def release(self, epoch: int) -> bool:
        """Take an epoch out of quarantine, in both stores."""
        return any([super().release(epoch), self.spill.release(epoch)])

    def quarantined(self) -> dict[int, str]:
        """The epochs of both stores that are set aside."""
        return dict(sorted({**self.spill.quarantined(), **super().quarantined()}.items()))

    def delete(self, epoch: int) -> None:
        """Delete an epoch from both stores."""
        there = epoch in self.spill.epochs()
        try:
            super().delete(epoch)
        except EpochNotFoundError:
            if not there:
                raise
        if there:
            self.spill.delete(epoch)

    def close(self) -> None:
        """Close both."""
        try:
            super().close()
        finally:
            if self._opened is not None:
                self._opened.close()
