"""The states that are saved and restored, by name; all but their scale comes from one really trained model.

How far a checkpoint shrinks depends on what training leaves in it, so (but for ``random``) nothing here is made up:
what the cached training state (``make_state.py``) is too small for is filled with copies of it, each scaled by another
number. Scaling gives every copy mantissas of its own and keeps the distribution, so no copy can be stored as a
repetition of another.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.make_state import CACHE, cached

MIB = 1024 * 1024
SMALL_ARRAYS = 100_000
CHANGED = 0.01

State = dict[str, Any]
Bytes = npt.NDArray[np.uint8]

ABOUT = {
    "adam": "a transformer of 22 million parameters, really trained with AdamW: weights and both moments in fp32 "
    "(above 0.25 GiB: scaled copies of it)",
    "dense-fp32": "its weights alone, fp32, in scaled copies",
    "dense-bf16": "the same, rounded to bf16",
    "sparse": "its Adam moments with 70 % of the rows zero, as embeddings that are seldom hit leave them",
    "random": "random bits: nothing shrinks it",
    "small": f"weights cut into {SMALL_ARRAYS:,} arrays",
    "one": "the same bytes in one array",
    "lora": "frozen fp32 weights and adapters that are 1 % of the bytes; only these change between saves",
}


def build(name: str, mib: int) -> State:
    """The state of that name with about ``mib`` MiB, the same in every process.

    Raises:
        KeyError: there is no such state.
    """
    if name == "small":  # a hundred thousand tensors are cut faster than they are read
        return _small(mib)
    state: State = torch.load(prepare(name, mib), weights_only=True)
    return state


def prepare(name: str, mib: int) -> Path:
    """The file with the state; trains and builds it first where it is missing."""
    name = "one" if name == "small" else name
    recipe = blake3.blake3(Path(__file__).read_bytes()).hexdigest()[:8]  # another recipe is another state
    path = CACHE / f"built-{name}-{mib}-{recipe}.pt"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        for old in CACHE.glob(f"built-{name}-{mib}-*.pt"):
            old.unlink(missing_ok=True)
        state = _BUILDERS[name](mib)
        scratch = path.with_suffix(f".{os.getpid()}")
        torch.save(state, scratch)
        scratch.replace(path)
    return path


def blank(name: str, mib: int) -> State:
    """An equal structure of zeros in memory that is touched already: what a restore fills in place."""
    state = build(name, mib)
    for tensor in tensors(state):
        tensor.zero_()
    return state


def change(name: str, state: State) -> int:
    """Change one hundredth in place, as one more step of training would; the bytes that changed.

    ``lora``: the adapters. Others: one run of neighbouring values in each tensor of at least 64 KiB.
    """
    if name == "lora":
        touched = tensors(state["model"]["lora"])
    else:
        touched = []
        for tensor in tensors(state):
            if tensor.nbytes >= 64 * 1024:
                flat = tensor.view(-1)
                touched.append(flat[: max(int(flat.numel() * CHANGED), 1)])
    for tensor in touched:
        tensor.mul_(1.01)
    return sum(int(tensor.nbytes) for tensor in touched)


def tensors(state: Any) -> list[torch.Tensor]:
    """All tensors of a state in order, tied ones once."""
    return list(named(state).values())


def named(state: Any) -> dict[str, torch.Tensor]:
    """All tensors of a state by path, tied ones under their first path only."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def walk(node: Any, path: str) -> None:
        if isinstance(node, torch.Tensor):
            # An empty or one-element tensor may share an address with nothing: the path alone tells it apart.
            if node.data_ptr() not in seen or not node.numel():
                seen.add(node.data_ptr())
                found[path] = node
        elif isinstance(node, (dict, list, tuple)):
            for key, child in node.items() if isinstance(node, dict) else enumerate(node):
                walk(child, f"{path}.{key}" if path else str(key))

    walk(state, "")
    return found


def flat_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor, without a copy."""
    data: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def pieces(state: Any) -> list[Bytes]:
    """The bytes of all tensors in order; a list of byte arrays is that already."""
    if isinstance(state, list):
        return state
    return [flat_bytes(tensor) for tensor in tensors(state)]


def size(state: Any) -> int:
    """Bytes of all tensors."""
    return sum(piece.size for piece in pieces(state))


def digest(state: Any) -> str:
    """One digest of all tensors' bytes in order: what is restored must have that of what was saved."""
    total = blake3.blake3()
    for piece in pieces(state):
        total.update(piece.data)
    return total.hexdigest()


