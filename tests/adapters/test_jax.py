"""The adapter for JAX: pytrees come back as they were, bit for bit, and on the devices that they are wanted on."""

from __future__ import annotations

import importlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import ckptstore
from ckptstore.errors import InvalidArgumentError, InvalidRecordError, RecordNotFoundError
from ckptstore.tree import FlatState
from ckptstore.writer import RecordWriter

pytest.importorskip("jax.numpy", reason="needs jax: make test-adapters")
pytestmark = pytest.mark.usefixtures("entry_points")

jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
adapter: Any = importlib.import_module("ckptstore.adapters.jax")
restore, to_state = adapter.restore, adapter.to_state

jax.config.update("jax_num_cpu_devices", 8)  # no test has run yet, so no backend has been made

NARROW = ["bfloat16", "float16", "int4", "uint4", "int2", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]
NARROW += ["float8_e8m0fnu", "float4_e2m1fn"]


class Moments(NamedTuple):
    """As optax has them."""

    count: Any
    mu: Any


class Empty(NamedTuple):
    """As optax has them too."""


@jax.tree_util.register_pytree_with_keys_class
class Pair:
    """A node of the user's own, with names and a static field."""

    def __init__(self, left: Any, right: Any, name: str) -> None:
        self.left, self.right, self.name = left, right, name

    def tree_flatten_with_keys(self) -> Any:
        keys = jax.tree_util.GetAttrKey("left"), jax.tree_util.GetAttrKey("right")
        return tuple(zip(keys, (self.left, self.right), strict=True)), self.name

    @classmethod
    def tree_unflatten(cls, name: str, children: Any) -> Pair:
        left, right = children
        return cls(left, right, name)


@jax.tree_util.register_pytree_node_class
class Nameless(Pair):
    """The same without names."""

    def tree_flatten(self) -> Any:
        return (self.left, self.right), self.name


def facts(leaf: Any) -> tuple[Any, ...]:
    """All that has to be the same again of a leaf."""
    if not isinstance(leaf, jax.Array):
        return type(leaf), leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf)
    place = leaf.sharding, leaf.committed
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return (leaf.dtype, leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes(), *place)
    return (leaf.dtype, leaf.shape, leaf.weak_type, np.asarray(leaf).tobytes(), *place)


def check_same(found: Any, wanted: Any) -> None:
    """Equal structures with equal leaves."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    one, two = jax.tree.leaves_with_path(found), jax.tree.leaves_with_path(wanted)
    wrong = [jax.tree_util.keystr(path) for (path, a), (_, b) in zip(one, two, strict=True) if facts(a) != facts(b)]
    assert wrong == []


def round_trip(tree: Any, folder: Path, like: Any = None) -> Any:
    """The tree after a save and a restore by a new repository object."""
    with ckptstore.open(folder) as repository:
        repository.save(1, {"state": tree})
    with ckptstore.open(folder, create=False) as repository:
        checkpoint = repository.latest(deep=True)
        assert checkpoint is not None
        return restore(checkpoint, {"state": tree if like is None else like})["state"]


def zeros(tree: Any) -> Any:
    """The same structure without the values."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def test_every_kind_of_node_and_leaf_comes_back(tmp_path: Path) -> None:
    """P7: dicts, lists, tuples, named tuples, registered nodes, None, plain values, NumPy: types and bits."""
    tree = {
        "nan": jnp.asarray(np.array([0x7FC00001, 0xFFC12345, 0x80000000], np.uint32).view(np.float32)),
        "scalar": jnp.float32(3),
        "empty": jnp.zeros((0, 3)),
        "list": [jnp.arange(3), (jnp.arange(2), None), []],
        "moments": (Moments(jnp.int32(4), {"w": jnp.ones((2, 2))}), Empty(), Empty()),
        "pair": Pair(jnp.arange(2.0), None, "static"),
        "nameless": Nameless([jnp.arange(2.0)], jnp.ones(1), "static"),
        "ordered": OrderedDict([("b", jnp.ones(1)), ("a", jnp.zeros(1))]),
        "default": defaultdict(list, {"x": jnp.ones(1)}),
        "complex": jnp.asarray([1 + 2j, -0.0j]),
        "bool": jnp.asarray([True, False]),
        "plain": [1, 2.5, True, "text", 2**70, b"bytes", bytes(5000), 1j, np.float64(2)],
        "numpy": np.arange(3.0),
        "int keys": {3: jnp.ones(1), 1: jnp.zeros(1)},
    }
    found = round_trip(tree, tmp_path / "run", zeros(tree))
    check_same(found, tree)
    assert list(found["ordered"]) == ["b", "a"]
    assert found["default"].default_factory is list


