"""The parts of a training state: what of each kind of thing is saved, and how it is brought back in place."""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from ckptstore import Checkpoint
from ckptstore.errors import InvalidArgumentError, InvalidRecordError

log = logging.getLogger("ckptstore")

PROGRESS, RNG = "progress", "rng"
RESERVED = (PROGRESS, RNG)
_ELSEWHERE = (
    ": its tensors are spread over several processes. TrainingState.save saves FSDP2 and DTensor in models and their "
    "optimizers; for the background and all else use torch.distributed.checkpoint, by dcp.async_save (docs/dcp.md)"
)


@runtime_checkable
class Stateful(Protocol):
    """What schedulers, scalers, StatefulDataLoader and many others are."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class Part:
    """One thing of the training: what is saved of it, what to load into, and how it takes what was loaded."""

    def __init__(self, name: str, thing: Any) -> None:
        self.name = name
        self.thing = thing

    @property
    def kind(self) -> str | None:
        """Its class: most take the state of another one without a word, and go on wrong. None if names tell enough."""
        return type(self.thing).__name__

    def state(self) -> Any:
        """What is saved: tensors are those of the thing itself."""
        return self.thing.state_dict()

    def target(self, checkpoint: Checkpoint) -> Any:
        """The state to load into, or None to load aside."""
        return None

    def apply(self, loaded: Any) -> None:
        """Take what was loaded."""
        self.thing.load_state_dict(loaded)


class Module(Part):
    def __init__(self, name: str, thing: Any) -> None:
        while isinstance(thing, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or hasattr(thing, "_orig_mod"):
            thing = thing._orig_mod if hasattr(thing, "_orig_mod") else thing.module
        super().__init__(name, thing)
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in thing.modules()):
            raise InvalidRecordError(f"{name} is a FullyShardedDataParallel{_ELSEWHERE}")

    @property
    def kind(self) -> str | None:
        return None  # parameters and buffers have names, and are compared

    def state(self) -> Any:
        held = self.thing.state_dict()
        state = OrderedDict((_clean(key), value) for key, value in held.items())
        if len(state) != len(held):
            raise InvalidRecordError("two parameters have one name when the wrappers of torch.compile are left out")
        about = {_clean(key): value for key, value in getattr(held, "_metadata", {}).items()}
        state._metadata = about  # type: ignore[attr-defined]
        return state

    def target(self, checkpoint: Checkpoint) -> Any:
        return self.state()

    def parameters(self) -> dict[int, str]:
        """Their names by identity."""
        return {id(parameter): _clean(key) for key, parameter in self.thing.named_parameters()}

    def apply(self, loaded: Any) -> None:
        held = self.thing.state_dict()
        about = getattr(held, "_metadata", {})
        for key in held:
            held[key] = loaded[_clean(key)]
        for key in about:
            about[key] = loaded._metadata.get(_clean(key), about[key])
        self.thing.load_state_dict(held)  # the tensors are there already: hooks and what is no tensor


class Optimizer(Part):
    def target(self, checkpoint: Checkpoint) -> Any:
        # One that has not stepped yet has no moments to load into: they are made by the load.
        state = self.state()
        return None if checkpoint.mismatches(self.name, state) else state

    def apply(self, loaded: Any) -> None:
        self.thing.load_state_dict(loaded)
        numbers = [number for group in loaded["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.thing.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in loaded["state"].get(number, {}).items():
                held = self.thing.state[parameter].get(key)
                tensors = isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor)
                if tensors and held.dtype != value.dtype:  # torch has cast it to the parameter's type
                    self.thing.state[parameter][key] = value.to(held.device)

    def order(self, names: dict[int, str]) -> list[list[str]]:
        """Names of its parameters by group: what the numbers in its state stand for."""
        groups = [group["params"] for group in self.thing.param_groups]
        return [[names.get(id(p), f"a tensor {list(p.shape)}") for p in group] for group in groups]


class Generator(Part):
    @property
    def kind(self) -> str | None:
        thing = self.thing.bit_generator if isinstance(self.thing, np.random.Generator) else self.thing
        return type(thing).__name__

    def state(self) -> Any:
        if isinstance(self.thing, torch.Generator):
            return self.thing.get_state()
        return self.thing.bit_generator.state if isinstance(self.thing, np.random.Generator) else self.thing.getstate()

    def apply(self, loaded: Any) -> None:
        if isinstance(self.thing, torch.Generator):
            self.thing.set_state(loaded)
        elif isinstance(self.thing, np.random.Generator):
            self.thing.bit_generator.state = loaded
        else:
            self.thing.setstate(loaded)


class GlobalRandom(Part):
    """The generators that nobody names: of Python, NumPy, torch, and of the devices that the models are on."""

    @property
    def kind(self) -> str | None:
        return None

    def _devices(self) -> list[Any]:
        return sorted({p.device for model in self.thing for p in model.parameters() if p.device.type != "cpu"}, key=str)

    def state(self) -> Any:
        devices = [torch.get_device_module(device).get_rng_state(*_where(device)) for device in self._devices()]
        numpy = np.random.get_state(legacy=False)
        return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "devices": devices}

    def apply(self, loaded: Any) -> None:
        random.setstate(loaded["python"])
        np.random.set_state(loaded["numpy"])
        torch.set_rng_state(loaded["torch"])
        devices = self._devices()
        if len(devices) != len(loaded["devices"]):
            log.warning("random numbers were saved of %d devices, %d are here", len(loaded["devices"]), len(devices))
        for device, state in zip(devices, loaded["devices"], strict=False):
            torch.get_device_module(device).set_rng_state(state, *_where(device))


def part_of(name: str, thing: Any) -> Part:
    """The part that a thing is. InvalidArgumentError if it cannot be saved, or the name is taken."""
    if name in RESERVED:
        raise InvalidArgumentError(f"the name {name!r} is taken: call this part something else")
    if isinstance(thing, nn.Module):
        return Module(name, thing)
    if isinstance(thing, torch.optim.Optimizer):
        return Optimizer(name, thing)
    if isinstance(thing, (torch.Generator, np.random.Generator, random.Random)):
        return Generator(name, thing)
    if not isinstance(thing, Stateful):
        raise InvalidArgumentError(
            f"{name} is a {type(thing).__name__} without state_dict and load_state_dict: plain values go into extra="
        )
    return Part(name, thing)


def whole(name: str, state: Any) -> Any:
    """``state``, if its tensors are whole. InvalidRecordError if one is a part of one that others have the rest of."""
    waiting = [(name, state)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, torch.Tensor) and is_dtensor(value):
            raise InvalidRecordError(f"{path} is a {type(value).__name__}{_ELSEWHERE}")
        if isinstance(value, Mapping):
            waiting += [(f"{path}.{key}", item) for key, item in value.items()]
    return state


def is_spread(parts: Mapping[str, Part]) -> bool:
    """Whether a model has tensors of which other processes have the rest."""
    models = [part.thing for part in parts.values() if isinstance(part, Module)]
    return any(is_dtensor(tensor) for model in models for tensor in model.parameters())


def is_by_rank(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint was saved by several ranks (``torch_sharded.save``)."""
    return PROGRESS in checkpoint.records and "0" in checkpoint.structure(PROGRESS)


