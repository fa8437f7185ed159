"""What ranks tell each other through the store: the part of each, and the outcome. See ``ranks.py``.

Frozen structs, their JSON is the format (docs/format.md). What comes from the store is capped, checked and
cross-checked like all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from ckptstore import keys
from ckptstore.errors import CorruptionError, InvalidRecordError
from ckptstore.indexes import decode_index, encode_index
from ckptstore.manifest import (
    FORMAT,
    MAX_INDEX,
    MAX_RECORDS,
    RecordEntry,
    RecordIndex,
    check_record_name,
    decode_signed,
    digest_of,
    encode_signed,
)

MAX_PART = 128 * 1024 * 1024
MAX_OUTCOME = 1024 * 1024
MAX_REASON = 2000  # characters

_HEX32 = re.compile(r"[0-9a-f]{32}")


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record, or its part, that a rank has written: ``index`` is its record index as it would be stored."""

    name: str
    kind: str
    digest: str
    raw_length: int
    arrays: int
    chunks: int
    boxes: int = 0
    index: bytes


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """All that one rank has written, or why it has failed (``error`` is the class of that, else empty).

    Its chunks are those of its own ``attempt`` and of those that its lease ``uses``; of them the ``adopted`` are dead.
    The process is as in a lease; ``begun`` is the store's time of its first put.
    """

    format: int = FORMAT
    rank: int
    world_size: int
    group: str
    epoch: int
    attempt: str
    begun: float
    host: str
    pid: int
    started: str
    uses: tuple[str, ...] = ()
    adopted: tuple[str, ...] = ()
    records: tuple[PartRecord, ...] = ()
    bytes_state: int = 0
    bytes_sent: int = 0
    bytes_reused: int = 0
    error: str = ""
    reason: str = ""
    of_the_store: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an attempt of several ranks. ``error`` is empty if it was committed, else the class to raise."""

    format: int = FORMAT
    attempt: str
    epoch: int
    generation: int
    error: str = ""
    message: str = ""
    ranks: dict[str, str] = {}
    of_the_store: bool = False


def part_records(indexes: Iterable[RecordIndex]) -> tuple[PartRecord, ...]:
    """The records of a part. InvalidRecordError if an index would exceed its cap."""
    records = []
    for index in indexes:
        digest, raw_length, stored = encode_index(index)
        records.append(
            PartRecord(
                name=index.name,
                kind=index.kind,
                digest=digest,
                raw_length=raw_length,
                arrays=len(index.arrays),
                chunks=len(index.chunks),
                boxes=index.boxes,
                index=stored,
            )
        )
    return tuple(records)


def encode_part(part: Part) -> bytes:
    """The bytes of a part. Raises InvalidRecordError if it would exceed its cap."""
    data = encode_signed(part)
    if len(data) > MAX_PART:
        raise InvalidRecordError(
            f"the indexes of rank {part.rank} take {len(data)} bytes, more than {MAX_PART}: use more ranks, "
            "or fewer and larger arrays",
            epoch=part.epoch,
        )
    return data


def decode_part(data: bytes, where: str) -> Part:
    """A verified part. CorruptionError if it is damaged, FormatError if a newer version made it."""
    part = decode_signed(data, Part, where, MAX_PART)
    good = (
        0 <= part.rank < part.world_size
        and all(_HEX32.fullmatch(attempt) for attempt in (part.attempt, *part.uses, *part.adopted))
        and set(part.adopted) <= set(part.uses)
        and len({record.name for record in part.records}) == len(part.records) <= MAX_RECORDS
    )
    if not good:
        raise CorruptionError(f"{where} is damaged: ranks, attempts or records make no sense", key=where)
    return part


def indexes_of(part: Part, where: str) -> list[RecordIndex]:
    """The verified indexes of a part: their chunks are of attempts that it names. CorruptionError otherwise."""
    reachable = {part.attempt, *part.uses}
    found = []
    for record in part.records:
        entry = RecordEntry(
            name=check_record_name(record.name),
            kind=record.kind,
            attempt=part.attempt,
            digest=record.digest,
            raw_length=min(record.raw_length, MAX_INDEX),
            stored_length=len(record.index),
            arrays=record.arrays,
            chunks=record.chunks,
            bytes_state=0,
            bytes_stored=0,
            boxes=record.boxes,
        )
        index = decode_index(record.index, entry, part=True)
        if not reachable.issuperset(chunk.attempt for chunk in index.chunks):
            raise CorruptionError(f"{where} is damaged: it refers to attempts that it does not name", key=where)
        found.append(index)
    return found


def decode_outcome(data: bytes, attempt: str) -> Outcome:
    """A verified outcome of that attempt. CorruptionError if it is damaged or that of another."""
    key = keys.outcome_key(attempt)
    outcome = decode_signed(data, Outcome, key, MAX_OUTCOME)
    if outcome.attempt != attempt or not all(rank.isdigit() for rank in outcome.ranks):
        raise CorruptionError(f"{key} is damaged: it is about another attempt, or names no ranks", key=key)
    return outcome


def place_of(data: bytes) -> str:
    """How to name a part that lies nowhere, in errors."""
    return f"the part {digest_of(data)[:8]}"
