"""Removing objects, safely beside live writers. Every removal in ckptstore goes through ``sweep``.

The order is *flag → candidates → leases → manifests → delete*. A flag tells writers to keep away: for a checkpoint it
is the absence of its manifest, for an unfinished attempt the object ``condemned/<attempt>``. The candidates are listed
before the leases, and the leases before the manifests, because a writer does the reverse: lease, then objects, then
manifest, and only then does it remove the lease. So whoever owns a candidate is seen as a lease, or as a manifest, or
is dead.

Looking takes time, and meanwhile checkpoints are saved and others deleted. A writer whose lease came right after we
looked may take a candidate over from a base that is deleted before we read it. So both are looked at twice, leases and
manifests in turn, and manifests until none has vanished between its listing and its reading: a base that we missed was
deleted while its heir had a lease, or after its heir was committed, and the second look finds the one or the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import CorruptionError, ObjectExistsError, ObjectNotFoundError, StoreFullError
from ckptstore.lease import EXPIRY, HeldLease, Sighting, read_leases
from ckptstore.manifest import Manifest, encode_manifest
from ckptstore.pipeline import side_by_side
from ckptstore.stores.base import Store

log = logging.getLogger("ckptstore")

_LOOKS = 5
_FEW = 16
_BATCH = 1024  # manifests in memory, or deletes on their way, at a time
_AT_ONCE = 256  # manifests that are deleted between two looks for marks
_IN_PROGRESS = "a save in progress may refer to it"


@dataclass(frozen=True, slots=True)
class Removal:
    """One object removed (or, in a dry run, to be removed), its size in bytes where known, and why."""

    key: str
    reason: str
    size: int = 0


@dataclass(slots=True)
class Swept:
    """What a sweep did: objects removed, objects spared and why."""

    removed: list[Removal] = field(default_factory=list)
    spared: dict[str, str] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)
    """Epochs that were marked meanwhile, each with the reason, and therefore not deleted."""


@dataclass(frozen=True, slots=True)
class Unless:
    """What keeps a checkpoint from being deleted at the last moment.

    ``marks`` tells which of some must stay, by epoch, with the reason: asked right before they are deleted, and again
    after. ``times``: when the store got each of them.
    """

    marks: Callable[[Mapping[Committed, Manifest]], Mapping[int, str]]
    times: Mapping[Committed, float]


def condemn(store: Store, attempt: str) -> None:
    """Raise the flag of an attempt: from now on nobody may build on it, nor commit it."""
    # Empty, so that it also fits on a full disk. With other bytes it would be a flag all the same.
    with suppress(ObjectExistsError):
        store.put(keys.condemned_key(attempt), b"", if_absent=True)


def store_time(store: Store) -> float:
    """The store's clock: the time it stamps on an object put just now."""
    key = keys.probe_key()
    store.put(key, b"")
    try:
        return store.info(key).modified
    finally:
        store.delete(key)


def seen_from(store: Store, other: Store) -> bool:
    """Whether what is put into ``store`` is in ``other``: whether they are one place."""
    key = keys.probe_key()
    store.put(key, b"")
    try:
        other.info(key)
    except ObjectNotFoundError:
        return False
    finally:
        store.delete(key)
    return True


def sweep(
    catalog: Catalog,
    candidates: dict[str, int],
    reason: str,
    *,
    dead: Collection[Sighting | str] = (),
    gone: Mapping[Committed, Collection[str]] = MappingProxyType({}),
    begun: float = 0.0,
    dry_run: bool = False,
) -> Swept:
    """Delete those ``candidates`` (content key → size) that nothing needs any more.

    The caller has raised the flags and listed the candidates *before* calling. Kept is what a manifest reaches and
    every object of an attempt that a lease owns or uses; when a manifest or lease cannot be read, what
    it needs is unknown and everything it could need is kept.

    Args:
        candidates: what something needs is taken out of them.
        dead: leases that do not count, because their attempts are condemned: attempt ids, or sightings, which stop
            counting as dead when the lease has been renewed since.
        gone: of a dry run: records by commit that are to be looked at as if they were deleted.
        begun: the store's time at which the attempts of all candidates began. No older manifest reaches them, and none
            is read that is older by more than the store's clock is ever off.
    """
    swept = Swept()
    if not candidates:
        return swept
    attempts = {content[0] for content in map(keys.parse_content_key, candidates) if content is not None}
    protected: set[str] = set()
    blocked: str | None = None
    found = _Reached()
    for _ in range(2):
        more, unreadable = _protected_attempts(read_leases(catalog.store), dead)
        protected |= more
        _reach(catalog, candidates, attempts, gone, found, begun - EXPIRY)
        blocked = blocked or unreadable or found.unsure
    going = []
    for key in sorted(candidates):
        content = keys.parse_content_key(key)
        if content is None:
            continue
        if blocked:
            swept.spared[key] = blocked
        elif content[0] in protected:
            swept.spared[key] = _IN_PROGRESS
        elif content[0] in found.unknown:
            swept.spared[key] = f"{found.unknown[content[0]]} is damaged, so what it needs is unknown"
        else:
            going.append(key)
    if not dry_run:
        _delete_all(catalog.store, going)
    swept.removed = [Removal(key, reason, candidates[key]) for key in going]
    return swept


