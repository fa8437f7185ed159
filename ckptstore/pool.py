"""Threads that share work, and survive whatever interrupts their user.

Not a ``ThreadPoolExecutor``: its ``submit`` holds locks of Python's own making, and a Ctrl-C that arrives right there
leaves one of them taken for ever, so that the threads never end. Here the user and the threads share only queues.
The threads are daemons: they keep no interpreter from its exit, and work in ``atexit`` hooks too.
"""

from __future__ import annotations

import concurrent.futures.thread
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

from ckptstore.patience import TICK_SECONDS, Patience, adopt

T = TypeVar("T")


class Pool:
    """At most ``most`` threads, started as they are needed, which work with ``patience``."""

    def __init__(self, most: int, name: str, patience: Patience) -> None:
        self._most = most
        self._name = name
        self._patience = patience
        self._box: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle: list[None] = []  # an entry for each thread that waits for work
        self._busy: set[object] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, run: Callable[[], None]) -> None:
        """Run it on a thread, or right here where the system gives none. It must not raise."""
        if self._has_thread():
            self._box.put(run)
        else:
            run()

    def close(self) -> None:
        """Wait until all that was submitted is done, and the threads have ended."""
        for _ in range(self._most):
            self._box.put(None)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(TICK_SECONDS)
        while self._busy:  # of a thread whose start was interrupted
            time.sleep(TICK_SECONDS / 50)

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
        while True:
            run = self._box.get()
            if run is None:
                return
            token = object()
            self._busy.add(token)
            try:
                run()
            finally:
                self._busy.discard(token)
            del run
            self._idle.append(None)


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
