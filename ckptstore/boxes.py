"""Boxes: rectangular parts of an array, as offset and shape in the indexes of the whole. Pure geometry.

Everything is in elements and in Python's own ints, which do not overflow: boxes come from stores too. What is done
with many boxes is bounded by an :class:`Effort`, because boxes can be laid so that no order helps to compare them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, product
from typing import Any, NamedTuple

from ckptstore.errors import InvalidRecordError

EFFORT = 1_000_000  # comparisons, a second or two; real shardings need fewer than the share of each box
EFFORT_PER_BOX = 64


class Box(NamedTuple):
    """The elements from ``offset`` on, ``shape`` of them along each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def within(self, other: Box) -> Any:
        """Where it lies in the memory of a box around it, as an index that makes a view."""
        pairs = zip(self.offset, other.offset, self.shape, strict=True)
        return (*(slice(start - first, start - first + size) for start, first, size in pairs), ...)

    def __str__(self) -> str:
        ranges = (f"{start}:{stop}" for start, stop in zip(self.offset, self.stop, strict=True))
        return f"[{', '.join(ranges)}]"


class Effort:
    """How much more may be compared."""

    def __init__(self, boxes: int) -> None:
        self._left = EFFORT + EFFORT_PER_BOX * boxes

    def spend(self, count: int) -> None:
        """Raises InvalidRecordError when there is none left."""
        self._left -= count
        if self._left < 0:
            raise InvalidRecordError("the pieces are laid out in too complicated a way: cut along dimensions")


def whole(shape: tuple[int, ...]) -> Box:
    """The box of all elements."""
    return Box((0,) * len(shape), shape)


def intersection(one: Box, two: Box) -> Box | None:
    """The elements of both; None if there are none."""
    offset, shape = [], []
    for start, size, other, length in zip(one.offset, one.shape, two.offset, two.shape, strict=True):
        first = max(start, other)
        count = min(start + size, other + length) - first
        if count <= 0:
            return None
        offset.append(first)
        shape.append(count)
    return Box(tuple(offset), tuple(shape))


def misplaced(shape: tuple[int, ...], offset: object, size: object) -> str | None:
    """Why offset and shape are no box in an array of that shape, or None. A box may be empty."""
    for name, row in (("offset", offset), ("shape", size)):
        if not isinstance(row, tuple) or not all(type(number) is int and number >= 0 for number in row):
            return f"the {name} {str(row)[:80]} of a piece is no tuple of ints from 0 on"
        if len(row) != len(shape):
            return f"the {name} {str(row)[:80]} of a piece has {len(row)} dimensions, the array has {len(shape)}"
    box = Box(offset, size)  # type: ignore[arg-type]
    if any(stop > limit for stop, limit in zip(box.stop, shape, strict=True)):
        return f"the piece {box} is not inside of the array's shape {list(shape)}"
    return None


def wrong_tiling(
    shape: tuple[int, ...],
    item: int,
    parts: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]],
    lengths: Sequence[int],
    effort: Effort,
    *,
    part: bool,
) -> str | None:
    """Why stored boxes do not make an array, or None.

    Args:
        item: bytes of an element.
        parts: offset and shape of each box, and how many of the runs of bytes hold it.
        lengths: of the runs, in order.
        part: others have the rest: the boxes need not cover the array.
    """
    boxes, first = [], 0
    for offset, size, runs_of_it in parts:
        reason = misplaced(shape, offset, size)
        if reason is not None:
            return reason
        box = Box(offset, size)
        boxes.append(box)
        mine = lengths[first : first + max(runs_of_it, 0)]
        first += max(runs_of_it, 0)
        if not box.volume or sum(mine) != box.volume * item or any(length % item for length in mine):
            return f"the bytes of {box} do not add up"
    if first != len(lengths):
        return "there are bytes of no box"
    if not part and sum(box.volume for box in boxes) != math.prod(shape):
        return "the boxes do not make up the array"
    return "two boxes overlap" if overlap(boxes, effort) is not None else None


