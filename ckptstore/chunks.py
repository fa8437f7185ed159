"""Where arrays are cut: chunk borders follow array borders, so that an unchanged array keeps its digests.

A big array is cut at ``CHUNK_SIZE``. Arrays below ``SMALL`` share chunks of about ``PACK_SIZE`` with
others of the same plane width, so that the number of objects does not grow with the number of arrays
while a single array can still be read, and reused, without reading megabytes of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CHUNK_SIZE = 32 * 1024 * 1024
SMALL = 1024 * 1024
PACK_SIZE = 8 * 1024 * 1024
# Arrays that share a chunk carry a digest of their own from this size on; below it, the digest
# would cost more than the bytes that reuse could save.
DIGEST_FROM = 16 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, stop)`` of array number ``array``."""

    array: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The pieces whose concatenation is one chunk, all of the same plane width ``item_size``."""

    item_size: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


class Packer:
    """Turns a stream of arrays into chunk plans. Holds only the small arrays not yet planned."""

    def __init__(self, chunk_size: int = CHUNK_SIZE) -> None:
        self._chunk_size = chunk_size
        self._small = min(SMALL, chunk_size)
        self._pack_size = min(PACK_SIZE, chunk_size)
        self._open: dict[int, list[Piece]] = {}
        self._fill: dict[int, int] = {}

    def is_small(self, nbytes: int) -> bool:
        """Whether an array of that size shares its chunk with others."""
        return nbytes < self._small

    def add(self, array: int, nbytes: int, item_size: int, align: int) -> Iterator[ChunkPlan]:
        """Plans that are complete now that array number ``array`` has been added.

        ``align`` is the size of one element: no chunk border falls inside an element.
        """
        if nbytes == 0:
            return
        if self.is_small(nbytes):
            if self._fill.get(item_size, 0) + nbytes > self._pack_size:
                yield self._close(item_size)
            self._open.setdefault(item_size, []).append(Piece(array, 0, nbytes))
            self._fill[item_size] = self._fill.get(item_size, 0) + nbytes
            return
        step = max(self._chunk_size - self._chunk_size % align, align)
        for start in range(0, nbytes, step):
            yield ChunkPlan(item_size, (Piece(array, start, min(start + step, nbytes)),))

    def finish(self) -> Iterator[ChunkPlan]:
        """The plans of the small arrays still held."""
        for item_size in sorted(self._open):
            yield self._close(item_size)

    def _close(self, item_size: int) -> ChunkPlan:
        self._fill.pop(item_size)
        return ChunkPlan(item_size, tuple(self._open.pop(item_size)))
