"""A mount that hangs ends in DeadlineError, the program goes on, and what is left behind does no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import DeadlineError, ObjectNotFoundError, RetryPolicy, lease, pipeline
from ckptstore.patience import GRACE_SECONDS
from ckptstore.stores import LocalStore, MemoryStore, Store, WatchStore, watch
from ckptstore.stores.base import Body, ObjectInfo
from tests.mounts.flaky_fs import FlakyMount, missing

real = pytest.mark.skipif(missing() is not None, reason=str(missing()))
STATE = {"model": {"w": np.arange(300_000, dtype="f4")}}
LIMIT = 1.0  # of what does not hang too, on a machine that has much to do


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FlakyMount]:
    with FlakyMount(tmp_path) as mount:
        yield mount


@pytest.fixture
def store(mount: FlakyMount, monkeypatch: pytest.MonkeyPatch) -> WatchStore:
    monkeypatch.setattr(watch, "SLOWEST", 1e9)
    store = WatchStore(LocalStore(mount.path / "root"), LIMIT)
    store.put("a/1", b"body")
    return store


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until it is true, but not for ever."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@real
@pytest.mark.parametrize(
    ("op", "act"),
    [
        ("create", lambda store: store.put("a/2", b"x")),
        ("write", lambda store: store.put("a/2", b"x")),
        ("fsync", lambda store: store.put("a/2", b"x")),
        ("flush", lambda store: store.put("a/2", b"x")),
        ("link", lambda store: store.put("a/2", b"x", if_absent=True)),
        ("rename", lambda store: store.put("a/2", b"x")),
        ("fsyncdir", lambda store: store.put("a/2", b"x")),
        ("mkdir", lambda store: store.put("b/2", b"x")),
        ("open", lambda store: store.get("a/1")),
        ("read", lambda store: store.get("a/1")),
        ("read", lambda store: store.fetch("a/1", 0, 4, memoryview(bytearray(4)))),
        ("getattr", lambda store: store.info("a/1")),
        ("opendir", lambda store: list(store.list("a/"))),
        ("readdir", lambda store: list(store.list("a/"))),
        ("unlink", lambda store: store.delete("a/1")),
    ],
)
def test_whatever_hangs_ends(mount: FlakyMount, store: WatchStore, op: str, act: Callable[[Store], object]) -> None:
    """Each call of the operating system that never returns ends the verb in DeadlineError, soon and by name."""
    if op == "getattr":
        op = "lookup"  # what an lstat asks a mount that caches nothing
    mount.hang(op)
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match="the mount hangs") as caught:
        act(store)
    assert time.monotonic() - begin < LIMIT + 30
    assert str(mount.path) in str(caught.value)
    assert store.hung == 1
    assert mount.fired() == [1]
    mount.release()
    until(lambda: store.hung == 0)
    store._seconds = 60.0
    store.put("c/3", b"as ever")
    assert store.get("c/3") == b"as ever"


@real
@pytest.mark.parametrize("op", ["write", "fsync", "flush"])
@pytest.mark.parametrize("if_absent", [False, True])
def test_a_put_that_was_given_up_is_never_published(
    mount: FlakyMount, store: WatchStore, op: str, if_absent: bool
) -> None:
    """The caller uses its buffer again after the error: nothing of what is in it then may appear under the key."""
    body = bytearray(b"right" * 1000)
    mount.hang(op)
    with pytest.raises(DeadlineError):
        store.put("a/2", body, if_absent=if_absent)
    body[:] = b"wrong" * 1000
    mount.release()
    until(lambda: store.hung == 0)
    store._seconds = 60.0
    with pytest.raises(ObjectNotFoundError):
        store.get("a/2")
    assert [info.key for info in store.list()] == ["a/1"]
    assert list(store.list(partial=True)) == []  # the scratch file is gone too


@real
def test_while_one_hangs_others_get_less(mount: FlakyMount, store: WatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a call that hangs is given up sooner; too many that hang, and others are not begun at all."""
    monkeypatch.setattr(watch, "QUICK_SECONDS", 0.1)
    monkeypatch.setattr(watch, "MOST_HUNG", 3)
    store._seconds = 0.5
    mount.hang("open", times=None, path=".*/1")
    with pytest.raises(DeadlineError):
        store.get("a/1")
    store._seconds = 1e6
    for _ in range(2):
        with pytest.raises(DeadlineError, match="has not returned"):
            store.get("a/1")
    threads = {*threading.enumerate()}
    for _ in range(5):
        with pytest.raises(DeadlineError, match="3 calls hang there already"):
            store.get("a/1")
    assert {*threading.enumerate()} <= threads
    assert store.hung == 3
    mount.release()
    until(lambda: store.hung == 0)
    assert store.get("a/1") == b"body"


@real
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_begins_anew(mount: FlakyMount, store: WatchStore) -> None:
    """The child of a process with hanging calls has none, and uses the store."""
    mount.hang("fsync")
    with pytest.raises(DeadlineError):
        store.put("a/2", b"x")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            store._seconds = 60.0
            store.put("child", store.get("a/1"))
            status = 0 if store.hung == 0 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.hung == 1
    assert store.get("child") == b"body"


