"""Events: what is told of saves, loads and care, and that no listener can fail or hold up any of it."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import KeepLast, RetryPolicy, events
from ckptstore.errors import EpochExistsError, InvalidArgumentError, StoreFullError, TransientError
from ckptstore.stores import MemoryStore, RetryStore
from ckptstore.testing import Fault, FaultStore

STATE = {"model": {"w": np.arange(50_000, dtype="f4")}, "optimizer": {"m": np.zeros(10_000, "f4")}}
BYTES = 240_000


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def __call__(self, event: Any) -> None:
        self.all.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        assert events.flush(10)
        return [event for event in self.all if isinstance(event, kind)]

    def kinds(self) -> list[str]:
        assert events.flush(10)
        return [type(event).__name__ for event in self.all]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def everywhere(heard: Heard) -> Iterator[Heard]:
    """A listener to all repositories."""
    unsubscribe = events.subscribe(heard)
    yield heard
    unsubscribe()


def test_a_save(tmp_path: Path, heard: Heard) -> None:
    """Begun and committed, with the sizes and times of what was done."""
    with ckptstore.open(tmp_path / "r", on_event=heard, run_id="seed-1") as repo:
        before = time.time()
        saved = repo.save(7, STATE)
        assert heard.kinds() == ["SaveStarted", "SaveCommitted"]
        started, committed = heard.all
        assert (started.url, started.run_id, started.epoch, started.background) == (repo.url, "seed-1", 7, False)
        assert started.bytes_state == BYTES
        assert (committed.url, committed.run_id, committed.epoch) == (repo.url, "seed-1", 7)
        assert not committed.background
        assert committed.bytes_state == BYTES
        assert committed.bytes_stored == sum(record.bytes_stored for record in saved.records.values())
        assert saved.report is not None
        assert committed.bytes_sent == saved.report.bytes_sent > 0
        assert committed.ratio == BYTES / committed.bytes_stored > 1
        assert committed.stall_seconds == committed.seconds > 0
        assert before - 2 < committed.committed_at < time.time() + 1
        repo.save(8, STATE)
        again = heard.of(events.SaveCommitted)[-1]
        assert again.bytes_reused == BYTES
        assert again.bytes_sent < committed.bytes_sent
        assert again.bytes_stored == committed.bytes_stored


def test_a_background_save_holds_the_trainer_only_for_the_copy(heard: Heard) -> None:
    """``stall_seconds`` ends when ``save_async`` returns, ``seconds`` when all is done; a skipped save is told."""
    go = threading.Event()

    class Slow(MemoryStore):
        def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
            if "/chunks/" in key:
                assert go.wait(60)
            super().put(key, data, if_absent=if_absent)

    with ckptstore.Repository(Slow(), on_event=heard) as repo:
        handle = repo.save_async(1, STATE)
        returned = time.monotonic()
        assert repo.save_async(2, STATE, when_busy="skip").skipped
        waited = time.monotonic() - returned
        go.set()
        handle.result(60)
        committed = heard.of(events.SaveCommitted)[0]
        assert committed.background
        assert committed.seconds >= committed.stall_seconds + waited
        assert heard.of(events.SaveStarted)[0].background
        assert [event.epoch for event in heard.of(events.SaveSkipped)] == [2]
        assert len(heard.of(events.SaveStarted)) == 1


def test_a_transaction(heard: Heard) -> None:
    """Committed, failed or aborted: told once, also where a listener is the only one who looks."""
    with ckptstore.Repository(MemoryStore(), on_event=heard) as repo:
        with repo.begin(1) as txn:
            txn.write("model", STATE["model"])
        with pytest.raises(ZeroDivisionError), repo.begin(2) as txn:
            raise ZeroDivisionError
        repo.begin(3).abort()
        with pytest.raises(EpochExistsError):
            repo.begin(1)
        assert heard.kinds() == ["SaveStarted", "SaveCommitted", *["SaveStarted", "SaveFailed"] * 3]
        assert heard.of(events.SaveCommitted)[0].bytes_state == 200_000
        told = [(event.epoch, event.error) for event in heard.of(events.SaveFailed)]
        assert told == [(2, "ZeroDivisionError"), (3, "TransactionError"), (1, "EpochExistsError")]


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails(heard: Heard, background: bool) -> None:
    """Told with its class; the same where it is forgiven."""
    store = FaultStore(
        MemoryStore(), [Fault("put", error=StoreFullError("full", errno=28), match="attempts/", times=None)]
    )
    with ckptstore.Repository(store, on_event=heard, on_error="warn", on_full="raise") as repo:
        if background:
            repo.save_async(1, STATE).wait(60)
        else:
            assert repo.save(1, STATE) is None
        [failed] = heard.of(events.SaveFailed)
        assert (failed.epoch, failed.error, failed.failure) == (1, "StoreFullError", "space")
        assert failed.background == background
        assert "full" in failed.message
        assert 0 < failed.stall_seconds <= failed.seconds
        assert heard.of(events.SaveCommitted) == []


def test_a_spilled_save_has_failed_here_and_is_committed_there(tmp_path: Path, heard: Heard) -> None:
    """Events are of a store: an alarm about the first goes off although the second has saved the epoch."""
    with ckptstore.open(tmp_path / "a", on_event=heard, spill=tmp_path / "b") as repo:
        (tmp_path / "a" / "attempts").write_text("a file in the place of a folder")
        assert repo.spill is not None
        assert repo.save(1, STATE).url == repo.spill.url
        [failed] = heard.of(events.SaveFailed)
        [committed] = heard.of(events.SaveCommitted)
        assert (failed.url, committed.url) == (repo.url, repo.spill.url)


def test_an_interrupt_in_the_pruning_comes_after_the_commit(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the call, and the epoch is durable: that is what is told."""
    with ckptstore.Repository(MemoryStore(), on_event=heard, keep=KeepLast(1)) as repo:

        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(repo, "prune", interrupt)
        with pytest.raises(KeyboardInterrupt):
            repo.save(1, STATE)
        assert heard.kinds() == ["SaveStarted", "SaveCommitted"]
        monkeypatch.undo()


