"""Kinds of failures that attacks on saves in threads have found: hangs, and losses that nobody was told of."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import BusyError, InvalidRecordError, KeepLast, Policy, garbage
from ckptstore.pipeline import Pipeline
from ckptstore.staging import Arena
from ckptstore.stores import MemoryStore
from ckptstore.stores.limit import Slots
from ckptstore.tree import flatten
from tests.repository.helpers import open_repo

STATE = {"m": {"w": np.arange(1000.0)}}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, which ends by itself or fails the test."""
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


class Refusing(Pipeline):
    """A pool that takes no work any more, as at the exit of the interpreter or at a limit on threads."""

    def _start(self, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("can't start new thread")


def test_a_pool_that_refuses_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: a save whose threads cannot be started raises, waits for nobody, and can be made again."""
    repo = open_repo(MemoryStore())
    with monkeypatch.context() as patch:
        patch.setattr("ckptstore.writer.Pipeline", Refusing)
        with pytest.raises(RuntimeError, match="thread"):
            repo.save(1, STATE)
    assert repo.save(1, STATE).epoch == 1


def test_save_in_an_exit_handler_ends(tmp_path: Path) -> None:
    """P6: a save from ``atexit``, where pools refuse work, is done, and does not keep the process alive."""
    script = """
        import atexit, sys, numpy, ckptstore
        repo = ckptstore.open(sys.argv[1])
        atexit.register(lambda: repo.save(1, {"m": {"w": numpy.zeros(10)}}))
    """
    done = run(script, str(tmp_path / "r"))
    assert (done.returncode, done.stderr) == (0, "")
    assert ckptstore.open(tmp_path / "r").epochs() == [1]


def test_interrupts_of_a_save_end_it(tmp_path: Path) -> None:
    """P1: Ctrl-C at any moment of a save ends it; the epoch is whole or can be saved again."""
    script = """
        import signal, sys, numpy, ckptstore, random
        repo = ckptstore.open(sys.argv[1], chunk_size=65536)
        state = {"m": {"w": numpy.random.default_rng(0).random(2_000_000)}}
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        random.seed(int(sys.argv[2]))
        for epoch in range(12):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.08))
                if sys.argv[3] == "save":
                    repo.save(epoch, state)
                else:
                    repo.save_async(epoch, state)
            except KeyboardInterrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                repo.save(epoch, state)
            except ckptstore.CkptStoreError as error:
                assert epoch in repo.epochs(), error
        assert repo.epochs() == list(range(12))
        print("good")
    """
    for seed in range(2):
        for how in ("save", "async"):
            done = run(script, str(tmp_path / f"{seed}{how}"), str(seed), how)
            assert done.stdout == "good\n", done.stderr[-2000:]


def test_a_forked_child_has_all_slots() -> None:
    """P6: what holds the slots of a store in the parent does not exist in a forked child."""
    slots = Slots(1)
    with slots:
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            with slots:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_has_its_collector() -> None:
    """A fork amid a pause of another thread leaves the child with a collector that runs."""
    gate, inside = threading.Event(), threading.Event()

    def hold() -> None:
        with garbage.paused():
            inside.set()
            gate.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        good = gc.isenabled()
        with garbage.paused():
            good = good and not gc.isenabled()
        os._exit(0 if good and gc.isenabled() else 1)
    gate.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert gc.isenabled()


def test_a_signal_handler_that_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: a handler that interrupts the copying of a state, and saves, is told that a save is in flight."""
    repo = open_repo(MemoryStore())
    stage = Arena.stage
    told: list[BaseException] = []

    def interrupted(arena: Arena, flats: Any) -> Any:
        try:
            repo.save_async(2, STATE)
        except BusyError as error:
            told.append(error)
        return stage(arena, flats)

    monkeypatch.setattr(Arena, "stage", interrupted)
    assert repo.save_async(1, STATE).result().epoch == 1
    assert len(told) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_leaves_the_turn_to_the_next(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Ctrl-C right before or after a save has got its turn leaves the turn to the next one."""
    repo = open_repo(MemoryStore())
    take = type(repo._background)._take_turn

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if when == "after":
            take(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(repo._background), "_take_turn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            repo.save_async(1, STATE)
    assert repo.save_async(1, STATE, when_busy="error").result().epoch == 1


@pytest.mark.parametrize("act", ["save", "save_async", "result", "close"])
def test_callbacks_do_not_wait_for_their_own_save(act: str) -> None:
    """P6: a callback of a background save that would wait for that save gets an error instead."""
    repo = open_repo(MemoryStore())
    told: list[BaseException] = []
    handles: list[Any] = []
    go = threading.Event()

    def progress(done: int, total: int) -> None:
        go.wait(60)
        calls = {
            "save": lambda: repo.save(2, STATE),
            "save_async": lambda: repo.save_async(2, STATE),
            "result": lambda: handles[0].result(),
            "close": repo.close,
        }
        try:
            calls[act]()
        except BusyError as error:
            told.append(error)

    handles.append(repo.save_async(1, STATE, progress=progress))
    go.set()
    assert handles[0].result(60).epoch == 1
    assert told


def test_a_log_handler_that_fails() -> None:
    """P6: a save that failed has ended, also if the log handler that is to say so fails."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ConnectionError

    log, handler = logging.getLogger("ckptstore"), Broken()
    repo = open_repo(MemoryStore())
    repo.save(1, STATE)
    log.addHandler(handler)
    try:
        with pytest.raises(ckptstore.EpochExistsError):
            repo.save_async(1, STATE).result(60)
    finally:
        log.removeHandler(handler)


def test_a_policy_that_leaves() -> None:
    """P5: the epoch is committed: a policy that raises even SystemExit in the background does not fail its save."""

    class Leaving(Policy):
        def keep(self, epochs: Any) -> dict[int, str]:
            raise SystemExit(3)

    repo = open_repo(MemoryStore(), keep=Leaving())
    assert repo.save_async(1, STATE).result(60).epoch == 1
    repo = open_repo(MemoryStore(), keep=KeepLast(1))
    assert repo.save_async(1, STATE).result(60).epoch == 1


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_array_that_shrinks_before_it_is_copied(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An array whose memory goes away between the look at it and its copy is an error, never a crash."""
    state: Any = np.arange(100_000.0)
    if kind == "torch":
        torch = pytest.importorskip("torch.nn") and __import__("torch")
        state = torch.arange(100_000.0)
    flat = flatten({"w": state}, "m")
    if kind == "torch":
        state.untyped_storage().resize_(0)
    else:
        state.resize(3, refcheck=False)
    with pytest.raises(InvalidRecordError, match="save it again"):
        Arena().stage({"m": flat})


def test_a_dropped_transaction_stops_renewing() -> None:
    """A transaction that nobody holds any more renews its lease no more: gc can see it die."""
    txn = open_repo(MemoryStore()).begin(1)
    thread = txn._lease._thread
    assert thread is not None
    del txn
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("what", ["hang", "fail"])
@pytest.mark.parametrize(
    "how",
    ["sys.stderr.close()", "os.close(2)", "sys.stdout.close()", "os.dup2(broken(), 2)", "atexit.register(restore)"],
)
def test_a_loss_is_never_a_success(what: str, how: str, tmp_path: Path) -> None:
    """P4: whatever became of stdout and stderr, a process that lost an epoch does not end with status 0."""
    script = f"""
        import atexit, os, sys, threading, ckptstore
        from ckptstore.stores import MemoryStore
        class Odd(MemoryStore):
            def put(self, key, data, *, if_absent=False):
                if "/records/" in key:
                    if {what!r} == "hang":
                        threading.Event().wait()
                    raise ckptstore.StoreFullError("full")
                super().put(key, data, if_absent=if_absent)
        def broken():
            reading, writing = os.pipe()
            os.close(reading)
            return writing
        def restore(before=sys.stdout):
            sys.stdout = before
        repo = ckptstore.Repository(Odd(), exit_timeout=1)
        handle = repo.save_async(1, {{"m": 1}})
        if {what!r} == "fail":
            handle.wait()
        {how}
    """
    assert run(script).returncode == 120
