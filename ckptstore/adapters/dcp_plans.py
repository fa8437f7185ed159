"""Between the plans of DCP, which name leaves of a flat state dict, and our records, which are nested.

To save: the items of one rank become states by record. To load: the leaves of a checkpoint get the names that DCP would
give them, and items to read become boxes of arrays to be filled.
"""

from __future__ import annotations

import bisect
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlanner, WriteItem, WriteItemType

from ckptstore import InvalidArgumentError, InvalidRecordError, ShardedArray
from ckptstore.arrays import ArraySpec
from ckptstore.formats.flatnames import MAX_RECORDS, REST, Node, Path, Place, is_list, nested, place_of
from ckptstore.manifest import check_epoch
from ckptstore.shards import ListPart
from ckptstore.skeleton import NOTHING

ASIDE = 256 << 20
"""Bytes that are read at a time of what cannot go to its place directly."""


# ---- to save ---------------------------------------------------------------------------------------------------


def records_of(items: Sequence[WriteItem], planner: SavePlanner, *, alone: bool = False) -> dict[str, Any]:
    """What this rank writes, as states by record: tensors, and pieces of those that others have the rest of.

    Args:
        alone: there are no others.
    """
    pieces: dict[str, list[tuple[Path, torch.Tensor]]] = {}
    leaves: dict[str, Any] = {}
    for item in items:
        fqn = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            leaves[fqn] = _value(item, planner)
            continue
        tensor, data = cast("torch.Tensor", planner.resolve_data(item)).detach(), item.tensor_data
        assert data is not None
        if item.type == WriteItemType.TENSOR:
            leaves[fqn] = tensor
        else:
            pieces.setdefault(fqn, []).append((tuple(data.chunk.offsets), tensor))
            leaves[fqn] = ShardedArray(tuple(data.size), tensor.dtype, pieces[fqn])
    paths: Mapping[str, Path] = getattr(planner, "mappings", {})
    tops = {path[0] for path in paths.values() if len(path) > 1}
    split = len(tops) <= MAX_RECORDS
    gaps: dict[Place, Any] = {place_of(path, split): {} for path in _empty(paths.values())}
    found = {place_of(paths.get(fqn, (fqn,)), split): leaf for fqn, leaf in leaves.items()}
    lists = {(name, path[:end]) for name, path in found for end in range(len(path))}
    gaps = {(name, path): gap for (name, path), gap in gaps.items() if (name, path[:-1]) in lists}
    return {name: _tree(node, (name,), alone) for name, node in nested({**gaps, **found}.items()).items()}


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    """What is no tensor. DCP would pickle it; that is undone where it cannot be helped, in memory."""
    cls = type(planner)
    if isinstance(planner, DefaultSavePlanner) and (
        cls.resolve_data is DefaultSavePlanner.resolve_data
        and cls.transform_object is DefaultSavePlanner.transform_object
    ):
        return planner.lookup_object(item.index)
    packed = cast("io.BytesIO", planner.resolve_data(item))
    packed.seek(0)
    return torch.load(packed, weights_only=False)  # just made by the planner of this process


def _empty(paths: Iterable[Path]) -> Iterator[Path]:
    """Items of lists that DCP has passed over, because they are empty dicts."""
    positions: dict[Path, set[int]] = {}
    for path in paths:
        for depth, key in enumerate(path):
            if type(key) is int:
                positions.setdefault(path[:depth], set()).add(key)
    for path, there in positions.items():
        yield from ((*path, number) for number in range(max(there)) if number not in there)


def _tree(node: Any, path: Path, alone: bool) -> Any:
    """A tree of nodes as dicts and parts of lists, or lists where all is here."""
    if not isinstance(node, Node):
        return node
    made = {key: _tree(child, (*path, key), alone) for key, child in node.items()}
    if not is_list(node, path):
        return made
    return [made[at] for at in range(len(made))] if alone and made.keys() == {*range(len(made))} else ListPart(made)


# ---- to load ---------------------------------------------------------------------------------------------------


@dataclass
class Leaves:
    """The leaves of a checkpoint under the names that DCP gives them."""

    places: dict[str, Place]
    values: dict[str, Any]
    """``ArraySpec`` for an array."""

    @classmethod
    def of(cls, structures: Mapping[str, Any]) -> Leaves:
        """Of all records. InvalidRecordError if two leaves have the same name."""
        found = cls({}, {})
        for name, structure in structures.items():
            found._look(name, structure, ())
        return found

    def _look(self, name: str, node: Any, path: Path) -> None:
        if isinstance(node, dict):
            children = node.items()
        elif isinstance(node, list) and not _is_leaf(node):
            children = enumerate(node)  # type: ignore[assignment]
        else:
            fqn = ".".join(map(str, path if name == REST and path else (name, *path)))
            if fqn in self.places:
                raise InvalidRecordError(
                    f"two values of the checkpoint are called {fqn!r} by DCP, which joins keys by dots: "
                    "load it by `Checkpoint.load`"
                )
            self.places[fqn], self.values[fqn] = (name, path), node
            return
        for key, child in children:
            self._look(name, child, (*path, key))

    def metadata(self) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
        """For the planner: what there is."""
        return {fqn: _metadata_of(leaf) for fqn, leaf in self.values.items()}

    def paths(self, structures: Mapping[str, Any]) -> dict[str, Path]:
        """For the planner: the path in the state dict."""
        return {
            fqn: _texts(structures[name], path) if name == REST and path else (name, *_texts(structures[name], path))
            for fqn, (name, path) in self.places.items()
        }


