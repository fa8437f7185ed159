"""Loading into an existing state: first compare all of it, then fill it.

Nothing is written while anything does not fit, so a refused load leaves the target as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ckptstore.arrays import ArraySpec, is_array, mismatch, source, torch_module
from ckptstore.errors import InvalidRecordError
from ckptstore.shards import ShardedArray, misfit
from ckptstore.skeleton import NOTHING, PAIRS, ROWS, array_index, decode_leaf, join, pairs, rows, split, unflatten

MAX_LISTED = 1000


def match_into(
    skeleton: object,
    specs: Sequence[ArraySpec],
    target: object,
    root: str,
    *,
    strict: bool = True,
    partial: bool = False,
    skipped: list[str] | None = None,
) -> dict[int, list[object]]:
    """The existing arrays that each array of a checkpoint is to be loaded into; none where a value is replaced.

    ``InvalidRecordError`` lists every path that only one side has, and every one where kind, shape or element type
    differ. With ``strict=False`` what only one side has is left out and listed in ``skipped`` instead. ``partial`` says
    that the skeleton was pruned: then the target may have more, but not less.
    """
    matcher = _Matcher(specs, strict, partial)
    matcher.walk(skeleton, target, root, 0)
    refuse(matcher.problems)
    if skipped is not None:
        skipped.extend(matcher.skipped)
    return matcher.found


def mismatches(
    skeleton: object, specs: Sequence[ArraySpec], target: object, root: str, *, strict: bool = True
) -> list[str]:
    """What ``match_into`` would refuse: a line for each path."""
    matcher = _Matcher(specs, strict, partial=False)
    matcher.walk(skeleton, target, root, 0)
    return matcher.problems


def refuse(problems: Sequence[str]) -> None:
    """InvalidRecordError that lists what does not fit, if anything."""
    if problems:
        lines = [*problems[:MAX_LISTED]]
        if len(problems) > MAX_LISTED:
            lines.append(f"... and {len(problems) - MAX_LISTED} more")
        raise InvalidRecordError("the checkpoint does not fit into this state:\n  " + "\n  ".join(lines))


class _Matcher:
    def __init__(self, specs: Sequence[ArraySpec], strict: bool, partial: bool) -> None:
        self.specs = specs
        self.partial = partial
        self.problems: list[str] = []
        self.skipped: list[str] = []
        self.one_sided = self.problems if strict else self.skipped
        self.found: dict[int, list[object]] = {}
        self.taken: dict[tuple[object, ...], tuple[int, str]] = {}

    def walk(self, node: Any, target: Any, path: str, depth: int) -> None:
        tag, body = split(node, depth)
        if node is NOTHING or target is NOTHING:
            return
        if tag == "array":
            self._array(array_index(body, len(self.specs)), target, path)
        elif tag in PAIRS:
            self._pairs(tag, node, target, path, depth)
        elif tag in ROWS:
            self._rows(tag, rows(body), target, path, depth)
        else:
            decode_leaf(tag, body)
            self._plain(f"a {'plain value' if tag == 'value' else tag}", target, path)

    def _pairs(self, tag: str, node: Any, target: Any, path: str, depth: int) -> None:
        entries = dict(pairs(tag, node[tag]))
        if "metadata" in node:
            unflatten(node["metadata"], lambda index: self.found.setdefault(index, []), len(self.specs))
        if not isinstance(target, dict):
            self._differ("a dictionary", target, path)
            return
        for key, child in entries.items():
            if key in target:
                self.walk(child, target[key], join(path, key), depth + 1)
            else:
                self._only_stored(join(path, key))
        for key in target:
            if key not in entries:
                self._only_here(join(path, key))

    def _rows(self, tag: str, children: list[Any], target: Any, path: str, depth: int) -> None:
        if type(target) is not tuple if tag == "tuple" else not isinstance(target, list):
            self._differ(f"a {tag}", target, path)
            return
        for position, (child, item) in enumerate(zip(children, target, strict=False)):
            self.walk(child, item, join(path, position), depth + 1)
        for position in range(len(target), len(children)):
            self._only_stored(join(path, position))
        for position in range(len(children), len(target)):
            self._only_here(join(path, position))

    def _array(self, index: int, target: object, path: str) -> None:
        spec = self.specs[index]
        found = self.found.setdefault(index, [])
        if spec.kind in ("bytes", "bytearray"):
            self._plain(spec.kind, target, path)
            return
        if not _is_leaf(target):
            self._differ(f"an array ({spec.dtype} {list(spec.shape)})", target, path)
            return
        sharded = isinstance(target, ShardedArray)
        reason = misfit(spec, target) if isinstance(target, ShardedArray) else mismatch(spec, target)
        if reason is not None:
            self.problems.append(f"{path}: {reason}")
            return
        identity = ("object", id(target)) if sharded else source(target).identity
        owner, first = self.taken.setdefault(identity, (index, path))
        if owner != index:
            self.problems.append(f"{path}: the same memory as {first} here, but two arrays in the checkpoint")
        elif first == path:
            found.append(target)

    def _plain(self, stored: str, target: object, path: str) -> None:
        size = getattr(torch_module(), "Size", None)
        container = isinstance(target, (dict, list)) or (isinstance(target, tuple) and type(target) is not size)
        if _is_leaf(target) or (container and not (stored == "a size" and type(target) is tuple)):
            self._differ(stored, target, path)

    def _differ(self, stored: str, target: object, path: str) -> None:
        self.problems.append(f"{path}: {stored} in the checkpoint, {type(target).__name__} here")

    def _only_stored(self, path: str) -> None:
        self.one_sided.append(f"{path}: only in the checkpoint, missing here")

    def _only_here(self, path: str) -> None:
        if not self.partial:
            self.one_sided.append(f"{path}: unexpected here, not in the checkpoint")


def fill_into(skeleton: object, target: object, make: Callable[[int], object], count: int | None = None) -> object:
    """Bring a state that ``match_into`` accepted to what the checkpoint holds, once its arrays are loaded.

    Dictionaries and lists are changed in place and arrays stay (they are filled already); plain values are replaced,
    tuples rebuilt. Returns the target, or what takes its place. ``make(i)`` gives arrays that have no counterpart in
    the target.
    """
    make_once = cache(make)

    def fill(node: Any, old: Any, depth: int) -> Any:
        tag, body = split(node, depth)
        if node is NOTHING or old is NOTHING:
            return old
        if tag in PAIRS and isinstance(old, dict):
            for key, child in pairs(tag, body):
                if key in old:
                    _replace(old, key, fill(child, old[key], depth + 1))
            if "metadata" in node and isinstance(old, OrderedDict):
                old._metadata = unflatten(node["metadata"], make_once, count)  # type: ignore[attr-defined]
            return old
        if tag in ROWS and isinstance(old, (list, tuple)):
            items = [fill(child, item, depth + 1) for child, item in zip(rows(body), old, strict=False)]
            return _refill(old, items)
        if tag == "array" and _is_leaf(old):
            return old
        return unflatten(node, make_once, count)

    return fill(skeleton, target, 0)


def _is_leaf(value: object) -> bool:
    return is_array(value) or isinstance(value, ShardedArray)


def _replace(container: Any, key: Any, value: object) -> None:
    if container[key] is not value:
        container[key] = value


def _refill(old: list[Any] | tuple[Any, ...], items: list[Any]) -> object:
    if isinstance(old, list):
        for position, item in enumerate(items):
            _replace(old, position, item)
        return old
    same = all(new is item for new, item in zip(items, old, strict=False))
    return old if same else (*items, *old[len(items) :])
