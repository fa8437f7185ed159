"""The wrappers and MemoryStore: what goes in comes out, and each adds exactly its own thing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from ckptstore.errors import InvalidArgumentError, ObjectNotFoundError, ThrottledError, TransientError
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.limit import LimitStore, Slots
from ckptstore.stores.memory import MemoryStore
from ckptstore.stores.retry import RetryPolicy, RetryStore
from ckptstore.stores.trace import OpLog, StoreEvent, TraceStore
from ckptstore.stores.watch import WatchStore
from ckptstore.testing.faults import CrashStore, Fault, FaultStore


class Recorder(Store):
    """Notes every call with its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits("recorder://", None, 7)

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        self.calls.append(("put", key, data, if_absent))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.calls.append(("get", key, start, end))
        return b"got"

    def info(self, key: str) -> ObjectInfo:
        self.calls.append(("info", key))
        return ObjectInfo(key, 3, 1.0)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        self.calls.append(("list", prefix, partial))
        return iter([ObjectInfo("a", 1, 2.0)])

    def delete(self, key: str) -> None:
        self.calls.append(("delete", key))

    def close(self) -> None:
        self.calls.append(("close",))


WRAPPERS: dict[str, Callable[[Store], Store]] = {
    "limit": lambda inner: LimitStore(inner, 3),
    "trace": lambda inner: TraceStore(inner, OpLog()),
    "retry": RetryStore,
    "watch": lambda inner: WatchStore(inner, 60.0),
    "crash": lambda inner: CrashStore(inner, at=10**9),
    "fault": lambda inner: FaultStore(inner, []),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_all_verbs_pass(name: str) -> None:
    """A wrapper hands on every verb with every argument, the same body object, and every result."""
    inner = Recorder()
    store = WRAPPERS[name](inner)
    data = memoryview(b"data")
    with store:
        store.put("a/1", data)
        store.put("a/2", data, if_absent=True)
        assert store.get("a/1") == b"got"
        assert store.get("a/1", 5, 9) == b"got"
        assert store.info("a/1") == ObjectInfo("a/1", 3, 1.0)
        assert list(store.list()) == list(store.list("a/", partial=True)) == [ObjectInfo("a", 1, 2.0)]
        store.delete("a/1")
    assert inner.calls == [
        ("put", "a/1", data, False),
        ("put", "a/2", data, True),
        ("get", "a/1", 0, None),
        ("get", "a/1", 5, 9),
        ("info", "a/1"),
        ("list", "", False),
        ("list", "a/", True),
        ("delete", "a/1"),
        ("close",),
    ]
    assert inner.calls[0][2] is data
    assert store.traits == StoreTraits("recorder://", None, 3 if name == "limit" else 7)
    assert getattr(store, "inner", None) is inner


def test_forgotten_verb() -> None:
    """A store that lacks a verb cannot be made."""

    names = ("traits", "put", "get", "info", "list", "delete", "close")
    for forgotten in names:
        verbs = {name: getattr(Recorder, name) for name in names if name != forgotten}
        with pytest.raises(TypeError, match=forgotten):
            type("Lacking", (Store,), verbs)()


# --- limit -----------------------------------------------------------------------------------------


def test_limit_holds() -> None:
    """Never more than so many calls are inside, of whatever verbs, and all slots are used."""
    inside, most = [0], [0]
    lock, together = threading.Lock(), threading.Barrier(3)

    class Counting(Recorder):
        def _count(self) -> None:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            together.wait(60)  # passes only when three are inside at once
            with lock:
                inside[0] -= 1

        def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
            self._count()

        def delete(self, key: str) -> None:
            self._count()

        def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
            self._count()
            yield from ()

    store = LimitStore(Counting(), 3)
    calls: list[Callable[[], object]] = [
        lambda: store.put("a", b""),
        lambda: store.delete("a"),
        lambda: list(store.list()),
    ]
    with ThreadPoolExecutor(12) as pool:
        for call in [pool.submit(call) for call in calls * 8]:
            call.result(60)
    assert most == [3]


def test_limit_is_fair() -> None:
    """Slots go round in the order of arrival: a busy thread cannot starve another."""
    slots = Slots(1)
    order: list[int] = []

    def enter(number: int) -> None:
        with slots:
            order.append(number)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(5)]
    with slots:
        for number, thread in enumerate(threads):
            thread.start()
            while slots.waiting <= number:
                thread.join(0.001)
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, 3, 4]
    assert slots.waiting == 0
    enter(5)


