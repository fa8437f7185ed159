"""What you save is what you load, bit for bit; what is unchanged is not sent again; only what is asked for is read."""

from __future__ import annotations

import os
import random
import struct
import sys
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import Checkpoint, CorruptionError, InvalidRecordError, Repository
from ckptstore.stores import MemoryStore, OpLog, TraceStore
from ckptstore.stores.base import Store
from ckptstore.stores.local import LocalStore
from tests.repository.helpers import CHUNK, assert_no_debris, assert_same, keys_of, open_repo

NAN_PAYLOADS = np.array(
    [0x7FF8DEADBEEF0001, 0xFFF0000000000001, 0x8000000000000000, 0x7FF0000000000000], dtype=np.uint64
)


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, fast_folder: Path) -> Iterator[Store]:
    """An empty store."""
    made = MemoryStore() if request.param == "memory" else LocalStore(fast_folder / "repo")
    with made:
        yield made


def saved(store: Store, state: object, **options: Any) -> Any:
    """``state`` after a save and a load by another repository object."""
    open_repo(store, **options).save(1, {"state": state})
    loaded = open_repo(store).checkpoint(1).load("state")
    assert_no_debris(store)
    return loaded


def bits(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


# ---- values -------------------------------------------------------------------------------------------------

DTYPES = [
    *(
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
    ),
    *("complex64", "complex128", ">f4", ">i8", ">c16", "<M8[ns]", ">m8[s]", "<U7", ">U3", "|S5", "|V8"),
]
ML_DTYPES = [
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float8_e3m4", "float8_e4m3", "float6_e2m3fn", "float4_e2m1fn", "int4", "uint4", "int2"),
]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7, 5, 3), (40_000,)]


