"""Flat state dicts, as torch.distributed.checkpoint keeps them, as records: where each leaf goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ckptstore.errors import InvalidRecordError
from ckptstore.manifest import check_record_name

REST = "state_dict"
"""The record of what is no dict at the top of the state dict."""
MAX_RECORDS = 64
"""With more dicts at the top than that, all of them go into one record: the state of an optimizer has thousands."""

Path = tuple[Any, ...]
"""Keys of dicts; an int is a position in a list, because DCP makes texts of all keys."""
Place = tuple[str, Path]
"""A record, and a path in it."""


class Node(dict[Any, Any]):
    """A container on the way to leaves, which may be dicts themselves."""


def places_of(paths: Mapping[str, Path]) -> dict[str, Place]:
    """Record and path of each leaf of a state dict."""
    split = len({path[0] for path in paths.values() if len(path) > 1}) <= MAX_RECORDS
    return {name: place_of(path, split) for name, path in paths.items()}


def place_of(path: Path, split: bool = True) -> Place:
    """Record and path of a leaf; ``split`` whether dicts at the top are records."""
    if split and len(path) > 1 and path[0] != REST:
        with suppress(InvalidRecordError):
            return check_record_name(path[0]), path[1:]
    return REST, path


def nested(leaves: Iterable[tuple[Place, Any]]) -> dict[str, Any]:
    """Leaves as trees by record; each is a ``Node`` with the positions of a list as keys, too.

    InvalidRecordError if two lie at one place, or one below another: DCP tells keys apart by their texts only.
    """
    trees: dict[str, Any] = {}
    for (name, path), leaf in leaves:
        node, key = trees, name
        for step in path:
            node = node.setdefault(key, Node())
            if not isinstance(node, Node):
                raise _same_text((name, *path))
            key = step
        if key in node:
            raise _same_text((name, *path))
        node[key] = leaf
    return trees


def is_list(node: Node, path: Path) -> bool:
    """Whether a node is a list, for DCP's own paths. InvalidRecordError if it is a list and a dict."""
    positions = sum(type(key) is int for key in node)
    if 0 < positions < len(node):
        raise _same_text(path)
    return positions > 0


def tree_of(leaves: Iterable[tuple[Place, Any]]) -> dict[str, Any]:
    """Leaves as dicts and lists by record. A position of a list that has nothing is an empty dict."""
    return {name: _whole(node, (name,)) for name, node in nested(leaves).items()}


def _whole(node: Any, path: Path) -> Any:
    if not isinstance(node, Node):
        return node
    made = {key: _whole(child, (*path, key)) for key, child in node.items()}
    return [made.get(position, {}) for position in range(max(made) + 1)] if is_list(node, path) else made


def _same_text(path: Path) -> InvalidRecordError:
    where = ".".join(map(str, path))
    return InvalidRecordError(
        f"{where[:200]}: two things are there. DCP makes texts of keys, so that 1 and '1' are the same: rename one"
    )
