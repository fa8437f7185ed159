"""What is on the store, as frozen structs: their JSON *is* the format (see docs/format.md).

Everything read from a store passes through the ``decode_*`` functions here and in ``indexes.py``: size-capped,
digest-checked, strictly typed and cross-checked. Nothing is evaluated. Sizes are bytes, digests are BLAKE3-256 in
64 lower-case hexadecimal digits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn, TypeVar

import msgspec
from blake3 import blake3

from ckptstore import keys
from ckptstore.errors import CorruptionError, FormatError, InvalidArgumentError, InvalidRecordError
from ckptstore.jsonsize import fits

FORMAT = 1
SHARDED = 2  # of an index in which arrays are stored in boxes: readers of format 1 would take the bytes for the whole

# Caps: checked before a size is trusted (P8), and by the writer before it creates what nobody could read.
MAX_MARKER = 64 * 1024
MAX_LEASE = 1024 * 1024
MAX_CLAIM = 64 * 1024
MAX_MANIFEST = 16 * 1024 * 1024
MAX_INDEX = 64 * 1024 * 1024
MAX_CHUNK_RAW = 256 * 1024 * 1024
MAX_RECORDS = 10_000
MAX_ARRAYS = 500_000
MAX_OBJECTS = 64 * 1024 * 1024  # what JSON may become in memory, beyond its length and what the manifest counts:
PER_ARRAY = 1536
PER_CHUNK = 512
PER_BOX = 1024

HEX64 = re.compile(r"[0-9a-f]{64}")
HEX32 = re.compile(r"[0-9a-f]{32}")
_NAME_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_PREFIX = b'{"digest":"'
_SIGNED_FROM = len(_PREFIX) + 64 + 2  # the digest covers every byte from here on


class Span(msgspec.Struct, frozen=True, array_like=True):
    """``length`` bytes of an array, found at ``offset`` in the raw bytes of ``chunks[chunk]``."""

    chunk: int
    offset: int
    length: int


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """One chunk: where it is and what it must be."""

    attempt: str
    digest: str
    raw_length: int
    stored_length: int

    @property
    def key(self) -> str:
        return keys.chunk_key(self.attempt, self.digest)


class BoxEntry(msgspec.Struct, frozen=True, array_like=True):
    """A rectangular part of an array: the next ``spans`` of the array's spans hold its C-order bytes, in order.

    ``digest`` as of an array.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    spans: int
    digest: str = ""