def test_care_is_told(tmp_path: Path, heard: Heard) -> None:
    """Pruning, gc, verify, damage, a load, the newest epoch, a mirror."""
    with ckptstore.open(tmp_path / "r", on_event=heard) as repo, ckptstore.open(tmp_path / "copy") as copy:
        for epoch in range(4):
            repo.save(epoch, {"model": {"w": np.full(1000, epoch)}})
        repo.prune(KeepLast(3), dry_run=True)
        repo.prune(KeepLast(9))
        assert heard.of(events.PruneDone) == []
        report = repo.prune(KeepLast(3))
        [pruned] = heard.of(events.PruneDone)
        assert (pruned.epochs, pruned.thinned, pruned.bytes_freed, pruned.error) == ((0,), (), report.bytes_freed, "")
        repo.gc(dry_run=True)
        repo.gc()
        assert len(heard.of(events.GcDone)) == 1
        repo.mirror(copy)
        [mirrored] = heard.of(events.MirrorDone)
        assert (mirrored.to, mirrored.copied, mirrored.ok) == (copy.url, 3, True)
        newest = repo.latest()
        assert newest is not None
        newest.load()
        [found], [restored] = heard.of(events.NewestFound), heard.of(events.RestoreDone)
        assert (found.epoch, restored.epoch, restored.nbytes) == (3, 3, 8000)
        chunk = max((tmp_path / "r").rglob("chunks/*"), key=lambda path: path.stat().st_mtime_ns)
        chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
        with pytest.raises(ckptstore.CorruptionError):
            newest.load()
        assert not repo.verify().ok
        older = repo.latest()
        assert older is not None
        assert older.epoch == 2
        assert [event.epoch for event in heard.of(events.DamageFound)] == [3, 3, 3]
        assert all(chunk.name in event.key for event in heard.of(events.DamageFound))
        [verified] = heard.of(events.VerifyDone)
        assert (verified.epochs, verified.damaged, verified.deep) == (3, (3,), True)


