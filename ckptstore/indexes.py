"""Record indexes as bytes: encoded within the bounds of every reader, and decoded with all of it cross-checked."""

from __future__ import annotations

import msgspec
import zstandard

from ckptstore.arrays import MAX_DIMENSIONS
from ckptstore.boxes import Effort, wrong_tiling
from ckptstore.dtypes import dtype_size
from ckptstore.errors import InvalidRecordError
from ckptstore.jsonsize import fits
from ckptstore.manifest import (
    HEX32,
    HEX64,
    MAX_ARRAYS,
    MAX_CHUNK_RAW,
    MAX_INDEX,
    MAX_OBJECTS,
    PER_ARRAY,
    PER_BOX,
    PER_CHUNK,
    SHARDED,
    RecordEntry,
    RecordIndex,
    check_version,
    corrupt,
    digest_of,
    require,
)


def encode_index(index: RecordIndex) -> tuple[str, int, bytes]:
    """``(digest, raw length, stored bytes)`` of a record index."""
    raw = msgspec.json.encode(index)
    stored = zstandard.ZstdCompressor(level=3).compress(raw)
    if len(raw) > MAX_INDEX:
        raise InvalidRecordError(
            f"record {index.name!r} needs an index of {len(raw)} bytes, more than {MAX_INDEX}: split the record"
        )
    if len(index.arrays) > MAX_ARRAYS:
        raise InvalidRecordError(f"record {index.name!r} has more than {MAX_ARRAYS} arrays: split the record")
    if not fits(raw, _allowance(len(raw), len(index.arrays), len(index.chunks), index.boxes)):
        raise InvalidRecordError(
            f"record {index.name!r} has too many plain values, more than a reader takes: put them into arrays"
        )
    return digest_of(raw), len(raw), stored


def decode_index(stored: bytes, entry: RecordEntry, *, part: bool = False) -> RecordIndex:
    """The verified index of the record that ``entry`` describes.

    Args:
        part: it is what one of several ranks wrote: sharded arrays need not be whole.
    """
    key = entry.key
    require(len(stored) == entry.stored_length, key, f"length ({len(stored)}, not {entry.stored_length})")
    raw = _decompress(stored, entry.raw_length, key)
    require(digest_of(raw) == entry.digest, key, "digest")
    check_version(raw, key, SHARDED)
    counts = (entry.arrays, entry.chunks, entry.boxes)
    require(min(counts) >= 0 and entry.arrays <= MAX_ARRAYS, key, "number of arrays, chunks or boxes")
    # None is described in fewer bytes: a manifest cannot buy memory by counting what is not there.
    least = 20 * entry.arrays + 100 * entry.chunks + 10 * entry.boxes
    require(least <= len(raw), key, "number of arrays, chunks or boxes")
    require(fits(raw, _allowance(len(raw), *counts)), key, "structure (too many values)")
    try:
        index = msgspec.json.decode(raw, type=RecordIndex)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        corrupt(key, f"structure ({error})", error)
    require(index.name == entry.name and index.kind == entry.kind, key, "record name")
    found = (len(index.arrays), len(index.chunks), index.boxes)
    require(found == counts, key, "number of arrays, chunks or boxes")
    _check_index(index, key)
    if index.boxes:
        _check_boxes(index, key, part)
    return index


def _allowance(raw_length: int, arrays: int, chunks: int, boxes: int) -> int:
    """What an index may become in memory (P8): a fixed part, and more only for what its manifest counts."""
    return MAX_OBJECTS + raw_length + PER_ARRAY * arrays + PER_CHUNK * chunks + PER_BOX * boxes


def _check_index(index: RecordIndex, key: str) -> None:
    for chunk in index.chunks:
        require(HEX32.fullmatch(chunk.attempt) and HEX64.fullmatch(chunk.digest), key, "chunk name")
        require(0 < chunk.raw_length <= MAX_CHUNK_RAW, key, "chunk size")
        # A frame is never longer than its header and the raw bytes.
        require(0 < chunk.stored_length <= chunk.raw_length + 64, key, "chunk size")
    if index.kind == "file":
        require([array.kind for array in index.arrays] == ["bytes"], key, "content for a file")
    for array in index.arrays:
        for span in array.spans:
            require(0 <= span.chunk < len(index.chunks), key, "chunk number")
            end = span.offset + span.length
            require(span.offset >= 0 and span.length > 0, key, "span")
            require(end <= index.chunks[span.chunk].raw_length, key, "span")


def _check_boxes(index: RecordIndex, key: str, part: bool) -> None:
    require(index.format >= SHARDED, key, "format number for boxes")
    effort = Effort(index.boxes)
    for array in index.arrays:
        if array.boxes:
            require(array.kind in ("numpy", "torch"), key, "kind of an array in boxes")
            require(len(array.shape) <= MAX_DIMENSIONS and min(array.shape, default=1) > 0, key, "shape")
            parts = [(box.offset, box.shape, box.spans) for box in array.boxes]
            lengths = [span.length for span in array.spans]
            item = dtype_size(array.dtype)
            try:
                reason = wrong_tiling(array.shape, item, parts, lengths, effort, part=part) if item else "no bytes"
            except InvalidRecordError as error:
                reason = error.message
            require(reason is None, key, f"boxes ({reason})")


def _decompress(stored: bytes, raw_length: int, key: str) -> bytes:
    """Exactly ``raw_length`` bytes, or CorruptionError. zstandard alone would return short data silently."""
    try:
        require(zstandard.get_frame_parameters(stored).content_size == raw_length, key, "index length")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_length, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        corrupt(key, f"compression ({error})", error)
