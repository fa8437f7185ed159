"""Patience: what a thread waits with. When the work that it belongs to is given up, its waits end at once.

A thread pool that works for a save or load adopts the patience of that piece of work. Back-offs sleep on it, requests
in flight end with it (after a moment of grace), so a Ctrl-C in the main thread waits for neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptstore.errors import DeadlineError

GRACE_SECONDS = 3.0
"""How long a call that is under way when its work is given up may take to end by itself."""
TICK_SECONDS = 0.5
"""The longest wait in one piece. A signal that arrives right before a thread goes to sleep on a lock does not wake it,
so that a Ctrl-C in that moment would be seen only after the wait: every wait of a caller's thread comes in pieces."""


class Patience:
    """Lasts until somebody calls ``end``. Thread-safe."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._ended_at = 0.0
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[], None]] = {}

    @property
    def ended(self) -> bool:
        """Whether the work was given up."""
        return self._ended.is_set()

    @property
    def ended_for(self) -> float:
        """Seconds since the work was given up; 0 if it was not."""
        return time.monotonic() - self._ended_at if self._ended.is_set() else 0.0

    def end(self) -> None:
        """Give the work up: all who wait are woken. May be called twice."""
        if not self._ended.is_set():
            self._ended_at = time.monotonic()
        self._ended.set()
        with self._lock:
            callbacks = list(self._callbacks.values())
        for callback in callbacks:
            callback()

    def sleep(self, seconds: float) -> bool:
        """Sleep, unless the work is or has been given up: then False, at once."""
        return not self._ended.wait(seconds)

    def check(self, what: str) -> None:
        """DeadlineError if the work was given up: nothing is begun for it any more."""
        if self._ended.is_set():
            raise DeadlineError(f"{what} was not begun: the work that it belongs to was given up")

    @contextmanager
    def telling(self, callback: Callable[[], None]) -> Iterator[None]:
        """During the block, ``callback`` is called when the work is given up (at once if it was). Maybe twice."""
        token = object()
        with self._lock:
            self._callbacks[token] = callback
        try:
            if self._ended.is_set():
                callback()
            yield
        finally:
            with self._lock:
                del self._callbacks[token]


class _Endless(Patience):
    """Of threads that belong to nothing: the caller's own, which a Ctrl-C reaches by itself. It has no locks."""

    def sleep(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, TICK_SECONDS))
        return True

    @contextmanager
    def telling(self, callback: Callable[[], None]) -> Iterator[None]:
        yield


class Expendable:
    """A thread that its owner goes on without when it is in a call that never returns. See ``Pool.leave_behind``."""

    def __init__(self) -> None:
        self.left = False
        """Whether it was left behind: what it does now is its last work."""
        self.given_up: Callable[[], Exception | None] | None = None
        """Set during a call: the error, if it has lasted too long and from now on is nobody's."""
        self.leaving: list[Callable[[], None]] = []
        """What gives back, when the thread is left behind, what others could wait for. Each may be called again."""

    def leave_behind(self) -> None:
        """Go on without it, if its call has lasted too long. For its owner, and for all who wait for what it holds."""


def expendable() -> Expendable | None:
    """This thread, if its owner would go on without it."""
    found: Expendable | None = getattr(_threads, "expendable", None)
    return found


@contextmanager
def giving_back(give_back: Callable[[], None]) -> Iterator[None]:
    """If this thread is left behind in the block, its owner does this. Maybe twice."""
    thread = expendable()
    if thread is None:
        yield
        return
    thread.leaving.append(give_back)
    try:
        yield
    finally:
        thread.leaving.pop()


@contextmanager
def indispensable() -> Iterator[None]:
    """While this thread holds what others wait for: in the block it is not to be left behind."""
    before = expendable()
    _threads.expendable = None
    try:
        yield
    finally:
        _threads.expendable = before


_threads = threading.local()
_ENDLESS = _Endless()


def current() -> Patience:
    """The patience of this thread."""
    patience: Patience = getattr(_threads, "patience", _ENDLESS)
    return patience


def adopt(patience: Patience) -> None:
    """From now on this thread works for the work that ``patience`` belongs to."""
    _threads.patience = patience


def become(thread: Expendable) -> None:
    """From now on this thread may be left behind."""
    _threads.expendable = thread
