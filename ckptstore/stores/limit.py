"""LimitStore: no more than so many requests at a time."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ckptstore.errors import InvalidArgumentError, ThrottledError
from ckptstore.patience import TICK_SECONDS, Expendable, current, expendable
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.space import Space


class Slots:
    """A semaphore that serves in order. The one of ``threading`` lets a busy thread starve the others:
    a lease would expire behind a stream of chunks.

    A ``ThrottledError`` inside halves the slots (1 is left), once for all calls that were under way; each round of
    successes, one for each slot, adds one again, up to ``count``.

    A thread inside that hangs, and whose owner is not there to leave it behind (busy elsewhere, or interrupted), is
    left behind by those who wait.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._begin_process()

    def _begin_process(self) -> None:
        self._pid = os.getpid()
        self._limit = self._count
        self._inside = 0
        self._round = 0  # how often the slots were cut
        self._successes = 0
        self._begun: dict[int, int] = {}  # by thread inside: the round in which it began
        self._expendable: dict[int, Expendable] = {}  # by thread inside
        self._lock = threading.Lock()
        self._queue: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        """How many threads wait for a slot."""
        return len(self._queue)

    @property
    def limit(self) -> int:
        """How many slots there are at the moment."""
        return self._limit

    def __enter__(self) -> None:
        self._enter()
        thread = expendable()
        if thread is not None:
            self._expendable[threading.get_ident()] = thread
            thread.leaving.append(partial(self._left, threading.get_ident(), thread))

    def _enter(self) -> None:
        if self._pid != os.getpid():
            self._begin_process()  # forked: those who hold the slots, and maybe the lock, stayed behind
        with self._lock:
            if self._inside < self._limit and not self._queue:
                self._inside += 1
                self._begun[threading.get_ident()] = self._round
                return
            gate = threading.Lock()
            gate.acquire()
            self._queue.append(gate)
        try:
            while not gate.acquire(timeout=TICK_SECONDS):  # whoever leaves opens it and so hands over the slot
                current().check("a call")
                for thread in list(self._expendable.values()):
                    thread.leave_behind()
        except BaseException:
            with self._lock:
                if gate in self._queue:
                    self._queue.remove(gate)
                else:
                    self._leave()
            raise
        self._begun[threading.get_ident()] = self._round

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        thread = expendable()
        if thread is not None:
            thread.leaving.pop()
            self._expendable.pop(threading.get_ident(), None)
        with self._lock:
            begun = self._begun.pop(threading.get_ident(), None)
            if begun is not None:
                self._judge(error, begun)
                self._leave()

    def _left(self, ident: int, thread: Expendable) -> None:
        """A thread inside was left behind: its slot goes to others."""
        with self._lock:
            # Not of a newer thread with the same number.
            if self._expendable.get(ident) is thread and self._begun.pop(ident, None) is not None:
                self._leave()

    def _judge(self, error: BaseException | None, begun: int) -> None:
        if isinstance(error, ThrottledError):
            if begun == self._round:  # else it was sent before the last cut
                self._limit, self._round, self._successes = max(1, self._limit // 2), self._round + 1, 0
        elif error is None and self._limit < self._count:
            self._successes += 1
            if self._successes >= self._limit:
                self._limit, self._successes = self._limit + 1, 0

    def _leave(self) -> None:
        self._inside -= 1
        while self._queue and self._inside < self._limit:
            self._inside += 1
            self._queue.popleft().release()


class LimitStore(Store):
    """Lets at most ``concurrency`` calls into ``inner`` at once; the others wait, first come first served.

    While the store asks for fewer (``ThrottledError``) it lets in fewer.

    Raises:
        InvalidArgumentError: ``concurrency`` is below 1.
    """

    def __init__(self, inner: Store, concurrency: int) -> None:
        if concurrency < 1:
            raise InvalidArgumentError(f"concurrency is {concurrency}: use 1 or more")
        self._inner = inner
        self._concurrency = concurrency
        self._slots = Slots(concurrency)

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def traits(self) -> StoreTraits:
        return replace(self._inner.traits, concurrency=self._concurrency)

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        with self._slots:
            self._inner.put(key, data, if_absent=if_absent)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with self._slots:
            return self._inner.get(key, start, end)

    def fetch(self, key: str, start: int, end: int, room: memoryview) -> memoryview:
        with self._slots:
            return self._inner.fetch(key, start, end, room)

    def info(self, key: str) -> ObjectInfo:
        with self._slots:
            return self._inner.info(key)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        # The whole listing at once: a reader that pauses in it must not keep a slot from the others.
        with self._slots:
            return iter(tuple(self._inner.list(prefix, partial=partial)))

    def delete(self, key: str) -> None:
        with self._slots:
            self._inner.delete(key)

    def space(self) -> Space | None:
        return self._inner.space()

    def close(self) -> None:
        self._inner.close()
