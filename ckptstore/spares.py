"""Spares: good copies of objects that are damaged or missing, wherever they lie.

A chunk is named by its content, so any object of that name will do once its bytes are proved: in another attempt of the
same repository, in a mirror, in a plain copy. A record index names chunks by their place, so that of a mirror differs;
it is rebuilt from it, and right if the digest says so. Nothing that is handed out was not proved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

import msgspec

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.codecs import ITEM_SIZES, MODES, encode
from ckptstore.errors import CorruptionError, InvalidRecordError
from ckptstore.indexes import decode_index, encode_index
from ckptstore.manifest import ChunkRef, Manifest, RecordEntry, RecordIndex
from ckptstore.reader import decode_chunk, fetch, fetch_chunk, sure
from ckptstore.stores.base import Store

Spare = tuple[bytes, str]  # the bytes of an object as they should be, and where they come from

_MAX_ORDERS = 16
_DIGITS = "0123456789abcdef"


class Spares:
    """Looks for good copies: in the repository itself first, then in the others in their order.

    Args:
        own: the repository that is mended.
        others: mirrors, plain copies, or any repository that may hold the same content.
    """

    def __init__(self, own: Catalog, others: Sequence[Catalog]) -> None:
        self._own = own
        self._others = tuple(others)
        self._known: dict[str, list[tuple[Store, str, int]]] = {}  # digest → where an object of that name is

    def learn(self, digests: Collection[str]) -> None:
        """Find out where objects with these digests are: one walk through the names in every place."""
        wanted = {digest for digest in digests if digest not in self._known}
        if not wanted:
            return
        self._known.update((digest, []) for digest in wanted)
        for store in (self._own.store, *(other.store for other in self._others)):
            for digit in _DIGITS:  # stores hand out a listing as a whole, and it may be long
                for info in store.list(keys.ATTEMPTS + digit):
                    content = keys.parse_content_key(info.key)
                    if content is not None and content[2] in wanted:
                        self._known[content[2]].append((store, info.key, info.size))

    def frame(self, chunk: ChunkRef) -> Spare | None:
        """The object that belongs under ``chunk.key``, of exactly its length. None: no good copy was found."""
        for store, key, size in self._copies(chunk.digest, chunk.key):
            content = keys.parse_content_key(key)
            if content is None or content[1] != "chunks" or not 0 < size <= chunk.raw_length + 64:
                continue
            copy = ChunkRef(content[0], chunk.digest, chunk.raw_length, size)
            with suppress(CorruptionError):  # as good as no copy
                frame, raw = sure(lambda store=store, copy=copy: _proved(store, copy))  # type: ignore[misc]
                fitting = frame if size == chunk.stored_length else _coded(raw, chunk)
                if fitting is not None:
                    return fitting, _name(store, key)
        return None

    def index(self, manifest: Manifest, entry: RecordEntry) -> Spare | None:
        """The object that belongs under ``entry.key``. None: none was found, nor what to rebuild it from."""
        for store, key, size in self._copies(entry.digest, entry.key):
            with suppress(CorruptionError):
                content = keys.parse_content_key(key)
                if content is None or content[1] != "records":
                    continue
                there = msgspec.structs.replace(entry, attempt=content[0], stored_length=size)
                data = bytes(fetch(store, key, size))
                index = decode_index(data, there)
                if size == entry.stored_length:
                    return data, _name(store, key)
                again = _encoded(index, entry)
                if again is not None:
                    return again, _name(store, key)
        for other, copied in self.twins(manifest):
            twin = copied.record(entry.name)
            with suppress(CorruptionError):
                found = None if twin is None else self._rebuilt(manifest, entry, other.index(twin))
                if found is not None and twin is not None:
                    return found, f"{_name(other.store, twin.key)} (rebuilt)"
        return None

    def twins(self, manifest: Manifest) -> Iterator[tuple[Catalog, Manifest]]:
        """Copies of the same checkpoint elsewhere: the same by identity, not by number."""
        for other, copied in self.under(manifest.epoch):
            if copied.first.attempt == manifest.first.attempt:
                yield other, copied

    def under(self, epoch: int) -> Iterator[tuple[Catalog, Manifest]]:
        """What the others have under a number, whatever it is; the highest generation first."""
        for other in self._others:
            for _, found in other.manifests(reversed(other.committed(epoch))):
                if isinstance(found, Manifest):
                    yield other, found

    def _copies(self, digest: str, without: str) -> Iterator[tuple[Store, str, int]]:
        own = self._own.store
        return (copy for copy in self._known.get(digest, ()) if (copy[0], copy[1]) != (own, without))

    def _rebuilt(self, manifest: Manifest, entry: RecordEntry, twin: RecordIndex) -> bytes | None:
        """The index with the chunks of its twin where they lie here: a record has each content in one place."""
        there: dict[str, list[str]] = {}
        for attempt in manifest.attempts:
            for info in self._own.store.list(keys.chunks_prefix(attempt)):
                there.setdefault(info.key.rpartition("/")[2], []).append(attempt)
        others = [attempt for attempt in manifest.attempts if attempt != entry.attempt]
        for first in [entry.attempt, *others][:_MAX_ORDERS]:

            def place(chunk: ChunkRef, first: str = first) -> ChunkRef:
                places = there.get(chunk.digest) or [first]
                return msgspec.structs.replace(chunk, attempt=first if first in places else places[0])

            found = _encoded(msgspec.structs.replace(twin, chunks=tuple(map(place, twin.chunks))), entry)
            if found is not None:
                return found
        return None


def saved_at(catalog: Catalog, manifest: Manifest) -> float:
    """When a checkpoint was saved first, by the clock of the store that had it then. 0: it was deleted meanwhile."""
    times = {} if manifest.saved else catalog.commit_times(manifest.epoch)
    return manifest.saved or times.get(Committed(manifest.epoch, manifest.generation), 0.0)


def _proved(store: Store, copy: ChunkRef) -> tuple[bytes, memoryview]:
    frame = bytes(fetch_chunk(store, copy))
    return frame, decode_chunk(memoryview(frame), copy)


def _coded(raw: memoryview, chunk: ChunkRef) -> bytes | None:
    """A frame of the length that the index tells, from content that was coded in another way elsewhere."""
    for mode in reversed(MODES):
        for item_size in (0, *ITEM_SIZES) if mode != "raw" else (0,):
            frame = encode(raw, item_size, mode)
            if len(frame) == chunk.stored_length:
                decode_chunk(memoryview(frame), chunk)
                return frame
    return None


def _encoded(index: RecordIndex, entry: RecordEntry) -> bytes | None:
    try:
        digest, _, stored = encode_index(index)
        if digest != entry.digest or len(stored) != entry.stored_length:
            return None
        decode_index(stored, entry)
    except (InvalidRecordError, CorruptionError):
        return None
    return stored


def _name(store: Store, key: str) -> str:
    return f"{store.traits.url}/{key}"
