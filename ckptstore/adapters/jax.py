"""JAX: any pytree to a state that a checkpoint can hold, and back onto the devices.

``repo.save(step, {"params": params, "opt_state": opt_state})`` finds ``to_state`` by an entry point (``foreign.py``);
``restore(ckpt, like=...)`` gives the same pytree again, each array where ``like`` has it. Dicts, lists and tuples are
stored as they are, any other node (named tuple, dataclass of flax or chex) as a dict by the names of its children. What
makes it that node again, with its static fields, is ``like``: no code is on the store. Arrays keep bits, dtype, shape
and ``weak_type``. Sharded ones are saved by the shards of this process, of each replicated one once, and loaded for the
devices of this process alone, whatever the sharding was.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax import tree_util
from jax.experimental import multihost_utils

from ckptstore import dtypes
from ckptstore.arrays import ArraySpec
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidArgumentError, InvalidRecordError
from ckptstore.inplace import refuse
from ckptstore.shards import ShardedArray
from ckptstore.skeleton import MAX_DEPTH, join

__all__ = ["ranks", "restore", "to_state"]

IMPL, DATA = "prng_impl", "key_data"  # of an array of typed PRNG keys: a dict with these two
WEAK = "weak_type"  # of a weakly typed array: a dict with this one
SCALARS = (bool, int, float, complex, np.generic)
_WEAK: dict[str, Callable[[], Any]] = {
    "b": lambda: jnp.equal(0, 0),
    "i": lambda: jnp.asarray(0),
    "f": lambda: jnp.asarray(0.0),
    "c": lambda: jnp.asarray(0j),
}
"""A weakly typed array of each kind: what JAX makes of Python's scalars, and of comparing them."""

Finish = Callable[[Any], Any]


# ---------------------------------------------------------------- to save


def ranks() -> dict[str, Any]:
    """Which of the processes of ``jax.distributed`` this one is: ``repo.save(step, state, **ranks())``.

    All processes must call it, because the first call agrees on a name for this launch. Empty where there is only one.
    """
    count = jax.process_count()
    return {"rank": jax.process_index(), "world_size": count, "group": _launch()} if count > 1 else {}


@cache
def _launch() -> str:
    return bytes(multihost_utils.broadcast_one_to_all(np.frombuffer(uuid.uuid4().bytes, np.uint8))).hex()


def to_state(tree: Any) -> Any:
    """A pytree as dicts, lists and tuples with arrays in host memory: what a save makes of it by itself.

    All transfers from devices are begun before the first is waited for. On the CPU nothing is copied. Arrays of typed
    PRNG keys become ``{"prng_impl": name, "key_data": array}``, weakly typed arrays ``{"weak_type": array}``.

    Raises:
        InvalidRecordError: an array was deleted (donated), is being traced, or could not be made again.
    """
    _plain(tree, "", lambda array, path: array.copy_to_host_async(), 0)
    return _plain(tree, "", _stored, 0)


def _plain(value: Any, path: str, leaf: Callable[[Any, str], Any], depth: int) -> Any:
    if isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer) or value.is_deleted():
            what = "is being traced: call it outside of jit" if isinstance(value, jax.core.Tracer) else "was deleted"
            raise InvalidRecordError(f"{path or 'state'}: the array {what}")
        return leaf(value, path)
    children = _children(value)
    if children is None:
        return value
    if depth > MAX_DEPTH:
        raise InvalidRecordError(f"{path[:200]}: nested deeper than {MAX_DEPTH} levels")
    return _filled(value, {k: _plain(child, join(path, k), leaf, depth + 1) for k, child in children.items()})


def _children(value: Any) -> dict[Any, Any] | None:
    """What is right below a node of a pytree, by key, in the order in which JAX puts it together; None for a leaf."""
    if value is None or isinstance(value, (*SCALARS, str, np.ndarray)):
        return None
    if type(value) in (dict, OrderedDict, defaultdict):
        return dict(value)
    if type(value) in (list, tuple):
        return dict(enumerate(value))
    found, _ = tree_util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    if found and found[0][0] == ():
        return None
    keys = [_name(path[0]) for path, _ in found]
    if len(set(keys)) < len(keys):
        keys = list(range(len(keys)))
    return {key: child for key, (_, child) in zip(keys, found, strict=True)}


def _name(key: Any) -> Any:
    return next((getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)), str(key))


def _filled(like: Any, children: dict[Any, Any]) -> Any:
    """A container of data for these children of a node."""
    if type(like) in (list, tuple):
        return type(like)(children.values())
    if type(like) is defaultdict:
        return defaultdict(like.default_factory, children)
    if type(like) is not OrderedDict:
        return children
    vars(made := OrderedDict(children)).update(vars(like))  # such as the _metadata of a state_dict of torch
    return made