def rank() -> int:
    """This process among those of the default group."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class Restore:
    """A checkpoint with whole tensors on its way back into parts. ``torch_sharded.Restore`` is the same by rank.

    Args:
        parts: those that the checkpoint has.
        names: of each optimizer's parameters now, see ``order``.
    """

    def __init__(self, parts: Mapping[str, Part], checkpoint: Checkpoint, names: Mapping[str, list[list[str]]]) -> None:
        self._parts = parts
        self._names = names
        self._checkpoint = checkpoint
        self._loaded: dict[str, Any] = {}
        self.progress: dict[str, Any] = checkpoint.load(PROGRESS) if PROGRESS in checkpoint.records else {}

    def misfits(self, *, strict: bool) -> list[str]:
        """What does not fit, each path; with ``strict`` also what only one side has."""
        then = self.progress.get("parameters", {})
        found = [line for name, now in self._names.items() for line in _reordered(name, then.get(name, now), now)]
        for name, part in self._parts.items():
            into = whole(name, part.target(self._checkpoint))
            if into is not None:
                found += self._checkpoint.mismatches(name, into, strict=strict)
        return found

    def load(self) -> None:
        """Fill the tensors, in place. Errors as of ``Checkpoint.load``."""
        into = {name: part.target(self._checkpoint) for name, part in self._parts.items()}
        self._loaded = self._checkpoint.load(into=into, strict=False)

    def apply(self) -> None:
        """Bring everything back that is not in place yet."""
        saver = self.progress.get("rank", 0)
        for name, part in self._parts.items():
            if name == RNG and saver != rank():
                log.warning("the random numbers were those of rank %d: this rank keeps its own", saver)
            else:
                part.apply(self._loaded[name])


def order(parts: Mapping[str, Part]) -> dict[str, list[list[str]]]:
    """The names of each optimizer's parameters, by group: what its numbers stand for."""
    names: dict[int, str] = {}
    for part in parts.values():
        if isinstance(part, Module):
            names |= {number: f"{part.name}.{key}" for number, key in part.parameters().items()}
    return {name: part.order(names) for name, part in parts.items() if isinstance(part, Optimizer)}


def _reordered(name: str, then: list[list[str]], now: list[list[str]]) -> list[str]:
    """Where an optimizer's numbers stand for other parameters now: its moments would go to the wrong ones."""
    if len(then) != len(now):
        return [f"{name}: {len(then)} parameter groups in the checkpoint, {len(now)} here"]
    return [
        f"{name}.param_groups.{number}: the parameters {old} in the checkpoint, {new} here"
        for number, (old, new) in enumerate(zip(then, now, strict=True))
        if old != new
    ]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether other processes have the rest of it."""
    return type(tensor).__module__.startswith("torch.distributed")


def _clean(key: str) -> str:
    return ".".join(step for step in key.split(".") if step != "_orig_mod")


def _where(device: Any) -> list[Any]:
    return [] if device.type == "mps" else [device]
