"""How the files of a foreign checkpoint lie in their folder, so that an export can put all of them back.

A checkpoint that is more than one file (a Trainer's folder), or one file of several records (Lightning's), is read as
records and one more, ``files``::

    {"ckptstore": {"version": 1, "layout": "huggingface", "records": {"model": {"kind": "safetensors", ...}, ...}},
     "files": {"trainer_state.json": array of bytes, ...}}

``records`` tells for each record what it was; ``files`` holds what is no tree of arrays, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from ckptstore.errors import FormatError

FILES = "files"
VERSION = 1
_KEY = "ckptstore"
_KINDS = ("safetensors", "safetensors-sharded", "torch", "torch-sharded", "lightning")


def layout_record(layout: str, records: Mapping[str, Any], files: Mapping[str, Any]) -> dict[str, Any]:
    """The record ``files``."""
    return {_KEY: {"version": VERSION, "layout": layout, "records": dict(records)}, "files": dict(files)}


def is_layout(value: Any) -> bool:
    """Whether a record looks like a record ``files``."""
    return type(value) is dict and value.keys() == {_KEY, "files"} and type(value[_KEY]) is dict


def layout_of(value: Any) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """``(records, files)`` of a record ``files``, checked: it comes from a store. FormatError if it is malformed."""
    try:
        facts, files = value[_KEY], value["files"]
        if facts["version"] > VERSION:
            raise FormatError("the record 'files' was written by a newer version of ckptstore: upgrade ckptstore")
        records = {str(name): dict(entry) for name, entry in facts["records"].items()}
        if not all(map(_is_entry, records.values())):
            raise ValueError("an entry lacks what its kind has")
        names = [*files, *(name for entry in records.values() for name in places(entry))]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"the record 'files' is malformed ({error}): export the other records alone") from error
    if not all(map(is_inside, names)):
        raise FormatError("the record 'files' names files outside of its folder: export the other records alone")
    return records, files


def _is_entry(entry: Mapping[str, Any]) -> bool:
    """Whether the facts of a record are of the types that its kind has."""
    kind = entry["kind"]
    if kind not in _KINDS:
        return False
    if kind.endswith("-sharded"):
        good = _are(str, entry["weight_map"].values())
    else:
        good = type(entry["file"]) is str and "weight_map" not in entry
    if kind == "lightning":
        good = good and type(entry["keys"]) is list and _are(str, entry["keys"])
    if kind == "safetensors":
        good = good and type(entry["metadata"]) is dict
    elif kind == "safetensors-sharded":
        good = good and _are(dict, entry["metadata"].values())
    return good


def _are(kind: type, values: Iterable[Any]) -> bool:
    return all(type(value) is kind for value in values)


def places(entry: Mapping[str, Any]) -> list[str]:
    """The files that a record goes into."""
    if "weight_map" in entry:
        return list(dict.fromkeys(entry["weight_map"].values()))
    return [entry["file"]]


def is_inside(name: Any) -> bool:
    """Whether a relative path stays in its folder, on every system."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name or ":" in name.split("/")[0][:2]:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and str(path) == name and name != "."
