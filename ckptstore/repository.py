"""Repository: all checkpoints of a run, at one URL. The front door."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

import msgspec

from ckptstore import keys, retention
from ckptstore.catalog import Catalog
from ckptstore.checkpoint import Checkpoint, metadata_of
from ckptstore.chunks import CHUNK_SIZE
from ckptstore.errors import (
    CorruptionError,
    EpochNotFoundError,
    FormatError,
    InvalidArgumentError,
    InvalidRecordError,
    ObjectExistsError,
    ObjectNotFoundError,
    RepositoryNotFoundError,
)
from ckptstore.lease import EXPIRY
from ckptstore.manifest import (
    MAX_MARKER,
    MAX_RECORDS,
    Manifest,
    Marker,
    check_epoch,
    check_record_name,
    decode_marker,
    encode_marker,
    writer_version,
)
from ckptstore.pace import Pace
from ckptstore.pipeline import Meter, Progress
from ckptstore.retention import GcReport, Policy, PruneReport
from ckptstore.stores import Store, probe_conditional_put
from ckptstore.sweep import delete_commits
from ckptstore.transaction import Plan, Transaction
from ckptstore.tree import flatten
from ckptstore.verify import VerifyReport, verify
from ckptstore.writer import Tally

log = logging.getLogger("ckptstore")

MAX_METADATA = 8 * 1024 * 1024
_CODECS = ("auto", "raw", "max")


class Repository:
    """All checkpoints of a run. Made by ``ckptstore.open``; close it, or use it as a context manager."""

    def __init__(
        self,
        store: Store,
        *,
        keep: Policy | None = None,
        create: bool = True,
        unsafe_single_writer: bool = False,
        chunk_size: int = CHUNK_SIZE,
        codec: str = "auto",
    ) -> None:
        self.store = store
        """The store under it, with its wrappers."""
        self._keep = check_policy(keep)
        self._unsafe = unsafe_single_writer
        self._chunk_size = check_chunk_size(chunk_size)
        self._codec = check_codec(codec)
        self._catalog = Catalog(store)
        self._pace = Pace()
        self._resumed: set[int] = set()
        self._has_saved = False
        self._may_write = False
        marker = self._read_marker()
        if marker is None:
            if not create:
                raise RepositoryNotFoundError(
                    f"there is no repository at {store.traits.url}: check the URL, or open it with create=True"
                )
            marker = self._create()
        self.id = marker.repository
        """32 hexadecimal digits that name this repository wherever it is copied to."""

    def __repr__(self) -> str:
        return f"<Repository {self.url}>"

    @property
    def url(self) -> str:
        """Where it is. Never holds a secret."""
        return self.store.traits.url

    # ---- saving --------------------------------------------------------------------------------------------

    def save(
        self,
        epoch: int,
        records: Mapping[str, object],
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Save a checkpoint: all records, durably, or nothing.

        Args:
            epoch: an epoch or step number, 0 to 2**63 - 1.
            records: a state by record name, e.g. ``{"model": model.state_dict(), ...}``.
            metadata: plain values about it, e.g. metrics. Stored in the manifest, returned exactly.
            replace: an existing epoch is replaced; its old content stays until the new one is committed.
            progress: called with ``(bytes done, bytes in all)``, from worker threads.

        Returns:
            The committed checkpoint; its ``report`` tells what was moved.

        Raises:
            InvalidRecordError: something cannot be stored exactly. Raised before anything is written.
            EpochExistsError: the epoch is committed already, or another writer was first.
            StoreError: the store failed; every earlier epoch is as it was, and the save can be called again.
            TransactionError: the attempt was cut off; save again.
        """
        if not _is_mapping(records) or not 0 < len(records) <= MAX_RECORDS:
            raise InvalidRecordError(f"records must be a dict of 1 to {MAX_RECORDS} records, e.g. {{'model': state}}")
        states = {check_record_name(name): state for name, state in list(records.items())}
        flats = {name: flatten(state, name) for name, state in states.items()}
        total = sum(array.nbytes for flat in flats.values() for array in flat.arrays)
        with self.begin(epoch, metadata, replace, progress=progress, total=total) as txn:
            for name, state in states.items():
                txn.write_flat(name, flats[name], live=state)
            checkpoint: Checkpoint = txn.commit()
        return checkpoint

    def begin(
        self,
        epoch: int,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        *,
        progress: Progress | None = None,
        total: int = 0,
    ) -> Transaction:
        """Begin a checkpoint that is written record by record.

        Use it as a context manager: leaving the block commits, an exception aborts. ``progress`` is called with
        ``(bytes done, total)``; ``total`` is yours to give, because the records are not known yet.

        Raises:
            EpochExistsError, InvalidArgumentError, InvalidRecordError, StoreError: before anything was committed.
        """
        number = check_epoch(epoch)
        skeleton = _check_metadata(metadata)
        commits = self._catalog.committed()
        if not (commits and self._has_saved):  # a listing with commits shows as well that the place has not vanished
            self._require_marker(restore=True)
        self._prepare_to_write()
        plan = Plan(number, skeleton, replace, self._chunk_size, self._codec, self.id, pace=self._pace)
        return Transaction(self._catalog, plan, commits, self._committed, Meter(progress, total))

    # ---- reading -------------------------------------------------------------------------------------------

    def latest(self, deep: bool = False, progress: Progress | None = None) -> Checkpoint | None:
        """The newest intact checkpoint; None only if the repository is proven to be empty.

        Steps back over damaged epochs; ``.skipped`` of the result tells which and why. By default manifests and indexes
        are verified and chunks looked up by name and size; ``deep`` reads every byte. (Loading verifies every
        byte in any case.)

        Raises:
            CorruptionError: there are epochs, but none is intact.
            FormatError: the newest was written by a newer version.
            RepositoryNotFoundError: the repository has vanished (is the mount there?).
            StoreError: the store did not answer. Never taken for "no checkpoint".
        """
        manifest, skipped = self._catalog.newest_intact(deep=deep, progress=progress)
        if manifest is not None:
            for step in skipped:
                log.warning("skipped %s", step)
            return self._checkpoint(manifest, skipped=skipped)
        if skipped:
            reasons = "; ".join(map(str, skipped))
            raise CorruptionError(f"no epoch in {self.url} is intact: {reasons}", key=skipped[0].key)
        self._require_marker()
        if self._catalog.committed():  # a listing beside a replace can miss both generations: look again
            return self.latest(deep, progress)
        return None

    def checkpoint(self, epoch: int) -> Checkpoint:
        """The checkpoint of one epoch (its newest generation).

        Raises:
            EpochNotFoundError: there is none.
            CorruptionError: its manifest is damaged.
        """
        number = check_epoch(epoch)
        for _ in range(3):  # a generation may be replaced between the listing and the read
            commits = self._catalog.committed(number)
            if not commits:
                continue
            try:
                return self._checkpoint(self._catalog.manifest(commits[-1]))
            except ObjectNotFoundError:
                continue
        self._require_marker()
        raise EpochNotFoundError(f"there is no epoch {number} in {self.url}", epoch=number)

    def epochs(self) -> list[int]:
        """The numbers of all committed epochs, ascending. One listing."""
        commits = self._catalog.committed()
        if not commits:
            self._require_marker()
            commits = self._catalog.committed()
        return sorted({commit.epoch for commit in commits})

    def verify(self, epoch: int | None = None, deep: bool = True, progress: Progress | None = None) -> VerifyReport:
        """Check one epoch or all: with ``deep`` every byte, else names and sizes. Damage is reported, not raised."""
        number = None if epoch is None else check_epoch(epoch)
        if not self._catalog.committed(number):
            self._require_marker()
        return verify(self._catalog, number, deep=deep, progress=progress)

    # ---- removing ------------------------------------------------------------------------------------------

    def delete(self, epoch: int) -> None:
        """Delete an epoch, whatever it is: also the newest, also a damaged one.

        Raises:
            EpochNotFoundError: there is none.
        """
        number = check_epoch(epoch)
        commits = self._catalog.committed(number)
        if not commits:
            self._require_marker()
            raise EpochNotFoundError(f"there is no epoch {number} in {self.url}", epoch=number)
        # A manifest of a newer version hides what it needs: that must stop the delete before it begins.
        self._catalog.manifests(self._catalog.committed())
        delete_commits(self._catalog, commits, "its epoch was deleted")

    def prune(self, policy: Policy | None = None, dry_run: bool = False, deep: bool = True) -> PruneReport:
        """Delete the epochs that ``policy`` (default: the ``keep`` of ``open``) does not keep.

        Never deletes the newest intact epoch, nor those that this process loaded before its first save: the run
        resumed from them (P5).

        Args:
            deep: read the newest epoch in full, to be sure that it is intact before others go. (The pruning that
                follows a save reads only what the new epoch took over from earlier ones, each chunk once a process.)
        """
        chosen = check_policy(policy) if policy is not None else self._keep
        if chosen is None:
            raise InvalidArgumentError(
                "prune needs a policy, e.g. repo.prune(KeepLast(3)) or ckptstore.open(.., keep=..)"
            )
        self._require_marker()
        protected = dict.fromkeys(self._resumed, "the run resumed from it")
        return retention.prune(
            self._catalog, chosen, protected=protected, metadata=metadata_of, deep=deep, dry_run=dry_run
        )

    def gc(self, grace: float = EXPIRY, dry_run: bool = False) -> GcReport:
        """Remove debris: what interrupted saves and deletes left and no checkpoint reaches.

        Args:
            grace: seconds after its last sign of life until an unfinished save counts as dead.
        """
        self._require_marker()
        return retention.gc(self._catalog, grace=grace, dry_run=dry_run)

    def close(self) -> None:
        """Release connections. May be called twice."""
        self.store.close()

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------

    def _checkpoint(self, manifest: Manifest, **more: Any) -> Checkpoint:
        return Checkpoint(self._catalog, manifest, on_load=self._mark_resumed, **more)

    def _mark_resumed(self, epoch: int) -> None:
        if not self._has_saved:
            self._resumed.add(epoch)

    def _committed(self, manifest: Manifest, tally: Tally) -> Checkpoint:
        """A save has committed. Only now may retention run, and it cannot fail the save (P5)."""
        self._has_saved = True
        if self._keep is not None:
            try:
                self.prune(self._keep, deep=False)
            except Exception as error:  # noqa: BLE001 (whatever it is, also in a policy of the user's: the epoch is committed)
                log.warning("epoch %d is committed; pruning failed and will be tried again: %r", manifest.epoch, error)
        return self._checkpoint(manifest, report=tally)

    def _require_marker(self, *, restore: bool = False) -> None:
        """The repository is still there; if only its marker was lost, ``restore`` puts it back."""
        try:
            self.store.info(keys.MARKER)
        except ObjectNotFoundError:
            marker = self._read_marker()
            if marker is None or marker.repository != self.id:
                raise RepositoryNotFoundError(
                    f"the repository at {self.url} has vanished: is the mount or bucket still there?"
                ) from None
            if restore:
                self.store.put(keys.MARKER, encode_marker(marker), if_absent=True)

    def _read_marker(self) -> Marker | None:
        """The marker; made up from a manifest if it alone is lost. None if there is no repository."""
        try:
            return decode_marker(self.store.get(keys.MARKER, 0, MAX_MARKER + 1))
        except ObjectNotFoundError:
            problem: CorruptionError | None = None
        except CorruptionError as error:
            problem = error
        for _, manifest in self._catalog.manifests(reversed(self._catalog.committed())):
            if isinstance(manifest, Manifest):
                log.warning("%s is lost or damaged; the manifests say which repository this is", keys.MARKER)
                return Marker(repository=manifest.repository, created=manifest.created, writer=manifest.writer)
        if problem is not None:
            raise problem
        return None

    def _create(self) -> Marker:
        """Make the repository. Refuses a place that holds something else."""
        for info in self.store.list():
            if not keys.is_ours(info.key):
                raise FormatError(
                    f"{self.url} is no repository and holds something else ({info.key}): choose an empty place",
                    key=info.key,
                )
        self._prepare_to_write()
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        marker = Marker(repository=uuid.uuid4().hex, created=now, writer=writer_version())
        try:
            self.store.put(keys.MARKER, encode_marker(marker), if_absent=True)
        except ObjectExistsError:
            found = self._read_marker()  # another process made it in the same moment
            assert found is not None
            return found
        return marker

    def _prepare_to_write(self) -> None:
        """Before the first write: is create-only really create-only here? Some servers accept and ignore it."""
        if self._may_write:
            return
        if not self._unsafe and self.store.traits.conditional_put is None and not probe_conditional_put(self.store):
            raise FormatError(
                f"{self.url}: this server accepts conditional puts but ignores them, so two writers could overwrite "
                "each other's commit. Use another server, or pass unsafe_single_writer=True if there is only one writer"
            )
        self._may_write = True


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _check_metadata(metadata: Mapping[str, Any] | None) -> Any:
    if metadata is None:
        metadata = {}
    if not _is_mapping(metadata) or not all(isinstance(key, str) for key in metadata):
        raise InvalidRecordError("metadata must be a dict with str keys")
    flat = flatten(dict(metadata), "metadata")
    if flat.arrays:
        raise InvalidRecordError("metadata holds an array: put it into a record, or convert it to plain numbers")
    if len(msgspec.json.encode(flat.skeleton)) > MAX_METADATA:
        raise InvalidRecordError(f"metadata takes more than {MAX_METADATA} bytes: put it into a record")
    return flat.skeleton


def check_policy(keep: object) -> Policy | None:
    """``keep``, if it is a policy or None. InvalidArgumentError otherwise."""
    if keep is not None and not isinstance(keep, Policy):
        raise InvalidArgumentError(f"keep must be a policy such as KeepLast(3), not {keep!r}")
    return keep


def check_chunk_size(chunk_size: int) -> int:
    """``chunk_size``, if it is 64 KiB to 64 MiB. InvalidArgumentError otherwise."""
    if type(chunk_size) is not int or not 64 * 1024 <= chunk_size <= 64 * 1024 * 1024:
        raise InvalidArgumentError(f"chunk_size must be 64 KiB to 64 MiB, not {chunk_size!r}")
    return chunk_size


def check_codec(codec: str) -> str:
    """``codec``, if there is one of that name. InvalidArgumentError otherwise."""
    if codec not in _CODECS:
        raise InvalidArgumentError(f"codec must be one of {_CODECS}, not {codec!r}")
    return codec