def noise(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Any bits that the type allows: for floats NaN payloads and -0.0 among them."""
    count = int(np.prod(shape))
    if dtype == np.bool_:
        return np.random.default_rng(1).integers(0, 2, shape).astype(np.bool_)
    if dtype.kind == "U":
        return np.array([f"é{n % 97}" for n in range(count)], dtype=dtype).reshape(shape)
    raw = bytearray(bits(count * dtype.itemsize, seed=3))
    if dtype.name in ("float6_e2m3fn", "float4_e2m1fn", "int4", "uint4", "int2"):
        mask = {"float6_e2m3fn": 63, "int2": 3}.get(dtype.name, 15)
        raw = bytearray(byte & mask for byte in raw)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


@pytest.mark.parametrize("name", [*DTYPES, *ML_DTYPES])
def test_numpy_dtypes(store: Store, name: str) -> None:
    """P7: arrays of every element type and shape come back with the same bits, 0-d and empty ones too."""
    dtype = np.dtype(getattr(ml_dtypes, name)) if name in ML_DTYPES else np.dtype(name)
    state = {str(shape): noise(dtype, shape) for shape in SHAPES}
    assert_same(saved(store, state), state)


MUST_HAVE = [
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
TORCH_DTYPES = [
    dtype
    for dtype in (getattr(torch, name) for name in sorted(dir(torch)))
    if isinstance(dtype, torch.dtype) and dtype.itemsize and not str(dtype).startswith(("torch.q", "torch.bits"))
]


def torch_noise(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape))
    raw = bytearray(bits(max(count, 1) * dtype.itemsize, seed=5))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype)[:count].reshape(shape)


@pytest.mark.parametrize("dtype", MUST_HAVE, ids=str)
def test_torch_dtypes(store: Store, dtype: torch.dtype) -> None:
    """P7: tensors of every element type and shape come back as tensors with the same bits."""
    state = {str(shape): torch_noise(dtype, shape) for shape in SHAPES}
    assert_same(saved(store, state), state)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_torch_dtype_is_exact_or_refused(dtype: torch.dtype) -> None:
    """P7: whatever else torch has is stored exactly or refused by name before the first write."""
    store = MemoryStore()
    repo = open_repo(store)
    before = keys_of(store)
    try:
        state = {"w": torch_noise(dtype, (5, 3))}
    except (RuntimeError, TypeError):
        pytest.skip(f"torch itself cannot make a {dtype} tensor from bytes")
    try:
        repo.save(1, {"model": state})
    except InvalidRecordError as error:
        assert "model.w" in str(error)  # noqa: PT017
        assert keys_of(store) == before
    else:
        assert_same(repo.checkpoint(1).load("model"), state)


def test_special_floats(store: Store) -> None:
    """P7: NaN payloads, -0.0, subnormals and infinities keep their bits: arrays, scalars, metadata."""
    values = NAN_PAYLOADS.view(np.float64)
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))[0]
    scalars = [payload, -0.0, 0.0, float("inf"), float("-inf"), 5e-324, 1.7976931348623157e308, float("nan")]
    state = {
        "a": values,
        "s": scalars,
        "n": [np.float32(np.nan), np.float64(payload), np.float16(-0.0)],
        "c": complex(-0.0, payload),
    }
    assert_same(saved(store, state), state)
    open_repo(store).save(2, {"m": {}}, metadata={"s": scalars})
    assert_same(open_repo(store).checkpoint(2).metadata, {"s": scalars})


def test_views(store: Store) -> None:
    """P7: views come back by value, whatever their strides; only their own elements are stored."""
    big = np.arange(200_000, dtype=np.float64)
    square = np.arange(90_000.0).reshape(300, 300)
    state = {
        "slice": big[:10],
        "step": big[::1000],
        "backwards": big[::-100],
        "transposed": square.T,
        "fortran": np.asfortranarray(square[:50, :70]),
        "corner": square[10:20, 5:9],
        "broadcast": np.broadcast_to(np.float32(3), (50, 20)),
        "odd bytes": np.frombuffer(bits(81), dtype=np.uint8)[1:],
        "unaligned": np.frombuffer(bits(81), dtype=np.uint8)[1:].view(np.float64),
        "read-only": np.frombuffer(bits(80), dtype=np.float32),
    }
    loaded = saved(store, state)
    assert_same(loaded, state)
    size = sum(array.nbytes for array in state.values())
    assert open_repo(store).checkpoint(1).bytes_state == size


def test_torch_views(store: Store) -> None:
    """P7: tensor views come back by value; only their own elements are stored."""
    x = torch.arange(200_000, dtype=torch.float32)
    state = {
        "slice": x[:10],
        "step": x[::1000],
        "transposed": x[:90_000].view(300, 300).t(),
        "expanded": x[1:2].expand(1000),
        "permuted": x[:24].view(2, 3, 4).permute(2, 0, 1),
        "channels last": x[:96].view(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "needs grad": torch.nn.Parameter(x[:5].clone()).detach(),
        "conj": torch.view_as_complex(x[:20].view(10, 2)).conj(),
    }
    assert_same(saved(store, state), state)
    assert open_repo(store).checkpoint(1).bytes_state == sum(t.numel() * t.element_size() for t in state.values())


def test_tensor_views_of_large_storage_are_cheap(store: Store) -> None:
    """A slice of a large tensor stores the slice, not the storage under it."""
    x = torch.rand(4_000_000)
    report = open_repo(store).save(1, {"m": {"a": x[:10], "b": x[::100_000]}}).report
    assert report is not None
    assert report.bytes_state == 4 * 50
    assert report.bytes_sent < 10_000


KEYS: list[Any] = [
    *(
        "a",
        "",
        "a/b",
        "../../evil",
        "/abs",
        "a//b",
        "a.b",
        ".",
        "..",
        "~user",
        "C:\\x",
        "\n",
        "\0",
        "é",
        "日本語",
        "💾",
        "\ud800",
    ),
    *(0, 1, -1, 2**70, -(2**70), None, 2.5, -0.5, float("inf"), b"bytes", b"", (), (1, "a"), ((1,), (2, (3, None)))),
    *(np.int64(5), np.float32(1.5), "1", "None", "true", "array", "dict", "int"),
]


def test_keys(store: Store) -> None:
    """P7: keys keep type, value and order: int, tuple, bytes, None, float, any text; "1" and 1 are two keys."""
    state = {key: np.float32(number) for number, key in enumerate(KEYS)}
    assert len(state) == len(KEYS)
    loaded = saved(store, {"state": state, "bools": {True: 1, False: 2}})
    assert_same(loaded, {"state": state, "bools": {True: 1, False: 2}})
    assert [type(key) for key in loaded["state"]] == [type(key) for key in KEYS]


def test_nothing_leaves_the_root(tmp_path: Path) -> None:
    """P8: no key of a state becomes a path: nothing is made outside the repository's own folders."""
    repo = ckptstore.open(tmp_path / "repo", chunk_size=CHUNK)
    repo.save(1, {"model": {key: np.ones(3) for key in KEYS if isinstance(key, str)}})
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]
    assert {path.name for path in (tmp_path / "repo").iterdir()} <= {
        "ckptstore.json",
        "manifests",
        "attempts",
        "leases",
        "reserve",
    }
    assert_no_debris(LocalStore(tmp_path / "repo"))