class ArrayEntry(msgspec.Struct, frozen=True, array_like=True):
    """One array: its type, its shape and the spans that hold its C-order bytes, in order.

    ``digest`` is kept for arrays that share a chunk with others, so that a later save can tell
    that such an array is unchanged although its neighbours are not; empty where not needed.
    Where there are ``boxes``, the array was saved in pieces, and the spans are those of each of them in turn.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    digest: str = ""
    boxes: tuple[BoxEntry, ...] = ()


class RecordIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one record but its bytes. Stored as one zstd frame of this JSON."""

    format: int = FORMAT
    name: str
    kind: str  # "state" | "file"
    skeleton: Any
    arrays: tuple[ArrayEntry, ...]
    chunks: tuple[ChunkRef, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(span.length for array in self.arrays for span in array.spans)

    @property
    def boxes(self) -> int:
        """How many pieces its sharded arrays have."""
        return sum(len(array.boxes) for array in self.arrays)


class RecordEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record as its manifest lists it. ``digest`` and ``raw_length`` are of the index JSON."""

    name: str
    kind: str
    attempt: str
    digest: str
    raw_length: int
    stored_length: int
    arrays: int
    chunks: int
    bytes_state: int
    bytes_stored: int
    boxes: int = 0

    @property
    def key(self) -> str:
        return keys.record_key(self.attempt, self.digest)


class Origin(msgspec.Struct, frozen=True):
    """Where a checkpoint was committed first. The attempt alone tells it from every other."""

    repository: str
    generation: int
    attempt: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One committed checkpoint. The object under ``keys.manifest_key(epoch, generation)`` is the commit.

    ``attempts`` lists every attempt whose objects the checkpoint reaches. ``created`` and ``writer``
    are information for people: nothing is decided by them. ``run`` is the name of the run that saved it, empty where
    it has none, and ``writer_number`` which of its writers it was. ``left_out`` names records that the run has and this
    epoch lacks, each with the reason. ``saved`` is the store's time of the first generation, in seconds since 1970,
    where this one took it over; else 0, and the time of the object counts. ``origin``
    is where a copy comes from.
    """

    format: int = FORMAT
    repository: str
    epoch: int
    generation: int
    attempt: str
    base: str | None
    created: str
    writer: str
    metadata: Any
    records: tuple[RecordEntry, ...]
    attempts: tuple[str, ...]
    bytes_state: int
    bytes_sent: int
    bytes_reused: int
    run: str = ""
    writer_number: int = 0
    left_out: dict[str, str] = {}
    saved: float = 0.0
    origin: Origin | None = None

    @property
    def key(self) -> str:
        return keys.manifest_key(self.epoch, self.generation)

    @property
    def bytes_needed(self) -> int:
        """Bytes on the store that it needs, whoever sent them: chunks and indexes."""
        return sum(entry.bytes_stored + entry.stored_length for entry in self.records)

    @property
    def first(self) -> Origin:
        """Where it was committed first: equal for all copies of one checkpoint, and for no others."""
        return self.origin or Origin(self.repository, self.generation, self.attempt)

    def record(self, name: str) -> RecordEntry | None:
        return next((entry for entry in self.records if entry.name == name), None)


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """``ckptstore.json``: says that this is a repository, which one, and of which format."""

    format: int = FORMAT
    repository: str
    created: str
    writer: str


class RankOf(msgspec.Struct, frozen=True):
    """One of the processes that save a checkpoint together; ``group`` is the name of their launch."""

    group: str
    rank: int
    world_size: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt is alive, and these are the attempts whose objects it may refer to (``uses``); or a reader is, and
    those are the attempts that he reads (``state`` "reading", ``base`` the checkpoint, ``reason`` his). ``rank`` is
    whose it is where several processes save together, and ``reason`` then why it was given up."""

    format: int = FORMAT
    attempt: str
    epoch: int
    base: str | None
    uses: tuple[str, ...]
    host: str
    pid: int
    started: str  # identifies the process behind pid, so that a reused pid is not mistaken for it
    state: str  # "active" | "abandoned" | "reading"
    beat: int
    reason: str = ""
    rank: RankOf | None = None


class WriterClaim(msgspec.Struct, frozen=True, kw_only=True):
    """From now on this is the writer of a run. ``session`` tells whose it is; the process is information for people."""

    format: int = FORMAT
    run: str
    number: int
    session: str
    host: str
    pid: int
    started: str


class _Version(msgspec.Struct):
    format: int


def format_for(arrays: Sequence[ArrayEntry]) -> int:
    """The format that an index of these arrays has: the oldest that can say it."""
    return SHARDED if any(array.boxes for array in arrays) else FORMAT


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3-256 of ``data`` as 64 hexadecimal digits."""
    return blake3(data).hexdigest()


def hasher() -> blake3:
    """For the same digest, of bytes that come one block after the other (``update``, ``hexdigest``)."""
    return blake3()


def check_epoch(epoch: object) -> int:
    """``epoch`` as an int in [0, 2**63). Raises InvalidArgumentError otherwise."""
    if isinstance(epoch, bool) or not hasattr(epoch, "__index__"):
        raise InvalidArgumentError(f"epoch must be an int, not {type(epoch).__name__}")
    number = int(epoch.__index__())
    if not 0 <= number <= keys.MAX_EPOCH:
        raise InvalidArgumentError(f"epoch {number} is out of range: use 0 to 2**63 - 1")
    return number


def check_record_name(name: object) -> str:
    """A record name: path-like segments of ``[A-Za-z0-9_][A-Za-z0-9._-]*``, at most 255 characters."""
    if not isinstance(name, str):
        raise InvalidRecordError(f"a record name must be a str, not {type(name).__name__}")
    if not _is_record_name(name):
        raise InvalidRecordError(
            f"{name[:80]!r} is not a record name: use letters, digits, '_', '-', '.' and '/' between names"
        )
    return name


def _is_record_name(name: str) -> bool:
    # Names come back from the store too, and may end up in somebody's path.
    return len(name) <= 255 and ".." not in name and all(_NAME_SEGMENT.fullmatch(part) for part in name.split("/"))


def writer_version() -> str:
    """Name and version of this library, as manifests record it."""
    try:
        return f"ckptstore {_version()}"
    except (PackageNotFoundError, OSError, LookupError, TypeError):
        return "ckptstore"  # not installed; or its files cannot be read now, which is no reason to lose a checkpoint


@cache
def _version() -> str:
    return version("ckptstore")


def decode_marker(data: bytes) -> Marker:
    marker = decode_signed(data, Marker, keys.MARKER, MAX_MARKER)
    require(HEX32.fullmatch(marker.repository) is not None, keys.MARKER, "repository id")
    return marker


def decode_lease(data: bytes, key: str) -> Lease:
    lease = decode_signed(data, Lease, key, MAX_LEASE)
    require(keys.lease_key(lease.attempt) == key, key, "attempt id")
    return lease


def decode_claim(data: bytes, key: str) -> WriterClaim:
    claim = decode_signed(data, WriterClaim, key, MAX_CLAIM)
    expected = keys.writer_key(digest_of(claim.run.encode())[:32], claim.number)
    require(expected == key, key, "run or number")
    return claim


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest object. Raises InvalidRecordError if it would exceed its cap."""
    data = encode_signed(manifest)
    if len(data) > MAX_MANIFEST or not fits(data, MAX_OBJECTS + len(data)):
        raise InvalidRecordError(
            f"the manifest would be {len(data)} bytes with too many values: use fewer records or less metadata",
            epoch=manifest.epoch,
        )
    return data


def decode_manifest(data: bytes, key: str) -> Manifest:
    """A verified manifest.

    Raises:
        CorruptionError: damaged, cut, or not the manifest that belongs under ``key``.
        FormatError: written by a newer version.
    """
    manifest = decode_signed(data, Manifest, key, MAX_MANIFEST)
    require(manifest.key == key, key, "epoch and generation")
    require(all(HEX32.fullmatch(a) for a in (manifest.attempt, *manifest.attempts)), key, "attempt id")
    if manifest.origin is not None:
        require(all(HEX32.fullmatch(i) for i in (manifest.origin.repository, manifest.origin.attempt)), key, "origin")
    names = [entry.name for entry in manifest.records if _is_record_name(entry.name)]
    require(len(names) == len(manifest.records), key, "record name")
    require(0 < len(names) == len(set(names)) <= MAX_RECORDS, key, "record names")
    for entry in manifest.records:
        require(HEX64.fullmatch(entry.digest) is not None, key, "record digest")
        require(entry.attempt in manifest.attempts, key, "attempt of a record")
        require(0 < entry.raw_length <= MAX_INDEX and 0 < entry.stored_length <= MAX_INDEX, key, "record size")
    return manifest


def encode_signed(content: msgspec.Struct) -> bytes:
    """A JSON object with a digest of itself as its first member."""
    rest = msgspec.json.encode(content)[1:]
    return _PREFIX + digest_of(rest).encode() + b'",' + rest


_T = TypeVar("_T")


def decode_signed(data: bytes, kind: type[_T], key: str, cap: int) -> _T:
    """What ``encode_signed`` made. CorruptionError if it is damaged, FormatError if a newer version made it."""
    require(len(data) <= cap, key, f"size (more than {cap} bytes)")
    require(data[: len(_PREFIX)] == _PREFIX and data[_SIGNED_FROM - 2 : _SIGNED_FROM] == b'",', key, "beginning")
    claimed = data[len(_PREFIX) : _SIGNED_FROM - 2]
    require(digest_of(data[_SIGNED_FROM:]).encode() == claimed, key, "digest")
    check_version(data, key)
    require(fits(data, MAX_OBJECTS + len(data)), key, "structure (too many values)")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        corrupt(key, f"structure ({error})", error)


def check_version(data: bytes, key: str, newest: int = FORMAT) -> None:
    """FormatError if a newer version made it, before anything else of it is looked at."""
    try:
        version = msgspec.json.decode(data, type=_Version).format
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        corrupt(key, f"structure ({error})", error)
    if version > newest:
        raise FormatError(
            f"{key} has format {version}, this version of ckptstore reads up to {newest}: upgrade ckptstore", key=key
        )
    require(version >= FORMAT, key, "format number")


def require(condition: object, key: str, what: str) -> None:
    """CorruptionError that says what is wrong with an object, unless a condition holds."""
    if not condition:
        corrupt(key, what, None)


def corrupt(key: str, what: str, cause: Exception | None) -> NoReturn:
    """Raise CorruptionError."""
    raise CorruptionError(f"{key} is damaged: wrong {what}", key=key) from cause
