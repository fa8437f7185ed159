"""Repository: all checkpoints of a run, at one URL. The front door."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import TracebackType

from ckptstore import events, options
from ckptstore.background import Background, Told
from ckptstore.caring import Caring
from ckptstore.catalog import Catalog, Skipped
from ckptstore.checkpoint import Checkpoint
from ckptstore.chunks import CHUNK_SIZE
from ckptstore.errors import CorruptionError
from ckptstore.failures import MAX_FAILURES, Failures, OnError
from ckptstore.fence import Fence
from ckptstore.flights import Flights
from ckptstore.foundation import Foundation
from ckptstore.manifest import Manifest, check_epoch
from ckptstore.pace import Pace
from ckptstore.pickling import Passport, Portable
from ckptstore.pipeline import Progress
from ckptstore.policies import AnyPolicy
from ckptstore.reclaim import OnFull, Reclaim
from ckptstore.removing import Removing
from ckptstore.rescue import Preflights, Rescue
from ckptstore.saving import Saving
from ckptstore.stores import Store
from ckptstore.stores.reserve import ReserveStore
from ckptstore.telling import SaveWatch, timestamp
from ckptstore.tier import Tiers
from ckptstore.writer import Tally

log = logging.getLogger("ckptstore")


class Repository(Removing, Caring, Preflights, Saving, Tiers, Portable):
    """All checkpoints of a run. Made by ``ckptstore.open``; close it, or use it as a context manager."""

    def __init__(
        self,
        store: Store,
        *,
        keep: AnyPolicy | None = None,
        create: bool = True,
        unsafe_single_writer: bool = False,
        chunk_size: int = CHUNK_SIZE,
        codec: str = "auto",
        background_cores: int | None = None,
        exit_timeout: float = options.EXIT_TIMEOUT,
        run_id: str = "",
        on_full: OnFull = "prune",
        on_error: OnError = "raise",
        max_failures: int = MAX_FAILURES,
        every: Mapping[str, int] | None = None,
        on_event: events.Callback | events.Listener | None = None,
        passport: Passport | None = None,
        make_later: bool = False,
    ) -> None:
        self.store = store
        """The store under it, with its wrappers."""
        self._keep = options.check_policy(keep)
        self._every = options.check_every(every)
        self._chunk_size = options.check_chunk_size(chunk_size)
        self._codec = options.check_codec(codec)
        self._background_cores = options.check_background_cores(background_cores)
        self._background = Background(store.traits.url, options.check_exit_timeout(exit_timeout))
        self._flights = Flights(self._background)
        reserve = ReserveStore(store)
        self._catalog = Catalog(reserve)
        self._fence = Fence(self._catalog, options.check_run_id(run_id))
        self._events = events.Emitter(self.url, run_id, events.listener_of(on_event))
        self._pace = Pace()
        self._reclaim = Reclaim(self._catalog, self._prune, self._keep, options.check_on_full(on_full))
        on_error, max_failures = options.check_on_error(on_error), options.check_max_failures(max_failures)
        self._failures = Failures(self.url, on_error, max_failures)
        form = self._chunk_size, self._codec
        self._rescue = Rescue(self._catalog, reserve, self._pace, self._reclaim, self._failures, form)
        self._resumed: set[int] = set()
        self._has_saved = False
        self._foundation = Foundation(
            self._catalog,
            create=options.check_flag("create", create),
            unsafe_single_writer=options.check_flag("unsafe_single_writer", unsafe_single_writer),
            known=passport.id if passport is not None else None,
            later=make_later,
        )
        if passport is not None:
            self._show(passport)

    @property
    def id(self) -> str:
        """32 hexadecimal digits that name this repository wherever it is copied to."""
        return self._foundation.id

    @property
    def spill(self) -> Repository | None:
        """The repository that takes what this one cannot (``ckptstore.open(.., spill=URL)``), or None."""
        return None

    def __repr__(self) -> str:
        return f"<Repository {self.url}>"

    @property
    def url(self) -> str:
        """Where it is. Never holds a secret."""
        return self.store.traits.url

    @property
    def run_id(self) -> str:
        """The name of the run that saves here; empty if it has none."""
        return self._fence.run

    # ---- reading -------------------------------------------------------------------------------------------

    def latest(
        self,
        deep: bool = False,
        progress: Progress | None = None,
        run_id: str | None = None,
        need: Collection[str] = (),
    ) -> Checkpoint | None:
        """The newest intact checkpoint; None only if the repository is proven to be empty.

        Steps back over damaged epochs; ``.skipped`` of the result tells which and why. By default manifests and indexes
        are verified and chunks looked up by name and size; ``deep`` reads every byte. (Loading verifies every
        byte in any case.)

        Args:
            run_id: look only at what this run has saved (``repo.run_id`` for one's own); then None says that it has
                saved nothing.
            need: names of records; an epoch that lacks one is passed by. None says that no epoch has them all.

        Raises:
            CorruptionError: there are epochs, but none is intact.
            FormatError: the newest was written by a newer version.
            RepositoryNotFoundError: the repository has vanished (is the mount there?).
            StoreError: the store did not answer. Never taken for "no checkpoint".
        """
        run, names = None if run_id is None else options.check_run_id(run_id), options.check_need(need)
        look = partial(self._catalog.newest_intact, deep=deep, progress=progress, run=run, need=names)
        manifest, skipped = look()
        if manifest is None and (run is not None or names):  # see below; of the others we would not know
            manifest, skipped = look()
        if manifest is not None:
            self._tell_of_newest(manifest, skipped)
            return self._checkpoint(manifest, skipped=skipped)
        if skipped:
            reasons = "; ".join(map(str, skipped))
            raise CorruptionError(f"no epoch in {self.url} is intact: {reasons}", key=skipped[0].key)
        self._foundation.require()
        if (
            run is None and not names and self._catalog.committed()
        ):  # a listing beside a replace can miss both generations: again
            return self.latest(deep, progress)
        return None

    def checkpoint(self, epoch: int) -> Checkpoint:
        """The checkpoint of one epoch (its newest generation).

        Raises:
            EpochNotFoundError: there is none.
            CorruptionError: its manifest is damaged.
        """
        return self._checkpoint(self._newest(check_epoch(epoch)))

    def epochs(self) -> list[int]:
        """The numbers of all committed epochs, ascending. One listing."""
        commits = self._catalog.committed()
        if not commits:
            self._foundation.require()
            commits = self._catalog.committed()
        return sorted({commit.epoch for commit in commits})

    # ---- closing -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for a background save, then release its memory and all connections. May be called twice.

        Raises:
            DeadlineError: it did not end within ``exit_timeout``; nothing was released.
            Exception: that of the background save, if nobody has asked for it. All was released.
        """
        self._background.close()
        self._failures.last_words()
        self.store.close()
        self._events.flush()
        self._background.surface()

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            log.error("closing %s failed too: %s", self.url, second)  # noqa: TRY400 (the first error goes on)

    # ---- inside --------------------------------------------------------------------------------------------

    def _checkpoint(
        self, manifest: Manifest, skipped: Sequence[Skipped] = (), report: Tally | None = None
    ) -> Checkpoint:
        return Checkpoint(
            self._catalog,
            manifest,
            skipped=skipped,
            report=report,
            on_load=self._loaded,
            on_damage=self._damaged,
            again=self._checkpoint,
        )

    def _tell_of_newest(self, manifest: Manifest, skipped: Sequence[Skipped]) -> None:
        for step in skipped:
            log.warning("skipped %s", step)
            self._events.tell(events.DamageFound, epoch=step.epoch, key=step.key, reason=step.reason)
        self._events.tell(events.NewestFound, epoch=manifest.epoch, committed_at=timestamp(manifest.created))
        self._failures.note(manifest.epoch, manifest.created)

    def _loaded(self, epoch: int, nbytes: int, seconds: float) -> None:
        if not self._has_saved:
            self._resumed.add(epoch)
        self._events.tell(events.RestoreDone, epoch=epoch, nbytes=nbytes, seconds=seconds)

    def _damaged(self, error: CorruptionError) -> None:
        self._events.tell(events.DamageFound, epoch=error.epoch, key=error.key or "", reason=error.message)

    def _committed(self, told: Told, watch: SaveWatch, manifest: Manifest, tally: Tally) -> Checkpoint:
        """A save has committed. Only now may retention run, and it cannot fail the save (P5)."""
        told()
        self._has_saved = True
        self._failures.note(manifest.epoch, manifest.created)
        pruned = 0
        try:
            if self._keep is not None:
                pruned = len(self.prune(self._keep, deep=False).removed)
        except BaseException as error:  # whatever it is, also in a policy of the user's: the epoch is committed
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C, or a signal handler that ends the program
            log.warning("epoch %d is committed; pruning failed and will be tried again: %r", manifest.epoch, error)
        finally:
            watch.committed(manifest, tally, pruned)
        return self._checkpoint(manifest, report=tally)
