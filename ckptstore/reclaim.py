"""Reclaim: what a full store could give back before the new epoch is durable, and giving it back (P5).

Only what would go in any case, even if the new epoch never comes to be: what dead attempts left, and the epochs that
the policy drops from those that exist. ``on_full="oldest"`` allows more: the oldest epochs, one at a time. Never the
newest intact epoch, the one the run resumed from, or one that is being saved anew.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptstore import keys
from ckptstore.catalog import Catalog
from ckptstore.errors import CkptStoreError, CorruptionError
from ckptstore.lease import read_leases, seems_dead
from ckptstore.manifest import Manifest
from ckptstore.policies import EpochInfo, PerRecord, Policy
from ckptstore.retention import PruneReport, gc
from ckptstore.sweep import remove_attempt

log = logging.getLogger("ckptstore")

OnFull = Literal["prune", "oldest", "raise"]
Prune = Callable[..., PruneReport]  # as Repository.prune


@dataclass(frozen=True)
class _Drop(Policy):
    """Keeps all epochs but some."""

    epochs: frozenset[int]

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        return {info.epoch: "it was not asked for" for info in epochs if info.epoch not in self.epochs}


@dataclass(frozen=True)
class _DropAllBut(Policy):
    """Keeps one epoch, and what is kept in any case."""

    epoch: int | None

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        return {info.epoch: "it is being saved" for info in epochs if info.epoch == self.epoch}


class Holdings:
    """What a repository holds, in bytes, as one listing and all manifests and indexes tell.

    Attributes:
        stored: bytes of all chunks and indexes.
        unreached: those of them that no checkpoint needs: of saves in progress, or debris.
        legible: whether all could be read. If not, nobody can say what deleting an epoch frees.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._sizes: dict[str, int] = {
            info.key: info.size for info in catalog.store.list(keys.ATTEMPTS) if keys.parse_content_key(info.key)
        }
        self._users: dict[str, set[int]] = defaultdict(set)
        self.legible = True
        for commit, manifest in catalog.manifests(catalog.committed()):
            try:
                if not isinstance(manifest, Manifest):
                    raise manifest
                for key in catalog.reach(manifest):
                    self._users[key].add(commit.epoch)
            except CorruptionError:
                self.legible = False
        self.stored = sum(self._sizes.values())
        self.unreached = sum(size for key, size in self._sizes.items() if key not in self._users)

    def freed_by(self, epochs: Collection[int]) -> dict[int, int]:
        """What deleting ``epochs`` gives back with each of them, oldest first. Nothing, where not all is legible."""
        freed = dict.fromkeys(sorted(epochs), 0)
        if self.legible:
            for key, users in self._users.items():
                if users <= freed.keys():
                    freed[max(users)] += self._sizes.get(key, 0)
        return freed


class Reclaim:
    """Frees space in one repository, as far as ``on_full`` and its policy allow."""

    def __init__(self, catalog: Catalog, prune: Prune, keep: Policy | PerRecord | None, on_full: OnFull) -> None:
        self._catalog = catalog
        self._prune = prune
        self._keep = keep
        self.on_full = on_full
        self.waited_for = False
        """Whether prunings wait for something that a full disk does not wait for: a copy in another tier."""

    def droppable(self) -> set[int]:
        """Epochs that the policy does not keep of those that exist."""
        if self._keep is None:
            return set()
        return set(self._prune(self._keep, dry_run=True, deep=False, at_need=True).removed)

    def deletable(self, epoch: int | None = None, *, deep: bool = False, at_need: bool = True) -> set[int]:
        """Epochs that may go when space is needed more than they are: all but those of P5, and ``epoch``."""
        return set(self._prune(_DropAllBut(epoch), dry_run=True, deep=deep, at_need=at_need).removed)

    def within_reach(self, epoch: int | None, holdings: Holdings) -> int:
        """Bytes that ``steps`` could give back at most."""
        if self.on_full == "raise":
            return 0
        epochs = self.droppable() | (self.deletable(epoch) if self.on_full == "oldest" else set())
        return sum(holdings.freed_by(epochs).values())

    def steps(self, epoch: int) -> Iterator[int]:
        """Free space step by step, each only when the one before was not enough. Yields the bytes that it freed.

        Nothing that fails here hides why space is needed: it is logged, and ends the steps.
        """
        if self.on_full == "raise":
            yield 0
            return
        try:
            freed = self.sweep()
            if self._keep is not None:
                # In full: until now a rotten byte in the newest has cost nothing.
                freed += self._told(self._prune(self._keep, deep=True))
            yield freed
            for at_need in (False, True) if self.waited_for else (True,):  # what is waited for goes last
                if at_need and self.waited_for and self._keep is not None:
                    yield self._told(self._prune(self._keep, deep=True, at_need=True))
                if self.on_full == "oldest":
                    for victim in sorted(self.deletable(epoch, deep=True, at_need=at_need)):
                        yield self._told(self._prune(_Drop(frozenset([victim])), deep=False, at_need=at_need))
        except Exception as error:  # noqa: BLE001 (also of a policy of the user's)
            log.warning("making room in %s failed: %s", self._catalog.store.traits.url, error)

    def sweep(self) -> int:
        """Remove what dead attempts left: those that said so, or whose process is gone, and what gc takes."""
        store = self._catalog.store
        freed = 0
        for sighting in read_leases(store):
            if seems_dead(sighting, sighting.modified):  # by its own word or its process, never by its silence
                freed += sum(
                    r.size for r in remove_attempt(self._catalog, sighting.attempt, "its save has ended").removed
                )
        return freed + gc(self._catalog).bytes_freed

    def _told(self, report: PruneReport) -> int:
        if report.removed:
            epochs = ", ".join(map(str, report.removed))
            log.warning("%s is full: deleted epoch %s (%s)", self._catalog.store.traits.url, epochs, self.on_full)
        return report.bytes_freed


def deletable_now(reclaim: Reclaim, catalog: Catalog, epoch: int | None) -> Mapping[int, int]:
    """Epochs that may be deleted and what each gives back; nothing where the store cannot tell now."""
    try:
        epochs = reclaim.deletable(epoch)
        return Holdings(catalog).freed_by(epochs) if epochs else {}
    except (CkptStoreError, OSError) as error:
        log.debug("what could be deleted is unknown: %s", error)
        return {}
