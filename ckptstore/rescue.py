"""Rescue: what a save does before it gives up. Make room and try again; save elsewhere; let the run go on without it.

    certainly too big? ─▶ attempt ─▶ full? make room, attempt again ─▶ failed? spill ─▶ failed? forgive or raise

Every attempt is a whole transaction: one that fails leaves every earlier epoch as it was.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore import options
from ckptstore.background import Attempt, Begin
from ckptstore.catalog import Catalog
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptStoreError, StoreFullError
from ckptstore.failures import Failures, is_of_the_store
from ckptstore.launch import TIMEOUT
from ckptstore.manifest import RankOf
from ckptstore.pace import Pace
from ckptstore.pipeline import Progress
from ckptstore.preflight import OVERHEAD, Preflight, check_place, human, lacking, measure, what_may_go
from ckptstore.reclaim import Holdings, Reclaim, deletable_now
from ckptstore.stores.reserve import ReserveStore
from ckptstore.transaction import Transaction
from ckptstore.tree import FlatState

log = logging.getLogger("ckptstore")

Spill = Callable[["Work", Exception], Checkpoint | None]


@dataclass(frozen=True, slots=True)
class Work:
    """A state to save, and how: ``attempt`` begins (with what it is given), writes and commits."""

    epoch: int
    metadata: Any  # skeleton
    replace: bool
    progress: Progress | None
    flats: Mapping[str, FlatState]
    attempt: Attempt
    left_out: Mapping[str, str]
    begun: float = 0.0  # when the trainer called, as time.perf_counter says it
    held: float | None = None  # how long that held it, where the save goes on in the background
    rank: RankOf | None = None  # where several processes save it together
    timeout: float = TIMEOUT


class Rescue:
    """Sees the saves of one repository through."""

    def __init__(
        self,
        catalog: Catalog,
        reserve: ReserveStore,
        pace: Pace,
        reclaim: Reclaim,
        failures: Failures,
        form: tuple[int, str],
    ) -> None:
        """``form`` is the size of chunks and the codec."""
        self._catalog = catalog
        self._reserve = reserve
        self._pace = pace
        self._reclaim = reclaim
        self._form = form
        self._share = 1.0  # bytes sent for each byte of state, last time
        self._size = 0  # bytes of that state: what goes beyond them cannot be there already
        self.failures = failures
        self.spill: Spill | None = None

    def save(
        self, begin: Begin, work: Work, on_failure: Callable[[BaseException], None] = lambda error: None
    ) -> Checkpoint | Exception:
        """The committed checkpoint, or the error, if the run is to go on without it.

        Args:
            on_failure: told how it failed here, whatever is done about that.

        Raises:
            Exception: what cannot be forgiven.
        """
        try:
            checkpoint = self._save(begin, work)
        except BaseException as error:
            on_failure(error)
            if not isinstance(error, Exception) or not is_of_the_store(error):
                raise
            # A rank is not tried again alone, here or elsewhere: the others have given up by now.
            spilled = self.spill(work, error) if self.spill is not None and work.rank is None else None
            if spilled is not None:
                self.failures.over()
                return spilled
            if self.failures.forgive(work.epoch, error):
                return error
            raise
        self.failures.over()
        report = checkpoint.report
        if report is not None and report.bytes_state:
            self._share, self._size = report.bytes_sent / report.bytes_state, report.bytes_state
        self._reserve.make()
        return checkpoint

    def begin(
        self, begin: Callable[[], Transaction], on_failure: Callable[[BaseException], None] = lambda error: None
    ) -> Transaction:
        """A transaction that is written record by record: it cannot be tried again, but it cleans up, and says why."""
        self._reserve.make()
        try:
            txn = begin()
        except BaseException as error:
            if isinstance(error, StoreFullError):
                self._explain(error, None)
            on_failure(error)
            raise
        txn.on_full = self._after_full
        txn.on_failure = on_failure
        return txn

    def _after_full(self, error: StoreFullError, epoch: int) -> None:
        if self._reclaim.on_full != "raise":
            try:
                freed = self._reclaim.sweep()
                log.info("%s is full: removed %d bytes of debris", self._catalog.store.traits.url, freed)
            except (CkptStoreError, OSError) as second:  # never in place of the error that it is about
                log.warning("removing debris failed: %s", second)
        self._explain(error, epoch)

    def _save(self, begin: Begin, work: Work) -> Checkpoint:
        self._reserve.make()
        if work.rank is not None:
            try:
                return work.attempt(begin)
            except StoreFullError as error:
                self._explain(error, work.epoch)
                raise
        needed = self._look(work)
        if needed is None:
            try:
                return work.attempt(begin)
            except StoreFullError as error:
                full = error
            needed = self._measured(work)
        else:
            full = StoreFullError("no space left on the device", epoch=work.epoch, errno=errno.ENOSPC)
        return self._again(begin, work, full, needed)

    def _look(self, work: Work) -> int | None:
        """What it needs, if that certainly does not fit as things are; refused if it cannot be made to fit."""
        store = self._catalog.store
        nbytes = options.bytes_of(work.flats)
        expected = nbytes - round(min(nbytes, self._size) * (1.0 - min(self._share, 1.0)))
        if not lacking(store, expected, 0):
            return None
        needed = self._measured(work)
        if needed is None or not lacking(store, needed, 0):
            return None
        if self._hopeless(work, needed):
            error = StoreFullError("nothing was written", epoch=work.epoch, errno=errno.ENOSPC)
            self._explain(error, work.epoch, needed)
            raise error
        # Whatever no checkpoint reaches may be what this save adopts.
        return needed if lacking(store, needed, Holdings(self._catalog).unreached) else None

    def _hopeless(self, work: Work, needed: int) -> bool:
        """Whether it cannot fit, not even when all is gone that may go. If so, nothing should."""
        store = self._catalog.store
        if not lacking(store, needed, 0):
            return False
        try:
            holdings = Holdings(self._catalog)
            more = holdings.unreached + self._reclaim.within_reach(work.epoch, holdings)
        except Exception as error:  # noqa: BLE001 (also of a policy of the user's)
            log.warning("what could be freed is unknown: %s", error)
            return False
        return holdings.legible and lacking(
            store, needed, more + more // 16
        )  # files take a little more than their length

    def _measured(self, work: Work) -> int | None:
        size, codec = self._form
        try:
            return measure(self._catalog, work.epoch, work.flats, chunk_size=size, codec=codec)
        except CkptStoreError as error:
            log.debug("epoch %d could not be measured: %s", work.epoch, error)
            return None

    def _again(self, begin: Begin, work: Work, full: StoreFullError, needed: int | None) -> Checkpoint:
        """Make room, a step at a time, and try again when it may be enough."""
        store = self._catalog.store
        if needed is not None and self._hopeless(work, needed):
            self._explain(full, work.epoch, needed)
            raise full
        reserve = self._reserve.release()
        self._pace.spare_room = True
        for step, freed in enumerate(self._reclaim.steps(work.epoch)):
            had = freed + (reserve if step == 0 else 0)
            if had == 0 or (needed is not None and lacking(store, needed, 0)):
                continue
            log.warning("epoch %d: %s. %d bytes were freed: trying again", work.epoch, full, had)
            try:
                return work.attempt(begin)
            except StoreFullError as error:
                full = error
        self._explain(full, work.epoch, needed)
        raise full

    def _explain(self, error: StoreFullError, epoch: int | None, needed: int | None = None) -> None:
        """Say in the error what is needed, what is free, and what could be deleted."""
        store = self._catalog.store
        space = store.space()
        error.needed = needed + OVERHEAD if needed is not None else error.needed
        error.free = space.room if space is not None else None
        error.deletable = dict(deletable_now(self._reclaim, self._catalog, epoch))
        error.epoch = epoch if error.epoch is None else error.epoch
        facts = [f"{human(error.needed)} are needed"] if error.needed is not None else []
        facts += [f"{human(error.free)} are free"] if error.free is not None else []
        if space is not None and space.room_for_files is not None and space.room_for_files < 16:
            facts.append(f"{space.room_for_files} files (inodes) can be made")
        what = f"epoch {error.epoch} was not saved: " if error.epoch is not None else ""
        advice = what_may_go(error.deletable) if error.deletable else "there is no epoch that could be deleted for it"
        if error.deletable and error.needed is not None and error.free is not None:
            gives = sum(error.deletable.values())
            if error.free + gives < error.needed:
                advice = f"deleting old epochs gives no more than {human(gives)}: use a larger disk"
        error.message = f"{what}{store.traits.url} is full: {', '.join(facts)} ({error.message}); {advice}"


class Preflights:
    """The part of a repository that looks ahead."""

    _catalog: Catalog
    _reclaim: Reclaim

    def preflight(self, state_or_bytes: Mapping[str, object] | int = 0) -> Preflight:
        """Ask the place whether a save would work, by writing and removing a tiny object, and estimate its size.

        Args:
            state_or_bytes: records, as for ``save``, or the bytes of their arrays.

        Raises:
            InvalidArgumentError, InvalidRecordError: no such state.
            StoreError, RepositoryNotFoundError: the store could not be asked. (What it refuses is in the answer.)
        """
        return check_place(self._catalog, options.check_size(state_or_bytes), self._reclaim)
