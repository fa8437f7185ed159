"""Threads that are left behind in a call that hangs: nobody waits for ever for what they hold, and nothing is off."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

import ckptstore
from ckptstore import DeadlineError, patience
from ckptstore.pace import Pace
from ckptstore.patience import Patience
from ckptstore.pipeline import Pipeline
from ckptstore.pool import Pool
from ckptstore.spill import SpillRepository
from ckptstore.stores import LimitStore, MemoryStore, RetryStore, WatchStore, watch
from ckptstore.stores.base import Body, ObjectInfo
from ckptstore.stores.limit import Slots
from ckptstore.stores.reserve import ReserveStore


class Stuck(MemoryStore):
    """A put whose key matches hangs until it is let go, and so does any verb that is named."""

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self.part = part
        self.verbs: dict[str, str] = {}
        self.go = threading.Event()
        self.inside = 0

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        if self.part and self.part in key:
            self._hang()
        super().put(key, data, if_absent=if_absent)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if "get" in self.verbs and self.verbs["get"] in key:
            self._hang()
        return super().get(key, start, end)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        if "list" in self.verbs and self.verbs["list"] in prefix:
            self._hang()
        return super().list(prefix, partial=partial)

    def _hang(self) -> None:
        self.inside += 1
        self.go.wait(120)


@pytest.fixture
def inner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    monkeypatch.setattr(watch, "SLOWEST", 1e9)
    stuck = Stuck()
    yield stuck
    stuck.go.set()


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until it is true, but not for ever."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def within(seconds: float, act: Callable[[], object]) -> None:
    """Do it on a thread, which must end in time."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for ever"
    if errors:
        raise errors[0]


def test_others_need_not_wait_for_an_owner_that_does_not_look(inner: Stuck) -> None:
    """All slots are held by threads that hang, and their owner does something else, or was interrupted."""
    watched = WatchStore(inner, 0.5)
    store = LimitStore(watched, 2)
    store.put("there", b"body")
    inner.part = "stuck"
    pipeline = Pipeline(2)

    def put(name: str, _: None) -> None:
        store.put(f"stuck/{name}", b"")

    jobs = [pipeline.submit(0, (pipeline.io, partial(put, str(number)))) for number in range(3)]
    until(lambda: inner.inside == 2)
    within(60, lambda: store.get("there"))
    assert watched.hung == 2
    assert [type(job.exception(0)) for job in jobs[:2]] == [DeadlineError] * 2
    with pytest.raises(DeadlineError):
        pipeline.finish()
    within(60, pipeline.close)
    inner.go.set()
    until(lambda: watched.hung == 0)
    assert store._slots._inside == 0
    assert not store._slots._expendable


@pytest.mark.parametrize(("verb", "part"), [("get", "manifests/"), ("list", "/chunks/")])
def test_a_core_that_asks_the_store_is_watched_too(inner: Stuck, verb: str, part: str) -> None:
    """The look at what may be reused is made by a thread that hashes, while others wait for what it finds."""
    repo = ckptstore.Repository(RetryStore(LimitStore(WatchStore(inner, 0.5), 4)))
    state = {str(number): np.full(2_000_000, number) for number in range(6)}
    repo.save(1, {"model": state})

    def block() -> None:
        with repo.begin(2) as txn:
            inner.verbs = {verb: part}
            try:
                txn.write("model", state)
            finally:
                inner.verbs = {}

    with pytest.raises(DeadlineError, match="the mount hangs"):
        within(60, block)
    assert inner.inside
    within(60, lambda: repo.save(3, {"model": state}))
    assert repo.epochs() == [1, 3]


@pytest.mark.parametrize("act", ["latest", "other save"])
def test_a_transaction_at_rest_while_its_puts_hang(inner: Stuck, act: str) -> None:
    """The trainer goes on inside of the block, and turns to the repository: that answers."""
    repo = ckptstore.Repository(RetryStore(LimitStore(WatchStore(inner, 0.2), 4)))
    repo.save(1, {"model": {"w": np.arange(10)}})
    inner.part = "/chunks/"
    state = {str(number): np.full(2_000_000, number) for number in range(6)}

    def block() -> None:
        with repo.begin(2) as txn:
            txn.write("model", state)
            until(lambda: inner.inside >= 4)
            inner.part = ""
            if act == "latest":
                checkpoint = repo.latest()
                assert checkpoint is not None
                assert checkpoint.epoch == 1
            else:
                repo.save(3, {"model": {"w": np.arange(11)}})

    with pytest.raises(DeadlineError, match="the mount hangs"):
        within(60, block)
    assert repo.epochs() == ([1] if act == "latest" else [1, 3])
    assert repo.verify().ok