@pytest.mark.parametrize("name", NARROW)
def test_narrow_types_keep_their_bits(name: str, tmp_path: Path) -> None:
    """P7: every bit pattern of bfloat16, of all float8 and of the types below a byte."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    bits = 2 ** {"int4": 4, "uint4": 4, "int2": 2, "float4_e2m1fn": 4}.get(name, 8 * dtype.itemsize)
    values = np.arange(bits, dtype=f"u{dtype.itemsize}").view(dtype)
    if name.startswith("int"):
        values = np.arange(-bits // 2, bits // 2).astype(dtype)
    tree = {"x": jnp.asarray(values)}
    found = round_trip(tree, tmp_path / "run", zeros(tree))
    check_same(found, tree)
    with ckptstore.open(tmp_path / "run") as repository:
        plain = repository.checkpoint(1).load("state")["x"]  # without JAX
        assert (plain.dtype, plain.tobytes()) == (dtype, values.tobytes())


def test_prng_keys_come_back(tmp_path: Path) -> None:
    """Typed keys of both implementations, one and many, and the old keys of plain uint32."""
    tree = {
        "one": jax.random.key(7),
        "many": jax.random.split(jax.random.key(8), (2, 3)),
        "rbg": jax.random.key(9, impl="rbg"),
        "old": jax.random.PRNGKey(10),
    }
    found = round_trip(tree, tmp_path / "run", {name: jnp.zeros_like(key) for name, key in tree.items()})
    check_same(found, tree)
    assert jax.random.bits(found["one"]) == jax.random.bits(tree["one"])
    abstract = jax.eval_shape(lambda: tree)
    check_same(round_trip(tree, tmp_path / "other", abstract), tree)
    with ckptstore.open(tmp_path / "run") as repository:
        for other in (jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0), None):
            with pytest.raises(
                InvalidRecordError, match=r"state\.one: PRNG keys of threefry2x32 \[\] in the checkpoint"
            ):
                restore(repository.checkpoint(1), {"state": {**tree, "one": other}})


def test_weak_types_are_those_that_were_saved(tmp_path: Path) -> None:
    """A weakly typed array stays one, whatever `like` has, even in place of a plain value; bits included."""
    weak = jnp.asarray(2.5)
    assert weak.weak_type
    nan = jnp.broadcast_to(jnp.asarray(0.0), (2,)).at[...].set(np.array([0x7FC00001, 0x80000000], "u4").view("f4"))
    tree = {
        "weak": weak,
        "strong": jnp.float32(1),
        "count": jnp.asarray(3),
        "nan": nan,
        "number": 4,
        "step": weak,
        "flag": weak > 2.0,
    }
    like = {"weak": jnp.float32(0), "strong": jnp.asarray(0.0), "count": 0, "nan": jnp.zeros(2), "number": jnp.int32(0)}
    found = round_trip(tree, tmp_path / "run", {**like, "step": 0, "flag": True})
    check_same(found, tree)
    with ckptstore.open(tmp_path / "run") as repository:
        numpy = {name: np.zeros_like(leaf) for name, leaf in tree.items()}
        found = restore(repository.checkpoint(1), {"state": numpy})["state"]
    assert (type(found["nan"]), found["nan"].tobytes(), found["number"]) == (np.ndarray, np.asarray(nan).tobytes(), 4)


def test_restores_from_shapes_alone(tmp_path: Path) -> None:
    """`like` may be what eval_shape gives: no second state is needed."""
    tree = {"moments": Moments(jnp.int32(4), {"w": jnp.full((3, 2), 2.0)}), "none": None}
    found = round_trip(tree, tmp_path / "run", jax.eval_shape(lambda: tree))
    check_same(found, tree)


def test_only_the_records_that_are_asked_for_are_read(tmp_path: Path) -> None:
    """A part of the records is enough, and none of the others' chunks are needed."""
    tree = {"params": {"w": jnp.arange(100_000.0)}, "opt_state": {"mu": jnp.arange(100_000.0) + 1}}
    with ckptstore.open(tmp_path / "run", codec="raw") as repository:
        repository.save(1, to_state({"params": tree["params"]}))
        kept = {path.name for path in (tmp_path / "run").rglob("chunks/*")}
        checkpoint = repository.save(2, to_state(tree))
        for chunk in (tmp_path / "run").rglob("chunks/*"):
            if chunk.name not in kept:
                chunk.unlink()
        found = restore(checkpoint, {"params": zeros(tree["params"])})
        check_same(found, {"params": tree["params"]})
        with pytest.raises(ckptstore.CorruptionError):
            restore(checkpoint, tree)


