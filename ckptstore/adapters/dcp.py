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
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckptstore import Checkpoint, InvalidArgumentError, InvalidRecordError, Repository, options
from ckptstore import open as open_repository
from ckptstore.adapters.dcp_plans import Leaves, epoch_of, has_arrays, into_of, records_of, targets_of
from ckptstore.errors import CkptStoreError, EpochNotFoundError
from ckptstore.gathered import RankPart
from ckptstore.manifest import check_epoch
from ckptstore.skeleton import join


class _Save(threading.local):
    """What is under way. DCP does each save from one thread, so two that overlap do not get into each other."""

    def __init__(self, epoch: int | None) -> None:
        self.epoch = epoch
        self.error: Exception | None = None
        self.rank = 0
        self.part: RankPart | None = None
        self.alone: ExitStack | None = None


class CkptStoreWriter(StorageWriter):  # type: ignore[misc]  # torch has no types here
    """Saves one epoch for ``dcp.save`` and ``dcp.async_save``. Every rank makes one.

    Errors of a rank come out of ``dcp.save`` on all of them, as torch's ``CheckpointException``, whose ``failures``
    tell ranks and errors; whatever was saved before stays as it was.

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
        self._now = _Save(None if epoch is None else check_epoch(epoch))
        options.check_metadata(metadata)
        options.check_flag("replace", replace)
        self._metadata = metadata
        self._replace = replace
        self._repo = where if isinstance(where, Repository) else open_repository(where)

    def __getstate__(self) -> dict[str, Any]:
        """For the process that saves in the background: all but what is under way here."""
        return {**vars(self), "_now": self._now.epoch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _now=_Save(state["_now"]))

    # ---- what DCP calls, in this order -----------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins. An error is kept for the next step: here it would not reach the other ranks."""
        self._now.error = None
        if checkpoint_id is not None:
            try:
                self._now.epoch = epoch_of(checkpoint_id)
            except InvalidArgumentError as error:
                self._now.error = error

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be one checkpoint."""
        if self._now.error is not None:
            raise self._now.error
        if self._now.epoch is None:
            raise InvalidArgumentError("which epoch? CkptStoreWriter(repo, epoch), or dcp.save(.., checkpoint_id=..)")
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError("use_collectives=False saves each rank alone, which is no checkpoint: leave it")
        self._now.rank = kwargs["rank"]
        self._now.part = self._now.alone = None  # what is left of a save before that has failed ends here

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The paths of this rank's items travel with its plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: each rank is told how many there are. A planner may keep the plan for later saves."""
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; its bytes go to the coordinator by DCP's own collective."""
        alone = plan.storage_data == 1
        records = records_of(plan.items, planner, alone=alone)
        options.flatten_all(records, part=not alone)  # what cannot be stored is refused before anything is sent
        data = self._write_alone(records) if alone else self._write_part(records, plan.storage_data)
        done: Future[list[WriteResult]] = Future()
        index = MetadataIndex(f"rank {self._now.rank}")
        done.set_result([WriteResult(index=index, size_in_bytes=0, storage_data=data)])
        return done

    def _write_alone(self, records: Mapping[str, Any]) -> bytes:
        """All there is: an ordinary save, in fewer requests. Nobody has to be told of it."""
        with ExitStack() as stack:
            txn = stack.enter_context(self._repo.begin(cast("int", self._now.epoch), self._metadata, self._replace))
            for name, state in records.items():
                txn.write(name, state)
            txn.settle()
            self._now.alone = stack.pop_all()  # to close it is to commit
        return b""

    def _write_part(self, records: Mapping[str, Any], world_size: int) -> bytes:
        part = self._repo.begin_part(
            cast("int", self._now.epoch), rank=self._now.rank, world_size=world_size, group="dcp", replace=self._replace
        )
        with part:
            for name, state in records.items():
                part.write(name, state)
            data = part.finish()
        self._now.part = part  # its lease has to last until the coordinator has committed
        return data

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: commit."""
        if self._now.alone is not None:
            stack, self._now.alone = self._now.alone, None
            stack.close()
            return
        parts = [result.storage_data for of_rank in results for result in of_rank]
        part, self._now.part = cast("RankPart", self._now.part), None
        try:
            self._repo.commit_parts(cast("int", self._now.epoch), parts, self._metadata, self._replace)
        except BaseException as error:
            part.end(error)
            raise
        part.end()

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
        self._epoch = None if epoch is None else check_epoch(epoch)
        self._checkpoint: Checkpoint | None = None
        self._error: Exception | None = None
        self._structures: dict[str, Any] = {}
        self._leaves = Leaves({}, {})
        self._repo = where if isinstance(where, Repository) else open_repository(where, create=False)

    @property
    def checkpoint(self) -> Checkpoint:
        """The one that was read last."""
        if self._checkpoint is None:
            raise InvalidArgumentError("nothing was loaded yet")
        return self._checkpoint

    # ---- what DCP calls, in this order -----------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins. An error is kept for a step that all ranks hear of."""
        self._error = None
        if checkpoint_id is not None:
            try:
                self._epoch = epoch_of(checkpoint_id)
            except InvalidArgumentError as error:
                self._error = error

    def read_metadata(self) -> Metadata:
        """What the checkpoint has. An error is kept for the next step, because DCP drops it here."""
        try:
            if self._error is None:
                return self._read_metadata()
        except Exception as error:  # noqa: BLE001 (raised by set_up_storage_reader)
            self._error = error
        return Metadata(state_dict_metadata={}, planner_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise what was found out before."""
        error, self._error = self._error, None
        if error is not None:
            raise error

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
        for targets in targets_of(tensors, planner, self._leaves):
            into = into_of(targets, self._leaves, self._structures)
            if into:
                self.checkpoint.load(into=into, strict=False)
            for target in targets:
                target.finish(planner)
        self._read_values([item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # ---- what the checkpoint has ------------------------------------------------------------------------------

    def _read_metadata(self) -> Metadata:
        self._checkpoint = None
        self._checkpoint = self._repo.latest() if self._epoch is None else self._repo.checkpoint(self._epoch)
        if self._checkpoint is None:
            raise EpochNotFoundError(f"there is no checkpoint in {self._repo.url}")
        records = self._checkpoint.records.items()
        self._structures = {name: self._checkpoint.structure(name) for name, one in records if one.kind != "file"}
        leaves = self._leaves = Leaves.of(self._structures)
        return Metadata(state_dict_metadata=leaves.metadata(), planner_data=leaves.paths(self._structures))

    def _read_values(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        """What is no tensor: the structure has it already; where there are arrays in it, they are read."""
        here: Mapping[str, Any] = getattr(planner, "state_dict", {})
        names: dict[str, list[str]] = {}
        for item in items:
            fqn = item.storage_index.fqn
            if has_arrays(self._leaves.values[fqn]):
                if isinstance(here.get(item.dest_index.fqn), torch.Tensor):
                    raise InvalidRecordError(f"{fqn}: no tensor in the checkpoint, but one here: load it without DCP")
                names.setdefault(self._leaves.places[fqn][0], []).append(fqn)
        read = {name: self.checkpoint.load(name, paths=self._patterns(fqns)) for name, fqns in names.items()}
        for item in items:
            fqn = item.storage_index.fqn
            value, (name, path) = self._leaves.values[fqn], self._leaves.places[fqn]
            if has_arrays(value):
                value = read[name]
                for key in path:
                    value = value[key]
            packed = io.BytesIO()
            torch.save(value, packed)  # for planners, which unpack it right here
            packed.seek(0)
            planner.load_bytes(item, packed)

    def _patterns(self, fqns: Iterable[str]) -> list[str] | None:
        """The paths in their record; None for all of it: it has no path, and what lies below an empty key may not."""
        paths = [reduce(join, self._leaves.places[fqn][1], "") for fqn in fqns]
        return [glob.escape(path) for path in paths] if all(paths) else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is an epoch."""
        return CkptStoreWriter.validate_checkpoint_id(checkpoint_id)
