"""One record of many ranks' parts: what each has, laid over what the others have; nothing lost, nothing guessed."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import CorruptionError, FormatError, InvalidArgumentError, InvalidRecordError, ShardedArray, keys
from ckptstore.arrays import Destination
from ckptstore.files import FileSource
from ckptstore.indexes import decode_index, encode_index
from ckptstore.known import Known
from ckptstore.manifest import RecordEntry, RecordIndex
from ckptstore.merge import merge_indexes
from ckptstore.pipeline import Meter
from ckptstore.reader import array_specs, load_arrays, read_index
from ckptstore.shards import ListPart
from ckptstore.stores import MemoryStore
from ckptstore.tree import flatten, unflatten
from ckptstore.writer import RecordWriter
from tests.unit.exact import same

CHUNK = 64 * 1024
Part = tuple[int, RecordIndex]


def write(store: MemoryStore, rank: int, state: Any, *, chunk_size: int = CHUNK, part: bool = True) -> Part:
    """What a rank writes of record "m", as the others read it."""
    writer = RecordWriter(
        store, f"{rank:032x}", Known(lambda attempt: {}), chunk_size=chunk_size, codec="auto", part=part
    )
    writer.write_state("m", flatten(state, "m", part=True))
    (entry,) = writer.settle()
    writer.close()
    return rank, read_index(store, entry, part=True)


def parts_of(*states: Any) -> tuple[MemoryStore, list[Part]]:
    store = MemoryStore()
    return store, [write(store, rank, state) for rank, state in enumerate(states)]


def load(store: MemoryStore, index: RecordIndex) -> Any:
    """What a reader makes of an index, which is encoded and decoded on the way."""
    digest, raw_length, stored = encode_index(index)
    entry = RecordEntry(
        name="m",
        kind=index.kind,
        attempt="a" * 32,
        digest=digest,
        raw_length=raw_length,
        stored_length=len(stored),
        arrays=len(index.arrays),
        chunks=len(index.chunks),
        bytes_state=index.nbytes,
        bytes_stored=0,
        boxes=index.boxes,
    )
    index = decode_index(stored, entry)
    targets = [Destination.allocate(spec) for spec in array_specs(index, entry.key)]
    load_arrays(store, [(index, {n: [target] for n, target in enumerate(targets)})], meter=Meter(None, 0))
    return unflatten(index.skeleton, lambda number: targets[number].finish(), len(targets))


def merged(*states: Any) -> Any:
    """What the states of ranks 0, 1, ... make together."""
    store, parts = parts_of(*states)
    return load(store, merge_indexes("m", parts))


# ---- any state, split in any way ----------------------------------------------------------------------------

ARRAYS = st.builds(
    lambda seed, dtype, shape: (
        np.random.default_rng(seed).integers(0, 99, shape).astype(dtype)  # many are equal: digests decide
    ),
    st.integers(0, 3),
    st.sampled_from(["f4", "i2", "?", ">f8"]),
    st.sampled_from([(), (3,), (0, 2), (5, 4), (60, 30), (2, 3, 4), (200, 100)]),
)
LEAVES = ARRAYS | st.sampled_from([None, True, 1, 1.0, -0.0, 2**70, float("nan"), "x", b"raw", 1 + 2j, b"long" * 900])
KEYS = st.sampled_from(["a", "b", "c", "d", 1, (2, "x"), None, 0.5, b"k"])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(KEYS, inner, max_size=4)
    return (
        dicts
        | dicts.map(lambda found: defaultdict(list, found))
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    )


STATES = st.dictionaries(KEYS, st.recursive(LEAVES, containers, max_leaves=8), max_size=5)


def split(value: Any, ranks: int, chance: random.Random, known: dict[int, Any]) -> list[Any]:
    """A value for each rank, such that together they are the value. Tied arrays stay tied."""
    if isinstance(value, (dict, defaultdict)):
        found: list[Any] = [type(value)(list) if isinstance(value, defaultdict) else {} for _ in range(ranks)]
        for key, child in value.items():
            having = chance.sample(range(ranks), chance.randint(1, ranks))
            for rank, piece in enumerate(split(child, ranks, chance, known)):
                if rank in having or isinstance(piece, (dict, list, tuple, ShardedArray)):
                    found[rank][key] = piece
        return found
    if isinstance(value, (list, tuple)):
        columns = [split(child, ranks, chance, known) for child in value]
        return [type(value)(column[rank] for column in columns) for rank in range(ranks)]
    if not isinstance(value, np.ndarray):
        return [value] * ranks
    if id(value) not in known:
        known[id(value)] = split_array(value, ranks, chance)
    return list(known[id(value)])


def split_array(array: Any, ranks: int, chance: random.Random) -> list[Any]:
    if chance.random() < 0.3:
        return [array.copy() for _ in range(ranks)]
    boxes = [((0,) * array.ndim, array.shape)]
    for _ in range(chance.randint(0, 5)):
        offset, shape = boxes[number := chance.randrange(len(boxes))]
        axes = [axis for axis, size in enumerate(shape) if size > 1]
        if axes:
            axis = chance.choice(axes)
            at = chance.randint(1, shape[axis] - 1)
            first, second, start = list(shape), list(shape), list(offset)
            first[axis], second[axis], start[axis] = at, shape[axis] - at, offset[axis] + at
            boxes[number : number + 1] = [(offset, tuple(first)), (tuple(start), tuple(second))]
    pieces: list[list[Any]] = [[] for _ in range(ranks)]
    for offset, shape in boxes:
        where = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        for rank in chance.sample(range(ranks), chance.choice([1, 1, 1, min(2, ranks)])):
            pieces[rank].append((offset, array[where + (...,)].copy()))  # noqa: RUF005
    return [ShardedArray(array.shape, array.dtype, mine) for mine in pieces]


def ordered(value: Any) -> Any:
    """With the keys of dictionaries in one order: ranks that share no key leave it open."""
    if isinstance(value, dict):
        pairs = sorted(((key, ordered(child)) for key, child in value.items()), key=lambda pair: repr(pair[0]))
        made: Any = defaultdict(value.default_factory) if isinstance(value, defaultdict) else {}
        made.update(pairs)
        return made
    return type(value)(map(ordered, value)) if isinstance(value, (list, tuple)) else value


@given(state=STATES, ranks=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_any_state_split_over_ranks_is_that_state(state: Any, ranks: int, seed: int) -> None:
    """P7: dicts by key, lists by place, arrays by box or whole, replicas once: together they are what was split."""
    state["tied"] = [array := np.arange(300.0), array]
    found = merged(*split(state, ranks, random.Random(seed), {}))
    assert same(ordered(found), ordered(state))
    assert found["tied"][0] is found["tied"][1]


def test_order_of_keys() -> None:
    """The order of every rank is kept where they agree; a rank's own keys come in their places."""
    assert list(merged(OrderedDict(a=1, d=4), OrderedDict(b=2, c=3, d=4))) == ["a", "b", "c", "d"]
    assert list(merged({"a": 1, "b": 2}, {"b": 2, "a": 1})) == ["a", "b"]


