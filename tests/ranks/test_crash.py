"""A rank dies before and after each of its puts and deletes: all or nothing, all survivors hear it, the retry works.

And with a gc, of the most impatient kind, between any two of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptstore import Checkpoint, OutcomeUnknownError, RanksFailedError, TransactionError
from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from ckptstore.testing import CrashStore, SimulatedCrash
from tests.conftest import Count
from tests.ranks.helpers import assert_saved, assert_whole, save_all, started
from tests.repository.helpers import Interfering, contents, open_repo, pour

RANKS = 3
SHORT = 0.15  # seconds that the survivors wait


@pytest.fixture(scope="module")
def before() -> dict[str, bytes]:
    """The objects of a repository with epoch 1."""
    return contents(started(RANKS, 1))


def fresh(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    pour(objects, store)
    return store


def mutations(objects: dict[str, bytes], rank: int) -> int:
    """How many puts and deletes a rank makes in a save."""
    store = fresh(objects)
    counting = CrashStore(store, 10**6)
    assert_saved(save_all({**dict.fromkeys(range(RANKS), store), rank: counting}, 2, RANKS), 2)
    return counting.mutations


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("victim", [0, 1])
def test_crash_at_every_mutation(before: dict[str, bytes], victim: int, mode: Any, count: Count) -> None:
    """P1, P2: after the crash epoch 2 is whole or absent, and what the survivors were told is true."""
    for at in range(1, mutations(before, victim) + 1):
        store = fresh(before)
        crashing = CrashStore(store, at, mode)
        stores: dict[int, Store] = {**dict.fromkeys(range(RANKS), store), victim: crashing}
        found = save_all(stores, 2, RANKS, group=f"first {at}", timeout=SHORT)
        died = found.pop(victim)
        assert crashing.crashed
        assert isinstance(died, (SimulatedCrash, Checkpoint)), died
        there = open_repo(store).epochs() == [1, 2]
        for rank, told in found.items():
            if there:
                assert isinstance(told, Checkpoint), (at, rank, told)
            else:
                assert isinstance(told, RanksFailedError), (at, rank, told)
                assert sorted(told.ranks) == [victim], (at, rank, told)
        assert_saved(save_all(store, 2, RANKS, group="second", replace=there), 2)
        assert_whole(store, {1: RANKS, 2: RANKS})
        count("crashes of a rank in a save of several")


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("grace", [0.0, 900.0])
def test_gc_between_any_two_requests(before: dict[str, bytes], victim: int, grace: float, count: Count) -> None:
    """P5: a gc at every moment of a rank. Patient, it changes nothing; impatient, it may cost the save, all of it."""
    at = 0
    while True:
        at += 1
        store = fresh(before)
        pausing = Interfering(store)
        pausing.after = False
        pausing.at = _the(at)
        pausing.interfere = lambda store=store: open_repo(store).gc(grace=grace)
        stores: dict[int, Store] = {**dict.fromkeys(range(RANKS), store), victim: pausing}
        found = save_all(stores, 2, RANKS, group=f"first {at}", timeout=5.0 if grace else 1.0)
        happened = pausing.interfere is None
        there = open_repo(store).epochs() == [1, 2]
        for rank, told in found.items():
            assert isinstance(told, Checkpoint) == there, (at, rank, told)
            assert there or isinstance(told, (TransactionError, RanksFailedError)), (at, rank, told)
            assert not isinstance(told, OutcomeUnknownError)
        assert there or grace == 0
        if not there:
            assert_saved(save_all(store, 2, RANKS, group="second"), 2)
        assert_whole(store, {1: RANKS, 2: RANKS})
        count("gc amid a save of several ranks")
        if not happened:
            break


def _the(number: int) -> Callable[[str, str], bool]:
    """Picks the call of that number."""
    lock, calls = threading.Lock(), iter(range(1, 10**6))

    def pick(verb: str, key: str) -> bool:
        with lock:
            return next(calls) == number

    return pick
