"""RetryStore: finite, jittered, only for what may pass, and the error at the end tells the story."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import math
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from ckptstore.errors import (
    AccessError,
    CorruptionError,
    DeadlineError,
    Failure,
    InvalidArgumentError,
    ObjectExistsError,
    ObjectNotFoundError,
    RepositoryNotFoundError,
    RetriesExhaustedError,
    StoreError,
    StoreFullError,
    ThrottledError,
    TransientError,
)
from ckptstore.events import RetryEvent, failure_of
from ckptstore.stores.base import Body, ObjectInfo, Store
from ckptstore.stores.local import LocalStore
from ckptstore.stores.memory import MemoryStore
from ckptstore.stores.retry import TREATMENTS, RetryPolicy, RetryStore, reports
from ckptstore.testing.faults import Fault, FaultStore

VERBS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("a/1", b"body", if_absent=True),
    "get": lambda store: store.get("a/1", 1, 3),
    "info": lambda store: store.info("a/1").size,
    "list": lambda store: [entry.key for entry in store.list("a/")],
    "delete": lambda store: store.delete("a/1"),
}
RESULTS = {"put": None, "get": b"od", "info": 4, "list": ["a/1"], "delete": None}


def full() -> MemoryStore:
    store = MemoryStore()
    store.put("a/1", b"body")
    return store


def fault(verb: str, error: BaseException, times: int | None = 1, **options: Any) -> Fault:
    return Fault(verb, error=error, times=times, **options)  # type: ignore[arg-type]


@pytest.fixture
def slept() -> list[float]:
    """The waits that were asked for."""
    return []


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_transient_errors_pass(slept: list[float], verb: str, when: str) -> None:
    """Every verb is tried again after a transient error, whether it took effect or not."""
    with FaultStore(full(), [fault(verb, TransientError("reset"), times=7, when=when)]) as faulty:
        store = RetryStore(faulty, RetryPolicy(attempts=8), sleep=slept.append)
        assert VERBS[verb](store) == RESULTS[verb]
        assert len(slept) == 7


@pytest.mark.parametrize("verb", VERBS)
def test_attempts_are_finite(slept: list[float], verb: str) -> None:
    """When the attempts are used up the error tells how many and how long, from the last one, errno kept."""
    last = TransientError("connection reset", key="a/1", errno=errno.ECONNRESET)
    faults = [fault(verb, TransientError("first"), times=3), fault(verb, last, times=None)]
    with FaultStore(full(), faults) as faulty:
        with pytest.raises(RetriesExhaustedError) as caught:
            VERBS[verb](RetryStore(faulty, RetryPolicy(attempts=5), sleep=slept.append))
        assert faulty.fired == (3, 2)
    assert len(slept) == 4
    assert caught.value.__cause__ is last
    assert caught.value.errno == errno.ECONNRESET
    assert caught.value.key == ("a/" if verb == "list" else "a/1")
    assert re.search(r"after 5 attempts in \d+\.\d s.*connection reset", str(caught.value))


def test_one_attempt(slept: list[float]) -> None:
    """One attempt is no retry."""
    faulty = FaultStore(full(), [fault("get", TransientError("once"))])
    with pytest.raises(RetriesExhaustedError, match="after 1 attempt in"):
        RetryStore(faulty, RetryPolicy(attempts=1), sleep=slept.append).get("a/1")
    assert slept == []


def test_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait ends after the deadline, however many attempts are left."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def slow() -> TransientError:
        now[0] += 10
        return TransientError("slow")

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    faulty = FaultStore(full(), [Fault("get", error=slow, times=None)])
    policy = RetryPolicy(attempts=1000, deadline=60, base=1, cap=5)
    with pytest.raises(RetriesExhaustedError) as caught:
        RetryStore(faulty, policy, sleep=sleep).get("a/1")
    monkeypatch.undo()
    assert 4 <= faulty.fired[0] <= 6
    # An attempt that has begun is not cut off, so the last one may end later.
    assert now[0] <= 1000 + 60 + 10
    assert f"after {faulty.fired[0]} attempts in {now[0] - 1000:.1f} s" in str(caught.value)


def test_waits_are_jittered_and_capped(slept: list[float]) -> None:
    """Waits are drawn from 0 up to an exponential bound, so that many writers do not come back together."""
    for _ in range(100):
        faulty = FaultStore(full(), [fault("get", TransientError("x"), times=6)])
        RetryStore(faulty, RetryPolicy(attempts=7, base=0.5, cap=4.0), sleep=slept.append).get("a/1")
    for number, bound in enumerate((0.5, 1.0, 2.0, 4.0, 4.0, 4.0)):
        waits = slept[number::6]
        assert all(0 <= wait <= bound for wait in waits)
        assert min(waits) < bound / 4
        assert max(waits) > bound * 3 / 4


@pytest.mark.parametrize(
    "error",
    [
        AccessError("denied", errno=errno.EACCES),
        StoreFullError("full"),
        DeadlineError("late"),
        StoreError("strange"),
        ObjectNotFoundError("none"),
        ObjectExistsError("taken"),
        RepositoryNotFoundError("no bucket"),
        InvalidArgumentError("bad"),
        RetriesExhaustedError("inner budget"),
        ValueError("a bug"),
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_everything_else_passes_at_once(slept: list[float], error: BaseException) -> None:
    """Permanent errors, bugs and interrupts pass after one attempt: the same object, not wrapped."""
    for verb, act in VERBS.items():
        with FaultStore(full(), [fault(verb, error)]) as faulty:
            with pytest.raises(type(error)) as caught:
                act(RetryStore(faulty, sleep=slept.append))
            assert caught.value is error
            assert error.__cause__ is None
    assert slept == []


def test_permanent_error_after_transient_ones(slept: list[float]) -> None:
    """The first permanent error ends the retries."""
    denied = AccessError("denied")
    faulty = FaultStore(full(), [fault("get", TransientError("x"), times=2), fault("get", denied)])
    with pytest.raises(AccessError) as caught:
        RetryStore(faulty, sleep=slept.append).get("a/1")
    assert caught.value is denied
    assert len(slept) == 2


def test_listing_is_retried_as_a_whole(slept: list[float]) -> None:
    """A listing that breaks off in the middle is begun again: complete, without doubles."""

    class Breaking(MemoryStore):
        left = 2

        def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
            for number, entry in enumerate(super().list(prefix, partial=partial)):
                if number == 5 and self.left:
                    self.left -= 1
                    raise TransientError("cut off")
                yield entry

    inner = Breaking()
    for number in range(10):
        inner.put(f"a/{number}", b"")
    found = [entry.key for entry in RetryStore(inner, sleep=slept.append).list("a/")]
    assert sorted(found) == [f"a/{number}" for number in range(10)]
    assert len(slept) == 2


def test_retried_body_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    """A put whose third write fails twice begins again at its first byte."""
    real, calls = os.write, [0]

    def write(handle: int, data: memoryview) -> int:
        calls[0] += 1
        if calls[0] in (3, 6):
            raise OSError(errno.EIO, "input/output error")
        return real(handle, data[:1000])

    monkeypatch.setattr(os, "write", write)
    store = RetryStore(LocalStore(tmp_path), sleep=slept.append)
    data = bytes(range(250)) * 20
    store.put("a/1", memoryview(data), if_absent=True)
    assert store.get("a/1") == data
    assert len(slept) == 2
    assert os.listdir(tmp_path / "a") == ["1"]


@pytest.mark.parametrize("function", ["open", "write", "fsync", "link", "pread", "lstat", "scandir", "unlink"])
def test_stale_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float], function: str) -> None:
    """A stale handle anywhere is met by opening the file again by its name."""
    real, left = getattr(os, function), [1]

    def stale(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, stale)
    store = RetryStore(LocalStore(tmp_path), sleep=slept.append)
    for verb, act in VERBS.items():
        assert act(store) == RESULTS[verb]
    assert left == [0]
    # Nobody's failure: a scratch name that could not be removed at the end of the put, a root that is no link.
    assert len(slept) == (0 if function in ("unlink", "lstat") else 1)


def test_on_retry(slept: list[float]) -> None:
    """The hook hears of every failed attempt before the wait, in order, and not of the last."""
    heard: list[RetryEvent] = []
    error = TransientError("reset")
    faulty = FaultStore(full(), [fault("get", error, times=None)])
    store = RetryStore(faulty, RetryPolicy(attempts=3), sleep=slept.append, on_retry=heard.append)
    with pytest.raises(RetriesExhaustedError):
        store.get("a/1")
    assert [event.wait for event in heard] == slept
    assert [(event.verb, event.key, event.attempt, event.error) for event in heard] == [
        ("get", "a/1", 1, error),
        ("get", "a/1", 2, error),
    ]


@pytest.mark.kill
def test_ctrl_c_ends_the_wait() -> None:
    """Ctrl-C during a long wait ends the program at once."""
    code = """