def _stored(array: Any, path: str) -> Any:
    """What stands for an array of JAX in a state."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(array)
        if not isinstance(impl, str):
            raise InvalidRecordError(f"{path}: PRNG keys of an implementation without a name ({impl})")
        return {IMPL: impl, DATA: _on_host(jax.random.key_data(array))}
    if not array.weak_type:
        return _on_host(array)
    if _weak_dtype(array.dtype) != array.dtype:
        raise InvalidRecordError(f"{path}: JAX has no way to make a weakly typed {array.dtype} again: use .astype")
    return {WEAK: _on_host(array)}


def _on_host(array: Any) -> Any:
    """The array, if this process has all of it on each of its devices; else its shards here, a replicated one once."""
    if array.is_fully_addressable and array.is_fully_replicated:
        return np.asarray(array)
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    pieces = [(_box(shard.index, array.shape)[0], np.asarray(shard.data)) for shard in shards]
    return ShardedArray(array.shape, array.dtype, pieces)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of what an index of JAX's selects."""
    ranges = [part.indices(length) for part, length in zip(index, shape, strict=True)]
    return tuple(start for start, _, _ in ranges), tuple(stop - start for start, stop, _ in ranges)


def _weak_dtype(dtype: Any) -> Any:
    """The type of weakly typed arrays of that kind; None if there are none."""
    make = _WEAK.get(np.dtype(dtype).kind)
    return None if make is None else make().dtype


# ---------------------------------------------------------------- to load


def restore(ckpt: Checkpoint, like: Mapping[str, Any]) -> dict[str, Any]:
    """Records of a checkpoint as pytrees on devices.

    Args:
        ckpt: what ``latest()`` or ``checkpoint()`` gave.
        like: for each record that is wanted a pytree of the structure that was saved: a fresh state, or what
            ``jax.eval_shape`` gives. A ``jax.Array`` and a ``jax.ShapeDtypeStruct`` tell where the array is to be (a
            ShapeDtypeStruct without a sharding: on the default device), a NumPy array that it is to stay one; a plain
            value takes whatever plain value or scalar array was saved. None of them is changed.

    Raises:
        InvalidRecordError: the checkpoint has another structure, shape or dtype; the message lists the paths.
        RecordNotFoundError, CorruptionError, EpochNotFoundError: as ``Checkpoint.load``.
    """
    if not isinstance(like, Mapping):
        raise InvalidArgumentError(f"like must be a dict of records, not {type(like).__name__}")
    matcher = _Matcher()
    plans = {name: matcher.walk(ckpt.structure(name), tree, name) for name, tree in like.items()}
    refuse(matcher.problems)
    into = {name: place for name, (place, _) in plans.items()}
    loaded = ckpt.load(into=into, strict=False) if into else {}  # not strict: other records are left out
    return {name: finish(loaded[name]) for name, (_, finish) in plans.items()}


