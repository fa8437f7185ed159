"""Record index → frames → decode → digest → straight into the destination. Nothing unverified is returned (P3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ckptstore import keys
from ckptstore.codecs import decode
from ckptstore.errors import CorruptionError, ObjectNotFoundError
from ckptstore.manifest import ChunkRef, RecordEntry, RecordIndex, decode_index, digest_of
from ckptstore.pipeline import Meter, Pipeline
from ckptstore.stores.base import Store


@dataclass(frozen=True, slots=True)
class Problem:
    """One object that is not what its checkpoint needs, and why."""

    key: str
    reason: str


class Target(Protocol):
    """Where the bytes of one array go: a writable view of exactly as many bytes."""

    @property
    def buffer(self) -> memoryview: ...


def fetch(store: Store, key: str, length: int) -> bytes:
    """An object that must have exactly ``length`` bytes. CorruptionError if it is missing or of another size."""
    try:
        data = store.get(key, 0, length + 1)  # one more than it should have: shows an extended object
    except ObjectNotFoundError as error:
        raise CorruptionError(f"{key} is missing", key=key) from error
    if len(data) != length:
        has = f"more than {length}" if len(data) > length else str(len(data))
        raise CorruptionError(f"{key} is damaged: has {has} bytes, should have {length}", key=key)
    return data


def fetch_chunk(store: Store, chunk: ChunkRef, _: object = None) -> bytes:
    """The frame of a chunk, not yet verified. (The last argument lets it begin a pipeline.)"""
    return fetch(store, chunk.key, chunk.stored_length)


def read_index(store: Store, entry: RecordEntry) -> RecordIndex:
    """The verified index of a record."""
    return decode_index(fetch(store, entry.key, entry.stored_length), entry)


def decode_chunk(frame: bytes, chunk: ChunkRef, out: memoryview | None = None) -> memoryview:
    """The verified raw bytes of a chunk, in ``out`` where given. CorruptionError names the object."""
    raw = decode(frame, out, chunk.raw_length, chunk.key)
    if digest_of(raw) != chunk.digest:
        raise CorruptionError(f"{chunk.key} is damaged: its content does not match its digest", key=chunk.key)
    return raw


def read_chunk(store: Store, chunk: ChunkRef, frame: bytes, out: memoryview | None = None) -> memoryview:
    """Decode ``frame``; if that fails, fetch it once more, because a wrong byte may have come from the way."""
    try:
        return decode_chunk(frame, chunk, out)
    except CorruptionError:
        return decode_chunk(fetch_chunk(store, chunk), chunk, out)


def load_arrays(
    store: Store, index: RecordIndex, targets: Mapping[int, Target], *, meter: Meter, visible: bool = False
) -> None:
    """Fill ``targets`` (by array number) and read no other array's chunks.

    Args:
        visible: the caller can already see the targets. Then a chunk is decoded aside and copied only
            after its digest was checked.
    """
    wanted = _scatter(index, targets)

    def finish(frame: bytes, chunk: ChunkRef, places: list[tuple[memoryview, int]]) -> None:
        whole = len(places) == 1 and len(places[0][0]) == chunk.raw_length and not visible
        raw = read_chunk(store, chunk, frame, places[0][0] if whole else None)
        if not whole:
            for view, offset in places:
                view[:] = raw[offset : offset + len(view)]
        meter.add(sum(len(view) for view, _ in places))

    with Pipeline(store.traits.concurrency) as pipeline:
        for number, places in wanted.items():
            chunk = index.chunks[number]
            pipeline.submit(
                chunk.raw_length,
                (pipeline.io, partial(fetch_chunk, store, chunk)),
                (pipeline.cpu, partial(finish, chunk=chunk, places=places)),
            )
        pipeline.finish()


def _scatter(index: RecordIndex, targets: Mapping[int, Target]) -> dict[int, list[tuple[memoryview, int]]]:
    """For each chunk needed: the destination views it fills and their offsets in its raw bytes."""
    wanted: dict[int, list[tuple[memoryview, int]]] = {}
    for number, target in targets.items():
        filled = 0
        for span in index.arrays[number].spans:
            view = target.buffer[filled : filled + span.length]
            wanted.setdefault(span.chunk, []).append((view, span.offset))
            filled += span.length
    return wanted


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

    with ThreadPoolExecutor(store.traits.concurrency) as pool:
        return [problem for problems in pool.map(look, by_attempt) for problem in problems]


def damaged_chunks(store: Store, chunks: Iterable[ChunkRef], meter: Meter) -> list[Problem]:
    """Chunks whose bytes are wrong: every byte is read and checked."""
    problems: list[Problem] = []

    def get(chunk: ChunkRef, _: None) -> bytes | None:
        try:
            return fetch_chunk(store, chunk)
        except CorruptionError as error:
            problems.append(Problem(chunk.key, error.message))
            return None

    def check(frame: bytes | None, chunk: ChunkRef) -> None:
        if frame is not None:
            try:
                read_chunk(store, chunk, frame)
            except CorruptionError as error:
                problems.append(Problem(chunk.key, error.message))
        meter.add(chunk.raw_length)

    with Pipeline(store.traits.concurrency) as pipeline:
        for chunk in {chunk.key: chunk for chunk in chunks}.values():
            pipeline.submit(
                chunk.raw_length,
                (pipeline.io, partial(get, chunk)),
                (pipeline.cpu, partial(check, chunk=chunk)),
            )
        pipeline.finish()
    return sorted(problems, key=lambda problem: problem.key)
