"""Commit: from "all its objects are on the store" to "the epoch exists, durably" (docs/format.md sections 6.1, 7 to 9).

    renew the lease → (if it lapsed: prove what we refer to) → put the manifest if absent → look once more → tidy up

The look that follows the put is what makes a commit sound beside others: whoever came between our last look and the
put is seen by us, or has seen our manifest. What fails it withdraws the manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from ckptstore import keys, quarantine
from ckptstore.catalog import Catalog, Committed
from ckptstore.claim import Claim
from ckptstore.errors import (
    CkptStoreError,
    CorruptionError,
    DeadlineError,
    EpochExistsError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    RetriesExhaustedError,
    StoreError,
    StoreFullError,
    TransactionError,
    TransientError,
)
from ckptstore.fence import Fence
from ckptstore.lease import LAPSE, HeldLease
from ckptstore.manifest import ChunkRef, Manifest, encode_manifest
from ckptstore.pipeline import side_by_side
from ckptstore.sweep import delete_commits, remove_attempts

log = logging.getLogger("ckptstore")

_NO_ANSWER = (TransientError, RetriesExhaustedError, DeadlineError)


class Commit:
    """The commit of one attempt. ``run`` it once; then ``tidy_up``."""

    def __init__(self, catalog: Catalog, lease: HeldLease, claim: Claim, fence: Fence) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._lease = lease
        self._claim = claim
        self._fence = fence
        self.sent = False
        """Whether the manifest may be there, or may still land, whatever interrupts us."""
        self.stands: Callable[[], bool] = lambda: True
        """Whether what this one is to take the place of is still there: asked before the put, and after."""

    def run(self, manifest: Manifest, chunks: Collection[ChunkRef]) -> None:
        """Make the checkpoint exist. ``chunks`` are all that it needs, whoever sent them.

        Raises:
            EpochExistsError: another writer committed this epoch first.
            FencedError: the run has a newer writer; nothing was committed.
            TransactionError: swept away because it was silent for too long; nothing was committed.
            OutcomeUnknownError: the answer to the put was lost and could not be read back.
            StoreError: nothing was committed.
        """
        data = encode_manifest(manifest)
        if self._lease.renew_if_due():  # we stood still: who knows what happened
            self._fence.prove()
        if self._lease.lapsed:
            self._claim.prove_flags(manifest)
            self._claim.prove_objects(manifest, chunks)
        if not self.stands():
            raise _was_changed(manifest)
        self._put(manifest, data)
        self._look_once_more(manifest, chunks)

    def _put(self, manifest: Manifest, data: bytes) -> None:
        """The commit. "Exists" is read back by the store, so that our own earlier try is not a stranger's."""
        self.sent = True
        try:
            self._store.put(manifest.key, data, if_absent=True)
        except ObjectExistsError as error:
            self.sent = False
            raise epoch_exists(manifest.epoch, manifest.key) from error
        except (*_NO_ANSWER, StoreFullError) as error:  # full: but an earlier try may have had its effect
            self._settle(manifest, error)

    def _settle(self, manifest: Manifest, error: StoreError) -> None:
        """No answer to the commit: it has happened exactly if the manifest is there and ours."""
        try:
            found = self._catalog.manifest(_commit_of(manifest))
        except ObjectNotFoundError:
            self.sent = not isinstance(error, StoreFullError)
            raise error from error.__cause__
        except (StoreError, CorruptionError) as again:
            raise OutcomeUnknownError(
                f"the answer to the commit of epoch {manifest.epoch} was lost and {manifest.key} could not be read "
                f"back ({again}). Look whether the epoch is there before saving it again",
                key=manifest.key,
                epoch=manifest.epoch,
            ) from error
        if found.attempt != manifest.attempt:
            self.sent = False
            raise epoch_exists(manifest.epoch, manifest.key) from error
        log.warning("the answer to the commit of epoch %d was lost; read back: it is committed", manifest.epoch)

    def _look_once_more(self, manifest: Manifest, chunks: Collection[ChunkRef]) -> None:
        """Withdraw the manifest if a sweeper, a newer generation or writer came between our last look and the put."""
        try:
            error = self._too_late(manifest, chunks)
            if error is not None:
                if self._catalog.exists(manifest):  # the epoch may have been deleted and saved anew by another
                    self._store.delete(manifest.key)
                self.sent = False
        except StoreError as failure:
            raise OutcomeUnknownError(
                f"epoch {manifest.epoch} was committed, but the look that must follow failed ({failure}). "
                "Look whether the epoch is there before saving it again",
                key=manifest.key,
                epoch=manifest.epoch,
            ) from failure
        if error is not None:
            raise error

    def _too_late(self, manifest: Manifest, chunks: Collection[ChunkRef]) -> CkptStoreError | None:
        times = self._catalog.commit_times(manifest.epoch)
        newest = max(times, default=None)
        if newest is not None and newest.generation > manifest.generation:
            return epoch_exists(manifest.epoch, newest.key)
        committed = times.get(_commit_of(manifest))
        if committed is None:
            return None  # it was committed, and another process has deleted or pruned it since
        if not self.stands():
            return _was_changed(manifest)
        try:
            self._fence.prove_at(committed)
            self._claim.prove_own_flag()
            # No flag: either no sweeper has begun, and then it will see our manifest; or one has come to its end, and
            # then what it took is gone by now. (A gc with a short grace does not wait for a lapse.)
            if committed - self._lease.renewed > LAPSE:
                self._claim.prove_flags(manifest)
            self._claim.prove_objects(manifest, chunks)
        except TransactionError as error:
            return error
        return None

    def tidy_up(self, manifest: Manifest) -> None:
        """The checkpoint is durable: nothing that fails here may turn the save into a failure."""
        epoch = manifest.epoch
        try:
            self._lease.release()
            # Theirs would keep what was adopted from being swept, and the manifest reaches what they have written.
            if self._claim.partners:
                leases = map(keys.lease_key, self._claim.partners)
                side_by_side(self._store.traits.concurrency, self._store.delete, leases)
            if self._claim.adopted:
                remove_attempts(self._catalog, self._claim.adopted, f"epoch {epoch} is committed")
            if manifest.generation > 1:
                there = self._catalog.committed(epoch)
                # Where this one is not there any more, the lower numbers may have been used again.
                older = [c for c in there if c.generation < manifest.generation and there[-1] >= _commit_of(manifest)]
                delete_commits(self._catalog, older, f"epoch {epoch} was replaced")
                quarantine.remove(self._store, epoch, below=manifest.generation)
        except Exception as error:  # noqa: BLE001 (whatever it is: the epoch is committed)
            log.warning("epoch %d is committed; tidying up after it failed and is left to gc: %s", epoch, error)


def _commit_of(manifest: Manifest) -> Committed:
    return Committed(manifest.epoch, manifest.generation)


def _was_changed(manifest: Manifest) -> TransactionError:
    return TransactionError(
        f"epoch {manifest.epoch} was deleted, replaced or marked by another process meanwhile: it stays as it is now",
        key=manifest.key,
        epoch=manifest.epoch,
    )


def epoch_exists(epoch: int, key: str) -> EpochExistsError:
    """The error of whoever comes second."""
    return EpochExistsError(
        f"epoch {epoch} is already committed ({key}): save another epoch, or pass replace=True", key=key, epoch=epoch
    )
