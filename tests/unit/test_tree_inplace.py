"""Loading into an existing state: compared as a whole first, then filled in place."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest

from ckptstore.arrays import ArraySpec, Destination
from ckptstore.errors import FormatError, InvalidRecordError
from ckptstore.tree import NOTHING, FlatState, fill_into, flatten, match_into, prune
from tests.unit.exact import read_all, reload, same


def load_into(state: object, target: object, *, strict: bool = True, skipped: list[str] | None = None) -> Any:
    """What a load in place does: compare, fill the arrays, then update the containers."""
    flat = flatten(state, "r")
    return load_skeleton(flat.skeleton, flat, target, strict=strict, skipped=skipped)


def load_skeleton(skeleton: object, flat: FlatState, target: object, **options: Any) -> Any:
    specs = [found.spec for found in flat.arrays]
    for index, targets in match_into(skeleton, specs, target, "r", **options).items():
        for existing in targets:
            destination = Destination.into_existing(specs[index], existing)
            destination.buffer[:] = read_all(flat.arrays[index])
            assert destination.finish() is existing
    return fill_into(skeleton, target, lambda index: reload(flat.arrays[index]), len(specs))


def problems(state: object, target: object, **options: Any) -> dict[str, str]:
    """The refusal by path; the target must be as it was."""
    flat = flatten(state, "r")
    before = flatten(target, "r")
    kept = [read_all(found) for found in before.arrays]
    with pytest.raises(InvalidRecordError) as error:
        match_into(flat.skeleton, [found.spec for found in flat.arrays], target, "r", **options)
    after = flatten(target, "r")
    assert same(after.skeleton, before.skeleton)
    assert [read_all(found) for found in after.arrays] == kept
    lines = [line.strip().split(": ", 1) for line in str(error.value).splitlines()[1:]]
    return {line[0]: line[-1] for line in lines}


def test_everything_is_updated_in_place() -> None:
    """Arrays, dictionaries and lists stay the objects they were and hold what the checkpoint holds."""
    state = {"w": np.arange(6.0).reshape(2, 3), "s": {0: [np.ones(2, np.int8), 5]}, "n": 3, "t": (1, np.full(3, 2.0))}
    target: dict[str, Any] = {
        "w": np.zeros((3, 2)).T,
        "s": {0: [np.zeros(2, np.int8), 0]},
        "n": 0,
        "t": (0, np.zeros(3)),
    }
    parts = (target["w"], target["s"], target["s"][0], target["s"][0][0], target["t"][1])
    assert load_into(state, target) is target
    assert same(target, state)
    now = (target["w"], target["s"], target["s"][0], target["s"][0][0], target["t"][1])
    assert all(new is old for new, old in zip(now, parts, strict=True))


def test_what_is_not_wanted_is_left_out() -> None:
    """NOTHING in a target stands for any value, and stays."""
    first, last = np.zeros(2), np.zeros(3)
    state = {"l": [np.ones(2), {"x": np.ones(4)}, 5, np.ones(3)], "t": (1, np.ones(2))}
    target = {"l": [first, NOTHING, NOTHING, last], "t": NOTHING}
    assert load_into(state, target, strict=False) is target
    assert first.tolist() == [1, 1]
    assert last.tolist() == [1, 1, 1]
    assert [target["l"][1], target["l"][2], target["t"]] == [NOTHING] * 3


def test_plain_leaves_are_replaced_whatever_they_are() -> None:
    """A plain value takes the place of any plain value, and its type comes from the checkpoint."""
    state = {
        "a": 1,
        "b": b"y" * 5000,
        "c": None,
        "d": np.float32(2),
        "e": {1, 2},
        "f": float("nan"),
        "g": bytearray(3000),
    }
    target = {"a": "x", "b": b"", "c": 2.5, "d": 3, "e": None, "f": 0, "g": None}
    load_into(state, target)
    assert same(target, state)


def test_tuples_are_rebuilt_only_when_they_change() -> None:
    """A tuple of arrays stays, a tuple with another plain value is a new one around the same arrays."""
    array = np.zeros(2)
    target: dict[str, Any] = {"same": (np.zeros(2),), "new": (0, array)}
    kept = target["same"]
    load_into({"same": (np.ones(2),), "new": (1, np.ones(2))}, target)
    assert target["same"] is kept
    assert target["new"][1] is array
    assert same(target, {"same": (np.ones(2),), "new": (1, np.ones(2))})
    assert load_into((1, 2), (3, 4)) == (1, 2)
    assert load_into(5, 6) == 5


def test_all_differences_are_listed_and_nothing_is_touched() -> None:
    """Missing, unexpected and mismatching paths are all in one error, and the target is as it was."""
    w = np.ones((2, 2), np.float32)
    state = {
        "same": w, "shape": w + 1, "dtype": w + 2, "lost": w + 3, "deep": {"x": [1, 2, 3]}, "array": w + 4, "plain": 1,
        "dict": {}, "list": [1], "tuple": (1,), "long": [1, 2], "short": (1,), "text": "a", "bytes": b"x" * 2000,
    }  # fmt: skip
    target = {
        "same": np.zeros((2, 2), np.float32), "shape": np.zeros(4, np.float32), "dtype": np.zeros((2, 2)), "extra": 1,
        "deep": {"y": 1}, "array": 7, "plain": np.zeros(1), "dict": [], "list": (1,), "tuple": [1], "long": [1],
        "short": (1, 2), "text": {}, "bytes": [1],
    }  # fmt: skip
    found = problems(state, target)
    kinds = {key: text.split()[-1] for key, text in found.items()}
    assert set(found) == {
        "r.shape", "r.dtype", "r.lost", "r.extra", "r.deep.x", "r.deep.y", "r.array", "r.plain", "r.dict", "r.list",
        "r.tuple", "r.long.1", "r.short.1", "r.text", "r.bytes",
    }  # fmt: skip
    assert "missing" in found["r.lost"]
    assert "unexpected" in found["r.extra"]
    assert "[2, 2]" in found["r.shape"]
    assert "float64" in found["r.dtype"]
    assert kinds["r.dict"] == "here"
    with pytest.raises(FormatError):
        match_into({"array": 0}, [], np.ones(1), "r")


def test_not_strict_leaves_out_what_only_one_side_has() -> None:
    """``strict=False`` skips missing and unexpected entries and reports them; a wrong shape is still an error."""
    state = {"w": np.ones(2), "lost": {"a": np.ones(3)}, "list": [1, 2, 3], "tuple": (1, 2)}
    target: dict[str, Any] = {"w": np.zeros(2), "extra": [0], "list": [0], "tuple": (0, 0, 7)}
    skipped: list[str] = []
    load_into(state, target, strict=False, skipped=skipped)
    assert same(target, {"w": np.ones(2), "extra": [0], "list": [1], "tuple": (1, 2, 7)})
    assert sorted(line.split(":")[0] for line in skipped) == ["r.extra", "r.list.1", "r.list.2", "r.lost", "r.tuple.2"]
    assert set(problems(state, {"w": np.zeros(3)}, strict=False)) == {"r.w"}


def test_keys_are_compared_by_value_and_type() -> None:
    """'1' and 1 are different entries here too."""
    assert set(problems({"1": 1, 1: 2}, {"1": 0})) == {"r.1"}
    target: dict[Any, Any] = {1: 0, "1": 0}
    load_into({"1": "text", 1: "int"}, target)
    assert target == {1: "int", "1": "text"}


def test_any_dictionary_takes_the_entries_of_any_other() -> None:
    """A dict is filled from an OrderedDict and so on: which class the target has is the caller's business."""
    for target in ({"a": 0}, OrderedDict(a=0), defaultdict(int, a=0), Counter({"a": 0})):
        for state in ({"a": 1}, OrderedDict(a=1), defaultdict(None, a=1), Counter({"a": 1})):
            found = load_into(state, target)
            assert found is target
            assert found["a"] == 1


