"""What a foreign format has no place for: the nesting, the plain values and the exact types of a record.

An exported file holds the arrays under plain names, for everybody; beside them lies a *description*, JSON that gives
the record's skeleton (``ckptstore/tree.py``) and, for each array of it, its name in the file and what it is::

    {"version": 1, "skeleton": {...}, "arrays": [["enc.w", "torch", "bfloat16", [4, 2]], ...]}

So what was exported reads back exactly, and whoever does not know ckptstore finds arrays under their paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ckptstore.arrays import ArraySpec
from ckptstore.errors import CkptStoreError, CorruptionError, FormatError
from ckptstore.jsonsize import fits
from ckptstore.manifest import MAX_ARRAYS, MAX_INDEX, MAX_OBJECTS, PER_ARRAY
from ckptstore.skeleton import leaf_paths, unflatten

VERSION = 1
NAME = "ckptstore"
ROOT = "value"  # the name of an array that is a whole record
_MAX_NAME = 1000


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    skeleton: Any
    arrays: tuple[tuple[str, str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Held:
    """One array of an exported record: its name in the file, and what it is."""

    name: str
    spec: ArraySpec


def describe(skeleton: Any, held: Iterable[Held]) -> bytes:
    """The description, as JSON in ASCII-compatible UTF-8."""
    arrays = tuple((one.name, one.spec.kind, one.spec.dtype, one.spec.shape) for one in held)
    return msgspec.json.encode(_Description(VERSION, skeleton, arrays))


def described(data: bytes, path: Path) -> tuple[Any, list[Held]]:
    """``(skeleton, arrays)`` of a description that was found in the file ``path``.

    Raises:
        CorruptionError: it is no description, or larger than any record could need.
        FormatError: of a newer version.
    """
    key = str(path)
    # As many arrays as it could have: each takes twenty bytes at least.
    allowed = MAX_OBJECTS + len(data) + PER_ARRAY * min(len(data) // 20, MAX_ARRAYS)
    if len(data) > 2 * MAX_INDEX or not fits(data, allowed):
        raise CorruptionError(f"{path} is damaged: its description has too many values", key=key)
    try:
        found = msgspec.json.decode(data, type=_Description)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise CorruptionError(
            f"{path} is damaged: its description by ckptstore is malformed ({error})", key=key
        ) from error
    if found.version != VERSION:
        raise FormatError(f"{path} was exported by a newer version of ckptstore: upgrade ckptstore", key=key)
    held = [Held(name, ArraySpec(kind, dtype, shape)) for name, kind, dtype, shape in found.arrays]
    if len({one.name for one in held}) != len(held):
        raise CorruptionError(f"{path} is damaged: two of its arrays have the same name", key=key)
    return found.skeleton, held


def rebuilt(skeleton: Any, held: Sequence[Held], value: Callable[[Held], Any], path: Path) -> Any:
    """The record that a description tells of; ``value`` gives each array."""
    try:
        return unflatten(skeleton, lambda number: value(held[number]), len(held))
    except CkptStoreError as error:
        if error.key is None:
            error.key = str(path)
            error.message = f"{path}: {error.message}"
        raise


def array_names(
    skeleton: Any, count: int, fit: Callable[[str], str] = str, reserved: Iterable[str] = (), *, fold: bool = False
) -> list[str]:
    """A name for each array of a record: its dotted path, changed only where the format or another name demands it.

    Args:
        fit: makes a path into a name that the format can hold.
        reserved: names that are taken.
        fold: names that differ in case only are the same (file systems).
    """
    paths = leaf_paths(skeleton)
    taken = {name.casefold() if fold else name for name in reserved}
    names = []
    for number in range(count):
        path = next(iter(paths.get(number, ())), f"array-{number}") or ROOT
        name = base = fit(path.encode("utf-8", "replace").decode()[:_MAX_NAME])
        again = 1
        while (name.casefold() if fold else name) in taken:
            again += 1
            name = f"{base}#{again}"
        taken.add(name.casefold() if fold else name)
        names.append(name)
    return names


def record_name(text: str) -> str:
    """A record name (``ckptstore.manifest.check_record_name``) that is as much like a file's name as can be."""
    name = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9._-]+", "_", text))[:200].lstrip(".-")
    return name or "record"
