"""Hold: an epoch that somebody reads for longer is not pruned under him.

A reader's lease is a lease like a writer's, with the state "reading": it names the checkpoint as its base and the
attempts whose objects that needs. It is put, *then* the manifest is looked for. A prune looks for such leases right
before it deletes; and if it deletes the manifest in the very moment in which the lease is put, then it lists the leases
after that, as every sweep does (``sweep.py``), and spares the objects. So whoever holds an epoch can read all of it, in
every case. A reader that dies renews its lease no more; by the store's clock it is dead after ``EXPIRY``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import CkptStoreError, StoreFullError, TransactionError
from ckptstore.lease import EXPIRY, READING, HeldLease, Sighting, read_leases
from ckptstore.manifest import Manifest
from ckptstore.sweep import store_time

log = logging.getLogger("ckptstore")


class ReaderLease(HeldLease):
    """The lease of a reader. If somebody takes it away, it is put again: a reader has nothing to lose by it."""

    def __init__(self, catalog: Catalog, manifest: Manifest, reason: str) -> None:
        super().__init__(catalog.store, keys.new_attempt(), manifest.epoch)
        self.lease = msgspec.structs.replace(self.lease, state=READING, reason=reason)
        self._catalog = catalog
        self._manifest = manifest

    def take(self) -> bool:
        """Put it, then look: whether the checkpoint is still committed."""
        self.claim(self._manifest.key, self._manifest.attempts)
        return self._catalog.exists(self._manifest)

    def renew(self) -> None:
        try:
            super().renew()
        except TransactionError:
            log.warning("the lease of a reader of epoch %d was taken away: it is put again", self._manifest.epoch)
            if not self.take():
                log.warning("epoch %d is held, but another process has deleted it", self._manifest.epoch)


@contextmanager
def held(catalog: Catalog, manifest: Manifest, reason: str) -> Iterator[bool]:
    """Hold a checkpoint while the block runs. Gives False, and holds nothing, if it is not committed any more."""
    lease = ReaderLease(catalog, manifest, reason)
    try:
        there = lease.take()
        if there:
            lease.start()
        yield there
    finally:
        try:
            lease.release()
        except (CkptStoreError, OSError) as error:
            log.warning("the lease of a reader is left to expire: %s", error)


def holds(catalog: Catalog, *, writes: bool) -> dict[Committed, str]:
    """What is held now, and by whom: all live leases of readers.

    Args:
        writes: the store may be asked for its time, which takes a put; else the local clock tells which are dead.
    """
    sightings = [s for s in read_leases(catalog.store) if s.lease is not None and s.lease.state == READING]
    if not sightings:
        return {}
    try:
        now = store_time(catalog.store) if writes else time.time()
    except StoreFullError:  # no room for a probe: then all count
        now = None
    found: dict[Committed, str] = {}
    for sighting in sightings:
        if now is None or abs(now - sighting.modified) <= EXPIRY:
            found.update(_held_by(sighting))
    return found


def _held_by(sighting: Sighting) -> Mapping[Committed, str]:
    lease = sighting.lease
    pair = keys.parse_manifest_key(lease.base) if lease is not None and lease.base is not None else None
    if lease is None or pair is None:
        return {}
    why = f": {lease.reason}" if lease.reason else ""
    return {Committed(*pair): f"held by a reader on {lease.host} (process {lease.pid}){why}"}
