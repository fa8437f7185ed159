"""Transaction: begin → write* → commit | abort. With ``commit.py`` the whole protocol (docs/format.md section 6).

    begin   lease (naming what we may refer to) → look whether that is still there
    write   chunks, then the record index; every put has returned before the next step
    commit  renew the lease → put the manifest if absent → look once more → remove the lease

Until the manifest exists nothing has happened; once it exists everything has (P1).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.claim import Claim
from ckptstore.commit import Commit, epoch_exists
from ckptstore.errors import (
    CkptStoreError,
    InvalidRecordError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    TransactionError,
)
from ckptstore.fence import Fence
from ckptstore.files import FileSource
from ckptstore.launch import TIMEOUT
from ckptstore.lease import HeldLease
from ckptstore.manifest import MAX_RECORDS, Manifest, RankOf, RecordEntry, check_record_name, writer_version
from ckptstore.pace import Pace
from ckptstore.pipeline import Meter
from ckptstore.shards import form_of
from ckptstore.sweep import remove_attempt
from ckptstore.tree import FlatState, flatten
from ckptstore.writer import RecordWriter, Tally

log = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a transaction is to save, decided before anything is written."""

    epoch: int
    metadata: Any  # skeleton
    replace: bool
    chunk_size: int
    codec: str
    repository: str
    fence: Fence
    cores: int | None = None  # at most so many busy threads; None: all cores of this process
    pace: Pace | None = None  # what earlier saves found out about the store's speed
    left_out: Mapping[str, str] = field(default_factory=dict)  # record → why it is not saved this time
    rank: RankOf | None = None  # where several processes save it together
    timeout: float = TIMEOUT  # seconds that a rank which is ready waits for the others


