"""Comparing the elements of two arrays: which are equal bit for bit, and how far apart the others are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptstore.dtypes import dtype_size, numpy_dtype
from ckptstore.errors import FormatError

_BLOCK = 1 << 20  # elements looked at at a time: what is computed of them takes a few times 8 bytes each


@dataclass(frozen=True, slots=True)
class Difference:
    """How two rows of elements differ.

    ``changed``: elements that are not the same bits (so NaN equals the same NaN, and 0.0 is not -0.0). ``largest``: the
    largest absolute difference of those that are numbers, None without any; exact for integers. ``incomparable``:
    changed ones where one is NaN.
    """

    changed: int = 0
    largest: float | None = None
    incomparable: int = 0

    def __add__(self, other: Difference) -> Difference:
        known = [value for value in (self.largest, other.largest) if value is not None]
        return Difference(
            self.changed + other.changed, max(known, default=None), self.incomparable + other.incomparable
        )


def compare(dtype: str, first: memoryview, second: memoryview) -> Difference:
    """Compare two buffers of equally many elements of a type.

    Raises:
        FormatError: there is no such type.
    """
    size = dtype_size(dtype) or 1
    found = Difference()
    for start in range(0, len(first), _BLOCK * size):
        a, b = (np.frombuffer(part[start : start + _BLOCK * size], np.uint8) for part in (first, second))
        if not np.array_equal(a, b):
            found += _compare(dtype, size, a, b)
    return found


def _compare(dtype: str, size: int, a: Any, b: Any) -> Difference:
    if len(a) % size:  # the end of a span that does not end with an element: only bits can be told
        return Difference(changed=1)
    word = {1: np.uint8, 2: np.uint16, 4: np.uint32}.get(size, np.uint64 if size % 8 == 0 else np.uint8)
    differs = a.view(word) != b.view(word)
    if np.dtype(word).itemsize != size:
        differs = differs.reshape(len(a) // size, -1).any(axis=1)
    where = np.flatnonzero(differs)
    try:
        kind = numpy_dtype(dtype)
    except FormatError:  # known, but not to what is installed here
        return Difference(changed=len(where))
    distance, incomparable = _distance(dtype, a.view(kind)[where], b.view(kind)[where])
    return Difference(len(where), distance, incomparable)


def _distance(dtype: str, a: Any, b: Any) -> tuple[float | None, int]:
    """The largest absolute difference, and how many have none."""
    kind = a.dtype.kind
    if kind in "iu" and a.dtype.itemsize == 8:
        a, b = a.astype(a.dtype.newbyteorder("=")), b.astype(b.dtype.newbyteorder("="))
        return int(
            np.where(a > b, a.view(np.uint64) - b.view(np.uint64), b.view(np.uint64) - a.view(np.uint64)).max()
        ), 0
    is_complex = kind == "c" or dtype in ("complex32", "bcomplex32")
    # NumPy takes the narrow types of others for "V", as it does plain bytes.
    if not is_complex and kind not in "biuf" and not dtype.startswith(("bfloat", "float", "int", "uint")):
        return None, 0
    wide: Any = np.complex128 if is_complex else np.float64
    with np.errstate(all="ignore"):
        distances = np.abs(a.astype(wide) - b.astype(wide))
    known = distances[~np.isnan(distances)]
    if not len(known):
        return None, len(distances)
    largest = float(known.max())
    return (int(largest) if kind in "biu" else largest), len(distances) - len(known)
