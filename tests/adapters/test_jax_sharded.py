"""Sharded arrays of JAX: saved by their shards, and restored with any other sharding."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import ShardedArray

pytest.importorskip("jax.numpy", reason="needs jax: make test-adapters")
pytestmark = pytest.mark.usefixtures("entry_points")

jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
sharding: Any = importlib.import_module("jax.sharding")
adapter: Any = importlib.import_module("ckptstore.adapters.jax")
restore, to_state = adapter.restore, adapter.to_state

jax.config.update("jax_num_cpu_devices", 8)  # no test has run yet, so no backend has been made

MESHES = {"8": ((8,), "x"), "4x2": ((4, 2), "xy"), "2x4": ((2, 4), "xy"), "1x2": ((1, 2), "xy")}
# Meshes and how the dimensions of the matrix are laid on them; the last of each is partly, or fully, replicated.
LAYOUTS = [
    ("8", ("x",)), ("8", (None, "x")), ("8", ()),
    ("4x2", ("x", "y")), ("4x2", (("x", "y"),)), ("4x2", ("x",)), ("4x2", (None, "y")),
    ("2x4", ("y", "x")), ("2x4", (None, ("x", "y"))), ("2x4", ("x",)),
    ("1x2", ("y",)),
]  # fmt: skip


def place(mesh: str, spec: tuple[Any, ...], explicit: bool = False) -> Any:
    """A sharding on the first devices."""
    shape, names = MESHES[mesh]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    kind = sharding.AxisType.Explicit if explicit else sharding.AxisType.Auto
    made = sharding.Mesh(devices, tuple(names), axis_types=(kind,) * len(names))
    return sharding.NamedSharding(made, sharding.PartitionSpec(*spec))


def matrix(dtype: Any = np.uint32) -> Any:
    """16 x 24 random bits."""
    return np.random.default_rng(3).integers(0, 2**32, (16, 24), np.uint32).view(dtype)


def test_every_layout_into_every_other(tmp_path: Path) -> None:
    """P7: what was saved from any mesh comes back on any other, bit for bit, with the sharding that is asked for."""
    values = matrix()
    arrays = {str(number): jax.device_put(values, place(*layout)) for number, layout in enumerate(LAYOUTS)}
    with ckptstore.open(tmp_path / "run") as repository:
        checkpoint = repository.save(1, {"state": arrays})
    assert {name: array.tobytes() for name, array in checkpoint.load("state").items()} == dict.fromkeys(
        arrays, values.tobytes()
    )
    for shift, _ in enumerate(LAYOUTS):
        wanted = {name: place(*LAYOUTS[(int(name) + shift) % len(LAYOUTS)]) for name in arrays}
        like = {name: jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=to) for name, to in wanted.items()}
        found = restore(checkpoint, {"state": like})["state"]
        assert {name: array.sharding for name, array in found.items()} == wanted
        for array in found.values():
            for shard in array.addressable_shards:
                assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()


@pytest.mark.parametrize("explicit", [False, True])
def test_all_kinds_of_arrays_are_sharded(explicit: bool, tmp_path: Path) -> None:
    """bfloat16, int4, NaN payloads, typed PRNG keys, weakly typed arrays, and scalars on the whole mesh."""
    rows, both = place("4x2", ("x",), explicit), place("4x2", ("x", "y"), explicit)
    tree = {
        "bfloat16": jax.device_put(matrix(jnp.bfloat16), both),
        "nan": jax.device_put(matrix(np.float32), both),
        "int4": jax.device_put(jnp.arange(-8, 8).astype(jnp.int4), rows),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 8), rows),
        "weak": jax.device_put(jnp.broadcast_to(jnp.asarray(2.5), (8,)), rows),
        "count": jax.device_put(jnp.int32(3), place("4x2", (), explicit)),
        "elsewhere": jax.device_put(jnp.ones(2), jax.devices()[5]),
        "anywhere": jnp.ones(2),
    }
    with ckptstore.open(tmp_path / "run") as repository:
        checkpoint = repository.save(1, {"state": tree})
    found = restore(checkpoint, {"state": tree})["state"]
    for name, array in tree.items():
        one, two = found[name], array
        assert (one.sharding, one.committed, one.dtype) == (two.sharding, two.committed, two.dtype), name
        if name == "keys":
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        assert one.weak_type == two.weak_type, name
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes(), name
    assert jnp.sum(found["bfloat16"].astype(jnp.int32) * found["anywhere"][0].astype(jnp.int32)).shape == ()


def test_replicas_are_saved_once_and_shards_as_they_are(tmp_path: Path) -> None:
    """Nothing makes the whole array on the host; each element is in one piece only, whatever its replicas."""
    array = jax.device_put(matrix(), place("2x4", ("x",)))  # each half on four devices
    state = to_state({"w": array})["w"]
    assert isinstance(state, ShardedArray)
    assert [(offset, piece.shape) for offset, piece in state.pieces] == [((0, 0), (8, 24)), ((8, 0), (8, 24))]
    shards = {shard.replica_id: shard for shard in array.addressable_shards if shard.index[0].start == 8}
    assert sorted(shards) == [0, 1, 2, 3]
    assert np.shares_memory(state.pieces[1][1], np.asarray(shards[0].data))
    with ckptstore.open(tmp_path / "run") as repository:
        checkpoint = repository.save(1, {"state": {"w": array, "all": jax.device_put(1.5, place("8", ()))}})
        assert checkpoint.bytes_state == array.nbytes + 4


def test_a_single_device_takes_what_many_had(tmp_path: Path) -> None:
    """Down to one device and to NumPy, and up again from plain NumPy arrays: the checkpoint does not know."""
    values = matrix(np.float32)
    with ckptstore.open(tmp_path / "run") as repository:
        many = repository.save(1, {"s": {"w": jax.device_put(values, place("8", ("x",)))}})
        one = repository.save(2, {"s": {"w": values}})
    wanted: dict[str, Any] = {
        "numpy": np.zeros_like(values),
        "device": jax.device_put(np.zeros_like(values), jax.devices()[3]),
        "default": jax.ShapeDtypeStruct(values.shape, values.dtype),
        "mesh": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=place("4x2", ("y", "x"))),
    }
    for checkpoint, (name, like) in itertools.product((many, one), wanted.items()):
        found: Any = restore(checkpoint, {"s": {"w": like}})["s"]["w"]
        assert np.asarray(found).tobytes() == values.tobytes()
        assert isinstance(found, np.ndarray if name == "numpy" else jax.Array)
        if name in ("device", "mesh"):
            assert getattr(found, "sharding", None) == like.sharding
        elif name == "default":
            assert getattr(found, "committed", None) is False


def test_what_a_step_compiles_for_is_what_it_gets_again(tmp_path: Path) -> None:
    """A jitted step takes a restored state without compiling again, and gives the same bits."""
    step = jax.jit(lambda state: {"w": state["w"] * 1.5 + state["n"], "n": state["n"] + 1})
    state = {"w": jax.device_put(matrix(np.float32) % 7, place("4x2", ("x", "y"))), "n": 0}
    state = step(step(state))  # the count is a weakly typed array from the first step on
    with ckptstore.open(tmp_path / "run") as repository:
        checkpoint = repository.save(2, {"state": state})
    following = step(state)
    compiled = step._cache_size()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    found = restore(checkpoint, {"state": like})["state"]
    again = step(found)
    assert step._cache_size() == compiled
    assert all(np.asarray(again[name]).tobytes() == np.asarray(following[name]).tobytes() for name in again)


def test_a_background_save_of_shards(tmp_path: Path) -> None:
    """save_async copies each shard once; donation afterwards does not reach the checkpoint."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    values = matrix()
    array = jax.device_put(values, place("4x2", ("x", "y")))
    with ckptstore.open(tmp_path / "run") as repository:
        handle = repository.save_async(1, {"state": {"w": array}})
        array = step(array)
        checkpoint = handle.result()
        found = restore(checkpoint, {"state": {"w": array}})["state"]["w"]
    assert found.sharding == array.sharding
    assert np.asarray(found).tobytes() == values.tobytes()
