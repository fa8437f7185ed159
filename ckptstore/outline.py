"""Outline: the arrays, plain values and containers of a skeleton by path, so that two of them can be compared."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptstore.errors import CkptStoreError
from ckptstore.skeleton import PAIRS, ROWS, array_index, decode_leaf, join, key_text, pairs, rows, split


@dataclass(frozen=True, slots=True)
class Value:
    """A plain value: ``identity`` is equal for equal values only, with types and bits; ``text`` is for people."""

    path: str
    identity: str
    text: str


@dataclass(frozen=True, slots=True)
class Outline:
    """What a skeleton holds. The keys tell places apart where paths do not, such as the keys 1 and "1"."""

    arrays: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Path, and number of the array."""
    values: dict[str, Value] = field(default_factory=dict)
    containers: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Path, and type."""


def outline(skeleton: Any) -> Outline:
    """Walk a skeleton. FormatError if it is none."""
    found = Outline()

    def walk(node: Any, place: str, path: str, depth: int) -> None:
        tag, body = split(node, depth)
        if tag == "array":
            found.arrays[place] = path, array_index(body, None)
        elif tag in PAIRS or tag in ROWS:
            children = pairs(tag, body) if tag in PAIRS else list(enumerate(rows(body)))
            found.containers[place] = path, f"defaultdict({body[0]})" if tag == "defaultdict" else tag
            if not children:
                found.values[place] = Value(path, "empty", f"an empty {tag}")
            for key, child in children:
                text = key_text(key)
                walk(child, f"{place}/{type(key).__name__} {len(text)} {text}", join(path, key), depth + 1)
            if tag == "odict" and "metadata" in node:
                walk(node["metadata"], f"{place}/_metadata", join(path, "_metadata"), depth + 1)
        else:
            found.values[place] = Value(path, _identity(tag, body), _text(tag, body))

    walk(skeleton, "", "", 0)
    return found


def _identity(tag: str, body: Any) -> str:
    if tag in ("set", "frozenset"):
        return f"{tag} {sorted(msgspec.json.encode(item) for item in rows(body))}"
    return f"{tag} {msgspec.json.encode(body).decode()}"


def _text(tag: str, body: Any) -> str:
    try:
        return reprlib.repr(decode_leaf(tag, body))
    except (CkptStoreError, ValueError):  # it needs a library that is not here, or is longer than Python prints
        return reprlib.repr({tag: body})
