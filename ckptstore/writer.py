"""Record → chunks → digest → known? reuse : codec → store. Bounded bytes in flight, each read once.

The trainer may change an array while we read it; hashing one version and storing another would commit a chunk that
can never be verified. So the bytes that go into a frame are read once, into memory of our own, and the digest is
taken of what went in. The frame is sent (also again, by a retry) from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from ckptstore import garbage
from ckptstore.arrays import ArraySpec
from ckptstore.chunks import DIGEST_FROM, ChunkPlan, Packer, joined
from ckptstore.codecs import encode_into, room_for
from ckptstore.files import FileSource
from ckptstore.indexes import encode_index
from ckptstore.known import Known, Place
from ckptstore.manifest import (
    ChunkRef,
    RecordEntry,
    RecordIndex,
    Span,
    digest_of,
    format_for,
    hasher,
)
from ckptstore.pace import Pace
from ckptstore.patches import entry_of
from ckptstore.pipeline import WINDOW, Pipeline, Rooms
from ckptstore.shards import parts_of
from ckptstore.stores.base import Store
from ckptstore.tree import FlatState


class Layout(Protocol):
    """Where the bytes of a record went. Its index can be made when all its chunks are on the store."""

    nbytes: int

    def index(self, name: str, kind: str, skeleton: Any) -> RecordIndex: ...


class Source(Protocol):
    """Bytes of one array that can be read piece by piece, any number of times."""

    @property
    def spec(self) -> ArraySpec: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def item_size(self) -> int: ...
    @property
    def align(self) -> int: ...
    def read(self, start: int, stop: int) -> memoryview: ...


# So many chunks are hashed ahead of coding before a save that has a base judges whether that pays.
_FIRST_LOOKS = 4


@dataclass
class Tally:
    """What a save moved, in bytes: of the state, of it found already stored, and sent to the store.

    ``seconds`` says where the time went: ``begin``, ``write``, ``wait`` (of rank 0, for the others) and ``commit`` as
    they passed, ``encode`` (hashing and coding) and ``put`` as sums over all threads.
    """

    bytes_state: int = 0
    bytes_reused: int = 0
    bytes_sent: int = 0
    chunks_sent: int = 0
    chunks_reused: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage. Not for two threads in the same stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(stage, time.perf_counter() - begin)

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Add time to a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chunk on its way to the store, or, without a frame, what somebody else stores of the same content."""

    digest: str
    frame: memoryview | None
    room: memoryview | None
    nbytes: int
    promise: Future[ChunkRef]


