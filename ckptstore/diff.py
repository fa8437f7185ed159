"""Diff: how two checkpoints differ, array by array and value by value.

Where the digests of two chunks are equal nothing is read. The rest is read chunk by chunk, each chunk of the first
checkpoint once, beside those of the second that hold the same elements: memory is a few chunks, whatever the size.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ckptstore.arrays import ArraySpec
from ckptstore.boxes import whole
from ckptstore.catalog import Catalog
from ckptstore.compare import Difference, compare
from ckptstore.errors import CkptStoreError, CorruptionError, EpochNotFoundError, RecordNotFoundError
from ckptstore.manifest import ArrayEntry, ChunkRef, Manifest, RecordEntry, RecordIndex, Span
from ckptstore.outline import Outline, outline
from ckptstore.patches import Layout, Patch, parts_of_entry
from ckptstore.patience import indispensable
from ckptstore.pipeline import Meter, Pipeline, Progress, Rooms, cores
from ckptstore.reader import array_spec, fetch_chunk, read_chunk

Outcome = Literal["equal", "changed", "shape", "dtype", "kind", "only in first", "only in second"]

METADATA = "(metadata)"
FILE = "(file)"

_NO_NUMBERS = "|V1"
_COUNTED = ("changed", "largest", "incomparable")
_WINDOW = 256 * 1024 * 1024  # bytes of chunks, stored and raw, of both sides, that are in memory at a time


@dataclass(frozen=True, slots=True)
class ArrayDiff:
    """One array (or the content of a file, with the path "(file)") in two checkpoints.

    ``outcome``: "equal" bit for bit; "changed"; of another "shape" (or length) or "dtype"; only the "kind" is another
    (NumPy, torch, bytes); or it is only in one. ``changed`` counts elements, of ``elements`` in all; ``largest`` is the
    largest absolute difference, None where they are no numbers; ``incomparable`` counts changed ones where one is NaN.
    """

    record: str
    path: str
    outcome: Outcome
    first: ArraySpec | None
    second: ArraySpec | None
    elements: int = 0
    changed: int = 0
    largest: float | None = None
    incomparable: int = 0


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """A plain value, or the type of a container, that is not the same; as text, None where it is not there."""

    record: str
    path: str
    first: str | None
    second: str | None


@dataclass(frozen=True, slots=True)
class Diff:
    """How two epochs differ. ``arrays`` lists all of them, ``values`` only those that differ.

    ``only_first`` and ``only_second`` are records; ``bytes_read``: raw bytes of the chunks that had to be read.
    """

    first: int
    second: int
    arrays: tuple[ArrayDiff, ...]
    values: tuple[ValueDiff, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    bytes_read: int

    @property
    def equal(self) -> bool:
        """Whether they are the same: every bit of every array and file, every value, the nesting and the metadata."""
        same = all(array.outcome == "equal" for array in self.arrays)
        return same and not (self.values or self.only_first or self.only_second)


def diff(
    catalog: Catalog, first: Manifest, second: Manifest, record: str | None = None, progress: Progress | None = None
) -> Diff:
    """Compare two checkpoints, or one record of them.

    Raises:
        RecordNotFoundError: neither has that record.
        CorruptionError: what had to be read is damaged; its ``epoch`` tells in which of them.
        EpochNotFoundError: one of them was deleted meanwhile.
        StoreError: the store failed.
    """
    names = [{entry.name for entry in manifest.records} for manifest in (first, second)]
    wanted = names[0] | names[1] if record is None else {record}
    if not wanted & (names[0] | names[1]):
        raise RecordNotFoundError(f"neither epoch {first.epoch} nor {second.epoch} has a record {record!r}")
    work = _Work(catalog, (first, second))
    if record is None:
        work.compare_values(METADATA, first.metadata, second.metadata)
    for name in sorted(wanted & names[0] & names[1]):
        work.compare_record(name)
    work.read(progress)
    return Diff(
        first.epoch,
        second.epoch,
        tuple(work.arrays()),
        tuple(work.values),
        tuple(sorted(wanted & names[0] - names[1])),
        tuple(sorted(wanted & names[1] - names[0])),
        work.bytes_read,
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """What the pair of arrays number ``pair`` have in common in a chunk of each: ``length`` bytes from ``first`` and
    ``second`` on in their raw bytes, or, of arrays that were cut in different ways, two patches of the same elements.
    """

    pair: int
    first: int
    second: int
    length: int
    patches: tuple[Patch, Patch] | None = None

    def take(self, first: memoryview, second: memoryview) -> tuple[memoryview, memoryview]:
        """The elements of both, in one order, from the raw bytes of the chunks."""
        if self.patches is None:
            return first[self.first : self.first + self.length], second[self.second : self.second + self.length]
        one, two = (patch.copy(raw) for patch, raw in zip(self.patches, (first, second), strict=True))
        return one, two


@dataclass(slots=True)
class _Reading:
    """A chunk of the first checkpoint, and what of the second is to be compared with it."""

    chunk: ChunkRef
    partners: dict[str, tuple[ChunkRef, list[_Piece]]]

    @property
    def raw_length(self) -> int:
        return self.chunk.raw_length + sum(chunk.raw_length for chunk, _ in self.partners.values())

    @property
    def memory(self) -> int:
        largest = max(chunk.raw_length + chunk.stored_length for chunk, _ in self.partners.values())
        return self.chunk.raw_length + self.chunk.stored_length + largest


@dataclass(frozen=True, slots=True)
class _Side:
    """A record in one of the two checkpoints."""

    entry: RecordEntry
    index: RecordIndex
    outline: Outline

    def spec(self, at: tuple[str, int] | None) -> ArraySpec | None:
        """What an array is, by its path and number. CorruptionError if the index does not add up."""
        if at is None:
            return None
        key = self.entry.key
        if at[1] >= len(self.index.arrays):
            raise CorruptionError(f"{key} is damaged: it refers to an array that it does not list", key=key)
        return array_spec(self.index.arrays[at[1]], key)


class _Work:
    """Collects what is to be compared, then reads it."""

    def __init__(self, catalog: Catalog, manifests: tuple[Manifest, Manifest]) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._manifests = manifests
        self._lock = threading.Lock()
        self._rooms = Rooms()
        self._decoding = threading.Semaphore(cores())
        self._lines: list[tuple[ArrayDiff, int | None]] = []  # an array, and the number of its pair if it is compared
        self._pairs: dict[tuple[str, int, int], int] = {}
        self._types: list[str] = []
        self._found: list[Difference] = []
        self._readings: dict[str, _Reading] = {}
        self.values: list[ValueDiff] = []
        self.bytes_read = 0

    # ---- what differs in the skeletons ---------------------------------------------------------------------

    def compare_record(self, name: str) -> None:
        one, two = (self._side(manifest, name) for manifest in self._manifests)
        if one.entry.kind != two.entry.kind:
            self.values.append(ValueDiff(name, "", f"a {one.entry.kind}", f"a {two.entry.kind}"))
        self._compare_values(name, one.outline, two.outline)
        arrays, others = one.outline.arrays, two.outline.arrays
        for place in [*arrays, *(place for place in others if place not in arrays)]:
            self._compare_array(one, two, place)

    def compare_values(self, record: str, first: Any, second: Any) -> None:
        """Compare skeletons without arrays."""
        self._compare_values(record, outline(first), outline(second))

    def _side(self, manifest: Manifest, name: str) -> _Side:
        entry = manifest.record(name)
        assert entry is not None
        try:
            index = self._catalog.index(entry)
        except CorruptionError as error:
            raise self._explained(manifest, error) from error
        if entry.kind == "file":
            name_of = index.skeleton.get("file") if isinstance(index.skeleton, dict) else None
            return _Side(entry, index, Outline({FILE: (FILE, 0)}, outline({"dict": [["name", name_of]]}).values))
        return _Side(entry, index, outline(index.skeleton))

    def _compare_values(self, record: str, one: Outline, two: Outline) -> None:
        for place, (path, kind) in one.containers.items():
            _, other = two.containers.get(place, (path, kind))
            if other != kind:
                self.values.append(ValueDiff(record, path, kind, other))
        for place in [*one.values, *(place for place in two.values if place not in one.values)]:
            first, second = one.values.get(place), two.values.get(place)
            if first is None or second is None or first.identity != second.identity:
                path = next(value.path for value in (first, second) if value is not None)
                texts = [None if value is None else value.text for value in (first, second)]
                self.values.append(ValueDiff(record, path, *texts))

    # ---- what differs in the arrays ------------------------------------------------------------------------

    def _compare_array(self, one: _Side, two: _Side, place: str) -> None:
        name = one.entry.name
        at, also = one.outline.arrays.get(place), two.outline.arrays.get(place)
        first, second = one.spec(at), two.spec(also)
        path = (at or also or ("", 0))[0]
        outcome: Outcome = "equal"
        pair = None
        if at is None or also is None or first is None or second is None:
            outcome = "only in second" if first is None else "only in first"
        elif first.dtype != second.dtype or first.shape != second.shape:
            outcome = "dtype" if first.dtype != second.dtype else "shape"
        else:
            outcome = "equal" if first.kind == second.kind else "kind"
            dtype = first.dtype if first.kind in ("numpy", "torch") else _NO_NUMBERS
            pair = self._pair((one, at[1]), (two, also[1]), dtype)
        elements = math.prod(first.shape) if pair is not None and first is not None else 0
        self._lines.append((ArrayDiff(name, path, outcome, first, second, elements), pair))

    def _pair(self, one: tuple[_Side, int], two: tuple[_Side, int], dtype: str) -> int:
        """Note what is to be read of two arrays. Aliases are the same pair."""
        first, second = one[0].index, two[0].index
        pair = self._pairs.setdefault((one[0].entry.name, one[1], two[1]), len(self._found))
        if pair == len(self._found):
            self._found.append(Difference())
            self._types.append(dtype)
            a, b = first.arrays[one[1]], second.arrays[two[1]]
            if not a.digest or a.digest != b.digest:
                for chunk_a, chunk_b, piece in _pieces(pair, first, a, second, b):
                    reading = self._readings.setdefault(chunk_a.key, _Reading(chunk_a, {}))
                    reading.partners.setdefault(chunk_b.key, (chunk_b, []))[1].append(piece)
        return pair

    def read(self, progress: Progress | None) -> None:
        """Read what the digests do not decide, and compare it."""
        meter = Meter(progress, sum(reading.raw_length for reading in self._readings.values()))
        with Pipeline(self._store.traits.concurrency, window=_WINDOW) as pipeline:
            for reading in self._readings.values():
                pipeline.submit(reading.memory, (pipeline.io, partial(self._look, reading, meter)))
            pipeline.finish()

    def _look(self, reading: _Reading, meter: Meter, _: None) -> None:
        rooms: list[memoryview] = []
        first = self._raw(0, reading.chunk, rooms)
        for chunk, pieces in reading.partners.values():
            held = len(rooms)
            second = first if chunk.key == reading.chunk.key else self._raw(1, chunk, rooms)
            for piece in pieces:
                found = compare(self._types[piece.pair], *piece.take(first, second))
                with self._lock:
                    self._found[piece.pair] += found
            self._give(rooms, held)
        self._give(rooms, 0)
        with self._lock:
            self.bytes_read += reading.raw_length
        meter.add(reading.raw_length)

    def _raw(self, side: int, chunk: ChunkRef, rooms: list[memoryview]) -> memoryview:
        """The verified raw bytes of a chunk, good until the rooms are given back."""
        try:
            room = self._rooms.take(chunk.stored_length + 1)
            frame = fetch_chunk(self._store, chunk, room)
            with self._decoding, indispensable():
                aside = self._rooms.take(chunk.raw_length)
                raw = read_chunk(self._store, chunk, frame, None, aside)
        except CorruptionError as error:
            raise self._explained(self._manifests[side], error) from error
        rooms += (room, aside)
        return raw

    def _give(self, rooms: list[memoryview], keep: int) -> None:
        while len(rooms) > keep:
            self._rooms.give(rooms.pop())

    def _explained(self, manifest: Manifest, error: CorruptionError) -> CkptStoreError:
        """Damage, or was the epoch deleted while it was read?"""
        if not self._catalog.exists(manifest):
            return EpochNotFoundError(f"epoch {manifest.epoch} was deleted while it was read", epoch=manifest.epoch)
        self._catalog.mark_damaged(manifest)
        return CorruptionError(error.message, key=error.key, epoch=manifest.epoch)

    def arrays(self) -> Iterator[ArrayDiff]:
        """All arrays, with what was found."""
        for line, pair in self._lines:
            if pair is None:
                yield line
                continue
            found = self._found[pair]
            outcome: Outcome = "changed" if found.changed else line.outcome
            yield replace(line, outcome=outcome, **{name: getattr(found, name) for name in _COUNTED})


def _pieces(
    pair: int, one: RecordIndex, first: ArrayEntry, two: RecordIndex, second: ArrayEntry
) -> Iterator[tuple[ChunkRef, ChunkRef, _Piece]]:
    """The parts of two arrays of one shape that lie in one chunk of each, but for those that are equal by digest."""
    here, there = list(parts_of_entry(first)), list(parts_of_entry(second))
    if [box for box, _ in here] == [box for box, _ in there]:
        digests = [[box.digest for box in array.boxes] or [""] for array in (first, second)]
        for (_, a), (_, b), known, other in zip(here, there, *digests, strict=True):
            if not known or known != other:
                yield from _runs(pair, one, a, two, b)
        return
    layout = Layout(second)
    for a in Layout(first).patches(whole(first.shape)):
        for b in layout.patches(a.box):
            chunk_a, chunk_b = one.chunks[a.chunk], two.chunks[b.chunk]
            if chunk_a.digest != chunk_b.digest or (a.offset, a.rectangle) != (b.offset, b.rectangle):
                yield chunk_a, chunk_b, _Piece(pair, 0, 0, 0, (replace(a, box=b.box), b))


def _runs(
    pair: int, one: RecordIndex, first: Sequence[Span], two: RecordIndex, second: Sequence[Span]
) -> Iterator[tuple[ChunkRef, ChunkRef, _Piece]]:
    """The runs of bytes of two equally long rows of them."""
    spans = [iter(first), iter(second)]
    now = [next(spans[0], None), next(spans[1], None)]
    done = [0, 0]  # of the span that each is at
    while now[0] is not None and now[1] is not None:
        a, b = now[0], now[1]
        length = min(a.length - done[0], b.length - done[1])
        chunk_a, chunk_b = one.chunks[a.chunk], two.chunks[b.chunk]
        offset_a, offset_b = a.offset + done[0], b.offset + done[1]
        if chunk_a.digest != chunk_b.digest or offset_a != offset_b:
            yield chunk_a, chunk_b, _Piece(pair, offset_a, offset_b, length)
        for side, span in enumerate((a, b)):
            done[side] += length
            if done[side] == span.length:
                now[side], done[side] = next(spans[side], None), 0
