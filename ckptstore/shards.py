"""ShardedArray: an array of which this process has only some boxes, to be saved, or to be loaded into; ListPart.

Nothing here ever makes the whole array. What is saved are the pieces, each as it is; what is loaded goes chunk by
chunk straight into the memory of the pieces, which may be strided views.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptstore import dtypes
from ckptstore.arrays import (
    ArraySource,
    ArraySpec,
    Destination,
    is_array,
    mismatch,
    source,
    torch_bits,
    torch_module,
)
from ckptstore.boxes import Box, gap, misplaced, overlap
from ckptstore.dtypes import dtype_size
from ckptstore.errors import FormatError, InvalidArgumentError, InvalidRecordError

_SHARE_WORK: Any = 100_000  # steps of the search for an element that two views share


class ShardedArray:
    """An array in pieces: a leaf of a state, where a whole array would be.

    To save: the pieces that this process has. Together (of all ranks) they must cover the array, and no two may
    overlap. It comes back as one whole array. In ``into``: the boxes that are wanted, with arrays to load them into;
    they may overlap, and need not be those that were saved. A piece may be empty.

    Args:
        shape: of the whole array.
        dtype: of its elements: the name that a checkpoint has for it ("bfloat16"), or a NumPy or torch dtype.
        pieces: ``(offset, array)`` of each piece: the index of its first element in the whole array, and a NumPy array
            or tensor (all of one kind); strided views are fine.

    Raises:
        InvalidArgumentError: shape, dtype or the pairs make no sense. Whether the pieces fit is looked at when they
            are saved or loaded, and told with the path in the state.
    """

    __slots__ = ("dtype", "framework", "pieces", "shape")

    def __init__(self, shape: Sequence[int], dtype: object, pieces: Sequence[tuple[Sequence[int], Any]]) -> None:
        self.shape = _ints("shape", shape)
        """Lengths of the whole array."""
        self.dtype = _name_of(dtype)
        """The name of the element type."""
        try:
            pairs = [(offset, array) for offset, array in pieces]
        except (TypeError, ValueError):
            raise InvalidArgumentError("pieces must be pairs of an offset and an array") from None
        self.pieces = tuple((_ints("offset", offset), array) for offset, array in pairs)
        """``(offset, array)`` of each piece."""
        of_torch = str(dtype).startswith("torch.") if not pairs else not isinstance(pairs[0][1], np.ndarray)
        self.framework = "torch" if of_torch else "numpy"
        """What it comes back as: "numpy" or "torch"."""

    def __repr__(self) -> str:
        return f"ShardedArray({list(self.shape)}, {self.dtype!r}, {len(self.pieces)} pieces)"

    def __reduce__(self) -> tuple[Any, ...]:
        dtype = getattr(torch_module(), self.dtype, self.dtype) if self.framework == "torch" else self.dtype
        return ShardedArray, (self.shape, dtype, self.pieces)


class ListPart:
    """A list of which this process has only some items: a leaf of one rank's part of a state.

    Together the ranks must have all items; what several have must be equal, or parts that fit. It comes back as a list.

    Args:
        items: by position.

    Raises:
        InvalidArgumentError: a position is no int from 0 on.
    """

    __slots__ = ("items",)

    def __init__(self, items: Mapping[int, Any]) -> None:
        if not all(type(position) is int and position >= 0 for position in items):
            raise InvalidArgumentError(f"positions of a list must be ints from 0 on, not {list(items)[:20]}")
        self.items = dict(items)
        """The items by position."""

    def __repr__(self) -> str:
        return f"ListPart({self.items!r})"


def _ints(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise InvalidArgumentError(f"the {name} of a sharded array must be ints, not {str(values)[:80]}") from None


def _name_of(dtype: Any) -> str:
    name: str | None = None
    if isinstance(dtype, str):
        try:
            dtype_size(dtype)
            return dtype
        except FormatError:
            pass
    if str(dtype).startswith("torch."):
        name = dtypes.torch_name(dtype)
    else:
        try:
            name = dtypes.numpy_name(np.dtype(dtype))
        except TypeError:
            name = None
    if name is None:
        raise InvalidArgumentError(f"{str(dtype)[:80]} is no element type that a checkpoint can hold")
    return name


# ---------------------------------------------------------------- to save


@dataclass(frozen=True, slots=True)
class ShardedSource:
    """The pieces of a sharded array as sources; ``boxes`` says where they lie. None of them is empty."""

    spec: ArraySpec
    boxes: tuple[Box, ...]
    pieces: tuple[ArraySource, ...]
    identity: tuple[object, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    def unchanged(self) -> bool:
        """Whether all pieces still have their shape and element type."""
        return all(piece.unchanged() for piece in self.pieces)

    def elsewhere(self, move: Callable[[ArraySource], ArraySource]) -> ShardedSource:
        """The same with its pieces in other memory."""
        pieces = tuple(move(piece) for piece in self.pieces)
        return ShardedSource(self.spec, self.boxes, pieces, ("moved", *(piece.identity for piece in pieces)))


FlatArray = ArraySource | ShardedSource


def parts_of(array: Any) -> Sequence[Any]:
    """What is read of an array of a state: its pieces, or itself."""
    return array.pieces if isinstance(array, ShardedSource) else (array,)


def form_of(array: FlatArray) -> tuple[object, ...]:
    """Equal for two arrays that are stored alike, but for their bytes."""
    return (array.spec, array.boxes) if isinstance(array, ShardedSource) else (array.spec,)


def sharded_source(value: ShardedArray, *, part: bool = False) -> ShardedSource:
    """What is to be saved of it. InvalidRecordError says what does not fit.

    Args:
        part: others have the rest, so the pieces need not cover the array.
    """
    spec = ArraySpec(value.framework, value.dtype, value.shape)
    found = _pieces(value)
    boxes = [box for box, _ in found]
    pair = overlap(boxes)
    if pair is not None:
        raise InvalidRecordError(f"the pieces {boxes[pair[0]]} and {boxes[pair[1]]} overlap")
    missing = None if part else gap(value.shape, boxes)
    if missing is not None and missing.volume:
        raise InvalidRecordError(f"no piece has the elements {missing} of the shape {list(value.shape)}")
    found.sort(key=lambda piece: piece[0].offset)
    identity: tuple[object, ...] = ("object", id(value))
    if found:
        identity = ("sharded", spec, tuple((box, piece.identity) for box, piece in found))
    return ShardedSource(spec, tuple(box for box, _ in found), tuple(piece for _, piece in found), identity)


def _pieces(value: ShardedArray) -> list[tuple[Box, ArraySource]]:
    """The pieces that have elements."""
    found = []
    for offset, array in value.pieces:
        if not is_array(array):
            raise InvalidRecordError(f"a piece is no array but a {type(array).__name__}")
        piece = source(array)
        size = tuple(int(length) for length in array.shape)
        reason = misplaced(value.shape, offset, size)
        if reason is not None:
            raise InvalidRecordError(reason)
        box = Box(offset, size)
        if (piece.spec.kind, piece.spec.dtype) != (value.framework, value.dtype):
            raise InvalidRecordError(
                f"the piece {box} is {piece.spec.kind} {piece.spec.dtype}, the array {value.framework} {value.dtype}"
            )
        if box.volume:
            found.append((box, piece))
    return found


# ---------------------------------------------------------------- to load into


@dataclass(frozen=True, slots=True)
class BoxTarget:
    """Where a box of an array goes: ``view`` has its shape, elements as words of their size, and any strides.

    ``finish``, if any, is to be called when the box is there.
    """

    box: Box
    view: np.ndarray[Any, Any]
    finish: Callable[[], object] | None = None


def misfit(spec: ArraySpec, target: ShardedArray) -> str | None:
    """Why an array cannot be loaded into the pieces, or None if it can."""
    if spec.kind in ("bytes", "bytearray"):
        return f"the checkpoint holds {spec.kind}"
    if target.shape != spec.shape or not dtypes.same_values(target.dtype, spec.dtype):
        return f"{spec.dtype} {list(spec.shape)} in the checkpoint, pieces of {target.dtype} {list(target.shape)} here"
    for offset, array in target.pieces:
        if not is_array(array):
            return f"a piece is no array but a {type(array).__name__}"
        size = tuple(int(length) for length in array.shape)
        reason = misplaced(spec.shape, offset, size) or mismatch(ArraySpec(spec.kind, spec.dtype, size), array)
        if reason is not None:
            return f"piece at {list(offset)}: {reason}"
    return None


def nbytes_of(target: ShardedArray) -> int:
    """Bytes that are loaded into its pieces."""
    return sum(math.prod(map(int, array.shape)) for _, array in target.pieces) * dtype_size(target.dtype)


def box_targets(spec: ArraySpec, target: ShardedArray) -> Iterator[BoxTarget]:
    """The pieces, which fit, as targets; those without bytes are left out."""
    for offset, array in target.pieces:
        size = tuple(int(length) for length in array.shape)
        piece = ArraySpec(spec.kind, spec.dtype, size)
        if piece.nbytes:
            view, finish = _open(piece, array)
            yield BoxTarget(Box(offset, size), view, finish)


def _open(spec: ArraySpec, array: Any) -> tuple[np.ndarray[Any, Any], Callable[[], object] | None]:
    """The memory of an array itself, where it has the bits that are stored; else other memory, to be moved later."""
    kind = word(dtype_size(spec.dtype))
    if isinstance(array, np.ndarray):
        if dtypes.numpy_name(array.dtype) == spec.dtype:
            return array.view(kind), None
    elif dtypes.torch_name(array.dtype) == spec.dtype and array.is_cpu and not (array.is_conj() or array.is_neg()):
        return torch_bits(torch_module(), array.detach()).numpy().view(kind), None
    staged = Destination.into_existing(spec, array)
    return words(staged.buffer, spec.dtype, spec.shape), staged.finish


def word(size: int) -> np.dtype[Any]:
    """A type of that width by which NumPy moves bits and does not look at them."""
    return np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")


def words(buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Bytes of elements in C order as an array of words."""
    return np.frombuffer(buffer, word(dtype_size(dtype))).reshape(shape)


