"""torch.distributed.checkpoint (DCP) on any of our URLs: ``dcp.save(sd, storage_writer=CkptStoreWriter(repo, 7))``.

DCP plans who writes and reads what, and its collectives bring the ranks together; here the plans become parts of one
checkpoint (``Repository.begin_part``, ``commit_parts``): one commit for all ranks, each byte checked when it is read,
and no pickle on the store. What was saved is an ordinary checkpoint: ``Checkpoint.load`` reads it whole, without DCP,
on one process, and every tool works on it.

A state dict ``{"model": .., "optimizer": ..}`` becomes the records "model" and "optimizer"; what is no dict at the top
goes into the record "state_dict". Tensors keep their paths; of a sharded one each rank sends its own pieces, once.
"""

from __future__ import annotations

import glob
import io
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckptstore import Checkpoint, InvalidArgumentError, Repository, ShardedArray
from ckptstore import open as open_repository
from ckptstore.arrays import ArraySpec
from ckptstore.errors import CkptStoreError, EpochNotFoundError, InvalidRecordError
from ckptstore.gathered import RankPart
from ckptstore.manifest import check_epoch, check_record_name
from ckptstore.skeleton import key_text

REST = "state_dict"
"""The record of what is no dict at the top of the state dict."""

Path = tuple[Any, ...]


@dataclass(frozen=True)
class _Share:
    """What the coordinator's plan tells each rank: which part of which save it writes."""

    rank: int
    world_size: int
    group: str


