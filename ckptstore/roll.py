"""Roll: which checkpoints a repository holds, in short; and what one place lacks of those of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.checkpoint import metadata_of
from ckptstore.manifest import Manifest, Origin
from ckptstore.policies import EpochInfo, PerRecord, Policy

_NOWHERE = Origin("", 0, "")


@dataclass(frozen=True, slots=True)
class Entry:
    """The newest generation of one epoch. ``first`` names nothing where the manifest is damaged."""

    commit: Committed
    first: Origin
    info: EpochInfo
    records: frozenset[str]
    run: str

    @property
    def epoch(self) -> int:
        """Its number."""
        return self.commit.epoch


class Roll:
    """What is committed in one repository. A manifest is read once as long as its object stays the same. Thread-safe.

    It decides what is copied and waited for. Whoever copies, deletes or loads reads the manifest again.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._read: dict[tuple[str, int, float], Entry] = {}
        self.last: Mapping[int, Entry] | None = None
        """What the last look has shown, by epoch; None before the first."""

    def look(self) -> Mapping[int, Entry]:
        """One listing, and a read for each manifest that is new."""
        newest: dict[int, tuple[Committed, tuple[str, int, float]]] = {}
        aside: set[tuple[int, int]] = set()
        for info in self._catalog.store.list(keys.MANIFESTS):
            pair, mark = keys.parse_manifest_key(info.key), keys.parse_quarantine_key(info.key)
            if mark is not None:
                aside.add(mark)
            if pair is not None and (pair[0] not in newest or newest[pair[0]][0] < Committed(*pair)):
                newest[pair[0]] = Committed(*pair), (info.key, info.size, info.modified)
        known = self._read
        unread = [commit for commit, stamp in newest.values() if stamp not in known]
        manifests = dict(self._catalog.manifests(unread))
        found: dict[int, Entry] = {}
        read: dict[tuple[str, int, float], Entry] = {}
        for epoch, (commit, stamp) in sorted(newest.items()):
            entry = known.get(stamp)
            if entry is None:
                manifest = manifests.get(commit)
                if manifest is None:
                    continue  # deleted meanwhile
                entry = _entry(commit, manifest if isinstance(manifest, Manifest) else None, stamp[2])
            if entry.first != _NOWHERE:  # what could not be read is read again
                read[stamp] = entry
            pair = commit.epoch, commit.generation
            found[epoch] = replace(entry, commit=Committed(*pair, quarantined=pair in aside))
        self._read, self.last = read, found
        return found


def lacking(
    source: Mapping[int, Entry],
    target: Mapping[int, Entry],
    policy: Policy | PerRecord | None,
    run: str,
    doubted: Callable[[Entry], bool] = lambda entry: False,
) -> list[Entry]:
    """The epochs of ``source`` that ``target`` lacks and would keep if it had them: the newest first.

    Args:
        policy: that of the target; None wants all. It counts the epochs of ``run``; those of others are all wanted, and
            so is what replaces an epoch that is there: or its old content would be what remains.
        doubted: whether an entry of the target does not count as being there.
    """
    sure = {e: entry for e, entry in target.items() if not doubted(entry)}
    new = {e: entry for e, entry in source.items() if _wanted(entry) and not _has(sure.get(e), entry)}
    if policy is not None and new:
        both = {**{e: entry for e, entry in target.items() if entry.first != _NOWHERE}, **new}
        ours = {e: both[e] for e in sorted(both) if both[e].run == run}
        infos = [entry.info for entry in ours.values()]
        if isinstance(policy, Policy):
            kept = policy.keep(infos)
        else:
            kept = policy.choose(infos, {e: set(entry.records) for e, entry in ours.items()})[0]
        new = {e: entry for e, entry in new.items() if e in kept or e in target or entry.run != run}
    return [new[epoch] for epoch in sorted(new, reverse=True)]


def _wanted(entry: Entry) -> bool:
    """What cannot be read or is set aside is not copied."""
    return entry.first != _NOWHERE and not entry.commit.quarantined


def _has(theirs: Entry | None, ours: Entry) -> bool:
    """Whether it is the same checkpoint, or a newer content of it."""
    if theirs is None:
        return False
    same, newer = theirs.first.attempt == ours.first.attempt, theirs.first.generation > ours.first.generation
    return same or (theirs.first.repository == ours.first.repository and newer)


def _entry(commit: Committed, manifest: Manifest | None, modified: float) -> Entry:
    if manifest is None:
        return Entry(commit, _NOWHERE, EpochInfo(commit.epoch, {}, modified), frozenset(), "")
    info = EpochInfo(commit.epoch, metadata_of(manifest), manifest.saved or modified, manifest.bytes_needed)
    return Entry(commit, manifest.first, info, frozenset(record.name for record in manifest.records), manifest.run)
