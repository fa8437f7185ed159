"""What comes first and what may go: numbers decide, never times; nobody sees an epoch before it is whole."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ckptstore
from ckptstore import EpochExistsError, EpochNotFoundError, KeepLast, keys
from ckptstore.lease import EXPIRY
from ckptstore.manifest import encode_manifest
from ckptstore.stores import MemoryStore, OpLog, TraceStore
from ckptstore.stores.base import Store
from ckptstore.stores.local import LocalStore
from ckptstore.testing import CrashStore, Fault, FaultStore, SimulatedCrash
from tests.repository.helpers import (
    assert_no_debris,
    assert_same,
    keys_of,
    make_state,
    manifests_of,
    open_repo,
    tiny_state,
)
from tests.repository.test_race import in_processes


def newest(store: Store) -> int | None:
    checkpoint = open_repo(store).latest()
    return None if checkpoint is None else checkpoint.epoch


def test_nothing_moves_before_the_commit(fast_folder: Path) -> None:
    """P1, P5: while a save is slow, in the background too, the epoch before is latest and whole; nothing is deleted
    before the new manifest is there.
    """
    inner = LocalStore(fast_folder / "repo")
    log = OpLog()
    held = threading.Event()

    def wait() -> None:
        assert held.wait(60)

    slow = FaultStore(TraceStore(inner, log), [Fault("put", "chunks/", error=wait, times=None)])
    open_repo(inner).save(1, make_state(1))
    before = set(keys_of(inner))
    repo = open_repo(slow, keep=KeepLast(1))
    handle = repo.save_async(2, make_state(2))
    handle.wait(until="staged")
    time.sleep(0.2)
    assert newest(inner) == 1
    assert before <= set(keys_of(inner))
    assert open_repo(inner).verify(1).ok
    held.set()
    handle.result()
    assert newest(inner) == 2
    verbs = [(event.verb, event.key) for event in log.events]
    committed = verbs.index(("put", keys.manifest_key(2, 1)))
    assert ("delete", keys.manifest_key(1, 1)) in verbs[committed:]
    assert [key for verb, key in verbs[:committed] if verb == "delete"] == []


@pytest.mark.parametrize("kind", ["local", pytest.param("s3", marks=pytest.mark.s3)])
def test_what_latest_says_can_be_loaded(kind: str, fast_folder: Path, request: pytest.FixtureRequest) -> None:
    """P1, P2: two processes race for each epoch, one of them slow; all that ``latest`` says meanwhile can be loaded."""
    bucket = request.getfixturevalue("s3") if kind == "s3" else None
    url = bucket.url() if bucket else str(fast_folder / "repo")
    options = bucket.storage_options if bucket else None
    rounds = 8 if bucket else 30
    stop = threading.Event()
    seen: list[int] = []

    def follow() -> None:
        with ckptstore.open(url, options, run_id="") as reader:
            while not stop.is_set():
                checkpoint = reader.latest()
                if checkpoint is not None:
                    loaded = checkpoint.load()
                    assert_same(loaded, tiny_state(loaded["model"]["step"]))
                    seen.append(checkpoint.epoch)

    with ckptstore.open(url, options, run_id="") as repo:
        follower = Checked(follow)
        jobs = [{"act": "race", "rounds": rounds, "options": options, "delay": delay} for delay in (0.01, 0.05)]
        won = in_processes(url, jobs)
        stop.set()
        follower.check()
        assert sum(map(int, won)) == rounds
        assert repo.epochs() == list(range(1, rounds + 1))
        assert seen == sorted(seen)
        assert len(set(seen)) > 1


class Checked(threading.Thread):
    """A thread whose error is raised by ``check``."""

    def __init__(self, act: Any) -> None:
        super().__init__(daemon=True)
        self._act = act
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._act()
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def check(self) -> None:
        self.join(60)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error


def test_saving_an_epoch_again() -> None:
    """P1: refused unless ``replace``; killed at any mutation of one, the old content stands until the new one does, and
    a reader meanwhile gets all of one.
    """
    died, store = True, MemoryStore()
    old, new = make_state(1), make_state(2)
    outcomes = set()
    for at in range(1, 40):
        store = MemoryStore()
        open_repo(store).save(5, old)
        with pytest.raises(EpochExistsError, match="replace=True"):
            open_repo(store).save(5, new)
        try:
            open_repo(CrashStore(store, at)).save(5, new, replace=True)
            died = False
        except SimulatedCrash:
            died = True
        found = open_repo(store).checkpoint(5).load()
        outcomes.add(found["optim"]["step"])
        assert_same(found, old if found["optim"]["step"] == 1 else new)
        if not died:
            break
    assert outcomes == {1, 2}
    assert not died
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            checkpoint = open_repo(store).checkpoint(5)  # never "missing"
            try:
                found = checkpoint.load()
            except EpochNotFoundError:
                continue  # just this generation was replaced while it was being read: ask for the epoch again
            assert_same(found, make_state(found["optim"]["step"]))

    reader = Checked(read)
    for seed in range(3, 13):
        open_repo(store).save(5, make_state(seed), replace=True)
    done.set()
    reader.check()


@pytest.mark.parametrize("times", ["equal", "reversed", "future", "past"])
@pytest.mark.parametrize("clock", [-3600.0, 10 * 365 * 86400.0])
def test_times_decide_nothing(fast_folder: Path, monkeypatch: pytest.MonkeyPatch, times: str, clock: float) -> None:
    """P5: whatever the times of the objects say, and wherever the local clock jumps during a save: numbers decide."""
    store = LocalStore(fast_folder / "repo")
    repo = open_repo(store)
    for epoch in range(1, 6):
        repo.save(epoch, tiny_state(epoch))
    now = time.time()
    for key in keys_of(store):
        parsed = keys.parse_manifest_key(key)
        back = {"equal": 0.0, "reversed": 100.0 * (parsed[0] if parsed else 0), "future": -1e6, "past": 1e8}[times]
        os.utime(os.path.join(store.root, key), (now - back, now - back))
    steps = iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: now + clock * next(steps))
    again = open_repo(store, keep=KeepLast(2))
    again.save(6, tiny_state(6))
    again.gc()
    assert again.epochs() == [5, 6]
    assert newest(store) == 6
    for epoch in (5, 6):
        assert_same(again.checkpoint(epoch).load(), tiny_state(epoch))
    monkeypatch.undo()
    again.gc(grace=0)
    assert_no_debris(store)


def test_a_store_clock_that_jumps_amid_a_save() -> None:
    """P5: the store's clock jumps by a day, either way, while a save runs beside gc: what is committed is whole."""
    for jump in (-86400.0, 86400.0, -EXPIRY, EXPIRY + 1):
        now = [1e6]
        store = MemoryStore(clock=lambda now=now: now[0])  # type: ignore[misc]
        open_repo(store).save(1, make_state(1))
        with_gap = open_repo(store).begin(2)
        with_gap.write("model", make_state(2)["model"])
        now[0] += jump
        open_repo(store).gc()
        try:
            with_gap.write("optim", make_state(2)["optim"])
            with_gap.commit()
            committed = True
        except ckptstore.TransactionError as error:
            with_gap._give_up(error)
            committed = False
        repo = open_repo(store)
        assert repo.epochs() == ([1, 2] if committed else [1])
        assert repo.verify().ok
        repo.save(3, make_state(3))
        repo.gc(grace=0)
        assert_no_debris(store)