def test_metadata_of_an_ordered_dictionary() -> None:
    """The attribute that torch keeps versions in is taken over."""
    state: Any = OrderedDict(w=np.ones(2))
    state._metadata = OrderedDict({"": {"version": 2}})
    target: Any = OrderedDict(w=np.zeros(2))
    load_into(state, target)
    assert same(target, state)


def test_arrays_tied_in_the_checkpoint() -> None:
    """One stored array fills every target that it belongs to, once for each memory."""
    w, tied, first, second = np.ones(3), np.zeros(3), np.zeros(3), np.zeros(3)
    flat = flatten({"a": w, "b": w}, "r")
    specs = [found.spec for found in flat.arrays]
    assert len(match_into(flat.skeleton, specs, {"a": tied, "b": tied}, "r")[0]) == 1
    assert len(match_into(flat.skeleton, specs, {"a": first, "b": second}, "r")[0]) == 2
    load_into({"a": w, "b": w}, {"a": first, "b": second})
    assert same([first, second], [w, w])


def test_arrays_tied_in_the_target_only() -> None:
    """Two stored arrays cannot be loaded into one memory: the later one would win silently."""
    tied = np.zeros(3)
    for strict in (True, False):
        found = problems({"a": np.ones(3), "b": np.ones(3) * 2}, {"a": tied, "b": tied}, strict=strict)
        assert set(found) == {"r.b"}
        assert "same memory as r.a" in found["r.b"]


