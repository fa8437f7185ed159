"""Throttle: bytes at a rate, by a clock that the test holds."""

from __future__ import annotations

import threading

import pytest

from ckptstore.errors import DeadlineError
from ckptstore.patience import Patience, adopt
from ckptstore.throttle import Throttle


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 50.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> bool:
        self.slept.append(seconds)
        self.now += seconds
        return True


def test_the_rate_is_kept_on_average() -> None:
    """The first goes at once, each other when those before have had their time; idle time is not saved up."""
    time = Time()
    throttle = Throttle(100, lambda: time.now, time.sleep)
    for nbytes in (50, 100, 10):
        throttle.wait(nbytes)
    assert time.slept == [0.5, 1.0]
    assert time.now == 51.5
    time.now += 1000
    throttle.wait(100)
    throttle.wait(100)
    assert time.slept == [0.5, 1.0, 1.0]


def test_no_limit_never_waits() -> None:
    """Without a rate nothing sleeps."""
    time = Time()
    Throttle(None, lambda: time.now, time.sleep).wait(10**15)
    assert time.slept == []


def test_a_wait_ends_when_the_work_is_given_up() -> None:
    """Ctrl-C during a slow copy does not wait for its bytes."""
    patience = Patience()
    throttle = Throttle(1.0)
    errors: list[BaseException] = []

    def work() -> None:
        adopt(patience)
        try:
            throttle.wait(10**9)
            throttle.wait(1)
        except DeadlineError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    patience.end()
    thread.join(30)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_others_wait_in_turn() -> None:
    """The time of each begins where that of the one before ends, whoever sleeps."""
    throttle = Throttle(10, lambda: 0.0, lambda seconds: seconds == pytest.approx(expected.pop(0)))
    expected = [1.0, 3.0]
    throttle.wait(10)
    throttle.wait(20)
    throttle.wait(1)
    assert expected == []