class RecordWriter:
    """Writes the records of one attempt. Not for use by several threads at once.

    ``write_*`` returns when it needs the state no longer; puts may go on until ``settle`` has returned.
    """

    def __init__(
        self,
        store: Store,
        attempt: str,
        known: Known,
        *,
        chunk_size: int,
        codec: str,
        cores: int | None = None,
        pace: Pace | None = None,
        part: bool = False,
        meter: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._known = known
        self._chunk_size = chunk_size
        self._codec = codec
        self._pace = pace or Pace()
        # Of a part every array gets a digest of its own: what several ranks have is compared by it.
        self._digest_from = 1 if part else DIGEST_FROM
        self._meter = meter
        self._lock = threading.Lock()
        self._claimed: dict[str, Future[ChunkRef]] = {}
        window = WINDOW * 3 // 4 if store.traits.copies else WINDOW
        self._pipeline = Pipeline(store.traits.concurrency, cpu=cores, window=window)
        self._rooms = Rooms()
        self._entries: list[RecordEntry] = []
        self._records: list[tuple[str, str, Any, Layout]] = []
        self.tally = Tally()
        self.referenced: dict[str, ChunkRef] = {}
        self.indexes: list[tuple[RecordEntry, RecordIndex]] = []

    def write_state(self, name: str, flat: FlatState) -> None:
        """Write a flattened state, or a file's bytes. Raises InvalidRecordError if a file changes meanwhile."""
        self._write(name, "file" if flat.is_file else "state", flat.skeleton, flat.arrays)
        for source in flat.arrays if flat.is_file else ():
            cast(FileSource, source).check_unchanged()

    def settle(self) -> list[RecordEntry]:
        """Wait for all puts, then write the indexes. Returns the entries for the manifest, in order of writing."""
        self._entries += self.put_indexes(self.collect())
        return self._entries

    def drain(self) -> None:
        """Wait for all puts."""
        self._pipeline.finish()

    def collect(self) -> list[tuple[RecordIndex, int]]:
        """Wait for all puts. The indexes of what was written since, which are on no store, with the bytes of state."""
        self._pipeline.finish()
        made = [(layout.index(name, kind, skeleton), layout.nbytes) for name, kind, skeleton, layout in self._records]
        self._records.clear()
        return made

    def put_indexes(self, indexes: Iterable[tuple[RecordIndex, int]]) -> list[RecordEntry]:
        """Write indexes of records; the entries for the manifest, in the same order."""
        puts = [partial(self.put_index, index, nbytes) for index, nbytes in indexes]
        jobs = [self._pipeline.submit(0, (self._pipeline.io, put)) for put in puts]
        self._pipeline.finish()
        return [job.result() for job in jobs]

    def close(self) -> None:
        """Stop; when this returns, nothing is written any more."""
        self._pipeline.close()

    def _write(self, name: str, kind: str, skeleton: Any, arrays: Sequence[Any]) -> None:
        layout = _Layout(arrays, self._digest_from)
        sources = layout.sources
        pipeline = self._pipeline
        try:
            for plan in self._plans(sources, layout):
                prepare = partial(self._prepare, sources, layout, plan)
                job = pipeline.submit(plan.nbytes, (pipeline.cpu, prepare), (pipeline.io, self._send))
                layout.place(plan, job)
            pipeline.wait_for_first_stages()
        except BaseException:
            # The caller may close or change what a running job still reads. Not by waiting for the jobs: an interrupt,
            # or a pool that refuses work, leaves some that nobody runs.
            pipeline.close()
            raise
        self._records.append((name, kind, skeleton, layout))

    def put_index(self, index: RecordIndex, nbytes: int, _: None = None) -> RecordEntry:
        """Write the index of a record all chunks of which are on the store, and whose arrays have so many bytes."""
        digest, raw_length, stored = encode_index(index)
        entry = RecordEntry(
            name=index.name,
            kind=index.kind,
            attempt=self._attempt,
            digest=digest,
            raw_length=raw_length,
            stored_length=len(stored),
            arrays=len(index.arrays),
            chunks=len(index.chunks),
            bytes_state=nbytes,
            bytes_stored=sum(chunk.stored_length for chunk in index.chunks),
            boxes=index.boxes,
        )
        self._store.put(entry.key, stored, if_absent=True)
        with self._lock:
            self.tally.bytes_sent += len(stored)
            self.indexes.append((entry, index))
            self.referenced.update((chunk.key, chunk) for chunk in index.chunks)
        return entry

    def _plans(self, sources: list[Any], layout: _Layout) -> list[ChunkPlan]:
        packer = Packer(self._chunk_size)
        plans: list[ChunkPlan] = []
        look = self._known.has_arrays
        with garbage.paused():
            for number, source in enumerate(sources):
                nbytes = source.nbytes
                layout.nbytes += nbytes
                if look and nbytes >= self._digest_from and packer.is_small(nbytes):
                    digest = digest_of(source.read(0, nbytes))
                    places = self._known.find_array(digest, nbytes)
                    if places is not None and all(length % source.align == 0 for _, _, length in places):
                        layout.reuse(number, digest, places)
                        self._count(nbytes, reused=True)
                        continue
                plans += packer.add(number, nbytes, source.item_size, source.align)
            plans += packer.finish()
        self.tally.bytes_state += layout.nbytes
        return plans

    def _prepare(self, sources: list[Any], layout: _Layout, plan: ChunkPlan, _: None) -> Prepared:
        """Stage 1, on a core: read the bytes once, into a frame, with their digest, unless the content is known."""
        begin = time.perf_counter()
        pieces = [sources[piece.array].read(piece.start, piece.stop) for piece in plan.pieces]
        raw, nbytes, room = pieces[0], plan.nbytes, None
        if len(pieces) > 1:
            room = self._rooms.take(nbytes)
            raw = joined(pieces, room)
            layout.note_digests(plan, raw)
        prepared = self._look_up(digest_of(raw), nbytes) if self._expects_reuse() else None
        if prepared is None:
            prepared = self._encode(raw, nbytes, plan.item_size)
        if room is not None:
            self._rooms.give(room)
        if prepared.frame is None:
            self._count(nbytes, reused=True)
        with self._lock:
            self.tally.add_seconds("encode", time.perf_counter() - begin)
        return prepared

    def _expects_reuse(self) -> bool:
        """Whether to hash before coding. Not worth it once it is plain that this state is new."""
        looked = self.tally.chunks_reused + self.tally.chunks_sent
        return not self._known.empty and (looked < _FIRST_LOOKS or 8 * self.tally.chunks_reused >= looked)

    def _look_up(self, digest: str, nbytes: int) -> Prepared | None:
        """What stores this content already, or is about to."""
        promise = self._claimed.get(digest)
        if promise is None:
            found = self._known.find(digest, nbytes)
            if found is None:
                return None
            promise = Future()
            promise.set_result(found)
        return Prepared(digest, None, None, nbytes, promise)

    def _encode(self, raw: Any, nbytes: int, item_size: int) -> Prepared:
        room = self._rooms.take(room_for(nbytes))
        seen = hasher()
        mode = "raw" if self._codec == "auto" and not self._pace.compress else self._codec
        with self._pace.codec.timed(nbytes if mode != "raw" else 0):
            frame = encode_into(raw, item_size, mode, room, seen.update)
        digest = seen.hexdigest()
        known = self._look_up(digest, nbytes)
        if known is None:
            with self._lock:
                promise = self._claimed.get(digest)
                if promise is None:
                    promise = self._claimed[digest] = Future()
                    return Prepared(digest, frame, room, nbytes, promise)
            known = Prepared(digest, None, None, nbytes, promise)
        self._rooms.give(room)
        return known

    def _send(self, prepared: Prepared) -> ChunkRef | Future[ChunkRef]:
        """Stage 2, on a connection: put the frame, unless another job is putting the same content.

        Then the answer is that job's promise, not yet its result: a connection that waited for another
        one could wait for a job that is queued behind it.
        """
        frame, room = prepared.frame, prepared.room
        if frame is None or room is None:
            return prepared.promise
        chunk = ChunkRef(self._attempt, prepared.digest, prepared.nbytes, len(frame))
        begin = time.perf_counter()
        try:
            with self._pace.store.timed(len(frame)):
                self._store.put(chunk.key, frame, if_absent=True)
        except BaseException as error:
            prepared.promise.set_exception(error)
            raise
        with self._lock:
            self.tally.add_seconds("put", time.perf_counter() - begin)
        prepared.promise.set_result(chunk)
        self._count(prepared.nbytes, sent=len(frame))
        self._rooms.give(room)
        return chunk

    def _count(self, raw: int, *, sent: int = 0, reused: bool = False) -> None:
        with self._lock:
            if reused:
                self.tally.bytes_reused += raw
                self.tally.chunks_reused += 1
            else:
                self.tally.bytes_sent += sent
                self.tally.chunks_sent += 1
        self._meter(raw)


class _Layout:
    """Collects where each array's bytes went, while the chunks are still being sent."""

    def __init__(self, arrays: Sequence[Any], digest_from: int) -> None:
        self._arrays = arrays
        self._digest_from = digest_from
        self.sources: list[Any] = [part for array in arrays for part in parts_of(array)]
        self.nbytes = 0
        self._placed: list[tuple[ChunkPlan, Future[Any]]] = []
        self._reused: list[tuple[int, tuple[Place, ...]]] = []
        self.digests: dict[int, str] = {}

    def place(self, plan: ChunkPlan, job: Future[Any]) -> None:
        self._placed.append((plan, job))

    def note_digests(self, plan: ChunkPlan, raw: memoryview) -> None:
        """Digests of arrays that share this chunk, of the very bytes that are stored.

        Taken from the private copy: the live array may have changed since it was last looked at, and a digest of
        other bytes would make a later save refer to the wrong ones.
        """
        offset = 0
        for piece in plan.pieces:
            length = piece.stop - piece.start
            if length >= self._digest_from and length == self.sources[piece.array].nbytes and len(plan.pieces) > 1:
                self.digests[piece.array] = digest_of(raw[offset : offset + length])
            offset += length

    def reuse(self, array: int, digest: str, places: tuple[Place, ...]) -> None:
        self.digests[array] = digest
        self._reused.append((array, places))

    def index(self, name: str, kind: str, skeleton: Any) -> RecordIndex:
        """The record index; every job has a result by now."""
        with garbage.paused():
            chunks: dict[str, tuple[int, ChunkRef]] = {}
            spans: list[tuple[Span, ...]] = [()] * len(self.sources)
            for array, places in self._reused:
                spans[array] = tuple(Span(_number(chunks, ref), offset, length) for ref, offset, length in places)
            for plan, job in self._placed:
                number = _number(chunks, settled(job))
                offset = 0
                for array, start, stop in plan.pieces:
                    spans[array] += (Span(number, offset, stop - start),)
                    offset += stop - start
            parts = ((where, self.digests.get(number, "")) for number, where in enumerate(spans))
            arrays = tuple(entry_of(array, parts) for array in self._arrays)
            refs = tuple(ref for _, ref in chunks.values())
            return RecordIndex(
                format=format_for(arrays), name=name, kind=kind, skeleton=skeleton, arrays=arrays, chunks=refs
            )


def _number(chunks: dict[str, tuple[int, ChunkRef]], ref: ChunkRef) -> int:
    return chunks.setdefault(ref.key, (len(chunks), ref))[0]


def settled(chunk: Any) -> ChunkRef:
    while isinstance(chunk, Future):
        chunk = chunk.result()
    assert isinstance(chunk, ChunkRef)
    return chunk
