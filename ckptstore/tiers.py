"""Tiers: a fast store takes the saves, and what it has committed is copied to others in the background.

Each tier is a whole repository of its own. The first is the only one that a save waits for; ``replication.py`` brings
its epochs to the others. Reading looks at all of them and takes each chunk from the nearest that gives it whole.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ckptstore import exiting, options, pins
from ckptstore import quarantine as marks
from ckptstore.background import Told
from ckptstore.caring import Caring
from ckptstore.catalog import Catalog, Skipped
from ckptstore.checkpoint import Checkpoint
from ckptstore.copies import Copies, Place, Together
from ckptstore.errors import (
    CkptStoreError,
    CorruptionError,
    DeadlineError,
    EpochExistsError,
    EpochNotFoundError,
    RepositoryNotFoundError,
    RetriesExhaustedError,
    StoreFullError,
    TransientError,
)
from ckptstore.hold import holds
from ckptstore.manifest import Manifest, check_epoch
from ckptstore.patience import GRACE_SECONDS
from ckptstore.pipeline import Progress
from ckptstore.policies import AnyPolicy, EpochInfo
from ckptstore.removing import set_aside
from ckptstore.repair import RepairReport
from ckptstore.replication import Lower, Replicator
from ckptstore.repository import Repository
from ckptstore.retention import PruneReport
from ckptstore.roll import Roll
from ckptstore.stores import Store
from ckptstore.telling import SaveWatch
from ckptstore.tier import TierStatus, status
from ckptstore.transaction import Transaction
from ckptstore.verify import VerifyReport
from ckptstore.writer import Tally

log = logging.getLogger("ckptstore")

OPEN_SECONDS = 5.0
"""How long ``open`` waits for lower tiers to answer. One that does not is tried again in the background."""
_MAY_PASS = (TransientError, RetriesExhaustedError, DeadlineError, StoreFullError)


class TieredRepository(Repository):
    """A repository in several tiers; made by ``ckptstore.open([fast, .., slow])``."""

    def __init__(self, store: Store, *, lower: Sequence[Lower], create: bool = True, **others: Any) -> None:
        try:
            super().__init__(store, create=create, **others)
        except RepositoryNotFoundError:
            if create or not any(_exists(tier) for tier in lower):
                raise
            super().__init__(store, create=True, make_later=True, **others)  # a new node: the first tier is empty
        self._roll = Roll(self._catalog)
        self._together = Together(self._catalogs)
        self._replacing: set[int] = set()
        self._overwrite: set[str] = set()
        self._replicators: list[Replicator] = []
        opened: dict[str, str] = {}
        for tier in lower:
            above = tuple(self._replicators)
            self._replicators.append(Replicator(tier, self, self._roll, above, self._overwrite, opened))
        self._plain: Repository | None = None
        self._reclaim.waited_for = True
        self._flights.also = self._under_way
        exiting.wait_for(self)
        if create and others.get("passport") is None:
            self._begin_replication()

    def _begin_replication(self) -> None:
        """Go on where the last process stopped. A tier that will never work is found out now."""
        end = time.monotonic() + OPEN_SECONDS
        for replicator in self._replicators:
            replicator.nudge()
        for replicator in self._replicators:
            if not replicator.opened.wait(max(0.0, end - time.monotonic())):
                log.warning("%s does not answer yet: it is tried again in the background", replicator.url)
            error = replicator.error
            if error is not None and not isinstance(error, _MAY_PASS) and replicator.catalog is None:
                _stop_all(self._replicators)
                for other in self._replicators:
                    other.close()
                raise error

    # ---- the tiers -----------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Repository, ...]:
        """The repository of each tier by itself, the first one first, made if need be. They know nothing of each other.

        Raises:
            StoreError: one does not answer.
        """
        if self._plain is None:
            self._foundation.require(restore=True)
            self._plain = Repository(self.store, create=False)
        return self._plain, *(_required(replicator.repository(create=True)) for replicator in self._replicators)

    def tiers(self, look: bool = True) -> list[TierStatus]:
        """As of any repository."""
        self._roll.look()
        found = [status(self.url, self._roll, (), {}, 0, "")]
        for replicator in self._replicators:
            error = replicator.error
            if look:
                try:
                    replicator.look()
                    error = error if replicator.failures else None
                except CkptStoreError as now:
                    error = now
            said = "" if error is None else str(error)
            facts = replicator.waiting(), replicator.stuck, replicator.failures, said
            found.append(status(replicator.url, replicator.roll, *facts))
        return found

    def wait_for_tiers(self, timeout: float = options.EXIT_TIMEOUT) -> bool:
        """As of any repository."""
        end = time.monotonic() + options.check_timeout("timeout", timeout)
        asked = [replicator.nudge(hurry=True) for replicator in self._replicators]
        there = [r.wait(number, end) for r, number in zip(self._replicators, asked, strict=True)]
        return all(there)

    def _under_way(self) -> set[object]:
        """What a process that must end should wait for, if it can: its disk may go with it."""
        return {("tier", replicator.url) for replicator in self._replicators if replicator.busy}

    # ---- saving --------------------------------------------------------------------------------------------

    def _begin(self, epoch: int, metadata: Any, replace: bool, *others: Any, **named: Any) -> Transaction:
        self._replacing.discard(epoch)  # left by one that has failed
        if replace:
            self._replacing.add(epoch)
        for replicator in self._replicators if not replace else ():
            if replicator.has(epoch):
                raise EpochExistsError(
                    f"epoch {epoch} is already committed in {replicator.url}: save another epoch, or pass replace=True",
                    epoch=epoch,
                )
        return super()._begin(epoch, metadata, replace, *others, **named)

    def _committed(self, told: Told, watch: SaveWatch, manifest: Manifest, tally: Tally) -> Checkpoint:
        if manifest.epoch in self._replacing:
            self._replacing.discard(manifest.epoch)
            self._overwrite.add(manifest.attempt)
        self._has_saved = True
        for replicator in self._replicators:
            replicator.nudge()
        return super()._committed(told, watch, manifest, tally)

    # ---- removing ------------------------------------------------------------------------------------------

    def _protected(self, *, at_need: bool) -> dict[int, str]:
        return {**super()._protected(at_need=at_need), **({} if at_need else self._awaited())}

    def _awaited(self) -> dict[int, str]:
        """Epochs that a lower tier wants and has not, as far as this process knows."""
        return {e.epoch: f"not in {r.url} yet" for r in reversed(self._replicators) for e in r.awaited()}

    def _prune(
        self,
        policy: AnyPolicy | None = None,
        *,
        dry_run: bool = False,
        deep: bool = True,
        weigh: bool = False,
        at_need: bool = False,
        coming: Sequence[EpochInfo] = (),
    ) -> PruneReport:
        awaited = self._awaited() if at_need and not dry_run else {}
        report = super()._prune(policy, dry_run=dry_run, deep=deep, weigh=weigh, at_need=at_need, coming=coming)
        for epoch in sorted(report.removed.keys() & awaited.keys()):
            log.error("epoch %d was deleted from %s for want of space: it was %s", epoch, self.url, awaited[epoch])
        return report

    def delete(self, epoch: int) -> None:
        """Delete an epoch from all tiers, the first one first.

        Raises:
            EpochNotFoundError: it is in none.
            StoreError: a tier failed. Those before it have deleted it; call it again.
        """
        number = check_epoch(epoch)
        entry = self._roll.look().get(number)
        attempts = set() if entry is None else {entry.first.attempt}
        there = entry is not None
        if there:
            with suppress(EpochNotFoundError):
                super().delete(number)
        below = [replicator.delete(number, attempts) for replicator in self._replicators]
        if not there and not any(below):
            raise self._nowhere(number)

    def pin(self, epoch: int, reason: str) -> None:
        """Pin an epoch in every tier that has it, and in the others as soon as they do.

        Raises:
            EpochNotFoundError: it is in none.
            StoreError: a tier failed; if the first has it, it is pinned there, and the rest follows by itself.
        """
        number, text = check_epoch(epoch), pins.check_reason(reason)
        pinned = False
        for catalog in self._catalogs():
            with suppress(EpochNotFoundError):
                pins.put(catalog, number, text)
                pinned = True
        if not pinned:
            raise self._nowhere(number)

    def unpin(self, epoch: int) -> bool:
        """Take the pin away in all tiers, the last one first; False if there was none."""
        number = check_epoch(epoch)  # the first one last: its pin would come back to the others
        removed = [pins.remove(catalog.store, number) for catalog in reversed(list(self._catalogs()))]
        return any(removed)

    def pins(self) -> dict[int, str]:
        """The pinned epochs of all tiers, ascending, each with its reason (that of the nearest tier)."""
        found: dict[int, str] = {}
        for catalog in self._catalogs():
            found = {**pins.pinned(catalog.store), **found}
        return dict(sorted(found.items()))

    def quarantine(self, epoch: int, reason: str) -> None:
        """Set an epoch aside in every tier that has it; while it is, it is not copied to the others.

        Raises:
            EpochNotFoundError: it is in none.
            StoreError: a tier failed; the first has done it, if it has the epoch.
        """
        number, text = check_epoch(epoch), pins.check_reason(reason, "a quarantine")
        found = [set_aside(catalog, number, text) for catalog in self._catalogs()]
        if not any(found):
            raise self._nowhere(number)

    def release(self, epoch: int) -> bool:
        """Take an epoch out of quarantine in all tiers; False if it was not set aside."""
        number = check_epoch(epoch)
        found = [marks.remove(catalog.store, number) for catalog in self._catalogs()]
        return any(found)

    def quarantined(self) -> dict[int, str]:
        """The epochs that are set aside in any tier, ascending, each with its reason."""
        found: dict[int, str] = {}
        for catalog in self._catalogs():
            found = {**catalog.quarantined(), **found}
        return dict(sorted(found.items()))

    def holds(self) -> dict[int, str]:
        """The epochs that readers hold now in any tier, ascending, each with who does (in the nearest tier)."""
        found: dict[int, str] = {}
        for catalog in self._catalogs():
            found = {**{commit.epoch: why for commit, why in holds(catalog, writes=False).items()}, **found}
        return dict(sorted(found.items()))

    # ---- reading -------------------------------------------------------------------------------------------

    def latest(
        self,
        deep: bool = False,
        progress: Progress | None = None,
        run_id: str | None = None,
        need: Collection[str] = (),
    ) -> Checkpoint | None:
        """As of any repository, over all tiers. An epoch of which the tiers have every object together is intact.

        Raises:
            StoreError: a tier does not answer, and might have a newer one. ``members[0].latest()`` asks only the first.
        """
        run, names = None if run_id is None else options.check_run_id(run_id), options.check_need(need)
        place, skipped = self._together.newest_intact(deep=deep, run=run, need=names, progress=progress)
        if place is not None:
            self._tell_of_newest(place[1], skipped)
            return self._from(self._together.fullest(place), skipped)
        if skipped:
            reasons = "; ".join(map(str, skipped))
            raise CorruptionError(f"no epoch in {self.url} or below is intact: {reasons}", key=skipped[0].key)
        self._foundation.require()
        return None

    def checkpoint(self, epoch: int) -> Checkpoint:
        """The checkpoint of one epoch, from the nearest tier that has it.

        Raises:
            EpochNotFoundError: it is in none.
            CorruptionError: its manifest is damaged wherever it is.
            StoreError: a tier failed that had to be asked.
        """
        number = check_epoch(epoch)
        place = self._together.nearest(number)
        if place is None:
            self._foundation.require()
            raise self._nowhere(number)
        return self._from(self._together.fullest(place))

    def epochs(self) -> list[int]:
        """The numbers of all epochs, in all tiers, ascending. One listing a tier."""
        found = {commit.epoch for catalog in self._catalogs() for commit in catalog.committed()}
        if not found:
            self._foundation.require()
        return sorted(found)

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
        """Check one epoch where it is nearest, or all of the first tier. (``members[1].verify()`` checks the next.)"""
        if epoch is None:
            return super().verify(None, deep, progress, sample, quarantine=quarantine, resume=resume)
        with suppress(EpochNotFoundError):
            return super().verify(epoch, deep, progress, sample, quarantine=quarantine, resume=resume)
        for replicator in self._replicators:
            member = replicator.repository(create=False)
            with suppress(EpochNotFoundError):
                if member is not None:
                    return member.verify(epoch, deep, progress, sample, quarantine=quarantine, resume=resume)
        raise self._nowhere(epoch)

    def repair(
        self,
        *,
        epoch: int | None = None,
        sources: Iterable[Caring | str | os.PathLike[str]] = (),
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> RepairReport:
        """As of any repository: the first tier is mended. Lower tiers that answer are sources, after those given."""
        below: list[Caring] = []
        for replicator in self._replicators:
            try:
                member = replicator.repository(create=False)
                if member is not None:
                    member._foundation.require()
                    below.append(member)
            except CkptStoreError as error:
                log.warning("%s is no source of this repair: %s", replicator.url, error)
        return super().repair(epoch=epoch, sources=[*sources, *below], dry_run=dry_run, progress=progress)

    def _catalogs(self) -> Iterator[Catalog]:
        """Of all tiers that exist, the nearest first; each is opened when it is its turn."""
        yield self._catalog
        for replicator in self._replicators:
            member = replicator.repository(create=False)
            if member is not None:
                yield member._catalog

    def _from(self, place: Place, skipped: Sequence[Skipped] = (), report: Tally | None = None) -> Checkpoint:
        catalog, manifest = place
        url = catalog.store.traits.url
        return Checkpoint(
            catalog,
            manifest,
            skipped=skipped,
            report=report,
            on_load=self._loaded,
            on_damage=self._damaged,
            again=partial(self._again, url),
            spare=Copies(url, manifest.epoch, partial(self._together.others, place)),
        )

    def _again(self, url: str, manifest: Manifest, skipped: Sequence[Skipped], report: Tally | None) -> Checkpoint:
        """Out of a pickle."""
        catalog = next((c for c in self._catalogs() if c.store.traits.url == url), self._catalog)
        return self._from((catalog, manifest), skipped, report)

    def _checkpoint(
        self, manifest: Manifest, skipped: Sequence[Skipped] = (), report: Tally | None = None
    ) -> Checkpoint:
        return self._from((self._catalog, manifest), skipped, report)

    def _nowhere(self, epoch: int) -> EpochNotFoundError:
        return EpochNotFoundError(f"there is no epoch {epoch} in {self.url} and its lower tiers", epoch=epoch)

    # ---- closing -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for a background save; then, as long as ``exit_timeout`` allows, for the tiers that are well.

        What is not copied by then is said in the log, and the next process that opens these tiers goes on with it.

        Raises:
            DeadlineError, Exception: as of any repository.
        """
        self._background.close()
        try:
            self._wait_and_tell()
        finally:
            _stop_all(self._replicators)
            try:
                super().close()
            finally:
                for replicator in self._replicators:
                    replicator.close()

    def wait_at_exit(self) -> None:
        """At the exit of the interpreter: as ``close``, but only waiting and telling."""
        self._wait_and_tell()

    def _wait_and_tell(self) -> None:
        end = time.monotonic() + self._background._exit_timeout
        for replicator in filter(_has_to_look, self._replicators):
            replicator.wait(replicator.nudge(), end, while_well=True)
        for replicator in self._replicators:
            if not replicator.at_work:
                continue
            with suppress(Exception):
                waiting = [str(entry.epoch) for entry in replicator.waiting()[::-1]]
                if waiting:
                    why = f": {replicator.error}" if replicator.error is not None else ""
                    log.warning(
                        "%s lacks epoch %s%s. It is in %s, and copied by the next process that opens these tiers",
                        replicator.url, ", ".join(waiting), why, self.url,
                    )  # fmt: skip


def _has_to_look(replicator: Replicator) -> bool:
    """Whether it is at work, or seems to lack something that another process has saved, and perhaps copied too."""
    with suppress(Exception):
        return replicator.busy or (replicator.at_work and replicator.error is None and bool(replicator.waiting()))
    return False


def _exists(tier: Lower) -> bool:
    try:
        found = tier.find()
    except RepositoryNotFoundError:
        return False
    found.close()
    return True


def _required(member: Repository | None) -> Repository:
    assert member is not None
    return member


def _stop_all(replicators: Sequence[Replicator]) -> None:
    """Stop them side by side."""
    threads = [threading.Thread(target=each.stop, name="ckptstore-tier", daemon=True) for each in replicators]
    with suppress(RuntimeError):  # the very end of the interpreter: no thread starts any more
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * GRACE_SECONDS)
