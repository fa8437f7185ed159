"""Values of other libraries: who makes plain data of them, so that a state can be given to ``save`` as it is.

The core knows no framework, and an adapter is imported by nobody inside. What joins them are entry points of installed
packages, of the group ``ckptstore.states``: the name is the top-level module of the classes that it is for (``jaxlib``,
``optax``), the object a function that takes a dict of states by record name and gives the same in containers and arrays
that the core knows. They are looked up only when something was refused: a state without such values costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "ckptstore.states"

Convert = Callable[[dict[str, Any]], dict[str, Any]]


@cache
def _points() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, point)
    return found


def _point_for(kind: type) -> EntryPoint | None:
    """That for a class, or for the nearest of its bases."""
    points = _points()
    modules = [str(base.__module__).partition(".")[0] for base in kind.__mro__]
    return next((points[module] for module in modules if module in points), None)


def point_for(refused: Iterable[object]) -> EntryPoint | None:
    """Whoever knows one of these values, or what is inside of one: a user's own named tuple may hold arrays of JAX."""
    return next((point for value in _with_contents(refused) if (point := _point_for(type(value))) is not None), None)


@cache
def load(point: EntryPoint) -> Convert:
    """The function. Whatever its import raises, if the library is missing, broken or too old."""
    convert: Convert = point.load()
    return convert


def containers(refused: Iterable[object]) -> list[tuple[Any, Any]]:
    """What can be changed from outside in and below these values, and what is in it now."""
    found: list[tuple[Any, Any]] = []
    for value in _with_contents(refused):
        if type(value) is list:
            found.append((value, list(value)))
        elif type(value) in (dict, OrderedDict, defaultdict):
            found.append((value, list(value.items())))  # type: ignore[attr-defined]
        elif is_dataclass(value) and hasattr(value, "__dict__"):
            found.append((vars(value), list(vars(value).items())))
    return found


def _with_contents(values: Iterable[object]) -> Iterator[object]:
    """These values and all inside of them, as far as tuples, lists, dicts and dataclasses go."""
    seen: set[int] = set()
    waiting = [iter(values)]
    while waiting:
        for value in waiting[-1]:
            if id(value) not in seen:
                seen.add(id(value))
                yield value
                waiting.append(iter(_contents(value)))
                break
        else:
            waiting.pop()


def _contents(value: object) -> list[object]:
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return []
