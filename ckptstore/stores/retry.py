"""RetryStore: try again what may pass, within a budget of attempts and seconds.

What a failure *is* was decided where it was met (``error.failure``, docs/retries.md); what is *done* about it is
decided here, by :data:`TREATMENTS` and nothing else.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

import tenacity

from ckptstore import events, patience
from ckptstore.errors import (
    CkptStoreError,
    Failure,
    InvalidArgumentError,
    RetriesExhaustedError,
    StoreError,
    ThrottledError,
    TransientError,
)
from ckptstore.events import RetryEvent, failure_of
from ckptstore.locks import ForkLock
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.space import Space

T = TypeVar("T")
log = logging.getLogger("ckptstore")

WARN_FROM = 4
"""From this attempt on a retry is logged as a warning; before, as information."""
QUIET_SECONDS = 10.0
"""At most one line a level and store in so many seconds; the next one says how many it stands for."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """What a class of failures gets from RetryStore.

    Attributes:
        waits: the first wait is drawn from 0 to so many times ``RetryPolicy.base``; None: never tried again.
        most: attempts at most, where that is fewer than the policy allows.
        besides: what else happens, in words.
    """

    waits: float | None
    most: int | None = None
    besides: str = ""


TREATMENTS: dict[Failure, Treatment] = {
    "transient": Treatment(1.0),
    "throttled": Treatment(
        10.0, besides="`Retry-After` is waited for, up to `cap`; half as many requests at once, then one more a round"
    ),
    "unsettled": Treatment(1.0, besides="never taken for an answer"),
    "auth-refresh": Treatment(0.0, most=2, besides="the client is made anew once, which reads the credentials again"),
    "space": Treatment(None, besides="raised as `StoreFullError`"),
    "permanent": Treatment(None, besides="raised at once, with what to do about it"),
    "settled": Treatment(None, besides="an answer; a refused create is read back: our own bytes are a success"),
    "integrity": Treatment(None, besides="a chunk is fetched once more, then `CorruptionError` names it"),
}
"""By class of failure. Only a ``TransientError`` is ever tried again."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Up to ``attempts`` calls. Waits: random up to ``base`` seconds, doubled each time to ``cap``.

    No wait begins that would end later than ``deadline`` seconds after the first attempt, or after anything else was
    last done or answered by the store: as long as there is progress, one unlucky call is not given up.

    ``hang``: a call to a folder that has not returned after so many seconds (and the time that its bytes may take)
    ends in ``DeadlineError``. The limits of requests to S3 and GCS are those of the client (docs/retries.md).
    """

    attempts: int = 24
    deadline: float = 180.0
    base: float = 0.1
    cap: float = 15.0
    hang: float = 120.0

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise InvalidArgumentError(f"RetryPolicy: attempts is {self.attempts!r}: use a whole number from 1")
        for name, least in (("deadline", 0.0), ("base", 0.0), ("cap", self.base), ("hang", 0.001)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < least:
                raise InvalidArgumentError(f"RetryPolicy: {name} is {value!r}: use a finite number from {least}")


def reports(record: Callable[[int, str], None] = log.log) -> Callable[[RetryEvent], None]:
    """A listener that logs retries and never floods."""
    lock = ForkLock()
    last: dict[int, float] = {}
    silent: Counter[int] = Counter()

    def report(event: RetryEvent) -> None:
        level = logging.WARNING if event.attempt >= WARN_FROM else logging.INFO
        now = time.monotonic()
        with lock:
            if now - last.get(level, -math.inf) < QUIET_SECONDS:
                silent[level] += 1
                return
            last[level] = now
            others = silent.pop(level, 0)
        also = f" ({others} more like this since the last line)" if others else ""
        record(
            level,
            f"{event.verb} of {event.key!r}: attempt {event.attempt} failed after {event.seconds:.1f} s "
            f"({event.failure}), the next in {event.wait:.1f} s: {event.error}{also}",
        )

    return report


@dataclass(slots=True)
class _Call(Generic[T]):
    """One call of a verb, with all its attempts."""

    verb: str
    key: str
    run: Callable[[], T]
    begun: float
    attempts: int = 0
    error: BaseException | None = None
    first: TransientError | None = None
    """How the first attempt failed, until that is accounted for."""
    scarce: Counter[int] = field(default_factory=Counter)
    """How often it failed with an error that is worth so many attempts only."""
    state: tenacity.RetryCallState | None = None

    def attempt(self) -> T:
        self.attempts += 1
        try:
            return self.run()
        except BaseException as error:
            self.error = error
            raise

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def let_go(self) -> None:
        """Break the circles of error, frames and state: the body of a failed put must not wait for the collector."""
        self.error = self.first = None
        if self.state is not None:
            self.state.outcome = None
            self.state = None


class _GivenUpError(Exception):
    """The work that the call belongs to was given up during a wait."""


class RetryStore(Store):
    """Retries ``TransientError`` and nothing else; every other exception passes at once, unchanged.

    When the budget is spent, every verb raises ``RetriesExhaustedError`` from the last error. A listing is retried
    as a whole. Waits end at once when the work that the thread belongs to is given up (``ckptstore.patience``).

    Args:
        on_retry: told of every failed attempt that another one follows, before the wait, in the thread of the caller.
            What it raises is logged. Logging goes on beside it.
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy = RetryPolicy(),
        *,
        sleep: Callable[[float], None] | None = None,
        on_retry: Callable[[RetryEvent], object] | None = None,
    ) -> None:
        self._inner = inner
        self._policy = policy
        self._on_retry = on_retry
        self._report = reports()
        self._progress = -math.inf  # when the store last did or answered anything
        self._waits = {
            failure: tenacity.wait_random_exponential(multiplier=policy.base * (each.waits or 0.0), max=policy.cap)
            for failure, each in TREATMENTS.items()
        }
        self._retrying = tenacity.Retrying(
            stop=self._is_over,
            wait=self._wait_of,
            retry=tenacity.retry_if_exception_type(TransientError),
            before_sleep=self._tell,
            sleep=sleep or _sleep,
            retry_error_callback=_give_up,
        )

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def policy(self) -> RetryPolicy:
        """The budget of each call."""
        return self._policy

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

    def space(self) -> Space | None:
        return self._inner.space()

    def close(self) -> None:
        self._inner.close()

    def _run(self, verb: str, key: str, run: Callable[[], T]) -> T:
        patience.current().check(f"{verb} of {key!r}")
        call = _Call(verb, key, run, time.monotonic())
        try:
            result = self._attempts(call)
        except _GivenUpError:
            raise _exhausted(call) from call.error
        except StoreError:
            raise
        except CkptStoreError:  # "missing", "exists": an answer
            self._progress = time.monotonic()
            raise
        finally:
            call.let_go()
        self._progress = time.monotonic()
        return result

    def _attempts(self, call: _Call[T]) -> T:
        try:
            return call.attempt()  # the usual case needs none of the bookkeeping, which takes longer than the rest
        except TransientError as error:
            call.first = error
        result: T = self._retrying(_attempt, call)
        return result

    def _is_over(self, state: tenacity.RetryCallState) -> bool:
        call = _call_of(state)
        call.state = state
        most = getattr(call.error, "most", None) or TREATMENTS[failure_of(call.error)].most  # type: ignore[arg-type]
        if most is not None:
            call.scarce[most] += 1
            if call.scarce[most] >= most:
                return True
        if call.attempts >= self._policy.attempts:
            return True
        since = max(call.begun, self._progress)
        return time.monotonic() + state.upcoming_sleep - since >= self._policy.deadline

    def _wait_of(self, state: tenacity.RetryCallState) -> float:
        error = _call_of(state).error
        assert error is not None  # only asked for after a failed attempt
        wait = self._waits[failure_of(error)](state)
        asked = error.retry_after if isinstance(error, ThrottledError) else None
        return wait if asked is None else max(wait, min(asked, self._policy.cap))

    def _tell(self, state: tenacity.RetryCallState) -> None:
        call = _call_of(state)
        assert call.error is not None
        url = self.traits.url
        event = RetryEvent(call.verb, call.key, call.error, call.attempts, state.upcoming_sleep, call.seconds, url)
        self._report(event)
        events.emit(event)
        if self._on_retry is not None:
            try:
                self._on_retry(event)
            except Exception:
                log.exception("on_retry failed")  # a listener that fails must not fail the call


def _attempt(call: _Call[T]) -> T:
    first, call.first = call.first, None
    if first is None:
        return call.attempt()
    try:
        raise first
    finally:
        del first  # it holds this frame


def _call_of(state: tenacity.RetryCallState) -> _Call[object]:
    call: _Call[object] = state.args[0]
    return call


def _sleep(seconds: float) -> None:
    if not patience.current().sleep(seconds):
        raise _GivenUpError


def _give_up(state: tenacity.RetryCallState) -> NoReturn:
    call = _call_of(state)
    raise _exhausted(call) from call.error


def _exhausted(call: _Call[T]) -> RetriesExhaustedError:
    times = "1 attempt" if call.attempts == 1 else f"{call.attempts} attempts"
    error = RetriesExhaustedError(
        f"{call.verb} of {call.key!r} still failed after {times} in {call.seconds:.1f} s: {call.error}",
        key=call.key or None,
        errno=getattr(call.error, "errno", None),
        attempts=call.attempts,
        seconds=call.seconds,
    )
    if call.error is not None:
        error.failure = failure_of(call.error)
    return error