def test_numbers_are_compared_as_numbers() -> None:
    """P5: order is numeric at any width; other spellings of a number are no candidates."""
    numbers = [9, 10, 99, 100, 1000, 900_000, 1_000_000, 2**40, 2**63 - 1]
    store = MemoryStore()
    repo = open_repo(store)
    for epoch in reversed(numbers[:-1]):
        repo.save(epoch, {"m": epoch})
    assert repo.epochs() == numbers[:-1]
    assert newest(store) == 2**40
    repo.save(numbers[-1], {"m": 0})
    foreign = [
        "manifests/9-1.json",
        "manifests/0000000000099-000001.json",
        "manifests/99999999999999999999-000001.json",
    ]
    for key in foreign:
        store.put(key, b"{}")
    assert newest(store) == 2**63 - 1
    assert repo.prune(KeepLast(3)).removed.keys() == set(numbers[:-3])
    assert open_repo(store).epochs() == numbers[-3:]
    assert set(foreign) <= set(keys_of(store))


def test_odd_creation_times_decide_nothing() -> None:
    """P5: ``created`` is for people: odd, equal or missing times change neither order nor what is kept."""
    created = [
        "2026-01-01T00:00:13Z",
        "2026-01-01T00:00:13.5Z",
        "2026-01-01T00:00:14+00:00",
        "",
        "9999-12-31",
        "x" * 99,
    ]
    store = MemoryStore()
    repo = open_repo(store)
    order = [4, 2, 6, 1, 5, 3]
    for epoch, text in zip(order, created, strict=True):
        repo.save(epoch, tiny_state(epoch))
        manifest = next(m for m in manifests_of(store) if m.epoch == epoch)
        store.put(manifest.key, encode_manifest(msgspec.structs.replace(manifest, created=text)))
    repo = open_repo(store)
    assert newest(store) == 6
    assert repo.checkpoint(4).created == created[0]
    report = repo.prune(KeepLast(2))
    assert report.removed.keys() == {1, 2, 3, 4}
    assert repo.epochs() == [5, 6]
    assert repo.verify().ok


def test_processes_prune_while_others_look(fast_folder: Path) -> None:
    """P5: four processes prune the same epochs at once, another lists and loads the latest: no error, no leftovers."""
    url = str(fast_folder / "repo")
    with ckptstore.open(url, run_id="") as repo:
        for epoch in range(1, 11):
            repo.save(epoch, make_state(epoch))
    jobs: list[dict[str, Any]] = [{"act": "prune", "keep": 1, "rounds": 3}] * 4 + [{"act": "look", "rounds": 40}]
    assert in_processes(url, jobs) == ["pruned"] * 4 + ["looked"]
    with ckptstore.open(url, run_id="") as repo:
        assert repo.epochs() == [10]
        repo.gc(grace=0)
        assert_no_debris(repo.store)
        assert_same(repo.checkpoint(10).load(), make_state(10))
        with pytest.raises(EpochNotFoundError):
            repo.checkpoint(1)
