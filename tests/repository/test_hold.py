"""Holds: what somebody reads is not pruned under him, unless he is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import EpochNotFoundError, InvalidArgumentError, KeepLast, Repository, keys
from ckptstore.errors import AccessError
from ckptstore.lease import EXPIRY, HEARTBEAT, read_leases
from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from ckptstore.testing import Fault, FaultStore
from tests.repository.helpers import (
    Clock,
    Interfering,
    assert_no_debris,
    assert_same,
    keys_of,
    make_state,
    open_repo,
)

ROOT = Path(__file__).parents[2]


def filled(store: Store, *epochs: int, **options: Any) -> Repository:
    repo = open_repo(store, **options)
    for epoch in epochs:
        repo.save(epoch, make_state(epoch))
    return repo


def leases(store: Store) -> list[str]:
    return [key for key in keys_of(store) if key.startswith(keys.LEASES)]


# ---- the living ---------------------------------------------------------------------------------------------


def test_a_held_epoch_is_not_pruned() -> None:
    """P5: by nobody: not by a prune, a save with a policy, a full disk or a policy for each record. Then it goes."""
    store = MemoryStore()
    trainer = filled(store, 1, 2, keep=None)
    reader = open_repo(store)
    with reader.hold(1, "evaluation on the test set") as ckpt:
        plan = trainer.plan(KeepLast(1))
        assert plan.kept[1].startswith("held by a reader on ")
        assert plan.kept[1].endswith(": evaluation on the test set")
        assert trainer.holds() == {1: plan.kept[1]}
        assert trainer.prune(KeepLast(1)).kept == plan.kept
        open_repo(store, keep=KeepLast(1)).save(3, make_state(3))
        trainer.prune({"model": KeepLast(9), "optim": KeepLast(1)})
        assert sorted(trainer.checkpoint(1).records) == ["model", "optim"]
        assert 1 not in trainer._reclaim.deletable()
        trainer.gc(grace=0)
        assert trainer.epochs() == [1, 3]
        assert_same(ckpt.load(), make_state(1))
    assert leases(store) == []
    assert trainer.holds() == {}
    trainer.prune(KeepLast(1))
    assert trainer.epochs() == [3]
    trainer.gc(grace=0)
    assert_no_debris(store)


@pytest.mark.parametrize("how", ["delete", "replace"])
def test_what_is_deleted_by_hand_stays_readable_while_it_is_held(how: str) -> None:
    """The epoch goes, its objects wait for the reader; then they are debris for gc."""
    store = MemoryStore()
    repo = filled(store, 1, 2)
    with open_repo(store).hold(1) as ckpt:
        if how == "delete":
            repo.delete(1)
        else:
            repo.save(1, make_state(11), replace=True)
        repo.gc()
        repo.gc(grace=0)
        assert_same(ckpt.load(), make_state(1))
    repo.gc(grace=0)
    assert_no_debris(store)


@pytest.mark.parametrize("act", ["prune", "prune records", "prune and gc", "delete"])
def test_a_hold_that_comes_at_any_step_of_a_prune(act: str) -> None:
    """P5: whoever got a checkpoint from ``hold`` can read all of it, whenever the lease came."""
    step, acted = 0, True
    while acted:
        step += 1
        acted = _held_at(step, act)
    assert step > 5


def _held_at(step: int, act: str) -> bool:
    store = MemoryStore()
    filled(store, 1, 2, 3)
    between = Interfering(store)
    between.after = False
    calls = iter(range(1, 10_000))
    between.at = lambda verb, key: next(calls) == step
    reader = open_repo(store)
    holding: list[Any] = []

    def hold() -> None:
        context = reader.hold(1, "now")
        try:
            holding.append((context, context.__enter__()))
        except EpochNotFoundError:
            holding.append(None)

    between.interfere = hold
    pruner = open_repo(between)
    if act == "delete":
        pruner.delete(1)
    elif act == "prune records":
        pruner.prune({"model": KeepLast(9), "optim": KeepLast(1)})
    else:
        pruner.prune(KeepLast(1))
    if act == "prune and gc":
        pruner.gc(grace=0)
    if holding and holding[0] is not None:
        context, ckpt = holding[0]
        assert_same(ckpt.load(), {name: make_state(1)[name] for name in ckpt.records})
        context.__exit__(None, None, None)
    open_repo(store).gc(grace=0)
    assert_no_debris(store)
    return bool(holding)


def test_readers_beside_a_trainer_that_prunes(fast_folder: Path) -> None:
    """P5: many holds of the newest, beside saves that keep one epoch: every load is whole."""
    wrong: list[Exception] = []
    loads = [0]
    ended = threading.Event()

    def read() -> None:
        with ckptstore.open(fast_folder) as repo:
            while not ended.is_set():
                try:
                    with repo.hold() as ckpt:
                        state = ckpt.load("m")
                        assert int(state["w"][0]) == ckpt.epoch
                        assert np.all(state["w"] == ckpt.epoch)
                    loads[0] += 1
                except EpochNotFoundError:
                    continue  # it had gone before it was held
                except Exception as error:  # noqa: BLE001 (whatever it is, the test must hear of it)
                    wrong.append(error)
                    return

    with ckptstore.open(fast_folder, keep=KeepLast(1)) as trainer:
        trainer.save(0, {"m": {"w": np.full(30_000, 0)}})
        readers = [threading.Thread(target=read) for _ in range(3)]
        for thread in readers:
            thread.start()
        for epoch in range(1, 40):
            trainer.save(epoch, {"m": {"w": np.full(30_000, epoch)}})
        while not wrong and loads[0] < 20:
            time.sleep(0.01)
        ended.set()
        for thread in readers:
            thread.join()
        assert wrong == []
        trainer.prune(KeepLast(1))
        assert trainer.epochs() == [39]
        trainer.gc(grace=0)
        assert_no_debris(trainer.store)


def test_a_hold_of_hours_is_renewed() -> None:
    """As long as its reader lives, also if somebody takes the lease away."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    repo = filled(store, 1, 2)
    with repo.hold(1):
        [key] = leases(store)
        import gc as memory

        from ckptstore.hold import ReaderLease

        [lease] = [found for found in memory.get_objects() if type(found) is ReaderLease and found._key == key]
        for _ in range(5):
            clock.go(EXPIRY - HEARTBEAT)
            lease.renew()
            open_repo(store).prune(KeepLast(1))
            open_repo(store).gc(grace=0)
            assert repo.epochs() == [1, 2]
        store.delete(key)
        lease.renew()
        assert leases(store) == [key]
    assert leases(store) == []


