"""Meeting: how the ranks of one save find each other, wait for each other, and never for ever.

Everything goes through the store, and every wait looks for three ends: what it waits for, a sign that it will not come,
and the deadline. Who waits polls, with a back-off up to a second (more for very many ranks):

* a rank that has written all looks for rank 0 by one short listing a time, puts its part, and from then on reads *one*
  object a time, the lease of rank 0. That tells whether it works, has given up, is dead, or is through;
* rank 0 lists the parts and the leases of the ranks and looks at its own flag: three requests a time, however many the
  ranks are. Each part and each lease is read once (a lease again when it has changed).

So a save of w ranks takes about 3 w requests beyond those of w saves, and each second of waiting one for each rank.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from ckptstore import keys
from ckptstore.catalog import Catalog
from ckptstore.errors import (
    CkptStoreError,
    EpochExistsError,
    FencedError,
    ObjectExistsError,
    OutcomeUnknownError,
    RanksFailedError,
    TransactionError,
)
from ckptstore.lease import SILENCE, HeldLease, Mark, Sighting, clock, process_is_gone
from ckptstore.manifest import Lease, RankOf, encode_signed
from ckptstore.parts import MAX_REASON, Outcome, Part, encode_part
from ckptstore.patience import current
from ckptstore.stores.base import Store

_FIRST_PAUSE = 0.02
_REMEMBERED = 10_000


class _Process:
    """What this process knows of ranks beyond a single save: since when it runs, and which ends it has heard of."""

    def __init__(self) -> None:
        self.begun = clock()
        self._heard: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._lock = threading.Lock()
        self.untold: set[RankOf] = set()
        """Ranks of this process that have failed before there was a coordinator: one may hear of it later."""

        self._peers: OrderedDict[tuple[str, int], Mark] = OrderedDict()

    def meet(self, group: str, rank: int, peer: Mark) -> None:
        """The process that was that rank in an earlier save."""
        with self._lock:
            self._peers[group, rank] = peer
            while len(self._peers) > _REMEMBERED:
                self._peers.popitem(last=False)

    def is_gone(self, group: str, rank: int) -> str | None:
        """Why a rank that was there in an earlier save will not come, or None. Says it once: it may be replaced."""
        with self._lock:
            peer = self._peers.get((group, rank))
            if peer is None or not process_is_gone(peer):
                return None
            del self._peers[group, rank]
            return f"its process ({peer.pid} on {peer.host}) is gone"

    def hear(self, attempt: str, rank: int) -> None:
        """``rank``, which is of this process, has heard how that attempt ended."""
        with self._lock:
            self._heard[attempt, rank] = None
            while len(self._heard) > _REMEMBERED:
                self._heard.popitem(last=False)

    def has_heard(self, attempt: str, rank: int) -> bool:
        return (attempt, rank) in self._heard


process = _Process()


def _begin_process() -> None:
    global process
    process = _Process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_process)


class Signs:
    """Whether a process lives, by its lease from look to look."""

    def __init__(self) -> None:
        self._beat = -1
        self._since = clock()

    def death(self, lease: Lease) -> str | None:
        """Why it is taken for dead, or None."""
        if lease.beat != self._beat:
            self._beat, self._since = lease.beat, clock()
        if process_is_gone(lease):
            return f"its process ({lease.pid} on {lease.host}) is gone"
        silent = clock() - self._since
        return f"no sign of life for {silent:.0f} seconds ({lease.pid} on {lease.host})" if silent > SILENCE else None


class Waiting:
    """What a rank needs for its waits.

    Args:
        lease: its own, which has been put.
        timeout: seconds from now.
        check: called before each look; raises if this process is to wait no longer.
    """

    def __init__(self, catalog: Catalog, lease: HeldLease, timeout: float, check: Callable[[], None]) -> None:
        rank = lease.lease.rank
        assert rank is not None
        self._catalog = catalog
        self._store = catalog.store
        self._lease = lease
        self._rank: RankOf = rank
        self._epoch = lease.lease.epoch
        self._timeout = timeout
        self._end = clock() + timeout
        self._check = check
        self._pause = _FIRST_PAUSE
        self._longest = min(10.0, max(1.0, rank.world_size / 32))

    @property
    def _is_over(self) -> bool:
        return clock() >= self._end

    def _wait(self) -> None:
        """Until the next look."""
        self._check()
        patience, left = current(), self._end - clock()
        if not patience.sleep(min(self._pause, left) if left > 0 else self._pause):
            patience.check(f"the save of epoch {self._epoch}")
        self._pause = min(self._pause * 1.5, self._longest)

    def _is_news(self, sighting: Sighting) -> bool:
        """Whether an attempt that has ended was one of this launch, and this rank has not heard of its end.

        The name of the group should tell, but may have been used before: by a launch that ended before this process
        began. Both times are the store's, and what lies between the beginning and now is measured here.
        """
        begun = self._lease.now() - (clock() - process.begun)
        return sighting.modified >= begun and not process.has_heard(sighting.attempt, self._rank.rank)

    def _hear(self, attempt: str) -> None:
        process.hear(attempt, self._rank.rank)

    def _has_heard(self, attempt: str) -> bool:
        return process.has_heard(attempt, self._rank.rank)

    def _is_same(self, lease: Lease | None) -> bool:
        rank = lease.rank if lease is not None else None
        return lease is not None and rank is not None and rank.group == self._rank.group and lease.epoch == self._epoch

    def failed(self, ranks: dict[int, str], *, of_the_store: bool = False) -> RanksFailedError:
        """The error that names them."""
        return ranks_failed(self._epoch, ranks, of_the_store=of_the_store)


def check_part(part: Part, epoch: int, rank: RankOf, where: str) -> None:
    """TransactionError unless the part belongs to this save of this launch."""
    if (part.epoch, part.group, part.world_size) != (epoch, rank.group, rank.world_size):
        raise TransactionError(
            f"{where} is of epoch {part.epoch}, group {part.group!r} and {part.world_size} ranks, and not of epoch "
            f"{epoch}, group {rank.group!r} and {rank.world_size} ranks",
            epoch=epoch,
        )


def ranks_failed(epoch: int, ranks: dict[int, str], *, of_the_store: bool = False) -> RanksFailedError:
    """The error that names the ranks, the first of them in its message."""
    named = [f"rank {rank}: {why}" for rank, why in sorted(ranks.items())]
    more = f" (and {len(named) - 8} more)" if len(named) > 8 else ""
    message = f"epoch {epoch} was not saved: {'; '.join(named[:8])}{more}"
    return RanksFailedError(message, ranks=ranks, of_the_store=of_the_store, epoch=epoch)


def outcome_unknown(epoch: int, why: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"it is not known whether epoch {epoch} was committed: {why}. Look whether the epoch is there before saving it "
        "again",
        epoch=epoch,
    )


def error_of(outcome: Outcome) -> CkptStoreError:
    """What a rank raises when it reads how the coordinator ended."""
    for kind in (EpochExistsError, FencedError, OutcomeUnknownError):
        if outcome.error == kind.__name__:
            return kind(outcome.message, epoch=outcome.epoch)
    ranks = {int(rank): why for rank, why in outcome.ranks.items()}
    return ranks_failed(outcome.epoch, ranks, of_the_store=outcome.of_the_store)


def reason_of(error: BaseException) -> str:
    """What other ranks are told of an error."""
    text = str(error)
    return f"{type(error).__name__}: {text}"[:MAX_REASON] if text else type(error).__name__


def put_failed_part(store: Store, coordinator: str, part: Part) -> None:
    """Tell the coordinator that a rank has failed; nothing if it has the part of that rank already."""
    try:
        store.put(keys.part_key(coordinator, part.rank), encode_part(part), if_absent=True)
    except ObjectExistsError:
        pass


def put_outcome(store: Store, outcome: Outcome) -> None:
    """Tell the ranks; nothing if they were told."""
    try:
        store.put(keys.outcome_key(outcome.attempt), encode_signed(outcome), if_absent=True)
    except ObjectExistsError:
        pass
