"""Prune: deleting what a policy does not keep; and gc: removing what no manifest reaches."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StoreFullError,
    TransactionError,
)
from ckptstore.fence import superseded
from ckptstore.hold import holds
from ckptstore.lease import EXPIRY, READING, Sighting, read_leases
from ckptstore.manifest import Manifest
from ckptstore.marks import marks_of
from ckptstore.pins import pinned
from ckptstore.policies import EpochInfo, PerRecord, Policy
from ckptstore.stores.base import ObjectInfo, Store
from ckptstore.sweep import Removal, Unless, condemn, delete_commits, store_time, sweep
from ckptstore.sweep import weigh as weigh_up
from ckptstore.thinning import thin

log = logging.getLogger("ckptstore")

_MANY = 500  # epochs from which on content is listed in parts


@dataclass(frozen=True)
class PruneReport:
    """What a prune removed and kept, with a reason for each epoch; ``objects`` in deletion order."""

    removed: dict[int, str]
    kept: dict[int, str]
    objects: list[Removal]
    spared: dict[str, str]
    dry_run: bool
    dropped: dict[int, dict[str, str]] = field(default_factory=dict)
    """Records dropped from epochs that were kept, each with the reason."""

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
    policy: Policy | PerRecord,
    *,
    run: str,
    protected: Mapping[int, str],
    metadata: Any,
    deep: bool,
    dry_run: bool,
    weigh: bool,
    coming: Sequence[EpochInfo] = (),
) -> PruneReport:
    """Delete the epochs of ``run`` that ``policy`` does not keep; it is not shown those of others.

    Never deleted (P5): the newest intact epoch, ``protected``, pinned, quarantined and held epochs, and those whose
    manifest cannot be read (they may be all that a repair has to go by).

    Args:
        metadata: decodes ``Manifest.metadata`` into a mapping.
        deep: find the newest intact epoch by reading it in full. Otherwise only the chunks that it took over from
            earlier epochs are read, each once a process.
        weigh: a dry run finds out what would be freed.
        coming: for a dry run: epochs that are to be saved first. The policy counts them.
    """
    if coming and not (dry_run and isinstance(policy, Policy)):
        raise InvalidArgumentError("epochs that are to come are for a plan by one policy, not one for each record")
    facts: dict[str, Any] = {"run": run, "protected": protected, "metadata": metadata, "deep": deep, "dry_run": dry_run}
    plan = _plan(catalog, policy, **facts, coming=coming)
    unless = Unless(partial(marks_of, catalog), plan.times)
    swept = delete_commits(catalog, plan.victims, "its epoch was pruned", dry_run=dry_run, unless=unless)
    kept = {**plan.kept, **swept.kept}
    victims = [commit for commit in plan.victims if commit.epoch not in swept.kept]
    dropped = {commit.epoch: dict(names) for commit, names in sorted(plan.thinned.items())}
    if not dry_run:
        for commit, names in plan.thinned.items():
            removed = _thin(catalog, commit, names, unless)
            swept.removed += removed or []
            if removed is None:
                del dropped[commit.epoch]
    elif weigh:
        gone = {commit: frozenset(record.name for record in plan.manifests[commit].records) for commit in victims}
        swept.removed += weigh_up(catalog, {**gone, **plan.thinned}, "its epoch was pruned")
    reasons = {commit.epoch: "no policy keeps it" for commit in victims}
    return PruneReport(reasons, dict(sorted(kept.items())), swept.removed, swept.spared, dry_run, dropped)


@dataclass
class _Plan:
    """What is to be done, and why."""

    times: dict[Committed, float]
    manifests: dict[Committed, Manifest]
    kept: dict[int, str]
    victims: list[Committed]
    thinned: dict[Committed, dict[str, str]]


def _thin(catalog: Catalog, commit: Committed, names: Mapping[str, str], unless: Unless) -> list[Removal] | None:
    """Drop records of a checkpoint. None: something came in between, and it is as it was, for the next prune."""
    try:
        manifest = catalog.manifest(commit)
        removed = weigh_up(catalog, {commit: names}, "its record was dropped")
        thin(catalog, manifest, names, unless.times[commit], unless=lambda: bool(unless.marks({commit: manifest})))
    except (ObjectNotFoundError, AlreadyExistsError, TransactionError, CorruptionError) as error:
        log.info("epoch %d keeps its records for now: %s", commit.epoch, error)
        return None
    return removed


def _plan(
    catalog: Catalog,
    policy: Policy | PerRecord,
    *,
    run: str,
    protected: Mapping[int, str],
    metadata: Any,
    deep: bool,
    dry_run: bool,
    coming: Sequence[EpochInfo],
) -> _Plan:
    times = catalog.commit_times()
    commits = sorted(times)
    every: dict[Committed, Manifest] = {}
    manifests: dict[int, Manifest] = {}
    unreadable: dict[int, str] = {}
    for commit, manifest in catalog.manifests(commits):
        if isinstance(manifest, Manifest):
            manifests[commit.epoch] = every[commit] = manifest  # ascending: the highest generation stays
        else:
            unreadable[commit.epoch] = "its manifest is damaged: delete it by hand or restore it"
    foreign = {e: _belongs(m) for e, m in manifests.items() if m.run != run}
    saved = {commit.epoch: times[commit] for commit in commits}
    infos = [
        EpochInfo(epoch, metadata(manifest), manifest.saved or saved[epoch], manifest.bytes_needed)
        for epoch, manifest in sorted(manifests.items())
        if epoch not in foreign
    ]
    infos = sorted([*(i for i in infos if i.epoch not in {c.epoch for c in coming}), *coming], key=lambda i: i.epoch)
    chosen, drops = _choose(policy, infos, manifests)
    kept = {**chosen, **foreign, **protected, **unreadable}
    whole = {*foreign, *protected, *unreadable}  # epochs that lose no record either
    if drops or any(info.epoch not in kept for info in infos):
        newest, _ = catalog.newest_intact(deep=deep, run=run)
        if newest is not None and not deep and not catalog.check_reused(newest):
            newest, _ = catalog.newest_intact(deep=True, run=run)  # others may share what rotted
        if newest is None:
            kept.update({info.epoch: "no epoch is intact: nothing is deleted" for info in infos})
            whole |= kept.keys()
        elif not any(info.epoch > newest.epoch for info in coming):
            kept.setdefault(newest.epoch, "the newest intact epoch")
            whole.add(newest.epoch)
            for name in newest.left_out:  # or nothing could be resumed from
                having, _ = catalog.newest_intact(deep=deep, run=run, need=[name])
                if having is not None:
                    kept.setdefault(having.epoch, f"the newest intact epoch that has {name!r}")
                    whole.add(having.epoch)
    if dry_run or drops or any(info.epoch not in kept for info in infos):  # now, after all that takes time
        marked = {epoch: f"quarantined: {reason}" for epoch, reason in catalog.quarantined().items()}
        marked.update({epoch: f"pinned: {reason}" for epoch, reason in pinned(catalog.store).items()})
        marked.update({commit.epoch: why for commit, why in holds(catalog, writes=not dry_run).items()})
        kept.update(marked)
        whole |= marked.keys()
    victims = [commit for commit in commits if commit.epoch in manifests and commit.epoch not in kept]
    newest_of = {commit.epoch: commit for commit in commits if commit in every}
    thinned = {newest_of[epoch]: names for epoch, names in sorted(drops.items()) if epoch not in whole}
    # An epoch that another process deleted after our listing is neither removed by us nor kept.
    present = kept.keys() & {commit.epoch for commit in commits}
    return _Plan(times, every, {e: kept[e] for e in sorted(present)}, victims, thinned)


def _choose(
    policy: Policy | PerRecord, infos: list[EpochInfo], manifests: Mapping[int, Manifest]
) -> tuple[dict[int, str], dict[int, dict[str, str]]]:
    if isinstance(policy, Policy):
        return policy.keep(infos), {}
    return policy.choose(infos, {epoch: {r.name for r in m.records} for epoch, m in manifests.items()})


def _belongs(manifest: Manifest) -> str:
    return f"belongs to run {manifest.run}" if manifest.run else "belongs to no named run"


@dataclass
class _Debris:
    """What a listing shows of attempts that may have ended."""

    content: dict[str, int] = field(default_factory=dict)
    scratch: dict[str, ObjectInfo] = field(default_factory=dict)
    condemned: set[str] = field(default_factory=set)
    notes: list[tuple[str, ObjectInfo]] = field(default_factory=list)  # of ranks, with the attempt


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
    dead = [s for s in read_leases(store) if _is_dead(s, now, grace)]
    full: dict[str, str] = {}
    if not dry_run:
        for sighting in list(dead):
            try:
                condemn(store, sighting.attempt)
            except StoreFullError as error:
                dead.remove(sighting)
                full[keys.lease_key(sighting.attempt)] = f"its attempt could not be flagged ({error})"
    debris = _list_debris(catalog)
    # By sighting, not by name: a lease that was renewed since, or is new, protects its attempt after all.
    swept = sweep(catalog, debris.content, "no checkpoint reaches it", dead=dead, dry_run=dry_run)
    swept.spared.update(full)
    removed += swept.removed
    before = now - grace if grace > 0 else math.inf  # clocks are coarse: "now" may be older than what was just put
    removed += _remove_traces(store, debris, {s.attempt for s in dead}, swept.spared, before, dry_run)
    outdone = [Removal(info.key, "its run has a newer writer", info.size) for info in superseded(store)]
    outdone += _marks_of_nothing(catalog)
    for removal in outdone:
        if not dry_run:
            store.delete(removal.key)
    removed += outdone
    return GcReport(removed, swept.spared, dry_run)


def _is_dead(sighting: Sighting, now: float, grace: float) -> bool:
    """Whether a lease has not been renewed for so long. A reader gets no less time than he knows of."""
    if sighting.lease is not None and sighting.lease.state == READING:
        grace = max(grace, EXPIRY)
    return grace == 0 or abs(now - sighting.modified) > grace


def _marks_of_nothing(catalog: Catalog) -> list[Removal]:
    """Marks of checkpoints that are not there any more. What is put under such a number later is another one."""
    marks = [(info, keys.parse_quarantine_key(info.key)) for info in catalog.store.list(keys.QUARANTINES)]
    there = {(commit.epoch, commit.generation) for commit in catalog.committed()} if marks else set()
    return [
        Removal(info.key, "what it sets aside is gone", info.size)
        for info, pair in marks
        if pair is not None and pair not in there
    ]


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


def _list_debris(catalog: Catalog) -> _Debris:
    debris, store = _Debris(), catalog.store
    for info in catalog.contents(many=len(catalog.committed()) > _MANY):
        if keys.parse_content_key(info.key) is not None:
            debris.content[info.key] = info.size
        elif (attempt := keys.parse_note_key(info.key)) is not None:
            debris.notes.append((attempt, info))
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
    removed += [
        Removal(info.key, "the ranks that it is for have ended", info.size)
        for attempt, info in debris.notes
        if attempt in ended or (attempt not in leases and info.modified <= before)
    ]
    removed += [Removal(keys.lease_key(a), "its attempt is dead") for a in sorted(ended & leases)]
    removed += [Removal(keys.condemned_key(a), "its attempt is swept") for a in sorted(ended)]
    if not dry_run:
        for removal in removed:
            store.delete(removal.key)
    return removed
