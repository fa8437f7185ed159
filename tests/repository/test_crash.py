"""Crash matrix: a crash before, in and after every mutation of save, save_async, replace, delete, prune and gc."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore import KeepLast, Repository
from ckptstore.stores import MemoryStore, open_store
from ckptstore.stores.base import Store
from ckptstore.stores.local import LocalStore
from ckptstore.testing import CrashStore, SimulatedCrash
from tests.conftest import Count
from tests.repository.helpers import (
    State,
    assert_no_debris,
    assert_same,
    contents,
    keys_of,
    make_state,
    open_repo,
    pour,
    tiny_state,
)

Make = Callable[[int], State]


@dataclass(frozen=True)
class Scenario:
    """An operation on a repository with the epochs 1, 2 and 3, and what may have become of them after a crash.

    Attributes:
        act: the operation.
        touched: epoch → seeds of the contents that it may have afterwards; None: it may be absent.
        done: the same when the operation has returned.
        again: the epoch that is saved next.
    """

    act: Callable[[Repository, Make], object]
    touched: dict[int, tuple[int | None, ...]]
    done: dict[int, int | None]
    again: int


def save_and_go_on(repo: Repository, make: Make) -> None:
    """A background save, while what it saves is changed."""
    state = make(4)
    handle = repo.save_async(4, state)
    for record in state.values():
        record["w"] = record.pop("w", None)
        record["step"] = -1
        for value in record.values():
            if isinstance(value, np.ndarray):
                value.fill(0)
    handle.result()


SCENARIOS = {
    "save_async": Scenario(save_and_go_on, {4: (None, 4)}, {4: 4}, 4),
    "save": Scenario(lambda repo, make: repo.save(4, make(4)), {4: (None, 4)}, {4: 4}, 4),
    "replace": Scenario(lambda repo, make: repo.save(3, make(13), replace=True), {3: (3, 13)}, {3: 13}, 3),
    "delete": Scenario(lambda repo, _: repo.delete(1), {1: (1, None)}, {1: None}, 1),
    "prune": Scenario(lambda repo, _: repo.prune(KeepLast(1)), {1: (1, None), 2: (2, None)}, {1: None, 2: None}, 4),
    "gc": Scenario(lambda repo, _: repo.gc(grace=0), {}, {}, 4),
}


def prepared(name: str, make: Make) -> dict[str, bytes]:
    """The objects of a repository with epochs 1 to 3, and for gc with debris of every kind."""
    store = MemoryStore()
    repo = open_repo(store)
    for epoch in (1, 2, 3):
        repo.save(epoch, make(epoch))
    if name == "gc":
        crash(store, lambda repo: repo.save(4, make(4)), lambda key: key.startswith("manifests/"), "before")
        crash(
            store, lambda repo: repo.save(3, make(3), replace=True), lambda key: key.startswith("manifests/"), "after"
        )
        repo.save(5, make(5))
        crash(store, lambda repo: repo.delete(5), lambda key: key.startswith("manifests/"), "after")
        store.put("condemned/" + "0" * 32, b"condemned\n")
        store.put("probes/" + "0" * 32, b"clock\n")
    return contents(store)


def crash(store: Store, act: Callable[[Repository], object], at: Callable[[str], bool], mode: Any) -> None:
    """Run ``act`` and crash at the first mutation of a key that ``at`` picks."""

    class At(CrashStore):
        def _mutate(self, key: str, *rest: Any) -> None:
            self._at = self.mutations + 1 if at(key) else -1
            super()._mutate(key, *rest)

    with pytest.raises(SimulatedCrash):
        act(open_repo(At(store, -1, mode)))


def load_all(repo: Repository) -> dict[int, State]:
    return {epoch: repo.checkpoint(epoch).load() for epoch in repo.epochs()}


def check_after_crash(inner: Store, scenario: Scenario, make: Make) -> dict[int, State]:
    """Every epoch is old or new, ``latest`` is right; returns what is there."""
    repo = open_repo(inner)
    found = load_all(repo)
    for epoch in (1, 2, 3, 4):
        allowed = scenario.touched.get(epoch, (epoch if epoch < 4 else None,))
        if epoch not in found:
            assert None in allowed, f"epoch {epoch} is lost"
            continue
        matching = [seed for seed in allowed if seed is not None and same(found[epoch], make(seed))]
        assert matching, f"epoch {epoch} is neither old nor new"
    for deep in (False, True):
        latest = repo.latest(deep=deep)
        assert latest is not None
        assert latest.epoch == max(found)
        assert latest.skipped == ()
    return found


def same(a: State, b: State) -> bool:
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True


def recover(inner: Store, scenario: Scenario, make: Make) -> None:
    """The next save works, and gc leaves nothing that no checkpoint needs."""
    repo = open_repo(inner)
    epoch = scenario.again
    repo.save(epoch, make(99), replace=epoch in repo.epochs())
    open_repo(inner).gc(grace=0)
    assert_no_debris(inner)
    repo = open_repo(inner)
    assert repo.verify().ok
    assert_same(repo.checkpoint(epoch).load(), make(99))


def run_matrix(name: str, modes: tuple[Any, ...], new_store: Callable[[], Store], make: Make) -> int:
    """Crash at every mutation in every mode. Returns how many crash points that were."""
    points = 0
    scenario = SCENARIOS[name]
    objects = prepared(name, make)
    for mode in modes:
        visible = False
        inner = new_store()
        for at in itertools.count(1):
            inner = new_store()
            pour(objects, inner)
            store = CrashStore(inner, at, mode)
            try:
                scenario.act(open_repo(store), make)
            except SimulatedCrash:
                assert store.crashed
            if not store.crashed:
                break
            points += 1
            found = check_after_crash(inner, scenario, make)
            now = all((e in found) == (seed is not None) for e, seed in scenario.done.items())
            now = now and all(seed is None or same(found[e], make(seed)) for e, seed in scenario.done.items())
            assert now or not visible, "what was done at an earlier crash point is undone at a later one"
            visible = now
            recover(inner, scenario, make)
        assert at > 3
        found = load_all(open_repo(inner))
        for epoch, seed in scenario.done.items():
            assert (epoch in found) == (seed is not None)
            if seed is not None:
                assert_same(found[epoch], make(seed))
        assert_no_debris(inner)  # an undisturbed operation leaves none either
    return points


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_crash(kind: str, name: str, fast_folder: Path, count: Count) -> None:
    """P1: wherever an operation crashes, every epoch is whole, the next save works and gc leaves no debris."""
    numbers = itertools.count()

    def new_store() -> Store:
        return MemoryStore() if kind == "memory" else LocalStore(fast_folder / str(next(numbers)))

    modes = ("before", "after", "torn")
    count(f"crash points, {kind}", run_matrix(name, modes, new_store, make_state))


@pytest.mark.s3
@pytest.mark.parametrize(("name", "transport"), [*((name, None) for name in SCENARIOS), ("save", "fsspec")])
def test_crash_s3(name: str, transport: str | None, s3: Any, count: Count) -> None:
    """P1 on a real object store. A put that is cut off leaves nothing there, so "torn" is "before"."""
    opened = open_store(s3.url(), storage_options=s3.storage_options, transport=transport)
    with opened as store, ThreadPoolExecutor(8) as pool:

        def emptied() -> Store:
            list(pool.map(store.delete, keys_of(store)))
            return store

        count("crash points, s3", run_matrix(name, ("before", "after"), emptied, tiny_state))


def test_heartbeat_of_a_crashed_save_is_a_daemon() -> None:
    """P1: a save that dies inside a living process leaves at most daemon threads, and they do not disturb the next."""
    store = MemoryStore()
    crashing = CrashStore(store, 10**9)
    txn = open_repo(crashing).begin(1)
    txn.write("model", make_state(1)["model"])
    crashing._at = crashing.mutations + 1
    with pytest.raises(SimulatedCrash):
        txn.commit()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("ckptstore-lease"))
    repo = open_repo(store)
    repo.save(1, make_state(2))
    repo.gc(grace=0)
    assert_no_debris(store)
    assert_same(repo.checkpoint(1).load(), make_state(2))
    txn._lease.stop()
