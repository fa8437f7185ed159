"""Names of element types: what they are called in a checkpoint, how wide they are, what NumPy and torch call them.

==================================  ============================================================================
name                                meaning
==================================  ============================================================================
``float32``, ``int64``, ``bool``    little-endian NumPy type of that name, ``complex64`` and ``complex128`` included
``bfloat16``, ``float8_e4m3fn``     type of that name in ``ml_dtypes`` (and torch, where torch has it), little-endian;
                                    ``int4``, ``float4_e2m1fn`` and other narrow types take one byte an element
``>f4``, ``>i8``, ``>c16``          big-endian NumPy type
``<M8[ns]``, ``>m8[25s]``, ``<M8``  datetime and timedelta of either byte order, unit included
``<U10``, ``>U10``                  text of 10 code points (4 bytes each)
``|S5``, ``|V8``                    5 bytes of text, 8 bytes without meaning
==================================  ============================================================================

Names are looked up in tables or matched against one pattern: nothing read from a store is evaluated. ``longdouble``
has no name because its layout differs between machines, structured types have none because their records are better
kept as a dict.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from ckptstore.errors import FormatError

_PLAIN = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_CUSTOM = {
    "bfloat16": 2, "complex32": 4, "bcomplex32": 4, "float8_e3m4": 1, "float8_e4m3": 1, "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e5m3fnu": 1,
    "float8_e8m0fnu": 1, "float6_e2m3fn": 1, "float6_e3m2fn": 1, "float4_e2m1fn": 1,
    "int1": 1, "int2": 1, "int4": 1, "uint1": 1, "uint2": 1, "uint4": 1,
}  # fmt: skip
_SIZES = {**_PLAIN, **_CUSTOM}
_PLANES = {"complex32": 2, "bcomplex32": 2, "complex64": 4, "complex128": 8}

# Names that both libraries know but that mean different things would break exactness, so this list is explicit too.
_TORCH = frozenset(_PLAIN) | {
    "bfloat16", "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "int1", "int2", "int4", "uint1", "uint2", "uint4",
}  # fmt: skip

_NUMBER = r"(?:0|[1-9]\d{0,8})"
_UNIT = rf"(?:\[{_NUMBER}?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
_CODED = re.compile(
    rf">(?:i[248]|u[248]|f[248]|c8|c16)|[<>][Mm]8{_UNIT}|(?P<width>[<>]U{_NUMBER}|\|[SV]{_NUMBER})", re.ASCII
)


@lru_cache(maxsize=1024)
def dtype_size(name: str) -> int:
    """Bytes of one element. ``FormatError`` for a name that this version does not know."""
    size = _SIZES.get(name)
    return _coded_dtype(name).itemsize if size is None else size


@lru_cache(maxsize=1024)
def plane_size(name: str) -> int:
    """Width of the byte planes to split elements into: that of the real numbers inside, 1 for bytes."""
    size = dtype_size(name)
    if name in _PLANES:
        return _PLANES[name]
    if name[1] == "c":
        return size // 2
    if name[1] in "USV":
        return 4 if name[1] == "U" else 1
    return size if size in (1, 2, 4, 8) else 1


@lru_cache(maxsize=1024)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type of that name. ``FormatError`` if there is none in the installed ``ml_dtypes``."""
    if name in _PLAIN:
        native: np.dtype[Any] = np.dtype(name)
        return native if sys.byteorder == "little" else native.newbyteorder("<")
    if name not in _CUSTOM:
        return _coded_dtype(name)
    scalar = getattr(ml_dtypes, name, None)
    if scalar is None or not _host_order(_CUSTOM[name]):
        raise FormatError(f"element type {name} is not available here: a newer ml_dtypes (or torch) is needed")
    custom: np.dtype[Any] = np.dtype(scalar)
    return custom


@lru_cache(maxsize=1024)
def numpy_name(dtype: np.dtype[Any]) -> str | None:
    """The name of a NumPy type, or None if it cannot be stored exactly on every machine."""
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        return None
    plain = dtype.name
    if plain in _CUSTOM:
        known = dtype.type is getattr(ml_dtypes, plain, None) and _host_order(dtype.itemsize)
        return str(plain) if known else None
    big = dtype.str[0] == ">"
    if plain in _PLAIN and not big:
        return str(plain)
    known = _CODED.fullmatch(dtype.str) is not None and (dtype.kind != "V" or dtype.type is np.void)
    return str(dtype.str) if known else None


@lru_cache(maxsize=128)
def torch_name(dtype: Any) -> str | None:
    """The name of a torch type, or None if no other library could read it."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _TORCH and _host_order(_SIZES[name]) else None


def torch_dtype(torch: Any, name: str) -> Any:
    """The torch type of that name. ``FormatError`` if the installed torch has none."""
    found = getattr(torch, name, None) if name in _TORCH and _host_order(_SIZES[name]) else None
    if found is None:
        raise FormatError(f"element type {name} is not available in torch {torch.__version__}")
    return found


def same_values(first: str, second: str) -> bool:
    """Whether two types differ in nothing but byte order."""
    return first == second or _native(first) == _native(second)


def _native(name: str) -> str:
    if name in _SIZES:
        return name
    swapped = _coded_dtype(name).newbyteorder("<")
    return str(swapped.name if swapped.name in _PLAIN else swapped.str)


def _host_order(size: int) -> bool:
    # ml_dtypes and torch only know the byte order of the machine, and the format is little-endian.
    return size == 1 or sys.byteorder == "little"


@lru_cache(maxsize=1024)
def _coded_dtype(name: str) -> np.dtype[Any]:
    if _CODED.fullmatch(name) is not None:
        try:
            dtype = np.dtype(name)
        except (TypeError, ValueError):
            dtype = None
        # Only the spelling that numpy_name() writes: one type has one name.
        if dtype is not None and dtype.str == name:
            return dtype
    raise FormatError(f"unknown element type {str(name)[:80]!r}: written by a newer version, or damaged")
