"""CrashStore and FaultStore fail exactly where they are told to, and say when they did not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptstore.errors import InvalidArgumentError, ObjectNotFoundError, TransientError
from ckptstore.keys import chunk_key
from ckptstore.stores.base import Store
from ckptstore.stores.limit import LimitStore
from ckptstore.stores.local import LocalStore
from ckptstore.stores.memory import MemoryStore
from ckptstore.stores.trace import OpLog, TraceStore
from ckptstore.testing.faults import CrashStore, Fault, FaultStore, SimulatedCrash, When

CHUNK = chunk_key("a" * 32, "b" * 64)
READS: list[Callable[[Store], object]] = [
    lambda store: store.get("k1"),
    lambda store: store.info("k1"),
    lambda store: store.list(),
    lambda store: store.put("k9", b""),
    lambda store: store.delete("k1"),
]


def keys(store: Store, *, partial: bool = False) -> list[str]:
    return sorted(entry.key for entry in store.list(partial=partial))


# --- crash -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "at", "left"),
    [
        ("before", 1, []),
        ("after", 1, ["k1"]),
        ("torn", 1, []),
        ("before", 2, ["k1"]),
        ("after", 2, ["k1", "k2"]),
        ("before", 3, ["k1", "k2"]),
        ("after", 3, ["k2"]),
        ("torn", 3, ["k1", "k2"]),
        ("before", 4, ["k2"]),
        ("after", 4, ["k2", "k3"]),
    ],
)
def test_crash_at_a_mutation(mode: When, at: int, left: list[str]) -> None:
    """Mutation ``at`` is the first that crashes: done or not by the mode, and all before it are done."""
    inner = MemoryStore()
    store = CrashStore(inner, at, mode)
    with pytest.raises(SimulatedCrash):
        store.put("k1", b"1")
        store.get("k1")
        store.put("k2", b"2", if_absent=True)
        store.delete("k1")
        store.put("k3", b"3")
    assert keys(inner) == left
    assert (store.crashed, store.mutations) == (True, at)


def test_after_a_crash_all_is_over() -> None:
    """Every verb crashes once the store is dead, and nothing more happens to the objects."""
    inner = MemoryStore()
    inner.put("k1", b"1")
    store = CrashStore(inner, 1)
    with pytest.raises(SimulatedCrash):
        store.delete("k1")
    for act in READS:
        with pytest.raises(SimulatedCrash):
            act(store)
    store.close()
    assert keys(inner) == ["k1"]
    assert store.mutations == 1


def test_no_crash_before_the_last_mutation() -> None:
    """A number that is never reached crashes nothing, and the count tells where the end is."""
    store = CrashStore(MemoryStore(), 4)
    store.put("k1", b"1")
    store.put("k1", b"2")
    store.delete("k1")
    with pytest.raises(InvalidArgumentError):
        store.put("../bad", b"")
    assert (store.crashed, store.mutations) == (False, 3)


def test_crash_is_no_exception() -> None:
    """A handler of Exception does not see a crash."""
    assert not issubclass(SimulatedCrash, Exception)


@pytest.mark.parametrize("wrapped", [False, True])
def test_torn_put_on_a_folder(tmp_path: Path, wrapped: bool) -> None:
    """A put that dies halfway leaves a scratch file with half of the body, as a killed process does."""
    local = LocalStore(tmp_path / "root")
    store = CrashStore(LimitStore(TraceStore(local, OpLog()), 1) if wrapped else local, 1, "torn")
    with pytest.raises(SimulatedCrash):
        store.put(CHUNK, memoryview(b"12345678").cast("I"), if_absent=True)
    assert keys(local) == []
    (scratch,) = local.list(partial=True)
    assert (tmp_path / "root" / scratch.key).read_bytes() == b"1234"
    local.delete(scratch.key)
    assert list((tmp_path / "root").iterdir()) == []


def test_crash_with_many_threads() -> None:
    """However many threads put, exactly ``at - 1`` objects are there after the crash."""
    inner = MemoryStore()
    store = CrashStore(inner, 50)

    def put(number: int) -> bool:
        try:
            store.put(f"k{number}", b"")
        except SimulatedCrash:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(put, range(200))) == 49
    assert len(keys(inner)) == 49


# --- faults ----------------------------------------------------------------------------------------


def test_fault_before() -> None:
    """Before: the error is raised and nothing happened; then the store works."""
    inner = MemoryStore()
    error = TransientError("x")
    with FaultStore(inner, [Fault("put", error=error)]) as store:
        with pytest.raises(TransientError) as caught:
            store.put("k1", b"1")
        assert caught.value is error
        assert keys(inner) == []
        store.put("k1", b"1")
    assert keys(inner) == ["k1"]


def test_fault_after() -> None:
    """After: it happened and the reply was lost."""
    inner = MemoryStore()
    with FaultStore(inner, [Fault("put", when="after", error=TransientError("x"))]) as store:
        with pytest.raises(TransientError):
            store.put("k1", b"1")
        assert inner.get("k1") == b"1"


def test_fault_torn(tmp_path: Path) -> None:
    """Torn: the put leaves a scratch file on a folder, and nothing elsewhere."""
    for inner, scratch in ((LocalStore(tmp_path), 1), (MemoryStore(), 0)):
        store = FaultStore(inner, [Fault("put", when="torn", error=TransientError("x"))])
        with pytest.raises(TransientError):
            store.put(CHUNK, b"1234")
        assert keys(inner) == []
        assert len(keys(inner, partial=True)) == scratch


@pytest.mark.parametrize("match", ["manifests/", re.compile(r"^man.*\.json$"), lambda key: key.startswith("man")])
def test_fault_matches(match: str | re.Pattern[str] | Callable[[str], bool]) -> None:
    """A fault meets only its verb, and only the keys that match: by substring, pattern or predicate."""
    with FaultStore(MemoryStore(), [Fault("put", match, error=TransientError("x"), times=None)]) as store:
        store.put("leases/1.json", b"")
        store.delete("manifests/1.json")
        with pytest.raises(ObjectNotFoundError):
            store.get("manifests/1.json")
        for _ in range(3):
            with pytest.raises(TransientError):
                store.put("manifests/1.json", b"")
        assert store.fired == (3,)


def test_faults_come_in_order() -> None:
    """The first line of the script that matches and is not used up is the one that fires."""
    script = [
        Fault("get", "k1", error=TransientError("one")),
        Fault("get", error=TransientError("two"), times=2),
        Fault("get", "k1", error=TransientError("three")),
    ]
    messages = []
    with FaultStore(MemoryStore(), script) as store:
        for key in ("k2", "k1", "k1", "k1"):
            with pytest.raises(TransientError) as caught:
                store.get(key)
            messages.append(str(caught.value))
        with pytest.raises(ObjectNotFoundError):
            store.get("k1")
    assert messages == ["two", "one", "two", "three"]


@pytest.mark.parametrize("verb", ["get", "info", "list", "delete"])
def test_every_verb_can_fail(verb: str) -> None:
    """Each verb meets its fault; the call before and after it is untouched."""
    acts: dict[str, Callable[[Store], object]] = {
        "get": lambda store: store.get("k1"),
        "info": lambda store: store.info("k1"),
        "list": lambda store: list(store.list("k")),
        "delete": lambda store: store.delete("k1"),
    }
    store = FaultStore(MemoryStore(), [Fault(verb, "k", error=TransientError("x"))])  # type: ignore[arg-type]
    store.put("k1", b"1")
    with store:
        with pytest.raises(TransientError):
            acts[verb](store)
        acts[verb](store)


def test_error_from_a_function() -> None:
    """An error may be made at the moment, and a function that returns none only acts there."""
    inner = MemoryStore()
    script = [
        Fault("get", error=lambda: inner.put("k1", b"by another")),
        Fault("get", error=lambda: TransientError("made"), when="after"),
    ]
    with FaultStore(inner, script) as store:
        assert store.get("k1") == b"by another"
        with pytest.raises(TransientError, match="made"):
            store.get("k1")


def test_fault_that_never_fired_fails() -> None:
    """A script that was not played to its end fails the test, with the line that is left."""
    for times, calls in ((1, 0), (3, 2), (None, 0)):
        store = FaultStore(MemoryStore(), [Fault("put", "never", error=TransientError("x"), times=times)])
        for _ in range(calls):
            with pytest.raises(TransientError):
                store.put("never", b"")
        with pytest.raises(AssertionError, match="never"):
            store.assert_all_fired()
        with pytest.raises(AssertionError, match="never"), store:
            pass


def test_failure_inside_is_not_hidden() -> None:
    """The check at the end does not replace the error that ended the block early."""
    store = FaultStore(MemoryStore(), [Fault("put", error=TransientError("x"))])
    with pytest.raises(ZeroDivisionError), store:
        _ = 1 / 0


def test_faults_with_many_threads() -> None:
    """A fault fires exactly as often as it should, however many threads meet it."""
    store = FaultStore(MemoryStore(), [Fault("put", error=TransientError("x"), times=50)])

    def put(number: int) -> int:
        try:
            store.put(f"k{number}", b"")
        except TransientError:
            return 1
        return 0

    with ThreadPoolExecutor(8) as pool, store:
        assert sum(pool.map(put, range(200))) == 50


def test_faults_that_make_no_sense() -> None:
    """A fault that could never happen is refused when it is written down."""
    error = TransientError("x")
    for make in (
        lambda: Fault("get", when="torn", error=error),
        lambda: Fault("push", error=error),  # type: ignore[arg-type]
        lambda: Fault("put", when="later", error=error),  # type: ignore[arg-type]
        lambda: Fault("put", error=error, times=0),
        lambda: Fault("put"),
        lambda: CrashStore(MemoryStore(), 1, "later"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgumentError):
            make()


def test_pytest_is_no_dependency() -> None:
    """Only the suite imports pytest; the other tools work without it."""
    code = (
        "import sys, ckptstore.testing\n"
        "assert 'pytest' not in sys.modules\n"
        "assert ckptstore.testing.StoreSuite and 'pytest' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
