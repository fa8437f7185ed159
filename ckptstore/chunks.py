"""Where arrays are cut: chunk borders follow array borders, so that an unchanged array keeps its digests.

A big array is cut at ``CHUNK_SIZE``. Arrays below ``SMALL`` share chunks of about ``PACK_SIZE`` with
others of the same plane width, so that the number of objects does not grow with the number of arrays
while a single array can still be read, and reused, without reading megabytes of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

CHUNK_SIZE = 32 * 1024 * 1024
SMALL = 1024 * 1024
PACK_SIZE = 8 * 1024 * 1024
# Arrays that share a chunk carry a digest of their own from this size on; below it, the digest
# would cost more than the bytes that reuse could save.
DIGEST_FROM = 16 * 1024
_WORTH_NUMPY = 64 * 1024  # bytes from which a copy by NumPy is faster than one by Python


class Piece(NamedTuple):
    """Bytes ``[start, stop)`` of array number ``array``."""

    array: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The pieces whose concatenation is one chunk, all of the same plane width ``item_size``."""

    item_size: int
    pieces: tuple[Piece, ...]
    nbytes: int


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

    def add(self, array: int, nbytes: int, item_size: int, align: int) -> list[ChunkPlan]:
        """Plans that are complete now that array number ``array`` has been added.

        ``align`` is the size of one element: no chunk border falls inside an element.
        """
        if nbytes >= self._small:
            step = max(self._chunk_size - self._chunk_size % align, align)
            borders = [*range(0, nbytes, step), nbytes]
            return [ChunkPlan(item_size, (Piece(array, a, b),), b - a) for a, b in pairwise(borders)]
        if nbytes == 0:
            return []
        fill = self._fill.get(item_size, 0) + nbytes
        done = [self._close(item_size)] if fill > self._pack_size else []
        self._open.setdefault(item_size, []).append(Piece(array, 0, nbytes))
        self._fill[item_size] = nbytes if done else fill
        return done

    def finish(self) -> list[ChunkPlan]:
        """The plans of the small arrays still held."""
        return [self._close(item_size) for item_size in sorted(self._open)]

    def _close(self, item_size: int) -> ChunkPlan:
        return ChunkPlan(item_size, tuple(self._open.pop(item_size)), self._fill.pop(item_size))


def joined(pieces: Sequence[memoryview], room: memoryview) -> memoryview:
    """All pieces in a row, in ``room``; NumPy lets other threads run meanwhile, which pays for large ones."""
    at = 0
    for piece in pieces:
        place = room[at : at + piece.nbytes]
        if piece.nbytes < _WORTH_NUMPY:
            place[:] = piece.cast("B")
        else:
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(piece, np.uint8))
        at += piece.nbytes
    return room[:at]
