"""A state as it lies on several ranks: what FSDP2 makes of it, a row of blocks of the first dimension for each."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import states

State = states.State
_ON_RANKS = re.compile(r"(.+) on (\d+) ranks?")


def split_name(name: str) -> tuple[str, int]:
    """The state and the number of ranks of "adam on 4 ranks"; 0 where it is not on ranks at all."""
    found = _ON_RANKS.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)


def build(name: str, mib: int, rank: int, world: int, mesh: DeviceMesh | None) -> State:
    """The share of one rank, in memory of its own. Plain tensors without a mesh; scalars are plain on each rank."""
    whole = torch.load(states.prepare(name, mib), weights_only=True, mmap=True)

    def share(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: share(child) for key, child in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)(map(share, node))
        if not isinstance(node, torch.Tensor):
            return node
        if mesh is None or not node.dim():
            return node.clone()
        pieces = node.chunk(world)
        mine = pieces[rank].clone() if rank < len(pieces) else node[:0].clone()
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=node.shape, stride=node.stride())

    shared: State = share(whole)
    return shared


def local(state: Any) -> Any:
    """The same structure with the plain tensors that lie in this process."""
    if isinstance(state, dict):
        return {key: local(child) for key, child in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(local, state))
    return state.to_local() if isinstance(state, DTensor) else state


def blank(state: State) -> State:
    """Zeros in place of all bytes: what a load fills."""
    for tensor in states.tensors(local(state)):
        tensor.zero_()
    return state
