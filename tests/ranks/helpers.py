"""What the tests of ranks share: ranks as threads of one process, each with a repository of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckptstore import Checkpoint, Repository
from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from tests.repository.helpers import assert_no_debris, assert_same, open_repo

SECONDS = 60.0  # so long a test waits for what must end by itself

Outcome = Checkpoint | BaseException


def part_of(epoch: int, rank: int, *, items: int = 3000) -> dict[str, Any]:
    """The state of one rank: something that never changes, and something that does."""
    noise = np.random.default_rng([epoch, rank])
    frozen = np.random.default_rng([0, rank]).standard_normal(items)
    return {"frozen": frozen, "w": noise.standard_normal(items), "epoch": epoch, "rank": rank}


def whole(epoch: int, ranks: int, **size: int) -> dict[str, Any]:
    """What all ranks save together."""
    return {f"rank-{rank}": part_of(epoch, rank, **size) for rank in range(ranks)}


def save_part(repo: Repository, epoch: int, rank: int, ranks: int, **how: Any) -> Checkpoint | Any:
    """What each rank does."""
    how = {"group": "launch", "timeout": SECONDS, **how}
    return repo.save(epoch, {f"rank-{rank}": part_of(epoch, rank)}, rank=rank, world_size=ranks, **how)


def together(acts: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
    """All acts at once, each on a thread; what they return or raise, by rank. AssertionError if one hangs."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = acts[rank]()
        except BaseException as error:  # noqa: BLE001 (also a simulated crash)
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found.keys() == acts.keys(), f"ranks hang: {sorted(acts.keys() - found.keys())}"
    return found


def save_all(
    stores: Mapping[int, Store] | Store, epoch: int, ranks: int, act: Callable[..., Any] = save_part, **how: Any
) -> dict[int, Any]:
    """Every rank saves its part, each through a repository of its own."""
    by_rank = stores if isinstance(stores, Mapping) else dict.fromkeys(range(ranks), stores)

    def one(rank: int) -> Callable[[], Any]:
        return lambda: act(open_repo(by_rank[rank]), epoch, rank, ranks, **how)

    return together({rank: one(rank) for rank in by_rank})


def assert_saved(found: Mapping[int, Any], epoch: int) -> None:
    """Every rank got the checkpoint."""
    for rank, outcome in found.items():
        assert isinstance(outcome, Checkpoint), (rank, outcome)
        assert outcome.epoch == epoch


def assert_whole(store: Store, epochs: Mapping[int, int]) -> None:
    """Exactly these epochs (each with its number of ranks) are there, bit for bit, and nothing else is after a gc."""
    repo = open_repo(store)
    assert repo.epochs() == sorted(epochs)
    for epoch, ranks in epochs.items():
        assert_same(repo.checkpoint(epoch).load(), whole(epoch, ranks))
    repo.gc(grace=0)
    assert repo.verify().ok
    assert_no_debris(store)


def started(ranks: int, *epochs: int) -> MemoryStore:
    """A store with epochs that were saved by so many ranks."""
    store = MemoryStore()
    for epoch in epochs:
        assert_saved(save_all(store, epoch, ranks, group=f"launch {epoch}"), epoch)
    return store
