"""Lightning's checkpoint: one dict, as records of ours, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.errors import FormatError
from ckptstore.formats.layout import FILES, layout_of, layout_record

RECORDS = {"state_dict": "model", "optimizer_states": "optimizer", "lr_schedulers": "lr_scheduler"}
"""Keys of Lightning's dict that are records of their own."""
REST = "trainer"
"""The record of all other keys."""
_MARK = "pytorch-lightning_version"


def is_lightning(whole: object) -> bool:
    """Whether a state is what Lightning's Trainer saves."""
    return isinstance(whole, dict) and _MARK in whole and "state_dict" in whole


def split(whole: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The records of a checkpoint, and one that says how to put them together, under the name of its file."""
    records = {name: whole[key] for key, name in RECORDS.items() if key in whole}
    records[REST] = {key: value for key, value in whole.items() if key not in RECORDS}
    entry = {"kind": "lightning", "file": file, "keys": list(whole)}
    return {**records, FILES: layout_record("lightning", {REST: entry}, {})}


def join(records: Mapping[str, Any]) -> dict[str, Any]:
    """The dict that was split, its keys in their order.

    Raises:
        FormatError: these are no records of such a checkpoint.
    """
    if FILES not in records or type(records.get(REST)) is not dict:
        raise FormatError(f"records {sorted(records)} are no checkpoint of Lightning's")
    entry = layout_of(records[FILES])[0].get(REST, {})
    whole = {**records[REST], **{key: records[name] for key, name in RECORDS.items() if name in records}}
    return {key: whole[key] for key in (*(key for key in entry.get("keys", ()) if key in whole), *whole)}
