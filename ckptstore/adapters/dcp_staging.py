"""Staging for ``dcp.async_save``: one copy of the state in memory that is kept, and 10 µs a tensor beside it.

    stager = CkptStoreStager()  # one for all saves
    dcp.async_save(state, storage_writer=CkptStoreWriter(repo, step), async_stager=stager)

DCP's own stagers take a DTensor apart and put it together again, a quarter of a millisecond each: with a thousand
parameters and two moments of each more than the bytes take. And they write into the copy that they keep whether or not
the save before has read it to the end; here that copy is used again only when nobody has it any more.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

_ALIGN = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class CkptStoreStager(AsyncStager):  # type: ignore[misc]  # torch has no types here
    """Copies a state dict into memory that is used again. Every rank makes one, and keeps it.

    Tensors that are the same memory stay so. The copy is on the CPU; where a tensor comes from a CUDA device it is
    pinned. While a save is under way its copy stays as it is: one that begins meanwhile takes memory of its own.
    """

    _synchronize_after_execute = False  # it is all there when stage() returns

    def __init__(self) -> None:
        self._free: torch.Tensor | None = None

    def stage(self, state_dict: Any, **_: Any) -> Any:
        """The copy. What has tensors of other kinds than plain ones and DTensors goes through DCP's own stager."""
        with torch.no_grad():
            return self._stage(state_dict)

    def close(self) -> None:
        """Let go of the memory."""
        self._free = None

    def _stage(self, state_dict: Any) -> Any:
        places: dict[tuple[object, ...], tuple[int, torch.Tensor]] = {}
        try:
            size = _collect(state_dict, places)
        except _OtherKindError:
            return DefaultStager(StagingOptions(False, False, False, False)).stage(state_dict)
        pinned = any(tensor.is_cuda for _, tensor in places.values())
        memory = self._take(size, pinned)
        copies = {}
        for key, (at, tensor) in places.items():
            target = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = target.copy_(tensor)
        return _walk(state_dict, lambda tensor: copies[_key(tensor)])

    def _take(self, size: int, pinned: bool) -> torch.Tensor:
        free, self._free = self._free, None
        if free is None or free.numel() < size or (pinned and not free.is_pinned()):
            free = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        view = free.numpy()[:size]  # all copies share it, and it ends with the last of them
        weakref.finalize(view, self._give, free).atexit = False
        return torch.from_numpy(view)

    def _give(self, memory: torch.Tensor) -> None:
        if self._free is None or self._free.numel() < memory.numel():
            self._free = memory


class _OtherKindError(Exception):
    """A tensor of which only DCP knows how it is copied."""


def _collect(state: Any, places: dict[tuple[object, ...], tuple[int, torch.Tensor]]) -> int:
    """Give each tensor a place, tied ones one; the bytes of all."""
    end = 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal end
        key = _key(tensor)
        if key not in places:
            places[key] = end, tensor
            end += -(-tensor.nbytes // _ALIGN) * _ALIGN
        return tensor

    _walk(state, note, plan=True)
    return end


def _key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory in the same form; those without bytes have no memory."""
    where = (tensor.device, tensor.data_ptr()) if tensor.nbytes else ()
    return (*where, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _walk(node: Any, leaf: Callable[[torch.Tensor], torch.Tensor], *, plan: bool = False) -> Any:
    """A state with ``leaf(tensor)`` for each tensor; with ``plan`` for the calls alone, and the result is nothing."""
    if isinstance(node, torch.Tensor):
        return _tensor(node, leaf, plan)
    if isinstance(node, dict):
        items = {key: _walk(child, leaf, plan=plan) for key, child in node.items()}
        if plan or type(node) is dict:
            return items
        made = copy.copy(node)  # with what it has beside its items
        made.update(items)
        return made
    if type(node) is list:
        return [_walk(child, leaf, plan=plan) for child in node]
    if isinstance(node, tuple) and not isinstance(node, torch.Size):
        children = [_walk(child, leaf, plan=plan) for child in node]
        return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    return node if plan else copy.deepcopy(node)


def _tensor(node: torch.Tensor, leaf: Callable[[torch.Tensor], torch.Tensor], plan: bool) -> Any:
    local = node.to_local() if isinstance(node, DTensor) else node
    if type(local) not in _PLAIN or local.layout != torch.strided or local.is_quantized or local.is_meta:
        raise _OtherKindError
    found = leaf(local)
    if plan or not isinstance(node, DTensor):
        return found
    return DTensor(found, node._spec, requires_grad=False)
