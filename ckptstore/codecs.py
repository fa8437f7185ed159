"""Frames: how one chunk looks as a stored object.

Trained floats hardly shrink as they are: the exponents repeat, but the noise of the mantissas lies between them.
So the bytes are split into planes (all first bytes of the elements, all second bytes, ...), and each plane is kept
raw or entropy-coded, as a sample of it suggests. Little-endian, in this order::

    header   magic "CKPF", version u8, codec u8 (0 raw, 1 planes), item size u8, 0 u8,
             raw length u64, stored length u64 (of all that follows the header),
             CRC-32 u32 of the 24 bytes before, 0 u32
    codec 0  the bytes
    codec 1  for each plane: method u8 (0 raw, 1 one zstd frame), stored length u64
             the planes, one after the other
             the last ``raw length % item size`` bytes, raw

The 32 header bytes keep their meaning in all versions: that tells a newer version from a flipped bit. There is one
valid form only (no longer than the raw bytes, nothing left over, no empty room), because every freedom of a format is
a place for damage to hide. The payload has no checksum of its own: the caller holds the digest of the raw bytes.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zstandard

from ckptstore.errors import CorruptionError, FormatError, InvalidArgumentError
from ckptstore.planes import BLOCK, Plane, merge, split

MAX_RAW = 256 * 1024 * 1024
HEADER_SIZE = 32
VERSION = 1
ITEM_SIZES = (1, 2, 4, 8)
MODES = ("auto", "raw", "max")

_MAGIC = b"CKPF"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_FIELDS = struct.Struct("<4sBBBBQQ")
_SEAL = struct.Struct("<II")
_ENTRY = struct.Struct("<BQ")

_RAW, _PLANES = 0, 1
_KEEP, _ZSTD = 0, 1

_SAMPLE_WINDOWS = 8
# Below this gain a plane is not worth the time that it takes to decode it.
_WORTHWHILE = 0.99

Bytes = bytes | bytearray | memoryview
_Coders = tuple[zstandard.ZstdCompressor, ...]


@dataclass(frozen=True, slots=True)
class _Header:
    codec: int
    item_size: int
    raw_length: int
    stored_length: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, VERSION, self.codec, self.item_size, 0, self.raw_length, self.stored_length)
        return fields + _SEAL.pack(zlib.crc32(fields), 0)


class _Tools(threading.local):
    """What a thread needs to code chunks. zstd contexts must not be shared; making them anew is slow."""

    def __init__(self) -> None:
        # An almost pure entropy coder: matches of 7 bytes in a tiny table are hardly ever found in noise, so no
        # time is lost on them and the literals stay together. Levels below 1 would not code literals at all.
        entropy = zstandard.ZstdCompressionParameters(
            compression_level=1, strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7
        )
        self.entropy = zstandard.ZstdCompressor(compression_params=entropy)
        self.matches = zstandard.ZstdCompressor(level=1)
        self.thorough = zstandard.ZstdCompressor(level=9)
        self.decompressor = zstandard.ZstdDecompressor()


_tools = _Tools()


def room_for(nbytes: int) -> int:
    """Bytes of room that ``encode_into`` needs for ``nbytes`` raw ones."""
    return HEADER_SIZE + max(ITEM_SIZES) * _ENTRY.size + nbytes


def encode(data: Bytes, item_size: int, mode: str = "auto") -> bytes:
    """One complete frame of ``data``, ready to be put; equal data gives equal frames.

    Args:
        data: the raw bytes of one chunk.
        item_size: width of an element (1, 2, 4 or 8), or 0 to find it out from a sample. The planes get that width,
            unless a sample shrinks better unsplit.
        mode: ``"auto"`` chooses for each plane what pays, ``"raw"`` never compresses, ``"max"`` spends several
            times as long on the planes that shrink.

    Raises:
        InvalidArgumentError: more than ``MAX_RAW`` bytes, an unknown mode or item size.
    """
    nbytes = memoryview(data).nbytes
    return bytes(encode_into(data, item_size, mode, np.empty(room_for(min(nbytes, MAX_RAW)), np.uint8).data))


def encode_into(
    data: Bytes, item_size: int, mode: str, room: memoryview, seen: Callable[[memoryview], object] | None = None
) -> memoryview:
    """As ``encode``, but into ``room``, and sound even if others change ``data`` meanwhile.

    Each byte of ``data`` is read once, into memory of our own; what is coded and what ``seen`` is shown (block by
    block, in order, while it is in the cache) are the same bytes.

    Args:
        room: writable, at least ``room_for(len(data))`` bytes. The frame lies in it when this returns.
    """
    raw = np.frombuffer(data, np.uint8)
    if raw.size > MAX_RAW:
        raise InvalidArgumentError(f"a chunk of {raw.size} bytes is larger than {MAX_RAW}: cut it")
    if item_size not in (0, *ITEM_SIZES):
        raise InvalidArgumentError(f"item size {item_size!r} is none of 0, 1, 2, 4, 8")
    if mode not in MODES:
        raise InvalidArgumentError(f"compression mode {mode!r} is none of {', '.join(MODES)}")
    space = np.frombuffer(room, np.uint8)
    if mode != "raw":
        item_size, coders = _plan(raw, item_size, mode)
        if any(coders):
            return _encode_planes(raw, item_size, coders, space, seen)
    body = space[HEADER_SIZE : HEADER_SIZE + raw.size]
    for start in range(0, raw.size, BLOCK):
        block = body[start : start + BLOCK]
        np.copyto(block, raw[start : start + BLOCK])
        if seen is not None:
            seen(block.data)
    return _sealed(space, _RAW, item_size or 1, raw.size, raw.size)


def decode(
    frame: Bytes,
    out: memoryview | None,
    raw_length: int,
    key: str,
    seen: Callable[[memoryview], object] | None = None,
    room: memoryview | None = None,
) -> memoryview:
    """The raw bytes of ``frame``, written into ``out``. Without one: where they lie in the frame, else in ``room``.

    Everything but the value of the bytes is checked: the caller compares their digest before using them. After an
    error the content of ``out`` is undefined.

    Args:
        out: writable and contiguous, of exactly ``raw_length`` bytes.
        raw_length: what the index says; never trusted from the frame alone.
        key: names the object in errors.
        seen: shown the bytes, block by block and in order, while they are in the cache.
        room: at least ``raw_length`` writable bytes; without it, fresh memory is taken.

    Raises:
        CorruptionError: the frame is damaged, cut, extended, or one of other data.
        FormatError: it was written by a newer version.
        InvalidArgumentError: ``out`` does not fit.
    """
    if out is not None and (out.readonly or not out.c_contiguous or out.nbytes != raw_length):
        raise InvalidArgumentError(
            f"{key}: the buffer to decode into is not a writable one of {raw_length} bytes", key=key
        )
    view = memoryview(frame).cast("B")
    header = _parse_header(view, key)
    _require(header.raw_length == raw_length, key, f"it holds {header.raw_length} bytes instead of {raw_length}")
    body = view[HEADER_SIZE:]
    _require(
        len(body) == header.stored_length, key, f"{len(body)} bytes follow the header instead of {header.stored_length}"
    )
    if header.codec == _RAW and out is None:
        if seen is not None:
            seen(body)
        return body
    if out is None:
        out = np.empty(raw_length, np.uint8).data if room is None else room[:raw_length]
    target = np.frombuffer(out, np.uint8)
    if header.codec == _RAW:
        merge([np.frombuffer(body, np.uint8)], target, seen)
    else:
        _decode_planes(body, target, header.item_size, key, seen)
    return out


def raw_length_of(frame_header: Bytes, key: str) -> int:
    """How many raw bytes a frame holds, from its first ``HEADER_SIZE`` bytes (more are ignored).

    Raises:
        CorruptionError: this is not the header of a frame.
        FormatError: it was written by a newer version.
    """
    return _parse_header(memoryview(frame_header).cast("B"), key).raw_length


# --- encoding ---------------------------------------------------------------------------------------------------


def _encode_planes(
    raw: Plane, item_size: int, coders: list[_Coders], space: Plane, seen: Callable[[memoryview], object] | None
) -> memoryview:
    """The frame with planes; the plain one where that would not be smaller."""
    length = raw.size // item_size
    base = HEADER_SIZE + item_size * _ENTRY.size
    planes = [space[base + i * length : base + (i + 1) * length] for i in range(item_size)]
    own = np.empty(min(BLOCK, raw.size), np.uint8)
    for start in range(0, length * item_size, BLOCK):
        block = own[: min(BLOCK, length * item_size - start)]
        np.copyto(block, raw[start : start + block.size])
        if seen is not None:
            seen(block.data)
        at = start // item_size
        split(block, [plane[at : at + block.size // item_size] for plane in planes])
    tail = raw[length * item_size :].copy()
    if seen is not None:
        seen(tail.data)
    packed = [_shortest(plane, candidates) for plane, candidates in zip(planes, coders, strict=True)]
    sizes = [plane.size if part is None else len(part) for plane, part in zip(planes, packed, strict=True)]
    stored = base - HEADER_SIZE + sum(sizes) + tail.size
    if stored < raw.size:
        _fill(space, base, planes, packed, tail)
        return _sealed(space, _PLANES, item_size, raw.size, stored)
    plain = np.empty(length * item_size, np.uint8)
    merge(planes, plain)  # not from the data: that may have changed by now
    np.copyto(space[HEADER_SIZE : HEADER_SIZE + plain.size], plain)
    np.copyto(space[HEADER_SIZE + plain.size : HEADER_SIZE + raw.size], tail)
    return _sealed(space, _RAW, item_size, raw.size, raw.size)


def _shortest(plane: Plane, candidates: _Coders) -> bytes | None:
    """The shortest coded form of a plane, or None where none is shorter than the plane."""
    packed = min((coder.compress(plane.data) for coder in candidates), key=len, default=None)
    return None if packed is None or len(packed) >= plane.size else packed


def _fill(space: Plane, at: int, planes: list[Plane], packed: list[bytes | None], tail: Plane) -> None:
    """The body of a frame: close the gaps between its planes, and fill in their table."""
    table = bytearray()
    gap = False
    for plane, part in zip(planes, packed, strict=True):
        content = plane if part is None else np.frombuffer(part, np.uint8)
        if gap or part is not None:  # else it is where it belongs already
            np.copyto(space[at : at + content.size], content)
        gap = gap or part is not None
        at += content.size
        table += _ENTRY.pack(_KEEP if part is None else _ZSTD, content.size)
    np.copyto(space[at : at + tail.size], tail)
    np.copyto(space[HEADER_SIZE : HEADER_SIZE + len(table)], np.frombuffer(table, np.uint8))


def _sealed(space: Plane, codec: int, item_size: int, raw_length: int, stored: int) -> memoryview:
    """The frame in ``space`` with its header."""
    view = space.data
    view[:HEADER_SIZE] = _Header(codec, item_size, raw_length, stored).pack()
    return view[: HEADER_SIZE + stored]


def _plan(raw: Plane, item_size: int, mode: str) -> tuple[int, list[_Coders]]:
    """The item size, and for each plane the coders to try on it (none: keep it raw)."""
    sample = _sample(raw)
    best: tuple[float, int, list[_Coders]] | None = None
    # Width 1 always runs: few distinct values (sparse, rounded) repeat as whole elements, not plane by plane.
    for size in dict.fromkeys((item_size, 1)) if item_size else ITEM_SIZES:
        choices = [_choose(np.ascontiguousarray(sample[i::size])) for i in range(size)]
        total = sum(estimate for estimate, _ in choices)
        if best is None or total < best[0]:
            best = (total, size, [coders for _, coders in choices])
    assert best is not None
    _, size, plan = best
    if mode == "max":
        every = (_tools.entropy, _tools.matches, _tools.thorough)
        plan = [every if coders else () for coders in plan]
    return size, plan


def _choose(sample: Plane) -> tuple[float, _Coders]:
    """The size a sample of a plane shrinks to, and with what."""
    entropy, matches = (len(coder.compress(sample.data)) for coder in (_tools.entropy, _tools.matches))
    if min(entropy, matches) >= sample.size * _WORTHWHILE:
        return sample.size, ()
    # A search for matches takes twice the time: only where there is something to find.
    if matches < entropy * _WORTHWHILE:
        return matches, (_tools.matches,)
    return entropy, (_tools.entropy,)


def _sample(raw: Plane) -> Plane:
    """Windows spread over the data, always at the same places, aligned for each item size."""
    width = min(8 * 1024, max(4096, raw.size // 512 // 8 * 8))
    if raw.size <= _SAMPLE_WINDOWS * width:
        return raw
    step = (raw.size - width) / (_SAMPLE_WINDOWS - 1)
    starts = [int(i * step) // 8 * 8 for i in range(_SAMPLE_WINDOWS)]
    return np.concatenate([raw[start : start + width] for start in starts])


# --- decoding ---------------------------------------------------------------------------------------------------


def _parse_header(frame: memoryview, key: str) -> _Header:
    _require(len(frame) >= HEADER_SIZE, key, f"{len(frame)} bytes are too short for a header")
    magic, version, codec, item_size, zero, raw_length, stored_length = _FIELDS.unpack_from(frame)
    crc, zero_too = _SEAL.unpack_from(frame, _FIELDS.size)
    _require(magic == _MAGIC, key, "it is not a frame")
    _require(crc == zlib.crc32(frame[: _FIELDS.size]), key, "its header is damaged")
    if version > VERSION:
        raise FormatError(
            f"{key}: frame version {version} is newer than {VERSION}, the newest this ckptstore reads: upgrade it",
            key=key,
        )
    _require(version == VERSION and zero == 0 and zero_too == 0, key, "its header makes no sense")
    _require(codec in (_RAW, _PLANES) and item_size in ITEM_SIZES, key, "its header names an unknown codec")
    _require(raw_length <= MAX_RAW, key, f"it claims {raw_length} bytes, more than any chunk has")
    fits = stored_length == raw_length if codec == _RAW else stored_length < raw_length
    _require(fits, key, f"it claims to hold {raw_length} bytes in {stored_length}")
    return _Header(codec, item_size, raw_length, stored_length)


def _decode_planes(
    body: memoryview, target: Plane, item_size: int, key: str, seen: Callable[[memoryview], object] | None
) -> None:
    length = target.size // item_size
    tail = target[length * item_size :]
    at = item_size * _ENTRY.size
    _require(len(body) >= at, key, "its plane table is cut")
    table = list(_ENTRY.iter_unpack(body[:at]))
    # Python's integers do not overflow, so no stored length can wrap this sum round to a plausible one.
    _require(at + sum(stored for _, stored in table) + tail.size == len(body), key, "its planes do not fill it")
    planes = []
    for i, (method, stored) in enumerate(table):
        plane = body[at : at + stored]
        at += stored
        if method == _KEEP:
            _require(stored == length, key, f"plane {i} has {stored} bytes instead of {length}")
        else:
            _require(method == _ZSTD and stored < length, key, f"plane {i} makes no sense")
            plane = _decompress(plane, length, i, key)
        planes.append(np.frombuffer(plane, np.uint8))
    merge(planes, target[: length * item_size], seen)
    np.copyto(tail, np.frombuffer(body[at:], np.uint8))
    if seen is not None:
        seen(tail.data)


def _decompress(plane: memoryview, length: int, i: int, key: str) -> memoryview:
    """Exactly ``length`` bytes out of exactly one zstd frame.

    zstd allocates what a frame claims, and its Python binding is content with short data and with frames that it
    never looked at. Hence the checks before and after.
    """
    _require(plane[:4] == _ZSTD_MAGIC, key, f"plane {i} is not a zstd frame")
    try:
        claim = zstandard.get_frame_parameters(plane).content_size
        _require(claim == length, key, f"plane {i} does not claim to hold {length} bytes")
        data = _tools.decompressor.decompress(plane, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"{key}: frame is damaged: plane {i}: {error}", key=key) from error
    _require(len(data) == length, key, f"plane {i} has {len(data)} bytes instead of {length}")
    return memoryview(data)


def _require(holds: bool, key: str, what: str) -> None:
    if not holds:
        raise CorruptionError(f"{key}: frame is damaged: {what}", key=key)