def test_plain_values(store: Store) -> None:
    """P7: None, bool, ints of any size, text, bytes of any length and NumPy scalars keep type and value."""
    state = {
        "none": None,
        "true": True,
        "false": False,
        "zero": 0,
        "big": 10**5000,
        "negative": -(2**63) - 1,
        "max": 2**53,
        "text": "x\0y\n",
        "long": "é" * 100_000,
        "surrogate": "\udfff",
        "empty": "",
        "bytes": b"\0\xff",
        "no bytes": b"",
        "long bytes": bits(200_001),
        "bytearray": bytearray(b"abc"),
        "long bytearray": bytearray(bits(5000)),
        "complex": 1 - 2j,
        "i4": np.int32(-5),
        "u8": np.uint64(2**64 - 1),
        "bool_": np.bool_(True),
        "c8": np.complex64(1j),
        "str_": np.str_("ü\0"),
        "bytes_": np.bytes_(b"ab"),
        "when": np.datetime64("2026-01-02T03:04:05", "ns"),
        "bf16": ml_dtypes.bfloat16(1.5),
        "size": torch.Size([2, 3]),
        "set": {1, 2, "x"},
        "frozen": frozenset({(1, 2)}),
    }
    assert_same(saved(store, state), state)


def test_containers(store: Store) -> None:
    """P7: dict, list, tuple, OrderedDict, defaultdict and Counter, nested and empty, keep type and order."""
    ordered: OrderedDict[str, object] = OrderedDict(b=1, a=2)
    ordered._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    default: defaultdict[str, list[int]] = defaultdict(list, {"x": [1]})
    state: dict[str, Any] = {
        "empty": [{}, [], (), ((),), [[]]],
        "ordered": ordered,
        "default": default,
        "counter": Counter({25: 1, 7: 3}),
        "nested": [({"a": [1, (2, [3, {"w": np.ones(2)}])]},)],
        "deep": None,
    }
    deep: Any = "bottom"
    for _ in range(150):
        deep = [deep]
    state["deep"] = deep
    loaded = saved(store, state)
    assert_same(loaded, state)
    assert loaded["default"].default_factory is list
    assert loaded["ordered"]._metadata == ordered._metadata  # type: ignore[attr-defined]


def test_random_generators(store: Store) -> None:
    """P7: the states of the usual random generators come back so that they go on with the same numbers."""
    legacy = np.random.RandomState(3)
    modern = np.random.default_rng(4)
    plain = random.Random(5)
    state = {
        "legacy": legacy.get_state(),
        "modern": modern.bit_generator.state,
        "plain": plain.getstate(),
        "torch": torch.get_rng_state(),
    }
    wanted = (legacy.rand(), modern.random(), plain.random())
    loaded = saved(store, state)
    legacy.set_state(loaded["legacy"])
    modern.bit_generator.state = loaded["modern"]
    plain.setstate(loaded["plain"])
    torch.set_rng_state(loaded["torch"])
    assert (legacy.rand(), modern.random(), plain.random()) == wanted


