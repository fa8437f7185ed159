"""Failures: whether a save that failed ends the run (``on_error``), and what the log says of it."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import Literal

from ckptstore.errors import (
    OutcomeUnknownError,
    RanksFailedError,
    RepositoryNotFoundError,
    StoreError,
    TransactionError,
)
from ckptstore.locks import ForkLock

log = logging.getLogger("ckptstore")

OnError = Literal["raise", "warn"]
MAX_FAILURES = 3


def is_of_the_store(error: BaseException) -> bool:
    """Whether the store, or the way to it, has failed: not the caller, and not another writer that was first."""
    if isinstance(error, (StoreError, RepositoryNotFoundError, OutcomeUnknownError)):
        return True
    if isinstance(error, RanksFailedError):
        return error.of_the_store
    return type(error) is TransactionError  # cut off: the lease was lost. Its subclasses say something else


class Failures:
    """Counts saves that failed one after the other. Thread-safe.

    Args:
        max_failures: that many in a row, and the last of them is raised.
    """

    def __init__(self, url: str, on_error: OnError, max_failures: int) -> None:
        self._url = url
        self._on_error = on_error
        self._max = max_failures
        self._lock = ForkLock()
        self._newest: tuple[int, str] | None = None
        self.count = 0
        """How many in a row so far."""

    def note(self, epoch: int, created: str) -> None:
        """An epoch is durable: committed now, or found intact."""
        with self._lock:
            if self._newest is None or epoch >= self._newest[0]:
                self._newest = epoch, created

    def forget(self, epoch: int) -> None:
        """An epoch was deleted."""
        with self._lock:
            if self._newest is not None and self._newest[0] == epoch:
                self._newest = None

    def over(self) -> None:
        """A save has succeeded."""
        with self._lock:
            self.count = 0

    def forgive(self, epoch: int, error: BaseException) -> bool:
        """Count a failure; whether the run goes on without that epoch. Says so in the log."""
        if not is_of_the_store(error):
            return False
        with self._lock:
            self.count += 1
            count = self.count
        if self._on_error == "raise":
            return False
        if count >= self._max:
            log.error("epoch %d was NOT saved, as %d before it: that is raised. %s", epoch, count - 1, self.newest())
            return False
        log.warning(
            "epoch %d was NOT saved, failure %d in a row (%d more, and it is raised): %s: %s. %s",
            epoch, count, self._max - count, type(error).__name__, error, self.newest(),
        )  # fmt: skip
        return True

    def newest(self, now: datetime | None = None) -> str:
        """A sentence: which epoch is the newest durable one that this process knows, and how old it is."""
        with self._lock:
            newest = self._newest
        if newest is None:
            return f"This process has neither saved nor loaded an epoch in {self._url}: all since its start is at risk"
        epoch, created = newest
        seconds = self.age(now)
        if seconds is None:
            return f"The newest durable epoch is {epoch}, of {created}"
        return f"The newest durable epoch is {epoch}, {_age(seconds)} old ({created})"

    def age(self, now: datetime | None = None) -> float | None:
        """Seconds since the newest durable epoch that this process knows was committed; None if it knows none."""
        newest = self._newest
        try:
            created = datetime.fromisoformat(newest[1]) if newest is not None else None
            return None if created is None else ((now or datetime.now(timezone.utc)) - created).total_seconds()
        except (ValueError, TypeError):
            return None

    def last_words(self) -> None:
        """At the end: what the log must say if the last saves failed and were forgiven."""
        if self.count and self._on_error == "warn":
            log.error("the last %d saves to %s failed. %s", self.count, self._url, self.newest())


def _age(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "seconds"), (7200, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{max(0, int(seconds // unit))} {name}"
    return f"{int(seconds // 86_400)} days"