def _delete_all(store: Store, going: list[str]) -> None:
    """In any order: nothing needs any of them."""

    def delete(start: int) -> None:
        for key in going[start : start + _FEW]:
            store.delete(key)

    if len(going) <= _FEW:  # not worth the threads
        delete(0)
        return
    for start in range(0, len(going), _BATCH):
        side_by_side(store.traits.concurrency, delete, range(start, min(start + _BATCH, len(going)), _FEW))


def _protected_attempts(sightings: list[Sighting], dead: Collection[Sighting | str]) -> tuple[set[str], str | None]:
    protected: set[str] = set()
    blocked = None
    for sighting in sightings:
        if sighting.attempt in dead or sighting in dead:
            continue
        protected.add(sighting.attempt)
        if sighting.lease is None:
            blocked = f"{keys.lease_key(sighting.attempt)} is live but cannot be read"
        else:
            protected.update(sighting.lease.uses)
    return protected, blocked


@dataclass
class _Reached:
    """What manifests reach."""

    unknown: dict[str, str] = field(default_factory=dict)  # attempt not fully known → why
    unsure: str | None = None  # a reason to delete nothing
    read: set[Committed] = field(default_factory=set)


def _reach(
    catalog: Catalog,
    candidates: dict[str, int],
    attempts: set[str],
    gone: Mapping[Committed, Collection[str]],
    found: _Reached,
    since: float,
) -> None:
    """Take out of ``candidates``, which are of ``attempts``, what the manifests that are not yet read reach."""
    for _ in range(_LOOKS):
        times = catalog.commit_times()
        new = [commit for commit in sorted(times) if times[commit] >= since and commit not in found.read]
        before = len(found.read)
        for start in range(0, len(new), _BATCH):
            left = _left(catalog.manifests(new[start : start + _BATCH]), attempts, gone, found)
            for manifest, needs in catalog.needs_of(left):
                if isinstance(needs, CorruptionError):
                    found.unknown.update(dict.fromkeys(manifest.attempts, needs.key or manifest.key))
                    needs = {entry.key: 0 for entry in manifest.records}
                for key in needs:
                    candidates.pop(key, None)
        if len(found.read) - before == len(new):
            return
    found.unsure = "checkpoints are deleted as fast as they are looked at"


def _left(
    manifests: Iterable[tuple[Committed, Manifest | CorruptionError]],
    attempts: set[str],
    gone: Mapping[Committed, Collection[str]],
    found: _Reached,
) -> list[Manifest]:
    """Those that may reach objects of ``attempts``, without the records that are gone."""
    left = []
    for commit, manifest in manifests:
        found.read.add(commit)
        if isinstance(manifest, CorruptionError):
            found.unsure = (
                f"{commit.key} is damaged, so what it needs is unknown (delete epoch {commit.epoch}, or restore it)"
            )
        elif attempts.intersection(manifest.attempts):
            records = tuple(entry for entry in manifest.records if entry.name not in gone.get(commit, ()))
            left.append(msgspec.structs.replace(manifest, records=records))
    return left


def delete_commits(
    catalog: Catalog, commits: Iterable[Committed], reason: str, *, dry_run: bool = False, unless: Unless | None = None
) -> Swept:
    """Delete checkpoints: their manifests first (from then on they do not exist), then what only they needed.

    Lower generations go first, so that a crash in between never brings an older content of an epoch back. A dry run
    lists the manifests only; ``weigh`` finds out the rest.
    """
    result = Swept()
    candidates: dict[str, int] = {}
    ascending = sorted(commits)
    for start in range(0, len(ascending), _BATCH):
        found = catalog.manifests(ascending[start : start + _BATCH])  # without what another process has deleted
        damaged = [manifest for _, manifest in found if isinstance(manifest, CorruptionError)]
        for _, needs in catalog.needs_of(manifest for _, manifest in found if isinstance(manifest, Manifest)):
            if isinstance(needs, CorruptionError):
                damaged.append(needs)
            else:
                candidates.update(needs)
        for error in damaged:
            log.warning("%s; gc will find what it needed", error)
        for first in range(0, len(found), _AT_ONCE):
            part = found[first : first + _AT_ONCE]
            gone = [commit for commit, _ in part] if dry_run else _delete_manifests(catalog, part, unless, result.kept)
            result.removed += [Removal(commit.key, reason) for commit in gone]
    if dry_run:
        return result
    swept = sweep(catalog, candidates, reason)
    held = {key: candidates[key] for key, why in swept.spared.items() if why == _IN_PROGRESS}
    dead = _condemn_expired(catalog.store, held) if held else []
    if dead:
        again = sweep(catalog, held, reason, dead=dead)
        swept.removed += again.removed
        swept.spared = {**{key: why for key, why in swept.spared.items() if key not in held}, **again.spared}
    result.removed += swept.removed
    result.spared = swept.spared
    return result


