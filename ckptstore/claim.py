"""Claim: what an attempt may refer to in place of sending it again, and how it may be sure of that.

First the lease, naming the base and the dead attempts to adopt; *then* a look at the flags: the base's manifest is
still there, no adopted attempt is condemned. A sweeper does the reverse (``sweep.py``), so one of the two sees the
other. The look at the base, and at which of its chunks are there, waits until something is to be reused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import CorruptionError, ObjectNotFoundError, TransactionError
from ckptstore.known import Known
from ckptstore.lease import HeldLease, Sighting, is_condemned, read_leases, seems_dead
from ckptstore.manifest import ChunkRef, Manifest, RankOf
from ckptstore.pipeline import side_by_side
from ckptstore.reader import missing_chunks

log = logging.getLogger("ckptstore")


class Claim:
    """What one attempt builds on: its base, and the dead attempts at the same epoch that it adopts."""

    def __init__(self, catalog: Catalog, lease: HeldLease) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._lease = lease
        self._gone = False
        self._if_damaged = False
        self.base: Manifest | None = None
        self.adopted: tuple[str, ...] = ()
        self.partners: tuple[str, ...] = ()
        """Attempts of other ranks that this one commits."""
        self.parts: tuple[str, ...] = ()
        """Keys of their parts, where they lie on the store: a rank empties its own before it reports a failure."""
        self._joined: tuple[str, ...] = ()
        self.known = Known(self._look)

    def take(self, commits: list[Committed]) -> None:
        """Put the lease and learn what there is to build on.

        Args:
            commits: all of the repository, oldest first.
        """
        epoch, rank = self._lease.lease.epoch, self._lease.lease.rank
        self.base = self._catalog.base(commits, without=epoch, indexes=rank is None)
        base = (self.base.key, self.base.attempts) if self.base is not None else (None, ())
        # Attempts at this epoch die with their process, or when their store fails: not right after a save of ours.
        settled, self._catalog.settled = self._catalog.settled, False
        candidates = [] if settled else self._attempts_at(epoch, rank)
        spent = self._catalog.spent_attempts(epoch) if candidates else frozenset()
        now = self._lease.claim(*base)
        dead = tuple(
            s.attempt for s in candidates if seems_dead(s, now) and spent is not None and s.attempt not in spent
        )
        if dead:
            self._lease.claim(base[0], (*base[1], *dead))
        if self.base is not None and rank is None:
            for entry in self.base.records:
                self.known.learn(self._catalog.index(entry))
        self.adopted = tuple(attempt for attempt in dead if not is_condemned(self._store, attempt))
        for attempt in self.adopted:
            self.known.adopt(attempt, self._chunks(attempt))

    def _attempts_at(self, epoch: int, rank: RankOf | None) -> list[Sighting]:
        """Attempts at the epoch that may be dead; of ranks those of its own rank (and of those that are no more)."""
        if rank is None:
            found = read_leases(self._store)
        else:
            mine, size = rank.rank, rank.world_size
            found = read_leases(
                self._store, keys.ranks_prefix(epoch), lambda attempt, _: keys.rank_of_attempt(attempt) % size == mine
            )
        return [sighting for sighting in found if sighting.lease is not None and sighting.lease.epoch == epoch]

    def learn(self, name: str) -> None:
        """For a rank, before it writes a record: what the base has of it. One read."""
        entry = self.base.record(name) if self.base is not None else None
        if entry is not None:
            try:
                self.known.learn(self._catalog.index(entry))
            except (CorruptionError, ObjectNotFoundError) as error:
                log.warning("nothing of record %s is taken over from the base: %s", name, error)

    def join(self, attempts: Collection[str], uses: Collection[str], adopted: Collection[str]) -> None:
        """Answer for what other ranks have written, and for what that refers to: first the lease, then the flags.

        Args:
            attempts: theirs.
            uses: what their leases name; the ``adopted`` of it are dead.

        Raises:
            TransactionError: one of them was swept.
            InvalidRecordError: they are too many for a lease.
        """
        lease = self._lease.lease
        self._lease.claim(lease.base, tuple(dict.fromkeys((*lease.uses, *attempts, *uses))))
        self.partners = tuple(attempts)
        self._joined = tuple(dict.fromkeys((*attempts, *adopted)))
        self.adopted = tuple(dict.fromkeys((*self.adopted, *adopted)))
        side_by_side(self._store.traits.concurrency, self._prove_not_condemned, self._joined)

    def take_all_of(self, manifest: Manifest, *, if_damaged: bool = False) -> None:
        """Put the lease and build on this checkpoint alone. TransactionError if it is gone.

        Args:
            if_damaged: it counts as there if its manifest is, although that cannot be read any more.
        """
        self.base = manifest
        self._if_damaged = if_damaged
        self._lease.claim(manifest.key, manifest.attempts)
        if not self.base_is_there():
            raise self._swept(manifest.key)

    def base_is_there(self) -> bool:
        """Whether the base is still committed."""
        return self.base is not None and self._catalog.exists(self.base, if_damaged=self._if_damaged)

    def prove_own_flag(self) -> None:
        """Prove that no sweeper has condemned this attempt. TransactionError otherwise, as from all proofs."""
        self._prove_not_condemned(self._lease.lease.attempt)

    def prove_flags(self, manifest: Manifest) -> None:
        """The lease may have been taken for dead: prove that what the checkpoint needs is not being swept."""
        for attempt in dict.fromkeys((self._lease.lease.attempt, *self.adopted, *self._joined)):
            self._prove_not_condemned(attempt)
        used = self.base is not None and set(self.base.attempts) & set(manifest.attempts)
        if used and self.base is not None and not self.base_is_there():
            raise self._swept(self.base.key)

    def prove_objects(self, manifest: Manifest, chunks: Iterable[ChunkRef]) -> None:
        """Prove that every object that the checkpoint needs is there. A listing for each attempt."""
        attempt = self._lease.lease.attempt
        own = {info.key: info.size for info in self._store.list(keys.attempt_prefix(attempt))}
        for key in self.parts:
            if not own.get(key):
                raise TransactionError(
                    f"another rank has given this save up, or another process cleaned up {key}. Save again",
                    key=key,
                    epoch=manifest.epoch,
                )
        needed = {entry.key: entry.stored_length for entry in manifest.records}
        others = []
        for chunk in chunks:
            if chunk.attempt == attempt:
                needed[chunk.key] = chunk.stored_length
            else:
                others.append(chunk)
        for key, size in needed.items():
            if own.get(key) != size:
                raise self._swept(key)
        for problem in missing_chunks(self._store, others):
            raise self._swept(problem.key)

    def _prove_not_condemned(self, attempt: str) -> None:
        if is_condemned(self._store, attempt):
            raise self._swept(keys.condemned_key(attempt))

    def _swept(self, key: str) -> TransactionError:
        return TransactionError(
            f"this save was silent for too long, and another process cleaned up what it needs ({key}). Save again",
            key=key,
            epoch=self._lease.lease.epoch,
        )

    def _look(self, attempt: str) -> dict[str, int]:
        """Chunks of the base that may be used, by key, with their sizes. None, once the base is gone."""
        self._gone = self._gone or not self.base_is_there()
        return {} if self._gone else self._chunks(attempt)

    def _chunks(self, attempt: str) -> dict[str, int]:
        return {info.key: info.size for info in self._store.list(keys.chunks_prefix(attempt))}
