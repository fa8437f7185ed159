"""RetryStore: try again what may pass, within a budget of attempts and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import tenacity

from ckptstore.errors import InvalidArgumentError, RetriesExhaustedError, TransientError
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Up to ``attempts`` calls in ``deadline`` seconds. Waits: random up to ``base``, doubled each time to ``cap``."""

    attempts: int = 12
    deadline: float = 300.0
    base: float = 0.1
    cap: float = 30.0

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise InvalidArgumentError(f"RetryPolicy: attempts is {self.attempts!r}: use a whole number from 1")
        for name, least in (("deadline", 0.0), ("base", 0.0), ("cap", self.base)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < least:
                raise InvalidArgumentError(f"RetryPolicy: {name} is {value!r}: use a finite number from {least}")


@dataclass(frozen=True, slots=True)
class RetryEvent:
    """Attempt number ``attempt`` failed with ``error``; the next one starts in ``wait`` seconds."""

    verb: str
    key: str
    error: BaseException
    attempt: int
    wait: float


class RetryStore(Store):
    """Retries ``TransientError`` and nothing else; every other exception passes at once, unchanged.

    When the budget is spent, every verb raises ``RetriesExhaustedError`` from the last error. A listing is retried
    as a whole. ``sleep`` should let a Ctrl-C through, as ``time.sleep`` does.
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy = RetryPolicy(),
        *,
        sleep: Callable[[float], None] = time.sleep,
        on_retry: Callable[[RetryEvent], None] | None = None,
    ) -> None:
        self._inner = inner
        self._on_retry = on_retry
        self._retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(policy.attempts) | tenacity.stop_before_delay(policy.deadline),
            wait=tenacity.wait_random_exponential(multiplier=policy.base, max=policy.cap),
            retry=tenacity.retry_if_exception_type(TransientError),
            before_sleep=self._tell,
            retry_error_callback=_give_up,
            sleep=sleep,
        )

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        self._run("put", key, lambda: self._inner.put(key, data, if_absent=if_absent))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._run("get", key, lambda: self._inner.get(key, start, end))

    def fetch(self, key: str, start: int, end: int, room: memoryview) -> memoryview:
        return self._run("get", key, lambda: self._inner.fetch(key, start, end, room))

    def info(self, key: str) -> ObjectInfo:
        return self._run("info", key, lambda: self._inner.info(key))

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        return iter(self._run("list", prefix, lambda: tuple(self._inner.list(prefix, partial=partial))))

    def delete(self, key: str) -> None:
        self._run("delete", key, lambda: self._inner.delete(key))

    def close(self) -> None:
        self._inner.close()

    def _run(self, verb: str, key: str, call: Callable[[], T]) -> T:
        return self._retrying(lambda *_: call(), verb, key)  # the callbacks below see the arguments

    def _tell(self, state: tenacity.RetryCallState) -> None:
        if self._on_retry is not None:
            self._on_retry(RetryEvent(*_failure(state), state.attempt_number, state.upcoming_sleep))


def _failure(state: tenacity.RetryCallState) -> tuple[str, str, BaseException]:
    assert state.outcome is not None  # only asked for after a failed attempt
    return *state.args, state.outcome.exception()


def _give_up(state: tenacity.RetryCallState) -> NoReturn:
    verb, key, error = _failure(state)
    message = (
        f"{verb} of {key!r} still failed after {state.attempt_number} attempts in "
        f"{state.seconds_since_start or 0:.1f} s, the last time with: {error}; try again when the store is well"
    )
    raise RetriesExhaustedError(message, key=key or None, errno=getattr(error, "errno", None)) from error