def test_real_optimizer_state(store: Store) -> None:
    """P7: a real model, optimizer and scheduler of torch come back equal and can be loaded into fresh ones."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for _ in range(3):
        model(torch.rand(8, 20)).sum().backward()
        optimizer.step()
        scheduler.step()
    plain = {k: v for k, v in scheduler.state_dict().items() if not callable(v)}
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": plain}
    open_repo(store).save(1, states)
    loaded = open_repo(store).checkpoint(1).load()
    assert_same(loaded, states)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def test_rounds_are_stable(store: Store) -> None:
    """P7: saving what was loaded, three times over, changes nothing and sends no array again."""
    state: Any = {"w": torch.rand(50_000), "n": {1: np.float16(1)}, "steps": torch.tensor(3), "i": np.int32(1)}
    repo = open_repo(store)
    wanted = state
    for epoch in range(1, 4):
        report = repo.save(epoch, {"m": state}).report
        assert report is not None
        if epoch > 1:
            assert report.chunks_sent == 0
        state = open_repo(store).checkpoint(epoch).load("m")
        assert_same(state, wanted)


@pytest.mark.parametrize(
    "metadata", [{}, {"loss": float("nan"), "neg": -0.0, "a/b.c": [1, (2, None)], "é": {1: "x"}, "big": 2**80}]
)
def test_metadata(store: Store, metadata: dict[str, Any]) -> None:
    """P7: metadata comes back exactly, also from ``latest`` and for policies."""
    checkpoint = open_repo(store).save(3, {"m": {"x": 1}}, metadata=metadata)
    assert_same(checkpoint.metadata, metadata)
    latest = open_repo(store).latest()
    assert latest is not None
    assert_same(latest.metadata, metadata)


# ---- sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["auto", "raw", "max"])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "complex128", "|S3"])
def test_chunk_borders(store: Store, codec: str, dtype: str) -> None:
    """P7: arrays one element smaller than a chunk, as large, and larger, and of several chunks, come back exactly."""
    kind = np.dtype(dtype)
    whole = CHUNK // kind.itemsize
    state = {}
    for count in (0, 1, whole - 1, whole, whole + 1, 2 * whole - 1, 2 * whole, 2 * whole + 1, 3 * whole + 5):
        raw = np.frombuffer(bits(count * kind.itemsize, seed=count), dtype=kind)
        state[f"noise {count}"] = raw
        state[f"zeros {count}"] = np.zeros(count, kind)
    assert_same(saved(store, state, codec=codec), state)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
def test_files(store: Store, size: int, tmp_path: Path) -> None:
    """P7: a file comes back byte for byte, also the empty one, with its name."""
    (tmp_path / "optim-8.bpk").write_bytes(bits(size))
    with open_repo(store).begin(1) as txn:
        txn.write_file("optim", tmp_path / "optim-8.bpk")
        txn.write("model", {"x": 1})
    checkpoint = open_repo(store).checkpoint(1)
    checkpoint.read_file("optim", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == bits(size)
    assert checkpoint.load("optim") == bits(size)
    assert checkpoint.file_name("optim") == "optim-8.bpk"
    assert checkpoint.records["optim"].kind == "file"
    assert checkpoint.bytes_state == size


def test_large_sparse_file(fast_folder: Path, tmp_path: Path) -> None:
    """P6: a file of 70 MiB, mostly holes, takes little room on the store and comes back exactly."""
    path = tmp_path / "big"
    with open(path, "wb") as file:
        file.truncate(70 << 20)
        for at in (0, 33 << 20, (70 << 20) - 1000):
            file.seek(at)
            file.write(bits(1000, seed=at))
    repo = ckptstore.open(fast_folder / "repo")
    with repo.begin(1) as txn:
        txn.write_file("optim", path)
    assert txn.tally.bytes_sent < 1 << 20
    repo.checkpoint(1).read_file("optim", tmp_path / "out")
    with open(path, "rb") as a, open(tmp_path / "out", "rb") as b:
        while block := a.read(1 << 20):
            assert block == b.read(1 << 20)
        assert b.read(1) == b""


def test_many_small_arrays() -> None:
    """Small arrays share chunks: 100,000 of them need a handful of objects."""
    store = MemoryStore()
    values = np.arange(100_000 * 4, dtype=np.float32).reshape(100_000, 4)
    state = {f"p{number}": values[number] for number in range(100_000)}
    repo = open_repo(store, chunk_size=32 << 20)
    checkpoint = repo.save(1, {"m": state})
    assert len(keys_of(store)) <= 6
    assert checkpoint.records["m"].arrays == 100_000
    loaded = open_repo(store).checkpoint(1).load("m")
    assert list(loaded) == list(state)
    assert np.array_equal(np.stack(list(loaded.values())), values)


def test_memory_is_bounded(fast_folder: Path) -> None:
    """P6: a save and an in-place load need a window of chunks beside the state, however large the state is."""
    state = {"w": np.frombuffer(bits(1 << 20) * 384, dtype=np.uint8)}  # 384 MiB
    sizes = []
    repo = ckptstore.open(fast_folder / "repo", chunk_size=4 << 20)
    tracemalloc.start()
    repo.save(1, {"m": {"w": state["w"]}})
    sizes.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    target = {"w": np.empty_like(state["w"])}
    tracemalloc.start()
    repo.checkpoint(1).load("m", into=target)
    sizes.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert np.array_equal(target["w"], state["w"])
    assert max(sizes) < 320 << 20, sizes


# ---- reuse --------------------------------------------------------------------------------------------------


def test_unchanged_arrays_are_not_sent(store: Store) -> None:
    """An epoch with the same arrays sends an index and a manifest; with one array changed, that array."""
    repo = open_repo(store)
    state = {
        "frozen": np.frombuffer(bits(600_000), np.float32),
        "w": np.frombuffer(bits(300_000, 1), np.float32),
        "step": 1,
    }
    repo.save(1, {"m": state})
    state["step"] = 2
    report = repo.save(2, {"m": state}).report
    assert report is not None
    assert report.bytes_state == report.bytes_reused == 900_000
    assert report.chunks_sent == 0
    assert report.bytes_sent < 4096
    state["w"] = np.frombuffer(bits(300_000, 2), np.float32)
    report = repo.save(3, {"m": state}).report
    assert report is not None
    assert report.bytes_reused == 600_000
    assert 290_000 < report.bytes_sent < 310_000
    assert open_repo(store).verify().ok


def test_requests_of_a_save(store: Store) -> None:
    """A save in a run costs its chunks, its indexes and eight small requests, however many epochs there are."""
    log = OpLog()
    repo = open_repo(TraceStore(store, log))
    for epoch in range(4):
        log.clear()
        report = repo.save(epoch, {name: np.frombuffer(bits(300_000, epoch), np.float32) for name in "ab"}).report
        assert report is not None
        assert epoch == 0 or log.count() == report.chunks_sent + 2 + 8


def test_a_damaged_base_costs_only_what_is_damaged(store: Store) -> None:
    """P3: a chunk of the base that is gone or cut is sent again; the others are reused, and the epoch is whole."""
    state = {name: np.frombuffer(bits(1_200_000, seed), np.float32) for seed, name in enumerate("abc")}
    open_repo(store).save(1, {"m": state})
    gone, cut, *_ = sorted(info.key for info in store.list("attempts/") if "/chunks/" in info.key)
    store.delete(gone)
    store.put(cut, store.get(cut)[:-1])
    report = open_repo(store).save(2, {"m": state}).report
    assert report is not None
    assert report.chunks_sent == 2
    assert report.chunks_reused > 50
    assert open_repo(store).verify(2).ok
    assert_same(open_repo(store).checkpoint(2).load("m"), state)


@pytest.mark.parametrize(("codec", "smaller"), [("auto", False), ("max", True)])
def test_auto_stops_compressing_for_a_fast_store(
    store: Store, monkeypatch: pytest.MonkeyPatch, codec: str, smaller: bool
) -> None:
    """Where the store is known to be faster than the codec, ``auto`` stores plain bytes; ``max`` does as it is told."""
    monkeypatch.setattr("ckptstore.pace.Pace.compress", False)
    state = {"w": np.arange(1_000_000, dtype=np.float32)}
    checkpoint = open_repo(store, codec=codec).save(1, {"m": state})
    assert checkpoint.report is not None
    assert (checkpoint.report.bytes_sent < 3_900_000) is smaller
    assert_same(checkpoint.load("m"), state)


def test_report_says_where_the_time_went(store: Store) -> None:
    """A save's report has the seconds of each stage."""
    report = open_repo(store).save(1, {"m": {"w": np.arange(1e6)}}).report
    assert report is not None
    assert report.seconds.keys() == {"begin", "write", "commit", "encode", "put"}
    assert all(seconds > 0 for seconds in report.seconds.values())


