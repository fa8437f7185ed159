"""Throttle: no more than so many bytes a second, on average. For copies that share a line with others."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from ckptstore.errors import InvalidArgumentError
from ckptstore.patience import current


class Throttle:
    """Lets bytes through at a rate. Thread-safe; those who wait are served in the order in which they came.

    Args:
        rate: bytes a second; None for no limit.
        clock: seconds that never run backwards.
        sleep: waits so many seconds; False if the work was given up meanwhile.

    Raises:
        InvalidArgumentError: a rate that is no number above 0.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], bool] = lambda seconds: current().sleep(seconds),
    ) -> None:
        if rate is not None and (type(rate) not in (int, float) or not 0 < rate < math.inf):
            raise InvalidArgumentError(f"a limit is a number of bytes a second above 0, not {rate!r}")
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = -math.inf

    def wait(self, nbytes: int) -> None:
        """Return when ``nbytes`` more may go. DeadlineError if the work of this thread was given up meanwhile."""
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._rate
        if begin > now and not self._sleep(begin - now):
            current().check("a put")