def test_lists_of_which_each_rank_has_some_items() -> None:
    """By position, however they are spread; nested ones, pieces and what several have too."""
    one = np.arange(6.0).reshape(2, 3)
    states = [
        {"l": ListPart({1: {"lr": 0.1}, 0: ListPart({0: "a"})}), "same": [1, 2]},
        {"l": ListPart({0: ListPart({1: one}), 2: ShardedArray((2, 3), one.dtype, [((0, 0), one[:1])])})},
        {"l": ListPart({1: {"lr": 0.1, "betas": (1, 2)}, 2: ShardedArray((2, 3), one.dtype, [((1, 0), one[1:])])})},
    ]
    store, parts = parts_of(*states)
    found = load(store, merge_indexes("m", parts))
    assert same(found, {"l": [["a", one], {"lr": 0.1, "betas": (1, 2)}, one], "same": [1, 2]})


def test_a_list_in_parts_is_nothing_but_a_part() -> None:
    """P7, P8: refused outside of ranks, with a gap, and where a store says that a record has one."""
    with pytest.raises(InvalidRecordError, match=r"m\.l: part of a list"):
        flatten({"l": ListPart({0: 1})}, "m")
    _, parts = parts_of({"l": ListPart({0: 1, 3: 4})}, {"l": ListPart({1: 2})})
    with pytest.raises(InvalidRecordError, match=r"m\.l: no rank has item 2"):
        merge_indexes("m", parts)
    with pytest.raises(FormatError):
        unflatten({"items": [[0, 1]]}, lambda number: None)
    for wrong in ({"a": 1}, {-1: 1}, {True: 1}):
        with pytest.raises(InvalidArgumentError):
            ListPart(wrong)  # type: ignore[arg-type]


