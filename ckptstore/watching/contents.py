"""Whether a file is whole, by what it holds: formats that say how long they are, or prove it.

A trainer that was killed leaves a file that has stopped growing, and so does a full disk; some writers do not even
notice (an error in the last flush of a buffer that is dropped). Time alone tells nothing of that.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from ckptstore.files import FileSource
from ckptstore.formats.npz import ZippedFile
from ckptstore.jsonsize import fits
from ckptstore.watching.streams import BLOCK, Gunzip, Stream, TornError

MAX_HEADER = 100_000_000  # as the safetensors library allows
SMALL = 4096  # less than this is written at once, or not at all

_MEMORY = 1 << 30  # what a header may become
# Whatever is in a header that was not written by who it should be: infinite offsets, lists without end.
_BAD_HEADER = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

_GZIP, _ZIP, _BURNPACK, _NUMPY = b"\x1f\x8b", b"PK\x03\x04", b"NRUB", b"\x93NUMPY"
_MAGICS = (_GZIP, _ZIP, _BURNPACK, _NUMPY)


@dataclass(frozen=True, slots=True)
class Content:
    """What looking at a file has found.

    Attributes:
        state: "whole": proved by the format; "torn": certainly not whole; "unproven": the format does not say.
        size: bytes that it holds, out of gzip.
        why: of a torn one.
    """

    state: Literal["whole", "torn", "unproven"]
    size: int
    why: str = ""


def examine(source: FileSource) -> Content:
    """Look at an open file. Reads it from front to back, or only its ends where its format allows that."""
    name, nbytes = source.path.name.lower(), source.nbytes
    if nbytes == 0:
        return Content("torn", 0, "it is empty")
    try:
        magic = bytes(Stream(source).peek(8))
        if any(len(magic) < len(known) and known.startswith(magic) for known in _MAGICS):
            raise TornError("it ends in its first bytes")
        if name.endswith(".gz") or magic.startswith(_GZIP):
            return _gunzip(source, name)
        check = _check_of(name, magic)
        if check is None or not check(source):
            return Content("unproven", nbytes)
        return Content("whole", nbytes)
    except TornError as error:
        return Content("torn", nbytes, str(error))


def shards(source: FileSource) -> frozenset[str]:
    """The files that a Hugging Face index (``*.index.json``) names; none if it is none."""
    if source.nbytes > MAX_HEADER:
        return frozenset()
    try:
        table = _header_of(source.read(0, source.nbytes)).get("weight_map")
    except _BAD_HEADER:
        return frozenset()
    return frozenset(map(str, table.values())) if isinstance(table, dict) else frozenset()


def _check_of(name: str, magic: bytes) -> Callable[[FileSource], bool] | None:
    """The check for a file: it raises TornError, or says whether the file is proved to be whole."""
    by_magic = {_ZIP: _zip, _BURNPACK: _burnpack, _NUMPY: _numpy}
    by_name = {
        ".safetensors": _safetensors,
        ".json": lambda source: _json(Stream(source)),
        ".mpk": lambda source: _msgpack(Stream(source)),
        ".msgpack": lambda source: _msgpack(Stream(source)),
        ".bpk": _burnpack,
    }
    for start, check in by_magic.items():
        if magic.startswith(start):
            return check
    return next((check for end, check in by_name.items() if name.endswith(end)), None)


def _gunzip(source: FileSource, name: str) -> Content:
    # The checksum alone does not do: an encoder that is dropped after an error ends its stream properly.
    stream = Gunzip(source)
    stem = name.removesuffix(".gz")
    if stem.endswith((".mpk", ".msgpack")):
        proved = _msgpack(stream)
    elif stem.endswith(".json"):
        proved = _json(stream)
    else:
        proved = False
    size = stream.drain()
    if size == 0:
        raise TornError("it holds nothing")
    return Content("whole" if proved else "unproven", size)


def _zip(source: FileSource) -> bool:
    """The table at the end is there, and what it lists lies before it."""
    with ZippedFile(os.dup(source.fileno())) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                archive.infolist()
        except Exception as error:  # of a garbled table it may stumble over anything
            raise TornError(f"its table of contents is not there ({error})") from error
    return True


def _safetensors(source: FileSource) -> bool:
    stream = Stream(source)
    (length,) = struct.unpack("<Q", stream.take(8))
    if length > MAX_HEADER:
        raise TornError("its header is too long to be one")
    try:
        header = _header_of(stream.take(length))
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except _BAD_HEADER as error:
        raise TornError("its header is damaged") from error
    _expect(source, {8 + length + end})
    return True


def _burnpack(source: FileSource) -> bool:
    stream = Stream(source)
    magic, length = struct.unpack("<4s2xI", stream.take(10))
    if magic != _BURNPACK or length > MAX_HEADER:
        raise TornError("it does not begin like a burnpack")
    from ckptstore.watching.cbor import decode  # not needed by most

    try:
        tensors = decode(stream.take(length))["tensors"]
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except _BAD_HEADER as error:
        raise TornError("its header is damaged") from error
    begin = 10 + length
    _expect(source, {begin + end, -(-begin // 256) * 256 + end})  # older versions do not align
    return True


def _numpy(source: FileSource) -> bool:
    head = io.BytesIO(Stream(source).peek(64 * 1024))
    try:
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        version = np.lib.format.read_magic(head)
        if version not in read:
            return False
        shape, _, dtype = read[version](head)
    except Exception as error:  # NumPy parses Python, which raises whatever it likes
        raise TornError("its header is damaged") from error
    if dtype.hasobject:
        return False
    size = int(dtype.itemsize)
    for length in shape:
        size *= length
    _expect(source, {head.tell() + size})
    return True


def _header_of(data: memoryview) -> dict[str, Any]:
    """A header in JSON. One of ``_BAD_HEADER`` if it is none, or would take more memory than any."""
    raw = bytes(data)
    if not fits(raw, _MEMORY):
        raise ValueError("it has too many values")
    return msgspec.json.decode(raw, type=dict[str, Any])


def _expect(source: FileSource, sizes: set[int]) -> None:
    if source.nbytes not in sizes:
        raise TornError(f"it has {source.nbytes} bytes, and its header says {max(sizes)}")


# ---- msgpack ---------------------------------------------------------------------------------------------------

_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # with the type of the extension
_BYTES = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_BYTES |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
_NESTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_RUN = 64  # from so many values on it is worth looking for a row of numbers of one kind


def _msgpack(stream: Stream) -> bool:
    """One value, complete, and nothing after it. Only sizes are read: nothing is built."""
    pending = 1  # values that have to come; a row of a million takes no more memory than one
    while pending:
        code = stream.take(1)[0]
        pending -= 1
        if code in _FIXED:
            stream.skip(_FIXED[code])
            if pending >= _RUN:
                pending -= _pass_row(stream, code, pending)
        elif code in _BYTES:
            width, more = _BYTES[code]
            stream.skip(int.from_bytes(stream.take(width), "big") + more)
        elif code in _NESTED:
            width, times = _NESTED[code]
            pending += times * int.from_bytes(stream.take(width), "big")
        elif 0xA0 <= code <= 0xBF:
            stream.skip(code & 0x1F)
        elif 0x80 <= code <= 0x9F:
            pending += (code & 0x0F) * (2 if code < 0x90 else 1)
        elif code == 0xC1:
            raise TornError("it is no msgpack")
    if len(stream.peek(1)):
        raise TornError("it goes on after its end")
    return True


def _pass_row(stream: Stream, code: int, pending: int) -> int:
    """Pass over values of the same width that follow each other; how many they were."""
    width, passed = 1 + _FIXED[code], 0
    while passed < pending:
        row = np.frombuffer(stream.peek(min(pending - passed, BLOCK // width) * width), np.uint8)
        row = row[: len(row) // width * width].reshape(-1, width)[:, 0] == code
        same = len(row) if row.all() else int(row.argmin())
        stream.skip(same * width)
        passed += same
        if same == 0 or same < len(row):
            break
    return passed


# ---- JSON ------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(rb'["\[\]{}]')
_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


def _json(stream: Stream) -> bool:
    """One value, complete, and nothing but space after it. Of a bare number nobody can say whether it goes on."""
    text = bytes(stream.peek(SMALL)).lstrip()
    if not text:
        raise TornError("it holds nothing")
    if text[:1] not in b"[{":
        return text.rstrip() in (b"null", b"true", b"false")
    depth, in_string, held = 0, False, b""
    while block := held + bytes(stream.take(len(stream.peek(BLOCK)))):
        last = not len(stream.peek(1))
        at, held = 0, b""
        while at < len(block):
            if in_string:
                found = _STRING.match(block, at)
                at = found.end() if found is not None else at
                if at == len(block) or block[at] == ord("\\"):  # goes on in the next block, perhaps amid an escape
                    held, at = block[at:], len(block)
                    break
                in_string, at = False, at + 1
                continue
            token = _TOKEN.search(block, at)
            if depth == 0 and block[at : token.start() if token else None].strip():
                raise TornError("it goes on after its end")
            if token is None:
                break
            at = token.end()
            in_string = token[0] == b'"'
            depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
            if depth == 0 and (in_string or block[at:].strip()):
                raise TornError("it goes on after its end")
        if last:
            break
    if depth != 0 or in_string or held:
        raise TornError("it ends in the middle")
    return True