class Transaction:
    """One attempt to write a checkpoint. Use it as a context manager; made by ``Repository.begin``.

    Leaving the ``with`` block commits; an exception aborts, and every earlier epoch is as it was. Not for
    use by several threads at once.
    """

    def __init__(
        self,
        catalog: Catalog,
        plan: Plan,
        commits: list[Committed],
        on_commit: Callable[[Manifest, Tally], Any],
        meter: Meter,
    ) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._plan = plan
        self._on_commit = on_commit
        self._pid = os.getpid()
        self._names: set[str] = set()
        self.on_full: Callable[[StoreFullError, int], None] | None = None  # told when all of it has been cleaned up
        self.on_failure: Callable[[BaseException], None] = lambda error: None  # told, where it ends uncommitted
        self._state = "open"
        self._abandoned = False
        self.ended = False
        """Whether it is through: committed, with all that follows, or given up."""
        self._generation = self._next_generation(commits)
        rank = plan.rank
        self._attempt = keys.new_attempt() if rank is None else keys.new_rank_attempt(plan.epoch, rank.rank)
        self._lease = HeldLease(self._store, self._attempt, plan.epoch, rank)
        self._claim = Claim(catalog, self._lease)
        self._step = Commit(catalog, self._lease, self._claim, plan.fence)
        self._writer = self._make_writer(meter)
        try:
            with self.tally.timed("begin"):
                self._claim.take(commits)
            self._lease.stop_when_gone(self)
            self._lease.start()
        except Exception as error:
            self._give_up(error)
            raise

    def _make_writer(self, meter: Meter) -> RecordWriter:
        plan = self._plan
        return RecordWriter(
            self._store,
            self._attempt,
            self._claim.known,
            chunk_size=plan.chunk_size,
            codec=plan.codec,
            cores=plan.cores,
            pace=plan.pace,
            part=plan.rank is not None,
            meter=meter.add,
        )

    def _next_generation(self, commits: list[Committed]) -> int:
        same = [commit for commit in commits if commit.epoch == self.epoch]
        if same and not self._plan.replace:
            raise epoch_exists(self.epoch, same[-1].key)
        return same[-1].generation + 1 if same else 1

    @property
    def epoch(self) -> int:
        """The epoch that this transaction saves."""
        return self._plan.epoch

    @property
    def tally(self) -> Tally:
        """Bytes of the state, bytes reused and bytes sent so far."""
        return self._writer.tally

    # ---- writing -------------------------------------------------------------------------------------------

    def write(self, name: str, state: object) -> None:
        """Write one record: any nesting of dicts, lists, tuples, plain values and arrays.

        Raises:
            InvalidRecordError: the name is bad or taken, something in ``state`` cannot be stored exactly (nothing
                of it was written), or its structure changed while it was being saved.
            StoreError: the store failed; the transaction can only be aborted.
            TransactionError: the transaction is closed.
        """
        self._check_open(name)
        self.write_flat(name, flatten(state, name, part=self._plan.rank is not None), live=state)

    def write_flat(self, name: str, flat: FlatState, *, live: object = None) -> None:
        """Write a record that was flattened before.

        Args:
            live: the state it was made from, if others can still change that: it is proved to have kept its structure.
        """
        self._check_open(name)
        self._run(name, lambda: self._writer.write_state(name, flat))
        if live is not None:
            self._prove_structure(name, flat, live)

    def _prove_structure(self, name: str, flat: FlatState, state: object) -> None:
        if flat.unchanged():
            return
        again = flatten(state, name, part=flat.part)  # other objects, but maybe equal ones
        if again.skeleton != flat.skeleton or [*map(form_of, again.arrays)] != [*map(form_of, flat.arrays)]:
            self._state = "failed"
            raise InvalidRecordError(
                f"record {name!r} changed its structure while it was being saved: nothing was committed. "
                "Do not change a state from another thread during a save, or copy it first",
                epoch=self.epoch,
            )

    def write_file(self, name: str, path: str | os.PathLike[str] | FileSource) -> None:
        """Write one record from a file: the bytes of any file of any trainer.

        Args:
            path: the file, or one that is open already: that stays open.

        Raises:
            NotFoundError: no such file.
            InvalidRecordError: it cannot be read, or it changed while it was being saved.
            StoreError, TransactionError: as ``write``.
        """
        self._check_open(name)

        def write() -> None:
            with nullcontext(path) if isinstance(path, FileSource) else FileSource(Path(path)) as source:
                self._writer.write_state(name, flatten(source, name))

        self._run(name, write)

    def _run(self, name: str, write: Any) -> None:
        try:
            self._names.add(name)
            if self._plan.rank is not None:
                self._claim.learn(name)
            with self.tally.timed("write"):
                write()
        except BaseException:
            self._state = "failed"
            raise

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # the threads that do its work have stayed behind: it would wait for ever
            raise TransactionError(
                f"the save of epoch {self.epoch} was begun in process {self._pid}: only that one can go on with it",
                epoch=self.epoch,
            )

    def _check_open(self, name: str) -> None:
        self._check_process()
        if self._state != "open":
            raise TransactionError(
                f"this transaction is {self._state}: begin a new one to save epoch {self.epoch}", epoch=self.epoch
            )
        check_record_name(name)
        if name in self._names:
            raise InvalidRecordError(f"record {name!r} was already written in this transaction", epoch=self.epoch)
        if len(self._names) >= MAX_RECORDS:
            raise InvalidRecordError(f"a checkpoint has at most {MAX_RECORDS} records: nest them", epoch=self.epoch)

    def settle(self) -> list[RecordEntry]:
        """Wait until all that was written is on the store. ``commit`` does it too.

        Raises:
            StoreError: the store failed; the transaction can only be aborted.
        """
        self._check_process()
        try:
            with self.tally.timed("write"):
                return self._settle()
        except BaseException:
            self._state = "failed"
            raise

    def _settle(self) -> list[RecordEntry]:
        return self._writer.settle()

    # ---- commit --------------------------------------------------------------------------------------------

    def commit(self) -> Any:
        """Make the checkpoint exist, durably. Returns it.

        Raises:
            EpochExistsError: another writer committed this epoch first.
            FencedError: the run has a newer writer; nothing was committed.
            TransactionError: closed, empty, or swept away because it was silent for too long; nothing was committed.
            OutcomeUnknownError: the answer to the commit was lost and could not be read back.
            StoreError: nothing was committed.
        """
        self._check_can_end()
        self._check_content()
        self._state = "failed"  # until proven otherwise
        entries = self._all_entries()
        with self.tally.timed("commit"):
            manifest = self._commit(tuple(entries))
        try:
            return self._on_commit(manifest, self.tally)
        finally:
            self.ended = True

    def _check_can_end(self) -> None:
        self._check_process()
        if self._state != "open":
            raise TransactionError(f"this transaction is {self._state} and cannot be committed", epoch=self.epoch)

    def _check_content(self) -> None:
        if not self._names:
            raise TransactionError(f"epoch {self.epoch} has no records: write at least one", epoch=self.epoch)

    def _all_entries(self) -> list[RecordEntry]:
        """All that the manifest is to list, on the store."""
        return self.settle()

    def _tell(self, outcome: Manifest | BaseException) -> None:
        """It is committed, or was given up: for those who save it together with this process. Never raises."""

    def _commit(self, entries: tuple[RecordEntry, ...]) -> Manifest:
        manifest = self._manifest(entries)
        try:
            self._step.run(manifest, self._writer.referenced.values())
        except OutcomeUnknownError:
            self._state = "unsettled"
            raise
        self._state = "committed"
        self._catalog.has_committed(manifest, self._writer.indexes)
        self._writer.close()
        self._tell(manifest)
        self._step.tidy_up(manifest)
        return manifest

    def _manifest(self, entries: tuple[RecordEntry, ...]) -> Manifest:
        attempts = {entry.attempt for entry in entries}
        attempts.update(chunk.attempt for chunk in self._writer.referenced.values())
        return Manifest(
            repository=self._plan.repository,
            epoch=self.epoch,
            generation=self._generation,
            attempt=self._attempt,
            base=self._claim.base.key if self._claim.base is not None else None,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            writer=writer_version(),
            metadata=self._plan.metadata,
            records=entries,
            attempts=tuple(sorted(attempts)),
            bytes_state=self.tally.bytes_state,
            bytes_sent=self.tally.bytes_sent,
            bytes_reused=self.tally.bytes_reused,
            run=self._plan.fence.run,
            writer_number=self._plan.fence.number,
            left_out={name: why for name, why in self._plan.left_out.items() if name not in self._names},
        )

    # ---- abort ---------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Give the attempt up and remove what it wrote. Every earlier epoch is as it was."""
        self._check_process()
        if self._state in ("open", "failed"):
            self._state = "aborted"
            self._writer.close()
            self._lease.stop()
            remove_attempt(self._catalog, self._attempt, "its save was aborted")
            self.on_failure(TransactionError(f"epoch {self.epoch} was aborted", epoch=self.epoch))
        self.ended = True

    def abandon(self) -> None:
        """End it from another thread, because the process has to: what was sent is left to the next save of the epoch.

        Nothing, if it is being committed or has ended. Raises StoreError where that could not be said on the store.
        """
        if self._state in ("open", "failed") and not self.ended and not self._step.sent:
            self._abandoned, self._state = True, "abandoned"
            self._lease.abandon("its process was told to end")

    def _give_up(self, error: BaseException) -> None:
        """After a failure: clean up, or leave all for the next attempt to adopt; never hide ``error``.

        A store that is failing is no place to delete from, and what was sent is worth keeping: the next save of
        this epoch sends only what is missing. A full store is another matter: there the space counts. Once the
        manifest was sent it may still land, even after an interrupt: then everything must stay.
        """
        if os.getpid() != self._pid:
            return  # a forked child must not end what its parent is doing
        if self._state in ("committed", "aborted"):
            self.ended = True
            return
        self.on_failure(error)
        self._tell(error)
        try:
            self._clean_up(error)
        except (CkptStoreError, OSError) as second:
            self._lease.stop()
            log.warning("cleaning up after a failed save failed too and is left to gc: %s", second)
        finally:
            self.ended = True
        if isinstance(error, StoreFullError) and self.on_full is not None:
            self.on_full(error, self.epoch)

    def _clean_up(self, error: BaseException) -> None:
        keep = self._step.sent or (
            isinstance(error, (StoreError, OutcomeUnknownError)) and not isinstance(error, StoreFullError)
        )
        if self._abandoned:
            self._writer.close()
        elif keep:
            self._state = "aborted"
            self._writer.close()
            self._lease.abandon()
        else:
            self._state = "failed"
            self.abort()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._state == "open":
            try:
                self.commit()
            except BaseException as failure:
                self._give_up(failure)
                raise
        elif error is not None:
            self._give_up(error)
        elif self._state == "failed" or self._abandoned:
            why = "the process was told to end" if self._abandoned else "a write failed before"
            failed = TransactionError(f"epoch {self.epoch} was not committed: {why}", epoch=self.epoch)
            self._give_up(failed)
            raise failed
