"""Geometry of boxes, against NumPy: what a box is there is a slice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.boxes import EFFORT, Box, Finder, gap, intersection, misplaced, overlap, rectangles, runs, whole
from ckptstore.errors import InvalidRecordError

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return Box(
        tuple(starts), tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True))
    )


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], most: int = 8) -> list[Box]:
    """Boxes that cover a shape, each cut out of one before."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, most))):
        number = draw(st.integers(0, len(boxes) - 1))
        box = boxes[number]
        wide = [axis for axis, size in enumerate(box.shape) if size > 1]
        if wide:
            axis = draw(st.sampled_from(wide))
            cut = draw(st.integers(1, box.shape[axis] - 1))
            boxes[number : number + 1] = halves(box, axis, cut)
    return draw(st.permutations(boxes))


def halves(box: Box, axis: int, cut: int) -> list[Box]:
    first, second = list(box.shape), list(box.shape)
    offset = list(box.offset)
    first[axis], second[axis] = cut, box.shape[axis] - cut
    offset[axis] += cut
    return [Box(box.offset, tuple(first)), Box(tuple(offset), tuple(second))]


def mask(shape: tuple[int, ...], *boxes: Box) -> Any:
    """How many of the boxes have each element."""
    found = np.zeros(shape, int)
    for box in boxes:
        found[box.within(whole(shape))] += 1
    return found


@given(st.data())
def test_intersection(data: st.DataObject) -> None:
    """It has just the elements of both."""
    shape = data.draw(SHAPES)
    one, two = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = intersection(one, two)
    expected = mask(shape, one, two) == 2
    assert (mask(shape, common) == 1 if common is not None else np.zeros(shape, bool)).tolist() == expected.tolist()


@given(st.data())
def test_rectangles_are_a_range(data: st.DataObject) -> None:
    """Their elements, one box after the other in C order, are the range; and they are few."""
    shape = data.draw(SHAPES)
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    array = np.arange(count).reshape(shape)
    found = list(rectangles(shape, start, stop))
    elements = [array[box.within(whole(shape))].reshape(-1) for box in found]
    assert np.concatenate([np.zeros(0, int), *elements]).tolist() == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)


@given(st.data())
def test_runs(data: st.DataObject) -> None:
    """The runs of a box are its elements in its own order, and no two runs could be one unless they are one row."""
    shape = data.draw(SHAPES)
    box = data.draw(boxes_in(shape))
    length, starts = runs(shape, box)
    found = [element for start in starts for element in range(start, start + length)]
    array = np.arange(math.prod(shape)).reshape(shape)
    assert found == array[box.within(whole(shape))].reshape(-1).tolist()
    if found == list(range(found[0], found[0] + len(found))) and box.shape[:1] == shape[:1]:
        assert math.prod(box.shape) // length == 1 or 1 in box.shape


@given(st.data())
def test_overlap_and_gap(data: st.DataObject) -> None:
    """A tiling has neither; one that lacks a box has a gap that nobody has; any other box overlaps."""
    shape = data.draw(SHAPES)
    tiling = data.draw(tilings(shape))
    assert overlap(tiling) is None
    assert gap(shape, tiling) is None
    some = tiling[: data.draw(st.integers(0, len(tiling) - 1))]
    missing = gap(shape, some)
    assert missing is not None
    assert misplaced(shape, *missing) is None
    assert missing.volume > 0
    assert not mask(shape, *some)[missing.within(whole(shape))].any()
    pair = overlap([*tiling, data.draw(boxes_in(shape))])
    assert pair is not None


@given(st.data())
def test_overlap_is_found_among_any_boxes(data: st.DataObject) -> None:
    """Whatever lies in the array: an overlap is told if and only if there is one."""
    shape = data.draw(SHAPES)
    some = data.draw(st.lists(boxes_in(shape), max_size=6))
    pair = overlap(some)
    assert (pair is not None) == bool((mask(shape, *some) > 1).any())
    if pair is not None:
        assert intersection(some[pair[0]], some[pair[1]]) is not None


@given(st.data())
def test_finder(data: st.DataObject) -> None:
    """It finds what a look at every box finds."""
    shape = data.draw(SHAPES)
    some = data.draw(st.lists(boxes_in(shape), max_size=8))
    box = data.draw(boxes_in(shape))
    expected = {number: intersection(other, box) for number, other in enumerate(some)}
    assert dict(Finder(some).meeting(box)) == {number: common for number, common in expected.items() if common}


@pytest.mark.parametrize(
    ("offset", "shape", "reason"),
    [
        ((0, 0), (2, 4), "inside"),
        ((2**70, 0), (1, 1), "inside"),
        ((0,), (1, 1), "dimensions"),
        ((0, 0), (1,), "dimensions"),
        ((-1, 0), (1, 1), "ints"),
        ((0, 0), (1, -1), "ints"),
        ((0, True), (1, 1), "ints"),
        ((0, 0.0), (1, 1), "ints"),
        ([0, 0], (1, 1), "ints"),
    ],
)
def test_misplaced(offset: Any, shape: Any, reason: str) -> None:
    """What is no box in the array is told why."""
    assert reason in str(misplaced((1, 4), offset, shape))


def test_no_dimensions() -> None:
    """A scalar is one box without dimensions."""
    assert list(rectangles((), 0, 1)) == [Box((), ())]
    assert overlap([Box((), ())] * 2) == (0, 1)
    assert gap((), []) == Box((), ())
    assert gap((), [Box((), ())]) is None
    assert gap((0, 3), []) is None


def test_large_shardings_are_cheap_and_hostile_ones_end() -> None:
    """P8: what ranks make of an array costs a few looks at each box; what is made to be slow is refused."""
    grid = [Box((i * 8, j * 8), (8, 8)) for i in range(200) for j in range(200)]
    assert overlap(grid) is None
    assert gap((1600, 1600), grid) is None
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert overlap(pinwheel) is None
    assert gap((3, 3), pinwheel) is None
    crossed = [Box((i, 0), (1, EFFORT)) for i in range(4000)] + [Box((0, EFFORT), (4000, 1))]
    assert overlap(crossed) is None
    with pytest.raises(InvalidRecordError, match="complicated"):
        overlap([*crossed, Box((0, 5), (4000, EFFORT))])
