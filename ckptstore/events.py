"""Events: what a user watches, as typed values. ``subscribe`` for all repositories, ``open(on_event=..)`` for one.

Nothing that a listener does can fail or hold up a save: each has a thread of its own and a queue of bounded length, and
what does not fit is dropped, which the log says. Where nobody listens, an event is not even made.
"""

from __future__ import annotations

import atexit
import copy
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from ckptstore.errors import CkptStoreError, Failure, InvalidArgumentError
from ckptstore.locks import ForkLock

log = logging.getLogger("ckptstore")

PENDING = 1000
"""So many events may wait for a listener; more are dropped."""
FLUSH_SECONDS = 2.0
"""So long ``close``, unsubscribing and the exit of the interpreter wait for listeners, in all."""


@dataclass(frozen=True)
class Event:
    """Something happened in the repository at ``url``, in the run named ``run_id`` (empty if it has no name)."""

    url: str
    run_id: str


@dataclass(frozen=True)
class SaveStarted(Event):
    """A save has begun. ``bytes_state``: of all its arrays; 0 for a transaction, whose records are not known yet."""

    epoch: int
    background: bool
    bytes_state: int


@dataclass(frozen=True)
class SaveCommitted(Event):
    """A save has ended, and its epoch is durable.

    Attributes:
        committed_at: when, in seconds since 1970, by the clock of this machine.
        bytes_state: the arrays and files, before the codec.
        bytes_stored: what all of them take on the store, whoever has sent them.
        bytes_sent, bytes_reused: what went to the store, after the codec; what was found there, before it.
        seconds: from the call to the end, pruning included.
        stall_seconds: how long of that the trainer was held: all of it, but of ``save_async`` only until it returned.
        pruned: how many epochs the pruning that followed has removed.
    """

    epoch: int
    background: bool
    committed_at: float
    bytes_state: int
    bytes_stored: int
    bytes_sent: int
    bytes_reused: int
    seconds: float
    stall_seconds: float
    pruned: int

    @property
    def ratio(self) -> float:
        """How many bytes of state a stored byte holds; 1.0 where nothing is stored."""
        return self.bytes_state / self.bytes_stored if self.bytes_stored else 1.0


@dataclass(frozen=True)
class SaveFailed(Event):
    """A save has ended, and its epoch is not there (or, after ``OutcomeUnknownError``, nobody knows).

    Attributes:
        error: the class of the error, e.g. "StoreFullError".
        failure: its class of failure (docs/retries.md).
        message: for people.
        seconds, stall_seconds: as of ``SaveCommitted``.
    """

    epoch: int
    background: bool
    error: str
    failure: Failure
    message: str
    seconds: float
    stall_seconds: float


@dataclass(frozen=True)
class SaveSkipped(Event):
    """Nothing was saved, because an earlier save was still in flight (``when_busy="skip"``)."""

    epoch: int


@dataclass(frozen=True)
class NewestFound(Event):
    """``latest()`` has found the newest intact epoch, committed at ``committed_at`` (seconds since 1970)."""

    epoch: int
    committed_at: float


@dataclass(frozen=True)
class RestoreDone(Event):
    """Records of an epoch were loaded; ``nbytes`` of state, every one of them checked."""

    epoch: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class DamageFound(Event):
    """An epoch is damaged: ``latest()`` has stepped over it, or a load or ``verify`` has found it. ``key``: where."""

    epoch: int
    key: str
    reason: str


@dataclass(frozen=True)
class VerifyDone(Event):
    """A ``verify`` has ended: how many epochs it has checked, and which are ``damaged``."""

    epochs: int
    damaged: tuple[int, ...]
    deep: bool
    seconds: float


@dataclass(frozen=True)
class PruneDone(Event):
    """A pruning has removed epochs, or dropped records of the epochs ``thinned``; or, with an ``error``, has failed."""

    epochs: tuple[int, ...]
    thinned: tuple[int, ...]
    bytes_freed: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class GcDone(Event):
    """A ``gc`` has removed debris."""

    objects: int
    bytes_freed: int
    seconds: float


@dataclass(frozen=True)
class MirrorDone(Event):
    """A mirror to the repository at ``to`` has ended. ``ok``: all that was asked for is there."""

    to: str
    copied: int
    bytes_sent: int
    ok: bool
    seconds: float


@dataclass(frozen=True)
class TierCopied(Event):
    """An epoch is durable in the lower tier at ``to``. ``committed_at``: when it was committed first (seconds since
    1970; NaN if nobody knows)."""

    to: str
    epoch: int
    committed_at: float
    bytes_sent: int
    seconds: float


@dataclass(frozen=True)
class TierFailed(Event):
    """Copying to the lower tier at ``to`` has failed, ``failures`` times in a row; it is tried again, unless a newer
    writer has taken the run over. ``error`` and ``failure``: as of ``SaveFailed``."""

    to: str
    error: str
    failure: Failure
    message: str
    failures: int


@dataclass(frozen=True, slots=True)
class RetryEvent:
    """Attempt number ``attempt`` failed with ``error``; the next one starts in ``wait`` seconds.

    ``seconds``: since the first attempt began. ``failure``: the class of the failure. ``url``: of the store.
    """

    verb: str
    key: str
    error: BaseException
    attempt: int
    wait: float
    seconds: float = 0.0
    url: str = ""

    @property
    def failure(self) -> Failure:
        """The class of the failure, which decides the wait."""
        return failure_of(self.error)


