"""One record of several ranks: pieces of sharded arrays, replicas, plain values; saved by so many, loaded by others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptstore import InvalidRecordError, RanksFailedError, Repository, ShardedArray, keys
from ckptstore.stores import MemoryStore
from tests.ranks.helpers import assert_saved, save_all
from tests.repository.helpers import assert_same, keys_of, open_repo, reached

ROWS, COLUMNS = 30, 700


def full(epoch: int) -> dict[str, Any]:
    """The whole record: an array that ranks share by rows, a small one, one that all have, and plain values."""
    noise = np.random.default_rng(epoch)
    return {
        "w": noise.standard_normal((ROWS, COLUMNS)),
        "bias": noise.standard_normal(ROWS).astype("f4"),
        "embedding": noise.standard_normal(5000),
        "step": epoch,
        "tied": {"name": "x"},
    }


def shard(epoch: int, rank: int, ranks: int) -> dict[str, Any]:
    """What one rank has of it."""
    state = full(epoch)
    rows = slice(ROWS * rank // ranks, ROWS * (rank + 1) // ranks)
    for name in ("w", "bias"):
        offset = (rows.start, *(0,) * (state[name].ndim - 1))
        state[name] = ShardedArray(state[name].shape, state[name].dtype.name, [(offset, state[name][rows].copy())])
    return state


def save_shard(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
    records = {"model": shard(epoch, rank, ranks), f"rng-{rank}": {"seed": rank}}
    return repo.save(epoch, records, rank=rank, world_size=ranks, group=f"of {ranks}")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_record_of_all_ranks(ranks: int) -> None:
    """Bit for bit the whole; what all ranks have lies there once, and nothing else is left."""
    store = MemoryStore()
    for epoch in (1, 2):
        found = save_all(store, epoch, ranks, save_shard)
        assert_saved(found, epoch)
        checkpoint = open_repo(store).checkpoint(epoch)
        assert_same(checkpoint.load("model"), full(epoch))
        assert sorted(checkpoint.records) == ["model", *(f"rng-{rank}" for rank in range(ranks))]
        nbytes = sum(value.nbytes for value in full(epoch).values() if isinstance(value, np.ndarray))
        assert checkpoint._manifest.bytes_state == nbytes
        assert found[0].report.bytes_state == nbytes
    extra = set(keys_of(store)) - reached(store)
    assert {keys.parse_note_key(key) is not None for key in extra} == {True}
    assert open_repo(store).verify().ok


def test_other_ranks_go_on() -> None:
    """Saved by three, loaded and saved again by two and by five: resharded by reading only what each needs."""
    store = MemoryStore()
    assert_saved(save_all(store, 1, 3, save_shard), 1)

    def go_on(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        checkpoint = repo.latest()
        assert checkpoint is not None
        mine = shard(0, rank, ranks)
        checkpoint.load("model", into=mine)
        wanted = shard(checkpoint.epoch, rank, ranks)
        for name in ("w", "bias"):
            for (_, got), (_, want) in zip(mine[name].pieces, wanted[name].pieces, strict=True):
                assert got.tobytes() == want.tobytes()
        return save_shard(repo, epoch, rank, ranks)

    for epoch, ranks in ((2, 2), (3, 5), (4, 1)):
        found = save_all(store, epoch, ranks, go_on)
        assert_saved(found, epoch)
        assert_same(open_repo(store).checkpoint(epoch).load("model"), full(epoch))


def test_pieces_that_do_not_fit_together() -> None:
    """A rank with another step, a row that nobody has: refused on all ranks by path and rank, nothing committed."""
    store = MemoryStore()

    def another_step(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        state = {**shard(epoch, rank, ranks), "step": 7 if rank == 1 else epoch}
        return repo.save(epoch, {"model": state}, rank=rank, world_size=ranks, group="g")

    def a_gap(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        state = shard(epoch, 0 if rank == 1 else rank, ranks)
        return repo.save(epoch, {"model": state}, rank=rank, world_size=ranks, group="g")

    for act, path in ((another_step, "model.step"), (a_gap, "model.w")):
        found = save_all(store, 1, 3, act)
        own = found.pop(0)
        assert isinstance(own, InvalidRecordError), own
        assert path in str(own)
        for error in found.values():
            assert isinstance(error, RanksFailedError)
            assert path in error.ranks[0]
    assert open_repo(store).epochs() == []


def test_what_all_ranks_have_is_not_sent_twice_later() -> None:
    """An array that does not change, on all ranks: in the second save no rank sends it."""
    store = MemoryStore()
    frozen = np.random.default_rng(0).standard_normal(20_000)

    def act(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        return repo.save(epoch, {"model": {"frozen": frozen}}, rank=rank, world_size=ranks, group="g")

    for epoch in (1, 2):
        found = save_all(store, epoch, 3, act)
        assert_saved(found, epoch)
        assert {outcome.report.chunks_sent > 0 for outcome in found.values()} == {epoch == 1}
    chunks = [key for key in keys_of(store) if "/chunks/" in key]
    assert len(chunks) == 3  # of 64 KiB: once, not three times
