"""Stores that fail on purpose: CrashStore dies at a chosen mutation, FaultStore follows a script."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeVar

from ckptstore.errors import InvalidArgumentError
from ckptstore.keys import check_key, partial_key
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.local import LocalStore
from ckptstore.stores.space import Space

T = TypeVar("T")
When = Literal["before", "after", "torn"]
Match = str | re.Pattern[str] | Callable[[str], bool]

VERBS = ("put", "get", "info", "list", "delete")


class SimulatedCrash(BaseException):
    """The process is dead from here on. No Exception: nothing in the code under test may handle it."""


class CrashStore(Store):
    """Crashes at mutation number ``at`` (put or delete, counted from 1) and at every call after it.

    Mutations run one at a time, so exactly ``at - 1`` of them are done at the crash (``at`` with "after").

    Args:
        inner: the store that survives.
        at: a number beyond the last mutation never crashes.
        mode: "before": mutation ``at`` leaves nothing; "after": it is done, but nobody hears of it;
            "torn": it leaves what a kill in the middle of a put leaves on that store (a scratch
            file with half of the body on a LocalStore, below any wrappers; elsewhere nothing).
    """

    def __init__(self, inner: Store, at: int, mode: When = "before") -> None:
        _check_when(mode)
        self._inner = inner
        self._at = at
        self._mode = mode
        self._lock = threading.RLock()
        self._mutations = 0
        self._crashed = False

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def mutations(self) -> int:
        """How many puts and deletes were begun, with the one that crashed."""
        return self._mutations

    @property
    def crashed(self) -> bool:
        """Whether the crash has happened."""
        return self._crashed

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        tear = (lambda: _tear(self._inner, key, data)) if self._mode == "torn" else None
        self._mutate(key, lambda: self._inner.put(key, data, if_absent=if_absent), tear)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._check_alive()
        return self._inner.get(key, start, end)

    def info(self, key: str) -> ObjectInfo:
        self._check_alive()
        return self._inner.info(key)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        self._check_alive()
        return iter(tuple(self._inner.list(prefix, partial=partial)))

    def delete(self, key: str) -> None:
        self._mutate(key, lambda: self._inner.delete(key))

    def space(self) -> Space | None:
        return self._inner.space()

    def close(self) -> None:
        self._inner.close()

    def _check_alive(self) -> None:
        if self._crashed:
            raise SimulatedCrash(f"crashed at mutation {self._at}")

    def _mutate(self, key: str, act: Callable[[], None], tear: Callable[[], None] | None = None) -> None:
        check_key(key)  # a bad key is refused before anything could happen
        with self._lock:
            self._check_alive()
            self._mutations += 1
            if self._mutations != self._at:
                act()
                return
            self._crashed = True
            if self._mode == "after":
                act()
            elif tear is not None:
                tear()
            raise SimulatedCrash(f"crashed {self._mode} mutation {self._at}, {key!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """One line of a script.

    Attributes:
        verb: the verb that fails.
        match: which keys (or prefixes of a listing): a substring, a compiled pattern to search for, or
            a predicate. The default matches all.
        when: "before": nothing happened; "after": it happened and the reply is lost; "torn" (put
            only): as a crash in the middle leaves it.
        error: what to raise, or a function that is called when the fault fires and returns it. When
            it returns None the call goes on, so a function can also act at a chosen moment.
        times: how often it fires, None for every time.
    """

    verb: Literal["put", "get", "info", "list", "delete"]
    match: Match = ""
    when: When = "before"
    error: BaseException | Callable[[], BaseException | None] | None = None
    times: int | None = 1

    def __post_init__(self) -> None:
        _check_when(self.when)
        if self.verb not in VERBS or (self.when == "torn" and self.verb != "put"):
            raise InvalidArgumentError(f"no fault {self.when!r} for {self.verb!r}: only a put can be torn")
        if self.error is None:
            raise InvalidArgumentError("a fault without an error: say what to raise")
        if self.times is not None and self.times < 1:
            raise InvalidArgumentError(f"a fault that fires {self.times} times: use 1 or more, or None")

    def matches(self, verb: str, key: str) -> bool:
        """Whether it is meant for this call."""
        if verb != self.verb:
            return False
        if isinstance(self.match, str):
            return self.match in key
        if isinstance(self.match, re.Pattern):
            return self.match.search(key) is not None
        return self.match(key)


class FaultStore(Store):
    """Each call meets the first fault of the script that matches and is not used up, if any.

    As a context manager it fails at the end when a fault did not fire as often as it should.
    """

    def __init__(self, inner: Store, faults: Sequence[Fault]) -> None:
        self._inner = inner
        self._faults = tuple(faults)
        self._fired = [0] * len(self._faults)
        self._lock = threading.Lock()

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def fired(self) -> tuple[int, ...]:
        """How often each fault of the script has fired."""
        with self._lock:
            return tuple(self._fired)

    def assert_all_fired(self) -> None:
        """Fail unless every fault fired ``times`` times, or at least once where that is None."""
        idle = [
            f"{fault} fired {fired} times"
            for fault, fired in zip(self._faults, self.fired, strict=True)
            if fired < (fault.times or 1)
        ]
        if idle:
            raise AssertionError("faults that did not fire: " + "; ".join(idle))

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        self._run("put", key, lambda: self._inner.put(key, data, if_absent=if_absent), data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._run("get", key, lambda: self._inner.get(key, start, end))

    def info(self, key: str) -> ObjectInfo:
        return self._run("info", key, lambda: self._inner.info(key))

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        return iter(self._run("list", prefix, lambda: tuple(self._inner.list(prefix, partial=partial))))

    def delete(self, key: str) -> None:
        self._run("delete", key, lambda: self._inner.delete(key))

    def space(self) -> Space | None:
        return self._inner.space()

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> FaultStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            self.assert_all_fired()

    def _run(self, verb: str, key: str, call: Callable[[], T], data: Body = b"") -> T:
        fault = self._next(verb, key)
        if fault is None:
            return call()
        if fault.when == "after":
            result = call()
            _raise(fault)
            return result
        if fault.when == "torn":
            _tear(self._inner, key, data)
        _raise(fault)
        return call()

    def _next(self, verb: str, key: str) -> Fault | None:
        with self._lock:
            for number, fault in enumerate(self._faults):
                if (fault.times is None or self._fired[number] < fault.times) and fault.matches(verb, key):
                    self._fired[number] += 1
                    return fault
        return None


def _raise(fault: Fault) -> None:
    error = fault.error() if callable(fault.error) else fault.error
    if error is not None:
        raise error


def _tear(store: Store, key: str, data: Body) -> None:
    """Leave what a put that dies halfway leaves on that store."""
    while not isinstance(store, LocalStore):
        inner = getattr(store, "inner", None)
        if not isinstance(inner, Store):
            return  # a request that was cut off leaves nothing
        store = inner
    body = memoryview(data).tobytes()
    path = os.path.join(store.root, partial_key(key))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "xb") as scratch:
        scratch.write(body[: len(body) // 2])


def _check_when(when: str) -> None:
    if when not in ("before", "after", "torn"):
        raise InvalidArgumentError(f"{when!r} is no moment of a fault: use 'before', 'after' or 'torn'")
