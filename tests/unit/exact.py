"""Helpers: a save and a load without a store, and equality that means the same bits and the same types."""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from typing import Any

import msgspec
import numpy as np

from ckptstore.arrays import ArraySource, Destination, source
from ckptstore.shards import FlatArray
from ckptstore.tree import flatten, unflatten


def read_all(array: FlatArray, step: int = 7) -> bytes:
    """All bytes of an array, read ``step`` elements at a time."""
    assert isinstance(array, ArraySource)
    width = step * array.align
    return b"".join(bytes(array.read(at, min(at + width, array.nbytes))) for at in range(0, array.nbytes, width))


def reload(array: FlatArray) -> Any:
    """The array as it comes back from a load into fresh memory."""
    destination = Destination.allocate(array.spec)
    assert destination.buffer.format == "B"
    assert destination.buffer.nbytes == array.nbytes
    destination.buffer[:] = read_all(array)
    return destination.finish()


def round_trip(state: object) -> Any:
    """A state after it went through the JSON text of its skeleton and the bytes of its arrays."""
    flat = flatten(state, "state")
    skeleton = msgspec.json.decode(msgspec.json.encode(flat.skeleton))
    assert same(skeleton, flat.skeleton)
    return unflatten(skeleton, lambda index: reload(flat.arrays[index]), len(flat.arrays))


def same(first: Any, second: Any) -> bool:
    """The same types, the same bits, the same order, all the way down."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        if isinstance(first, OrderedDict) and not same(vars(first), vars(second)):
            return False
        if isinstance(first, defaultdict) and first.default_factory is not second.default_factory:
            return False
        return same(list(first.items()), list(second.items()))
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, (set, frozenset)):
        return same(sorted(map(repr, first)), sorted(map(repr, second)))
    if isinstance(first, np.str_):
        return list(first) == list(second)
    if isinstance(first, np.generic):
        return bool(first.dtype == second.dtype and first.tobytes() == second.tobytes())
    if isinstance(first, float):
        return struct.pack("<d", first) == struct.pack("<d", second)
    if isinstance(first, complex):
        return same([first.real, first.imag], [second.real, second.imag])
    if isinstance(first, np.ndarray) or hasattr(first, "untyped_storage"):
        return same_array(first, second)
    return bool(first == second)


def same_array(first: object, second: object) -> bool:
    """The same kind, element type, shape and bits. Strides may differ."""
    one, two = source(first), source(second)
    return one.spec == two.spec and read_all(one) == read_all(two)
