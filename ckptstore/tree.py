"""Nested Python state to a JSON skeleton plus arrays, and back, exactly.

The skeleton
============

A skeleton is JSON. What JSON has itself stands for itself; everything else is an object with exactly one tag:

======================================================  ================================================================
node                                                    value
======================================================  ================================================================
``null`` ``true`` ``false``                             ``None``, ``True``, ``False``
``"text"``                                              ``str`` of Unicode scalar values
``7``                                                   ``int`` from -(2**53-1) to 2**53-1; no ``.``, no ``e``
``7.0``                                                 finite ``float``, with ``.`` or ``e``; -0.0 keeps its sign
``[node, ...]``                                         ``list``
``{"surrogates": base64}``                              ``str`` with lone surrogates; UTF-8 that lets surrogates pass
``{"int": "-0x1f..."}``                                 any other ``int``, in hexadecimal, lower case
``{"float": "7ff8000000000000"}``                       infinite or NaN ``float``: IEEE 754 bits, highest first
``{"complex": [bits, bits]}``                           ``complex``: bits of the real and the imaginary part
``{"bytes": base64}`` ``{"bytearray": base64}``         up to 1024 bytes; longer ones are arrays
``{"scalar": [element type, base64]}``                  NumPy scalar, little-endian; ``str_`` as UTF-32
``{"size": [int, ...]}``                                ``torch.Size``; ``tuple`` where torch is not imported
``{"array": index}``                                    array (sharded ones too), or long ``bytes``; tied arrays share
                                                        an index
``{"tuple": [node, ...]}``                              ``tuple``
``{"set": [key, ...]}`` ``{"frozenset": [key, ...]}``   in an order that depends on the members only
``{"dict": [[key, node], ...]}``                        ``dict``, in its order
``{"odict": [[key, node], ...], "metadata": node}``     ``OrderedDict``; ``metadata`` if it has a ``_metadata``
``{"defaultdict": [factory, [[key, node], ...]]}``      int, float, str, bool, list, dict, set, tuple or None
``{"counter": [[key, node], ...]}``                     ``Counter``
``{"items": [[position, node], ...]}``                  some items of a ``list``; only in what one rank gives the others
======================================================  ================================================================

A key is the node of a ``str``, ``int``, ``float``, ``bool``, ``None``, ``bytes`` (of any length), NumPy scalar other
than ``void``, or a tuple of those (at most 16 levels). Containers nest at most 200 levels.

Nothing else is stored: ``flatten`` refuses a state with one error that names the offending paths, unless an installed
package makes such data of the whole state (``foreign``), as the adapter for JAX does. Types come back
exactly, except that containers that appear twice come back as two, and names that NumPy has for the same type
(``longlong``) become one. Arrays that are the same memory come back as one array.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from typing import Any, cast

import numpy as np

from ckptstore import foreign, garbage
from ckptstore.arrays import ArraySource, is_array, source, torch_module
from ckptstore.errors import CkptStoreError, InvalidRecordError
from ckptstore.files import FileSource
from ckptstore.inplace import fill_into, match_into, mismatches
from ckptstore.shards import FlatArray, ListPart, ShardedArray, sharded_source
from ckptstore.skeleton import (
    ATOMS,
    FACTORIES,
    MAX_DEPTH,
    MAX_INLINE,
    NOTHING,
    encode_bytes,
    encode_key,
    encode_scalar,
    key_text,
    leaf_paths,
    prune,
    unflatten,
)

__all__ = [
    "NOTHING",
    "FlatState",
    "fill_into",
    "flatten",
    "leaf_paths",
    "match_into",
    "mismatches",
    "prune",
    "unflatten",
]

MAX_LISTED = 20

# Where a value is: the way to its container and its key there. Spelled out only when something is refused.
_Path = tuple[Any, object]


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart: JSON that refers to arrays by index, and the arrays."""

    skeleton: Any
    arrays: list[FlatArray]
    is_file: bool = False
    """Whether it is a file: its one array is the bytes of that, and the skeleton says its name and size."""
    _seen: list[tuple[Any, Any]] = field(default_factory=list)
    """What can be changed from outside, and what was in it."""
    part: bool = False
    """Whether it is one rank's part of a state."""

    def unchanged(self) -> bool:
        """Whether all containers still hold the very same objects, and all arrays have the same form."""
        with garbage.paused():
            return all(_same(live, seen) for live, seen in self._seen) and all(
                array.unchanged() for array in self.arrays
            )


