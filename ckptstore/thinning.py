"""Thinning: taking records out of an epoch that stays, for instance the optimizer of all but the newest.

To the store it is a replacement of the epoch by a new generation that has fewer records: the same lease, commit and
tidying up, so at every moment the epoch is there with all its records or without those that were dropped, complete
either way. Chunks are referred to, not moved; only indexes and the manifest are written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

import msgspec

from ckptstore import keys
from ckptstore.catalog import Catalog
from ckptstore.claim import Claim
from ckptstore.commit import Commit
from ckptstore.errors import CkptStoreError, StoreFullError
from ckptstore.fence import Fence
from ckptstore.lease import HeldLease
from ckptstore.manifest import ChunkRef, Manifest, RecordEntry
from ckptstore.reader import fetch
from ckptstore.sweep import remove_attempt

log = logging.getLogger("ckptstore")


def thin(
    catalog: Catalog,
    manifest: Manifest,
    dropped: Mapping[str, str],
    saved: float,
    *,
    if_damaged: bool = False,
    unless: Callable[[], bool] = lambda: False,
) -> Manifest:
    """Replace a checkpoint by one without the records of ``dropped`` (name → reason). At least one must stay.

    Args:
        saved: when the store got the checkpoint first; the new manifest tells it, because its own time is another.
        if_damaged: the manifest on the store may be damaged; ``manifest`` is what it was.
        unless: whether it is to be left alone after all; asked before the commit, and once more after.

    Raises:
        EpochExistsError: another process has replaced it meanwhile.
        TransactionError: it was deleted or marked meanwhile, or another process cleaned up. Nothing is lost.
        CorruptionError: an index is damaged.
        StoreError: the store failed; the old or the new generation is there.
    """
    attempt = keys.new_attempt()
    lease = HeldLease(catalog.store, attempt, manifest.epoch)
    claim = Claim(catalog, lease)
    step = Commit(catalog, lease, claim, Fence(catalog, ""))
    step.stands = lambda: claim.base_is_there() and not unless()
    try:
        claim.take_all_of(manifest, if_damaged=if_damaged)
        lease.start()
        entries, chunks = _carry_over(catalog, manifest, dropped, attempt)
        thinned = msgspec.structs.replace(
            manifest,
            generation=manifest.generation + 1,
            attempt=attempt,
            base=manifest.key,
            records=entries,
            attempts=tuple(sorted({attempt, *(chunk.attempt for chunk in chunks.values())})),
            bytes_state=sum(entry.bytes_state for entry in entries),
            left_out={**manifest.left_out, **dropped},
            saved=manifest.saved or saved,
            origin=manifest.first,  # a copy that has all records is still a copy of it
        )
        step.run(thinned, chunks.values())
    except BaseException as error:
        _give_up(catalog, lease, attempt, sent=step.sent, error=error)
        raise
    step.tidy_up(thinned)
    return thinned


def _carry_over(
    catalog: Catalog, manifest: Manifest, dropped: Collection[str], attempt: str
) -> tuple[tuple[RecordEntry, ...], dict[str, ChunkRef]]:
    """The records that stay, their indexes put anew under ``attempt``, and the chunks that they need."""
    chunks: dict[str, ChunkRef] = {}
    entries = []
    for entry in manifest.records:
        if entry.name in dropped:
            continue
        chunks.update((chunk.key, chunk) for chunk in catalog.index(entry).chunks)
        ours = msgspec.structs.replace(entry, attempt=attempt)
        catalog.store.put(ours.key, bytes(fetch(catalog.store, entry.key, entry.stored_length)), if_absent=True)
        entries.append(ours)
    return tuple(entries), chunks


def _give_up(catalog: Catalog, lease: HeldLease, attempt: str, *, sent: bool, error: BaseException) -> None:
    """Leave nothing behind; but once the manifest was sent it may still land, and then everything must stay."""
    try:
        lease.stop()
        if sent and not isinstance(error, StoreFullError):
            lease.abandon()
        else:
            remove_attempt(catalog, attempt, "its thinning was given up")
    except (CkptStoreError, OSError) as second:
        log.warning("cleaning up after a thinning that failed failed too and is left to gc: %s", second)
