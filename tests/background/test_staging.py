"""The staging memory: allocated once, exact, and quick for many small arrays."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest

from ckptstore.arrays import ArraySource
from ckptstore.staging import ALIGN, KEEP_LOCK, Arena, StagedSource
from ckptstore.stores import MemoryStore
from ckptstore.tree import FlatState, flatten
from tests.repository.helpers import assert_same, make_state, open_repo


def flat(state: object) -> dict[str, FlatState]:
    return {"model": flatten(state, "model")}


def test_sources_are_aligned_views() -> None:
    """What is staged lies in one buffer, aligned, and gives any range of elements."""
    arrays = [np.arange(n, dtype=np.float32) for n in (1, 100, 5, 70_000)]
    staged = Arena().stage(flat(arrays)).flats()["model"]
    for source, array in zip(staged.arrays, arrays, strict=True):
        assert isinstance(source, StagedSource)
        assert source.read(0, source.nbytes).tobytes() == array.tobytes()
        assert source.read(source.nbytes - 4, source.nbytes).tobytes() == array[-1:].tobytes()
        assert np.frombuffer(source.read(0, source.nbytes), np.uint8).ctypes.data % 4 == 0
    assert len({source.identity for source in staged.arrays}) == len(arrays)


def test_memory_is_used_again() -> None:
    """The second save, and a smaller one, use the memory of the first; a larger one grows it; close gives it back."""
    repo = open_repo(MemoryStore())
    arena = repo._background.arena
    addresses = []
    for epoch, items in enumerate((50_000, 50_000, 10_000, 50_000)):
        repo.save_async(epoch, make_state(epoch, items=items)).result()
        addresses.append((arena.address, arena.nbytes))
    assert len(set(addresses)) == 1
    repo.save_async(10, make_state(10, items=60_000)).result()
    assert arena.nbytes > addresses[0][1]
    grown = arena.nbytes
    repo.save_async(11, make_state(11, items=61_000)).result()
    assert arena.nbytes == grown, "a little growth was provided for"
    repo.close()
    assert (arena.address, arena.nbytes) == (0, 0)


def test_originals_are_let_go() -> None:
    """When the save is through, nothing of it keeps the caller's arrays alive."""
    repo = open_repo(MemoryStore())
    state: dict[str, Any] = {"model": {"w": np.arange(1000.0)}}
    original = weakref.ref(state["model"]["w"])
    handle = repo.save_async(1, state)
    handle.result()
    del state
    gc.collect()
    assert original() is None


@pytest.mark.parametrize("nbytes", [KEEP_LOCK - 1, KEEP_LOCK, KEEP_LOCK + 1])
def test_around_the_size_that_lets_go_of_the_lock(nbytes: int) -> None:
    """Both ways to copy give the same bytes."""
    array = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    source = Arena().stage(flat([array])).flats()["model"].arrays[0]
    assert isinstance(source, ArraySource)
    assert np.array_equal(np.frombuffer(source.read(0, nbytes), np.uint8), array)


def test_100_000_small_arrays() -> None:
    """Many small arrays: exact, one buffer, and no object for each of them before the trainer goes on."""
    arrays = {f"k{number}": np.full(4, number, np.float32) for number in range(100_000)}
    flats = flat(arrays)
    arena = Arena()
    arena.stage(flats)
    tracemalloc.start()
    staged = arena.stage(flats)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400 * len(arrays), "objects were made for each array"
    sources = staged.flats()["model"].arrays
    assert arena.nbytes <= len(arrays) * ALIGN * 1.01
    for number, source in enumerate(sources):
        assert isinstance(source, ArraySource)
        assert source.read(0, 16).cast("f")[0] == number
    repo = open_repo(MemoryStore(), chunk_size=1 << 20)
    assert_same(repo.save_async(1, {"model": arrays}).result().load("model"), arrays)


def test_interrupted_while_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the state is copied: nothing is in flight, nothing was written, the next save is right."""
    store = MemoryStore()
    repo = open_repo(store)
    repo.save_async(1, make_state(1)).result()
    before = {info.key for info in store.list()}
    real = ArraySource.nbytes.fget  # type: ignore[attr-defined]

    def interrupted(source: ArraySource) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ArraySource, "nbytes", property(interrupted))
        with pytest.raises(KeyboardInterrupt):
            repo.save_async(2, make_state(2))
    assert ArraySource.nbytes.fget is real  # type: ignore[attr-defined]
    assert {info.key for info in store.list()} == before
    assert_same(repo.save_async(2, make_state(3)).result().load(), make_state(3))
    repo.close()


def test_bad_input_is_refused_before_anything() -> None:
    """What cannot be stored is named by ``save_async`` itself; nothing is in flight and nothing written."""
    store = MemoryStore()
    repo = open_repo(store)
    before = {info.key for info in store.list()}
    bad: list[tuple[Any, ...]] = [
        (1, {"model": object()}),
        (1, {}),
        (1, []),
        (1, {"": {}}),
        (-1, {"model": 1}),
        (1, {"model": 1}, {"metric": object()}),
        (1, {"model": 1}, None, False, None, "sometimes"),
    ]
    for arguments in bad:
        with pytest.raises((TypeError, ValueError)):
            repo.save_async(*arguments)
    assert {info.key for info in store.list()} == before
    assert repo.save_async(1, {"model": 1}).result().load("model") == 1