def test_a_pruning_after_a_save_is_counted_and_its_failure_told(heard: Heard) -> None:
    """``pruned`` of the save, and an event of its own; a policy that raises fails no save and is told."""
    with ckptstore.Repository(MemoryStore(), keep=KeepLast(2), on_event=heard) as repo:
        for epoch in range(3):
            repo.save(epoch, STATE)
        assert [event.pruned for event in heard.of(events.SaveCommitted)] == [0, 0, 1]
        assert [event.epochs for event in heard.of(events.PruneDone)] == [(0,)]

    class Broken(ckptstore.Policy):
        def keep(self, epochs: Any) -> dict[int, str]:
            raise ZeroDivisionError

    with ckptstore.Repository(MemoryStore(), keep=Broken(), on_event=heard) as repo:
        repo.save(0, STATE)
        assert heard.of(events.PruneDone)[-1].error == "ZeroDivisionError"
        assert heard.of(events.SaveCommitted)[-1].pruned == 0


def test_retries_come_with_their_class_and_without_frames(everywhere: Heard) -> None:
    """A retry is told to those who listen to all, and holds no chunk of the save in memory."""
    inner = FaultStore(MemoryStore(), [Fault("put", error=TransientError("reset"), match="attempts/", times=2)])
    with ckptstore.Repository(RetryStore(inner, RetryPolicy(base=0.0, cap=0.0))) as repo:
        repo.save(1, STATE)
        told = everywhere.of(events.RetryEvent)
        assert [(event.failure, event.verb, event.url) for event in told] == [("transient", "put", repo.url)] * 2
        assert [event.error.__traceback__ for event in told] == [None, None]
        assert isinstance(told[0].error, TransientError)