AnyEvent: TypeAlias = "Event | RetryEvent"
Callback: TypeAlias = "Callable[[Any], object]"  # of what it hears, a listener picks what it knows


def failure_of(error: BaseException) -> Failure:
    """The class of a failure. Foreign exceptions are ``permanent``: nobody knows whether they pass."""
    return error.failure if isinstance(error, CkptStoreError) else "permanent"


class Listener:
    """Calls ``callback`` with one event after the other, on a thread of its own. Thread-safe, also across a fork."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._lock = ForkLock(self._begin_process)
        self._begin_process()
        _all.add(self)

    def _begin_process(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dropped = 0
        weakref.finalize(self, self._queue.put, None).atexit = False  # the thread ends with us

    def put(self, event: AnyEvent) -> None:
        """Have the callback called. Never waits, never raises."""
        if isinstance(event, RetryEvent):
            event = replace(event, error=_bare(event.error))
        with self._lock:
            if self._queue.qsize() < PENDING:
                self._dropped = 0
                self._hand_over(event)
                return
            self._dropped += 1
            first = self._dropped == 1
        if first:
            log.warning("a listener is slow or hangs: events for %r are dropped until it goes on", self._callback)

    def _hand_over(self, item: object) -> None:
        self._queue.put(item)
        if self._thread is None or not self._thread.is_alive():
            args = self._queue, self._callback
            thread = threading.Thread(target=_deliver, args=args, name="ckptstore-events", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the interpreter is ending, or there are too many threads
                log.debug("no thread for a listener: %s", error)
            else:
                self._thread = thread

    def flush(self, timeout: float) -> bool:
        """Wait until all that was put has been heard; False if that takes longer than ``timeout`` seconds."""
        heard = threading.Event()
        with self._lock:
            if threading.current_thread() is self._thread or (self._thread is None and self._queue.empty()):
                return self._thread is None
            self._hand_over(heard)
        return heard.wait(timeout)


def _deliver(queue: SimpleQueue[Any], callback: Callback) -> None:
    """What the thread does. It must not know its Listener, which could then never go away."""
    said = False
    while (item := queue.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        try:
            callback(item)
        except BaseException:  # also SystemExit: nothing here ends anybody else
            level, more = (logging.DEBUG, "") if said else (logging.ERROR, " (what it raises from now on: DEBUG)")
            log.log(level, "on_event failed%s", more, exc_info=True)
            said = True
        del item  # or it would stay until the next one


def _bare(error: BaseException) -> BaseException:
    """The same error without its frames: those hold the chunk that was being sent."""
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 (a foreign class that cannot be copied)
        return CkptStoreError(str(error))


_all: weakref.WeakSet[Listener] = weakref.WeakSet()
_subscribed: tuple[Listener, ...] = ()
_lock = ForkLock()


def subscribe(callback: Callback) -> Callable[[], None]:
    """Have ``callback`` called with the events of all repositories of this process, from now on.

    It is called on a thread of its own, with one event after the other. What it raises is logged once. While it hangs,
    up to 1000 events wait for it, and more are dropped. A forked child goes on with a thread of its own.

    Returns:
        What ends it; it waits up to two seconds until the callback has heard all that came before.

    Raises:
        InvalidArgumentError: it cannot be called.
    """
    global _subscribed
    listener = listener_of(callback)
    if listener is None:
        raise InvalidArgumentError("a function must be given to subscribe, not None")
    with _lock:
        _subscribed = (*_subscribed, listener)
    return partial(_unsubscribe, listener)


def _unsubscribe(listener: Listener) -> None:
    global _subscribed
    with _lock:
        _subscribed = tuple(other for other in _subscribed if other is not listener)
    listener.flush(FLUSH_SECONDS)


def emit(event: AnyEvent) -> None:
    """Tell those who listen to all repositories."""
    for listener in _subscribed:
        listener.put(event)


def flush(timeout: float | None = None) -> bool:
    """Wait until every listener of this process has heard all so far; False if ``timeout`` seconds are not enough."""
    end = time.monotonic() + (FLUSH_SECONDS if timeout is None else timeout)
    heard = [listener.flush(max(0.0, end - time.monotonic())) for listener in list(_all)]  # all of them, not any
    return all(heard)


atexit.register(flush)


def listener_of(on_event: Callback | Listener | None) -> Listener | None:
    """The listener that calls it. InvalidArgumentError if it cannot be called."""
    if on_event is None or isinstance(on_event, Listener):
        return on_event
    if not callable(on_event):
        raise InvalidArgumentError(f"on_event must be a function, not of type {type(on_event).__name__}")
    return Listener(on_event)


class Emitter:
    """Tells of what happens in one repository: ``own`` (its ``on_event``) and those who listen to all."""

    __slots__ = ("_own", "_run", "_url")

    def __init__(self, url: str, run: str = "", own: Listener | None = None) -> None:
        self._url = url
        self._run = run
        self._own = own

    @property
    def wanted(self) -> bool:
        """Whether anybody listens."""
        return self._own is not None or bool(_subscribed)

    def tell(self, kind: Callable[..., Event], **facts: object) -> None:
        """Tell of an event of that class, with these attributes."""
        if self._own is None and not _subscribed:
            return
        event = kind(url=self._url, run_id=self._run, **facts)
        if self._own is not None:
            self._own.put(event)
        emit(event)

    def flush(self) -> None:
        """Wait up to two seconds until all so far has been heard."""
        if self.wanted:
            flush()