import sys
from ckptstore.errors import TransientError
from ckptstore.stores.memory import MemoryStore
from ckptstore.stores.retry import RetryPolicy, RetryStore
class Down(MemoryStore):
    def get(self, key, start=0, end=None):
        raise TransientError("down")
import random
random.uniform = lambda low, high: high
store = RetryStore(Down(), RetryPolicy(deadline=1e6, base=1e5, cap=1e5), on_retry=lambda _: print("wait", flush=True))
try:
    store.get("a")
except KeyboardInterrupt:
    print("stopped")
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "wait\n"
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=30)
    assert output == "stopped\n"


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"attempts": -1},
        {"attempts": 2.5},
        {"attempts": True},
        {"deadline": float("inf")},
        {"deadline": float("nan")},
        {"deadline": -1.0},
        {"base": -0.1},
        {"base": float("nan")},
        {"cap": float("inf")},
        {"cap": 0.01},
        {"base": 60.0},
    ],
    ids=str,
)
def test_policy_that_makes_no_sense(options: dict[str, Any]) -> None:
    """A budget that is endless or impossible is refused when it is made."""
    with pytest.raises(InvalidArgumentError):
        RetryPolicy(**options)


def test_no_endless_retry_in_the_source() -> None:
    """Every use of tenacity's retry machinery says when to stop."""
    source = Path(__file__).parents[2] / "ckptstore"
    uses = 0
    for path in source.rglob("*.py"):
        text = path.read_text()
        for match in re.finditer(r"\b(Async)?Retrying\(|@(tenacity\.)?retry\b", text):
            uses += 1
            assert "stop=" in text[match.start() : match.start() + 120], path
    assert uses == 1