def flatten(state: object, root: str, *, part: bool = False, convert: bool = True) -> FlatState:
    """Take a state apart without copying any array. ``root`` is the name of the record, for error messages.

    An open file (``FileSource``) becomes a record of its bytes.

    ``InvalidRecordError`` lists the paths of all values that cannot be stored exactly (the first 20 of them). With
    ``part`` the state is one rank's: the pieces of its sharded arrays need not make whole arrays. Without ``convert``
    nothing is stored but what stands above, whoever else would know it.
    """
    if isinstance(state, FileSource):
        file = {"file": state.name, "size": state.nbytes}
        return FlatState(file, [cast(ArraySource, state)], is_file=True, part=part)
    found = _take_apart(state, root, part)
    point = foreign.point_for(found.foreign) if found.foreign else None
    if point is None:
        return found.flat()
    if not convert:
        found.notes.append(f"{root} takes plain values: store the .item() of an array, or put it into a record")
        return found.flat()
    try:
        function = foreign.load(point)
    except Exception as error:  # noqa: BLE001 (a framework that is broken or too old may raise anything)
        found.notes.append(f"{point.value} knows the {point.name} in it, but cannot be imported: {error!r}")
        return found.flat()
    # Nobody else has what it makes, so that cannot change meanwhile; what it was made from can, and it tells.
    found.seen += foreign.containers(found.foreign)
    converted = _take_apart(function({root: state})[root], root, part)
    converted.seen += found.seen
    return converted.flat()


def _take_apart(state: object, root: str, part: bool) -> _Flattener:
    flattener = _Flattener(part)
    with garbage.paused():
        flattener.skeleton = flattener.node(state, (None, root))
    return flattener