class _Matcher:
    """Compares what is stored with ``like``, and says where each array goes and what is made of it then."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def walk(self, stored: Any, like: Any, path: str) -> tuple[Any, Finish]:
        """What to load a part of a record into, and what makes that part of the pytree of what was loaded."""
        children = _children(like)
        if children is not None:
            return self._node(stored, like, children, path)
        if isinstance(stored, ArraySpec) and stored.kind not in ("bytes", "bytearray"):
            return self._array(stored, like, path)
        if isinstance(stored, dict) and isinstance(stored.get(WEAK), ArraySpec) and len(stored) == 1:
            into, finish = self._array(stored[WEAK], like, path)
            return {WEAK: into}, lambda loaded: _weakened(finish(loaded[WEAK]))
        if isinstance(stored, dict) and stored.keys() == {IMPL, DATA} and isinstance(stored[DATA], ArraySpec):
            return self._keys(stored[IMPL], stored[DATA], like, path)
        fits = like is not None and not isinstance(stored, (dict, list, tuple, type(None)))
        if not (fits or type(stored) is type(like)) or (_is_array(like) and not isinstance(stored, SCALARS)):
            return self._differ(_kind(stored), _kind(like), path)
        return stored, lambda loaded: loaded

    def _differ(self, there: str, here: str, path: str) -> tuple[Any, Finish]:
        self.problems.append(f"{path}: {there} in the checkpoint, {here} here")
        return None, lambda loaded: None

    def _node(self, stored: Any, like: Any, children: dict[Any, Any], path: str) -> tuple[Any, Finish]:
        wanted = type(like) if type(like) in (list, tuple) else dict
        if not (isinstance(stored, dict) if wanted is dict else type(stored) is wanted):
            return self._differ(_kind(stored), _kind(like), path)
        there = stored if wanted is dict else dict(enumerate(stored))
        self.problems += [f"{join(path, k)}: only in the checkpoint, missing here" for k in there if k not in children]
        self.problems += [f"{join(path, k)}: not in the checkpoint" for k in children if k not in there]
        plans = {k: self.walk(there[k], child, join(path, k)) for k, child in children.items() if k in there}

        def finish(loaded: Any) -> Any:
            values = {key: plan[1](loaded[key]) for key, plan in plans.items()}
            if type(like) in (dict, list, tuple, OrderedDict, defaultdict):
                return _filled(like, values)
            return tree_util.tree_structure(like, is_leaf=lambda part: part is not like).unflatten(values.values())

        return _filled(stored, {key: plan[0] for key, plan in plans.items()}), finish

    def _array(self, spec: ArraySpec, like: Any, path: str) -> tuple[Any, Finish]:
        plain = isinstance(like, SCALARS) and spec.shape == ()
        if _kind(spec) != _kind(like) if _is_array(like) else not plain:
            return self._differ(_kind(spec), _kind(like), path)
        if isinstance(like, np.ndarray):
            return np.empty(spec.shape, dtypes.numpy_dtype(spec.dtype)), lambda loaded: loaded
        return self._on_devices(spec, _sharding(like), path)

    def _keys(self, impl: str, spec: ArraySpec, like: Any, path: str) -> tuple[Any, Finish]:
        try:
            one = jax.random.key(0, impl=impl)
        except (TypeError, ValueError):
            one = None
        fits = one is not None and _is_array(like) and like.dtype == one.dtype and spec.dtype == "uint32"
        if not fits or spec.shape != (*like.shape, *jax.random.key_data(one).shape):
            return self._differ(f"PRNG keys of {impl} {list(spec.shape[:-1])}", _kind(like), path)
        data = jax.random.key_data(like) if isinstance(like, jax.Array) else like
        into, finish = self._on_devices(spec, _sharding(data), path)
        return {IMPL: impl, DATA: into}, lambda loaded: jax.random.wrap_key_data(finish(loaded[DATA]), impl=impl)

    def _on_devices(self, spec: ArraySpec, sharding: Any, path: str) -> tuple[Any, Finish]:
        dtype = dtypes.numpy_dtype(spec.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            return self._differ(_kind(spec), "no 64 bits (jax_enable_x64 is off)", path)
        if sharding is None:
            return np.empty(spec.shape, dtype), jax.device_put
        boxes = {d: _box(i, spec.shape) for d, i in sharding.addressable_devices_indices_map(spec.shape).items()}
        memory = {box: np.empty(box[1], dtype) for box in boxes.values()}  # of what several devices have, one
        where = [(jax.sharding.SingleDeviceSharding(d, memory_kind=sharding.memory_kind), b) for d, b in boxes.items()]

        def finish(loaded: Any) -> Any:
            parts = [jax.device_put(memory[box], device) for device, box in where]
            return jax.make_array_from_single_device_arrays(spec.shape, sharding, parts, dtype=dtype)

        whole = memory.get(((0,) * len(spec.shape), spec.shape))
        pieces = [(offset, array) for (offset, _), array in memory.items()]
        return ShardedArray(spec.shape, spec.dtype, pieces) if whole is None else whole, finish


def _is_array(like: Any) -> bool:
    return isinstance(like, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))


def _kind(value: Any) -> str:
    """A value in words, for people and to compare arrays."""
    if isinstance(value, ArraySpec):
        return f"{value.dtype} {list(value.shape)}"
    if not _is_array(value):
        return type(value).__name__
    keys = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    name = None if keys else dtypes.numpy_name(np.dtype(value.dtype))
    return f"{name or value.dtype} {list(value.shape)}"


def _sharding(like: Any) -> Any:
    """Where an array is to be; None for the default device, to be moved wherever it is used (uncommitted)."""
    return like.sharding if isinstance(like, jax.ShapeDtypeStruct) or getattr(like, "committed", False) else None


def _weakened(array: Any) -> Any:
    """The same bits, weakly typed as results of Python scalars are: what is set into a weak array becomes weak."""
    if isinstance(array, np.ndarray):
        return array

    def weaken(value: Any) -> Any:
        weak = jnp.broadcast_to(_WEAK[value.dtype.kind](), value.shape)
        return weak.at[...].set(value, out_sharding=jax.typeof(value).sharding)

    return jax.jit(weaken, out_shardings=array.sharding if array.committed else None)(array)
