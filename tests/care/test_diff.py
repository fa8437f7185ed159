"""diff: what is said to be equal is, bit for bit; what differs is found; and little is read."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptstore import ArrayDiff, CorruptionError, Diff, EpochNotFoundError, RecordNotFoundError, Repository
from ckptstore.catalog import Catalog
from ckptstore.errors import TransientError
from ckptstore.stores import MemoryStore, open_store
from ckptstore.testing import Fault, FaultStore
from tests.conftest import Bucket
from tests.repository.helpers import CHUNK, Interfering, make_state, open_repo


def outcomes(found: Diff) -> dict[str, str]:
    return {f"{line.record}:{line.path}": line.outcome for line in found.arrays}


def of(found: Diff, path: str) -> ArrayDiff:
    [line] = [line for line in found.arrays if line.path == path]
    return line


def two(first: Any, second: Any, **options: Any) -> Repository:
    repo = open_repo(MemoryStore(), **options)
    repo.save(1, {"r": first})
    repo.save(2, {"r": second})
    return repo


def test_arrays_of_every_outcome() -> None:
    """Equal, changed, of another shape, type or kind, only here, only there."""
    rng = np.random.default_rng(0)
    big = rng.standard_normal(100_000)
    moved = big.copy()
    moved[70_000] += 0.25
    first = {
        "same": big, "big": big * 2, "small": np.arange(5.0), "shape": np.zeros((2, 3)), "dtype": np.zeros(3, "f4"),
        "kind": np.frombuffer(b"x" * 5000, np.uint8), "gone": np.ones(2), "empty": np.empty((0, 4)),
        "zero": np.zeros(()),
    }  # fmt: skip
    second = {
        "same": big.copy(), "big": moved * 2, "small": np.arange(5.0), "shape": np.zeros((3, 2)),
        "dtype": np.zeros(3, "f8"), "kind": b"x" * 5000, "new": np.ones(2), "empty": np.empty((0, 4)),
        "zero": np.ones(()),
    }  # fmt: skip
    second["small"][2] = np.nan
    found = two(first, second).diff(1, 2)
    assert outcomes(found) == {
        "r:same": "equal", "r:big": "changed", "r:small": "changed", "r:shape": "shape", "r:dtype": "dtype",
        "r:kind": "kind", "r:gone": "only in first", "r:empty": "equal", "r:zero": "changed",
        "r:new": "only in second",
    }  # fmt: skip
    big_line = of(found, "big")
    assert (big_line.elements, big_line.changed, big_line.largest, big_line.incomparable) == (100_000, 1, 0.5, 0)
    small = of(found, "small")
    assert (small.elements, small.changed, small.largest, small.incomparable) == (5, 1, None, 1)
    assert not found.equal
    # Of 200,000 eight-byte elements one chunk of each side, and that with the small arrays.
    assert found.bytes_read <= 4 * CHUNK


def test_equal_epochs_are_equal_and_nothing_is_read() -> None:
    """A save of the same state again: digests decide, in any split into records."""
    store = MemoryStore()
    repo = open_repo(store)
    repo.save(1, make_state(1), {"loss": float("nan")})
    repo.save(2, make_state(1), {"loss": float("nan")})
    broken = FaultStore(store, [Fault("get", "/chunks/", error=TransientError("no"), times=None)])
    found = open_repo(broken).diff(1, 2)
    assert found.equal
    assert (found.bytes_read, found.values) == (0, ())
    assert len(found.arrays) == 4
    assert repo.diff(2, 1).equal


def test_the_same_array_in_other_chunks() -> None:
    """Another chunk size, and another neighbourhood: digests cannot tell, bytes can."""
    rng = np.random.default_rng(4)
    arrays = {name: rng.standard_normal(40_000 + 1000 * n).astype("f4") for n, name in enumerate("abc")}
    store = MemoryStore()
    open_repo(store).save(1, {"r": {**arrays, "s": np.arange(10)}})
    Repository(store, chunk_size=3 * CHUNK + 64 * 5).save(2, {"r": {"z": np.zeros(3), **arrays, "s": np.arange(10)}})
    changed = {**arrays, "b": arrays["b"].copy()}
    changed["b"][[7, 39_999]] += 1
    Repository(store, chunk_size=2 * CHUNK).save(3, {"r": {**changed, "s": np.arange(10)}})
    assert outcomes(open_repo(store).diff(1, 2)) == {
        **{f"r:{name}": "equal" for name in (*"abc", "s")},
        "r:z": "only in second",
    }
    found = open_repo(store).diff(2, 3)
    assert {path: what for path, what in outcomes(found).items() if what != "equal"} == {
        "r:z": "only in first",
        "r:b": "changed",
    }
    assert of(found, "b").changed == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "complex64", "int64", "bool"])
def test_narrow_and_wide_types(dtype: str) -> None:
    """Through the whole way, for types that NumPy knows and does not."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a = (np.arange(20_000) % 2).astype(kind)
    b = a.copy()
    b[17] = np.ones((), kind)[()] if not a[17] else np.zeros((), kind)[()]
    line = of(two({"w": a}, {"w": b}).diff(1, 2), "w")
    assert (line.outcome, line.changed, line.largest) == ("changed", 1, 1)


