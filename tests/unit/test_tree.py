"""States to skeletons and back: exact types, one error for all that cannot be stored, nothing evaluated."""

from __future__ import annotations

import functools
import random
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import arrays, tree
from ckptstore.errors import FormatError, InvalidRecordError
from ckptstore.tree import flatten, leaf_paths, prune, unflatten
from tests.unit.exact import round_trip, same

Point = namedtuple("Point", "x y")


class Colour(Enum):
    RED = 1


class Level(IntEnum):
    LOW = 1


@dataclass
class Config:
    rate: float


class MyDict(dict[str, int]):
    pass


class MyInt(int):
    pass


class MyFloat64(np.float64):
    pass


def skeleton(state: object) -> Any:
    return flatten(state, "state").skeleton


ENCODINGS: list[tuple[object, object]] = [
    (None, None), (True, True), (False, False), ("text", "text"), ("ü\0", "ü\0"), (0, 0), (-7, -7),
    (2**53 - 1, 2**53 - 1), (2**53, {"int": "0x20000000000000"}), (-(2**53), {"int": "-0x20000000000000"}),
    (1.0, 1.0), (float("inf"), {"float": "7ff0000000000000"}), (float("-inf"), {"float": "fff0000000000000"}),
    ("\udc80", {"surrogates": "7bKA"}), (b"abc", {"bytes": "YWJj"}), (bytearray(b"abc"), {"bytearray": "YWJj"}),
    (1 - 2j, {"complex": ["3ff0000000000000", "c000000000000000"]}), ([1, [2]], [1, [2]]),
    ((1, "a"), {"tuple": [1, "a"]}), ({2, 1}, {"set": [1, 2]}), (frozenset("a"), {"frozenset": ["a"]}),
    ({"a": 1, 2: (), None: 0.5}, {"dict": [["a", 1], [2, {"tuple": []}], [None, 0.5]]}),
    (OrderedDict(a=1), {"odict": [["a", 1]]}), (Counter("aab"), {"counter": [["a", 2], ["b", 1]]}),
    (defaultdict(list, a=[1]), {"defaultdict": ["list", [["a", [1]]]]}),
    (defaultdict(None, a=1), {"defaultdict": ["None", [["a", 1]]]}),
    ({(1, "a"): 1, b"k": 2}, {"dict": [[{"tuple": [1, "a"]}, 1], [{"bytes": "aw=="}, 2]]}),
    (np.float32(1), {"scalar": ["float32", "AACAPw=="]}), (np.bool_(True), {"scalar": ["bool", "AQ=="]}),
    (np.str_("a"), {"scalar": ["<U1", "YQAAAA=="]}), (np.bytes_(b"a"), {"scalar": ["|S1", "YQ=="]}),
    ({np.int64(3): 1}, {"dict": [[{"scalar": ["int64", "AwAAAAAAAAA="]}, 1]]}), (b"x" * 1025, {"array": 0}),
    (np.zeros(3), {"array": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("value", "node"), ENCODINGS, ids=repr)
def test_the_encoding_is_what_the_format_says(value: object, node: object) -> None:
    """Every kind of value has exactly the node that the module describes, and comes back from it."""
    assert same(skeleton(value), node)
    assert same(round_trip(value), value)


SCALARS = [
    np.float64(0.1), np.float16(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.complex64(1 - 2j), np.bool_(False),
    np.datetime64("2024-02-29T12:00:00", "ns"), np.datetime64("NaT"), np.timedelta64(7, "D"), np.timedelta64(3),
    np.str_(""), np.str_("ä\0"), np.str_("\ud800"), np.bytes_(b""), np.bytes_(b"a\0"), np.void(b"ab\0"),
    ml_dtypes.bfloat16(1.5), ml_dtypes.float8_e4m3fn(2), ml_dtypes.int4(-3),
    np.array(0x7FA00001, np.uint32).view(np.float32)[()], np.array(0xFFF0000000000001, np.uint64).view(np.float64)[()],
]  # fmt: skip


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_numpy_scalars_keep_their_exact_type(value: Any) -> None:
    """P7: NumPy scalars are neither Python numbers nor arrays, before and after; their bits stay."""
    back = round_trip([value])[0]
    assert same(back, value)
    if not isinstance(value, np.void) and value.dtype != np.dtype("m8"):  # these cannot be keys
        assert same(next(iter(round_trip({value: 1}))), value)


@pytest.mark.parametrize("pattern", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF00000DEADBEEF, 0x8000000000000000])
def test_python_floats_keep_their_bits(pattern: int) -> None:
    """P7: NaN payloads and the sign of zero survive in floats, in complex numbers and in keys."""
    value = float(np.array(pattern, np.uint64).view(np.float64))
    for state in (value, complex(value, value), {value: 1}, [value, (value,)]):
        assert same(round_trip(state), state)


def test_key_types_and_order_are_kept() -> None:
    """P7: '1' and 1 are different keys, bool and None stay what they are, and the order is the caller's."""
    state = {"1": "a", 1: "b", None: "c", 2.5: "d", False: "e", "z": 1, "a": 2, (1, ("x", None)): 3, b"": 4, "": 5}
    assert same(round_trip(state), state)
    assert same(list(round_trip({True: 0})), [True])
    assert same(list(round_trip({1.0: 0})), [1.0])
    assert same(round_trip(Counter({25: 1, "x": -2})), Counter({25: 1, "x": -2}))
    for key in ("test/test", "../../evil", "/abs", "a//b", "C:\\x", ".", "~user", "a.b", "\n", "\0"):
        assert same(round_trip({key: {key: 1}}), {key: {key: 1}})


ATOMS = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.complex_numbers()
    | st.text() | st.text(st.characters()) | st.binary(max_size=2000) | st.builds(bytearray, st.binary(max_size=8))
    | st.builds(np.float32, st.floats(width=32)) | st.builds(np.int64, st.integers(-(2**63), 2**63 - 1))
    | st.builds(lambda n: np.arange(n, dtype=np.int16), st.integers(0, 4))
)  # fmt: skip
PLAIN_KEYS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
KEYS = st.recursive(PLAIN_KEYS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mapping = st.dictionaries(KEYS, inner, max_size=4)
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | mapping
        | mapping.map(OrderedDict)
        | mapping.map(lambda items: defaultdict(int, items))
        | st.sets(PLAIN_KEYS, max_size=4)
        | st.frozensets(PLAIN_KEYS, max_size=4)
    )


@given(st.recursive(ATOMS, containers, max_leaves=12))
def test_any_nested_state_comes_back(state: object) -> None:
    """P7: any nesting of what can be stored comes back with the same types, bits and order, again and again."""
    first = round_trip(state)
    assert same(first, state)
    assert same(skeleton(first), skeleton(state))


@given(st.sets(PLAIN_KEYS, max_size=8))
def test_sets_have_one_encoding(members: set[Any]) -> None:
    """The node of a set depends on its members, not on the order that a process iterates in."""
    other_way: set[Any] = set()
    for member in list(members)[::-1]:
        other_way.add(member)
    assert same(skeleton(members), skeleton(other_way))


def test_random_states() -> None:
    """The random states of Python and NumPy come back and give the same numbers."""
    python, legacy = random.getstate(), np.random.get_state()
    generator = np.random.default_rng(5)
    generators = [generator.bit_generator.state, np.random.Generator(np.random.MT19937(1)).bit_generator.state]
    state = {"python": python, "legacy": legacy, "new": generators}
    back = round_trip(state)
    assert same(back, state)
    random.setstate(back["python"])
    np.random.set_state(back["legacy"])
    again = np.random.default_rng()
    again.bit_generator.state = back["new"][0]
    assert again.random() == generator.random()


def test_the_same_array_twice_is_stored_once() -> None:
    """Tied arrays share an index and come back tied; a partial overlap is an array of its own."""
    w = np.arange(6.0)
    state = {"a": w, "b": {"c": w}, "part": w[:3], "view": w[:], "bytes": [b"x" * 2000] * 2}
    flat = flatten(state, "state")
    assert len(flat.arrays) == 3
    back = round_trip(state)
    assert back["a"] is back["b"]["c"] is back["view"]
    assert back["part"].base is not back["a"]
    assert same(back, state)


def test_making_is_asked_once_for_each_array() -> None:
    """An array that several leaves refer to is made once, even when it is None."""
    asked: list[int] = []
    unflatten([{"array": 0}, {"array": 1}, {"array": 0}, {"tuple": [{"array": 1}]}], asked.append, 2)
    assert asked == [0, 1]


def refuse(state: object, root: str = "state") -> list[str]:
    """The lines of the refusal, one for each path."""
    with pytest.raises(InvalidRecordError) as error:
        flatten(state, root)
    return [line.strip() for line in str(error.value).splitlines()[1:]]


def method_owner() -> Any:
    class Owner:
        def scale(self) -> int:
            return 1

    return Owner()


def test_all_refusals_are_found_in_one_pass() -> None:
    """P7: one error names every path that cannot be stored, with the reason, and what can be stored is not named."""
    owner = method_owner()
    with open(__file__) as file:
        state = {
            "ok": {"lr": 0.1, "w": np.ones(2)}, "fn": lambda: 1, "scale": owner.scale, "ref": weakref.ref(owner),
            "weak": weakref.WeakMethod(owner.scale), "gen": (i for i in [0]), "file": file, "obj": np.array([None]),
            "deep": [{"x": (1, {"y": object()})}], "type": int, "part": functools.partial(int), "range": range(3),
            "enum": Colour.RED, "level": Level.LOW, "point": Point(1, 2), "config": Config(0.1), "mydict": MyDict(a=1),
            "myint": MyInt(3),
        }  # fmt: skip
        lines = refuse(state, "trainer")
    reasons = dict(line.split(": ", 1) for line in lines)
    assert set(reasons) == {f"trainer.{key}" for key in state.keys() - {"ok", "deep"}} | {"trainer.deep.0.x.1.y"}
    expected = {
        "fn": "code", "scale": "code", "enum": ".value", "level": ".value", "point": "_asdict()", "config": "asdict",
        "mydict": "subclass of dict", "myint": "subclass of int", "obj": "Python objects", "file": "TextIOWrapper",
    }  # fmt: skip
    for key, words in expected.items():
        assert words in reasons[f"trainer.{key}"]


def test_what_has_a_state_dict_is_told_so() -> None:
    """The commonest mistake of all, the model in the place of its state, gets the answer with the error."""

    class Model:
        def state_dict(self) -> dict[str, int]:
            return {}

    (line,) = refuse({"model": Model()})
    assert line.startswith("state.model: objects of type ")
    assert line.endswith("cannot be stored: store its .state_dict()")


def test_refused_scalars_keys_and_attributes() -> None:
    """P7: scalars without a portable form, unknown keys and members, factories and attributes are refused by path."""
    labelled: Any = OrderedDict(a=1)
    labelled.note = "lost"
    counter: Any = Counter("a")
    counter.total_seen = 3
    state = {
        "long": np.longdouble(1), "record": np.zeros(1, [("a", "i4")])[0], "sub": MyFloat64(1), "attr": labelled,
        "count": counter, "factory": defaultdict(lambda: 1), "partial": defaultdict(functools.partial(int), a=1),
        "keys": {frozenset(): 1, Colour.RED: 2, 1j: 3, (1, Level.LOW): 4, np.longdouble(1): 5}, "set": {1j, Colour.RED},
    }  # fmt: skip
    lines = refuse(state)
    assert len(lines) == 14
    assert any(line.startswith("state.attr: ") and "note" in line for line in lines)
    assert any(line.startswith("state.count: ") and "total_seen" in line for line in lines)
    assert any(line.startswith("state.keys.Colour.RED: ") for line in lines)
    assert any(line.startswith("state.set.1j: ") for line in lines)


def test_a_long_list_of_refusals_is_cut() -> None:
    """The error names the first 20 paths and counts the others."""
    lines = refuse([object()] * 50)
    assert len(lines) == 21
    assert lines[0].startswith("state.0: ")
    assert lines[-1] == "... and 30 more"


def test_cycles_and_deep_nesting_are_refused() -> None:
    """P7: a state that contains itself or nests deeper than 200 levels is refused by path; siblings may repeat."""
    cycle: dict[str, Any] = {"a": [1]}
    cycle["a"].append({"me": cycle})
    assert refuse(cycle) == ["state.a.1.me: it contains itself"]
    shared = [1]
    assert same(round_trip([shared, shared]), [[1], [1]])
    assert len(refuse(nest(201, lambda inner: [inner]))) == 1
    assert "deeper than 200" in refuse(nest(5000, lambda inner: {"k": inner}))[0]
    assert "deeper than 16" in refuse({nest(17, lambda inner: (inner,)): 1})[0]


def nest(levels: int, wrap: Callable[[Any], Any]) -> Any:
    inner: Any = None
    for _ in range(levels):
        inner = wrap(inner)
    return inner


@pytest.mark.parametrize(
    "wrap",
    [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: OrderedDict(k=x), lambda x: defaultdict(int, k=x)],
)
def test_the_deepest_state_that_is_accepted_comes_back(wrap: Callable[[Any], Any]) -> None:
    """200 levels go through JSON and back, on a thread of their own as in a save."""
    found: list[object] = []
    state = nest(200, wrap)

    def trip() -> None:
        text = msgspec.json.encode(skeleton(state))
        found.append(msgspec.json.encode(skeleton(unflatten(msgspec.json.decode(text), lambda index: index))) == text)

    thread = threading.Thread(target=trip)
    thread.start()
    thread.join()
    assert found == [True]


def test_a_dictionary_that_changes_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: a dictionary that grows or shrinks while it is read gives an error, not a mixture."""
    state: dict[str, Any] = {"w": np.ones(2), "x": 1}
    real = arrays.source

    def meanwhile(value: object) -> Any:
        state.pop("x", None)
        return real(value)

    monkeypatch.setattr(tree, "source", meanwhile)
    assert "changed while it was read" in refuse(state)[0]


BITS = "7ff8000000000000"
HOSTILE: list[Any] = [
    {}, {"pickle": "gASV"}, {"dict": [], "list": []}, {"array": 0, "metadata": None}, {"list": [1]}, {"value": 1},
    {"array": 5}, {"array": -1}, {"array": True}, {"array": "0"}, {"array": 0.0}, {"array": None},
    {"dict": {}}, {"dict": [1]}, {"dict": [[1]]}, {"dict": [[1, 2, 3]]}, {"dict": [["a", 1], ["a", 2]]},
    {"dict": [[1, 1], [True, 2]]}, {"dict": [[[1], 2]]}, {"dict": [[{"dict": []}, 2]]}, {"dict": [[{"array": 0}, 1]]},
    {"dict": [[{"set": []}, 1]]}, {"dict": [[{"scalar": ["|V1", "AA=="]}, 1]]},
    {"dict": [[{"complex": [BITS, BITS]}, 1]]},
    {"dict": [[{"scalar": ["<m8", "AwAAAAAAAAA="]}, 1]]}, {"set": [{"tuple": [{"scalar": ["|V1", "AA=="]}]}]},
    {"defaultdict": ["eval", []]}, {"defaultdict": [None, []]}, {"defaultdict": [["int"], []]}, {"defaultdict": []},
    {"odict": [], "metadata": {"x": 1}}, {"odict": [], "extra": 1}, {"counter": [["a"]]}, {"tuple": 1}, {"tuple": "ab"},
    {"set": [[1]]}, {"set": [1, 1]}, {"set": [1, True]}, {"frozenset": [{"array": 0}]}, {"set": None},
    {"int": 5}, {"int": "5"}, {"int": "0x5"}, {"int": "0X20000000000000"}, {"int": "0x020000000000000"},
    {"int": "0x2_0000000000000"}, {"int": " 0x20000000000000"}, {"int": None}, {"int": "__import__('os')"},
    {"float": "nan"}, {"float": "3ff0000000000000"}, {"float": "7FF8000000000000"}, {"float": "7ff8"}, {"float": 1.5},
    {"complex": ["3ff0000000000000"]}, {"complex": "3ff0"}, {"complex": [1, 2]}, {"surrogates": "/w=="},
    {"bytes": "YQ"}, {"bytes": "YR=="}, {"bytes": "Y Q=="}, {"bytes": "ÿÿÿÿ"}, {"bytes": [97]}, {"bytearray": None},
    {"scalar": ["float32", "AAAA"]}, {"scalar": ["O", "AAAAAAAAAAA="]}, {"scalar": [">f4", "AACAPw=="]},
    {"scalar": ["float32"]}, {"scalar": "float32"}, {"scalar": [1, "AA=="]}, {"scalar": ["<U1", "////fw=="]},
    {"scalar": ["object", "AA=="]}, {"size": [1.5]}, {"size": [True]}, {"size": 3}, {"size": None},
    2**53, -(2**60), float("nan"), float("inf"), "\ud800", b"raw", (1, 2), {1: 2},
]  # fmt: skip


@pytest.mark.parametrize("node", HOSTILE, ids=repr)
def test_hostile_skeletons_are_format_errors(node: object) -> None:
    """P8: whatever flatten does not write is refused when it is read, wherever it stands, and never evaluated."""
    for wrapped in (node, [node], {"dict": [["k", {"tuple": [node]}]]}, {"odict": [], "metadata": node}):
        with pytest.raises(FormatError):
            unflatten(wrapped, lambda index: index, 1)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"tuple": [x]}, lambda x: {"dict": [["k", x]]}])
def test_hostile_depth(wrap: Callable[[Any], Any]) -> None:
    """P8: every walk over a skeleton has a bound on its depth."""
    deep = nest(100_000, wrap)
    walks: list[Callable[[Any], object]] = [
        lambda x: unflatten(x, lambda i: i),
        leaf_paths,
        lambda x: prune(x, ["nothing"]),
    ]
    for walk in walks:
        with pytest.raises(FormatError, match="deeper"):
            walk(deep)
    with pytest.raises(FormatError):
        unflatten({"dict": [[nest(100_000, lambda x: {"tuple": [x]}), 1]]}, lambda i: i)
    while deep is not None:  # taken apart by hand: freeing it at once would recurse in older Pythons
        deep = next(iter(deep.values())) if isinstance(deep, dict) else deep[-1]


TAGS = st.sampled_from(
    "dict tuple set int array scalar odict metadata bytes float counter defaultdict size".split()  # noqa: SIM905
)
JSON_DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TAGS, inner, max_size=2),
)


@given(JSON_DOCUMENTS)
def test_random_skeletons_load_or_are_format_errors(node: object) -> None:
    """P8: no JSON document makes reading fail in any other way; what loads is what its node says."""
    try:
        state = unflatten(node, long_bytes, 4)
    except FormatError:
        return
    nodes = skeleton(state)
    assert same(skeleton(unflatten(nodes, long_bytes)), nodes)


def long_bytes(index: int) -> bytes:
    return b"x" * (2000 + index)


def test_paths_of_arrays() -> None:
    """Each array knows the dotted paths of all leaves that refer to it."""
    w = np.ones(2)
    state: Any = OrderedDict([("model", {"a.b": w, 0: [w, (np.ones(3),)]}), ("n", 1)])
    state._metadata = {"extra": b"y" * 2000}
    expected = {0: ["model.a.b", "model.0.0"], 1: ["model.0.1.0"], 2: ["_metadata.extra"]}
    assert leaf_paths(skeleton(state)) == expected
    assert leaf_paths(skeleton(w)) == {0: [""]}
    assert leaf_paths(skeleton({"a": 1})) == {}


STATE: dict[Any, Any] = {
    "encoder": {"w": b"w", "b": 2, "empty": {}},
    "encoder2": {"w": 3},
    "layer.0.weight": 4,
    "state": {0: {"m": 5}, 1: {"m": 6}},
    "list": [{"w": 7}, 8, (9, {"w": 10})],
    "dd": defaultdict(list, {"w": [11], "v": [12]}),
}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*"], STATE),
        (["encoder"], {"encoder": STATE["encoder"]}),
        (["encoder.*"], {"encoder": STATE["encoder"]}),
        (["encoder.empty", "encoder2"], {"encoder": {"empty": {}}, "encoder2": {"w": 3}}),
        (["state.0"], {"state": {0: {"m": 5}}}),
        (["layer.0"], {"layer.0.weight": 4}),
        (["*.m"], {"state": STATE["state"]}),
        (["state.[!0].m"], {"state": {1: {"m": 6}}}),
        (["list.2.1.w", "encoder.?"],
         {"encoder": {"w": b"w", "b": 2}, "list": [None, None, (None, {"w": 10})]}),
        (["dd.w"], {"dd": defaultdict(list, {"w": [11]})}),
        (["ENCODER", "enc", "state.00", ""], None),
        ([], None),
    ],
)  # fmt: skip
def test_pruning(patterns: list[str], expected: object) -> None:
    """Patterns select leaves or whole containers by path; dictionaries shrink, lists and tuples keep their length."""
    kept = prune(skeleton(STATE), patterns)
    assert same(unflatten(kept, lambda index: index), expected)
    assert same(unflatten(skeleton(STATE), lambda index: index), STATE), "the skeleton itself is as it was"


def test_pruning_keeps_metadata_and_single_leaves() -> None:
    """The attribute of an ordered dictionary stays with what is kept of it; a bare leaf matches the pattern for all."""
    state: Any = OrderedDict(a=1, b=2)
    state._metadata = {"": {"version": 2}}
    back: Any = unflatten(prune(skeleton(state), ["b"]), lambda index: index)
    assert same(back._metadata, {"": {"version": 2}})
    assert list(back) == ["b"]
    assert prune(5, ["*"]) == 5
    assert prune(5, ["x"]) is None


def test_torch_size_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape that torch wrote is a tuple where torch is not imported."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert same(unflatten({"size": [2, 3]}, lambda index: index), (2, 3))


def test_json_text_keeps_floats_floats() -> None:
    """A whole number that is a float is written so that any JSON reader sees a float."""
    for value in (1.0, -0.0, 1e22, 1e300, 5e-324, 123456789012345680.0):
        text = msgspec.json.encode(skeleton(value))
        assert b"." in text or b"e" in text
        assert same(msgspec.json.decode(text), value)


def test_many_small_arrays() -> None:
    """100,000 arrays are taken apart in one go, and those of one shape share their description."""
    state = {f"layer.{i}": np.zeros(2) for i in range(100_000)}
    flat = flatten(state, "state")
    assert len(flat.arrays) == len(state)
    assert len({id(found.spec) for found in flat.arrays}) == 1
