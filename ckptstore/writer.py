"""Record → chunks → digest → known? reuse : codec → store. Bounded bytes in flight, one private copy of each chunk.

The private copy is deliberate. The trainer may change an array while we read it; hashing one version and storing
another would commit a chunk that can never be verified. A chunk is copied once, and hashed, coded and
sent (also again, by a retry) from that copy.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ckptstore import keys
from ckptstore.arrays import ArraySpec
from ckptstore.chunks import DIGEST_FROM, ChunkPlan, Packer
from ckptstore.codecs import encode
from ckptstore.errors import InvalidRecordError, NotFoundError
from ckptstore.manifest import ArrayEntry, ChunkRef, RecordEntry, RecordIndex, Span, digest_of, encode_index
from ckptstore.pipeline import Pipeline
from ckptstore.stores.base import Store
from ckptstore.tree import FlatState


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


Place = tuple[ChunkRef, int, int]  # chunk, offset and length of a run of bytes in its raw content


@dataclass
class Known:
    """Content that may be referred to in place of being sent again, by digest."""

    chunks: dict[str, ChunkRef] = field(default_factory=dict)
    arrays: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    stored: dict[str, tuple[str, int]] = field(default_factory=dict)  # adopted: digest → attempt, stored length

    def learn(self, index: RecordIndex) -> None:
        """Everything in a record of the base checkpoint."""
        for chunk in index.chunks:
            self.chunks.setdefault(chunk.digest, chunk)
        for array in index.arrays:
            if array.digest:
                places = tuple((index.chunks[s.chunk], s.offset, s.length) for s in array.spans)
                self.arrays.setdefault(array.digest, places)

    def find(self, digest: str, raw_length: int) -> ChunkRef | None:
        chunk = self.chunks.get(digest)
        if chunk is None and digest in self.stored:
            attempt, stored_length = self.stored[digest]
            chunk = ChunkRef(attempt, digest, raw_length, stored_length)
        return chunk


@dataclass
class Tally:
    """What a save moved, in bytes: of the state, of it found already stored, and sent to the store."""

    bytes_state: int = 0
    bytes_reused: int = 0
    bytes_sent: int = 0
    chunks_sent: int = 0
    chunks_reused: int = 0


class RecordWriter:
    """Writes the records of one attempt. Not for use by several threads at once."""

    def __init__(
        self,
        store: Store,
        attempt: str,
        known: Known,
        *,
        chunk_size: int,
        codec: str,
        cores: int | None = None,
        meter: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._known = known
        self._chunk_size = chunk_size
        self._codec = codec
        self._cores = cores
        self._meter = meter
        self._lock = threading.Lock()
        self._claimed: dict[str, Future[ChunkRef]] = {}
        self.tally = Tally()
        self.referenced: dict[str, ChunkRef] = {}

    def write_state(self, name: str, flat: FlatState) -> RecordEntry:
        """Write a flattened state; every put has returned when this returns."""
        return self._write(name, "state", flat.skeleton, flat.arrays)

    def write_file(self, name: str, path: Path) -> RecordEntry:
        """Write a file's bytes. Raises InvalidRecordError if it changes meanwhile."""
        with FileSource(path) as source:
            name_of_file = path.name.encode("utf-8", "backslashreplace").decode()
            skeleton = {"file": name_of_file, "size": source.nbytes}
            entry = self._write(name, "file", skeleton, [source])
            source.check_unchanged()
        return entry

    def _write(self, name: str, kind: str, skeleton: Any, sources: list[Any]) -> RecordEntry:
        layout = _Layout(sources)
        with Pipeline(self._store.traits.concurrency, cpu=self._cores) as pipeline:
            for plan in self._plans(sources, layout):
                job = pipeline.submit(
                    plan.nbytes,
                    (pipeline.cpu, partial(self._prepare, sources, layout, plan)),
                    (pipeline.io, self._send),
                )
                layout.place(plan, job)
            pipeline.finish()
        index = layout.index(name, kind, skeleton)
        digest, raw_length, stored = encode_index(index)
        entry = RecordEntry(
            name=name,
            kind=kind,
            attempt=self._attempt,
            digest=digest,
            raw_length=raw_length,
            stored_length=len(stored),
            arrays=len(index.arrays),
            chunks=len(index.chunks),
            bytes_state=sum(source.nbytes for source in sources),
            bytes_stored=sum(chunk.stored_length for chunk in index.chunks),
        )
        self._store.put(entry.key, stored, if_absent=True)
        self.tally.bytes_sent += len(stored)
        self.referenced.update((chunk.key, chunk) for chunk in index.chunks)
        return entry

    def _plans(self, sources: list[Any], layout: _Layout) -> Iterator[ChunkPlan]:
        packer = Packer(self._chunk_size)
        for number, source in enumerate(sources):
            self.tally.bytes_state += source.nbytes
            if self._known.arrays and source.nbytes >= DIGEST_FROM and packer.is_small(source.nbytes):
                digest = digest_of(source.read(0, source.nbytes))
                places = self._known.arrays.get(digest)
                if places is not None and sum(place[2] for place in places) == source.nbytes:
                    layout.reuse(number, digest, places)
                    self._count(source.nbytes, reused=True)
                    continue
            yield from packer.add(number, source.nbytes, source.item_size, source.align)
        yield from packer.finish()

    def _prepare(
        self, sources: list[Any], layout: _Layout, plan: ChunkPlan, _: None
    ) -> tuple[str, bytes | bytearray | memoryview | None, Any]:
        """Stage 1, on a core: private copy, digest, and the frame unless the content is known."""
        raw = b"".join([sources[piece.array].read(piece.start, piece.stop) for piece in plan.pieces])
        layout.note_digests(plan, raw)
        digest = digest_of(raw)
        with self._lock:
            claimed = self._claimed.get(digest)
            found = self._known.find(digest, plan.nbytes) if claimed is None else None
            if claimed is None:
                claimed = self._claimed[digest] = Future()
                mine = found is None
            else:
                mine = False
        if not mine:
            if found is not None:
                claimed.set_result(found)
            self._count(plan.nbytes, reused=True)
            return digest, None, claimed
        try:
            return digest, encode(memoryview(raw), plan.item_size, self._codec), plan.nbytes
        except BaseException as error:
            claimed.set_exception(error)
            raise

    def _send(self, prepared: tuple[str, bytes | bytearray | memoryview | None, Any]) -> ChunkRef | Future[ChunkRef]:
        """Stage 2, on a connection: put the frame, unless another job is putting the same content.

        Then the answer is that job's promise, not yet its result: a connection that waited for another
        one could wait for a job that is queued behind it.
        """
        digest, frame, rest = prepared
        if frame is None:
            claimed: Future[ChunkRef] = rest
            return claimed
        chunk = ChunkRef(self._attempt, digest, rest, len(frame))
        try:
            self._store.put(chunk.key, frame, if_absent=True)
        except BaseException as error:
            self._claimed[digest].set_exception(error)
            raise
        self._claimed[digest].set_result(chunk)
        self._count(rest, sent=len(frame))
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

    def __init__(self, sources: list[Any]) -> None:
        self._sources = sources
        self._runs: list[list[tuple[int, int, int]]] = [[] for _ in sources]  # chunk number, offset, length
        self._chunks: list[Future[Any] | ChunkRef] = []
        self._numbers: dict[str, int] = {}  # key of a reused chunk → its number
        self.digests: dict[int, str] = {}

    def place(self, plan: ChunkPlan, job: Future[Any]) -> None:
        number = len(self._chunks)
        self._chunks.append(job)
        offset = 0
        for piece in plan.pieces:
            length = piece.stop - piece.start
            self._runs[piece.array].append((number, offset, length))
            offset += length

    def note_digests(self, plan: ChunkPlan, raw: bytes) -> None:
        """Digests of arrays that share this chunk, of the very bytes that are stored.

        Taken from the private copy: the live array may have changed since it was last looked at, and a digest of
        other bytes would make a later save refer to the wrong ones.
        """
        offset = 0
        view = memoryview(raw)
        for piece in plan.pieces:
            length = piece.stop - piece.start
            if length >= DIGEST_FROM and length == self._sources[piece.array].nbytes and len(plan.pieces) > 1:
                self.digests[piece.array] = digest_of(view[offset : offset + length])
            offset += length

    def reuse(self, array: int, digest: str, places: tuple[Place, ...]) -> None:
        self.digests[array] = digest
        for chunk, offset, length in places:
            number = self._numbers.get(chunk.key)
            if number is None:
                number = self._numbers[chunk.key] = len(self._chunks)
                self._chunks.append(chunk)
            self._runs[array].append((number, offset, length))

    def index(self, name: str, kind: str, skeleton: Any) -> RecordIndex:
        """The record index; every job has a result by now."""
        refs = [_settled(chunk) for chunk in self._chunks]
        unique = {ref.key: ref for ref in refs}
        renumber = {key: number for number, key in enumerate(unique)}
        arrays = []
        for number, source in enumerate(self._sources):
            spans = tuple(Span(renumber[refs[c].key], offset, length) for c, offset, length in self._runs[number])
            spec = source.spec
            arrays.append(ArrayEntry(spec.kind, spec.dtype, spec.shape, spans, self.digests.get(number, "")))
        return RecordIndex(name=name, kind=kind, skeleton=skeleton, arrays=tuple(arrays), chunks=tuple(unique.values()))