def overlap(boxes: Sequence[Box], effort: Effort | None = None) -> tuple[int, int] | None:
    """The numbers of two boxes (none of them empty) that have elements in common; None if no two have.

    InvalidRecordError if that takes more than the effort.
    """
    effort = effort or Effort(len(boxes))
    pending = [list(range(len(boxes)))]
    while pending:
        group = pending.pop()
        if len(group) < 2:
            continue
        for axis in range(len(boxes[group[0]].shape)):
            effort.spend(len(group))
            parts = _apart(boxes, group, axis)
            if len(parts) > 1:
                pending += parts
                break
        else:
            effort.spend(len(group) * (len(group) - 1) // 2)
            for one, two in combinations(group, 2):
                if intersection(boxes[one], boxes[two]) is not None:
                    return min(one, two), max(one, two)
    return None


def _apart(boxes: Sequence[Box], group: list[int], axis: int) -> list[list[int]]:
    """The group in parts, between which no box of it lies along an axis."""
    ordered = sorted((boxes[number].offset[axis], number) for number in group)
    parts: list[list[int]] = []
    end = -1
    for start, number in ordered:
        if start >= end:
            parts.append([])
        parts[-1].append(number)
        end = max(end, start + boxes[number].shape[axis])
    return parts


def gap(shape: tuple[int, ...], boxes: Sequence[Box]) -> Box | None:
    """Elements that none of the boxes has, as a box; None if they cover the shape. No two of them may overlap."""
    if sum(box.volume for box in boxes) == math.prod(shape):
        return None
    offset: list[int] = []
    length: list[int] = []
    for axis, size in enumerate(shape):
        start, stop = _thin(axis, size, math.prod(shape[axis + 1 :]), boxes)
        boxes = [box for box in boxes if box.offset[axis] <= start and box.stop[axis] >= stop]
        offset.append(start)
        length.append(stop - start)
    return Box(tuple(offset), tuple(length))


def _thin(axis: int, size: int, full: int, boxes: Sequence[Box]) -> tuple[int, int]:
    """The first range along an axis in which the boxes do not have all elements."""
    change = {0: 0, size: 0}
    for box in boxes:
        section = math.prod(box.shape[axis + 1 :])
        for at, delta in ((box.offset[axis], section), (box.stop[axis], -section)):
            change[at] = change.get(at, 0) + delta
    borders = sorted(change)
    there = accumulate(change[at] for at in borders)
    return next(((a, b) for a, b, now in zip(borders, borders[1:], there, strict=False) if now != full), (0, size))


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements ``[start, stop)`` of an array in C order, as boxes one after the other: at most 2·ndim − 1."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    rest = shape[1:]
    row = math.prod(rest)
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _in_row(last, rest, start - last * row, stop - last * row)
        return
    if first * row > start:
        yield from _in_row(first - 1, rest, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    yield from _in_row(last, rest, 0, stop - last * row)


def _in_row(number: int, rest: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for box in rectangles(rest, start, stop):
        yield Box((number, *box.offset), (1, *box.shape))


def runs(shape: tuple[int, ...], box: Box) -> tuple[int, Iterator[int]]:
    """How a box lies in an array in C order: the length of its runs, and where each begins, in the box's own order."""
    axis = len(shape)
    while axis and box.shape[axis - 1] == shape[axis - 1]:
        axis -= 1
    axis = max(axis - 1, 0)  # along this one it is a range, and all of each that follows
    length = math.prod(box.shape[axis:])
    steps = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    first = sum(start * step for start, step in zip(box.offset, steps, strict=True))
    places = product(*(range(0, size * step, step) for size, step in zip(box.shape[:axis], steps, strict=False)))
    return length, (first + sum(place) for place in places)


class Finder:
    """Which of many boxes meet a given one."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        dimensions = range(len(boxes[0].shape)) if boxes else ()
        # Along the dimension with the most borders the fewest boxes lie side by side.
        self._axis = max(dimensions, key=lambda axis: len({box.offset[axis] for box in boxes}), default=-1)
        self._order = list(range(len(boxes)))
        if self._axis >= 0:
            self._order.sort(key=lambda number: boxes[number].offset[self._axis])
            ordered = [boxes[number] for number in self._order]
            self._starts = [box.offset[self._axis] for box in ordered]
            self._reach = list(accumulate((box.stop[self._axis] for box in ordered), max))

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The number of each box that has elements of this one, and which."""
        first, last = 0, len(self._order)
        if self._axis >= 0:
            first = bisect_right(self._reach, box.offset[self._axis])
            last = bisect_left(self._starts, box.stop[self._axis])
        for number in self._order[first:last]:
            common = intersection(self._boxes[number], box)
            if common is not None:
                yield number, common
