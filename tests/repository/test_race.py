"""Races: many writers for one epoch, and sweepers beside writers. Exactly one wins, and nothing good is swept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import CkptStoreError, EpochExistsError, KeepLast
from ckptstore.stores import MemoryStore, open_store
from ckptstore.stores.base import Store
from ckptstore.stores.local import LocalStore
from ckptstore.testing.suite import at_once
from tests.repository.helpers import CHUNK, assert_no_debris, assert_same, make_state, open_repo, tiny_state

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, fast_folder: Path) -> Store:
    """A repository without epochs."""
    made = MemoryStore() if request.param == "memory" else LocalStore(fast_folder / "repo")
    open_repo(made)
    return made


def in_processes(url: str, jobs: list[dict[str, Any]], meanwhile: Callable[[], None] = lambda: None) -> list[str]:
    """Run one process a job; all start at the same shot. Returns what each reports."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        running = []
        for number, job in enumerate(jobs):
            argument = json.dumps({"url": url, "number": number, **job})
            command = [sys.executable, "-m", "tests.repository.worker", argument]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=ROOT, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        meanwhile()
        return [json.loads(process.communicate(timeout=120)[0]) for process in running]


def check_one_winner(store: Store, outcomes: list[str], make: Callable[[int], Any]) -> None:
    assert outcomes.count("saved") == 1, outcomes
    assert outcomes.count("EpochExistsError") == len(outcomes) - 1, outcomes
    repo = open_repo(store)
    assert repo.epochs() == [5]
    assert_same(repo.checkpoint(5).load(), make(outcomes.index("saved")))
    repo.gc(grace=0)
    assert_no_debris(store)
    assert repo.verify().ok


def outcome_of(result: object) -> str:
    return "saved" if isinstance(result, ckptstore.Checkpoint) else type(result).__name__


@pytest.mark.parametrize("turn", range(3))
def test_threads_race_for_an_epoch(store: Store, turn: int) -> None:
    """P1: of 16 threads that save one epoch exactly one wins, the others get EpochExistsError."""
    results = at_once(16, lambda number: open_repo(store).save(5, make_state(number)))
    check_one_winner(store, [outcome_of(result) for result in results], make_state)


def test_threads_of_one_repository_race(store: Store) -> None:
    """P1: the same holds when the threads share one repository object."""
    repo = open_repo(store)
    results = at_once(16, lambda number: repo.save(5, make_state(number)))
    check_one_winner(store, [outcome_of(result) for result in results], make_state)


def test_processes_race_for_an_epoch(fast_folder: Path) -> None:
    """P1: of 8 processes that save one epoch exactly one wins, the others get EpochExistsError."""
    url = str(fast_folder / "repo")
    ckptstore.open(url)
    outcomes = in_processes(url, [{"act": "save", "epoch": 5}] * 8)
    check_one_winner(LocalStore(url), outcomes, make_state)


@pytest.mark.s3
def test_processes_race_on_s3(s3: Any) -> None:
    """P1 on a real object store: of 4 processes exactly one wins."""
    url = s3.url()
    with open_store(url, storage_options=s3.storage_options) as store:
        open_repo(store)
        job = {"act": "save", "epoch": 5, "options": s3.storage_options, "tiny": True}
        check_one_winner(store, in_processes(url, [job] * 4), tiny_state)


@pytest.mark.parametrize("turn", range(3))
def test_threads_race_to_replace(store: Store, turn: int) -> None:
    """P1: writers that replace one epoch at once win one after the other or lose; the last winner's bytes load."""
    open_repo(store).save(5, make_state(100))
    results = at_once(16, lambda number: open_repo(store).save(5, make_state(number), replace=True))
    outcomes = [outcome_of(result) for result in results]
    assert set(outcomes) <= {"saved", "EpochExistsError"}, [r for r in results if isinstance(r, Exception)]
    winners = [number for number, outcome in enumerate(outcomes) if outcome == "saved"]
    repo = open_repo(store)
    checkpoint = repo.checkpoint(5)
    generations = {number: results[number].generation for number in winners}  # type: ignore[attr-defined]
    assert checkpoint.generation == max(generations.values())
    assert len(set(generations.values())) == len(winners)
    last = max(winners, key=lambda number: generations[number])
    assert_same(checkpoint.load(), make_state(last))
    repo.gc(grace=0)
    assert_no_debris(store)


