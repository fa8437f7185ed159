"""Which epochs to keep (a pure choice), and gc: removing what no manifest reaches."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import InvalidArgumentError, StoreFullError
from ckptstore.fence import superseded
from ckptstore.lease import EXPIRY, read_leases
from ckptstore.manifest import Manifest
from ckptstore.stores.base import ObjectInfo, Store
from ckptstore.sweep import Removal, condemn, delete_commits, store_time, sweep


@dataclass(frozen=True, slots=True)
class EpochInfo:
    """What a policy may look at: the epoch's number and its metadata."""

    epoch: int
    metadata: Mapping[str, Any]


class Policy(ABC):
    """A choice of epochs to keep. ``a | b`` keeps what either keeps, ``a & b`` what both keep."""

    @abstractmethod
    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        """Epochs to keep, each with the reason. ``epochs`` is in ascending order."""

    def __or__(self, other: Policy) -> Policy:
        return _Union(self, other)

    def __and__(self, other: Policy) -> Policy:
        return _Intersection(self, other)


@dataclass(frozen=True)
class KeepLast(Policy):
    """Keep the ``n`` highest epochs (n ≥ 1). Order is by number, never by time."""

    n: int

    def __post_init__(self) -> None:
        _at_least_one("KeepLast", self.n)

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        return {info.epoch: f"one of the last {self.n}" for info in epochs[-self.n :]}


@dataclass(frozen=True)
class KeepEvery(Policy):
    """Keep epochs that are multiples of ``n`` (n ≥ 1)."""

    n: int

    def __post_init__(self) -> None:
        _at_least_one("KeepEvery", self.n)

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        return {info.epoch: f"a multiple of {self.n}" for info in epochs if info.epoch % self.n == 0}


@dataclass(frozen=True)
class KeepBest(Policy):
    """Keep the ``n`` epochs with the best ``metadata[metric]``.

    ``mode`` is "min" or "max". Epochs without the metric, or where it is NaN or no number, are never best.
    Among equals the later epoch is better. If no epoch has the metric, all are kept: it may be mistyped.
    """

    metric: str
    n: int = 1
    mode: str = "min"

    def __post_init__(self) -> None:
        _at_least_one("KeepBest", self.n)
        if self.mode not in ("min", "max"):
            raise InvalidArgumentError(f'KeepBest: mode must be "min" or "max", not {self.mode!r}')

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        sign = 1 if self.mode == "min" else -1
        scored = []
        for info in epochs:
            value = _number(info.metadata.get(self.metric))
            if value is not None:
                scored.append((sign * value, -info.epoch))
        reason = f"one of the best {self.n} by {self.metric}"
        if not scored:
            # A mistyped metric must not empty a repository.
            return {info.epoch: f"no epoch has the metric {self.metric!r}" for info in epochs}
        return {-negative: reason for _, negative in sorted(scored)[: self.n]}


@dataclass(frozen=True)
class _Union(Policy):
    first: Policy
    second: Policy

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        return {**self.second.keep(epochs), **self.first.keep(epochs)}


@dataclass(frozen=True)
class _Intersection(Policy):
    first: Policy
    second: Policy

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        second = self.second.keep(epochs)
        return {e: f"{why} and {second[e]}" for e, why in self.first.keep(epochs).items() if e in second}


@dataclass(frozen=True)
class PruneReport:
    """What a prune removed and kept, with a reason for each epoch; ``objects`` in deletion order."""

    removed: dict[int, str]
    kept: dict[int, str]
    objects: list[Removal]
    spared: dict[str, str]
    dry_run: bool

    @property
    def bytes_freed(self) -> int:
        """Stored bytes of the objects removed."""
        return sum(removal.size for removal in self.objects)


@dataclass(frozen=True)
class GcReport:
    """What a gc removed (debris only), and what it left alone and why."""

    removed: list[Removal]
    spared: dict[str, str]
    dry_run: bool

    @property
    def bytes_freed(self) -> int:
        """Stored bytes of the objects removed."""
        return sum(removal.size for removal in self.removed)