def test_tied_arrays_are_stored_once(tmp_path: Path) -> None:
    """The same array at two places is one array in the checkpoint, and comes back at both."""
    shared = jnp.arange(1000.0)
    tree = {"embed": shared, "head": shared}
    check_same(round_trip(tree, tmp_path / "run", zeros(tree)), tree)
    with ckptstore.open(tmp_path / "run") as repository:
        assert repository.checkpoint(1).records["state"].arrays == 1


def test_arrays_are_not_copied_to_be_saved() -> None:
    """P6: what to_state gives is the memory of the arrays themselves, on the CPU."""
    array = jnp.arange(10_000.0)
    assert np.shares_memory(to_state({"x": array})["x"], np.asarray(array))


def test_a_background_save_is_not_touched_by_donation(tmp_path: Path) -> None:
    """save_async has its own copy: a step that donates its input does not reach the checkpoint."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.arange(100_000.0)
    wanted = np.array(array)
    with ckptstore.open(tmp_path / "run") as repository:
        handle = repository.save_async(1, to_state({"state": {"x": array}}))
        for _ in range(5):
            array = step(array)
        checkpoint = handle.result()
        assert np.array_equal(restore(checkpoint, {"state": {"x": array}})["state"]["x"], wanted)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """All paths that differ are in one error, and nothing is restored."""
    one = jnp.ones(1)
    tree = {"w": jnp.ones((2, 2)), "gone": one, "type": one, "list": [one], "none": None, "n": 1}
    like = {"w": jnp.ones((2, 3)), "new": one, "type": jnp.ones(1, jnp.bfloat16), "list": (one,)}
    with ckptstore.open(tmp_path / "run") as repository:
        checkpoint = repository.save(1, to_state({"state": tree, "other": {"x": one}, "third": {"x": one}}))
        for chunk in (tmp_path / "run").rglob("chunks/*"):
            chunk.unlink()  # nothing may be read
        with pytest.raises(InvalidRecordError) as caught:
            restore(checkpoint, {"state": {**like, "none": 3, "n": None}, "other": {"x": jnp.ones(2)}})
    lines = str(caught.value).splitlines()
    assert sorted(line.strip() for line in lines[1:]) == [
        "other.x: float32 [1] in the checkpoint, float32 [2] here",
        "state.gone: only in the checkpoint, missing here",
        "state.list: list in the checkpoint, tuple here",
        "state.n: int in the checkpoint, NoneType here",
        "state.new: not in the checkpoint",
        "state.none: NoneType in the checkpoint, int here",
        "state.type: float32 [1] in the checkpoint, bfloat16 [1] here",
        "state.w: float32 [2, 2] in the checkpoint, float32 [2, 3] here",
    ]
    with ckptstore.open(tmp_path / "run") as repository:
        with pytest.raises(RecordNotFoundError, match="has no record 'fourth'"):
            restore(repository.checkpoint(1), {"fourth": {}})
        assert restore(repository.checkpoint(1), {}) == {}
        with pytest.raises(InvalidArgumentError, match="dict of records"):
            restore(repository.checkpoint(1), [1])


def test_wide_arrays_are_refused_where_jax_would_narrow_them(tmp_path: Path) -> None:
    """P7: float64 from a run with 64 bits is not silently made float32 without them."""
    with jax.enable_x64(True):
        tree = {"x": jnp.arange(3.0), "step": jnp.asarray(1.5), "weak": jnp.asarray(2)}
        assert tree["x"].dtype == np.float64
        check_same(round_trip(tree, tmp_path / "run", zeros(tree)), tree)
    with ckptstore.open(tmp_path / "run") as repository, pytest.raises(InvalidRecordError, match="jax_enable_x64"):
        restore(repository.checkpoint(1), {"state": {"x": tree["x"], "step": 0.0, "weak": 0}})


def test_deleted_and_traced_arrays_are_refused_by_name() -> None:
    """P7: what has no values, or not yet, is an error with its path."""
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(InvalidRecordError, match=r"a\.0: the array was deleted"):
        to_state({"a": [array]})
    with pytest.raises(InvalidRecordError, match=r"a: the array is being traced: call it outside of jit"):
        jax.jit(lambda x: to_state({"a": x}))(jnp.ones(3))
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(InvalidRecordError, match="nested deeper than 200 levels"):
        to_state({"a": cycle})


def straight(repository: Any, epoch: int, records: Any) -> Any:
    """Saved as it is, in each of the ways to save."""
    way = epoch % 4
    if way == 0:
        return repository.save(epoch, records)
    if way == 1:
        return repository.save_async(epoch, records).result()
    if way == 2:
        return repository.save(epoch, records, rank=0, world_size=1, group="g")
    with repository.begin(epoch) as transaction:
        for name, state in records.items():
            transaction.write(name, state)
        return transaction.commit()


@dataclass
class Mine:
    """A dataclass of the user's own, registered below."""

    w: Any


