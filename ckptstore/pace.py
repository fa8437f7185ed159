"""Pace: is the store faster than the codec? Measured while saving; ``codec="auto"`` stops compressing where it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckptstore.locks import ForkLock
from ckptstore.patience import giving_back

ENOUGH = 256 * 1024 * 1024
"""Bytes that must have gone through both before anything is decided."""
# The codec must lose clearly. Where both share the cores, as with a disk behind a page cache, each slows the other
# down: at 1.7 times its speed plain bytes took just as long, and a fifth more room.
_CLEARLY = 3.0


class _Rate:
    """Bytes per second while at least one thread was busy."""

    def __init__(self) -> None:
        self._lock = ForkLock(self._nobody_is_busy)
        self._nobody_is_busy()
        self._since = 0.0
        self.nbytes = 0
        self.seconds = 0.0

    def _nobody_is_busy(self) -> None:
        self._busy = 0

    @contextmanager
    def timed(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            if self._busy == 0:
                self._since = time.perf_counter()
            self._busy += 1
        ends = [None]
        try:
            with giving_back(lambda: self._end(ends, 0)):
                yield
        finally:
            self._end(ends, nbytes)

    def _end(self, ends: list[None], nbytes: int) -> None:
        """A block ends, once: by itself, or with no bytes done when its thread is left behind in it."""
        with self._lock:
            if ends:
                ends.clear()
                self._busy -= 1
                self.nbytes += nbytes
                if self._busy == 0:
                    self.seconds += time.perf_counter() - self._since

    @property
    def known(self) -> bool:
        return self.nbytes >= ENOUGH and self.seconds > 0

    @property
    def speed(self) -> float:
        return self.nbytes / self.seconds


class Pace:
    """Speeds of codec and store, over all saves of a repository. Thread-safe.

    Both are measured together, as they run: a store whose client takes the cores from the codec slows the codec
    down here too. Idle time counts for neither.
    """

    def __init__(self) -> None:
        self.codec = _Rate()
        """Raw bytes through hashing, splitting and coding."""
        self.store = _Rate()
        """Bytes of frames through ``put``."""
        self.spare_room = False
        """Set when room is scarcer than time: then everything is compressed."""

    @property
    def compress(self) -> bool:
        """Whether compressing makes a save shorter, as far as is known."""
        if self.spare_room or not (self.codec.known and self.store.known):
            return True
        return self.store.speed < self.codec.speed * _CLEARLY