def test_read_only_targets_are_refused_before_anything_is_written() -> None:
    """A target that cannot be written is one more difference in the list."""
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    assert set(problems({"a": np.ones(2), "b": np.ones(2)}, {"a": np.zeros(2), "b": frozen})) == {"r.b"}


def test_arrays_without_elements_fit() -> None:
    """Steps of an empty array are 0 or anything: they do not make it an expanded view."""
    state, target = {"e": np.zeros((0, 3))}, {"e": np.empty((0, 3))}
    assert set(target["e"].strides) == {0}
    assert load_into(state, target) is target
    row = np.broadcast_to(np.zeros(1), (3,)).view()
    row.flags.writeable = True
    assert set(problems({"e": np.zeros(3)}, {"e": row})) == {"r.e"}


def test_part_of_a_checkpoint_into_a_whole_state() -> None:
    """What pruning left out stays as it is in the target, in lists and tuples too."""
    state = {"a": np.ones(2), "b": np.ones(2) * 2, "l": [np.ones(1), np.ones(1) * 2], "t": (3, np.ones(1))}
    target = {"a": np.zeros(2), "b": np.zeros(2), "l": [np.zeros(1), np.zeros(1)], "t": (0, np.zeros(1))}
    flat = flatten(state, "r")
    load_skeleton(prune(flat.skeleton, ["a", "l.1", "t.1"]), flat, target, strict=False)
    expected = {"a": np.ones(2), "b": np.zeros(2), "l": [np.zeros(1), np.ones(1) * 2], "t": (0, np.ones(1))}
    assert same(target, expected)


def test_malformed_skeletons_are_found_before_the_target_changes() -> None:
    """P8: a hostile node deep inside is an error while everything is still as it was."""
    target: dict[str, Any] = {"a": 1, "b": [2]}
    for bad in ({"int": "5"}, {"eval": "1"}, {"array": 3}, {"set": [[1]]}):
        for node in ({"dict": [["a", 9], ["b", [bad]]]}, {"odict": [["a", 9], ["b", [1]]], "metadata": bad}):
            with pytest.raises(FormatError):
                match_into(node, [ArraySpec("numpy", "int8", (1,))], target, "r")
    assert target == {"a": 1, "b": [2]}
