"""Campaign ``tiers``: SIGKILL of trainers that save to a fast folder, while copies go to a second folder or to S3.

The knife comes between the tiers: when an epoch has just been committed in the first, or when a copy has reached some
phase in the second (lease, chunk, index, manifest, ...). After each kill a fresh process looks at both together: every
epoch that was reported and that either policy keeps must load bit for bit. In the second tier nothing is visible that
is not whole, and it must catch up when somebody opens the tiers again.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptstore import CkptStoreError, KeepLast, Repository, RepositoryNotFoundError, TieredRepository
from ckptstore.lease import read_leases
from ckptstore.replication import Lower
from ckptstore.stores import open_store
from ckptstore.stores.base import Store
from tests.torture.content import CHUNK
from tests.torture.kills import Killer
from tests.torture.ledger import Ledger
from tests.torture.processes import Nursery
from tests.torture.victim import KEEP, KEEP_BELOW, TIER_PHASES
from tests.torture.work import Work

LANES = {"folder": 0.5, "s3": 0.5}
CATCH_UP_EVERY, SWEEP_EVERY = 5, 20
CATCH_UP_SECONDS = 120.0


def run(work: Work) -> None:
    """Both lanes."""
    work.in_lanes(LANES, lane)


def lane(work: Work, kind: str, kills: int) -> None:
    """So many kills that hit between the tiers, in one pair of repositories."""
    url, options = str(work.folder / f"{kind}-below"), None
    if kind == "s3":
        bucket = work.s3()
        url, options = bucket.url(), bucket.storage_options
    first = str(work.folder / f"{kind}-first")
    with (
        open_store(first) as fast,
        open_store(url, storage_options=options) as slow,
        Nursery(work.folder / f"{kind}.log", work.broken) as nursery,
    ):
        order = {"act": "tiers", "url": first, "options": None, "background": False, "below": [url, options]}
        killer = Between(work, kind, nursery, fast, order, TIER_PHASES)
        killer.begin(slow)
        hits = lives = 0
        while hits < kills and lives < 3 * kills + 20 and not work.enough:
            killer.life(lives)
            hit = killer.hit
            lives += 1
            hits += hit
            work.done(hit)
            if lives % CATCH_UP_EVERY == 0:
                killer.catch_up(f"{kind}/{lives}")
            if lives % SWEEP_EVERY == 0:
                killer.sweep(f"{kind}/{lives}")
        if hits < kills and not work.enough:
            work.blame("other", f"{kind}/{lives}", f"only {hits} of {lives} kills came between: this proves too little")
        killer.catch_up(f"{kind}/{lives}")
        killer.sweep(f"{kind}/{lives}")


def together(fast: Store, slow: Store, *, create: bool) -> TieredRepository:
    """Both tiers, with fresh eyes; with ``create`` it copies."""

    def opener(make: bool) -> Callable[[], Repository]:
        return lambda: Repository(slow, keep=KeepLast(KEEP_BELOW), create=make, chunk_size=CHUNK)

    lower = Lower(slow.traits.url, opener(False), opener(True), KeepLast(KEEP_BELOW), None)
    return TieredRepository(fast, lower=[lower], keep=KeepLast(KEEP), create=create, chunk_size=CHUNK)


class Books(Ledger):
    """The books of two tiers, whose policies together keep the last ``KEEP_BELOW`` epochs."""

    def __init__(self, work: Work, fast: Store, slow: Store) -> None:
        super().__init__(work, fast, KEEP_BELOW)
        self._slow = slow

    def fresh(self) -> Repository | None:
        """Both of them, read as one. Nothing is copied."""
        try:
            return together(self._store, self._slow, create=False)
        except RepositoryNotFoundError:
            return None


class Between(Killer):
    """A killer that looks at two tiers.

    Attributes:
        hit: whether the last kill came while the second lacked an epoch of the first.
    """

    hit = False

    def begin(self, slow: Store) -> None:
        """Say which is the second tier."""
        self.slow = slow
        self.ledger = Books(self.work, self.store, slow)
        self.below = Ledger(self.work, slow, 0)
        self.below.begun = self.ledger.begun  # the same book: what was never begun must be nowhere

    def look(self, step: str) -> None:
        """Both as one; the second alone; and where the kill has hit."""
        self.hit = False
        seen = self.ledger.look(step)
        if seen is None:
            return
        self.below.look(f"{step}, second tier")
        try:
            status = seen[0].tiers()[1]
            self.hit = bool(status.waiting)
            moment = "killed with nothing to copy"
            if self.hit:
                leases = list(read_leases(self.slow))
                copying = any(s.lease is not None and s.lease.epoch in status.waiting for s in leases)
                moment = "killed amid a copy" if copying else "killed before a copy began"
        except CkptStoreError as error:
            moment = f"killed, and {type(error).__name__} when looking where"
        self.work.note(f"{self.lane}: {moment}")

    def catch_up(self, step: str) -> None:
        """Whoever opens the tiers again brings the second up to date."""
        with together(self.store, self.slow, create=True) as repo:
            if not repo.wait_for_tiers(CATCH_UP_SECONDS):
                self.work.blame("other", step, f"the second tier has not caught up: {repo.tiers()[1]}")
                return
            first, second = (member.epochs() for member in repo.members)
        wanted = sorted({*first, *second})[-KEEP_BELOW:]
        if not set(wanted) <= set(second):
            self.work.blame("lost", step, f"the second tier has {second}, the first {first}")
        self.work.note(f"{self.lane}: the second tier caught up")
        self.look(f"{step}, caught up")

    def sweep(self, step: str) -> None:
        """What the dead have left in either can be removed, and all epochs are as before."""
        alone = Ledger(self.work, self.store, 0)
        alone.begun = self.ledger.begun
        for book in (alone, self.below):
            book.sweep(step)
        self.ledger.look(f"{step}, after gc")