def prune(
    catalog: Catalog,
    policy: Policy,
    *,
    run: str,
    protected: Mapping[int, str],
    metadata: Any,
    deep: bool,
    dry_run: bool,
) -> PruneReport:
    """Delete the epochs of ``run`` that ``policy`` does not keep; it is not shown those of others.

    Never deleted (P5): the newest intact epoch, ``protected`` epochs, and epochs whose manifest cannot be read
    (they may be all that a repair has to go by).

    Args:
        metadata: decodes ``Manifest.metadata`` into a mapping.
        deep: find the newest intact epoch by reading it in full. Otherwise only the chunks that it took over from
            earlier epochs are read, each once a process.
    """
    commits = catalog.committed()
    manifests: dict[int, Manifest] = {}
    unreadable: dict[int, str] = {}
    for commit, manifest in catalog.manifests(commits):
        if isinstance(manifest, Manifest):
            manifests[commit.epoch] = manifest  # ascending: the highest generation stays
        else:
            unreadable[commit.epoch] = "its manifest is damaged: delete it by hand or restore it"
    foreign = {e: _belongs(m) for e, m in manifests.items() if m.run != run}
    infos = [EpochInfo(epoch, metadata(manifests[epoch])) for epoch in sorted(manifests) if epoch not in foreign]
    kept = {**policy.keep(infos), **foreign, **protected, **unreadable}
    if any(info.epoch not in kept for info in infos):
        newest, _ = catalog.newest_intact(deep=deep, run=run)
        if newest is not None and not deep and not catalog.check_reused(newest):
            newest, _ = catalog.newest_intact(deep=True, run=run)  # others may share what rotted
        if newest is None:
            kept.update({info.epoch: "no epoch is intact: nothing is deleted" for info in infos})
        elif newest.epoch not in kept:
            kept[newest.epoch] = "the newest intact epoch"
    victims = [commit for commit in commits if commit.epoch in manifests and commit.epoch not in kept]
    swept = delete_commits(catalog, victims, "its epoch was pruned", dry_run=dry_run)
    removed = {commit.epoch: "no policy keeps it" for commit in victims}
    # An epoch that another process deleted after our listing is neither removed by us nor kept.
    present = kept.keys() & {commit.epoch for commit in commits}
    return PruneReport(removed, {e: kept[e] for e in sorted(present)}, swept.removed, swept.spared, dry_run)


def _belongs(manifest: Manifest) -> str:
    return f"belongs to run {manifest.run}" if manifest.run else "belongs to no named run"


@dataclass
class _Debris:
    """What a listing shows of attempts that may have ended."""

    content: dict[str, int] = field(default_factory=dict)
    scratch: dict[str, ObjectInfo] = field(default_factory=dict)
    condemned: set[str] = field(default_factory=set)