def test_who_waits_for_a_slot_ends_when_its_work_is_given_up() -> None:
    """A Ctrl-C in one save does not wait for the slots that another one holds."""
    slots = Slots(1)
    mine = Patience()

    def wait() -> None:
        patience.adopt(mine)
        with slots:
            raise AssertionError

    with slots:
        threading.Timer(0.05, mine.end).start()
        with pytest.raises(DeadlineError):
            within(60, wait)
        assert slots.waiting == 0
    with slots:
        pass
    assert slots._inside == 0


def test_given_up_by_several_and_after_its_return() -> None:
    """A call that comes to its end beside those who give it up does not count as hanging for ever."""
    pool = watch._Pool()
    job = watch._Job("put", "a", lambda _: None, 0.0)
    assert pool.abandon(job)
    assert pool.abandon(job)
    assert pool.hung == {job}
    assert not pool.returned(job)
    assert not pool.hung
    assert pool.abandon(job)  # by one that had looked before
    assert not pool.hung
    other = watch._Job("put", "b", lambda _: None, 0.0)
    assert pool.returned(other)
    assert not pool.abandon(other)
    assert not pool.hung


def test_a_thread_that_was_left_behind_is_replaced(inner: Stuck) -> None:
    """It takes no more work when it comes back, whoever left it behind, and others do."""
    store = WatchStore(inner, 0.5)
    inner.part = "stuck"
    pipeline = Pipeline(1)
    pipeline.submit(0, (pipeline.io, lambda _: store.put("stuck", b"")))
    with pytest.raises(DeadlineError):
        pipeline.finish()
    inner.go.set()
    until(lambda: store.hung == 0)
    job = pipeline.submit(0, (pipeline.io, lambda _: store.put("a", b"")))
    within(60, pipeline.finish)
    assert job.done()
    within(60, pipeline.close)


def test_to_leave_behind_is_taken_up_again_after_an_interrupt(inner: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C at each step of it: the slot is free in the end, the work has failed, nobody waits for the thread."""
    watched = WatchStore(inner, 0.05)
    store = LimitStore(watched, 1)
    inner.part = "stuck"
    pool = Pool(1, "test", Patience())
    failed: list[Exception] = []

    class Work:
        def __call__(self) -> None:
            with pytest.raises(DeadlineError):
                store.put("stuck", b"")

        def fail(self, error: Exception) -> None:
            failed.append(error)

    interrupts = [1, 1, 1]
    left = Slots._left

    def interrupted(self: Slots, ident: int, thread: patience.Expendable) -> None:
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        left(self, ident, thread)

    monkeypatch.setattr(Slots, "_left", interrupted)
    pool.submit(Work())
    until(lambda: inner.inside == 1)
    while interrupts:
        try:
            pool.leave_behind()
        except KeyboardInterrupt:
            continue
    within(60, pool.close)
    assert failed
    assert store._slots._inside == 0
    inner.go.set()
    until(lambda: watched.hung == 0)


def test_a_put_that_hangs_is_no_slow_store(inner: Stuck) -> None:
    """What was left behind counts for the pace until then, and not until it returns."""
    store = WatchStore(inner, 0.05)
    inner.part = "stuck"
    pace = Pace()

    def put(_: None) -> None:
        with pace.store.timed(1000):
            store.put("stuck", b"")

    with Pipeline(1) as pipeline:
        pipeline.submit(0, (pipeline.io, put))
        with pytest.raises(DeadlineError):
            pipeline.finish()
    seconds = pace.store.seconds
    assert seconds > 0
    with pace.store.timed(10):
        pass
    assert pace.store.seconds > seconds  # nobody is busy any more
    inner.go.set()
    until(lambda: store.hung == 0)
    assert pace.store.nbytes == 10
    assert pace.store._busy == 0


class _Hung:
    """Where the holder of a lock stands when the process forks; a child passes."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.begun = threading.Event()
        self.go = threading.Event()

    def here(self, *_: object) -> None:
        if os.getpid() == self.pid:
            self.begun.set()
            self.go.wait(120)


def _releasing(hung: _Hung) -> Callable[[], object]:
    class Slow(MemoryStore):
        def info(self, key: str) -> ObjectInfo:
            hung.here()
            return super().info(key)

    return ReserveStore(Slow()).release


def _spilling(hung: _Hung) -> Callable[[], object]:
    def second() -> ckptstore.Repository:
        hung.here()
        return ckptstore.Repository(MemoryStore())

    repo = SpillRepository(MemoryStore(), spill=second)  # type: ignore[arg-type]
    return lambda: repo.spill


@pytest.mark.parametrize("make", [_releasing, _spilling])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_a_lock_was_held(make: Callable[[_Hung], Callable[[], object]]) -> None:
    """The thread that hangs has stayed behind in the parent: the child does not wait for it."""
    hung = _Hung()
    act = make(hung)
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    assert hung.begun.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # ends it, should it hang
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    hung.go.set()
    thread.join(60)
