"""Quarantine: epochs that are set aside. ``latest()`` passes them by, no save builds on them, no prune takes them.

The mark is an object beside the manifest that it is about, so that every listing that shows the one shows the other. It
is about that checkpoint and not about its number: a replacement is not set aside, nor is what is saved under the number
after a delete. A mark whose bytes are damaged still counts: only its reason is lost.
"""

from __future__ import annotations

from datetime import datetime, timezone

import msgspec

from ckptstore import keys
from ckptstore.errors import CorruptionError, FormatError, ObjectNotFoundError
from ckptstore.manifest import FORMAT, decode_signed, encode_signed
from ckptstore.stores.base import Store

MAX_MARK = 64 * 1024
UNKNOWN = "(its reason cannot be read)"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint that is set aside. ``attempt`` is that of its manifest, empty where that could not be read."""

    format: int = FORMAT
    epoch: int
    generation: int
    attempt: str
    reason: str
    created: str


def put(store: Store, epoch: int, generation: int, attempt: str, reason: str) -> None:
    """Set a checkpoint aside, or give another reason for it."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    mark = Mark(epoch=epoch, generation=generation, attempt=attempt, reason=reason, created=created)
    store.put(keys.quarantine_key(epoch, generation), encode_signed(mark))


def remove(store: Store, epoch: int, below: int = keys.MAX_GENERATION + 1) -> bool:
    """Take the marks of an epoch away (of its generations below ``below``). Whether there were any."""
    found = False
    for info in list(store.list(keys.quarantine_prefix(epoch))):
        parsed = keys.parse_quarantine_key(info.key)
        if parsed is not None and parsed[1] < below:
            store.delete(info.key)
            found = True
    return found


def reason_of(store: Store, epoch: int, generation: int, attempt: str) -> str | None:
    """Why a checkpoint is set aside; None if it is not. One small read."""
    key = keys.quarantine_key(epoch, generation)
    try:
        mark = decode_mark(store.get(key, 0, MAX_MARK + 1), key)
    except ObjectNotFoundError:
        return None
    except (CorruptionError, FormatError):
        return UNKNOWN
    other = mark.attempt and attempt and mark.attempt != attempt  # what had this key before
    return None if other else mark.reason


def decode_mark(data: bytes, key: str) -> Mark:
    """A verified mark. CorruptionError if it is not the one that belongs under ``key``."""
    mark = decode_signed(data, Mark, key, MAX_MARK)
    if keys.quarantine_key(mark.epoch, mark.generation) != key:
        raise CorruptionError(f"{key} is damaged: it is about another epoch", key=key)
    return mark
