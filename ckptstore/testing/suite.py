"""StoreSuite: what every store and every wrapper owes, as tests. Needs pytest.

::

    class TestMyStore(StoreSuite):
        def make_store(self) -> Store:
            return MyStore(self.folder)
"""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptstore.errors import InvalidArgumentError, ObjectExistsError, ObjectNotFoundError
from ckptstore.stores.base import Store

SIZES = (0, 1, 64 * 1024 + 1, 5 * 1024 * 1024)
BAD_PREFIXES = ("..", "../a", "/", "/a", "a//b", "a/../b", "./a", "a\nb", "a\\b", "a b", ".a", "-a", "é", "a" * 600)
RANGES = (
    *((0, 10), (10, 20), (999, 1000), (990, 2000), (1000, 1001), (1000, None), (2000, 3000), (2000, None)),
    *((0, None), (10, None), (0, 0), (10, 10), (20, 10), (0, 1000), (1000, 1000)),
)
BAD_KEYS = ("", "a/", "a/.", "a\n", *BAD_PREFIXES)


def body(size: int, seed: int = 0) -> bytes:
    """Bytes that look like noise and are the same in every run."""
    return random.Random(seed).randbytes(size)


def keys_of(store: Store, prefix: str = "", *, partial: bool = False) -> list[str]:
    """The sorted keys of a listing."""
    return sorted(entry.key for entry in store.list(prefix, partial=partial))


