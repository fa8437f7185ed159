"""Saving: how a repository saves. In one process or several, now or in the background, at once or record by record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from ckptstore import events, options
from ckptstore.background import Attempt, Background, Begin, SaveHandle, Told
from ckptstore.catalog import Catalog
from ckptstore.checkpoint import Checkpoint
from ckptstore.events import Emitter
from ckptstore.fence import Fence
from ckptstore.flights import Flights
from ckptstore.foundation import Foundation
from ckptstore.gathered import Gathered
from ckptstore.launch import TIMEOUT, rank_of
from ckptstore.manifest import Manifest, RankOf, check_epoch
from ckptstore.pace import Pace
from ckptstore.pipeline import Meter, Progress
from ckptstore.ranks import RankTransaction, telling, transaction_for
from ckptstore.rescue import Rescue, Work
from ckptstore.telling import SaveWatch
from ckptstore.transaction import Plan, Transaction
from ckptstore.tree import FlatState
from ckptstore.writer import Tally


class Saving(Gathered):
    """The part of a repository that saves."""

    _background: Background
    _background_cores: int
    _catalog: Catalog
    _chunk_size: int
    _codec: str
    _events: Emitter
    _every: dict[str, int]
    _fence: Fence
    _flights: Flights
    _foundation: Foundation
    _has_saved: bool
    _pace: Pace
    _rescue: Rescue
    _committed: Callable[[Told, SaveWatch, Manifest, Tally], Checkpoint]

    def save(
        self,
        epoch: int,
        records: Mapping[str, object],
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        progress: Progress | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        group: str | None = None,
        timeout: float = TIMEOUT,
    ) -> Checkpoint | Any:
        """Save a checkpoint: all records, durably, or nothing.

        Args:
            epoch: an epoch or step number, 0 to 2**63 - 1.
            records: a state by record name, e.g. ``{"model": model.state_dict(), ...}``, or an open ``FileSource``.
            metadata: plain values about it, e.g. metrics. Stored in the manifest, returned exactly.
            replace: an existing epoch is replaced; its old content stays until the new one is committed.
            progress: called with ``(bytes done, bytes in all)``, from worker threads.
            rank: as for ``begin``; each rank gives its own ``records``, maybe none.
            world_size: as for ``begin``; each rank gives its own ``records``, maybe none.
            group: as for ``begin``; each rank gives its own ``records``, maybe none.
            timeout: as for ``begin``; each rank gives its own ``records``, maybe none.

        Returns:
            The committed checkpoint; its ``report`` tells what was moved. With ``on_error="warn"`` None, if it failed.

        Raises:
            InvalidRecordError: something cannot be stored exactly. Raised before anything is written.
            EpochExistsError: the epoch is committed already, or another writer was first.
            FencedError: another process has taken the run over (``run_id``).
            StoreError: the store failed; every earlier epoch is as it was, and the save can be called again.
            TransactionError: the attempt was cut off; save again.
            RanksFailedError: other ranks failed or are missing; nothing was committed.
        """
        begun = time.perf_counter()
        options.check_flag("replace", replace)
        number, who = check_epoch(epoch), rank_of(rank, world_size, group)
        with telling(self._catalog, who, number):
            skeleton = options.check_metadata(metadata)
            Meter(progress, 0)  # refuses what cannot be called
            states, left_out = self._due(records, number, who)
            self._background.settle()
            flats = options.flatten_all(states, part=who is not None)

        def attempt(begin: Begin) -> Checkpoint:
            with begin(options.bytes_of(flats), lambda: None) as txn:
                for name, state in states.items():
                    txn.write_flat(name, flats[name], live=state)
                checkpoint: Checkpoint = txn.commit()
            return checkpoint

        with self._flights.call():
            outcome = self._save(
                Work(number, skeleton, replace, progress, flats, attempt, left_out, begun, None, who, timeout)
            )
        return outcome if isinstance(outcome, Checkpoint) else None

    def save_async(
        self,
        epoch: int,
        records: Mapping[str, object],
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        progress: Progress | None = None,
        when_busy: options.WhenBusy = "wait",
        *,
        rank: int | None = None,
        world_size: int | None = None,
        group: str | None = None,
        timeout: float = TIMEOUT,
    ) -> SaveHandle:
        """Save a checkpoint in the background: returns when the state is copied, and you may change it (files are not).

        The memory of the copy is allocated by the first call and used again until ``close``. An error is raised by
        ``result()``; if nobody asks, by the next save (which then has not happened) or by ``close``.

        Args:
            epoch: as for ``save``.
            records: as for ``save``.
            metadata: as for ``save``.
            replace: as for ``save``.
            progress: as for ``save``.
            when_busy: while an earlier one is in flight "wait" for it, "skip" this one (the handle says ``skipped``),
                or raise an "error".
            rank: as for ``save``; then ``when_busy`` must be "wait", on all ranks.
            world_size: as for ``save``; then ``when_busy`` must be "wait", on all ranks.
            group: as for ``save``; then ``when_busy`` must be "wait", on all ranks.
            timeout: as for ``save``; then ``when_busy`` must be "wait", on all ranks.

        Raises:
            InvalidRecordError, InvalidArgumentError: as for ``save``.
            BusyError: an earlier one is in flight, and ``when_busy`` is "error".
            Exception: that of an earlier background save, if nobody has asked for it.
        """
        begun = time.perf_counter()
        options.check_flag("replace", replace)
        number, who = check_epoch(epoch), rank_of(rank, world_size, group)
        options.check_when_busy(when_busy, alone=who is None)

        def save(flats: dict[str, FlatState], attempt: Attempt) -> Checkpoint | Exception:
            held = time.perf_counter() - begun  # until now: the trainer goes on as this thread begins
            work = Work(number, skeleton, replace, progress, flats, attempt, left_out, begun, held, who, timeout)
            return self._save(work, self._background_cores)

        with telling(self._catalog, who, number):
            states, left_out = self._due(records, number, who)
            skeleton = options.check_metadata(metadata)
            Meter(progress, 0)
            flatten = partial(options.flatten_all, states, part=who is not None)
            handle = self._background.save(number, flatten, save, when_busy)
        if handle.skipped:
            self._events.tell(events.SaveSkipped, epoch=number)
        return handle

    def _save(self, work: Work, cores: int | None = None) -> Checkpoint | Exception:
        """See a save through. An error in place of the checkpoint was forgiven."""

        watch = SaveWatch(self._events, work.epoch, options.bytes_of(work.flats), work.begun, work.held)

        def begin(total: int, told: Told) -> Transaction:
            meter = Meter(work.progress, total)
            others = (meter, watch, cores, told, work.left_out, work.rank, work.timeout)
            return self._begin(work.epoch, work.metadata, work.replace, *others)

        return self._rescue.save(begin, work, watch.failed)

    def begin(
        self,
        epoch: int,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        *,
        progress: Progress | None = None,
        total: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        group: str | None = None,
        timeout: float = TIMEOUT,
    ) -> Transaction:
        """Begin a checkpoint that is written record by record.

        Use it as a context manager: leaving the block commits, an exception aborts. ``progress`` is called with
        ``(bytes done, total)``; ``total`` is yours to give, because the records are not known yet.

        With ``rank`` and ``world_size``, that many processes save one checkpoint together, and each writes its part of
        it (see docs/ranks.md). Leaving the block waits for the others: all get the checkpoint, or all an error.

        Args:
            rank: 0 to ``world_size`` - 1. Metadata, pruning and the fence of ``run_id`` are those of rank 0.
            group: a name that all ranks of this launch have, and no other launch; by default what torchrun or Slurm
                tell.
            timeout: how many seconds a rank that is ready waits for the others, up to a day.

        Raises:
            EpochExistsError, InvalidArgumentError, InvalidRecordError, StoreError: before anything was committed.
        """
        number, who = check_epoch(epoch), rank_of(rank, world_size, group)
        with telling(self._catalog, who, number):
            skeleton = options.check_metadata(metadata)
            self._background.settle()
            meter = Meter(progress, total)
        watch = SaveWatch(self._events, number, 0, time.perf_counter())
        others: dict[str, Any] = {"rank": who, "timeout": timeout}
        return self._rescue.begin(lambda: self._begin(number, skeleton, replace, meter, watch, **others), watch.failed)

    def _begin(
        self,
        epoch: int,
        metadata: Any,
        replace: bool,
        meter: Meter,
        watch: SaveWatch,
        cores: int | None = None,
        told: Told = lambda: None,
        left_out: Mapping[str, str] = MappingProxyType({}),
        rank: RankOf | None = None,
        timeout: float = TIMEOUT,
        kind: type[Transaction] | None = None,
    ) -> Transaction:
        options.check_flag("replace", replace)
        options.check_timeout("timeout", timeout)
        made = kind or transaction_for(rank)
        with telling(self._catalog, rank if kind is None else None, epoch):
            if not self._has_saved:
                self._foundation.require(restore=True)
            self._foundation.prepare_to_write()
            # All ranks are one writer of the run: that which commits.
            commits = self._catalog.committed() if issubclass(made, RankTransaction) else self._fence.enter()
            if not commits and self._has_saved:  # a listing with commits shows as well that the place has not vanished
                self._foundation.require(restore=True)
        form = self._chunk_size, self._codec, self._foundation.id, self._fence
        plan = Plan(epoch, metadata, replace, *form, cores, self._pace, left_out, rank, timeout)
        txn = made(self._catalog, plan, commits, partial(self._committed, told, watch), meter)
        self._flights.add(txn)
        return txn

    def _due(self, records: Mapping[str, object], epoch: int, who: RankOf | None) -> tuple[dict[str, object], Any]:
        """The records that are saved at this epoch, and why the others are not. A rank may have none: others have."""
        if who is not None and not records:
            return {}, {}
        return options.due(options.check_records(records), self._every, epoch, some=who is None)
