"""Sharded arrays: saved in any pieces, loaded whole or in any others, and only what is asked for is read."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import InvalidArgumentError, InvalidRecordError, ShardedArray
from ckptstore.stores import MemoryStore, OpLog, TraceStore
from tests.repository.helpers import CHUNK, assert_same, keys_of, open_repo

Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def bits(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Any:
    """Any bits of a type."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape)) * kind.itemsize
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).view(kind).reshape(shape)


def cut(array: Any, offset: Sequence[int], shape: Sequence[int]) -> Any:
    """The view of a box."""
    where = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return array[where + (...,)]  # noqa: RUF005


def sharded(array: Any, boxes: Boxes, *, copy: bool = True) -> ShardedArray:
    """An array in pieces, each in memory of its own."""
    pieces = [(offset, cut(array, offset, shape)) for offset, shape in boxes]
    if copy:
        pieces = [(o, p.clone() if isinstance(p, torch.Tensor) else p.copy()) for o, p in pieces]
    return ShardedArray(tuple(array.shape), array.dtype, pieces)


def rows(shape: tuple[int, ...], parts: int, axis: int = 0) -> Boxes:
    """As DTensor's Shard(axis) cuts: equal parts, the last ones smaller or empty."""
    step = -(-shape[axis] // parts)
    found = []
    for part in range(parts):
        start = min(part * step, shape[axis])
        offset, size = [0] * len(shape), list(shape)
        offset[axis], size[axis] = start, min(step, shape[axis] - start)
        found.append((tuple(offset), tuple(size)))
    return found


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> Boxes:
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        number = draw(st.integers(0, len(boxes) - 1))
        offset, size = boxes[number]
        wide = [axis for axis, length in enumerate(size) if length > 1]
        if wide:
            axis = draw(st.sampled_from(wide))
            at = draw(st.integers(1, size[axis] - 1))
            first, second, moved = list(size), list(size), list(offset)
            first[axis], second[axis], moved[axis] = at, size[axis] - at, offset[axis] + at
            boxes[number : number + 1] = [(offset, tuple(first)), (tuple(moved), tuple(second))]
    return list(draw(st.permutations(boxes)))


SHAPES = st.sampled_from([(), (7,), (0, 3), (1, 9, 1), (40, 30), (5, 60, 8), (3, 4, 5, 6), (40_000,), (300, 200)])
DTYPES = st.sampled_from(["f4", "f2", "u1", "c16", ">f8", "<U3", "M8[ns]", "bfloat16", "float8_e4m3fn", "?"])


def array_of(shape: tuple[int, ...], name: str) -> Any:
    if name in ("bfloat16", "float8_e4m3fn"):
        return bits(shape, getattr(ml_dtypes, name))
    if name in ("?", "<U3"):
        return np.asarray((bits(shape, "u1") % 2).astype(name))
    return bits(shape, name)


@given(st.data())
def test_any_sharding_to_any_other(data: st.DataObject) -> None:
    """P7: saved in pieces (or whole) it loads whole, into a whole, and into any other pieces, strided ones too."""
    shape, name = data.draw(SHAPES), data.draw(DTYPES)
    array = array_of(shape, name)
    stored = data.draw(tilings(shape) | st.none())
    repo = open_repo(MemoryStore())
    repo.save(1, {"m": {"w": array if stored is None else sharded(array, stored), "n": 1}})
    checkpoint = repo.checkpoint(1)
    assert_same(checkpoint.load("m"), {"w": array, "n": 1})
    whole = np.zeros(shape, array.dtype)
    assert checkpoint.load("m", into={"w": whole, "n": 0})["w"] is whole
    assert_same(whole, array)
    wanted = data.draw(tilings(shape))
    wanted = wanted[: data.draw(st.integers(0, len(wanted)))]
    fresh = np.zeros(shape, array.dtype)
    strided = data.draw(st.booleans())
    target = sharded(fresh, wanted, copy=not strided)
    loaded = checkpoint.load("m", into={"w": target, "n": 0})
    assert loaded["w"] is target
    assert loaded["n"] == 1
    expected = np.zeros(shape, array.dtype)
    for offset, size in wanted:
        cut(expected, offset, size)[...] = cut(array, offset, size)
    if strided:
        assert_same(fresh, expected)
    else:
        assert_same([piece for _, piece in target.pieces], [cut(array, *box).copy() for box in wanted])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128, torch.bool]
)
def test_tensors(dtype: torch.dtype) -> None:
    """P7: tensors of every width; columns of a tensor, a transposed one and a lazily conjugated one as targets."""
    raw = torch.from_numpy(bits((64, 48 * dtype.itemsize), np.uint8))
    tensor = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    repo = open_repo(MemoryStore())
    repo.save(1, {"m": {"w": sharded(tensor, rows((64, 48), 5, axis=1), copy=False)}})
    checkpoint = repo.checkpoint(1)
    loaded = checkpoint.load("m")["w"]
    assert torch.equal(loaded.view(torch.uint8), tensor.contiguous().view(torch.uint8))
    turned = torch.zeros(48, 64, dtype=dtype).T
    targets = [((0, 0), turned[:20]), ((20, 0), turned[20:])]
    lazy = torch.zeros(64, 48, dtype=dtype).conj()
    if dtype.is_complex:
        targets.append(((0, 0), lazy))
    checkpoint.load("m", into={"w": ShardedArray((64, 48), dtype, targets)})
    assert torch.equal(turned.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
    if dtype.is_complex:
        assert torch.equal(torch.nan_to_num(lazy.resolve_conj()), torch.nan_to_num(tensor))


def test_parameters_are_loaded_in_place() -> None:
    """Pieces that require gradients are filled all the same."""
    tensor = torch.randn(6, 4)
    repo = open_repo(MemoryStore())
    repo.save(1, {"m": {"w": tensor}})
    piece = torch.nn.Parameter(torch.zeros(3, 4))
    repo.checkpoint(1).load("m", into={"w": ShardedArray((6, 4), tensor.dtype, [((3, 0), piece)])})
    assert torch.equal(piece.detach(), tensor[3:])


def test_another_byte_order_and_another_framework() -> None:
    """Values are kept: big-endian pieces into little-endian ones, NumPy pieces into tensors."""
    array = np.arange(24, dtype=">f4").reshape(4, 6)
    repo = open_repo(MemoryStore())
    repo.save(1, {"m": {"w": sharded(array, rows((4, 6), 3, axis=1))}})
    little, tensor = np.zeros((4, 6), "<f4"), torch.zeros(4, 6)
    targets: list[Any] = [little, tensor]
    for target in targets:
        pieces: list[Any] = [((0, 0), target[:, :4]), ((0, 4), target[:, 4:])]
        repo.checkpoint(1).load("m", into={"w": ShardedArray((4, 6), target.dtype, pieces)})
        assert np.array_equal(np.asarray(target), array.astype("<f4"))


# ---- what is read and sent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["whole", "rows", "columns"])
def test_only_chunks_of_the_wanted_boxes_are_read(stored: str) -> None:
    """P6: a box costs the chunks that hold some of it, whichever way the array was stored."""
    shape = (512, 512)  # 1 MiB: 16 chunks of 32 rows if it is whole
    array = bits(shape)
    value = array if stored == "whole" else sharded(array, rows(shape, 4, axis=int(stored == "columns")))
    memory = MemoryStore()
    open_repo(memory).save(1, {"m": {"w": value, "other": bits((300, 300), seed=2)}})
    log = OpLog()
    checkpoint = open_repo(TraceStore(memory, log)).checkpoint(1)
    piece = np.zeros((32, 100), np.float32)
    done: list[tuple[int, int]] = []
    checkpoint.load(
        "m",
        into={"w": ShardedArray(shape, "float32", [((96, 140), piece)]), "other": np.zeros((300, 300), "f4")},
        paths=["w"],
        progress=lambda *counts: done.append(counts),
    )
    assert_same(piece, array[96:128, 140:240].copy())
    chunks = [event.key for event in log.events if event.verb == "get" and "/chunks/" in event.key]
    # Columns 128 to 256 are one piece of 256 KiB: 4 chunks of 128 rows each.
    assert len(chunks) == len(set(chunks)) == {"whole": 1, "rows": 1, "columns": 1}[stored]
    assert done[-1] == (piece.nbytes, piece.nbytes)


def test_a_changed_piece_is_all_that_is_sent() -> None:
    """Reuse by digest works piece by piece, for big pieces and for those that share a chunk."""
    big, small = bits((512, 256)), bits((64, 512), seed=1)
    boxes = rows((512, 256), 4), rows((64, 512), 4)
    store = MemoryStore()
    repo = open_repo(store)
    state = {"big": sharded(big, boxes[0]), "small": sharded(small, boxes[1])}
    repo.save(1, {"m": state})
    before = keys_of(store)
    state["big"].pieces[2][1][5, 5] = 7
    state["small"].pieces[1][1][5, 5] = 7
    report = repo.save(2, {"m": state}).report
    assert report is not None
    new = [key for key in keys_of(store) if key not in before and "/chunks/" in key]
    assert len(new) == 2  # of the big piece the chunk with the change, and the small piece
    assert report.bytes_reused == report.bytes_state - CHUNK - small.nbytes // 4


def test_pieces_are_loaded_by_a_window_of_chunks() -> None:
    """P6: memory beyond the target does not grow with the size of a piece."""
    shape = (4096, 4096)
    array = np.zeros(shape, np.float32)
    array[::7, ::5] = 1.5
    store = MemoryStore()
    repo = open_repo(store, chunk_size=1 << 20)
    repo.save(1, {"m": {"w": sharded(array, rows(shape, 2, axis=1), copy=False)}})
    fresh = np.zeros(shape, np.float32)
    target = sharded(fresh, rows(shape, 3, axis=1), copy=False)
    checkpoint = repo.checkpoint(1)
    tracemalloc.start()
    try:
        checkpoint.load("m", into={"w": target})
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()
    assert np.array_equal(fresh, array)


# ---- what does not fit --------------------------------------------------------------------------------------


def piece(*shape: int, dtype: Any = "f4") -> Any:
    return np.zeros(shape, dtype)


REFUSED: dict[str, tuple[Any, str]] = {
    "gap": ([((0, 0), piece(4, 3))], r"m\.w: no piece has the elements \[0:4, 3:6\] of the shape \[4, 6\]"),
    "none": ([], r"m\.w: no piece has the elements \[0:4, 0:6\]"),
    "overlap": ([((0, 0), piece(4, 4)), ((0, 3), piece(4, 3))], r"\[0:4, 0:4\] and \[0:4, 3:6\] overlap"),
    "outside": ([((0, 3), piece(4, 4))], r"the piece \[0:4, 3:7\] is not inside of the array's shape \[4, 6\]"),
    "dimensions": ([((0,), piece(4))], "has 1 dimensions, the array has 2"),
    "negative": ([((-1, 0), piece(4, 6))], "no tuple of ints from 0 on"),
    "dtype": ([((0, 0), piece(4, 6, dtype="f8"))], "numpy float64, the array numpy float32"),
    "framework": ([((0, 0), piece(2, 6)), ((2, 0), torch.zeros(2, 6))], "torch float32, the array numpy float32"),
    "no array": ([((0, 0), [[0.0] * 6] * 4)], "a piece is no array but a list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pieces_that_make_no_array_are_refused(case: str) -> None:
    """P7: by path, and before anything is written."""
    pieces, reason = REFUSED[case]
    store = MemoryStore()
    repo = open_repo(store)
    before = keys_of(store)
    with pytest.raises(InvalidRecordError, match=reason) as caught:
        repo.save(1, {"m": {"w": ShardedArray((4, 6), "float32", pieces)}})
    assert "m.w" in str(caught.value)
    assert keys_of(store) == before


@pytest.mark.parametrize(
    ("shape", "dtype", "pieces"),
    [
        (("a",), "float32", []),
        (7, "float32", []),
        ((4,), "no such type", []),
        ((4,), object, []),
        ((4,), "float32", [1]),
        ((4,), "float32", 1),
        ((4,), "float32", [((0.5,), piece(4))]),
    ],
)
def test_nonsense(shape: Any, dtype: Any, pieces: Any) -> None:
    """What is no description of an array is refused when it is made."""
    with pytest.raises(InvalidArgumentError):
        ShardedArray(shape, dtype, pieces)


def test_targets_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    """A target with another shape, type, or boxes outside of the array; all of them by path, and nothing changes."""
    repo = open_repo(MemoryStore())
    repo.save(1, {"m": {"a": bits((4, 6)), "b": sharded(bits((4, 6)), rows((4, 6), 2)), "c": b"x" * 2000, "d": 1}})
    good = piece(4, 6)
    readonly = piece(4, 6)
    readonly.flags.writeable = False
    base = piece(4, 6)
    bad: dict[str, tuple[Any, str]] = {
        "shape": (ShardedArray((4, 7), "float32", [((0, 0), piece(4, 7))]), r"\[4, 6\] in the checkpoint"),
        "type": (ShardedArray((4, 6), "float16", []), "pieces of float16"),
        "outside": (ShardedArray((4, 6), "float32", [((1, 0), piece(4, 6))]), "not inside"),
        "piece": (ShardedArray((4, 6), "float32", [((0, 0), piece(4, 6, dtype="i4"))]), "int32"),
        "readonly": (ShardedArray((4, 6), "float32", [((0, 0), readonly)]), "read-only"),
        "no array": (ShardedArray((4, 6), "float32", [((0, 0), [1])]), "no array"),
    }
    rest = {"c": b"", "d": 0}
    for target, reason in bad.values():
        with pytest.raises(InvalidRecordError, match=f"m.b: .*{reason}"):
            repo.checkpoint(1).load("m", into={"a": good, "b": target, **rest})
    shared = ShardedArray((4, 6), "float32", [((0, 0), base[:, :4]), ((0, 3), base[:, 3:])])
    with pytest.raises(InvalidArgumentError, match="share memory"):
        repo.checkpoint(1).load("m", into={"a": good, "b": shared, **rest})
    for place in ("c", "d"):
        state = {"a": good, "b": piece(4, 6), **rest, place: ShardedArray((4, 6), "float32", [])}
        with pytest.raises(InvalidRecordError, match=f"m.{place}: .*ShardedArray here"):
            repo.checkpoint(1).load("m", into=state)
    assert not good.any()
    assert not base.any()


def test_wanted_boxes_may_overlap_and_be_empty() -> None:
    """Halos: two targets of the same elements, in separate memory; and a rank that has nothing of an array."""
    array = bits((10, 4))
    repo = open_repo(MemoryStore())
    repo.save(1, {"m": {"w": sharded(array, rows((10, 4), 4))}})
    target = ShardedArray((10, 4), "float32", [((0, 0), piece(6, 4)), ((4, 0), piece(6, 4)), ((10, 0), piece(0, 4))])
    repo.checkpoint(1).load("m", into={"w": target})
    assert_same([found for _, found in target.pieces], [array[:6].copy(), array[4:].copy(), array[:0].copy()])
    nothing = ShardedArray((10, 4), "float32", [])
    assert repo.checkpoint(1).load("m", into={"w": nothing})["w"] is nothing


# ---- leaves like any other ----------------------------------------------------------------------------------


def test_tied_and_replaced() -> None:
    """Tied sharded arrays come back tied; a sharded target where they are separate gets both; staging keeps it all."""
    array = bits((40, 30))
    value = sharded(array, rows((40, 30), 3))
    again = ShardedArray(value.shape, value.dtype, list(reversed(value.pieces)))
    repo = open_repo(MemoryStore())
    repo.save_async(1, {"m": {"a": value, "b": again, "c": [value], "d": (1, array)}}).result()
    loaded = repo.checkpoint(1).load("m")
    assert_same(loaded, {"a": array, "b": array, "c": [array], "d": (1, array)})
    assert loaded["a"] is loaded["b"] is loaded["c"][0]
    into = {"a": piece(40, 30), "b": sharded(piece(40, 30), rows((40, 30), 2, 1)), "c": [piece(40, 30)], "d": (1, 2.0)}
    with pytest.raises(InvalidRecordError, match=r"m\.d\.1"):
        repo.checkpoint(1).load("m", into=into)
    into["d"] = (1, piece(40, 30))
    repo.checkpoint(1).load("m", into=into)
    assert_same(into["a"], array)
    assert_same(into["c"], [array])
    assert_same([found for _, found in into["b"].pieces], [array[:, :15].copy(), array[:, 15:].copy()])


def test_copies_and_pickles() -> None:
    """A copy describes the same array, also where there are no pieces that tell the framework."""
    for value in (ShardedArray((4,), torch.bfloat16, []), ShardedArray((4,), "bfloat16", [((0,), piece(4))])):
        for again in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert (again.shape, again.dtype, again.framework) == (value.shape, value.dtype, value.framework)
            assert_same([found for _, found in again.pieces], [found for _, found in value.pieces])
    assert repr(value) == "ShardedArray([4], 'bfloat16', 1 pieces)"


def test_the_state_is_not_changed_meanwhile() -> None:
    """A piece that gets another shape while it is saved is noticed like any array."""
    value = ShardedArray((4,), "float32", [((0,), piece(2)), ((2,), piece(2))])
    from ckptstore.shards import sharded_source

    source = sharded_source(value)
    assert source.unchanged()
    value.pieces[1][1].resize((3,), refcheck=False)
    assert not source.unchanged()
