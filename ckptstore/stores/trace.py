"""TraceStore: tell an observer of every call. OpLog: an observer that counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ckptstore.locks import ForkLock
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.space import Space

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """One finished call.

    Attributes:
        verb: ``put``, ``get``, ``info``, ``list`` or ``delete``.
        key: the key, or the prefix of a listing.
        nbytes: body bytes sent (put, even if it failed) or received (get), else 0.
        seconds: how long it took.
        error: what it raised, None when it succeeded.
    """

    verb: str
    key: str
    nbytes: int
    seconds: float
    error: BaseException | None = None


class TraceStore(Store):
    """Calls ``on_request`` after every call of ``inner``, in the thread of the caller. It must not raise."""

    def __init__(self, inner: Store, on_request: Callable[[StoreEvent], None]) -> None:
        self._inner = inner
        self._on_request = on_request

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        nbytes = memoryview(data).nbytes
        self._traced("put", key, lambda: self._inner.put(key, data, if_absent=if_absent), lambda _: 0, nbytes)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._traced("get", key, lambda: self._inner.get(key, start, end), len)

    def fetch(self, key: str, start: int, end: int, room: memoryview) -> memoryview:
        return self._traced("get", key, lambda: self._inner.fetch(key, start, end, room), len)

    def info(self, key: str) -> ObjectInfo:
        return self._traced("info", key, lambda: self._inner.info(key))

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        # At once, so that the event tells of the whole listing and of what went wrong in it.
        return iter(self._traced("list", prefix, lambda: tuple(self._inner.list(prefix, partial=partial))))

    def delete(self, key: str) -> None:
        self._traced("delete", key, lambda: self._inner.delete(key))

    def space(self) -> Space | None:
        return self._inner.space()

    def close(self) -> None:
        self._inner.close()

    def _traced(
        self, verb: str, key: str, call: Callable[[], T], received: Callable[[T], int] = lambda _: 0, sent: int = 0
    ) -> T:
        begin = time.perf_counter()
        try:
            result = call()
        except BaseException as error:
            self._tell(StoreEvent(verb, key, sent, time.perf_counter() - begin, error))
            raise
        self._tell(StoreEvent(verb, key, sent + received(result), time.perf_counter() - begin))
        return result

    def _tell(self, event: StoreEvent) -> None:
        try:
            self._on_request(event)
        except Exception:
            # The call has had its effect: a listener that fails must not make it look as if it had not.
            logging.getLogger("ckptstore").exception("on_request failed")


class OpLog:
    """Keeps the events of a TraceStore (pass it as ``on_request``) and adds them up. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._events: list[StoreEvent] = []

    def __call__(self, event: StoreEvent) -> None:
        with self._lock:
            self._events.append(event)

    @property
    def events(self) -> tuple[StoreEvent, ...]:
        """The events so far, in the order in which the calls finished."""
        with self._lock:
            return tuple(self._events)

    def count(self, verb: str | None = None) -> int:
        """How many calls (of one verb) there were."""
        return sum(1 for event in self.events if verb in (None, event.verb))

    def bytes(self, verb: str | None = None) -> int:
        """How many body bytes went through (in calls of one verb)."""
        return sum(event.nbytes for event in self.events if verb in (None, event.verb))

    def clear(self) -> None:
        """Forget all events."""
        with self._lock:
            self._events.clear()