jax.tree_util.register_dataclass(Mine, ["w"], [])


@pytest.mark.parametrize("way", range(4))
def test_a_pytree_is_saved_straight(way: int, tmp_path: Path) -> None:
    """P7: with every kind of save, what to_state makes of it and nothing else is stored; the rest stays as it is."""
    shared = jnp.arange(2000.0)
    tree = {
        "bare": jnp.ones(2, jnp.bfloat16),
        "deep": [(Moments(jnp.asarray(3), {"w": shared}), Empty()), {"key": jax.random.key(1), "again": shared}],
        "numpy": np.arange(3.0),
        "left": {1, 2},
        "counter": Counter("aab"),
        "bytes": bytearray(b"x"),
    }
    named, mine = Moments(jnp.int32(1), [jnp.ones(3)]), Mine({"w": jnp.zeros(2)})
    records = {"tree": tree, "named": named, "mine": mine, "array": jnp.arange(3), "plain": {"n": 1}}
    with ckptstore.open(tmp_path / "run") as repository:
        found = straight(repository, 4 + way, records)
        wanted = repository.save(100, to_state(records))
        assert {name: found.structure(name) for name in records} == {n: wanted.structure(n) for n in records}
        assert found.records["tree"].arrays == wanted.records["tree"].arrays
        assert wanted.report is not None
        assert wanted.report.bytes_sent < 5000  # all arrays are there already: they are the same
        check_same(restore(found, records), records)