# --- classes, budgets and events --------------------------------------------------------------------


def test_every_class_of_failure_has_a_treatment() -> None:
    """What each class gets is said once, and only classes of TransientError are ever tried again."""
    assert set(TREATMENTS) == set(get_args(Failure))
    tried = {failure for failure, each in TREATMENTS.items() if each.waits is not None}
    assert tried == {"transient", "throttled", "unsettled", "auth-refresh"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TransientError("x"), "transient"),
        (TransientError("x", failure="unsettled"), "unsettled"),
        (ThrottledError("x"), "throttled"),
        (StoreFullError("x"), "space"),
        (AccessError("x"), "permanent"),
        (StoreError("x"), "permanent"),
        (ObjectExistsError("x"), "settled"),
        (ObjectNotFoundError("x"), "settled"),
        (RepositoryNotFoundError("x"), "permanent"),
        (CorruptionError("x"), "integrity"),
        (ValueError("x"), "permanent"),
    ],
    ids=str,
)
def test_the_class_of_a_failure_travels_with_it(error: BaseException, expected: Failure) -> None:
    """Every error says its class, also in another process."""
    assert failure_of(error) == expected
    assert failure_of(pickle.loads(pickle.dumps(error))) == expected


def test_facts_of_an_error_survive_pickling() -> None:
    """A save may fail in another process: what its error knows arrives."""
    throttled = pickle.loads(pickle.dumps(ThrottledError("slow", key="k", errno=11, retry_after=7.5)))
    assert (throttled.key, throttled.errno, throttled.retry_after, throttled.failure) == ("k", 11, 7.5, "throttled")
    spent = pickle.loads(pickle.dumps(RetriesExhaustedError("x", attempts=3, seconds=1.5)))
    assert (spent.attempts, spent.seconds) == (3, 1.5)