class CkptStoreWriter(StorageWriter):  # type: ignore[misc]  # torch has no types here
    """Saves one epoch for ``dcp.save`` and ``dcp.async_save``. Every rank makes one.

    Errors of a rank come out of ``dcp.save`` on all of them, as torch's ``CheckpointException``, which names the ranks;
    whatever was saved before stays as it was.

    Args:
        where: an open repository, or its URL.
        epoch: the epoch to save; None takes it from ``checkpoint_id`` of ``dcp.save``.
        metadata: the checkpoint's own, of rank 0.
        replace: whether the epoch may exist.
    """

    def __init__(
        self,
        where: Repository | str | os.PathLike[str],
        epoch: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> None:
        self._repo = where if isinstance(where, Repository) else open_repository(where)
        self._epoch = None if epoch is None else check_epoch(epoch)
        self._metadata = metadata
        self._replace = replace
        self._part: RankPart | None = None

    # ---- what DCP calls, in this order -----------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins."""
        self._part = None
        if checkpoint_id is not None:
            self._epoch = epoch_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be one checkpoint."""
        if self._epoch is None:
            raise InvalidArgumentError(
                "which epoch? CkptStoreWriter(repo, epoch), or dcp.save(.., checkpoint_id=epoch)"
            )
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError(
                "use_collectives=False saves each rank alone, and that is no checkpoint: leave it"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The paths of this rank's items travel with its plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: each rank gets its share."""
        group = uuid.uuid4().hex
        return [replace(plan, storage_data=_Share(rank, len(plans), group)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; its bytes go to the coordinator by DCP's own collective."""
        share, epoch = cast("_Share", plan.storage_data), cast("int", self._epoch)
        part = self._repo.begin_part(
            epoch, rank=share.rank, world_size=share.world_size, group=share.group, replace=self._replace
        )
        with part:
            for name, state in _records(plan.items, planner).items():
                part.write(name, state)
            data = part.finish()
        self._part = part  # its lease has to last until the coordinator has committed
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index=MetadataIndex(f"rank {share.rank}"), size_in_bytes=0, storage_data=data)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: commit."""
        parts = [result.storage_data for of_rank in results for result in of_rank]
        self._repo.commit_parts(cast("int", self._epoch), parts, self._metadata, self._replace)

    def storage_meta(self) -> None:
        """Nothing of ours is needed by a planner."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is an epoch."""
        try:
            epoch_of(checkpoint_id)
        except InvalidArgumentError:
            return False
        return True


class CkptStoreReader(StorageReader):  # type: ignore[misc]
    """Loads for ``dcp.load``, onto any number of ranks and any sharding. Every rank makes one.

    Each rank reads the chunks that it needs, and no others; every byte is checked. A checkpoint that was not saved by
    DCP can be read as well.

    Args:
        where: an open repository, or its URL.
        epoch: None for ``checkpoint_id`` of ``dcp.load``, else for the newest intact one.
    """

    def __init__(self, where: Repository | str | os.PathLike[str], epoch: int | None = None) -> None:
        self._repo = where if isinstance(where, Repository) else open_repository(where, create=False)
        self._epoch = None if epoch is None else check_epoch(epoch)
        self._checkpoint: Checkpoint | None = None
        self._error: Exception | None = None
        self._at: dict[str, tuple[str, Path]] = {}  # by the names of DCP: record and path there
        self._leaves: dict[str, Any] = {}

    @property
    def checkpoint(self) -> Checkpoint:
        """The one that was read last."""
        if self._checkpoint is None:
            raise InvalidArgumentError("nothing was loaded yet")
        return self._checkpoint

    # ---- what DCP calls, in this order -----------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins."""
        self._checkpoint = self._error = None
        if checkpoint_id is not None:
            self._epoch = epoch_of(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """What the checkpoint has. An error is kept for the next step, because DCP drops it here."""
        try:
            return self._read_metadata()
        except Exception as error:  # noqa: BLE001 (raised by set_up_storage_reader)
            self._error = error
            return Metadata(state_dict_metadata={}, planner_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise what was found out before."""
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which checkpoint this rank reads."""
        found = self.checkpoint
        return replace(plan, storage_data=(found.epoch, found.generation))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks have to read one checkpoint (P2)."""
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            epochs = sorted(epoch for epoch, _ in found)
            raise CkptStoreError(f"the ranks found different newest checkpoints, of epochs {epochs}: name the epoch")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensors."""
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        if tensors:
            with _targets(tensors, planner, self._leaves) as targets:
                self.checkpoint.load(into=_trees((self._at[fqn], to) for fqn, to in targets.items()), strict=False)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                packed = io.BytesIO()
                torch.save(self._value(item.storage_index.fqn), packed)  # for planners, which unpack it right here
                packed.seek(0)
                planner.load_bytes(item, packed)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # ---- what the checkpoint has ------------------------------------------------------------------------------

    def _read_metadata(self) -> Metadata:
        if self._checkpoint is None:
            self._checkpoint = self._repo.latest() if self._epoch is None else self._repo.checkpoint(self._epoch)
        if self._checkpoint is None:
            raise EpochNotFoundError(f"there is no checkpoint in {self._repo.url}")
        self._at, self._leaves = {}, {}
        for name, record in self._checkpoint.records.items():
            if record.kind != "file":
                self._look(name, self._checkpoint.structure(name), ())
        known = {fqn: _metadata_of(leaf) for fqn, leaf in self._leaves.items()}
        paths = {fqn: path if name == REST else (name, *path) for fqn, (name, path) in self._at.items()}
        return Metadata(state_dict_metadata=known, planner_data=paths)

    def _look(self, name: str, node: Any, path: Path) -> None:
        """Note each leaf under the name that DCP gives it."""
        if isinstance(node, dict) and (node or not path):
            for key, child in node.items():
                self._look(name, child, (*path, key))
        else:
            fqn = ".".join(map(str, path if name == REST else (name, *path)))
            self._at[fqn], self._leaves[fqn] = (name, path), node

    def _value(self, fqn: str) -> Any:
        """A plain value, which the structure has already; what has arrays in it is read."""
        leaf = self._leaves[fqn]
        if not _has_arrays(leaf):
            return leaf
        name, path = self._at[fqn]
        found = self.checkpoint.load(name, paths=[glob.escape(".".join(map(key_text, path)))])
        for key in path:
            found = found[key]
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is an epoch."""
        return CkptStoreWriter.validate_checkpoint_id(checkpoint_id)


def epoch_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """``checkpoint_id`` of DCP as an epoch. InvalidArgumentError if it is none."""
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else str(checkpoint_id)
    if not (text.isascii() and text.isdigit()):
        raise InvalidArgumentError(f"checkpoint_id must be the number of the epoch, not {text[:80]!r}")
    return check_epoch(int(text))


# ---- to save ---------------------------------------------------------------------------------------------------


def _records(items: Sequence[WriteItem], planner: SavePlanner) -> dict[str, dict[Any, Any]]:
    """What this rank writes, as states by record: tensors, and pieces of those that others have the rest of."""
    if not isinstance(planner, DefaultSavePlanner):
        raise InvalidArgumentError(
            f"the planner must be torch's DefaultSavePlanner or one like it, not {type(planner)}"
        )
    pieces: dict[str, list[tuple[Path, torch.Tensor]]] = {}
    leaves: dict[str, Any] = {}
    for item in items:
        fqn = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            leaves[fqn] = planner.lookup_object(item.index)  # not what resolve_data gives: that is pickled
            continue
        tensor, data = cast("torch.Tensor", planner.resolve_data(item)), item.tensor_data
        assert data is not None
        if item.type == WriteItemType.TENSOR:
            leaves[fqn] = tensor
        else:
            mine = pieces.setdefault(fqn, [])
            mine.append((tuple(data.chunk.offsets), tensor))
            leaves[fqn] = ShardedArray(tuple(data.size), tensor.dtype, mine)
    return _trees((_place(planner.mappings.get(fqn, (fqn,))), leaf) for fqn, leaf in leaves.items())


def _place(path: Path) -> tuple[str, Path]:
    """The record that something goes into, and its path there."""
    if len(path) > 1 and path[0] != REST:
        with suppress(InvalidRecordError):
            return check_record_name(path[0]), path[1:]
    return REST, path


def _trees(leaves: Iterable[tuple[tuple[str, Path], Any]]) -> dict[str, dict[Any, Any]]:
    """Nested dicts, by record."""
    trees: dict[str, dict[Any, Any]] = {}
    for (name, path), leaf in leaves:
        node = trees.setdefault(name, {})
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return trees


# ---- to load ---------------------------------------------------------------------------------------------------


def _metadata_of(leaf: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    """A tensor counts as one chunk, however it lies there: the reader takes any box out of it."""
    if not _is_tensor(leaf):
        return BytesStorageMetadata()
    size = torch.Size(leaf.shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(properties=TensorProperties(dtype=_dtype(leaf)), size=size, chunks=[whole])


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, ArraySpec) and leaf.kind == "torch"


def _has_arrays(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_has_arrays, value))
    return any(map(_has_arrays, value.values())) if isinstance(value, dict) else isinstance(value, ArraySpec)


def _dtype(spec: ArraySpec) -> torch.dtype:
    return cast("torch.dtype", getattr(torch, spec.dtype))


@contextmanager
def _targets(
    items: Sequence[ReadItem], planner: LoadPlanner, stored: Mapping[str, ArraySpec]
) -> Iterator[dict[str, ShardedArray]]:
    """The boxes to fill, by name; afterwards the planner is told. What cannot be filled in place is filled aside."""
    pieces: dict[str, list[tuple[Path, torch.Tensor]]] = {}
    resolved: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
    taken: set[int] = set()
    for item in items:
        fqn = item.storage_index.fqn
        tensor, dtype = planner.resolve_tensor(item).detach(), _dtype(stored[fqn])
        tied = tensor.numel() > 0 and tensor.data_ptr() in taken
        aside = tensor.dtype != dtype or tensor.device.type != "cpu" or tied
        target = torch.empty(tensor.shape, dtype=dtype) if aside else tensor
        taken.add(tensor.data_ptr())
        resolved.append((item, tensor, target))
        pieces.setdefault(fqn, []).append((tuple(item.storage_offsets), target))
    yield {fqn: ShardedArray(stored[fqn].shape, _dtype(stored[fqn]), boxes) for fqn, boxes in pieces.items()}
    for item, tensor, target in resolved:
        if target is not tensor:
            tensor.copy_(target)
        planner.commit_tensor(item, tensor)
