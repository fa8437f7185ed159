"""Threads that share work, and survive whatever interrupts their user.

Not a ``ThreadPoolExecutor``: its ``submit`` holds locks of Python's own making, and a Ctrl-C that arrives right there
leaves one of them taken for ever, so that the threads never end. Here the user and the threads share only queues.
The threads are daemons: they keep no interpreter from its exit, and work in ``atexit`` hooks too. And they are
expendable: one that is in a call that never returns is left behind, and its work counts as failed.
"""

from __future__ import annotations

import concurrent.futures.thread
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ckptstore.patience import TICK_SECONDS, Expendable, Patience, adopt, become, indispensable

T = TypeVar("T")


class Work(Protocol):
    """What a pool runs."""

    def __call__(self) -> None:
        """Do it. It must not raise."""

    def fail(self, error: Exception) -> None:
        """The thread that does it was left behind: whatever it says later, this is the end of it."""


class _Worker(Expendable):
    """A thread of a pool."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.work: Work | None = None
        self.pool = pool

    def leave_behind(self) -> None:
        self.pool.leave(self)


class Pool:
    """At most ``most`` threads, started as they are needed, which work with ``patience``."""

    def __init__(self, most: int, name: str, patience: Patience) -> None:
        self._most = most
        self._name = name
        self._patience = patience
        self._box: SimpleQueue[Work | None] = SimpleQueue()
        self._idle: list[None] = []  # an entry for each thread that waits for work
        self._busy: dict[_Worker, threading.Thread] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, work: Work) -> None:
        """Do it on a thread, or right here where the system gives none."""
        if self._has_thread():
            self._box.put(work)
        else:
            with indispensable():  # this thread may belong to another pool, which knows nothing of this work
                work()

    def leave_behind(self) -> None:
        """Go on without the threads that are in calls which have lasted too long. To be called now and then."""
        for one in list(self._busy):
            self.leave(one)

    def leave(self, one: _Worker) -> None:
        """Go on without this thread, if its call has lasted too long.

        Several threads may do this at once, and one that is interrupted here leaves the rest of it to the next.
        """
        # In this order: if the call is given up now, then it is in this work that it was made.
        given_up, work = one.given_up, one.work
        error = None if given_up is None else given_up()
        if error is None or work is None:
            return
        one.left = True
        for give_back in reversed(list(one.leaving)):
            give_back()
        work.fail(error)
        thread = self._busy.get(one)
        if thread is not None:
            self._forget(thread)
            self._busy.pop(one, None)

    def close(self) -> None:
        """Wait until all that was submitted is done, and the threads have ended or are left behind."""
        for _ in range(self._most + 1):  # one more: a start that was interrupted is not counted
            self._box.put(None)
        while threads := list(self._threads):
            thread = threads[-1]
            thread.join(TICK_SECONDS)
            if thread.is_alive():
                self.leave_behind()
            else:
                self._forget(thread)
        while self._busy:  # of a thread whose start was interrupted
            time.sleep(TICK_SECONDS / 50)
            self.leave_behind()

    def _forget(self, thread: threading.Thread) -> None:
        with suppress(ValueError):  # another thread may have done it
            self._threads.remove(thread)

    def _has_thread(self) -> bool:
        try:
            self._idle.pop()
            return True
        except IndexError:
            pass
        with self._lock:
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=f"{self._name}_{len(self._threads)}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # a limit of the system, or the very end of the interpreter
                    return bool(self._threads)
                self._threads.append(thread)
            return True

    def _work(self) -> None:
        adopt(self._patience)
        this = _Worker(self)
        become(this)
        while not this.left:
            work = self._box.get()
            if work is None:
                return
            this.work = work
            self._busy[this] = threading.current_thread()
            try:
                work()
            finally:
                self._busy.pop(this, None)
            this.work = work = None
            if not this.left:
                self._idle.append(None)
        self._forget(threading.current_thread())  # to be replaced


def executors_have_ended() -> bool:
    """Whether the interpreter is exiting and executors refuse new work: they do before ``atexit`` hooks run."""
    return bool(getattr(concurrent.futures.thread, "_shutdown", False))


class LateExecutor(ThreadPoolExecutor):
    """For libraries that insist on an executor: in an ``atexit`` hook, where it takes no work, the caller does it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if not executors_have_ended():
                raise
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (handed on, as a thread would)
            future.set_exception(error)
        return future
