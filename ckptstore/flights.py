"""Flights: the saves of one repository that have begun and not ended, so that a process that must end can wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from ckptstore.background import Background
from ckptstore.locks import ForkLock
from ckptstore.transaction import Transaction


class Flights:
    """Saves in flight: calls of ``save``, transactions, and the one in the background. Thread-safe."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self.others: list[Flights] = []
        """Of repositories that this one turns to. Their saves are part of calls of this one."""
        self.also: Callable[[], Collection[object]] = tuple
        """More that a process which must end waits for: tokens, the same as long as it is the same thing."""
        self._lock = ForkLock(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._calls: set[object] = set()
        self._transactions: weakref.WeakSet[Transaction] = weakref.WeakSet()

    @contextmanager
    def call(self) -> Iterator[None]:
        """While a block runs that begins, commits and prunes."""
        token = object()
        with self._lock:
            self._calls.add(token)
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(token)

    def add(self, txn: Transaction) -> None:
        """It is in flight until it has ended, or nobody holds it any more."""
        with self._lock:
            self._transactions.add(txn)

    def now(self) -> set[object]:
        """What is in flight now: tokens, good for comparing with later."""
        handle = self._background.in_flight
        more = self.also()
        with self._lock:
            open_ones = {txn for txn in self._transactions if not txn.ended}
            return {*self._calls, *open_ones, *more, *([handle] if handle is not None else [])}

    def abandon(self) -> None:
        """End all that is not yet being committed; what was sent is left to the next save of the epoch."""
        handle = self._background.in_flight
        if handle is not None:
            handle.exit_timeout = 0.0  # the exit of the interpreter need not wait for what cannot succeed
        with self._lock:
            transactions = list(self._transactions)
        for txn in transactions:
            txn.abandon()
        for other in list(self.others):
            other.abandon()
