"""A training state whose tensors are spread over several processes (DTensor, FSDP2): saved and restored through DCP.

Models and optimizers are what DCP makes of them: tensors by name, of each the shards of each rank, so that any number
of ranks restores them. Of all else (schedulers, scalers, generators, loaders) every rank has its own, stored by rank,
each in a tuple, which DCP leaves as it is: ``{"0": (state,), "1": (state,)}``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckptstore import Checkpoint, Repository, ShardedArray
from ckptstore.adapters.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.adapters.torch_parts import (
    PROGRESS,
    Generator,
    GlobalRandom,
    Module,
    Optimizer,
    Part,
    is_dtensor,
    is_spread,
    rank,
    whole,
)
from ckptstore.errors import EpochExistsError, InvalidRecordError, RanksFailedError

log = logging.getLogger("ckptstore")

T = TypeVar("T")
Parts = Mapping[str, Part]


def together(act: Callable[[], T]) -> T:
    """What ``act`` gives on rank 0, on all of them; or its error, on all of them."""
    if not dist.is_initialized():
        return act()
    told: list[Any] = [None, None]
    if rank() == 0:
        try:
            told[0] = act()
        except Exception as error:  # noqa: BLE001 (raised below, on all ranks)
            told[1] = error
    dist.broadcast_object_list(told)
    if told[1] is not None:
        raise told[1]
    found: T = told[0]
    return found


def any_rank(parts: Parts, here: bool) -> bool:
    """Whether it holds on any rank. A collective: all ranks have to ask."""
    if not dist.is_initialized():
        return here
    device = next(p.device for part in parts.values() if isinstance(part, Module) for p in part.thing.parameters())
    told = torch.tensor(float(here), device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told.item())


def save(
    parts: Parts,
    progress: Mapping[str, Any],
    repo: Repository,
    epoch: int,
    metadata: Mapping[str, Any] | None,
    replace: bool,
) -> Checkpoint:
    """Save all parts as one checkpoint of all ranks. They all have to call it.

    Raises:
        EpochExistsError: on all ranks.
        RanksFailedError: other ranks failed; nothing was committed. One that failed raises its own error.
    """
    state = _tensors(parts)
    for name, part in _rest(parts).items():
        state[name] = {str(rank()): (whole(name, part.state()),)}
    state[PROGRESS] = {"0": (whole(PROGRESS, dict(progress)),)} if rank() == 0 else {}
    writer = CkptStoreWriter(repo, epoch, metadata=metadata, replace=replace)
    try:
        dcp.save(state, storage_writer=writer)
    except dcp.CheckpointException as failed:
        errors = {number: error for number, (error, _) in sorted(failed.failures.items())}
        exists = [error for error in errors.values() if isinstance(error, EpochExistsError)]
        if exists or rank() in errors:
            raise (exists[0] if exists else errors[rank()]) from failed
        reasons = {number: f"has failed: {type(error).__name__}: {error}" for number, error in errors.items()}
        lines = "; ".join(f"rank {number}: {why}" for number, why in reasons.items())
        raise RanksFailedError(f"epoch {epoch} was not saved: {lines}", ranks=reasons, epoch=epoch) from failed
    return repo.checkpoint(epoch)


class Restore:
    """A checkpoint that ``save`` has made, on its way back into parts, be they spread or not.

    Args:
        parts: those that the checkpoint has.
    """

    def __init__(self, parts: Parts, repo: Repository, epoch: int) -> None:
        self._parts = parts
        self._reader = CkptStoreReader(repo, epoch)
        self._checkpoint = repo.checkpoint(epoch)
        self._tensors = _tensors(parts)
        self._alone = not is_spread(parts)  # then each process may restore when it likes
        self.progress: dict[str, Any] = self._checkpoint.load(PROGRESS)["0"][0]

    def misfits(self, *, strict: bool) -> list[str]:
        """What does not fit, each path; with ``strict`` also what only one side has. The same on all ranks."""
        states = {name: _outline(state) for name, state in self._tensors.items()}
        found = (self._checkpoint.mismatches(name, state, strict=strict) for name, state in states.items())
        return [line for lines in found for line in lines]

    def load(self) -> None:
        """Fill the tensors, in place.

        Raises:
            CorruptionError, StoreError: as the first rank has met it, on all of them; parts may be changed already.
        """
        if self._alone:
            self._checkpoint.load(into=self._tensors, strict=False)
        else:
            planner = DefaultLoadPlanner(allow_partial_load=True)  # what is missing was told before
            try:
                dcp.load(self._tensors, storage_reader=self._reader, planner=planner)
            except dcp.CheckpointException as failed:
                raise failed.failures[min(failed.failures)][0] from failed
        options = StateDictOptions(strict=False)
        for name, part in self._parts.items():
            if isinstance(part, Module):
                set_model_state_dict(part.thing, self._tensors[name], options=options)
        for name, part in self._parts.items():
            if isinstance(part, Optimizer):
                set_optimizer_state_dict(_model_of(part, self._parts), part.thing, self._tensors[name], options=options)

    def apply(self) -> None:
        """Bring back what is no model and no optimizer."""
        for name, part in _rest(self._parts).items():
            saved = self._checkpoint.load(name)
            if str(rank()) not in saved and isinstance(part, (Generator, GlobalRandom)):
                log.warning("%s was saved of %d ranks: rank %d keeps its own", name, len(saved), rank())
                continue
            part.apply(saved.get(str(rank()), saved["0"])[0])


def _tensors(parts: Parts) -> dict[str, Any]:
    """Models and optimizers as DCP wants them."""
    state: dict[str, Any] = {}
    for name, part in parts.items():
        if isinstance(part, Module):
            state[name] = get_model_state_dict(part.thing)
        elif isinstance(part, Optimizer):
            state[name] = get_optimizer_state_dict(_model_of(part, parts), part.thing)
    return state


def _outline(state: Any) -> Any:
    """The same state, with whole arrays that have no pieces in place of sharded tensors: their forms are compared."""
    if isinstance(state, dict):
        return {key: _outline(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_outline(value) for value in state]
    if isinstance(state, torch.Tensor) and is_dtensor(state):
        return ShardedArray(tuple(state.shape), state.dtype, [])
    return state


def _rest(parts: Parts) -> dict[str, Part]:
    return {name: part for name, part in parts.items() if not isinstance(part, (Module, Optimizer))}


def _model_of(optimizer: Optimizer, parts: Parts) -> Any:
    """The model whose parameters the optimizer has. InvalidRecordError if there is not one that has all."""
    wanted = {id(parameter) for group in optimizer.thing.param_groups for parameter in group["params"]}
    for part in parts.values():
        if isinstance(part, Module) and wanted <= part.parameters().keys():
            return part.thing
    raise InvalidRecordError(
        f"{optimizer.name}: no model of this state has all of its parameters. They are saved by the names that their "
        "model has for them: give that model as well, and each optimizer the parameters of one model"
    )
