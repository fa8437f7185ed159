"""A lock that survives a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class ForkLock:
    """A lock that a forked child finds free: whoever held it has stayed behind in the parent. Not reentrant."""

    def __init__(self, in_child: Callable[[], None] = lambda: None) -> None:
        """``in_child`` puts right what the threads that stayed behind have left; called in a child's first block."""
        self._in_child = in_child
        self._begin_process()

    def _begin_process(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._begin_process()
            self._in_child()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