def gc(catalog: Catalog, *, grace: float = EXPIRY, dry_run: bool = False, now: float | None = None) -> GcReport:
    """Remove what no manifest reaches: chunks and indexes of dead attempts, their leases and flags, scratch files.

    Foreign objects are not touched. Safe beside live writers (see ``ckptstore.sweep``).

    Args:
        grace: seconds after its last renewal until an attempt counts as dead. Below the default, a save that is merely
            slow may be refused at its commit; no committed epoch is ever at risk.
        now: the store's time. By default the store is asked; a dry run, which writes nothing, takes
            the local clock.
    """
    if not hasattr(grace, "__float__") or not grace >= 0:
        raise InvalidArgumentError(f"grace must be 0 or more seconds, not {grace!r}")
    store = catalog.store
    removed = _superseded(catalog, dry_run)
    if now is None:
        try:
            now = time.time() if dry_run else store_time(store)
        except StoreFullError:
            now = time.time()  # no room for a probe: gc must work all the more
    dead = [s for s in read_leases(store) if grace == 0 or abs(now - s.modified) > grace]
    full: dict[str, str] = {}
    if not dry_run:
        for sighting in list(dead):
            try:
                condemn(store, sighting.attempt)
            except StoreFullError as error:
                dead.remove(sighting)
                full[keys.lease_key(sighting.attempt)] = f"its attempt could not be flagged ({error})"
    debris = _list_debris(store)
    # By sighting, not by name: a lease that was renewed since, or is new, protects its attempt after all.
    swept = sweep(catalog, debris.content, "no checkpoint reaches it", dead=dead, dry_run=dry_run)
    swept.spared.update(full)
    removed += swept.removed
    before = now - grace if grace > 0 else math.inf  # clocks are coarse: "now" may be older than what was just put
    removed += _remove_traces(store, debris, {s.attempt for s in dead}, swept.spared, before, dry_run)
    for info in superseded(store):
        removed.append(Removal(info.key, "its run has a newer writer", info.size))
        if not dry_run:
            store.delete(info.key)
    return GcReport(removed, swept.spared, dry_run)


def _superseded(catalog: Catalog, dry_run: bool) -> list[Removal]:
    """Older generations of an epoch, left by a replace that was interrupted after its commit."""
    by_epoch: dict[int, list[Committed]] = {}
    for commit in catalog.committed():
        by_epoch.setdefault(commit.epoch, []).append(commit)
    removed: list[Removal] = []
    for commits in by_epoch.values():
        if len(commits) > 1:
            newest = next((manifest for _, manifest in catalog.manifests(commits[-1:])), None)
            if isinstance(newest, Manifest) and not catalog.problems(newest, deep=False):
                reason = "a newer generation of its epoch is committed"
                removed += delete_commits(catalog, commits[:-1], reason, dry_run=dry_run).removed
    return removed


def _list_debris(store: Store) -> _Debris:
    debris = _Debris()
    for info in store.list(keys.ATTEMPTS):
        if keys.parse_content_key(info.key) is not None:
            debris.content[info.key] = info.size
    for info in store.list("", partial=True):
        if keys.parse_partial_key(info.key) is not None:
            debris.scratch[info.key] = info
    for info in store.list(keys.PROBES):
        if keys.is_ours(info.key):
            debris.scratch[info.key] = info
    for info in store.list(keys.CONDEMNED):
        attempt = keys.parse_condemned_key(info.key)
        if attempt is not None:
            debris.condemned.add(attempt)
    return debris


def _remove_traces(
    store: Store, debris: _Debris, dead: set[str], spared: Collection[str], before: float, dry_run: bool
) -> list[Removal]:
    """Scratch files older than the grace; leases and flags of attempts of which nothing unreached is left."""
    busy = {content[0] for content in map(keys.parse_content_key, spared) if content is not None}
    removed = [
        Removal(key, "left by an interrupted put", info.size)
        for key, info in sorted(debris.scratch.items())
        if info.modified <= before
    ]
    ended = (dead | debris.condemned) - busy
    leases = {s.attempt for s in read_leases(store)}
    removed += [Removal(keys.lease_key(a), "its attempt is dead") for a in sorted(ended & leases)]
    removed += [Removal(keys.condemned_key(a), "its attempt is swept") for a in sorted(ended)]
    if not dry_run:
        for removal in removed:
            store.delete(removal.key)
    return removed


def _number(value: Any) -> Any:
    """``value`` if it can be compared as a metric: any real number, NumPy's too, but no bool and no NaN."""
    if isinstance(value, np.generic) and value.dtype.kind not in "bOSUMm":
        value = value.item() if value.dtype.kind in "iu" else float(value.astype(np.float64).real)
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if real and value == value else None


def _at_least_one(what: str, n: object) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InvalidArgumentError(f"{what}: n must be 1 or more, not {n!r}")