def _settled(chunk: Any) -> ChunkRef:
    while isinstance(chunk, Future):
        chunk = chunk.result()
    assert isinstance(chunk, ChunkRef)
    return chunk


class FileSource:
    """A file read piece by piece by many threads (``pread``: no shared position)."""

    item_size = 0  # the codec probes for the width of whatever numbers the file holds
    align = 8

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Not blocking: opening a pipe would wait for somebody to write to it.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"{path} does not exist: nothing to store") from error
        except OSError as error:
            raise InvalidRecordError(f"{path} cannot be read ({error.strerror}): nothing to store") from error
        self._stat = os.fstat(self._fd)
        if not stat.S_ISREG(self._stat.st_mode):
            os.close(self._fd)
            raise InvalidRecordError(f"{path} is not a regular file: nothing to store")
        self.nbytes = self._stat.st_size
        self.spec = ArraySpec("bytes", "uint8", (self.nbytes,))

    def read(self, start: int, stop: int) -> memoryview:
        parts = bytearray(stop - start)
        view = memoryview(parts)
        filled = 0
        while filled < len(parts):
            count = os.preadv(self._fd, [view[filled:]], start + filled)
            if count == 0:
                raise InvalidRecordError(f"{self._path} became shorter while it was being saved: save it again")
            filled += count
        return view

    def check_unchanged(self) -> None:
        """Raises InvalidRecordError unless the file is as it was when it was opened."""
        if os.pread(self._fd, 1, self.nbytes):
            # Also what files of /proc look like: bytes, but no size.
            raise InvalidRecordError(f"{self._path} is longer than it says: copy it to an ordinary file first")
        now = os.stat(self._path)
        before = self._stat
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
            raise InvalidRecordError(f"{self._path} changed while it was being saved: save it again")

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def adopt(store: Store, attempt: str, known: Known) -> None:
    """Learn the chunks that a dead attempt left. A put is all or nothing, so a name proves its content."""
    for info in store.list(keys.chunks_prefix(attempt)):
        parsed = keys.parse_content_key(info.key)
        if parsed is not None and info.size > 0:
            known.stored.setdefault(parsed[2], (attempt, info.size))