def test_a_state_beside_arrays_of_torch_keeps_all(tmp_path: Path) -> None:
    """P7: what JAX does not know is stored as without it, the metadata of a state_dict included."""
    torch: Any = pytest.importorskip("torch", reason="needs torch: make test-adapters")
    layer = torch.nn.Linear(3, 2)
    state = {"torch": layer.state_dict(), "size": torch.Size([3]), "jax": jnp.ones(2)}
    with ckptstore.open(tmp_path / "run") as repository:
        found: Any = repository.save(1, {"state": state}).load("state")
    assert vars(found["torch"]) == vars(state["torch"]) != {}
    assert torch.equal(found["torch"]["weight"], layer.weight)
    assert (type(found["size"]), found["jax"].tolist()) == (torch.Size, [1, 1])


def test_a_straight_background_save_is_not_touched_by_donation(tmp_path: Path) -> None:
    """save_async has copied all when it returns, whatever becomes of the arrays then."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    params = {"w": jnp.arange(100_000.0)}
    wanted = np.array(params["w"])
    with ckptstore.open(tmp_path / "run") as repository:
        handle = repository.save_async(1, {"params": params})
        for _ in range(5):
            params = step(params)
        assert np.array_equal(handle.result().load("params")["w"], wanted)


@pytest.mark.parametrize("where", ["dict", "named", "dataclass"])
def test_a_straight_state_that_changes_meanwhile(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: new arrays of the same form in the place of the old ones are no error, another structure is."""
    inner = {"w": jnp.arange(1000.0)}
    state: Any = {"dict": inner, "named": {"a": [Moments(jnp.int32(0), inner)]}, "dataclass": Mine(inner)}[where]
    change: list[Callable[[], object]] = [lambda: inner.update(w=jnp.zeros(1000)), lambda: inner.update(new=inner["w"])]
    write = RecordWriter.write_state

    def write_and_change(self: RecordWriter, name: str, flat: FlatState) -> None:
        write(self, name, flat)
        change.pop(0)()

    monkeypatch.setattr(RecordWriter, "write_state", write_and_change)
    with ckptstore.open(tmp_path / "run") as repository:
        repository.save(1, {"state": state})
        with pytest.raises(InvalidRecordError, match="changed its structure"):
            repository.save(2, {"state": state})
        assert (repository.epochs(), change) == ([1], [])
        inner.pop("new")
        found = restore(repository.checkpoint(1), {"state": state})["state"]
        assert jax.tree.leaves(found)[-1][-1] == 999


def test_what_cannot_be_saved_straight_is_named(tmp_path: Path) -> None:
    """P7: deleted and traced arrays, and what is no data, by record and path; nothing is written."""
    gone = jnp.ones(3)
    gone.delete()
    with ckptstore.open(tmp_path / "run") as repository:

        def refused(records: Any, message: str, **others: Any) -> None:
            for save in (repository.save, repository.save_async):
                with pytest.raises(InvalidRecordError, match=message):
                    save(1, records, **others)

        refused({"m": {"a": [gone]}}, r"m\.a\.0: the array was deleted")
        refused({"m": {"a": jnp.ones(1), "f": print}}, r"m\.f: objects of type builtin_function")
        refused({"m": {"s": jax.ShapeDtypeStruct((2,), np.float32)}}, r"m\.s: .* belongs to JAX")
        refused({"m": {"c": Counter(a=jnp.ones(1))}}, r"m\.c\.a: .* belongs to JAX")  # a Counter is no pytree
        refused({"m": Moments(1, 2)}, r"m: the named tuple .* needs code")  # nothing of JAX in it
        loss = {"loss": jnp.float32(1)}
        refused({"m": 1}, r"metadata\.loss: [\s\S]*store the \.item\(\) of an array", metadata=loss)
        with pytest.raises(InvalidRecordError, match=r"m\.x: the array is being traced"):
            jax.jit(lambda x: repository.save(1, {"m": {"x": x}}))(jnp.ones(2))
        assert repository.epochs() == []
