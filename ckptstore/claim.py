"""Claim: what an attempt may refer to in place of sending it again, and how it may be sure of that.

First the lease, naming the base and the dead attempts to adopt; *then* a look at the flags: the base's manifest is
still there, no adopted attempt is condemned. A sweeper does the reverse (``sweep.py``), so one of the two sees the
other. The look at the base, and at which of its chunks are there, waits until something is to be reused.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import TransactionError
from ckptstore.known import Known
from ckptstore.lease import HeldLease, is_condemned, read_leases, seems_dead
from ckptstore.manifest import ChunkRef, Manifest
from ckptstore.reader import missing_chunks


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
        self.known = Known(self._look)

    def take(self, commits: list[Committed]) -> None:
        """Put the lease and learn what there is to build on.

        Args:
            commits: all of the repository, oldest first.
        """
        epoch = self._lease.lease.epoch
        self.base = self._catalog.base(commits, without=epoch)
        base = (self.base.key, self.base.attempts) if self.base is not None else (None, ())
        # Attempts at this epoch die with their process, or when their store fails: not right after a save of ours.
        settled, self._catalog.settled = self._catalog.settled, False
        candidates = [] if settled else [s for s in read_leases(self._store) if s.lease is not None]
        candidates = [s for s in candidates if s.lease is not None and s.lease.epoch == epoch]
        spent = self._catalog.spent_attempts(epoch) if candidates else frozenset()
        now = self._lease.claim(*base)
        dead = tuple(
            s.attempt for s in candidates if seems_dead(s, now) and spent is not None and s.attempt not in spent
        )
        if dead:
            self._lease.claim(base[0], (*base[1], *dead))
        if self.base is not None:
            for entry in self.base.records:
                self.known.learn(self._catalog.index(entry))
        self.adopted = tuple(attempt for attempt in dead if not is_condemned(self._store, attempt))
        for attempt in self.adopted:
            self.known.adopt(attempt, self._chunks(attempt))

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
        for attempt in (self._lease.lease.attempt, *self.adopted):
            self._prove_not_condemned(attempt)
        used = self.base is not None and set(self.base.attempts) & set(manifest.attempts)
        if used and self.base is not None and not self.base_is_there():
            raise self._swept(self.base.key)

    def prove_objects(self, manifest: Manifest, chunks: Iterable[ChunkRef]) -> None:
        """Prove that every object that the checkpoint needs is there. A listing for each attempt."""
        attempt = self._lease.lease.attempt
        own = {info.key: info.size for info in self._store.list(keys.attempt_prefix(attempt))}
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
