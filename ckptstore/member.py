"""Member: a rank that is not the coordinator, from when it has written all to the outcome. See ``meeting.py``."""

from __future__ import annotations

from collections.abc import Callable

from ckptstore import keys, meeting
from ckptstore.catalog import Catalog
from ckptstore.commit import epoch_exists
from ckptstore.errors import (
    InvalidArgumentError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    TransactionError,
)
from ckptstore.lease import SILENCE, HeldLease, Sighting, clock, is_condemned, process_is_gone, read_leases
from ckptstore.manifest import MAX_LEASE, Lease, Manifest, decode_lease
from ckptstore.meeting import Signs, Waiting, error_of, outcome_unknown
from ckptstore.parts import MAX_OUTCOME, Outcome, decode_outcome
from ckptstore.patience import current
from ckptstore.sweep import condemn

SETTLE = 3.0  # seconds in which the last request of a process that was killed has had its effect, or never will


class Member(Waiting):
    """A rank that is not the coordinator, from when it has written all (or has failed) to the outcome."""

    def __init__(
        self, catalog: Catalog, lease: HeldLease, timeout: float, check: Callable[[], None], generation: int = 1
    ) -> None:
        super().__init__(catalog, lease, timeout, check)
        self._generation = generation
        self.gave = False
        """Whether the coordinator may have its part: from then on it alone decides."""
        self._several = False

    def find(self) -> str:
        """The attempt of the coordinator.

        Raises:
            RanksFailedError: it has failed, or does not come.
            EpochExistsError: others have committed the epoch meanwhile, so that it never comes.
        """
        while True:
            found = self.look_for_coordinator()
            if found is not None:
                return found
            for commit in self._catalog.committed(self._epoch):
                if commit.generation >= self._generation:
                    raise epoch_exists(self._epoch, commit.key)
            gone = None if self._several else meeting.process.is_gone(self._rank.group, 0)
            if gone is not None:
                raise self.failed({0: gone})
            if self._is_over:
                raise self.failed({0: self._why_not_there()}, of_the_store=True)
            self._wait()

    def _why_not_there(self) -> str:
        if self._several:
            return f"several processes call themselves rank 0 of group {self._rank.group!r}"
        why = f"has not begun to save epoch {self._epoch} in group {self._rank.group!r} after {self._timeout:g} seconds"
        if self._generation > 1:
            why += " (the epoch exists: pass replace=True on all ranks or on none)"
        return why

    def look_for_coordinator(self) -> str | None:
        """The attempt of the coordinator, if it is there now. Raises how it failed, if this rank has missed that."""

        prefix = keys.ranks_prefix(self._epoch) + f"{0:04x}"
        found = [
            s
            for s in read_leases(self._store, prefix, lambda attempt, _: not self._has_heard(attempt))
            if self._is_same(s.lease)
        ]
        now = self._lease.now()
        live = [s for s in found if s.lease is not None and self._ended(s.lease, now - s.modified) is None]
        self._several = len(live) > 1
        if len(live) == 1:
            lease = live[0].lease
            assert lease is not None
            self._check_size(lease)
            meeting.process.meet(self._rank.group, 0, lease)
            return live[0].attempt
        for sighting in found if not live else ():
            if sighting.lease is not None and self._is_news(sighting):
                self._hear(sighting.attempt)
                self._raise_end_of(sighting, sighting.lease, now)
        return None

    def _raise_end_of(self, sighting: Sighting, lease: Lease, now: float) -> None:
        """A coordinator has ended without this rank: raise why, unless this rank knows."""
        outcome = self._read_outcome(sighting.attempt)
        if outcome is None:
            raise self.failed({0: self._ended(lease, now - sighting.modified) or "has failed"})
        mine = self._rank in meeting.process.untold and str(self._rank.rank) in outcome.ranks
        meeting.process.untold.discard(self._rank)
        if outcome.error and not mine:
            raise error_of(outcome)

    def _ended(self, lease: Lease, age: float) -> str | None:
        """Why this is no coordinator that one can join, or None."""
        if lease.state == "abandoned":
            return lease.reason or "has given the save up"
        if age > SILENCE:
            return f"no sign of life for {age:.0f} seconds ({lease.pid} on {lease.host})"
        return f"its process ({lease.pid} on {lease.host}) is gone" if process_is_gone(lease) else None

    def _check_size(self, lease: Lease) -> None:
        size = lease.rank.world_size if lease.rank is not None else self._rank.world_size
        if size != self._rank.world_size:
            raise InvalidArgumentError(
                f"rank 0 of group {self._rank.group!r} saves epoch {self._epoch} with world_size={size}, "
                f"rank {self._rank.rank} with {self._rank.world_size}",
                epoch=self._epoch,
            )

    def give(self, coordinator: str, part: bytes) -> None:
        """Put the part. TransactionError if another process gave one as the same rank."""
        self.gave = True
        meeting.process.untold.discard(self._rank)
        try:
            self._store.put(keys.part_key(coordinator, self._rank.rank), part, if_absent=True)
        except ObjectExistsError as error:
            raise TransactionError(
                f"another process has saved epoch {self._epoch} as rank {self._rank.rank} of group "
                f"{self._rank.group!r}: two launches must not have the same group",
                key=error.key,
                epoch=self._epoch,
            ) from error

    def outcome(self, coordinator: str) -> Manifest:
        """Wait until it is known what has become of the attempt of the coordinator; the manifest, if it is committed.

        Raises:
            EpochExistsError, FencedError: the coordinator met that, and nothing was committed.
            RanksFailedError: nothing was committed, nor will be.
            OutcomeUnknownError: the coordinator is silent, and may have committed.
        """
        signs = Signs()
        last: Lease | None = None
        while True:
            lease = self._read_lease(coordinator)
            if lease is None or lease.state == "abandoned":
                self._hear(coordinator)
                return self._end_of(coordinator, lease, last)
            last, death = lease, signs.death(lease)
            committing = self._lease.lease.attempt in lease.uses
            if death is not None or clock() >= self._end + (self._timeout if committing else 0.0):
                self._hear(coordinator)
                return self._judge(coordinator, lease, death)
            try:
                self._wait()
            except TransactionError as error:  # told to end: but the others go on, with the part that they have
                raise outcome_unknown(self._epoch, "the process of this rank was told to end") from error

    def _end_of(self, coordinator: str, lease: Lease | None, last: Lease | None) -> Manifest:
        """Its lease is gone, or given up: the outcome was put before, unless it could not be.

        Or it works still: a gc has taken it for dead, or a signal has come while it was about to commit.
        """
        outcome = self._read_outcome(coordinator)
        if outcome is not None:
            return self._manifest_of(outcome)
        why = lease.reason if lease is not None else "was cleaned up by another process"
        return self._judge(coordinator, lease or last, why or "has given the save up", ended=True)

    def _manifest_of(self, outcome: Outcome) -> Manifest:
        manifest = None
        if outcome.error in ("", OutcomeUnknownError.__name__):
            manifest = self._committed(outcome.attempt)
        if manifest is not None:
            return manifest
        if outcome.error:
            raise error_of(outcome)
        raise TransactionError(
            f"epoch {self._epoch} was committed, and deleted or replaced by another process since", epoch=self._epoch
        )

    def _judge(self, coordinator: str, lease: Lease | None, death: str | None, *, ended: bool = False) -> Manifest:
        """The coordinator is dead, or too slow: find out whether it has committed, and see that it will not any more.

        Its part, emptied, does that: a coordinator looks at all of them after it has put its manifest, and withdraws
        that. No gc can undo it, as it may remove the flag, and no heartbeat, as it may put a lease again that a gc has
        removed. (The flag only stops a slow coordinator earlier.) What a dead one has put stays, and what it sent last
        may still land: hence a while of looking. A manifest that is there may be withdrawn yet, for what another rank
        or a gc has done: hence the same while for a coordinator that may live to tell.

        Args:
            ended: its lease says so, or is gone.
        """
        never = self._committed(coordinator) is None
        ranks = {0: death or ""}
        if never:
            ranks = ranks if death is not None else self._not_ready(coordinator)
            if lease is None or lease.state != "abandoned":  # that one may be adopted by the next save
                condemn(self._store, coordinator)
            self._store.put(keys.part_key(coordinator, self._rank.rank), b"")
        gone = lease is not None and process_is_gone(lease)
        may_land = lease is not None and (ended or self._lease.lease.attempt in lease.uses)
        end = clock() + SETTLE
        while True:
            outcome = self._read_outcome(coordinator)
            if outcome is not None:
                return self._manifest_of(outcome)
            manifest = self._committed(coordinator)
            if manifest is not None and gone:
                return manifest
            if manifest is None and never and not (gone and may_land and clock() < end):
                raise self.failed(ranks, of_the_store=death is None)
            if clock() >= end:
                if manifest is not None and not never and not is_condemned(self._store, coordinator):
                    return manifest
                raise outcome_unknown(self._epoch, "rank 0 does not say whether it has committed")
            current().sleep(min(0.2, SETTLE))

    def _not_ready(self, coordinator: str) -> dict[int, str]:
        infos = self._store.list(keys.parts_prefix(coordinator))
        there = {part[1] for part in (keys.parse_part_key(info.key) for info in infos) if part is not None}
        missing = [rank for rank in range(self._rank.world_size) if rank not in there]
        if not missing:
            return {0: f"has all parts and has not committed after {self._timeout:g} seconds"}
        return dict.fromkeys(missing, f"is not ready after {self._timeout:g} seconds")

    def _read_lease(self, attempt: str) -> Lease | None:
        key = keys.lease_key(attempt)
        try:
            return decode_lease(self._store.get(key, 0, MAX_LEASE + 1), key)
        except ObjectNotFoundError:
            return None

    def _read_outcome(self, attempt: str) -> Outcome | None:
        try:
            return decode_outcome(self._store.get(keys.outcome_key(attempt), 0, MAX_OUTCOME + 1), attempt)
        except ObjectNotFoundError:
            return None

    def _committed(self, attempt: str) -> Manifest | None:
        for _, manifest in self._catalog.manifests(self._catalog.committed(self._epoch)):
            if isinstance(manifest, Manifest) and manifest.attempt == attempt:
                return manifest
        return None