# --- saves and loads ----------------------------------------------------------------------------


def opened(path: Path, **options: Any) -> ckptstore.Repository:
    return ckptstore.open(path, retry=RetryPolicy(hang=LIMIT), **options)


@real
@pytest.mark.parametrize("op", ["write", "fsync", "link"])
@pytest.mark.parametrize("background", [False, True])
def test_a_save_whose_mount_hangs(
    mount: FlakyMount, monkeypatch: pytest.MonkeyPatch, op: str, background: bool
) -> None:
    """The save fails in time, the epoch before is loaded from the same mount, and the next save works."""
    monkeypatch.setattr(watch, "SLOWEST", 1e9)
    with opened(mount.path / "run") as repo:
        repo.save(1, STATE)
        mount.hang(op, path=".*/(chunks|manifests)/.*")
        begin = time.monotonic()
        with pytest.raises(DeadlineError, match="the mount hangs"):
            if background:
                repo.save_async(2, {"model": {"w": STATE["model"]["w"] + 1}}).result(60)
            else:
                repo.save(2, {"model": {"w": STATE["model"]["w"] + 1}})
        assert time.monotonic() - begin < LIMIT + 30
        assert repo.latest().epoch == 1  # type: ignore[union-attr]
        np.testing.assert_array_equal(repo.latest().load("model")["w"], STATE["model"]["w"])  # type: ignore[union-attr]
        repo.save(3, {"model": {"w": STATE["model"]["w"] + 2}})
        mount.release()
        until(lambda: repo.store.inner.inner.hung == 0)  # type: ignore[attr-defined]
        report = repo.verify()
        assert report.ok
        assert repo.epochs() == [1, 3]