def test_limit_survives_errors() -> None:
    """A call that fails gives its slot back."""
    store = LimitStore(MemoryStore(), 1)
    for _ in range(3):
        with pytest.raises(ObjectNotFoundError):
            store.get("a")
        with pytest.raises(InvalidArgumentError):
            store.list("..")
    store.put("a", b"")


def test_listing_holds_no_slot() -> None:
    """A reader that stops in the middle of a listing keeps nobody from the store."""
    store = LimitStore(MemoryStore(), 1)
    store.put("a", b"1")
    store.put("b", b"2")
    found = [next(listing := store.list())]
    store.delete("b")
    found += listing
    assert {entry.key for entry in found} == {"a", "b"}


@pytest.mark.parametrize("concurrency", [0, -1])
def test_limit_of_nothing(concurrency: int) -> None:
    """A limit that lets nobody in is refused."""
    with pytest.raises(InvalidArgumentError):
        LimitStore(MemoryStore(), concurrency)


# --- trace -----------------------------------------------------------------------------------------


def test_trace_tells_of_every_call() -> None:
    """One event a call: verb, key, bytes, time, and the very error that the caller got."""
    log = OpLog()
    error = TransientError("down")
    store = TraceStore(FaultStore(MemoryStore(), [Fault("put", "bad", error=error)]), log)
    store.put("a/1", memoryview(b"12345678").cast("I"))
    store.get("a/1", 2, 5)
    store.info("a/1")
    list(store.list("a/"))
    store.delete("a/1")
    with pytest.raises(TransientError):
        store.put("bad/1", b"123")
    with pytest.raises(ObjectNotFoundError) as missing:
        store.get("a/1")
    facts = [(event.verb, event.key, event.nbytes, event.error) for event in log.events]
    assert facts == [
        ("put", "a/1", 8, None),
        ("get", "a/1", 3, None),
        ("info", "a/1", 0, None),
        ("list", "a/", 0, None),
        ("delete", "a/1", 0, None),
        ("put", "bad/1", 3, error),
        ("get", "a/1", 0, missing.value),
    ]
    assert all(event.seconds >= 0 for event in log.events)


def test_trace_sees_interrupts() -> None:
    """An interrupted call has its event too, and the interrupt passes."""
    log = OpLog()
    with pytest.raises(KeyboardInterrupt):
        TraceStore(FaultStore(MemoryStore(), [Fault("delete", error=KeyboardInterrupt())]), log).delete("a")
    assert [(event.verb, type(event.error)) for event in log.events] == [("delete", KeyboardInterrupt)]


def test_op_log_adds_up() -> None:
    """The log counts calls and bytes by verb, also from many threads, and can be cleared."""
    log = OpLog()
    store = TraceStore(MemoryStore(), log)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"k{number}", bytes(10)), range(200)))
    store.get("k1")
    assert (log.count(), log.count("put"), log.count("get"), log.count("info")) == (201, 200, 1, 0)
    assert (log.bytes(), log.bytes("put"), log.bytes("get"), log.bytes("info")) == (2010, 2000, 10, 0)
    log.clear()
    assert (log.events, log.count(), log.bytes()) == ((), 0, 0)


def test_event_is_frozen() -> None:
    """An observer cannot change what the next one sees."""
    with pytest.raises(AttributeError):
        StoreEvent("put", "a", 1, 0.1).nbytes = 2  # type: ignore[misc]


# --- memory ----------------------------------------------------------------------------------------


def test_memory_stores_of_one_name_are_one() -> None:
    """Opening a name again gives the same objects; other names and nameless stores have their own."""
    name = f"shared-{threading.get_ident()}-{id(object())}"
    first = MemoryStore(name=name)
    first.put("a", b"1")
    first.close()
    assert MemoryStore(name).get("a") == b"1"
    for other in (MemoryStore(name + "x"), MemoryStore(), MemoryStore()):
        assert list(other.list()) == []
        other.put("a", b"2")
    MemoryStore(name).delete("a")
    assert list(first.list()) == []
    assert first.traits.url == f"memory://{name}"