def test_metadata_of_ordered_dicts() -> None:
    """``_metadata`` of a state_dict is merged like the rest."""
    states: list[Any] = [OrderedDict(a=1), OrderedDict(b=2), OrderedDict(c=3)]
    states[0]._metadata = {"": {"version": 1}}
    states[1]._metadata = {"x": {"version": 2}}
    found: Any = merged(*states)
    assert found._metadata == {"": {"version": 1}, "x": {"version": 2}}
    assert merged(Counter(a=2), Counter(b=1)) == Counter(a=2, b=1)


def test_replicas_are_stored_once() -> None:
    """The same content on four ranks, big, small and tiny, costs what one sent; packed with other neighbours."""
    big, small, tiny = np.arange(50_000.0), np.arange(5_000.0), np.array([[1], [2]], "f4")
    states = [{"own": {rank: np.full(10 + rank, rank)}, "big": big, "small": small, "tiny": tiny} for rank in range(4)]
    store, parts = parts_of(*states)
    index = merge_indexes("m", parts)
    assert same(load(store, index)["own"], {rank: np.full(10 + rank, rank) for rank in range(4)})
    assert index.nbytes == big.nbytes + small.nbytes + tiny.nbytes + sum(8 * (10 + rank) for rank in range(4))
    assert len({chunk.digest for chunk in index.chunks}) == len(index.chunks)
    assert all(chunk.attempt == f"{0:032x}" for chunk in index.chunks if chunk.raw_length == CHUNK)
    assert index.format == 1
    assert all(not array.digest for array in index.arrays if array.shape == (2, 1))


def test_ties_of_one_rank_are_kept_unless_another_denies_them() -> None:
    """Leaves are one array if a rank says so, whoever has the other pieces; never against what a rank says."""
    array = np.arange(12.0)
    front, back = (
        ShardedArray((12,), "float64", [((0,), array[:6])]),
        ShardedArray((12,), "float64", [((6,), array[6:])]),
    )
    nothing = [ShardedArray((12,), "float64", []) for _ in range(2)]
    found = merged(
        {"p": front, "q": front}, {"p": back, "q": back}, {"p": nothing[0], "q": nothing[1]}, {"p": nothing[1]}
    )
    assert found["p"] is found["q"]
    assert same(found["p"], array)
    found = merged({"p": array, "q": array}, {"p": array.copy()}, {"q": array.copy()})
    assert found["p"] is found["q"]
    found = merged({"p": array, "q": array}, {"p": array.copy(), "q": array.copy()})
    assert found["p"] is not found["q"]
    assert same(found["q"], array)


def test_a_file_on_several_ranks(tmp_path: Any) -> None:
    """A file record that several ranks wrote is one if it is the same file."""
    (tmp_path / "f").write_bytes(b"content" * 1000)
    store = MemoryStore()
    with FileSource(tmp_path / "f") as source:
        parts = [write(store, rank, source) for rank in range(2)]
    assert merge_indexes("m", parts).arrays == parts[0][1].arrays
    (tmp_path / "f").write_bytes(b"Content" * 1000)
    with FileSource(tmp_path / "f") as source:
        parts.append(write(store, 2, source))
    with pytest.raises(InvalidRecordError, match="rank 0 and rank 2 have different content"):
        merge_indexes("m", parts)
    with pytest.raises(InvalidRecordError, match="a file on some ranks and a state on others"):
        merge_indexes("m", [parts[0], write(store, 1, {})])


# ---- what does not fit --------------------------------------------------------------------------------------


def box(offset: Sequence[int], *shape: int, value: float = 0) -> ShardedArray:
    return ShardedArray((4, 4), "float32", [(offset, np.full(shape, value, "f4"))])