def at_once(count: int, work: Callable[[int], object]) -> list[object]:
    """``work(0)``, ``work(1)``, ... in ``count`` threads that start together: results or exceptions."""
    barrier = threading.Barrier(count)

    def run(number: int) -> object:
        barrier.wait(60)
        try:
            return work(number)
        except Exception as error:  # noqa: BLE001  (the caller looks at it)
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class StoreSuite:
    """Derive a test class, override :meth:`make_store`, adjust the knobs.

    Attributes:
        conditional_put: whether create-only puts are honoured; without, their tests are skipped.
        racers: how many threads race for one key.
        many: how many objects a long listing has; more than a page of the store, 0 to skip.
        overwrites: how often the body under the readers is replaced.
        folder: an empty folder of the running test.
    """

    conditional_put = True
    racers = 8
    many = 1200
    overwrites = 20
    folder: Path

    def make_store(self) -> Store:
        """A new, empty store."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """The store under test."""
        self.folder = tmp_path
        store = self.make_store()
        yield store
        store.close()

    @pytest.fixture
    def create_only(self) -> None:
        """Skips where create-only puts are not honoured."""
        if not self.conditional_put:
            pytest.skip("the store ignores if_absent")

    # --- put and get ---------------------------------------------------------------------------

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("if_absent", [False, True])
    def test_round_trip(self, store: Store, size: int, if_absent: bool) -> None:
        """What is put is what is got, for every size."""
        store.put("a/b/c", body(size), if_absent=if_absent)
        got = store.get("a/b/c")
        assert type(got) is bytes
        assert got == body(size)
        assert store.info("a/b/c").size == size

    @pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "readonly", "words", "strided", "matrix"])
    def test_kinds_of_body(self, store: Store, kind: str) -> None:
        """Every kind of buffer is stored as its bytes in C order."""
        raw = bytearray(body(4096))
        data: dict[str, bytes | bytearray | memoryview] = {
            "bytes": bytes(raw),
            "bytearray": raw,
            "memoryview": memoryview(raw)[1:4000],
            "readonly": memoryview(bytes(raw)),
            "words": memoryview(array("I", range(1000))),
            "strided": memoryview(raw)[::3],
            "matrix": memoryview(raw).cast("B", (64, 64)),
        }
        store.put("kinds/one", data[kind])
        assert store.get("kinds/one") == memoryview(data[kind]).tobytes()

    def test_buffer_is_free_after_put(self, store: Store) -> None:
        """The caller may change its buffer once put has returned."""
        buffer = bytearray(b"before")
        store.put("a/1", buffer)
        store.put("a/2", memoryview(buffer), if_absent=True)
        buffer[:] = b"after!"
        assert store.get("a/1") == store.get("a/2") == b"before"
        buffer.extend(b"it is not held either")

    @pytest.mark.parametrize(("start", "end"), RANGES)
    def test_ranges(self, store: Store, start: int, end: int | None) -> None:
        """A range gives those bytes, fewer or none where the object is shorter."""
        store.put("r/1", body(1000))
        assert store.get("r/1", start, end) == body(1000)[start:end]

    def test_range_of_an_empty_object(self, store: Store) -> None:
        """Any range of an empty object is empty, not an error."""
        store.put("r/0", b"")
        assert store.get("r/0", 0, 10) == store.get("r/0", 5, 10) == store.get("r/0", 0, 0) == b""

    @pytest.mark.parametrize(("start", "end"), [(-1, None), (0, -1), (-5, -1)])
    def test_negative_offsets(self, store: Store, start: int, end: int) -> None:
        """Negative offsets are refused: they would mean something else to each store."""
        store.put("r/1", body(1000))
        with pytest.raises(InvalidArgumentError):
            store.get("r/1", start, end)

    def test_overwrite(self, store: Store) -> None:
        """A plain put replaces the object, by a longer or a shorter one."""
        for size in (10, 100_000, 3, 0):
            store.put("a/1", body(size, seed=size))
            assert store.get("a/1") == body(size, seed=size)
            assert store.info("a/1").size == size
        assert keys_of(store) == ["a/1"]

    # --- create-only ---------------------------------------------------------------------------

    @pytest.mark.usefixtures("create_only")
    @pytest.mark.parametrize("other", [b"", b"other", b"new", b"old and longer", b"ol", b"Old"])
    def test_create_only_refuses_other_bytes(self, store: Store, other: bytes) -> None:
        """A create-only put never changes an object that holds other bytes."""
        store.put("a/1", b"old", if_absent=True)
        with pytest.raises(ObjectExistsError) as caught:
            store.put("a/1", other, if_absent=True)
        assert caught.value.key == "a/1"
        assert store.get("a/1") == b"old"
        assert keys_of(store) == ["a/1"]
        assert keys_of(store, partial=True) == []

    @pytest.mark.usefixtures("create_only")
    @pytest.mark.parametrize("size", [0, 10, 3 * 1024 * 1024 + 1])
    def test_create_only_with_the_same_bytes(self, store: Store, size: int) -> None:
        """A create-only put of the bytes that are there is a success: its reply may have been lost."""
        for _ in range(2):
            store.put("a/1", bytearray(body(size)), if_absent=True)
        assert store.get("a/1") == body(size)
        assert keys_of(store, partial=True) == []

    @pytest.mark.usefixtures("create_only")
    def test_create_only_sees_the_last_byte(self, store: Store) -> None:
        """Bytes of equal length that differ only at the end are other bytes."""
        data = body(2 * 1024 * 1024)
        store.put("a/1", data, if_absent=True)
        with pytest.raises(ObjectExistsError):
            store.put("a/1", data[:-1] + bytes([data[-1] ^ 1]), if_absent=True)

    @pytest.mark.usefixtures("create_only")
    def test_create_only_after_delete(self, store: Store) -> None:
        """A deleted key is free again."""
        store.put("a/1", b"old", if_absent=True)
        store.delete("a/1")
        store.put("a/1", b"new", if_absent=True)
        assert store.get("a/1") == b"new"

    @pytest.mark.usefixtures("create_only")
    @pytest.mark.parametrize("size", [1, 300_000])
    def test_race_for_one_key(self, store: Store, size: int) -> None:
        """Of racing writers with different bodies exactly one wins, and its body is there."""
        bodies = [bytes([number]) * size for number in range(self.racers)]
        results = at_once(self.racers, lambda n: store.put("race/key", bodies[n], if_absent=True))
        winners = [number for number, result in enumerate(results) if result is None]
        assert len(winners) == 1, results
        assert all(isinstance(result, ObjectExistsError) for result in results if result is not None), results
        assert store.get("race/key") == bodies[winners[0]]
        assert keys_of(store) == ["race/key"]

    @pytest.mark.usefixtures("create_only")
    def test_race_with_equal_bodies(self, store: Store) -> None:
        """Racing writers of the same bytes all succeed."""
        results = at_once(self.racers, lambda _: store.put("race/same", body(10_000), if_absent=True))
        assert results == [None] * self.racers

    # --- list ----------------------------------------------------------------------------------

    def test_list_is_by_string_prefix(self, store: Store) -> None:
        """A prefix is a string: it cuts neither at folders nor at numbers."""
        keys = ["a/1", "a/10", "a/2/x", "ab/1", "b.json", "ckpt"]
        for number, key in enumerate(keys):
            store.put(key, b"x" * number)
        expected = {
            "": keys,
            "a": ["a/1", "a/10", "a/2/x", "ab/1"],
            "a/": ["a/1", "a/10", "a/2/x"],
            "a/1": ["a/1", "a/10"],
            "a/10": ["a/10"],
            "a/1/": [],
            "a/2": ["a/2/x"],
            "a/2/": ["a/2/x"],
            "b": ["b.json"],
            "b.json": ["b.json"],
            "none/": [],
            "zzz": [],
        }
        for prefix, found in expected.items():
            assert keys_of(store, prefix) == found, prefix
        assert {entry.key: entry.size for entry in store.list()} == {key: n for n, key in enumerate(keys)}

    def test_list_of_an_empty_store(self, store: Store) -> None:
        """A new store lists nothing, and is not an error."""
        assert keys_of(store) == keys_of(store, "a/") == keys_of(store, partial=True) == []

    def test_list_sees_puts_and_deletes(self, store: Store) -> None:
        """A listing agrees with every put and delete that returned before it."""
        for key in ("a/1", "a/2", "b/1"):
            store.put(key, b"x")
            assert key in keys_of(store)
        store.delete("a/1")
        assert keys_of(store, "a/") == ["a/2"]
        store.delete("a/2")
        assert keys_of(store, "a/") == []
        assert keys_of(store) == ["b/1"]

    def test_list_agrees_with_info(self, store: Store) -> None:
        """A listing and info say the same of an object."""
        store.put("a/1", body(1234))
        (listed,) = store.list("a/")
        looked = store.info("a/1")
        assert (listed.key, listed.size) == (looked.key, looked.size) == ("a/1", 1234)
        # Some services give whole seconds in one of the two.
        assert abs(listed.modified - looked.modified) <= 1

    def test_long_list(self, store: Store) -> None:
        """A listing of more than one page is complete, without doubles."""
        if not self.many:
            pytest.skip("many = 0")
        keys = [f"many/{number:06d}" for number in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        store.put("other/1", b"")
        assert keys_of(store, "many/") == keys
        assert keys_of(store) == [*keys, "other/1"]

    def test_no_scratch_after_puts(self, store: Store) -> None:
        """Puts that returned leave no scratch objects."""
        key = "leases/" + "0" * 32 + ".json"
        store.put(key, b"1")
        store.put(key, b"2")
        store.put("ckptstore.json", b"3", if_absent=True)
        assert keys_of(store, partial=True) == keys_of(store, "leases/", partial=True) == []

    # --- info, delete, errors ------------------------------------------------------------------

    def test_modified(self, store: Store) -> None:
        """The time of an object is near ours and does not go back when it is overwritten."""
        store.put("a/1", b"1")
        first = store.info("a/1")
        store.put("a/1", b"22")
        second = store.info("a/1")
        assert (first.size, second.size) == (1, 2)
        assert first.modified <= second.modified
        assert abs(first.modified - time.time()) < 600

    @pytest.mark.parametrize("key", ["missing", "a/missing", "a/1/below", "a"])
    def test_missing(self, store: Store, key: str) -> None:
        """An object that is not there is a typed error that names it, for get and info."""
        store.put("a/1", b"x")
        for ask in (store.get, store.info, lambda key: store.get(key, 5, 5), lambda key: store.get(key, 3)):
            with pytest.raises(ObjectNotFoundError) as caught:
                ask(key)
            assert caught.value.key == key

    def test_delete(self, store: Store) -> None:
        """A delete removes that object and no other; a second one is a success."""
        for key in ("a/1", "a/10", "b"):
            store.put(key, b"x")
        for _ in range(2):
            store.delete("a/1")
        store.delete("never/there")
        store.delete("b/below")
        store.delete("a")
        with pytest.raises(ObjectNotFoundError):
            store.get("a/1")
        assert keys_of(store) == ["a/10", "b"]

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys(self, store: Store, key: str) -> None:
        """A key that could mean something else elsewhere is refused by every verb."""
        calls: list[Callable[[], object]] = [
            lambda: store.put(key, b"x"),
            lambda: store.put(key, b"x", if_absent=True),
            lambda: store.get(key),
            lambda: store.info(key),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(InvalidArgumentError):
                call()
        assert keys_of(store) == []

    @pytest.mark.parametrize("prefix", BAD_PREFIXES)
    def test_bad_prefixes(self, store: Store, prefix: str) -> None:
        """A prefix that no key can have is refused, not answered with nothing."""
        for partial in (False, True):
            with pytest.raises(InvalidArgumentError):
                list(store.list(prefix, partial=partial))

    # --- together ------------------------------------------------------------------------------

    def test_readers_never_see_a_torn_body(self, store: Store) -> None:
        """Readers beside a writer get one whole body or another, never a mixture or a part."""
        size = 200_000
        store.put("a/1", bytes(size))
        done = threading.Event()

        def read() -> int:
            seen = 0
            while not done.is_set():
                got = store.get("a/1")
                assert len(got) == size
                assert got == got[:1] * size
                assert store.info("a/1").size == size
                assert keys_of(store) == ["a/1"]
                seen += 1
            return seen

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            try:
                for number in range(self.overwrites):
                    store.put("a/1", bytes([number % 255 + 1]) * size)
            finally:
                done.set()
        assert all(reader.result() >= 0 for reader in readers)

    def test_folders_come_and_go(self, store: Store) -> None:
        """Puts and deletes of neighbours do not disturb each other."""

        def work(number: int) -> None:
            for turn in range(10):
                key = f"deep/{turn % 2}/shared/{number}"
                store.put(key, b"x" * number, if_absent=self.conditional_put)
                assert store.get(key) == b"x" * number
                store.delete(key)

        assert at_once(self.racers, work) == [None] * self.racers
        assert keys_of(store) == []

    def test_traits(self, store: Store) -> None:
        """The traits name the place and claim nothing that the suite does not check."""
        assert "://" in store.traits.url
        assert store.traits.concurrency >= 1
        assert store.traits.conditional_put in (self.conditional_put, None)

    def test_close_twice(self, store: Store) -> None:
        """Closing again is harmless, also as a context manager."""
        with store:
            store.put("a/1", b"x")
        store.close()
