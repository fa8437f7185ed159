"""The largest arrays of a checkpoint, and how much of it is of which type. Reads indexes, and no chunk."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from ckptstore.catalog import Catalog
from ckptstore.manifest import ArrayEntry, Manifest, RecordEntry, RecordIndex
from ckptstore.skeleton import leaf_paths

LARGEST = 20


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """One array: where it is in the state, what it is, its bytes, and how many of them an earlier attempt sent."""

    record: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    reused: int


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of one epoch: the largest, their number, and the bytes of each type."""

    epoch: int
    count: int
    nbytes: int
    reused: int
    largest: tuple[ArrayFacts, ...]
    dtypes: dict[str, int]


def arrays_of(catalog: Catalog, manifest: Manifest) -> Arrays:
    """Look through the indexes of a checkpoint, one at a time.

    Raises:
        CorruptionError, FormatError: an index is damaged, or from a newer version.
        ObjectNotFoundError: the checkpoint was deleted meanwhile.
    """
    found: list[ArrayFacts] = []
    dtypes: Counter[str] = Counter()
    count = nbytes = reused = 0
    for entry in manifest.records:
        index = catalog.index(entry)
        sizes = [_bytes_of(array) for array in index.arrays]
        old = [_reused(array, index, manifest.attempt) for array in index.arrays]
        count, nbytes, reused = count + len(sizes), nbytes + sum(sizes), reused + sum(old)
        for array, size in zip(index.arrays, sizes, strict=True):
            dtypes[array.dtype or array.kind] += size
        largest = heapq.nlargest(LARGEST, range(len(sizes)), key=sizes.__getitem__)
        paths = _paths(entry, index)
        for number in largest:
            array = index.arrays[number]
            path = " = ".join(paths.get(number, ())) or "(not named)"
            found.append(
                ArrayFacts(entry.name, path, array.dtype or array.kind, array.shape, sizes[number], old[number])
            )
        found = heapq.nlargest(LARGEST, found, key=lambda one: one.nbytes)
    return Arrays(manifest.epoch, count, nbytes, reused, tuple(found), dict(dtypes.most_common()))


def _paths(entry: RecordEntry, index: RecordIndex) -> dict[int, list[str]]:
    return leaf_paths(index.skeleton) if entry.kind == "state" else {0: ["(file)"]}


def _bytes_of(array: ArrayEntry) -> int:
    return sum(span.length for span in array.spans)


def _reused(array: ArrayEntry, index: RecordIndex, attempt: str) -> int:
    return sum(span.length for span in array.spans if index.chunks[span.chunk].attempt != attempt)
