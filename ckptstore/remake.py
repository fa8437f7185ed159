"""Remake: commit a checkpoint anew, as the next generation of its epoch, because its manifest or more is beyond repair.

That must be the same checkpoint. The key of a damaged manifest does not tell: it may have been used again since the
copy was made. So a copy counts only if what is left here proves it: the damaged bytes name the attempt of the copy, or
that attempt is the only one here whose records nobody else accounts for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.copying import CopyTransaction
from ckptstore.errors import CorruptionError, ObjectNotFoundError
from ckptstore.fence import Fence
from ckptstore.lease import read_leases
from ckptstore.manifest import MAX_MANIFEST, Manifest, decode_manifest
from ckptstore.pipeline import Meter
from ckptstore.spares import Spares, saved_at
from ckptstore.thinning import thin
from ckptstore.throttle import Throttle
from ckptstore.transaction import Plan

_ATTEMPT = re.compile(rb"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Copied:
    """A manifest that was found in a plain copy of this repository, and when the store had it first."""

    manifest: Manifest
    source: str
    saved: float


class Remake:
    """Finds what a damaged manifest was, and commits checkpoints anew."""

    def __init__(self, catalog: Catalog, repository: str, spares: Spares) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._repository = repository
        self._spares = spares
        self._unclaimed: frozenset[str] | None = None

    def same_manifest(self, commit: Committed) -> Copied | None:
        """The manifest itself, from a plain copy of this repository: what it needs lies here under the same names."""
        for other, found in self._spares.under(commit.epoch):
            same = found.key == commit.key and found.repository == self._repository
            if same and self._was(commit, found.attempt):
                return Copied(found, f"{other.store.traits.url}/{found.key}", saved_at(other, found))
        return None

    def same_content(self, commit: Committed) -> Iterator[tuple[Catalog, Manifest]]:
        """Copies of the checkpoint, the manifest of which cannot be read here."""
        for other, found in self._spares.under(commit.epoch):
            if self._was(commit, found.first.attempt):
                yield other, found

    def like(self, manifest: Manifest) -> Iterator[tuple[Catalog, Manifest]]:
        """Copies of it elsewhere that have all the records that it has here; of others they are shorn."""
        for other, twin in self._spares.twins(manifest):
            records = tuple(twin.record(entry.name) for entry in manifest.records)
            if all(records):
                yield other, msgspec.structs.replace(twin, records=records, left_out=manifest.left_out)

    def again(self, copied: Copied) -> Manifest:
        """Commit it under the next generation; chunks stay where they are. Errors as of ``thin``."""
        return thin(self._catalog, copied.manifest, {}, copied.saved, if_damaged=True)

    def left(self, commit: Committed) -> bytes | None:
        """The bytes of a damaged manifest; None if it is gone, or another one is there that can be read."""
        try:
            left = self._store.get(commit.key, 0, MAX_MANIFEST + 1)
        except ObjectNotFoundError:
            return None
        try:
            decode_manifest(left, commit.key)
        except CorruptionError:
            return left
        return None

    def copy(self, commit: Committed, stands: Callable[[], bool], other: Catalog, twin: Manifest) -> Manifest:
        """Commit a copy under the next generation, all of it sent anew and read back before the commit.

        Args:
            commit, stands: what it is to take the place of, and whether that is still there; else nothing is committed.

        Raises:
            CorruptionError: the copy is damaged, or what was sent reads back wrong. Nothing was committed.
            EpochExistsError, TransactionError: the epoch was replaced or deleted meanwhile.
            StoreError: one of the stores failed; nothing was committed.
        """
        plan = Plan(
            epoch=twin.epoch,
            metadata=twin.metadata,
            replace=True,
            chunk_size=0,
            codec="raw",
            repository=self._repository,
            fence=Fence(self._catalog, ""),
        )
        # Of no other epoch than its own, which is no base: what was not read now might be rotten.
        txn = CopyTransaction(self._catalog, plan, [commit], other, twin, Throttle(None), Meter(None, 0))
        txn.only_while(stands)
        with txn:
            txn.copy()
            txn.prove()
            made: Manifest = txn.commit()
        return made

    def _was(self, commit: Committed, attempt: str) -> bool:
        """Whether the manifest that is damaged was that of this attempt (or of a copy or remake of it)."""
        named = {match.decode() for match in _ATTEMPT.findall(self.left(commit) or b"")}
        return attempt in named or self._all_unclaimed() == {attempt}

    def _all_unclaimed(self) -> frozenset[str]:
        """Attempts with records here that belong to no manifest that can be read, and to no save under way."""
        if self._unclaimed is None:
            found = {
                content[0]
                for content in (keys.parse_content_key(info.key) for info in self._store.list(keys.ATTEMPTS))
                if content is not None and content[1] == "records"
            }
            for _, manifest in self._catalog.manifests(self._catalog.committed()):
                if isinstance(manifest, Manifest):
                    found.difference_update(entry.attempt for entry in manifest.records)
            self._unclaimed = frozenset(found - {sighting.attempt for sighting in read_leases(self._store)})
        return self._unclaimed
