"""As much CBOR as the header of a burnpack has: maps, lists, texts, numbers. Nothing in it is trusted."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 32
MAX_VALUES = 4_000_000  # each becomes an object: a hundred megabytes of them would be gigabytes
_SIMPLE = {20: False, 21: True, 22: None, 23: None}
_FLOATS = {25: ">e", 26: ">f", 27: ">d"}


def decode(data: bytes | memoryview) -> Any:
    """The value in ``data``. ValueError if it is none, nested too deeply, or of more values than any header has."""
    value, end = _value(memoryview(data), 0, 0, itertools.count())
    if end != len(data):
        raise ValueError("CBOR goes on after its end")
    return value


def _value(data: memoryview, at: int, depth: int, count: Iterator[int]) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise ValueError("CBOR is nested too deeply")
    if next(count) > MAX_VALUES:
        raise ValueError("CBOR of too many values")
    kind, info = _byte(data, at) >> 5, _byte(data, at) & 31
    if kind == 7:
        return _simple(data, at + 1, info)
    number, at = _number(data, at + 1, info)
    if kind == 0:
        return number, at
    if kind == 1:
        return -1 - number, at
    if kind in (2, 3):
        if number > len(data) - at:
            raise ValueError("CBOR ends in the middle")
        raw = bytes(data[at : at + number])
        return (raw if kind == 2 else raw.decode()), at + number
    if kind == 6:
        return _value(data, at, depth + 1, count)
    if number > len(data) - at:  # each element takes a byte at least
        raise ValueError("CBOR ends in the middle")
    items = []
    for _ in range(number * (2 if kind == 5 else 1)):
        item, at = _value(data, at, depth + 1, count)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind == 5 else items), at


def _byte(data: memoryview, at: int) -> int:
    if at >= len(data):
        raise ValueError("CBOR ends in the middle")
    return data[at]


def _number(data: memoryview, at: int, info: int) -> tuple[int, int]:
    if info < 24:
        return info, at
    width = {24: 1, 25: 2, 26: 4, 27: 8}.get(info)
    if width is None or at + width > len(data):
        raise ValueError("CBOR ends in the middle, or has no length")
    return int.from_bytes(data[at : at + width], "big"), at + width


def _simple(data: memoryview, at: int, info: int) -> tuple[Any, int]:
    if info in _FLOATS:
        width = struct.calcsize(_FLOATS[info])
        if at + width > len(data):
            raise ValueError("CBOR ends in the middle")
        return struct.unpack_from(_FLOATS[info], data, at)[0], at + width
    if info not in _SIMPLE:
        raise ValueError("CBOR with an unknown simple value")
    return _SIMPLE[info], at
