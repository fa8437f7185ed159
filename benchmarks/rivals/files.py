"""Formats of one file: torch.save and safetensors, bare and with the fsync that careful trainers add."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from benchmarks.rivals.base import FOLDER, Rival, sync_tree
from benchmarks.states import State, named


class TorchSave(Rival):
    """As most trainers use it."""

    name = "torch.save"
    about = "`torch.save`, `torch.load(weights_only=True)`. Nothing is synced"
    durable = False
    in_place = False
    where: ClassVar[tuple[str, ...]] = (FOLDER,)
    works: ClassVar[tuple[str, ...]] = ("save", "restore", "partial", "again")

    def prepare(self) -> None:
        os.makedirs(self.place.path, exist_ok=True)
        self.path = os.path.join(self.place.path, "state.pt")

    def save(self, state: State, number: int) -> None:
        torch.save(state, self.path)

    def restore(self, target: State | None) -> Any:
        return torch.load(self.path, weights_only=True)

    def partial(self, names: list[str]) -> dict[str, Any]:
        state = torch.load(self.path, weights_only=True, mmap=True)
        return {f"model.{name}": state["model"][name].clone() for name in names}


class TorchSaveSynced(TorchSave):
    """A scratch file, made durable and renamed."""

    name = "torch.save + fsync"
    about = "`torch.save` into a scratch file; fsync of file and folder and a rename added, as careful trainers do"
    durable = True
    works: ClassVar[tuple[str, ...]] = ("save", "restore", "restore cold", "partial", "again")

    def save(self, state: State, number: int) -> None:
        torch.save(state, self.path + ".tmp")
        sync_tree(self.place.path)
        os.replace(self.path + ".tmp", self.path)
        sync_tree(self.place.path)


class Safetensors(Rival):
    """Tensors only: it keeps neither the nesting nor what is no tensor."""

    name = "safetensors"
    about = "`save_file`, `load_file`; tensors only, tied ones once. Nothing is synced"
    durable = False
    in_place = False
    works: ClassVar[tuple[str, ...]] = ("save", "restore", "partial")
    needs: ClassVar[tuple[str, ...]] = ("safetensors",)

    def prepare(self) -> None:
        os.makedirs(self.place.path, exist_ok=True)
        self.path = os.path.join(self.place.path, "state.safetensors")

    def save(self, state: State, number: int) -> None:
        from safetensors.torch import save_file

        tensors = {f"{number:06}|{name}": tensor for number, (name, tensor) in enumerate(named(state).items())}
        save_file(tensors, self.path)

    def restore(self, target: State | None) -> Any:
        from safetensors.torch import load_file

        return dict(sorted(load_file(self.path).items()))

    def partial(self, names: list[str]) -> dict[str, Any]:
        from safetensors import safe_open

        wanted = {f"model.{name}" for name in names}
        with safe_open(self.path, framework="pt") as file:
            keys = {key: key.partition("|")[2] for key in file.keys()}  # noqa: SIM118 (it is no dict)
            return {name: file.get_tensor(key) for key, name in keys.items() if name in wanted}


class SafetensorsSynced(Safetensors):
    """With the missing fsync."""

    name = "safetensors + fsync"
    about = "`save_file`; fsync of file and folder added"
    durable = True
    works: ClassVar[tuple[str, ...]] = ("save", "restore", "restore cold", "partial")

    def save(self, state: State, number: int) -> None:
        super().save(state, number)
        sync_tree(self.place.path)


FILES: tuple[type[Rival], ...] = (TorchSaveSynced, TorchSave, SafetensorsSynced, Safetensors)