# ---- the dead -------------------------------------------------------------------------------------------------


def test_a_reader_that_is_silent_for_too_long() -> None:
    """By the store's clock: a second more than 15 minutes, and the epoch is pruned like any other."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    repo = filled(store, 1, 2)
    context = repo.hold(1, "forgotten")
    context.__enter__()
    clock.go(EXPIRY - 1)
    assert open_repo(store).prune(KeepLast(1)).removed == {}
    clock.go(2)
    assert open_repo(store).prune(KeepLast(1)).removed.keys() == {1}
    assert open_repo(store).verify().ok
    context.__exit__(None, None, None)
    open_repo(store).gc()
    assert_no_debris(store)


READER = """
import sys, time
import ckptstore
with ckptstore.open(sys.argv[1], create=False).hold(1, "a job that is killed") as ckpt:
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_reader_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL: its epoch stays until the lease has expired by the times of the folder, then it goes with all traces."""
    repo = ckptstore.open(tmp_path / "r", chunk_size=64 * 1024)
    for epoch in (1, 2, 3):
        repo.save(epoch, make_state(epoch))
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path / "r")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert "a job that is killed" in repo.plan(KeepLast(1)).kept[1]
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert repo.prune(KeepLast(1)).removed.keys() == {2}
    [lease] = (tmp_path / "r" / "leases").glob("*.json")
    repo.gc(grace=0)
    assert lease.exists()
    long_ago = lease.stat().st_mtime - EXPIRY - 5
    os.utime(lease, (long_ago, long_ago))
    assert "held" not in str(repo.plan(KeepLast(1)).kept)
    assert repo.prune(KeepLast(1)).removed.keys() == {1}
    repo.gc()
    assert_no_debris(repo.store)
    assert_same(repo.checkpoint(3).load(), make_state(3))


# ---- what goes wrong ------------------------------------------------------------------------------------------


def test_a_hold_of_nothing() -> None:
    """There is none without an epoch; a failing block releases; a lease that cannot be put is an error."""
    store = MemoryStore()
    repo = open_repo(store)
    with pytest.raises(EpochNotFoundError), repo.hold():
        pass
    filled(store, 1, 2)
    with pytest.raises(EpochNotFoundError), repo.hold(9):
        pass
    with pytest.raises(InvalidArgumentError), repo.hold(1, 7):  # type: ignore[arg-type]
        pass
    with pytest.raises(ZeroDivisionError), repo.hold() as ckpt:
        assert ckpt.epoch == 2
        raise ZeroDivisionError
    assert leases(store) == []
    refusing = FaultStore(store, [Fault("put", keys.LEASES, error=AccessError("no"), times=None)])
    with pytest.raises(AccessError), open_repo(refusing).hold(1):
        raise AssertionError("it was not held")
    assert leases(store) == []


def test_a_reader_is_no_attempt_to_adopt() -> None:
    """A save of the held epoch neither adopts nor ends the lease of a reader, however silent."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    repo = filled(store, 1, 2)
    with repo.hold(1):
        clock.go(4 * HEARTBEAT)
        txn = open_repo(store).begin(1, replace=True)
        assert txn._claim.adopted == ()
        txn.write("model", make_state(11)["model"])
        txn.commit()
        assert len(read_leases(store)) == 1
        repo._reclaim.sweep()
        assert len(read_leases(store)) == 1