def _texts(node: Any, path: Path) -> Path:
    """A path as DCP knows it: ints are positions in lists."""
    found = []
    for key in path:
        found.append(key if isinstance(node, list) else str(key))
        node = node[key]
    return tuple(found)


def _is_leaf(value: Any) -> bool:
    """Whether DCP keeps it in one piece: all but dicts, and lists that have tensors or dicts in them."""
    if isinstance(value, list):
        return not any(isinstance(item, dict) or is_tensor(item) or not _is_leaf(item) for item in value)
    return not isinstance(value, dict)


def is_tensor(leaf: Any) -> bool:
    """Whether it was a tensor when it was saved."""
    return isinstance(leaf, ArraySpec) and leaf.kind == "torch"


def has_arrays(value: Any) -> bool:
    """Whether there is something in a leaf that has to be read."""
    if isinstance(value, (list, tuple)):
        return any(map(has_arrays, value))
    return any(map(has_arrays, value.values())) if isinstance(value, dict) else isinstance(value, ArraySpec)


def _metadata_of(leaf: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    """A tensor counts as one chunk, however it lies there: the reader takes any box out of it."""
    if not is_tensor(leaf):
        return BytesStorageMetadata()
    size = torch.Size(leaf.shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(properties=TensorProperties(dtype=_dtype(leaf)), size=size, chunks=[whole])


def _dtype(spec: ArraySpec) -> torch.dtype:
    return cast("torch.dtype", getattr(torch, spec.dtype))


@dataclass
class Target:
    """A tensor to fill: ``memory`` is filled, and copied to ``tensor`` if that is another."""

    item: ReadItem
    tensor: torch.Tensor
    memory: torch.Tensor

    def finish(self, planner: LoadPlanner) -> None:
        """It is filled."""
        if self.memory is not self.tensor:
            self.tensor.copy_(self.memory)
        planner.commit_tensor(self.item, self.tensor)


def targets_of(items: Iterable[ReadItem], planner: LoadPlanner, leaves: Leaves) -> Iterator[list[Target]]:
    """What to fill, in turns: what has another type than the checkpoint, or shares memory, takes memory aside."""
    taken: dict[torch.device, list[tuple[int, int]]] = {}
    batch: list[Target] = []
    aside = 0
    for item in items:
        spec = leaves.values[item.storage_index.fqn]
        tensor = planner.resolve_tensor(item).detach()
        direct = tensor.dtype == _dtype(spec) and not _is_taken(tensor, taken)
        target = Target(item, tensor, tensor if direct else torch.empty(tensor.shape, dtype=_dtype(spec)))
        batch.append(target)
        aside += 0 if direct else target.memory.nbytes
        if aside > ASIDE:
            yield batch
            batch, taken, aside = [], {}, 0
    yield batch


def _is_taken(tensor: torch.Tensor, taken: dict[torch.device, list[tuple[int, int]]]) -> bool:
    """Whether its memory overlaps with what is filled already; if not, it is taken now."""
    if not tensor.numel():
        return False
    reach = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()  # two storages may be of one memory, such as views of a NumPy array
    stop = start + (reach + 1) * tensor.element_size()
    spans = taken.setdefault(tensor.device, [])
    at = bisect.bisect(spans, (start, stop))
    if (at and spans[at - 1][1] > start) or (at < len(spans) and spans[at][0] < stop):
        return True
    spans.insert(at, (start, stop))
    return False


def into_of(targets: Iterable[Target], leaves: Leaves, structures: Mapping[str, Any]) -> dict[str, Any]:
    """What to give to ``Checkpoint.load``: boxes for what is wanted."""
    pieces: dict[str, list[tuple[Path, torch.Tensor]]] = {}
    for target in targets:
        pieces.setdefault(target.item.storage_index.fqn, []).append((tuple(target.item.storage_offsets), target.memory))
    wanted = {
        leaves.places[fqn]: ShardedArray(leaves.values[fqn].shape, _dtype(leaves.values[fqn]), boxes)
        for fqn, boxes in pieces.items()
    }
    return {name: _holes(node, structures[name]) for name, node in nested(wanted.items()).items()}


def _holes(node: Any, structure: Any) -> Any:
    """A tree of nodes as dicts and lists like those of the checkpoint."""
    if not isinstance(node, Node):
        return node
    made = {key: _holes(child, structure[key]) for key, child in node.items()}
    return [made.get(at, NOTHING) for at in range(len(structure))] if isinstance(structure, list) else made


def epoch_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """``checkpoint_id`` of DCP as an epoch. InvalidArgumentError if it is none."""
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else str(checkpoint_id)
    if not (text.isascii() and text.isdigit()):
        raise InvalidArgumentError(f"checkpoint_id must be the number of the epoch, not {text[:80]!r}")
    return check_epoch(int(text))