def test_memory_clock() -> None:
    """Times are those of the clock that the store was given; an equal create-only put changes none."""
    now = [10.0]
    store = MemoryStore(clock=lambda: now[0])
    store.put("a", b"1")
    now[0] = 20.0
    store.put("a", b"1", if_absent=True)
    assert store.info("a").modified == 10.0
    store.put("a", b"1")
    assert store.info("a").modified == next(store.list()).modified == 20.0


# --- limit, while throttled ------------------------------------------------------------------------


class Throttling(MemoryStore):
    """Asks for fewer requests whenever more than ``most`` are inside."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.inside, self.refused = most, 0, 0
        self._count = threading.Lock()

    def info(self, key: str) -> ObjectInfo:
        with self._count:
            self.inside += 1
            too_many = self.inside > self.most
            self.refused += too_many
        time.sleep(0.001)
        with self._count:
            self.inside -= 1
        if too_many:
            raise ThrottledError("slow down")
        return ObjectInfo(key, 0, 0.0)


def failing(error: BaseException | None) -> Callable[[], None]:
    def act() -> None:
        if error is not None:
            raise error

    return act


def through(slots: Slots, *errors: BaseException | None) -> None:
    """So many calls, one after the other, which fail with these errors."""
    for error in errors:
        with suppress(TransientError), slots:
            failing(error)()


def test_throttling_halves_and_success_adds_one() -> None:
    """Each throttled call halves the slots, never below one; a round of successes, one a slot, adds one again."""
    slots, slow = Slots(16), ThrottledError("slow down")
    limits = []
    for _ in range(6):
        through(slots, slow)
        limits.append(slots.limit)
    assert limits == [8, 4, 2, 1, 1, 1]
    grown = []
    for _ in range(1 + 2 + 3 + 4):
        through(slots, None)
        grown.append(slots.limit)
    assert grown == [2, 2, 3, 3, 3, 4, 4, 4, 4, 5]
    through(slots, TransientError("reset"), TransientError("x"))
    assert slots.limit == 5
    through(slots, *[None] * 200)
    assert slots.limit == 16


def test_one_burst_of_throttling_counts_once() -> None:
    """Calls that were under way together and are all refused say the same thing: the slots are halved once."""
    slots = Slots(8)
    together = threading.Barrier(8)

    def call(_: int) -> None:
        with suppress(ThrottledError), slots:
            together.wait(60)
            raise ThrottledError("slow down")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert slots.limit == 4
    through(slots, ThrottledError("again"))
    assert slots.limit == 2


def test_fewer_requests_while_throttled() -> None:
    """A store that takes four at a time is soon asked for about four at a time, and nothing is lost."""
    inner = Throttling(4)
    limit = LimitStore(inner, 16)
    store = RetryStore(limit, RetryPolicy(attempts=50, base=0.0001, cap=0.001))
    with ThreadPoolExecutor(16) as pool:
        assert len(list(pool.map(store.info, map(str, range(600))))) == 600
    assert limit._slots.limit <= 16
    assert inner.refused < 300  # all of the time sixteen at once would be refused three times of four


def test_fewer_slots_are_fair_and_survive_a_fork() -> None:
    """With the slots cut those who wait are still served in order; a forked child begins with all slots."""
    slots = Slots(4)
    through(slots, *[ThrottledError("x")] * 2)
    assert slots.limit == 1
    order: list[int] = []

    def enter(number: int) -> None:
        with suppress(TransientError), slots:
            order.append(number)
            raise TransientError("reset")  # a success would add a slot

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(5)]
    with suppress(TransientError), slots:
        for number, thread in enumerate(threads):
            thread.start()
            while slots.waiting <= number:
                thread.join(0.001)
        raise TransientError("reset")
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, 3, 4]
    slots._pid = -1  # as a child finds it
    through(slots, None)
    assert slots.limit == 4
