"""Ranks: several processes save one checkpoint, with one commit, and tell each other through the store alone.

Each rank has an attempt and a lease of its own and writes its chunks there, so that everything which holds for the save
of one process holds for each of them: heartbeats, adoption by the next save, removal. Rank 0 coordinates. Its lease
announces the attempt; every rank puts its *part* beside it, ``attempts/<rank 0>/parts/<rank>.json``: its attempt and
its record indexes, no chunk. With all parts rank 0 writes the indexes (merged, where several ranks wrote one record)
and commits one manifest; ``attempts/<rank 0>/outcome.json`` tells the others.

Why no sweep takes what rank 0 commits. It does with the attempts of the ranks what an adopter does with a dead one: it
puts a lease that names them all, and all that their leases name, *then* it looks for their flags. A sweeper that
condemns one of them raises its flag, *then* lists the leases. So it spares them, or its flag is seen, or it had come to
its end before: then objects are gone, and the look that follows every commit (``commit.py``) finds that out. Until then
each rank's own lease holds the base and what it has adopted: it stays until the outcome is known. A rank may die once
its part is there: its lease does not go away by itself before rank 0 has named it, and if a gc takes it for dead, that
is the case above. After the commit the manifest reaches everything.

Why no rank is of two minds. The commit is the manifest of rank 0's attempt, and nothing else; who is in doubt looks for
it. A rank that gives up waiting empties its part, *then* looks for the manifest; rank 0 puts that, *then* looks whether
all parts are as they were, and withdraws. So none reports a failure for what comes to exist later.

Why launches never mix. Parts lie under the attempt of one coordinator, are created once, and name group, epoch, world
size and rank; a rank joins a coordinator of its own group only, and one only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from ckptstore import keys, meeting
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import (
    CkptStoreError,
    EpochExistsError,
    FencedError,
    InvalidArgumentError,
    InvalidRecordError,
    OutcomeUnknownError,
    RanksFailedError,
    StoreError,
    StoreFullError,
    TransactionError,
)
from ckptstore.failures import is_of_the_store
from ckptstore.gathering import Gathering
from ckptstore.lease import HeldLease
from ckptstore.manifest import MAX_RECORDS, Manifest, RankOf, RecordEntry, RecordIndex
from ckptstore.meeting import outcome_unknown, put_failed_part, put_outcome, reason_of
from ckptstore.member import Member
from ckptstore.merge import merge_indexes
from ckptstore.parts import Outcome, Part, encode_part, indexes_of, part_records
from ckptstore.pipeline import Meter, side_by_side
from ckptstore.sweep import remove_attempts, sweep
from ckptstore.transaction import Plan, Transaction
from ckptstore.writer import Tally

log = logging.getLogger("ckptstore")


class PartsTransaction(Transaction):
    """A transaction that commits the parts of ranks, beside what it has written itself."""

    _parts: tuple[tuple[Part, str], ...] = ()

    def join(self, parts: Iterable[tuple[Part, str]]) -> None:
        """Take parts over, each with a name for errors; ``commit`` makes them one checkpoint."""
        self._parts = tuple(parts)
        for part, _ in self._parts:
            self.tally.bytes_sent += part.bytes_sent
            self.tally.bytes_reused += part.bytes_reused
            self._names.update(record.name for record in part.records)

    def _all_entries(self) -> list[RecordEntry]:
        own = [index for index, _ in self._writer.collect()]
        self._claim_parts([part for part, _ in self._parts])
        ranks = [(-1 if self._plan.rank is None else self._plan.rank.rank, own)] if own else []
        ranks += [(part.rank, indexes_of(part, where)) for part, where in self._parts]
        merged = _merged(ranks)
        if len(merged) > MAX_RECORDS:
            raise InvalidRecordError(f"a checkpoint has at most {MAX_RECORDS} records: nest them", epoch=self.epoch)
        entries = self._writer.put_indexes((index, _nbytes(index)) for index in merged)
        self.tally.bytes_state = sum(entry.bytes_state for entry in entries)
        self._twice = _unneeded([index for _, indexes in ranks for index in indexes], self._writer.referenced)
        return entries

    def _claim_parts(self, parts: Sequence[Part]) -> None:
        try:
            self._claim.join(
                [part.attempt for part in parts],
                {attempt for part in parts for attempt in part.uses},
                {attempt for part in parts for attempt in part.adopted},
            )
        except TransactionError:
            # Who commits the epoch first sweeps the dead attempts that both have adopted.
            Transaction._next_generation(self, self._catalog.committed(self.epoch))
            raise

    _twice: Mapping[str, int] = MappingProxyType({})  # chunks that several ranks have sent, all but one of each

    def _commit(self, entries: tuple[RecordEntry, ...]) -> Manifest:
        manifest = super()._commit(entries)
        begun = min([self._lease.begun, *(part.begun for part, _ in self._parts)])
        attempts = {self._attempt, *(part.attempt for part, _ in self._parts)}
        own = {key: size for key, size in self._twice.items() if keys.attempt_of(key) in attempts}
        try:
            if own:
                sweep(self._catalog, own, "another rank has stored the same", begun=begun)
        except Exception as error:  # noqa: BLE001 (whatever it is: the epoch is committed)
            log.warning("epoch %d is committed; what several ranks have sent is left to gc: %s", self.epoch, error)
        return manifest


class OfRanks(Transaction):
    """What the transactions of all ranks have in common."""

    @property
    def _rank(self) -> RankOf:
        assert self._plan.rank is not None
        return self._plan.rank

    def _next_generation(self, commits: list[Committed]) -> int:
        try:
            return super()._next_generation(commits)
        except EpochExistsError as error:
            tell_failure(self._catalog, self._rank, self.epoch, error)
            raise

    def _settle(self) -> list[RecordEntry]:
        self._writer.drain()  # the indexes are put when all are known
        return []

    def _check_content(self) -> None:
        """Others may have written something."""

    def _check_going(self) -> None:
        if self._abandoned:
            raise TransactionError(
                f"epoch {self.epoch} was not committed: the process of this rank was told to end", epoch=self.epoch
            )

    def _reason(self, error: BaseException) -> str:
        """What the lease tells those who have not heard why; empty where that is not for this rank to tell."""
        heard = isinstance(error, (RanksFailedError, EpochExistsError))
        return "" if heard else f"has failed: {reason_of(error)}"

    def _clean_up(self, error: BaseException) -> None:
        """What was sent is left to the next try, but on a full store."""
        self._state = "aborted"
        self._writer.close()
        if not self._abandoned:
            self._lease.abandon(self._reason(error))
        if isinstance(error, StoreFullError) and not self._step.sent:
            remove_attempts(self._catalog, [self._attempt], "its save has failed", ended=False)

    def commit(self) -> Any:
        """Make the checkpoint exist, with what all ranks have written. Returns it.

        Raises:
            RanksFailedError: other ranks failed or are missing; nothing was committed.
            CkptStoreError: as of an ordinary transaction. Whatever it is, the attempt has ended, on all ranks.
        """
        try:
            return super().commit()
        except BaseException as error:
            self._give_up(error)
            raise

    def abort(self) -> None:
        """Give the attempt up, on all ranks. What was written is left to the next save of the epoch, or to gc."""
        self._check_process()
        if self._state in ("open", "failed"):
            self._give_up(TransactionError(f"epoch {self.epoch} was aborted", epoch=self.epoch))
        self.ended = True


class CoordinatorTransaction(OfRanks, PartsTransaction):
    """Rank 0 of several: ``commit`` waits for the parts of all others."""

    def _all_entries(self) -> list[RecordEntry]:
        self.settle()
        with self.tally.timed("wait"):
            parts = Gathering(self._catalog, self._lease, self._plan.timeout, self._check_going).gather()
        self._claim.parts = tuple(keys.part_key(self._attempt, part.rank) for part in parts)
        self.join(zip(parts, self._claim.parts, strict=True))
        Transaction._check_content(self)
        return super()._all_entries()

    def _tell(self, outcome: Manifest | BaseException) -> None:
        try:
            put_outcome(self._store, self._outcome(outcome))
        except Exception as error:  # noqa: BLE001 (whatever it is: it must not hide how the save ended)
            log.warning("the ranks could not be told what has become of epoch %d: %s", self.epoch, error)

    def _outcome(self, outcome: Manifest | BaseException) -> Outcome:
        facts: dict[str, Any] = {"attempt": self._attempt, "epoch": self.epoch, "generation": self._generation}
        if isinstance(outcome, Manifest):
            return Outcome(**facts)
        if isinstance(outcome, RanksFailedError):
            ranks = {str(rank): why for rank, why in outcome.ranks.items()}
            return Outcome(**facts, error="RanksFailedError", ranks=ranks, of_the_store=outcome.of_the_store)
        if self._step.sent and not isinstance(outcome, OutcomeUnknownError):
            outcome = outcome_unknown(self.epoch, f"rank 0 was interrupted ({reason_of(outcome)})")
        for kind in (EpochExistsError, FencedError, OutcomeUnknownError):
            if isinstance(outcome, kind):
                return Outcome(**facts, error=kind.__name__, message=str(outcome))
        ranks = {"0": f"has failed: {reason_of(outcome)}"}
        return Outcome(**facts, error="RanksFailedError", ranks=ranks, of_the_store=is_of_the_store(outcome))

    def _commit(self, entries: tuple[RecordEntry, ...]) -> Manifest:
        manifest = super()._commit(entries)
        try:
            self._tidy_notes()
        except Exception as error:  # noqa: BLE001 (whatever it is: the epoch is committed)
            log.warning("epoch %d is committed; what the ranks told each other is left to gc: %s", self.epoch, error)
        return manifest

    def _tidy_notes(self) -> None:
        """The parts have done their work; the outcomes of earlier saves too, since all ranks were here again."""
        store = self._store
        notes = [keys.part_key(self._attempt, rank) for rank in range(self._rank.world_size)]
        side_by_side(store.traits.concurrency, store.delete, [*notes, *self._catalog.outcomes])
        self._catalog.outcomes = [keys.outcome_key(self._attempt)]


class RankTransaction(OfRanks):
    """A rank that is not the coordinator: ``commit`` gives its part, and waits for what becomes of it."""

    def __init__(
        self,
        catalog: Catalog,
        plan: Plan,
        commits: list[Committed],
        on_commit: Callable[[Manifest, Tally], Any],
        meter: Meter,
    ) -> None:
        self._member: Member | None = None
        self._part = b""
        self._told = False
        self._polls = True  # whether the others hear of it through the store
        super().__init__(catalog, plan, commits, on_commit, meter)

    def _all_entries(self) -> list[RecordEntry]:
        self.finish()
        return []

    def finish(self) -> bytes:
        """Wait until all chunks are on the store; the part that the coordinator needs."""
        self.settle()
        written = [index for index, _ in self._writer.collect()]
        part = Part(
            **_facts(self._lease),
            uses=self._lease.lease.uses,
            adopted=self._claim.adopted,
            records=part_records(written),
            bytes_state=self.tally.bytes_state,
            bytes_sent=self.tally.bytes_sent,
            bytes_reused=self.tally.bytes_reused,
        )
        self._part = encode_part(part)
        self._lease.may_go = True
        return self._part

    def _commit(self, entries: tuple[RecordEntry, ...]) -> Manifest:
        timeout = self._plan.timeout
        member = self._member = Member(self._catalog, self._lease, timeout, self._check_going, self._generation)
        try:
            coordinator = member.find()
            member.give(coordinator, self._part)
            manifest = member.outcome(coordinator)
        except StoreError as error:
            if not member.gave:
                raise
            why = f"rank {self._rank.rank} cannot ask the store ({error})"
            raise outcome_unknown(self.epoch, why) from error
        self.committed(manifest)
        return manifest

    def committed(self, manifest: Manifest | None = None) -> None:
        """The coordinator has committed it: nothing here is needed any more."""
        self._state = "committed"
        self._catalog.settled = True
        if manifest is not None:
            self._catalog.has_committed(manifest, ())
        self._writer.close()
        try:
            self._lease.release()
        except (CkptStoreError, OSError) as error:
            log.warning("epoch %d is committed; the lease of this rank is left to expire: %s", self.epoch, error)

    def _tell(self, outcome: Manifest | BaseException) -> None:
        if isinstance(outcome, BaseException) and self._polls and not self._has_given:
            self._told = tell_failure(self._catalog, self._rank, self.epoch, outcome, self._lease)

    @property
    def _has_given(self) -> bool:
        return self._member is not None and self._member.gave

    def _reason(self, error: BaseException) -> str:
        return "" if self._told or self._has_given else super()._reason(error)


def tell_failure(
    catalog: Catalog, rank: RankOf, epoch: int, error: BaseException, lease: HeldLease | None = None
) -> bool:
    """Tell the others that this rank has failed. Never raises.

    Args:
        lease: that of its attempt, which its owner gives up afterwards; None if it had none yet: then one is put, that
            says so, unless the others will find out by themselves.

    Returns:
        Whether the coordinator was told: then the lease need not say it.
    """
    held = lease or HeldLease(catalog.store, keys.new_rank_attempt(epoch, rank.rank), epoch, rank)
    fresh = lease is None and not isinstance(error, (EpochExistsError, RanksFailedError))
    told = False
    try:
        if fresh:
            held.claim(None, ())
        try:
            told = rank.rank > 0 and _told_coordinator(catalog, held, error)
        finally:
            if fresh:
                held.abandon("" if told else f"has failed: {reason_of(error)}")
        if not told and not isinstance(error, (EpochExistsError, RanksFailedError)):
            meeting.process.untold.add(rank)
    except Exception as second:  # noqa: BLE001 (whatever it is: it must not hide the error that it is about)
        log.warning("the other ranks could not be told that rank %d has failed: %s", rank.rank, second)
    return told


@contextmanager
def telling(catalog: Catalog, rank: RankOf | None, epoch: int) -> Iterator[None]:
    """What is raised in the block, before there is a transaction that would do it, is told to the other ranks."""
    try:
        yield
    except BaseException as error:
        if rank is not None:
            tell_failure(catalog, rank, epoch, error)
        raise


def transaction_for(rank: RankOf | None) -> type[Transaction]:
    """The kind of transaction."""
    if rank is None:
        return Transaction
    return CoordinatorTransaction if rank.rank == 0 else RankTransaction


def _told_coordinator(catalog: Catalog, held: HeldLease, error: BaseException) -> bool:
    if isinstance(error, RanksFailedError):
        return True  # it has heard it from there
    rank = held.lease.rank
    assert rank is not None
    try:
        coordinator = Member(catalog, held, 0.0, lambda: None).look_for_coordinator()
    except (RanksFailedError, EpochExistsError, FencedError, OutcomeUnknownError, InvalidArgumentError):
        return False  # one that this rank has missed has ended, or has another world size: the next hears of it
    if coordinator is None:
        return False
    exists = isinstance(error, EpochExistsError)
    part = Part(
        **_facts(held),
        error="EpochExistsError" if exists else type(error).__name__,
        reason=str(error) if exists else f"has failed: {reason_of(error)}",
        of_the_store=is_of_the_store(error),
    )
    meeting.process.hear(coordinator, rank.rank)  # how that ends is no news
    put_failed_part(catalog.store, coordinator, part)
    return True


def _facts(held: HeldLease) -> dict[str, Any]:
    """What a part has in common with the lease."""
    lease, rank = held.lease, held.lease.rank
    assert rank is not None
    facts = {field: getattr(lease, field) for field in ("epoch", "attempt", "host", "pid", "started")}
    return {**facts, "rank": rank.rank, "world_size": rank.world_size, "group": rank.group, "begun": held.begun}


def _merged(ranks: Sequence[tuple[int, list[RecordIndex]]]) -> list[RecordIndex]:
    """One index for each record, whoever wrote it, in order of ranks."""
    found: dict[str, list[tuple[int, RecordIndex]]] = {}
    for rank, indexes in ranks:
        for index in indexes:
            found.setdefault(index.name, []).append((rank, index))
    return [merge_indexes(name, parts) for name, parts in found.items()]


def _nbytes(index: RecordIndex) -> int:
    return sum(span.length for array in index.arrays for span in array.spans)


def _unneeded(indexes: Iterable[RecordIndex], needed: Collection[str]) -> dict[str, int]:
    """Chunks of the parts that the merged records do not refer to, with their sizes."""
    chunks = {chunk.key: chunk.stored_length for index in indexes for chunk in index.chunks}
    return {key: size for key, size in chunks.items() if key not in needed}
