"""What happens to a state after ``save_async`` has returned never reaches the checkpoint."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np

from tests.background.helpers import Gate
from tests.repository.helpers import assert_same, open_repo


def everything() -> dict[str, Any]:
    """Every kind of value that a state can hold and that can change."""
    dice = np.random.default_rng(1)
    base = dice.standard_normal((40, 50))
    tied = dice.standard_normal(20_000).astype(np.float32)
    ordered = OrderedDict([("a", np.arange(5)), ("b", [1, 2])])
    ordered._metadata = {"version": [1]}  # type: ignore[attr-defined]
    return {
        "plain": base.copy(),
        "big": dice.integers(0, 255, 3_000_000, dtype=np.uint8),
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "backwards": np.arange(1000)[::-1],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(np.arange(7), (3, 7)),
        "swapped": np.arange(9, dtype=">i4"),
        "scalar array": np.array(3.5),
        "empty": np.zeros((0, 4)),
        "texts": np.array(["one", "three"]),
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "tied": [tied, tied],
        "long": bytearray(b"x" * 5000),
        "short": bytearray(b"abc"),
        "step": 7,
        "history": [1, [2.5, {"deep": [3]}]],
        "ordered": ordered,
        "set": {1, 2},
    }


def scramble(value: Any) -> None:
    """Change everything in place that can be changed."""
    if isinstance(value, np.ndarray):
        if value.flags.writeable and value.size:
            value.reshape(-1).view()[...] = value.reshape(-1)[::-1].copy()
            value.fill(0)
    elif isinstance(value, dict):
        for item in list(value.values()):
            scramble(item)
        value.clear()
        value["new"] = "junk"
        if isinstance(value, OrderedDict):
            scramble(value._metadata)  # type: ignore[attr-defined]
    elif isinstance(value, list):
        for item in value:
            scramble(item)
        value[:] = ["junk"]
    elif isinstance(value, bytearray):
        value[:] = b"junk"
    elif isinstance(value, set):
        value.add(99)


def test_nothing_leaks() -> None:
    """Weights, plain values, nesting, strides, ties and metadata are those of the call, whatever happens after it."""
    state, metadata = {"all": everything()}, {"loss": 0.5, "curve": [1, 2]}
    expected, expected_metadata = copy.deepcopy(state), copy.deepcopy(metadata)
    with Gate("") as gate:  # not one byte is stored before the state has changed
        gate.opened.set()
        repo = open_repo(gate.store)
        gate.opened.clear()
        handle = repo.save_async(1, state, metadata)
        scramble(state)
        scramble(metadata)
        gate.opened.set()
        found = handle.result().load()
    # deepcopy keeps what loading does not: strides, and that an array is read-only
    assert_same(found, expected)
    assert found["all"]["tied"][0] is found["all"]["tied"][1]
    assert handle.result().metadata == expected_metadata


def test_ties_across_records_are_copied_once() -> None:
    """The same memory in several records takes one place in the staging memory, and comes back whole."""
    weights = np.arange(100_000.0)
    with Gate() as gate:
        gate.opened.set()
        repo = open_repo(gate.store)
        handle = repo.save_async(1, {"model": {"w": weights}, "ema": {"w": weights, "view": weights[:10]}})
        state = handle.result().load()
        assert repo._background.arena.nbytes < 1.5 * weights.nbytes
    assert_same(state["ema"], {"w": weights, "view": weights[:10]})
    assert_same(state["model"], {"w": weights})


def test_training_on_while_saves_run() -> None:
    """A trainer that never stops changing its state: each checkpoint is the state of exactly its step."""
    weights, step = np.zeros(200_000), 0
    log = [0]
    state: dict[str, Any] = {"model": {"w": weights, "step": step, "log": log}}
    with Gate() as gate:
        gate.opened.set()
        repo = open_repo(gate.store)
        handles = []
        for step in range(1, 21):
            weights += 1
            state["model"]["step"] = step
            log.append(step)
            handles.append(repo.save_async(step, state))
        for step, handle in enumerate(handles, 1):
            found = handle.result().load("model")
            assert found["step"] == step
            assert found["log"] == list(range(step + 1))
            assert (found["w"] == step).all()