def _delete_manifests(
    catalog: Catalog,
    found: list[tuple[Committed, Manifest | CorruptionError]],
    unless: Unless | None,
    kept: dict[int, str],
) -> list[Committed]:
    """Delete those that are not marked, and put back what was marked in the meantime. Which are gone."""
    legible = {commit: manifest for commit, manifest in found if isinstance(manifest, Manifest)}
    if unless is not None:
        kept.update(unless.marks(legible))
    going = [commit for commit, _ in found if commit.epoch not in kept]
    for commit in going:
        catalog.store.delete(commit.key)
    if unless is None:
        return going
    late = unless.marks({commit: legible[commit] for commit in going if commit in legible})
    newest = {commit.epoch: commit for commit in going if commit.epoch in late and commit in legible}
    for epoch, commit in newest.items():
        manifest = legible[commit]
        log.info("epoch %d is put back: it was marked in this moment (%s)", epoch, late[epoch])
        _put_back(catalog, msgspec.structs.replace(manifest, saved=manifest.saved or unless.times.get(commit, 0.0)))
        kept[epoch] = late[epoch]
    return [commit for commit in going if newest.get(commit.epoch) != commit]


def _put_back(catalog: Catalog, manifest: Manifest) -> None:
    """Commit a checkpoint again that was deleted just now, while its objects are there still.

    With a lease that names them: a sweep of another process that comes now spares them.
    """
    store = catalog.store
    lease = HeldLease(store, keys.new_attempt(), manifest.epoch)
    try:
        with suppress(StoreFullError):
            lease.claim(manifest.key, manifest.attempts)
        if catalog.committed(manifest.epoch):
            return  # it was saved anew
        with suppress(ObjectExistsError):
            store.put(manifest.key, encode_manifest(manifest), if_absent=True)
        for problem in catalog.problems(manifest, deep=False):
            log.error("epoch %d was put back and is damaged: %s %s", manifest.epoch, problem.key, problem.reason)
    finally:
        lease.release()


def weigh(catalog: Catalog, gone: Mapping[Committed, Collection[str]], reason: str) -> list[Removal]:
    """The objects that would go with these records (by commit): those that nothing else needs. Reads all indexes."""
    candidates: dict[str, int] = {}
    commits = list(gone)
    for start in range(0, len(commits), _BATCH):
        going = []
        for commit, manifest in catalog.manifests(commits[start : start + _BATCH]):
            if isinstance(manifest, Manifest):
                records = tuple(entry for entry in manifest.records if entry.name in gone[commit])
                going.append(msgspec.structs.replace(manifest, records=records))
        for _, needs in catalog.needs_of(going):
            candidates.update(needs if isinstance(needs, dict) else {})
    return sweep(catalog, candidates, reason, gone=gone, dry_run=True).removed


def _condemn_expired(store: Store, held: Collection[str]) -> list[Sighting]:
    """Condemn the expired attempts that protect objects of ``held``: a save that was killed must not keep what nobody
    needs until the next gc. The order is that of gc: flags first, then the sweep looks at leases and manifests anew.
    """
    attempts = {content[0] for content in map(keys.parse_content_key, held) if content is not None}
    holding = [s for s in read_leases(store) if s.lease and attempts.intersection((s.attempt, *s.lease.uses))]
    try:
        now = store_time(store) if holding else 0.0
        dead = [sighting for sighting in holding if abs(now - sighting.modified) > EXPIRY]
        for sighting in dead:
            condemn(store, sighting.attempt)
    except StoreFullError:  # no room for a flag
        return []
    return dead


def remove_attempt(catalog: Catalog, attempt: str, reason: str) -> Swept:
    """Condemn an attempt and remove all of it that no manifest reaches: objects, then lease, then flag."""
    return remove_attempts(catalog, [attempt], reason)


def remove_attempts(catalog: Catalog, attempts: Collection[str], reason: str, *, ended: bool = True) -> Swept:
    """As ``remove_attempt``, many in one sweep.

    Args:
        ended: nobody asks for them any more. If not, what says how they ended stays, and so do leases and flags.
    """
    store = catalog.store
    candidates: dict[str, int] = {}
    notes = []
    for attempt in attempts:
        condemn(store, attempt)
        for info in store.list(keys.attempt_prefix(attempt)):
            if keys.parse_note_key(info.key) is None:
                candidates[info.key] = info.size
            else:
                notes.append(info)
    swept = sweep(catalog, candidates, reason, dead=attempts)
    busy = {content[0] for content in map(keys.parse_content_key, swept.spared) if content is not None}
    for attempt in attempts:
        for info in store.list(keys.attempt_prefix(attempt), partial=True):
            store.delete(info.key)
            swept.removed.append(Removal(info.key, "left by an interrupted put", info.size))
    if not ended:
        return swept
    for info in notes:
        store.delete(info.key)
        swept.removed.append(Removal(info.key, reason, info.size))
    for attempt in attempts:
        if attempt not in busy:
            # Without lease and objects nobody can find the attempt any more, so its flag has done its work.
            store.delete(keys.lease_key(attempt))
            store.delete(keys.condemned_key(attempt))
    return swept
