"""Orbax, JAX's checkpoint library, with NumPy arrays on a folder."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import ml_dtypes
import torch

from benchmarks.rivals.base import Rival, sync_tree
from benchmarks.states import State, named


class Orbax(Rival):
    """``PyTreeCheckpointer``: synchronous, for trees of NumPy arrays."""

    name = "Orbax"
    about = "`PyTreeCheckpointer` (OCDBT, zarr3, its zstd) with a flat dict of NumPy arrays. Left as it is"
    durable = False
    in_place = False
    needs: ClassVar[tuple[str, ...]] = ("orbax.checkpoint",)

    @classmethod
    def unavailable(cls) -> str:
        try:
            import orbax.checkpoint
        except ImportError as error:
            return f"not installed: {error.name}"
        return "" if orbax.checkpoint else "empty"

    def prepare(self) -> None:
        import orbax.checkpoint as ocp

        os.makedirs(self.place.path, exist_ok=True)
        self.path = os.path.join(os.path.abspath(self.place.path), "state")
        self.checkpointer: Any = ocp.PyTreeCheckpointer()

    def save(self, state: State, number: int) -> None:
        self.checkpointer.save(self.path, as_numpy(state), force=True)

    def restore(self, target: State | None) -> Any:
        import orbax.checkpoint as ocp

        tree = self.checkpointer.metadata(self.path).item_metadata
        tree = getattr(tree, "tree", tree)
        how = {name: ocp.RestoreArgs(restore_type=_ndarray()) for name in tree}
        found = self.checkpointer.restore(self.path, restore_args=how)
        return [found[name].reshape(-1).view("u1") for name in sorted(found)]

    def close(self) -> None:
        self.checkpointer.close()


class OrbaxSynced(Orbax):
    """With the missing fsync."""

    name = "Orbax + fsync"
    about = "`PyTreeCheckpointer`; fsync of all files and folders added"
    durable = True

    def save(self, state: State, number: int) -> None:
        super().save(state, number)
        sync_tree(self.place.path)


def as_numpy(state: State) -> dict[str, Any]:
    """All tensors as NumPy arrays without a copy, bf16 through ml_dtypes, in the order of their names."""
    arrays = {}
    for number, tensor in enumerate(named(state).values()):
        bf16 = tensor.dtype == torch.bfloat16
        arrays[f"{number:06}"] = tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if bf16 else tensor.numpy()
    return arrays


def _ndarray() -> type:
    import numpy as np

    return np.ndarray


ORBAX: tuple[type[Rival], ...] = (OrbaxSynced, Orbax)