def test_reuse_survives_delete_of_the_base(store: Store) -> None:
    """P5: an epoch that reuses chunks of another stays whole when the other is deleted, and gc keeps what it needs."""
    repo = open_repo(store)
    state = {"frozen": np.frombuffer(bits(600_000), np.float32)}
    for epoch in (1, 2, 3):
        repo.save(epoch, {"m": {**state, "step": epoch}})
        if epoch > 1:
            repo.delete(epoch - 1)
        repo.gc(grace=0)
    assert open_repo(store).verify().ok
    assert_same(open_repo(store).checkpoint(3).load("m"), {**state, "step": 3})
    assert_no_debris(store)


def test_small_unchanged_arrays_are_not_sent(store: Store) -> None:
    """An unchanged array that shares its chunk with a changed one is not sent again, from 16 KiB on."""
    repo = open_repo(store, chunk_size=1 << 20)
    state = {f"a{n}": np.frombuffer(bits(20_000, n), np.float32) for n in range(10)}
    repo.save(1, {"m": state})
    state["a4"] = np.frombuffer(bits(20_000, 99), np.float32)
    report = repo.save(2, {"m": state}).report
    assert report is not None
    assert report.bytes_reused == 180_000
    assert_same(open_repo(store).checkpoint(2).load("m"), state)


def test_equal_content_is_stored_once(store: Store) -> None:
    """Equal large arrays, of one record or of two, are stored once."""
    data = bits(200_000)
    first, second = np.frombuffer(data, np.float32), np.frombuffer(bytes(data), np.float32).copy()
    report = open_repo(store).save(1, {"m": {"a": first, "b": second}, "n": {"c": second.copy()}}).report
    assert report is not None
    assert report.bytes_state == 600_000
    assert report.bytes_sent < 210_000
    loaded = open_repo(store).checkpoint(1).load()
    assert_same(loaded, {"m": {"a": first, "b": second}, "n": {"c": second}})
    loaded["m"]["a"][:] = 0
    assert_same(loaded["m"]["b"], second)  # equal, but never tied


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_tied_arrays(store: Store, framework: str) -> None:
    """Tied arrays are stored once and tied again after the load; a partial overlap comes back by value."""
    w: Any = np.frombuffer(bits(200_000), np.float32).copy() if framework == "numpy" else torch.rand(50_000)
    report = open_repo(store).save(1, {"m": {"a": w, "b": w, "c": w[:5], "again": [w]}}).report
    assert report is not None
    assert report.bytes_state == 200_000 + 20
    loaded = open_repo(store).checkpoint(1).load("m")
    assert_same(loaded, {"a": w, "b": w, "c": w[:5], "again": [w]})
    loaded["a"][0] = 7.0
    assert loaded["b"][0] == loaded["again"][0][0] == 7.0
    assert loaded["c"][0] == w[0]