def parts(state: Any, limit: int = 32 * MIB) -> Iterator[list[Bytes]]:
    """The bytes of all tensors, cut into parts of ``limit`` bytes."""
    part: list[Bytes] = []
    room = limit
    for item in pieces(state):
        data = item
        while data.size:
            part.append(data[:room])
            data, room = data[room:], room - part[-1].size
            if not room:
                yield part
                part, room = [], limit
    if part:
        yield part


def _source(mib: int) -> str:
    return "tiny" if mib < 64 else "full"


@functools.lru_cache(maxsize=1)
def _trained(source: str) -> State:
    state: State = torch.load(cached(source), weights_only=True)
    return state


def _scaled(weights: dict[str, torch.Tensor], nbytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of ``weights``, each times another number, until there are ``nbytes`` bytes of fp32."""
    copy, left = 0, nbytes
    while left > 0:
        for name, tensor in weights.items():
            if left <= 0 or tensor.dtype != torch.float32:
                continue
            scaled = tensor * (0.75 + 0.0171 * copy)
            if scaled.nbytes > left:
                scaled = scaled.view(-1)[: max(left // 4, 1)].clone()
            left -= scaled.nbytes
            yield f"{copy}.{name}", scaled
        copy += 1


def _weights(mib: int) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in named(_trained(_source(mib))["model"]).items() if tensor.nbytes >= 1024}


def _adam(mib: int) -> State:
    state = _trained(_source(mib))
    _trained.cache_clear()  # it is handed out, and may be changed
    copies = round(mib * MIB / size(state))
    if copies <= 1:
        return state
    grown: State = {}
    for copy in range(copies):
        factor = 0.75 + 0.0171 * copy
        suffix = f".{copy}" if copy else ""
        grown[f"model{suffix}"] = {k: v * factor for k, v in named(state["model"]).items()}
        moments = named(state["optimizer"]["state"])
        grown[f"optimizer{suffix}"] = {k: v * factor if v.dim() else v.clone() for k, v in moments.items()}
    return grown


def _dense_fp32(mib: int) -> State:
    return {"model": dict(_scaled(_weights(mib), mib * MIB))}


def _dense_bf16(mib: int) -> State:
    return {"model": {name: t.to(torch.bfloat16) for name, t in _scaled(_weights(mib), 2 * mib * MIB)}}


def _sparse(mib: int) -> State:
    moments = {k: v for k, v in named(_trained(_source(mib))["optimizer"]["state"]).items() if v.dim() == 2}
    chance = torch.Generator().manual_seed(7)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in _scaled(moments, mib * MIB):
        if tensor.dim() == 2:
            tensor[torch.rand(len(tensor), generator=chance) < 0.7] = 0
        state[name] = tensor
    return {"optimizer": state}


def _random(mib: int) -> State:
    chance = np.random.default_rng(7)
    # Bits of any pattern make NaNs among floats; as integers they are what they are.
    rows = (torch.from_numpy(chance.integers(-(2**31), 2**31, (MIB, 1), np.int32)) for _ in range(mib // 4))
    return {"model": {f"w{number}": tensor for number, tensor in enumerate(rows)}}


def _one(mib: int) -> State:
    flat = torch.cat([tensor.view(-1) for _, tensor in _scaled(_weights(mib), mib * MIB)])
    each = max(flat.numel() // SMALL_ARRAYS, 1)
    return {"model": {"all": flat[: each * (flat.numel() // each)].clone()}}


def _small(mib: int) -> State:
    flat = build("one", mib)["model"]["all"]
    each = max(flat.numel() // SMALL_ARRAYS, 1)
    return {"model": {f"a{number}": piece.clone() for number, piece in enumerate(flat.split(each))}}


def _lora(mib: int) -> State:
    base = dict(_scaled(_weights(mib), int(mib * MIB * (1 - CHANGED))))
    matrix = next(tensor for tensor in base.values() if tensor.dim() == 2 and len(tensor) >= 64)
    each = int(mib * MIB * CHANGED) // 4 // 32
    flat = matrix.reshape(-1)
    adapters = {}
    for number in range(32):
        at = number * 997 % max(flat.numel() - each, 1)
        adapters[f"{number}.weight"] = flat[at : at + each] * (0.1 + 0.001 * number)
    return {"model": {"base": base, "lora": adapters}}


_BUILDERS: dict[str, Callable[[int], State]] = {
    "adam": _adam,
    "dense-fp32": _dense_fp32,
    "dense-bf16": _dense_bf16,
    "sparse": _sparse,
    "random": _random,
    "one": _one,
    "lora": _lora,
}