def test_values_and_containers() -> None:
    """Types, bits, nesting; the keys 1 and "1" are two; order is none of its business."""
    first: dict[Any, Any] = {"lr": 0.1, "step": 1, "name": "sgd", "set": {3, 1, 2}, "e": {}, "l": [1, 2]}
    first.update({1: "int", "nested": {"a.b": 1}})
    second = {"set": {2, 3, 1}, "name": "adam", "step": 1.0, "lr": 0.1, "1": "text", "e": [], "l": (1, 3)}
    second.update({"nested": {"a": {"b": 1}}, "big": 10**5000})
    found = two(first, second).diff(1, 2)
    texts = {(value.path, value.first, value.second) for value in found.values}
    assert ("step", "1", "1.0") in texts
    assert ("name", "'sgd'", "'adam'") in texts
    assert ("1", "'int'", None) in texts
    assert ("1", None, "'text'") in texts
    assert ("nested.a.b", "1", None) in texts
    assert ("nested.a.b", None, "1") in texts
    assert ("e", "dict", "list") in texts
    assert ("l", "list", "tuple") in texts
    assert ("l.1", "2", "3") in texts
    assert [path for path, _, _ in texts if path == "big"] == ["big"]
    assert not [path for path, _, _ in texts if path in ("lr", "set")]
    same = {"d": defaultdict(int, {"a": 1}), "o": OrderedDict(a=float("nan")), "z": -0.0}
    assert two(same, same).diff(1, 2).equal
    assert not two(same, {**same, "z": 0.0}).diff(1, 2).equal


def test_files_records_and_metadata(tmp_path: Path) -> None:
    """Files by their bytes and names; records that only one has; metadata like any values."""
    repo = open_repo(MemoryStore())
    path, other = tmp_path / "a.bin", tmp_path / "b.bin"
    content = np.random.default_rng(1).integers(0, 256, 5 * CHUNK, dtype=np.uint8).tobytes()
    path.write_bytes(content)
    other.write_bytes(content[:-1] + b"?")
    for epoch, source, record in ((1, path, "x"), (2, other, "y"), (3, path, "x")):
        with repo.begin(epoch, {"loss": epoch}) as txn:
            txn.write_file("file", source)
            txn.write(record, {"n": 1})
    found = repo.diff(1, 2)
    assert (found.only_first, found.only_second) == (("x",), ("y",))
    [line] = found.arrays
    assert (line.path, line.outcome, line.changed, line.largest) == ("(file)", "changed", 1, None)
    assert found.bytes_read <= 2 * CHUNK
    assert {(v.record, v.path) for v in found.values} == {("(metadata)", "loss"), ("file", "name")}
    assert outcomes(repo.diff(1, 3)) == {"file:(file)": "equal"}
    path.write_bytes(content + b"more")
    with repo.begin(4) as txn:
        txn.write_file("file", path)
        txn.write_file("x", path)
    assert outcomes(repo.diff(1, 4, "file")) == {"file:(file)": "shape"}
    assert next((v.first, v.second) for v in repo.diff(1, 4, "x").values) == ("a state", "a file")
    with pytest.raises(RecordNotFoundError):
        repo.diff(1, 2, "nothing")
    assert repo.diff(1, 2, "x").only_first == ("x",)
    with pytest.raises(EpochNotFoundError):
        repo.diff(1, 9)