def test_readers_beside_replacing_writers(store: Store) -> None:
    """P2: a reader beside writers that replace its epoch gets all of one content, never a mixture or "missing"."""
    open_repo(store).save(5, make_state(0))
    done = threading.Event()
    seen: list[int] = []

    def work(number: int) -> None:
        if number == 0:
            try:
                for seed in range(1, 13):
                    open_repo(store).save(5, make_state(seed), replace=True)
            finally:
                done.set()
            return
        while not done.is_set():
            checkpoint = open_repo(store).latest()
            assert checkpoint is not None
            assert checkpoint.epoch == 5
            try:
                state = checkpoint.load()
            except ckptstore.EpochNotFoundError:
                continue  # this generation was replaced while it was being read
            assert_same(state, make_state(state["optim"]["step"]))
            seen.append(state["optim"]["step"])

    assert at_once(4, work) == [None] * 4
    assert seen


def test_sweepers_beside_savers(store: Store) -> None:
    """P5: prune and gc in parallel with saves that reuse older chunks never damage a committed epoch."""
    open_repo(store).save(0, make_state(0))
    done = threading.Event()

    def work(number: int) -> None:
        repo = open_repo(store)
        if number < 2:
            try:
                for turn in range(15):
                    epoch = 1 + 2 * turn + number
                    checkpoint = repo.save(epoch, make_state(epoch))
                    try:
                        assert_same(checkpoint.load(), make_state(epoch))
                    except ckptstore.EpochNotFoundError:
                        pass  # pruned meanwhile
            finally:
                if number == 0:
                    done.set()
            return
        while not done.is_set():
            repo.prune(KeepLast(1))
            repo.gc()
            report = repo.verify()
            assert report.ok, report.problems

    assert at_once(4, work) == [None] * 4
    repo = open_repo(store)
    assert repo.verify().ok
    latest = repo.latest(deep=True)
    assert latest is not None
    assert latest.epoch >= 29
    repo.gc(grace=0)
    assert_no_debris(store)


def test_processes_prune_at_once(fast_folder: Path) -> None:
    """P5: 4 processes that prune and collect at once, beside one that saves, leave what they should keep, whole."""
    url = str(fast_folder / "repo")
    repo = ckptstore.open(url, chunk_size=CHUNK)
    for epoch in range(12):
        repo.save(epoch, make_state(epoch))

    def save_more() -> None:
        for epoch in range(12, 24):
            repo.save(epoch, make_state(epoch))

    assert in_processes(url, [{"act": "prune", "rounds": 10, "keep": 3}] * 4, save_more) == ["pruned"] * 4
    repo.prune(KeepLast(3))
    assert repo.epochs() == [21, 22, 23]
    for epoch in repo.epochs():
        assert_same(repo.checkpoint(epoch).load(), make_state(epoch))
    repo.gc(grace=0)
    assert_no_debris(LocalStore(url))


@pytest.mark.parametrize("moment", ["manifests/", "leases/"])
@pytest.mark.parametrize("act", ["delete", "prune", "replace"])
def test_removed_right_after_the_commit(act: str, moment: str) -> None:
    """P4: an epoch that is removed or replaced right after its commit was saved, or its save says who won."""
    store = MemoryStore()
    open_repo(store).save(9, make_state(9))

    class Meddler(MemoryStore):
        def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
            super().put(key, data, if_absent=if_absent)
            if key.startswith("manifests/") and moment == "manifests/":
                meddle()

        def delete(self, key: str) -> None:
            if key.startswith("leases/") and moment == "leases/":
                meddle()
            super().delete(key)

    def meddle() -> None:
        other = open_repo(store)
        if act == "delete":
            other.delete(5)
        elif act == "prune":
            other.prune(KeepLast(1))
        elif other.checkpoint(5).generation == 1:
            other.save(5, make_state(55), replace=True)

    meddled = Meddler()
    meddled._space = store._space
    if act == "replace" and moment == "manifests/":
        with pytest.raises(EpochExistsError):
            open_repo(meddled).save(5, make_state(5))
    else:
        try:
            open_repo(meddled).save(5, make_state(5))
        except CkptStoreError as error:
            pytest.fail(f"{type(error).__name__}: {error}")
    repo = open_repo(store)
    assert repo.epochs() == ([5, 9] if act == "replace" else [9])
    if act == "replace":
        assert_same(repo.checkpoint(5).load(), make_state(55))
    repo.gc(grace=0)
    assert_no_debris(store)
