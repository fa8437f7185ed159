"""Copying: one checkpoint from one repository into another, as an attempt like any other.

The chunks are sent as they are, but under an attempt of the copy's own, and the indexes name them there. The keys of
the source would be simpler, and wrong: then two copies could write one key while a sweep deletes it. So everything
that makes a save safe makes a copy safe: its lease, the base that it may refer to, what a killed copy of the same
epoch has left, the look after the commit. What was copied knows where it was committed first (``Manifest.origin``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from ckptstore.catalog import Catalog, Committed
from ckptstore.chunks import CHUNK_SIZE
from ckptstore.errors import CorruptionError
from ckptstore.known import Known
from ckptstore.manifest import ChunkRef, Manifest, RecordEntry, RecordIndex
from ckptstore.patience import indispensable
from ckptstore.pipeline import WINDOW, Meter, Pipeline, cores
from ckptstore.reader import damaged_chunks, decode_chunk, fetch_chunk, read_index
from ckptstore.stores.base import Store
from ckptstore.throttle import Throttle
from ckptstore.transaction import Plan, Transaction
from ckptstore.writer import Prepared, RecordWriter, settled

T = TypeVar("T")


class SourceDamageError(CorruptionError):
    """What is wrong is an object of the source, not of the store that is copied to."""


class CopyTransaction(Transaction):
    """One attempt to copy a checkpoint. ``copy`` it, then commit.

    Args:
        catalog: of the repository to copy to.
        source, original: the catalog to copy from, and the checkpoint.
        commits: of the repository to copy to; the last one that can be read becomes the base.
        throttle: all bytes that are sent go through it.
    """

    def __init__(
        self,
        catalog: Catalog,
        plan: Plan,
        commits: list[Committed],
        source: Catalog,
        original: Manifest,
        throttle: Throttle,
        meter: Meter,
    ) -> None:
        self._source = source
        self._original = original
        self._throttle = throttle
        # An earlier copy may have been killed at any epoch, not only at the one before this.
        catalog.settled = False
        super().__init__(catalog, plan, commits, lambda manifest, tally: manifest, meter)

    def _make_writer(self, meter: Meter) -> RecordWriter:
        self._copier = CopyWriter(self._store, self._attempt, self._claim.known, self._source, self._throttle, meter)
        return self._copier

    def copy(self) -> None:
        """Send all that is not there yet.

        Raises:
            SourceDamageError: an object of the source is damaged or missing.
            StoreError: either store failed.
        """
        for entry in self._original.records:
            self._check_open(entry.name)
            self._run(entry.name, partial(self._copier.copy, entry))

    def only_while(self, stands: Callable[[], bool]) -> None:
        """Commit it only as long as ``stands`` says that what it is to replace is still what it was."""
        self._step.stands = stands

    def prove(self) -> None:
        """Read back all that was sent. CorruptionError names what is not what it should be: then do not commit."""
        for entry in self.settle():
            read_index(self._store, entry)
        for problem in damaged_chunks(self._store, self._copier.referenced.values(), Meter(None, 0)):
            raise CorruptionError(problem.reason, key=problem.key)

    def interrupt(self) -> None:
        """End it from another thread: nothing more is begun, what was sent is left to the next copy of the epoch."""
        try:
            self.abandon()
        finally:
            self._copier.interrupt()

    def _manifest(self, entries: tuple[RecordEntry, ...]) -> Manifest:
        """That of the original, but for what says where the objects are."""
        original, made = self._original, super()._manifest(entries)
        kept = ("created", "writer", "metadata", "bytes_state", "bytes_sent", "bytes_reused", "run", "writer_number")
        facts = {field: getattr(original, field) for field in (*kept, "left_out")}
        times = {} if original.saved else self._source.commit_times(original.epoch)
        saved = times.get(Committed(original.epoch, original.generation), original.saved)
        return msgspec.structs.replace(made, origin=original.first, saved=saved, **facts)


class CopyWriter(RecordWriter):
    """Writes records by copying them. Each frame is read once, proved to be what its digest says, and sent as it is."""

    def __init__(
        self, store: Store, attempt: str, known: Known, source: Catalog, throttle: Throttle, meter: Meter
    ) -> None:
        super().__init__(store, attempt, known, chunk_size=CHUNK_SIZE, codec="raw", meter=meter.add)
        self._source = source
        self._throttle = throttle
        self._proving = threading.Semaphore(cores())  # more at once would take more memory and no less time
        window = WINDOW * 3 // 4 if store.traits.copies else WINDOW
        threads = store.traits.concurrency + source.store.traits.concurrency  # each waits for one of them at a time
        self._pipeline = Pipeline(threads, window=window)

    def interrupt(self) -> None:
        """Begin nothing more. From any thread."""
        self._pipeline.give_up()

    def copy(self, entry: RecordEntry) -> None:
        """Copy a record, all but its index, which ``settle`` writes. SourceDamageError, StoreError."""
        index = _from_source(lambda: self._source.index(entry))
        self.tally.bytes_state += entry.bytes_state
        jobs = [self._copy_chunk(chunk) for chunk in index.chunks]
        self._records.append((entry.name, entry.kind, index.skeleton, _Copied(entry.bytes_state, index, jobs)))

    def _copy_chunk(self, chunk: ChunkRef) -> Future[Any]:
        found = self._look_up(chunk.digest, chunk.raw_length)
        if found is not None:
            self._count(chunk.raw_length, reused=True)
            return found.promise
        promise = self._claimed[chunk.digest] = Future()
        pipeline = self._pipeline
        # In one stage: a pool that is closing takes no work from itself.
        bring = partial(self._bring, chunk, promise)
        return pipeline.submit(chunk.raw_length + chunk.stored_length, (pipeline.io, bring))

    def _bring(self, chunk: ChunkRef, promise: Future[ChunkRef], _: None) -> Any:
        try:
            room = self._rooms.take(chunk.stored_length + 1)
            frame = _from_source(lambda: self._proved(chunk, room))
            self._throttle.wait(len(frame))
        except BaseException as error:
            promise.set_exception(error)
            raise
        return self._send(Prepared(chunk.digest, frame, room, chunk.raw_length, promise))

    def _proved(self, chunk: ChunkRef, room: memoryview) -> memoryview:
        """The frame; if it is wrong it is read once more, because a wrong byte may have come from the way."""
        frame = fetch_chunk(self._source.store, chunk, room)
        try:
            self._prove(chunk, frame)
        except CorruptionError:
            frame = fetch_chunk(self._source.store, chunk)
            self._prove(chunk, frame)
        return frame

    def _prove(self, chunk: ChunkRef, frame: memoryview) -> None:
        with self._proving, indispensable():
            aside = self._rooms.take(chunk.raw_length)
            try:
                decode_chunk(frame, chunk, None, aside)
            finally:
                self._rooms.give(aside)


class _Copied:
    """A record on its way: the index of the source, and where each of its chunks is, or will be, in the copy."""

    def __init__(self, nbytes: int, index: RecordIndex, jobs: Sequence[Future[Any]]) -> None:
        self.nbytes = nbytes
        self._index = index
        self._jobs = jobs

    def index(self, name: str, kind: str, skeleton: Any) -> RecordIndex:
        """The index; every job has a result by now."""
        chunks = tuple(settled(job) for job in self._jobs)
        return msgspec.structs.replace(self._index, chunks=chunks)


def _from_source(read: Callable[[], T]) -> T:
    try:
        return read()
    except SourceDamageError:
        raise
    except CorruptionError as error:
        raise SourceDamageError(error.message, key=error.key) from error
