"""What was read and checked last, and when: a small record in the repository, for checks that go on where they stopped.

Chunks are named by digests, so in the order of their digests they are in no order at all, and a stretch of that order
is a fair part of everything. The record says of each stretch when all of it was last read. It stays small, however many
chunks there are. What was put since is younger than its put, and was hashed for that: it counts as checked then.

Nothing depends on the record: one that is torn, damaged, of another place or from the future is forgotten, and what it
said is checked again. Several checks at once add up: each stretch has the time of the latest.
"""

from __future__ import annotations

import math

import msgspec

from ckptstore import keys
from ckptstore.errors import CorruptionError, FormatError, ObjectNotFoundError
from ckptstore.manifest import FORMAT, decode_signed, digest_of, encode_signed
from ckptstore.stores.base import Store

MAX_RECORD = 1024 * 1024
MAX_STRETCHES = 1000
MAX_PROBLEMS = 1000
END = "g"  # above every digest

Stretches = tuple["Stretch", ...]


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Digests from where the one before ends up to ``upto`` (not with it), all of them checked at ``at`` or later.

    ``at`` is a time of the store; 0: never.
    """

    upto: str
    at: float


class Found(msgspec.Struct, frozen=True, array_like=True):
    """An object that was found damaged: it is looked at again by every check."""

    key: str
    reason: str


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The record. ``place`` tells a copy of the repository from it; ``round`` is when the open verification began."""

    format: int = FORMAT
    place: str
    stretches: Stretches = (Stretch(END, 0.0),)
    problems: tuple[Found, ...] = ()
    round: float = 0.0


def mark(stretches: Stretches, start: str, stop: str, at: float) -> Stretches:
    """The same, but that all from ``start`` up to ``stop`` was checked at ``at``."""
    if start >= stop:
        return stretches
    lower = tuple(Stretch(min(s.upto, start), s.at) for s in stretches if _starts(stretches, s) < start)
    upper = tuple(s for s in stretches if s.upto > stop)
    return _tidy((*lower, Stretch(stop, at), *upper))


def oldest(stretches: Stretches) -> tuple[str, str, float]:
    """Beginning, end and time of the stretch that was checked longest ago, the first of several."""
    found = min(stretches, key=lambda stretch: stretch.at)
    return _starts(stretches, found), found.upto, found.at


def merged(one: Stretches, two: Stretches) -> Stretches:
    """Of each stretch the later time."""
    bounds = sorted({stretch.upto for stretch in (*one, *two)})
    return _tidy(tuple(Stretch(upto, max(_at(one, upto), _at(two, upto))) for upto in bounds))


def load(store: Store, now: float) -> Checked:
    """The record of this place; an empty one if there is none that can be believed. ``now``: the store's time."""
    empty = Checked(place=_place(store))
    try:
        found = decode_checked(store.get(keys.CHECKED, 0, MAX_RECORD + 1))
    except (ObjectNotFoundError, CorruptionError, FormatError):
        return empty
    if found.place != empty.place:
        return empty
    believed = tuple(Stretch(s.upto, s.at if s.at <= now else 0.0) for s in found.stretches)
    started = found.round if found.round <= now else 0.0
    return msgspec.structs.replace(found, stretches=_tidy(believed), round=started)


def save(store: Store, record: Checked) -> None:
    """Put it in place of the one before. StoreError: that one, or none, is there."""
    problems = record.problems[:MAX_PROBLEMS]
    store.put(keys.CHECKED, encode_signed(msgspec.structs.replace(record, problems=problems)))


def decode_checked(data: bytes) -> Checked:
    """A verified record. CorruptionError if it is damaged or makes no sense."""
    record = decode_signed(data, Checked, keys.CHECKED, MAX_RECORD)
    bounds = [stretch.upto for stretch in record.stretches]
    times = [record.round, *(stretch.at for stretch in record.stretches)]
    if not bounds or bounds[-1] != END or bounds != sorted(set(bounds)):
        raise CorruptionError(f"{keys.CHECKED} is damaged: its stretches make no sense", key=keys.CHECKED)
    if not all(math.isfinite(time) and time >= 0 for time in times):
        raise CorruptionError(f"{keys.CHECKED} is damaged: its times make no sense", key=keys.CHECKED)
    return record


def _place(store: Store) -> str:
    return digest_of(store.traits.url.encode("utf-8", "surrogatepass"))[:32]


def _starts(stretches: Stretches, stretch: Stretch) -> str:
    return max((other.upto for other in stretches if other.upto < stretch.upto), default="")


def _at(stretches: Stretches, upto: str) -> float:
    """The time of the stretch that holds the digests right below ``upto``."""
    return next(stretch.at for stretch in stretches if stretch.upto >= upto)


def _tidy(stretches: Stretches) -> Stretches:
    """Neighbours of one time as one stretch; if there are too many, those that differ least, at the earlier time."""
    found: list[Stretch] = []
    for stretch in stretches:
        if found and found[-1].at == stretch.at:
            found.pop()
        found.append(stretch)
    while len(found) > MAX_STRETCHES:
        at = min(range(len(found) - 1), key=lambda i: abs(found[i].at - found[i + 1].at))
        found[at : at + 2] = [Stretch(found[at + 1].upto, min(found[at].at, found[at + 1].at))]
    return tuple(found)