def test_throttling_is_met_with_patience(slept: list[float]) -> None:
    """A wait is at least what the store asks for, but never longer than the cap; without a word, a second or so."""
    asked = [3.0, 1000.0, 0.0, None]
    faults = [fault("get", ThrottledError("slow down", retry_after=seconds)) for seconds in asked]
    RetryStore(FaultStore(full(), faults), RetryPolicy(cap=15.0), sleep=slept.append).get("a/1")
    assert 3.0 <= slept[0] <= 15.0
    assert slept[1] == 15.0
    waits: list[float] = []
    for _ in range(50):
        store = RetryStore(FaultStore(full(), [fault("get", ThrottledError("x"))]), sleep=waits.append)
        store.get("a/1")
    assert 0.5 < max(waits) <= 1.0  # ten times the first wait after a reset connection


def test_renewed_credentials_are_tried_once_and_at_once(slept: list[float]) -> None:
    """After the credentials were read anew there is one more attempt, without a wait."""
    renewed = TransientError("renewed", failure="auth-refresh")
    RetryStore(FaultStore(full(), [fault("get", renewed)]), sleep=slept.append).get("a/1")
    assert slept == [0.0]
    faulty = FaultStore(full(), [fault("get", renewed, times=None)])
    with pytest.raises(RetriesExhaustedError, match="2 attempts") as caught:
        RetryStore(faulty, sleep=slept.append).get("a/1")
    assert caught.value.failure == "auth-refresh"


def test_errors_that_seldom_pass_get_few_attempts(slept: list[float]) -> None:
    """EIO is tried a few times; failures of another kind in between do not count against it."""
    bad = TransientError("bad disk", most=3)
    faulty = FaultStore(full(), [fault("get", TransientError("x"), times=9), fault("get", bad, times=None)])
    with pytest.raises(RetriesExhaustedError) as caught:
        RetryStore(faulty, sleep=slept.append).get("a/1")
    assert faulty.fired == (9, 3)
    assert caught.value.attempts == 12


def test_a_path_that_cannot_be_fails_soon(tmp_path: Path) -> None:
    """A put into a place where no folder can be made ends after a few attempts, not after minutes."""
    store = RetryStore(LocalStore("/proc/self/nowhere"))
    heard: list[RetryEvent] = []
    store._on_retry = heard.append
    with pytest.raises(StoreError):
        store.put("a/1", b"x")
    assert sum(event.wait for event in heard) < 5


def test_default_budget_survives_half_a_minute() -> None:
    """With the defaults, a store that is down for 30 seconds costs time and no save; one that stays down ends."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    class Down(MemoryStore):
        until = 30.0

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if now[0] < self.until:
                raise ThrottledError("503") if int(now[0]) % 2 else TransientError("reset")
            return super().get(key, start, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", lambda: now[0])
        inner = Down()
        for _ in range(300):
            now[0] = 0.0
            inner.put("a/1", b"body")
            assert RetryStore(inner, sleep=sleep).get("a/1") == b"body"
            assert now[0] < 100
        inner.until, now[0] = math.inf, 0.0
        with pytest.raises(RetriesExhaustedError):
            RetryStore(inner, sleep=sleep).get("a/1")
        assert now[0] <= RetryPolicy().deadline


def test_progress_refreshes_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the store answers others, a call that is out of luck is given up by its attempts, not by the clock."""
    now = [0.0]
    faulty = FaultStore(full(), [fault("get", TransientError("unlucky"), times=None)])

    def sleep(seconds: float) -> None:
        now[0] += 20.0
        if helping:
            store.info("a/1")

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    store = RetryStore(faulty, RetryPolicy(attempts=10, deadline=60.0), sleep=sleep)
    helping = True
    with pytest.raises(RetriesExhaustedError) as caught:
        store.get("a/1")
    assert (caught.value.attempts, caught.value.seconds) == (10, 180.0)
    helping = False
    now[0] += 1000
    with pytest.raises(RetriesExhaustedError) as caught:
        store.get("a/1")
    assert caught.value.attempts < 5
    monkeypatch.undo()


