"""What trainers do by hand on S3: one file in memory, one put."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import torch

from benchmarks.rivals.base import S3, Rival
from benchmarks.states import State


class TorchS3fs(Rival):
    """``torch.save`` into memory, then s3fs."""

    name = "torch.save + s3fs"
    about = "`torch.save` into memory, one `pipe_file`; `cat_file`, `torch.load`. Durable: the server has answered"
    in_place = False
    where: ClassVar[tuple[str, ...]] = (S3,)
    works: ClassVar[tuple[str, ...]] = ("save", "restore", "again")

    def prepare(self) -> None:
        self.fs = self.place.client()
        self.key = f"{self.place.path}/state.pt"

    def save(self, state: State, number: int) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.fs.pipe_file(self.key, buffer.getvalue())

    def restore(self, target: State | None) -> Any:
        return torch.load(io.BytesIO(self.fs.cat_file(self.key)), weights_only=True)


OBJECTS: tuple[type[Rival], ...] = (TorchS3fs,)
