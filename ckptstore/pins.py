"""Pins: epochs that no prune takes, each for a reason that somebody gave.

A pin is an object beside the manifests, so that whoever prunes sees it in the listing that it makes anyway. Putting one
and pruning can happen at the same time, so both look twice: a pin is put, *then* its epoch is looked for; a prune reads
the pins again right before it deletes, and after (``marks.py``). A pin whose object is damaged still pins: only its
reason is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone

import msgspec

from ckptstore import keys
from ckptstore.catalog import Catalog
from ckptstore.errors import (
    CorruptionError,
    EpochNotFoundError,
    FormatError,
    InvalidArgumentError,
    ObjectNotFoundError,
)
from ckptstore.manifest import FORMAT, decode_signed, encode_signed
from ckptstore.stores.base import Store

MAX_PIN = 64 * 1024
MAX_REASON = 4096


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """One pinned epoch. ``created`` is information for people."""

    format: int = FORMAT
    epoch: int
    reason: str
    created: str


def check_reason(reason: object, what: str = "a pin", *, empty: bool = False) -> str:
    """Refuse a reason that is no text, or empty, or longer than a page."""
    if not isinstance(reason, str) or not (empty or reason.strip()) or len(reason) > MAX_REASON:
        raise InvalidArgumentError(
            f"the reason of {what} is a text of {'0' if empty else '1'} to {MAX_REASON} characters"
        )
    try:
        reason.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"the reason of {what} must be text that can be encoded") from None
    return reason


def put(catalog: Catalog, epoch: int, reason: str) -> None:
    """Pin an epoch, or give another reason for its pin.

    Raises:
        EpochNotFoundError: there is none; a pin that was put all the same is removed.
    """
    _require(catalog, epoch)
    pin = Pin(epoch=epoch, reason=reason, created=datetime.now(timezone.utc).isoformat(timespec="seconds"))
    catalog.store.put(keys.pin_key(epoch), encode_signed(pin))
    try:
        _require(catalog, epoch)  # a prune may have taken it before the pin was there
    except EpochNotFoundError:
        catalog.store.delete(keys.pin_key(epoch))
        raise


def remove(store: Store, epoch: int) -> bool:
    """Whether it was pinned; it is not any more."""
    try:
        store.info(keys.pin_key(epoch))
    except ObjectNotFoundError:
        return False
    store.delete(keys.pin_key(epoch))
    return True


def pinned(store: Store) -> dict[int, str]:
    """All pinned epochs, ascending, each with the reason. One listing and one small read a pin."""
    found: dict[int, str] = {}
    for info in store.list(keys.PINS):
        epoch = keys.parse_pin_key(info.key)
        if epoch is None:
            continue
        try:
            found[epoch] = decode_pin(store.get(info.key, 0, MAX_PIN + 1), info.key).reason
        except ObjectNotFoundError:
            continue
        except (CorruptionError, FormatError):
            found[epoch] = "(its reason cannot be read)"
    return dict(sorted(found.items()))


def share(source: Store, target: Catalog, same: Callable[[int], bool], *, dry_run: bool = False) -> dict[int, str]:
    """Pin in ``target`` what is pinned in ``source``. What is pinned there stays so, with its own reason.

    Args:
        same: whether an epoch of ``source`` is the one of that number in ``target``.
        dry_run: put nothing.

    Returns:
        The pins that were put (in a dry run: would be), each with its reason.
    """
    wanted = pinned(source)
    there = pinned(target.store) if wanted else {}
    shared: dict[int, str] = {}
    for epoch, reason in wanted.items():
        if epoch in there or not same(epoch):
            continue
        try:
            if not dry_run:
                put(target, epoch, reason)
        except EpochNotFoundError:  # deleted meanwhile
            continue
        shared[epoch] = reason
    return shared


def decode_pin(data: bytes, key: str) -> Pin:
    """A verified pin. CorruptionError if it is not the one that belongs under ``key``."""
    pin = decode_signed(data, Pin, key, MAX_PIN)
    if keys.pin_key(pin.epoch) != key:
        raise CorruptionError(f"{key} is damaged: it holds another epoch's pin", key=key)
    return pin


def _require(catalog: Catalog, epoch: int) -> None:
    if not catalog.committed(epoch):
        raise EpochNotFoundError(f"there is no epoch {epoch} in {catalog.store.traits.url}", epoch=epoch)
