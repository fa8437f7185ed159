"""load_newest: the newest checkpoint that loads, read once, whatever has rotted after it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from ckptstore import Checkpoint, CorruptionError, EpochNotFoundError, Repository
from ckptstore.resuming import load_newest
from ckptstore.stores import MemoryStore
from ckptstore.testing import Fault, FaultStore
from tests.repository.helpers import open_repo


def state(epoch: int) -> dict[str, Any]:
    return {"model": {"w": np.full(2000, epoch, np.float32)}, "optimizer": {"step": epoch}}


def store_with(*epochs: int, **options: Any) -> tuple[MemoryStore, Repository]:
    store = MemoryStore()
    repo = open_repo(store, **options)
    for epoch in epochs:
        repo.save(epoch, state(epoch))
    return store, open_repo(store, **options)


def rot(store: MemoryStore, repo: Repository, epoch: int) -> None:
    """Flip a bit of a chunk of an epoch: the sizes stay."""
    attempt = repo._catalog.manifest(repo._catalog.committed(epoch)[-1]).attempt
    for info in store.list(f"attempts/{attempt}/chunks/"):
        data = bytearray(store.get(info.key))
        data[-1] ^= 1
        store.delete(info.key)
        store.put(info.key, bytes(data))


def load(ckpt: Checkpoint) -> Any:
    return ckpt.load()


def test_the_newest_is_loaded_in_one_reading() -> None:
    """Nothing is damaged: one load, of the newest."""
    _, repo = store_with(1, 2)
    calls = []

    def loads(ckpt: Checkpoint) -> Any:
        calls.append(ckpt.epoch)
        return ckpt.load()

    found = load_newest(repo, loads)
    assert found is not None
    assert (calls, found[0].epoch, found[1]["optimizer"]) == ([2], 2, {"step": 2})


def test_nothing_is_none() -> None:
    """P4: an empty repository is told from a damaged one."""
    _, repo = store_with()
    assert load_newest(repo, load) is None


def test_damage_that_only_the_load_finds_is_stepped_over() -> None:
    """P3: bytes that rotted are found by the load; the epoch before is given, and what was skipped is said."""
    store, repo = store_with(1, 2, 3)
    rot(store, repo, 3)
    rot(store, repo, 2)
    assert (ckpt := repo.latest()) is not None
    assert ckpt.epoch == 3  # sizes alone show nothing
    found = load_newest(repo, load)
    assert found is not None
    assert found[0].epoch == 1
    assert sorted(skipped.epoch for skipped in found[0].skipped) == [2, 3]
    assert found[1]["optimizer"] == {"step": 1}


def test_all_damaged_is_an_error() -> None:
    """P4: a repository of which nothing can be loaded is not an empty one."""
    store, repo = store_with(1, 2)
    for epoch in (1, 2):
        rot(store, repo, epoch)
    with pytest.raises(CorruptionError, match="no epoch"):
        load_newest(repo, load)


def test_an_error_of_the_caller_goes_through() -> None:
    """Only damage is stepped over: a state that does not fit is the caller's to hear of."""
    _, repo = store_with(1, 2)

    def fails(ckpt: Checkpoint) -> None:
        raise ValueError(ckpt.epoch)

    with pytest.raises(ValueError, match="2"):
        load_newest(repo, fails)


def test_an_epoch_deleted_meanwhile_is_stepped_over() -> None:
    """Another process may prune what we have just found."""
    _, repo = store_with(1, 2)

    def deleted(ckpt: Checkpoint) -> Any:
        if ckpt.epoch == 2:
            repo.delete(2)
        return ckpt.load()

    found = load_newest(repo, deleted)
    assert found is not None
    assert found[0].epoch == 1


def test_it_always_ends() -> None:
    """P6: a load that finds damage again where the repository sees none is an error, not a loop."""
    _, repo = store_with(1)
    calls = []

    def never(ckpt: Checkpoint) -> None:
        calls.append(ckpt.epoch)
        raise EpochNotFoundError("gone", epoch=ckpt.epoch)

    with pytest.raises(EpochNotFoundError):
        load_newest(repo, never)
    assert calls == [1, 1]


def test_records_that_are_saved_less_often() -> None:
    """By default what the run saves at all is needed; ``need`` says otherwise."""
    store = MemoryStore()
    with open_repo(store, every={"optimizer": 2}) as repo:
        for epoch in (1, 2, 3):
            repo.save(epoch, state(epoch))
    repo = open_repo(store)
    for need, epoch in ((None, 2), ((), 3), (["model"], 3), (["optimizer"], 2)):
        found = load_newest(repo, load, need)
        assert found is not None
        assert found[0].epoch == epoch


def test_it_waits_for_the_save_of_this_process() -> None:
    """P4: what is in flight here is not "nothing": a run that is begun again in the same process finds it."""
    fault = Fault("put", "manifests/", error=lambda: time.sleep(0.3))
    repo = Repository(FaultStore(MemoryStore(), [fault]))
    repo.save_async(1, {"model": [1]})
    found = load_newest(repo, lambda ckpt: ckpt.epoch)
    assert found is not None
    assert found[1] == 1