CONFLICTS: dict[str, tuple[list[Any], str]] = {
    "value": ([{"a": {"n": 1}}, {}, {"a": {"n": 2}}], r"m\.a\.n: rank 0 has 1, rank 2 2"),
    "type of value": ([{"n": 1}, {"n": 1.0}], r"m\.n: rank 0 has 1, rank 1 1\.0"),
    "sign": ([{"n": 0.0}, {"n": -0.0}], r"m\.n: rank 0 has 0\.0, rank 1 -0\.0"),
    "set": ([{"n": {1}}, {"n": {2}}], r"m\.n: rank 0 has \{1\}, rank 1 \{2\}"),
    "node": ([{"n": {}}, {"n": np.zeros(2)}], r"m\.n: rank 0 has a dict, rank 1 an array"),
    "dictionary": ([{}, OrderedDict()], r"m: rank 0 has a dict, rank 1 an odict"),
    "factory": ([defaultdict(int), defaultdict(list)], r"m: rank 0 has 'int', rank 1 'list'"),
    "length": ([{"l": [1]}, {"l": [1, 2]}], r"m\.l: rank 0 has 1 items, rank 1 2"),
    "key": ([{1: "x"}, {True: "x"}], r"m: rank 0 has the key 1, rank 1 true"),
    "content": ([{"w": np.zeros(9)}, {"w": np.ones(9)}], r"m\.w: rank 0 and rank 1 have different content"),
    "large": ([{"w": np.zeros(99_999)}, {"w": np.ones(99_999)}], r"m\.w: rank 0 and rank 1 have different content"),
    "dtype": (
        [{"w": np.zeros(9, "f4")}, {"w": np.zeros(9, "i4")}],
        r"rank 0 has numpy float32 \[9\], rank 1 numpy int32",
    ),
    "shape": ([{"w": np.zeros(9)}, {"w": np.zeros(8)}], r"\[9\], rank 1 numpy float64 \[8\]"),
    "gap": ([{"w": box((0, 0), 2, 4)}, {"w": box((2, 0), 2, 3)}], r"m\.w: no rank has the elements \[2:4, 3:4\]"),
    "nobody": ([{"w": ShardedArray((2,), "f4", [])}] * 2, r"m\.w: no rank has the elements \[0:2\]"),
    "overlap": (
        [{"w": box((0, 0), 2, 4)}, {"w": box((2, 0), 2, 4)}, {"w": box((1, 1), 1, 2)}],
        r"m\.w: the pieces \[0:2, 0:4\] of rank 0 and \[1:2, 1:3\] of rank 2 overlap",
    ),
    "whole and part": ([{"w": np.zeros((4, 4), "f4")}, {"w": box((0, 0), 2, 4)}], "of rank 0 and .* of rank 1 overlap"),
    "replica": (
        [{"w": box((0, 0), 2, 4)}, {"w": box((0, 0), 2, 4, value=1)}, {"w": box((2, 0), 2, 4)}],
        r"m\.w: rank 0 and rank 1 have different content in the piece \[0:2, 0:4\]",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_conflicts_are_told_by_path_and_rank(case: str) -> None:
    """P2: what does not fit together is refused, and nothing is chosen."""
    states, message = CONFLICTS[case]
    _, parts = parts_of(*states)
    with pytest.raises(InvalidRecordError, match=message):
        merge_indexes("m", parts)


def test_what_cannot_be_proved_equal_is_refused() -> None:
    """The same content cut in another way, or packed without digests, might as well be another."""
    store = MemoryStore()
    array = np.arange(50_000.0)
    parts = [write(store, 0, {"w": array}), write(store, 1, {"w": array}, chunk_size=2 * CHUNK)]
    with pytest.raises(InvalidRecordError, match=r"m\.w: rank 0 and rank 1 both have it, and it cannot be proved"):
        merge_indexes("m", parts)
    parts = [write(store, rank, {"w": array[:9], rank: array[:rank]}, part=False) for rank in (2, 3)]
    with pytest.raises(InvalidRecordError, match="cannot be proved"):
        merge_indexes("m", parts)


def test_no_ranks_and_the_same_rank_twice() -> None:
    """Calls that make no sense end as errors too."""
    with pytest.raises(InvalidRecordError, match="no rank"):
        merge_indexes("m", [])
    _, parts = parts_of({"a": 1})
    with pytest.raises(InvalidRecordError, match="one rank"):
        merge_indexes("m", parts * 2)


def test_a_part_is_no_record() -> None:
    """P8: an index with a sharded array that is not whole is damage to everybody but those who merge."""
    store = MemoryStore()
    write(store, 0, {"w": box((0, 0), 2, 4)})
    key = next(info.key for info in store.list() if keys.parse_content_key(info.key)[1] == "records")  # type: ignore[index]
    stored = store.get(key)
    _, index = write(store, 0, {"w": box((0, 0), 2, 4)})
    digest, raw_length, _ = encode_index(index)
    entry = RecordEntry(
        name="m",
        kind="state",
        attempt=f"{0:032x}",
        digest=digest,
        raw_length=raw_length,
        stored_length=len(stored),
        arrays=1,
        chunks=1,
        bytes_state=32,
        bytes_stored=1,
        boxes=1,
    )
    assert decode_index(stored, entry, part=True) == index
    with pytest.raises(CorruptionError, match="do not make up the array"):
        decode_index(stored, entry)