@real
def test_a_mount_that_hangs_for_good(mount: FlakyMount, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing answers any more, every call of a repository ends in DeadlineError, one after the other."""
    monkeypatch.setattr(watch, "QUICK_SECONDS", 0.1)
    with opened(mount.path / "run") as repo:
        checkpoint = repo.save(1, STATE)
        mount.hang("*", times=None)
        calls: list[Callable[[], object]] = [
            lambda: repo.save(2, STATE),
            lambda: repo.save_async(3, STATE).result(60),
            repo.latest,
            repo.epochs,
            lambda: repo.checkpoint(1),
            checkpoint.load,
            repo.verify,
            lambda: repo.delete(1),
            lambda: repo.prune(ckptstore.KeepLast(1)),
            repo.gc,
            lambda: opened(mount.path / "run"),
        ]
        begin = time.monotonic()
        for call in calls:
            with pytest.raises(DeadlineError):
                call()
        assert time.monotonic() - begin < 60
        mount.release()
        until(lambda: repo.store.inner.inner.hung == 0)  # type: ignore[attr-defined]
        assert repo.latest().epoch == 1  # type: ignore[union-attr]


@real
def test_a_room_in_which_a_read_hangs_is_not_used_again(mount: FlakyMount, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read may come to its end when the memory would be in other use: the reader lets go of it."""
    lent: list[int] = []
    given: list[int] = []
    fetch, give = LocalStore.fetch, pipeline.Rooms.give

    def noted(self: LocalStore, key: str, start: int, end: int, room: memoryview) -> memoryview:
        lent.append(np.frombuffer(room, np.uint8).ctypes.data)
        return fetch(self, key, start, end, room)

    def returned(self: pipeline.Rooms, room: memoryview) -> None:
        given.append(np.frombuffer(room, np.uint8).ctypes.data)
        give(self, room)

    monkeypatch.setattr(watch, "SLOWEST", 1e9)
    with opened(mount.path / "run") as repo:
        checkpoint = repo.save(1, STATE)
        monkeypatch.setattr(LocalStore, "fetch", noted)
        monkeypatch.setattr(pipeline.Rooms, "give", returned)
        mount.hang("read", path=".*/chunks/.*")
        with pytest.raises(DeadlineError):
            checkpoint.load()
        assert lent
        assert not {*lent} & {*given}
        mount.release()
        np.testing.assert_array_equal(checkpoint.load("model")["w"], STATE["model"]["w"])
        assert {*lent} & {*given}  # a read that ends well gives its room back


@real
@pytest.mark.kill
def test_exit_beside_a_hanging_mount(mount: FlakyMount) -> None:
    """A program whose save was given up ends like any other, while the call still hangs in the kernel."""
    code = """
    import sys, numpy as np, ckptstore
    from ckptstore.stores import watch
    watch.SLOWEST = 1e9
    repo = ckptstore.open(sys.argv[1], retry=ckptstore.RetryPolicy(hang=1.0))
    try:
        repo.save(1, {"model": {"w": np.arange(100_000)}})
    except ckptstore.DeadlineError:
        print(repo.latest(), "hung:", repo.store.inner.inner.hung)
    """
    mount.hang("fsync", path=".*/chunks/.*")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(mount.path / "run")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=30,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("None hung: 1\n", 0), done.stderr
    assert mount.fired() == [1]


# --- with no mount at all: a store that never returns ------------------------------------------


class Stuck(MemoryStore):
    """Hangs in the verbs named, until it is let go."""

    def __init__(self, *verbs: str) -> None:
        super().__init__()
        self.verbs = {*verbs}
        self.go = threading.Event()
        self.begun = threading.Event()

    def _hang(self, verb: str) -> None:
        if verb in self.verbs:
            self.begun.set()
            self.go.wait(120)

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        self._hang("put")
        super().put(key, data, if_absent=if_absent)

    def info(self, key: str) -> ObjectInfo:
        self._hang("info")
        return super().info(key)


def test_a_listing_may_be_long_as_long_as_it_goes_on() -> None:
    """Entries that keep coming are progress; a listing that stops in the middle is given up."""

    class Slow(MemoryStore):
        stuck = False

        def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
            for info in super().list(prefix, partial=partial):
                yield info
                time.sleep(5 if self.stuck else 0.1)

    inner = Slow()
    for number in range(8):
        inner.put(f"a/{number}", b"")
    store = WatchStore(inner, 0.5)
    assert len(list(store.list())) == 8  # 0.8 s
    inner.stuck = True
    with pytest.raises(DeadlineError):
        list(store.list())


def test_threads_are_used_again_and_end() -> None:
    """A thousand calls in turn need one thread, which ends with the store."""
    store = WatchStore(MemoryStore(), 60.0)
    before = {*threading.enumerate()}
    for number in range(1000):
        store.put("a", str(number).encode())
    assert len({*threading.enumerate()} - before) == 1
    store.close()
    until(lambda: {*threading.enumerate()} <= before)


def test_errors_and_their_frames_come_through() -> None:
    """What the call raises is raised, the same object, and its body is free when the error is."""
    error = ObjectNotFoundError("none")

    class Bad(MemoryStore):
        def info(self, key: str) -> ObjectInfo:
            raise error

    with pytest.raises(ObjectNotFoundError) as caught:
        WatchStore(Bad(), 60.0).info("a")
    assert caught.value is error


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no more threads the call is made by the caller's own."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store = WatchStore(MemoryStore(), 60.0)
    store.put("a", b"1")
    assert store.get("a") == b"1"
    with pytest.raises(ObjectNotFoundError):
        store.get("b")


@pytest.mark.parametrize("error", [ZeroDivisionError, ckptstore.StoreError])  # the one aborts, the other abandons
def test_a_lease_that_cannot_be_renewed_keeps_nobody(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """The end of a save waits for a renewal that hangs, but not for ever, also on a store that nobody watches."""
    monkeypatch.setattr(lease, "HEARTBEAT", 0.05)
    monkeypatch.setattr(lease, "JOIN_SECONDS", 0.2)
    store = Stuck()
    repo = ckptstore.Repository(store)
    begin = time.monotonic()
    with pytest.raises(error), repo.begin(1):
        store.verbs.add("info")
        assert store.begun.wait(30)
        store.verbs.clear()  # the renewal stays stuck, the rest goes on
        raise error("in the block")
    assert time.monotonic() - begin < 60
    store.go.set()


@pytest.mark.kill
def test_exit_and_ctrl_c_beside_calls_that_hang(tmp_path: Path) -> None:
    """Hanging calls hold up neither the exit of the interpreter nor a Ctrl-C in the middle of a save."""
    code = """
    import threading, sys, time
    import numpy as np
    import ckptstore
    from ckptstore.stores import *
    class Stuck(MemoryStore):
        hang = False
        def put(self, key, data, *, if_absent=False):
            if self.hang and "/chunks/" in key:
                print("hangs", flush=True)
                threading.Event().wait()
            super().put(key, data, if_absent=if_absent)
    inner = Stuck()
    repo = ckptstore.Repository(RetryStore(LimitStore(WatchStore(inner, float(sys.argv[1])), 4)))
    state = {"model": {"w": np.arange(100_000)}}
    repo.save(1, state)
    inner.hang = True
    try:
        repo.save(2, {"model": {"w": np.arange(100_000) + 1}})
    except (ckptstore.DeadlineError, KeyboardInterrupt) as error:
        print(type(error).__name__, repo.latest().epoch, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    root = Path(__file__).parents[2]
    begin = time.monotonic()
    done = subprocess.run([*command, "1.0"], capture_output=True, text=True, cwd=root, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("hangs\nDeadlineError 1\n", 0), done.stderr
    with subprocess.Popen([*command, "1e6"], stdout=subprocess.PIPE, text=True, cwd=root) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "hangs\n"
        begin = time.monotonic()
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=60)
    assert output == "KeyboardInterrupt 1\n"
    assert time.monotonic() - begin < GRACE_SECONDS * 2 + 30
