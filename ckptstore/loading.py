"""Loading records: where each array goes is settled, and checked, before a byte is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ckptstore import garbage
from ckptstore.arrays import ArraySpec, Destination
from ckptstore.errors import FormatError, InvalidArgumentError
from ckptstore.manifest import RecordIndex
from ckptstore.pipeline import Meter
from ckptstore.reader import Part, Spare, load_arrays
from ckptstore.shards import BoxTarget, ShardedArray, box_targets, nbytes_of, share_memory
from ckptstore.stores.base import Store
from ckptstore.tree import fill_into, leaf_paths, match_into, unflatten


class Loading:
    """One record to load: checked against its target before anything is read."""

    def __init__(
        self,
        index: RecordIndex,
        skeleton: Any,
        specs: list[ArraySpec],
        into: Any,
        *,
        strict: bool = True,
        partial: bool = False,
    ) -> None:
        self.index = index
        self._skeleton = skeleton
        self._specs = specs
        self._into = into
        self._places: dict[int, list[Destination]] = {}
        self._boxes: dict[int, list[BoxTarget]] = {}
        self._existing: dict[int, list[object]] = {}
        if into is not None:
            self._existing = match_into(skeleton, specs, into, index.name, strict=strict, partial=partial)
        self._numbers = sorted(leaf_paths(skeleton))
        if self._numbers and self._numbers[-1] >= len(specs):
            raise FormatError(f"record {index.name!r} refers to an array that it does not list")
        if into is not None and not strict:
            self._numbers = [number for number in self._numbers if number in self._existing]  # the others are not read
        self.nbytes = sum(self._bytes_of(number) for number in self._numbers)

    @property
    def into(self) -> bool:
        """Whether it goes into a state that the caller has."""
        return self._into is not None

    def _bytes_of(self, number: int) -> int:
        targets = self._existing.get(number, ())
        sharded = [target for target in targets if isinstance(target, ShardedArray)]
        aside = 0 if sharded and len(sharded) == len(targets) else self._specs[number].nbytes
        return aside + sum(nbytes_of(target) for target in sharded)

    def prepare(self) -> Part:
        """Where its arrays go. InvalidArgumentError if two of them go into the same memory."""
        specs = self._specs
        with garbage.paused():
            for number in self._numbers:  # an array that replaces a plain value of the target is loaded aside
                targets = self._existing.get(number, ())
                sharded = [target for target in targets if isinstance(target, ShardedArray)]
                self._boxes[number] = [box for target in sharded for box in box_targets(specs[number], target)]
                rest = [target for target in targets if not isinstance(target, ShardedArray)]
                found = [Destination.into_existing(specs[number], target) for target in rest]
                if not found and not sharded:
                    found = [Destination.allocate(specs[number])]
                self._places[number] = found
        if share_memory(self.memories()):
            raise InvalidArgumentError("two arrays of the state to load into share memory: load into separate arrays")
        return self.index, {number: [*found[:1], *self._boxes[number]] for number, found in self._places.items()}

    def memories(self) -> Iterator[memoryview | np.ndarray[Any, Any]]:
        """The memory that it goes into."""
        for found in self._places.values():
            yield from (destination.buffer for destination in found)
        for boxes in self._boxes.values():
            yield from (box.view for box in boxes)

    def finish(self) -> Any:
        """The loaded state, once all arrays are there."""
        values: dict[int, Any] = {}
        with garbage.paused():
            for box in (box for boxes in self._boxes.values() for box in boxes):
                if box.finish is not None:
                    box.finish()
            for number, found in self._places.items():
                for other in found[1:]:  # tied in the checkpoint, separate in the target
                    other.buffer[:] = found[0].buffer
                finished = [destination.finish() for destination in found]
                values[number] = finished[0] if finished else None
            if self._into is None:
                return unflatten(self._skeleton, lambda number: values[number])
            return fill_into(self._skeleton, self._into, lambda number: values[number])


def run_all(loads: list[Loading], store: Store, meter: Meter, spare: Spare | None) -> dict[str, Any]:
    """Load records side by side; one after the other where they go into the same memory (the last one stays)."""
    parts = [load.prepare() for load in loads]
    visible = any(load.into for load in loads)
    if visible and share_memory(memory for load in loads for memory in load.memories()):
        for part in parts:
            load_arrays(store, [part], meter=meter, visible=True, spare=spare)
    else:
        load_arrays(store, parts, meter=meter, visible=visible, spare=spare)
    return {load.index.name: load.finish() for load in loads}
