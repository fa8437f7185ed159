"""Gathering: the coordinator of a save of several ranks, until it has the parts of all. See ``meeting.py``."""

from __future__ import annotations

from collections.abc import Callable

from ckptstore import keys, meeting
from ckptstore.catalog import Catalog
from ckptstore.errors import CorruptionError, EpochExistsError, ObjectNotFoundError
from ckptstore.lease import HeldLease, Sighting, is_condemned, read_leases
from ckptstore.manifest import Lease
from ckptstore.meeting import Signs, Waiting, check_part
from ckptstore.parts import MAX_PART, Part, decode_part
from ckptstore.pipeline import side_by_side

_GIVEN_UP = "was not ready when others gave up waiting"


class Gathering(Waiting):
    """The coordinator, from when it has written all of its own to when it has the parts of all ranks."""

    def __init__(self, catalog: Catalog, lease: HeldLease, timeout: float, check: Callable[[], None]) -> None:
        super().__init__(catalog, lease, timeout, check)
        self._attempt = lease.lease.attempt
        self._parts: dict[int, Part] = {}
        self._seen: dict[str, Sighting] = {}
        self._signs: dict[str, Signs] = {}
        self._given_up: set[int] = set()  # ranks that were ready, and wait no more

    def gather(self) -> list[Part]:
        """The parts of all other ranks.

        Raises:
            RanksFailedError: a rank has failed, is dead, or is not ready in time.
            EpochExistsError: a rank met that.
        """
        # Its own says that it is ready: so the others know, when their time is up, for whom they wait.
        self._store.put(keys.part_key(self._attempt, 0), b"", if_absent=True)
        while True:
            self._take_parts()
            missing = sorted({*range(1, self._rank.world_size)} - self._parts.keys() - self._given_up)
            alive, failed = self._look_at(set(missing)) if missing else ({}, {})
            if failed:
                raise self.failed(failed)
            if self._given_up or is_condemned(self._store, self._attempt):
                late = self._late(missing, alive, "when others gave up waiting")
                raise self.failed(late or {0: _GIVEN_UP}, of_the_store=True)
            if not missing:
                return [self._parts[rank] for rank in sorted(self._parts)]
            if self._is_over:
                late = self._late(missing, alive, f"after {self._timeout:g} seconds")
                raise self.failed({**self._twice(), **late}, of_the_store=True)
            self._wait()

    def _take_parts(self) -> None:
        infos = list(self._store.list(keys.parts_prefix(self._attempt)))
        there = {parsed[1]: info for info in infos if (parsed := keys.parse_part_key(info.key)) is not None}
        full = {rank: info.key for rank, info in sorted(there.items()) if rank != 0 and info.size}
        self._given_up = (there.keys() | self._parts.keys()) - full.keys() - {0}
        new = [(rank, key) for rank, key in full.items() if rank not in self._parts]
        parts = side_by_side(self._store.traits.concurrency, self._read_part, new)
        failed = [part for part in parts if part.error]
        for part in parts:
            self._parts[part.rank] = part
            meeting.process.meet(part.group, part.rank, part)
        for part in failed:
            self._hear(part.attempt)
            if part.error == EpochExistsError.__name__:
                raise EpochExistsError(part.reason, epoch=self._epoch)
        if failed:
            of_the_store = all(part.of_the_store for part in failed)
            raise self.failed({part.rank: part.reason for part in failed}, of_the_store=of_the_store)

    def _read_part(self, item: tuple[int, str]) -> Part:
        rank, key = item
        try:
            data = self._store.get(key, 0, MAX_PART + 1)
        except ObjectNotFoundError as error:  # it was listed just now: a sweeper has taken this attempt for dead
            raise self._lease.gone() from error
        if not data:
            raise self.failed({0: _GIVEN_UP}, of_the_store=True)
        part = decode_part(data, key)
        check_part(part, self._epoch, self._rank, key)
        if part.rank != rank:
            raise CorruptionError(f"{key} is damaged: it is the part of rank {part.rank}", key=key)
        return part

    def _look_at(self, missing: set[int]) -> tuple[dict[int, Lease], dict[int, str]]:
        """Of the ranks that are missing those that live, and those that have failed or died, with why."""

        names = set()

        def wanted(attempt: str, modified: float) -> bool:
            names.add(attempt)
            seen = self._seen.get(attempt)
            return keys.rank_of_attempt(attempt) in missing and (seen is None or seen.modified != modified)

        fresh = read_leases(self._store, keys.ranks_prefix(self._epoch), wanted)
        if self._attempt not in names:
            raise self._lease.gone()
        self._seen.update((s.attempt, s) for s in fresh if self._is_same(s.lease))
        alive: dict[int, Lease] = {}
        ended: dict[int, tuple[Sighting, str]] = {}
        double: dict[int, str] = {}
        for sighting in self._seen.values():
            rank, lease = keys.rank_of_attempt(sighting.attempt), sighting.lease
            if lease is None or rank not in missing:
                continue
            why = self._end_of(sighting, lease)
            if why is None:
                other = alive.setdefault(rank, lease)
                if (other.host, other.pid, other.started) != (lease.host, lease.pid, lease.started):
                    double[rank] = f"two processes say that they are it: {_where(other)} and {_where(lease)}"
            elif why and self._is_news(sighting):
                ended[rank] = sighting, why
        for rank, (sighting, _) in ended.items():
            if rank not in alive:
                self._hear(sighting.attempt)
        failed = {rank: why for rank, (_, why) in ended.items() if rank not in alive}
        for rank in missing - alive.keys() - failed.keys():
            gone = meeting.process.is_gone(self._rank.group, rank)
            if gone is not None:
                failed[rank] = gone
        return alive, {**failed, **double}

    def _end_of(self, sighting: Sighting, lease: Lease) -> str | None:
        """Why a rank has ended; empty if it only heard that others had; None if it lives."""
        if lease.state == "abandoned":
            return lease.reason
        return self._signs.setdefault(sighting.attempt, Signs()).death(lease)

    def _twice(self) -> dict[int, str]:
        """Another rank 0 of the same launch and epoch: no other rank knows which of them to join."""
        prefix = keys.ranks_prefix(self._epoch) + f"{0:04x}"
        for sighting in read_leases(self._store, prefix, lambda attempt, _: attempt != self._attempt):
            lease = sighting.lease
            if lease is not None and self._is_same(lease) and self._end_of(sighting, lease) is None:
                return {0: f"several processes call themselves rank 0 of group {self._rank.group!r}: {_where(lease)}"}
        return {}

    def _late(self, missing: list[int], alive: dict[int, Lease], when: str) -> dict[int, str]:
        return {
            rank: f"was not ready {when}: {_where(alive[rank])} is still writing"
            if rank in alive
            else f"had not begun {when}"
            for rank in missing
        }


def _where(lease: Lease) -> str:
    return f"process {lease.pid} on {lease.host}"