def test_exhausted_tells_once_what_to_do(slept: list[float]) -> None:
    """The last error says how often and how long, and what to do only once."""
    error = TransientError("cannot get 'a/1' in s3://b: reset; it may pass: try again", key="a/1")
    faulty = FaultStore(full(), [fault("get", error, times=None)])
    with pytest.raises(RetriesExhaustedError) as caught:
        RetryStore(faulty, RetryPolicy(attempts=4), sleep=slept.append).get("a/1")
    assert caught.value.attempts == 4
    assert caught.value.seconds >= 0
    assert caught.value.failure == "transient"
    assert str(caught.value).count("try again") == 1


def test_events_tell_class_and_time(slept: list[float]) -> None:
    """An event says of which class the failure is and how long the call has been at it."""
    heard: list[RetryEvent] = []
    faults = [fault("get", ThrottledError("slow")), fault("get", TransientError("reset"))]
    RetryStore(FaultStore(full(), faults), sleep=slept.append, on_retry=heard.append).get("a/1")
    assert [(event.failure, event.attempt) for event in heard] == [("throttled", 1), ("transient", 2)]
    assert all(event.seconds >= 0 for event in heard)


def test_a_listener_that_fails_fails_nothing(slept: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """What ``on_retry`` raises is logged, but a Ctrl-C in it passes."""

    def bad(event: RetryEvent) -> None:
        raise ValueError("a bug in the hook")

    def interrupt(event: RetryEvent) -> None:
        raise KeyboardInterrupt

    faulty = FaultStore(full(), [fault("get", TransientError("x"), times=2)])
    assert RetryStore(faulty, sleep=slept.append, on_retry=bad).get("a/1") == b"body"
    assert "on_retry failed" in caplog.text
    faulty = FaultStore(full(), [fault("get", TransientError("x"))])
    with pytest.raises(KeyboardInterrupt):
        RetryStore(faulty, sleep=slept.append, on_retry=interrupt).get("a/1")


def test_the_log_is_no_flood(slept: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """First retries are information, later ones warnings; a thousand of them are a line or two."""
    caplog.set_level(logging.INFO, "ckptstore")
    faulty = FaultStore(full(), [fault("get", TransientError("reset"), times=None)])
    store = RetryStore(faulty, RetryPolicy(attempts=20, deadline=1e6), sleep=slept.append)
    for _ in range(50):
        with pytest.raises(RetriesExhaustedError):
            store.get("a/1")
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
    assert "attempt 4 failed" in caplog.records[1].message
    assert "transient" in caplog.records[1].message
    lines: list[str] = []
    report = reports(lambda level, text: lines.append(text))
    event = RetryEvent("get", "k", TransientError("reset"), 9, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        for number in range(100):
            patch.setattr("time.monotonic", lambda number=number: float(number))
            report(event)
    assert len(lines) == 10
    assert "9 more like this" in lines[1]


def test_a_failed_put_frees_its_body(slept: list[float]) -> None:
    """When the retries are spent and the error is gone, the buffer is free at once, without the garbage collector."""

    class Down(MemoryStore):
        def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
            raise TransientError("down")

    buffer = bytearray(100)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(RetriesExhaustedError):
            RetryStore(Down(), sleep=slept.append).put("a/2", memoryview(buffer))
        buffer.extend(b"no view of it is left")
    finally:
        gc.enable()
