"""Patches: which parts of which chunks make up a box of a stored array, however that was cut when it was saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptstore.boxes import Box, Finder, intersection, rectangles, runs, whole
from ckptstore.dtypes import dtype_size
from ckptstore.errors import FormatError
from ckptstore.manifest import ArrayEntry, BoxEntry, Span
from ckptstore.shards import ShardedSource, word


@dataclass(frozen=True, slots=True)
class Patch:
    """A box of an array that lies in one chunk.

    ``offset`` is where the elements of ``rectangle`` lie in the raw bytes of ``chunks[chunk]``, in C order and with
    nothing between them; ``box`` is a part of that.
    """

    chunk: int
    offset: int
    box: Box
    rectangle: Box
    item: int

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.item

    def take(self, raw: memoryview) -> np.ndarray[Any, Any]:
        """The elements as words, from the raw bytes of its chunk."""
        found = np.frombuffer(raw, word(self.item), self.rectangle.volume, self.offset)
        inside: np.ndarray[Any, Any] = found.reshape(self.rectangle.shape)[self.box.within(self.rectangle)]
        return inside

    def copy(self, raw: memoryview) -> memoryview:
        """The bytes of the elements in C order: a copy where they are not so in the chunk."""
        return np.ascontiguousarray(self.take(raw)).reshape(-1).view(np.uint8).data


@dataclass(frozen=True, slots=True)
class Stretch:
    """``nbytes`` of a chunk from ``offset`` on that all belong to one array: one run at ``at`` in its C-order bytes, or
    the runs that a patch of an array of that shape has there."""

    chunk: int
    offset: int
    nbytes: int
    at: int
    patch: Patch | None = None
    shape: tuple[int, ...] = ()

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """``(offset in the chunk, length, place in the array)`` of each run of bytes."""
        if self.patch is None:
            yield self.offset, self.nbytes, self.at
            return
        count, starts = runs(self.shape, self.patch.box)
        length = count * self.patch.item
        for number, start in enumerate(starts):
            yield self.offset + number * length, length, start * self.patch.item


class Layout:
    """Where the elements of one stored array are."""

    def __init__(self, array: ArrayEntry) -> None:
        self._array = array
        self._item = dtype_size(array.dtype)
        parts = list(parts_of_entry(array))
        self._boxes = [box for box, _ in parts]
        self._spans = [spans for _, spans in parts]
        self._finder = Finder(self._boxes)

    def pieces(self, wanted: Box) -> Iterator[tuple[Box, Box, tuple[Span, ...]]]:
        """The stored boxes that have elements of a box: which elements, the stored box, and where its bytes are."""
        for number, common in self._finder.meeting(wanted):
            yield common, self._boxes[number], self._spans[number]

    def patches(self, wanted: Box) -> Iterator[Patch]:
        """What makes up a box of the array.

        Raises:
            FormatError: the array was cut inside of elements, which can only be put together as a whole.
        """
        for common, stored, spans in self.pieces(wanted) if self._item else ():
            yield from self.patches_in(common, stored, spans)

    def patches_in(self, common: Box, stored: Box, spans: Iterable[Span]) -> Iterator[Patch]:
        """What makes up a part of one stored box."""
        at = 0
        for span in spans:
            count, rest = divmod(span.length, self._item)
            if rest:
                raise FormatError("an array was cut inside of its elements: it can only be loaded as a whole")
            offset = span.offset
            for cut in rectangles(stored.shape, at, at + count):
                start = tuple(a + b for a, b in zip(cut.offset, stored.offset, strict=True))
                rectangle = Box(start, cut.shape)
                box = intersection(rectangle, common)
                if box is not None:
                    yield Patch(span.chunk, offset, box, rectangle, self._item)
                offset += cut.volume * self._item
            at += count

    def stretches(self) -> Iterator[Stretch]:
        """All of the array, in parts that lie each in one chunk."""
        if self._array.boxes:
            for patch in self.patches(whole(self._array.shape)):
                yield Stretch(patch.chunk, patch.offset, patch.nbytes, 0, patch, self._array.shape)
            return
        at = 0
        for span in self._array.spans:
            yield Stretch(span.chunk, span.offset, span.length, at)
            at += span.length


def parts_of_entry(array: ArrayEntry) -> Iterator[tuple[Box, tuple[Span, ...]]]:
    """The boxes that an array is stored in, and where the bytes of each are; one box if it was stored whole."""
    if not array.boxes:
        yield whole(array.shape), array.spans
        return
    at = 0
    for part in array.boxes:
        yield Box(part.offset, part.shape), array.spans[at : at + part.spans]
        at += part.spans


def entry_of(array: Any, parts: Iterator[tuple[tuple[Span, ...], str]]) -> ArrayEntry:
    """The entry of an array, from the next of the parts: where the bytes of each are, and its digest."""
    spec = array.spec
    if not isinstance(array, ShardedSource):
        where, digest = next(parts)
        return ArrayEntry(spec.kind, spec.dtype, spec.shape, where, digest)
    spans: tuple[Span, ...] = ()
    boxes = []
    for box in array.boxes:
        where, digest = next(parts)
        spans += where
        boxes.append(BoxEntry(box.offset, box.shape, len(where), digest))
    if len(boxes) == 1 and boxes[0].shape == spec.shape:
        return ArrayEntry(spec.kind, spec.dtype, spec.shape, spans, boxes[0].digest)
    return ArrayEntry(spec.kind, spec.dtype, spec.shape, spans, "", tuple(boxes))
