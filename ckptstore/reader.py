"""Record index → frames → decode → digest → straight into the destination. Nothing unverified is returned (P3)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from ckptstore import garbage, keys
from ckptstore.arrays import ArraySpec
from ckptstore.boxes import whole
from ckptstore.codecs import decode
from ckptstore.errors import CorruptionError, DeadlineError, ObjectNotFoundError, RetriesExhaustedError, StoreError
from ckptstore.indexes import decode_index
from ckptstore.manifest import ArrayEntry, ChunkRef, RecordEntry, RecordIndex, Span, hasher
from ckptstore.patches import Layout, Patch, Stretch
from ckptstore.patience import indispensable
from ckptstore.pipeline import Meter, Pipeline, Rooms, cores, side_by_side
from ckptstore.shards import BoxTarget, words
from ckptstore.stores.base import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """One object that is not what its checkpoint needs, and why."""

    key: str
    reason: str


class Target(Protocol):
    """Where the bytes of a whole array go: a writable view of exactly as many bytes."""

    @property
    def buffer(self) -> memoryview: ...


class Spare(Protocol):
    """Other places that hold the same checkpoint, asked only for what the first does not give."""

    def index(self, name: str, error: Exception) -> RecordIndex | None:
        """The index of a record, from the nearest place that has it; None where none has."""

    def places(self, chunk: ChunkRef, error: Exception) -> Iterable[tuple[Store, ChunkRef]]:
        """Where else the content of a chunk lies, the nearest first."""


Read = Callable[[memoryview | None], memoryview]
"""Gives the verified raw bytes of a chunk, in the memory that it is given or in its own."""
Use = Callable[[ChunkRef, Read], object]
Damaged = Callable[[ChunkRef, CorruptionError], object]


def fetch(store: Store, key: str, length: int, room: memoryview | None = None) -> memoryview:
    """An object that must have exactly ``length`` bytes. CorruptionError if it is missing or of another size.

    Args:
        room: memory for it, one byte more than it should have.
    """
    end = length + 1  # one more than it should have: shows an extended object
    try:
        data = memoryview(store.get(key, 0, end)) if room is None else store.fetch(key, 0, end, room)
    except ObjectNotFoundError as error:
        raise CorruptionError(f"{key} is missing", key=key) from error
    if len(data) != length:
        has = f"more than {length}" if len(data) > length else str(len(data))
        raise CorruptionError(f"{key} is damaged: has {has} bytes, should have {length}", key=key)
    return data


def fetch_chunk(store: Store, chunk: ChunkRef, room: memoryview | None = None) -> memoryview:
    """The frame of a chunk, not yet verified."""
    return fetch(store, chunk.key, chunk.stored_length, room)


def sure(read: Callable[[], T]) -> T:
    """What ``read`` gives; if that was damaged, it reads once more: a wrong byte may have come from the way."""
    try:
        return read()
    except CorruptionError:
        return read()


def read_index(store: Store, entry: RecordEntry, *, part: bool = False) -> RecordIndex:
    """The verified index of a record; with ``part`` of what one of several ranks wrote of it."""
    return sure(lambda: decode_index(bytes(fetch(store, entry.key, entry.stored_length)), entry, part=part))


def decode_chunk(
    frame: memoryview, chunk: ChunkRef, out: memoryview | None = None, room: memoryview | None = None
) -> memoryview:
    """The verified raw bytes of a chunk, in ``out`` where given, else in ``frame``, ``room`` or fresh memory.

    CorruptionError names the object.
    """
    seen = hasher()
    raw = decode(frame, out, chunk.raw_length, chunk.key, seen.update, room)
    if seen.hexdigest() != chunk.digest:
        raise CorruptionError(f"{chunk.key} is damaged: its content does not match its digest", key=chunk.key)
    return raw


def read_chunk(
    store: Store,
    chunk: ChunkRef,
    frame: memoryview,
    out: memoryview | None = None,
    room: memoryview | None = None,
) -> memoryview:
    """Decode ``frame``; if that fails, fetch it once more, because a wrong byte may have come from the way."""
    try:
        return decode_chunk(frame, chunk, out, room)
    except CorruptionError:
        return decode_chunk(fetch_chunk(store, chunk), chunk, out, room)


Sink = Callable[[memoryview, int], object]  # takes bytes of an array, and their place in it
Part = tuple[RecordIndex, Mapping[int, Sequence[Target | BoxTarget]]]  # a record, and where its wanted arrays go
Place = tuple[memoryview, int] | tuple[np.ndarray[Any, Any], Patch]  # memory, and what of a chunk goes there


def load_arrays(
    store: Store, parts: Iterable[Part], *, meter: Meter, visible: bool = False, spare: Spare | None = None
) -> None:
    """Fill the targets (by array number) of some records, side by side, and read no other array's chunks.

    Args:
        visible: the caller can already see the targets. Then a chunk is decoded aside and copied only
            after its digest was checked.
        spare: where a chunk is read from that the store does not give.
    """
    wanted: dict[str, list[Place]] = {}
    chunks: dict[str, ChunkRef] = {}
    for index, targets in parts:
        _scatter(index, targets, wanted)
        chunks.update((chunk.key, chunk) for chunk in index.chunks if wanted[chunk.key])

    def use(chunk: ChunkRef, read: Read) -> None:
        places = wanted[chunk.key]
        only = places[0][0] if len(places) == 1 and not visible else None
        if isinstance(only, memoryview) and only.nbytes == chunk.raw_length:
            read(only)
        else:
            raw = read(None)
            for place in places:
                _fill(place, raw)
        meter.add(sum(memory.nbytes for memory, _ in places))

    read_chunks(store, chunks.values(), use, spare=spare)


def copy_arrays(
    store: Store,
    parts: Iterable[tuple[RecordIndex, Mapping[int, Sink]]],
    *,
    meter: Meter,
    spare: Spare | None = None,
) -> None:
    """Give the bytes of some arrays (by number) of some records to their sinks: each chunk is read once, in any order.

    Args:
        parts: a sink is called with verified bytes and their place in its array, from worker threads.
        spare: where a chunk is read from that the store does not give.
    """
    places: dict[str, list[tuple[Sink, Stretch]]] = {}
    chunks: dict[str, ChunkRef] = {}
    for index, sinks in parts:
        for number, sink in sinks.items():
            for stretch in Layout(index.arrays[number]).stretches():
                chunk = index.chunks[stretch.chunk]
                chunks[chunk.key] = chunk
                places.setdefault(chunk.key, []).append((sink, stretch))

    def use(chunk: ChunkRef, read: Read) -> None:
        raw = read(None)
        for sink, stretch in places[chunk.key]:
            for offset, length, at in stretch.runs():
                sink(raw[offset : offset + length], at)
            meter.add(stretch.nbytes)

    read_chunks(store, chunks.values(), use, spare=spare)


def array_spec(array: ArrayEntry, key: str) -> ArraySpec:
    """What an array of the record index ``key`` is. CorruptionError if it has not as many bytes as it should."""
    spec = ArraySpec(array.kind, array.dtype, array.shape)
    if spec.nbytes != sum(span.length for span in array.spans):
        raise CorruptionError(f"{key} is damaged: an array's spans do not add up", key=key)
    return spec


def array_specs(index: RecordIndex, key: str) -> list[ArraySpec]:
    """What the arrays of a record are. Errors as of ``array_spec``."""
    return [array_spec(array, key) for array in index.arrays]


def read_chunks(
    store: Store,
    chunks: Iterable[ChunkRef],
    use: Use,
    damaged: Damaged | None = None,
    spare: Spare | None = None,
) -> None:
    """Fetch chunks side by side and let ``use`` read each; what it gets is good until it returns.

    A chunk stays on the thread that fetched it, so that it is decoded while it is in the cache. With ``damaged``, that
    is told of a CorruptionError, and the others go on. With ``spare``, what the store does not give is read there; a
    store that has been given up is not asked again.
    """
    reading = _Reading(store, use, damaged, spare)
    with Pipeline(max(store.traits.concurrency, cores())) as pipeline:
        for chunk in chunks:
            pipeline.submit(chunk.raw_length, (pipeline.io, partial(reading.work, chunk)))
        pipeline.finish()


class _Reading:
    """What the threads of ``read_chunks`` do."""

    def __init__(self, store: Store, use: Use, damaged: Damaged | None, spare: Spare | None) -> None:
        self._store = store
        self._use = use
        self._damaged = damaged
        self._spare = spare
        self._rooms = Rooms()
        self._decoding = threading.Semaphore(cores())  # more at once would take more memory and no less time
        self._given_up: StoreError | None = None

    def work(self, chunk: ChunkRef, _: None) -> None:
        """Bring one chunk to its user."""
        error: CorruptionError | StoreError
        if self._given_up is not None and self._rescue(chunk, self._given_up):
            return
        try:
            self._bring(self._store, chunk, chunk)
            return
        except CorruptionError as raised:
            error = raised
        except StoreError as raised:
            error = raised
            if self._spare is not None and isinstance(raised, (RetriesExhaustedError, DeadlineError)):
                self._given_up = raised
        if self._rescue(chunk, error):
            return
        if self._damaged is None or not isinstance(error, CorruptionError):
            raise error
        self._damaged(chunk, error)

    def _rescue(self, chunk: ChunkRef, error: CorruptionError | StoreError) -> bool:
        for at, found in self._spare.places(chunk, error) if self._spare is not None else ():
            with suppress(CorruptionError, StoreError):
                self._bring(at, found, chunk)
                return True
        return False

    def _bring(self, at: Store, found: ChunkRef, chunk: ChunkRef) -> None:
        room = self._rooms.take(found.stored_length + 1)
        try:
            frame = fetch_chunk(at, found, room)
            with self._decoding, indispensable():
                aside = self._rooms.take(found.raw_length)
                self._use(chunk, lambda out: read_chunk(at, found, frame, out, aside))
                self._rooms.give(aside)
        except CorruptionError:
            self._rooms.give(room)
            raise
        self._rooms.give(room)  # not after other errors: a call that was left behind may still write there


def _scatter(
    index: RecordIndex, targets: Mapping[int, Sequence[Target | BoxTarget]], wanted: dict[str, list[Place]]
) -> None:
    """For the key of each chunk needed, into ``wanted``: where parts of it go."""
    places = [wanted.setdefault(chunk.key, []) for chunk in index.chunks]
    with garbage.paused():
        for number, found in targets.items():
            array = index.arrays[number]
            for target in found:
                if isinstance(target, BoxTarget):
                    _scatter_box(array, target, places)
                elif array.boxes:
                    everything = words(target.buffer, array.dtype, array.shape)
                    _scatter_box(array, BoxTarget(whole(array.shape), everything), places)
                else:
                    _in_a_row(target.buffer, array.spans, places)


def _scatter_box(array: ArrayEntry, target: BoxTarget, places: list[list[Place]]) -> None:
    layout = Layout(array)
    for common, stored, spans in layout.pieces(target.box):
        there = target.view[common.within(target.box)]
        if common == stored and there.flags.c_contiguous:  # most shardings: the bytes stay in order
            _in_a_row(there.reshape(-1).view(np.uint8).data, spans, places)
            continue
        for patch in layout.patches_in(common, stored, spans):
            places[patch.chunk].append((there[patch.box.within(common)], patch))


def _in_a_row(buffer: memoryview, spans: Iterable[Span], places: list[list[Place]]) -> None:
    filled = 0
    for span in spans:
        places[span.chunk].append((buffer[filled : filled + span.length], span.offset))
        filled += span.length


def _fill(place: Place, raw: memoryview) -> None:
    memory, what = place
    if isinstance(what, Patch):
        np.copyto(memory, what.take(raw))  # type: ignore[arg-type]  # pairs are not told apart by one of them
    else:
        _copy(memory, raw[what : what + memory.nbytes])  # type: ignore[arg-type]


def missing_chunks(store: Store, chunks: Iterable[ChunkRef]) -> list[Problem]:
    """Chunks that are not there or have another size, found by listing: no chunk is read."""
    by_attempt: dict[str, dict[str, int]] = {}
    for chunk in chunks:
        by_attempt.setdefault(chunk.attempt, {})[chunk.key] = chunk.stored_length

    def look(attempt: str) -> list[Problem]:
        found = {info.key: info.size for info in store.list(keys.chunks_prefix(attempt))}
        problems = []
        for key, length in by_attempt[attempt].items():
            if key not in found:
                problems.append(Problem(key, "is missing"))
            elif found[key] != length:
                problems.append(Problem(key, f"has {found[key]} bytes, should have {length}"))
        return problems

    found = side_by_side(store.traits.concurrency, look, by_attempt)
    return [problem for problems in found for problem in problems]


def damaged_chunks(store: Store, chunks: Iterable[ChunkRef], meter: Meter) -> list[Problem]:
    """Chunks whose bytes are wrong: every byte is read and checked."""
    problems: list[Problem] = []

    def check(chunk: ChunkRef, read: Read) -> None:
        read(None)
        meter.add(chunk.raw_length)

    def damaged(chunk: ChunkRef, error: CorruptionError) -> None:
        problems.append(Problem(chunk.key, error.message))
        meter.add(chunk.raw_length)

    read_chunks(store, {chunk.key: chunk for chunk in chunks}.values(), check, damaged)
    return sorted(problems, key=lambda problem: problem.key)


def _copy(target: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # lets other threads run meanwhile