class _Flattener:
    def __init__(self, part: bool) -> None:
        self._part = part
        self.skeleton: object = None
        self.arrays: list[FlatArray] = []
        self.refused: list[tuple[_Path, str]] = []
        self.foreign: list[object] = []  # what was refused because of its type
        self.notes: list[str] = []  # to be told with the refusals
        self.seen: list[tuple[Any, Any]] = []
        self._indexes: dict[tuple[object, ...], int] = {}
        self._active: set[int] = set()
        self._containers: dict[type, Callable[[Any, _Path], object]] = {
            dict: lambda value, path: {"dict": self._pairs(value, path)},
            list: self._list,
            tuple: lambda value, path: {"tuple": [self.node(item, (path, i)) for i, item in enumerate(value)]},
            OrderedDict: self._ordered,
            defaultdict: self._defaultdict,
            Counter: self._counter,
            ListPart: self._list_part,
        }
        self._leaves: dict[type, Callable[[Any, _Path], object]] = {
            np.ndarray: self._array,
            ShardedArray: self._array,
            bytes: self._bytes,
            bytearray: self._bytes,
            set: self._set,
            frozenset: self._set,
        }
        torch = torch_module()
        if torch is not None:
            self._leaves[torch.Tensor] = self._array
            self._leaves[torch.Size] = lambda value, path: {"size": [int(size) for size in value]}

    def flat(self) -> FlatState:
        """What was found; InvalidRecordError if something was refused."""
        if not self.refused:
            return FlatState(self.skeleton, self.arrays, _seen=self.seen, part=self._part)
        lines = [f"{_path_text(path)}: {reason}" for path, reason in self.refused[:MAX_LISTED]]
        if len(self.refused) > MAX_LISTED:
            lines.append(f"... and {len(self.refused) - MAX_LISTED} more")
        lines += self.notes
        raise InvalidRecordError("the state holds what cannot be stored exactly:\n  " + "\n  ".join(lines))

    def node(self, value: object, path: _Path) -> object:
        kind = type(value)
        atom = ATOMS.get(kind)
        if atom is not None:
            return atom(value)
        leaf = self._leaves.get(kind)
        if leaf is not None:
            return leaf(value, path)
        container = self._containers.get(kind)
        if container is None:
            return self._other(value, path)
        if id(value) in self._active:
            return self._refuse(path, "it contains itself")
        if len(self._active) >= MAX_DEPTH:
            return self._refuse(path, f"nested deeper than {MAX_DEPTH} levels")
        self._active.add(id(value))
        try:
            return container(value, path)
        finally:
            self._active.discard(id(value))

    def _refuse(self, path: _Path, reason: str) -> object:
        self.refused.append((path, reason))
        return None

    def _list(self, value: list[Any], path: _Path) -> list[object]:
        items = list(value)
        self.seen.append((value, items))
        return [self.node(item, (path, i)) for i, item in enumerate(items)]

    def _list_part(self, value: ListPart, path: _Path) -> object:
        if not self._part:
            return self._refuse(path, "part of a list, outside of a save of several ranks: save the whole list")
        items = list(value.items.items())
        self.seen.append((value.items, items))
        return {"items": [[position, self.node(item, (path, position))] for position, item in items]}

    def _pairs(self, value: dict[Any, Any], path: _Path) -> list[object]:
        items = list(value.items())
        self.seen.append((value, items))
        found: list[object] = [[self._key(key, path), self.node(item, (path, key))] for key, item in items]
        if len(value) != len(items):
            self._refuse(path, "changed while it was read: save a copy, or pause whatever changes it")
        return found

    def _key(self, key: object, path: _Path) -> object:
        try:
            return encode_key(key)
        except InvalidRecordError as error:
            return self._refuse((path, key), str(error))

    def _ordered(self, value: OrderedDict[Any, Any], path: _Path) -> object:
        self._attributes(value, path, {"_metadata"})
        node: dict[str, object] = {"odict": self._pairs(value, path)}
        self.seen.append((vars(value), list(vars(value).items())))
        if "_metadata" in vars(value):
            node["metadata"] = self.node(vars(value)["_metadata"], (path, "_metadata"))
        return node

    def _counter(self, value: Counter[Any], path: _Path) -> object:
        self._attributes(value, path, set())
        return {"counter": self._pairs(value, path)}

    def _attributes(self, value: object, path: _Path, known: set[str]) -> None:
        extra = sorted(vars(value).keys() - known)
        if extra:
            self._refuse(path, f"attributes of a dictionary would be lost: {', '.join(extra[:5])}")

    def _defaultdict(self, value: defaultdict[Any, Any], path: _Path) -> object:
        wanted = value.default_factory
        factory = next((name for name, made in FACTORIES.items() if made is wanted), None)
        if factory is None:
            self._refuse(path, f"a defaultdict whose factory is {wanted!r} needs code: convert it to a dict")
        return {"defaultdict": [factory, self._pairs(value, path)]}

    def _set(self, value: set[Any] | frozenset[Any], path: _Path) -> object:
        self.seen.append((value, frozenset(value)))
        # Order of iteration depends on the process, the text of the nodes does not.
        return {type(value).__name__: sorted([self._key(item, path) for item in value], key=repr)}

    def _bytes(self, value: bytes | bytearray, path: _Path) -> object:
        if len(value) > MAX_INLINE:
            return self._array(value, path)
        self.seen.append((value, bytes(value)))
        return {type(value).__name__: encode_bytes(value)["bytes"]}

    def _array(self, value: object, path: _Path) -> object:
        found: FlatArray
        try:
            found = sharded_source(value, part=self._part) if isinstance(value, ShardedArray) else source(value)
        except CkptStoreError as error:
            return self._refuse(path, str(error))
        index = self._indexes.setdefault(found.identity, len(self.arrays))
        if index == len(self.arrays):
            self.arrays.append(found)
        return {"array": index}

    def _other(self, value: object, path: _Path) -> object:
        if is_array(value):
            return self._array(value, path)
        if isinstance(value, np.generic):
            try:
                return encode_scalar(value)
            except InvalidRecordError as error:
                return self._refuse(path, str(error))
        self.foreign.append(value)
        return self._refuse(path, _refusal(value))


def _same(live: Any, seen: Any) -> bool:
    if type(seen) is not list:
        return bool(live == seen)
    if len(live) != len(seen):
        return False
    if type(live) is list:
        return all(map(operator.is_, live, seen))
    return all(k is key and v is value for (k, v), (key, value) in zip(list(live.items()), seen, strict=False))


def _refusal(value: object) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if isinstance(value, Enum):
        return f"the enumeration {name} needs code: store its .value"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"the named tuple {name} needs code: store its ._asdict()"
    if is_dataclass(value):
        return f"the dataclass {name} needs code: store dataclasses.asdict() of it"
    for base in (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex):
        if isinstance(value, base):
            return f"{name} is a subclass of {base.__name__}: convert it to {base.__name__}"
    if kind.__module__.split(".")[0] in ("jax", "jaxlib"):
        return f"{name} belongs to JAX: only what ckptstore.adapters.jax.to_state() can convert of it is stored"
    if hasattr(value, "__code__") or hasattr(value, "__func__"):
        return f"a {name} is code, and only data is stored"
    if callable(getattr(kind, "state_dict", None)):
        return f"objects of type {name} cannot be stored: store its .state_dict()"
    return f"objects of type {name} cannot be stored"


def _path_text(path: _Path) -> str:
    parts: list[str] = []
    step: Any = path
    while step is not None:
        parts.append(key_text(step[1]))
        step = step[0]
    return ".".join(part for part in reversed(parts) if part or len(parts) == 1)
