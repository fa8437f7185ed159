"""Known: content that is on the store already, by digest, so that a save can refer to it in place of sending it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ckptstore import keys
from ckptstore.manifest import ChunkRef, RecordIndex, Span
from ckptstore.patience import indispensable

Place = tuple[ChunkRef, int, int]  # chunk, offset and length of a run of bytes in its raw content


class Known:
    """Content that may be referred to in place of being sent again, by digest. Thread-safe."""

    def __init__(self, look: Callable[[str], dict[str, int]]) -> None:
        """``look`` tells which chunks of an attempt are there, with their sizes. Asked once an attempt, when needed."""
        self._look = look
        self._lock = threading.Lock()
        self._there: dict[str, dict[str, int]] = {}
        self._chunks: dict[str, ChunkRef] = {}
        self._arrays: dict[str, tuple[Place, ...]] = {}
        self._adopted: dict[str, tuple[str, int]] = {}  # digest → attempt, stored length

    @property
    def empty(self) -> bool:
        """Whether there is nothing to refer to."""
        return not (self._chunks or self._adopted)

    @property
    def has_arrays(self) -> bool:
        """Whether arrays that share chunks can be found."""
        return bool(self._arrays)

    def learn(self, index: RecordIndex) -> None:
        """Everything in a record of the base checkpoint."""
        for chunk in index.chunks:
            self._chunks.setdefault(chunk.digest, chunk)
        for array in index.arrays:
            if not array.boxes:
                self._learn(index, array.digest, array.spans)
            at = 0
            for box in array.boxes:
                self._learn(index, box.digest, array.spans[at : at + box.spans])
                at += box.spans

    def _learn(self, index: RecordIndex, digest: str, spans: Sequence[Span]) -> None:
        if not digest and len(spans) == 1:  # alone in its chunk now, and next time maybe not
            chunk = index.chunks[spans[0].chunk]
            digest = chunk.digest if spans[0].length == chunk.raw_length else ""
        if digest:
            self._arrays.setdefault(digest, tuple((index.chunks[s.chunk], s.offset, s.length) for s in spans))

    def adopt(self, attempt: str, chunks: dict[str, int]) -> None:
        """The chunks that a dead attempt left. A put is all or nothing, so a name proves its content."""
        self._there[attempt] = chunks
        for key, size in chunks.items():
            parsed = keys.parse_content_key(key)
            if parsed is not None and size > 0:
                self._adopted.setdefault(parsed[2], (attempt, size))

    def find(self, digest: str, raw_length: int) -> ChunkRef | None:
        """A chunk with that content that is there."""
        chunk = self._chunks.get(digest)
        if chunk is not None and self._is_there(chunk):
            return chunk
        if digest not in self._adopted:
            return None
        attempt, stored_length = self._adopted[digest]
        return ChunkRef(attempt, digest, raw_length, stored_length)

    def find_array(self, digest: str, nbytes: int) -> tuple[Place, ...] | None:
        """Where an array with that content lies in chunks that are there."""
        places = self._arrays.get(digest, ())
        if sum(length for _, _, length in places) != nbytes or not all(self._is_there(place[0]) for place in places):
            return None
        return places

    def _is_there(self, chunk: ChunkRef) -> bool:
        with indispensable(), self._lock:
            if chunk.attempt not in self._there:
                self._there[chunk.attempt] = self._look(chunk.attempt)
            return self._there[chunk.attempt].get(chunk.key) == chunk.stored_length
