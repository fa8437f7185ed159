"""Values of other libraries: an installed package makes plain data of them, and the core imports none by itself."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore import foreign
from ckptstore.errors import InvalidRecordError
from ckptstore.options import check_metadata, flatten_all
from ckptstore.tree import flatten, unflatten

LIBRARY = """
class Array:
    def __init__(self, values):
        self.values = values
class Node(dict):
    pass
"""
ADAPTER = """
import numpy
import alien
calls = []
def convert(value):
    calls.append(value)
    return plain(value)
def plain(value):
    if isinstance(value, alien.Array):
        return numpy.array(value.values)
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(child) for child in value]
    return plain(vars(value)) if hasattr(value, "values_of_mine") else value
"""
Pair = namedtuple("Pair", "left right")


@dataclass
class Mine:
    """A class of the user's own that the adapter knows how to take apart."""

    inner: Any
    values_of_mine = True


@pytest.fixture
def alien(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A library, and the adapter for it with its installed metadata."""
    (tmp_path / "alien.py").write_text(LIBRARY)
    (tmp_path / "alien_adapter.py").write_text(ADAPTER)
    metadata = tmp_path / "alien_adapter-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: alien-adapter\nVersion: 1\n")
    points = "alien = alien_adapter:convert\nbroken_alien = alien_adapter_of_old:convert\n"
    (metadata / "entry_points.txt").write_text(f"[{foreign.GROUP}]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    foreign._points.cache_clear()
    yield importlib.import_module("alien")
    foreign._points.cache_clear()
    foreign.load.cache_clear()
    for name in ("alien", "alien_adapter"):
        sys.modules.pop(name, None)


def loaded(state: object) -> Any:
    """A state as it would come back."""
    flat = flatten(state, "m")
    return unflatten(flat.skeleton, lambda index: flat.arrays[index].array)  # type: ignore[union-attr]


def test_a_state_without_such_values_asks_nobody(alien: Any) -> None:
    """Only what was refused is looked up, and only then is an adapter imported."""
    flatten({"w": np.ones(2), "n": 1}, "m")
    assert "alien_adapter" not in sys.modules
    assert foreign._points.cache_info().currsize == 0
    with pytest.raises(InvalidRecordError, match=r"m\.f: a function is code"):
        flatten({"f": lambda: 0}, "m")
    assert "alien_adapter" not in sys.modules


@pytest.mark.parametrize("where", ["plain", "base", "tuple", "dataclass", "deep", "root"])
def test_what_an_adapter_knows_is_stored(where: str, alien: Any) -> None:
    """By the class of what was refused, by a base of it, or by what is inside of it; once for the record."""
    array = alien.Array([1, 2])
    states = {
        "plain": {"x": array, "n": [1]},
        "base": {"x": type("Sub", (alien.Array,), {"__module__": "mine"})([1, 2])},
        "tuple": {"x": Pair(1, array)},
        "dataclass": {"x": Mine(array)},
        "deep": {"x": Pair(Pair([{"y": Mine([array])}], None), 2)},
        "root": array,
    }
    wanted = {
        "plain": {"x": [1, 2], "n": [1]},
        "base": {"x": [1, 2]},
        "tuple": {"x": [1, [1, 2]]},
        "dataclass": {"x": {"inner": [1, 2]}},
        "deep": {"x": [[[{"y": {"inner": [[1, 2]]}}], None], 2]},
        "root": [1, 2],
    }

    def lists(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: lists(child) for key, child in value.items()}
        return (
            [lists(child) for child in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()
        )

    assert lists(loaded(states[where])) == wanted[where]
    assert len(importlib.import_module("alien_adapter").calls) == 1


def test_each_record_is_converted_for_itself(alien: Any) -> None:
    """A record without such values stays as it is, whatever is in the others."""
    kept = defaultdict(list, {"a": [1]})
    flats = flatten_all({"one": {"x": alien.Array([1])}, "two": kept})
    assert unflatten(flats["two"].skeleton, lambda index: None) == kept
    assert [list(call) for call in importlib.import_module("alien_adapter").calls] == [["one"]]


def test_what_is_refused_after_that_is_refused(alien: Any) -> None:
    """One try: what the adapter leaves as it is gets its path and reason, also where nobody knows the type."""
    with pytest.raises(InvalidRecordError, match=r"m\.f: a function is code") as caught:
        flatten({"x": alien.Array([1]), "f": lambda: 0, "s": {"t": Pair(1, lambda: 0)}}, "m")
    assert "m.x" not in caught.value.message
    cycle: list[Any] = [Pair(1, 2)]
    cycle.append(Pair(cycle, cycle))
    with pytest.raises(InvalidRecordError, match="the named tuple"):
        flatten(cycle, "m")


def test_metadata_is_not_converted(alien: Any) -> None:
    """Metadata are plain values: the message says what to do with an array there."""
    with pytest.raises(InvalidRecordError, match=r"metadata\.loss: [\s\S]*store the \.item\(\) of an array"):
        check_metadata({"loss": alien.Array([1])})
    assert "alien_adapter" not in sys.modules


def test_an_adapter_that_cannot_be_imported_leaves_the_refusal(alien: Any) -> None:
    """Its error is told beside it."""
    value = type("Array", (), {"__module__": "broken_alien.core"})()
    with pytest.raises(InvalidRecordError, match=r"m\.x: objects of type broken_alien\.core\.Array") as caught:
        flatten({"x": value}, "m")
    assert "alien_adapter_of_old:convert knows the broken_alien in it, but cannot be imported" in caught.value.message
    assert "No module named 'alien_adapter_of_old'" in caught.value.message


@pytest.mark.parametrize("where", ["dict", "inside"])
def test_a_change_meanwhile_is_noticed(where: str, alien: Any) -> None:
    """What the state was made from is watched, also inside of what the core cannot take apart."""
    inner: Any = {"x": alien.Array([1])}
    flat = flatten(inner if where == "dict" else {"p": Pair([Mine(inner)], 1)}, "m")
    assert flat.unchanged()
    inner["x"] = alien.Array([1])
    assert not flat.unchanged()