def test_on_event_of_open_hears_retries(tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own repository only."""
    real = os.link
    failed: list[int] = []

    def link(*args: Any, **kwargs: Any) -> None:
        if not failed:
            failed.append(1)
            raise OSError(11, "try again")
        real(*args, **kwargs)

    retry = RetryPolicy(base=0.0, cap=0.0)
    other = Heard()
    with ckptstore.open(tmp_path / "a", retry=retry, on_event=heard) as repo:
        with ckptstore.open(tmp_path / "b", retry=retry, on_event=other):
            monkeypatch.setattr(os, "link", link)
            repo.save(1, STATE)
        assert [event.failure for event in heard.of(events.RetryEvent)] == ["transient"]
        assert other.all == []


def test_the_newest_age_grows_while_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """None as long as nothing is known; then the age of the newest durable epoch, whoever saved it."""
    store = MemoryStore()
    with ckptstore.Repository(store) as repo, ckptstore.Repository(store) as reader:
        assert repo.newest_age() is None
        repo.save(5, STATE)
        first = repo.newest_age()
        assert first is not None
        assert -1 < first < 60
        assert reader.newest_age() is None
        reader.latest()
        second = reader.newest_age()
        assert second is not None
        assert second >= first
        repo.delete(5)
        assert repo.newest_age() is None


def test_a_listener_that_raises_fails_nothing(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    """Others hear all the same, and so does it itself; the log has one line."""
    calls = []

    def bad(event: object) -> None:
        calls.append(event)
        raise SystemExit(3) if len(calls) == 2 else ValueError("bad listener")

    unsubscribe = events.subscribe(bad)
    with caplog.at_level(logging.INFO, "ckptstore"), ckptstore.Repository(MemoryStore(), on_event=heard) as repo:
        repo.save(1, STATE)
        repo.save(2, STATE)
        unsubscribe()
    assert len(calls) == len(heard.of(events.Event)) == 4
    assert [record.levelname for record in caplog.records if "on_event failed" in record.message] == ["ERROR"]
    unsubscribe()  # twice is once
    with ckptstore.Repository(MemoryStore()) as repo:
        repo.save(1, STATE)
    assert len(calls) == 4


def test_a_listener_that_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Saves, loads and close go on; what waits for it is bounded, and the log says that events are dropped."""
    monkeypatch.setattr(events, "PENDING", 5)
    monkeypatch.setattr(events, "FLUSH_SECONDS", 0.01)
    go, calls = threading.Event(), []

    def hang(event: object) -> None:
        calls.append(event)
        assert go.wait(60)

    unsubscribe = events.subscribe(hang)
    with ckptstore.Repository(MemoryStore()) as repo:
        for epoch in range(10):
            repo.save(epoch, STATE)
        repo.checkpoint(9).load()
        assert len(calls) == 1
        assert not events.flush()
    assert caplog.text.count("a listener is slow or hangs") == 1
    go.set()
    unsubscribe()
    assert events.flush(10)
    assert 5 <= len(calls) <= 7


def test_a_listener_may_ask_the_repository_and_end_itself(heard: Heard) -> None:
    """On its own thread nothing waits for itself: it reads, closes, and takes itself off the list."""
    results: list[Any] = []
    with ckptstore.Repository(MemoryStore()) as repo:

        def listener(event: object) -> None:
            if isinstance(event, events.SaveCommitted):
                results.append(repo.epochs())
                unsubscribe()
                repo.close()
                results.append("closed")

        unsubscribe = events.subscribe(listener)
        repo.save(1, STATE)
        assert events.flush(10)
    assert results == [[1], "closed"]


def test_the_thread_of_a_listener_ends_with_it() -> None:
    """A repository that is let go takes the thread of its ``on_event`` with it."""

    def save() -> set[threading.Thread]:
        before = set(threading.enumerate())
        with ckptstore.Repository(MemoryStore(), on_event=lambda event: None) as repo:
            repo.save(1, STATE)
            return {t for t in threading.enumerate() if t.name == "ckptstore-events"} - before

    [thread] = save()
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_forked_child_hears_its_own(tmp_path: Path) -> None:
    """Only what happens in the child, on a thread of its own, also where the parent's listener hangs just then."""
    program = """
import os, sys, threading
import numpy as np, ckptstore
from ckptstore import events
go, told = threading.Event(), []
def listener(event):
    if isinstance(event, events.SaveCommitted):
        told.append(event.epoch)
        if os.getpid() == parent:
            go.wait(60)
parent = os.getpid()
events.subscribe(listener)
repo = ckptstore.open(sys.argv[1], on_event=listener)
state = {"model": {"w": np.zeros(10)}}
repo.save(1, state)
while not told: pass
child = os.fork()
if child == 0:
    told.clear()
    repo.save(2, state)
    events.flush(10)
    os._exit(0 if told == [2, 2] else 1)
_, status = os.waitpid(child, 0)
go.set()
repo.close()
print(status, sorted(told))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "r")], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("0 [1, 1]", 0), done.stderr


def test_the_exit_waits_for_listeners_a_little(tmp_path: Path) -> None:
    """What was told before the end is heard, without ``close``; a listener that hangs costs two seconds."""
    program = """
import sys, time
import numpy as np, ckptstore
from ckptstore import events
def listener(event):
    time.sleep(0.2)
    print(type(event).__name__, flush=True)
    if sys.argv[2:]:
        time.sleep(3600)
events.subscribe(listener)
ckptstore.open(sys.argv[1]).save(1, {"model": {"w": np.zeros(10)}})
"""
    command = [sys.executable, "-c", program, str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["SaveStarted", "SaveCommitted"], "", 0)
    done = subprocess.run([*command[:-1], str(tmp_path / "s"), "hang"], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["SaveStarted"], "", 0)


def test_callbacks_stay_behind_in_a_pickle(tmp_path: Path, heard: Heard) -> None:
    """A child process has listeners of its own, or none."""
    with ckptstore.open(tmp_path / "r", on_event=heard) as repo, pickle.loads(pickle.dumps(repo)) as other:
        other.save(1, STATE)
        assert heard.kinds() == []
        with repo.with_credentials({}) as same:
            same.save(2, STATE)
        assert heard.kinds() == ["SaveStarted", "SaveCommitted"]


def test_what_cannot_be_called_is_refused(tmp_path: Path) -> None:
    """Before anything is made."""
    for listen in (lambda: events.subscribe(5), lambda: ckptstore.open(tmp_path / "r", on_event=5)):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="on_event must be a function"):
            listen()
    assert list(tmp_path.iterdir()) == []


def test_an_event_is_not_made_where_nobody_listens() -> None:
    """The happy path costs one look."""

    def kind(**_: object) -> events.Event:
        raise AssertionError("made")

    events.Emitter("memory://x").tell(kind, epoch=1)
    with pytest.raises(AssertionError, match="made"):
        events.Emitter("memory://x", own=events.Listener(print)).tell(kind, epoch=1)


def test_nothing_to_call() -> None:
    """Refused, and whoever listens hears on."""
    for wrong in (None, 7, "print"):
        with pytest.raises(ckptstore.InvalidArgumentError):
            events.subscribe(wrong)  # type: ignore[arg-type]