def share_memory(memories: Iterable[memoryview | np.ndarray[Any, Any]]) -> bool:
    """Whether two of them have bytes in common: both would hold the values of whichever was loaded last.

    InvalidArgumentError if that cannot be told of two views.
    """
    active: list[tuple[int, np.ndarray[Any, Any]]] = []
    for start, stop, view in sorted(map(_extent, memories), key=operator.itemgetter(0, 1)):
        if start == stop:
            continue
        active = [(end, other) for end, other in active if end > start]
        for _, other in active:
            try:
                if np.shares_memory(view, other, max_work=_SHARE_WORK):
                    return True
            except np.exceptions.TooHardError:
                raise InvalidArgumentError(
                    "it cannot be told whether two views to load into share memory: use simpler strides"
                ) from None
        active.append((stop, view))
    return False


def _extent(memory: memoryview | np.ndarray[Any, Any]) -> tuple[int, int, np.ndarray[Any, Any]]:
    view = np.frombuffer(memory, np.uint8) if isinstance(memory, memoryview) else memory
    first = int(view.__array_interface__["data"][0])
    if not view.nbytes:
        return first, first, view
    if view.flags.c_contiguous:
        return first, first + view.nbytes, view
    reach = [step * (size - 1) for step, size in zip(view.strides, view.shape, strict=True)]
    low, high = sum(min(step, 0) for step in reach), sum(max(step, 0) for step in reach)
    return first + low, first + high + view.itemsize, view