# ---- loading ------------------------------------------------------------------------------------------------


def counted(store: Store) -> tuple[Repository, OpLog]:
    log = OpLog()
    return open_repo(TraceStore(store, log)), log


def chunk_bytes(log: OpLog) -> int:
    return sum(event.nbytes for event in log.events if event.verb == "get" and "/chunks/" in event.key)


def many_records() -> dict[str, dict[str, Any]]:
    def array(seed: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(bits(3 * CHUNK, seed), np.float32)

    return {
        "model": {
            "encoder": {"w": array(1), "b": array(2)},
            "decoder": {"w": array(3), "layers": [array(4), array(5)]},
        },
        "optim": {"m": array(6), "v": array(7), "step": 5},
    }


def test_structure_of_a_record(tmp_path: Path) -> None:
    """Types and shapes of all arrays are known without reading one; tied arrays are the same one."""
    tied = np.zeros((2, 3), "f2")
    state = {"a": [tied, (tied, None)], "n": 2**70, "long": bytes(2000), "e": np.empty(0, "u1")}
    (tmp_path / "file").write_bytes(b"content")
    with ckptstore.open(tmp_path / "run") as repository:
        with repository.begin(1) as txn:
            txn.write("state", state)
            txn.write_file("file", tmp_path / "file")
        checkpoint = repository.checkpoint(1)
        for path in (tmp_path / "run").rglob("chunks/*"):
            path.unlink()
        found = checkpoint.structure("state")
        half, long, empty = found["a"][0], found["long"], found["e"]
        assert found == {"a": [half, (half, None)], "n": 2**70, "long": long, "e": empty}
        assert found["a"][1][0] is half
        assert [(s.kind, s.dtype, s.shape, s.nbytes) for s in (half, long, empty)] == [
            ("numpy", "float16", (2, 3), 12),
            ("bytes", "uint8", (2000,), 2000),
            ("numpy", "uint8", (0,), 0),
        ]
        assert (checkpoint.structure("file").kind, checkpoint.structure("file").shape) == ("bytes", (7,))
        with pytest.raises(ckptstore.RecordNotFoundError):
            checkpoint.structure("other")


def test_one_record_reads_only_its_chunks(store: Store) -> None:
    """Loading one record reads no byte of another."""
    state = many_records()
    open_repo(store).save(1, state)
    repo, log = counted(store)
    checkpoint = repo.checkpoint(1)
    log.clear()
    assert_same(checkpoint.load("optim"), state["optim"])
    assert 6 * CHUNK <= chunk_bytes(log) < 6.2 * CHUNK
    log.clear()
    assert_same(checkpoint.load(), state)
    assert chunk_bytes(log) < 21.5 * CHUNK


@pytest.mark.parametrize(
    ("patterns", "chunks", "expected"),
    [
        (["encoder.*"], 6, {"encoder": ["w", "b"]}),
        (["*.w"], 6, {"encoder": ["w"], "decoder": ["w"]}),
        (["decoder.layers.1"], 3, {"decoder": ["layers"]}),
        (["encoder.b", "decoder.w"], 6, {"encoder": ["b"], "decoder": ["w"]}),
    ],
)
def test_partial_loads_read_only_their_chunks(
    store: Store, patterns: list[str], chunks: int, expected: dict[str, list[str]]
) -> None:
    """Loading by path gives only what matches and reads only its chunks."""
    state = many_records()
    open_repo(store).save(1, state)
    repo, log = counted(store)
    checkpoint = repo.checkpoint(1)
    log.clear()
    loaded = checkpoint.load("model", paths=patterns)
    assert chunk_bytes(log) < (chunks + 0.2) * CHUNK
    assert {key: list(value) for key, value in loaded.items()} == expected
    for part, names in expected.items():
        for name in names:
            wanted = state["model"][part][name]
            if name == "layers":
                assert loaded[part][name][0] is None
                assert_same(loaded[part][name][1], wanted[1])
            else:
                assert_same(loaded[part][name], wanted)


def test_a_small_array_does_not_read_its_large_neighbours(store: Store) -> None:
    """A save of many records and arrays lets a single one be read with one chunk."""
    state = {f"a{n}": np.frombuffer(bits(CHUNK // 2, n), np.float32) for n in range(20)}
    open_repo(store).save(1, {"m": state})
    repo, log = counted(store)
    checkpoint = repo.checkpoint(1)
    log.clear()
    assert_same(checkpoint.load("m", paths=["a7"]), {"a7": state["a7"]})
    assert chunk_bytes(log) < 1.1 * CHUNK


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_load_into(store: Store, framework: str) -> None:
    """Loading into an existing state fills its very arrays; plain values are replaced."""
    make: Any = (
        (lambda seed: np.random.default_rng(seed).random(50_000))
        if framework == "numpy"
        else (lambda seed: torch.rand(50_000, generator=torch.Generator().manual_seed(seed)))
    )
    state = {"w": make(1), "layers": [make(2), {"b": make(3)}], "step": 5}
    open_repo(store).save(1, {"m": state})
    target = {"w": make(8), "layers": [make(9), {"b": make(10)}], "step": 0}
    arrays = [target["w"], target["layers"][0], target["layers"][1]["b"]]
    result = open_repo(store).checkpoint(1).load("m", into=target)
    assert_same(result, state)
    now = [result["w"], result["layers"][0], result["layers"][1]["b"]]
    assert all(a is b for a, b in zip(arrays, now, strict=True))
    assert_same(arrays, [state["w"], state["layers"][0], state["layers"][1]["b"]])


def test_load_into_strided_arrays(store: Store) -> None:
    """An existing array that is a view with strides is filled element by element; what is between stays."""
    state = {"w": np.arange(60_000.0), "t": np.arange(12.0).reshape(3, 4)}
    open_repo(store).save(1, {"m": state})
    room = np.full((60_000, 2), -1.0)
    other = np.zeros((4, 3))
    open_repo(store).checkpoint(1).load("m", into={"w": room[:, 0], "t": other.T})
    assert np.array_equal(room[:, 0], state["w"])
    assert np.all(room[:, 1] == -1.0)
    assert np.array_equal(other.T, state["t"])


def test_load_into_tied_arrays(store: Store) -> None:
    """Arrays tied in the checkpoint fill separate targets, and targets tied alike."""
    w = np.random.default_rng(1).random(20_000)
    open_repo(store).save(1, {"m": {"a": w, "b": w}})
    checkpoint = open_repo(store).checkpoint(1)
    apart = {"a": np.zeros(20_000), "b": np.zeros(20_000)}
    checkpoint.load("m", into=apart)
    assert_same(apart, {"a": w, "b": w})
    tied = np.zeros(20_000)
    checkpoint.load("m", into={"a": tied, "b": tied})
    assert_same(tied, w)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("w"), "w"),
        (lambda t: t.update(extra=np.zeros(3)), "extra"),
        (lambda t: t.update(w=np.zeros(7)), "w"),
        (lambda t: t.update(w=np.zeros(50_000, np.float32)), "w"),
        (lambda t: t["layers"].append(1), "layers"),
        (lambda t: t.update(w=torch.zeros(50_000)), "w"),
    ],
)
def test_load_into_what_does_not_fit(store: Store, change: Any, named: str) -> None:
    """A target that does not fit is refused with the path, before any of it is changed."""
    state = {"w": np.random.default_rng(1).random(50_000), "b": np.ones(9), "layers": [np.ones(3)]}
    open_repo(store).save(1, {"m": state})
    target: dict[str, Any] = {"w": np.zeros(50_000), "b": np.zeros(9), "layers": [np.zeros(3)]}
    change(target)
    with pytest.raises(InvalidRecordError, match=f"m.{named}"):
        open_repo(store).checkpoint(1).load("m", into=target)
    assert not target["b"].any()
    assert not target["layers"][0].any()


def test_load_into_what_both_have(store: Store) -> None:
    """``strict=False`` leaves the target's own as it is and reads nothing of what only the checkpoint has."""
    ones = np.ones(CHUNK // 8)
    model = OrderedDict(w=ones, gone=ones * 2, n=5)
    model._metadata = {"version": 1, "table": ones * 3}  # type: ignore[attr-defined]
    open_repo(store).save(1, {"model": model, "optimizer": {"m": ones * 4}, "ema": {"w": ones * 5}})
    repo, log = counted(store)
    checkpoint = repo.checkpoint(1)
    assert checkpoint.mismatches("ema", {"w": ones}) == []
    assert chunk_bytes(log) == 0
    target: dict[str, Any] = {
        "model": {"w": ones * 0, "new": ones * 7, "n": 0},
        "optimizer": {"m": ones * 0},
        "scaler": {"scale": 1.0},
    }
    with pytest.raises(ckptstore.RecordNotFoundError, match="scaler"):
        checkpoint.load(into=target)
    assert not target["optimizer"]["m"].any()
    missing, unexpected = checkpoint.mismatches("model", target["model"])
    assert missing.startswith("model.gone: only in the checkpoint")
    assert unexpected.startswith("model.new: unexpected here")
    assert checkpoint.mismatches("model", target["model"], strict=False) == []
    log.clear()
    result = checkpoint.load(into=target, strict=False)
    assert chunk_bytes(log) <= 3.2 * CHUNK  # w, the table of the metadata, m
    assert result.keys() == {"model", "optimizer"}
    assert_same(target["model"], {"w": ones, "new": ones * 7, "n": 5})
    assert_same(target["optimizer"], {"m": ones * 4})
    misfits: list[Any] = [{"w": ones[:3]}, {"w": {}}, [], 7]
    for bad in misfits:
        (line,) = checkpoint.mismatches("model", bad, strict=False)
        assert line.startswith("model")
        with pytest.raises(InvalidRecordError) as caught:
            checkpoint.load("model", into=bad, strict=False)
        assert line in str(caught.value)


def test_load_into_names_the_misfits_of_all_records(store: Store) -> None:
    """One error for all records, before any of them is changed."""
    open_repo(store).save(1, {"a": {"w": np.ones(9)}, "b": {"v": np.ones(9)}, "c": {"u": np.ones(9)}})
    target = {"a": {"w": np.zeros(8)}, "b": {"v": np.zeros(9)}, "c": {"x": np.zeros(9)}}
    with pytest.raises(InvalidRecordError, match=r"(?s)a\.w: .*c\.u: .*c\.x: "):
        open_repo(store).checkpoint(1).load(into=target)
    assert not target["b"]["v"].any()


def test_a_file_is_no_target(tmp_path: Path, store: Store) -> None:
    """A file record fits into no state, and says so."""
    (tmp_path / "f").write_bytes(b"x")
    with open_repo(store).begin(1) as txn:
        txn.write_file("f", tmp_path / "f")
    assert open_repo(store).checkpoint(1).mismatches("f", {}) == ["f: a file in the checkpoint, dict here"]
    with pytest.raises(ckptstore.RecordNotFoundError):
        open_repo(store).checkpoint(1).mismatches("g", {})


def test_progress(store: Store) -> None:
    """Progress goes from 0 to the size of the state and no further, for saves and loads."""
    state = many_records()
    for act in ("save", "load", "again"):
        seen: list[tuple[int, int]] = []

        def note(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        repo = open_repo(store)
        if act == "load":
            repo.checkpoint(1).load(progress=note)
        else:
            repo.save(1 if act == "save" else 2, state, progress=note)
        assert {total for _, total in seen} == {21 * CHUNK}
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1][0] == 21 * CHUNK


def test_read_file_is_all_or_nothing(tmp_path: Path) -> None:
    """P3: a file record that is damaged leaves the file of that name as it was, and no scratch file."""
    store = MemoryStore()
    (tmp_path / "in").write_bytes(bits(3 * CHUNK))
    with open_repo(store).begin(1) as txn:
        txn.write_file("optim", tmp_path / "in")
    chunk = [key for key in keys_of(store) if "/chunks/" in key][1]
    store.put(chunk, bytes(len(store.get(chunk))))
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(CorruptionError) as caught:
        open_repo(store).checkpoint(1).read_file("optim", tmp_path / "out")
    assert caught.value.key == chunk
    assert (tmp_path / "out").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_handles_outlive_a_delete(store: Store) -> None:
    """P2: a checkpoint that is deleted while it is held says so; it is not called damaged."""
    repo = open_repo(store)
    repo.save(1, many_records())
    held: Checkpoint = repo.checkpoint(1)
    repo.delete(1)
    with pytest.raises(ckptstore.EpochNotFoundError):
        held.load()


def test_loads_do_not_need_torch(tmp_path: Path) -> None:
    """P7: what torch saved loads as NumPy, through ml_dtypes, where torch was never imported."""
    import subprocess

    state = {"w": torch.rand(100).to(torch.bfloat16), "x": torch.arange(5), "size": torch.Size([1])}
    ckptstore.open(tmp_path).save(1, {"m": state})
    code = (
        "import sys, ckptstore, ml_dtypes, numpy as np\n"
        f"m = ckptstore.open({str(tmp_path)!r}).latest().load('m')\n"
        "assert 'torch' not in sys.modules\n"
        "assert m['w'].dtype == ml_dtypes.bfloat16 and type(m['x']) is np.ndarray and m['size'] == (1,)\n"
        "sys.stdout.write(m['w'].tobytes().hex())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == bytes(state["w"].view(torch.uint8).numpy()).hex()


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    """Files that are restored get the modes that any program's files get."""
    (tmp_path / "in").write_bytes(b"x")
    repo = ckptstore.open(tmp_path / "repo")
    with repo.begin(1) as txn:
        txn.write_file("f", tmp_path / "in")
    repo.checkpoint(1).read_file("f", tmp_path / "out")
    (tmp_path / "plain").touch()
    assert os.stat(tmp_path / "out").st_mode == os.stat(tmp_path / "plain").st_mode