def test_tied_arrays_are_compared_once() -> None:
    """Each path has its line, and the bytes are read once."""
    a, b = np.arange(2 * CHUNK, dtype=np.uint8), np.arange(2 * CHUNK, dtype=np.uint8)
    b[5] += 1
    found = two({"x": a, "y": a}, {"x": b, "y": b}).diff(1, 2)
    assert outcomes(found) == {"r:x": "changed", "r:y": "changed"}
    assert {line.changed for line in found.arrays} == {1}
    assert found.bytes_read == 2 * CHUNK


def test_torch_and_numpy() -> None:
    """The same bits in another library are of another kind; changed ones are changed."""
    torch = pytest.importorskip("torch")
    a = np.arange(1000, dtype=np.float32)
    found = two({"w": a, "v": a}, {"w": torch.from_numpy(a.copy()), "v": torch.from_numpy(a + 1)}).diff(1, 2)
    assert outcomes(found) == {"r:w": "kind", "r:v": "changed"}
    assert of(found, "v").largest == 1.0


def test_damage_is_an_error_that_names_object_and_epoch() -> None:
    """No verdict is built on bytes that are wrong."""
    store = MemoryStore()
    repo = open_repo(store)
    repo.save(1, make_state(1))
    repo.save(2, make_state(2))
    catalog = Catalog(store)
    manifest = catalog.manifest(catalog.committed(2)[-1])
    chunk = next(c for e in manifest.records for c in catalog.index(e).chunks if c.attempt == manifest.attempt)
    data = bytearray(store.get(chunk.key))
    data[-1] ^= 1
    store.delete(chunk.key)
    store.put(chunk.key, bytes(data))
    with pytest.raises(CorruptionError) as caught:
        open_repo(store).diff(1, 2)
    assert (caught.value.key, caught.value.epoch) == (chunk.key, 2)


def test_an_epoch_that_is_deleted_meanwhile() -> None:
    """That is no damage."""
    store = Interfering(MemoryStore())
    repo = open_repo(store)
    repo.save(1, make_state(1))
    repo.save(2, make_state(2))

    class Reading(Interfering):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            self._hook("get", key, False)
            return super().get(key, start, end)

    reading = Reading(store)
    reading.after = False
    reading.at = lambda verb, key: verb == "get" and "/chunks/" in key

    def delete() -> None:
        repo.delete(2)
        repo.delete(1)

    reading.interfere = delete
    with pytest.raises(EpochNotFoundError, match="was deleted"):
        open_repo(reading).diff(1, 2)


def test_memory_is_a_few_chunks() -> None:
    """64 MB that differ everywhere are compared within a few of their chunks."""
    a = np.zeros(8_000_000)
    store = MemoryStore()
    repo = Repository(store, chunk_size=1 << 20)
    repo.save(1, {"r": {"w": a}})
    a += np.arange(8_000_000)
    repo.save(2, {"r": {"w": a}})
    seen: list[tuple[int, int]] = []
    tracemalloc.start()
    try:
        found = repo.diff(1, 2, progress=lambda done, total: seen.append((done, total)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.arrays[0].changed, found.arrays[0].largest) == (7_999_999, 7_999_999.0)
    assert peak < 40 << 20
    assert seen[-1][0] == seen[-1][1] == found.bytes_read


def test_on_a_real_server(s3: Bucket) -> None:
    """Over S3 as in memory."""
    with Repository(open_store(s3.url(), storage_options=s3.storage_options), chunk_size=CHUNK) as repo:
        repo.save(1, make_state(1))
        repo.save(2, make_state(2))
        found = repo.diff(1, 2)
    plain = open_repo(MemoryStore())
    plain.save(1, make_state(1))
    plain.save(2, make_state(2))
    assert found == plain.diff(1, 2)
    assert outcomes(found)["model:frozen"] == "equal"
