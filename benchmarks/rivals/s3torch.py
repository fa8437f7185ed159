"""Amazon's S3 connector for PyTorch: as a file object for torch.save, and as storage of torch DCP."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from benchmarks.rivals.base import S3, Rival
from benchmarks.rivals.dcp import THREADS, Dcp
from benchmarks.states import State

REGION = "us-east-1"


class S3Torch(Rival):
    """``S3Checkpoint``."""

    name = "s3torchconnector"
    about = "`torch.save` to `S3Checkpoint.writer`, `torch.load` from its reader. Durable: the server has answered"
    in_place = False
    where: ClassVar[tuple[str, ...]] = (S3,)
    needs: ClassVar[tuple[str, ...]] = ("s3torchconnector",)

    def prepare(self) -> None:
        from s3torchconnector import S3Checkpoint

        options = environment(self.place.options)
        self.checkpoint: Any = S3Checkpoint(region=REGION, endpoint=options["endpoint_url"], s3client_config=config())
        self.key = f"s3://{self.place.path}/state.pt"

    def save(self, state: State, number: int) -> None:
        with self.checkpoint.writer(self.key) as writer:
            torch.save(state, writer)

    def restore(self, target: State | None) -> Any:
        with self.checkpoint.reader(self.key) as reader:
            return torch.load(reader, weights_only=True)


class S3TorchDcp(Dcp):
    """``S3StorageWriter`` and its reader made for DCP."""

    name = "s3torchconnector, DCP"
    about = "`S3StorageWriter(thread_count=2)` and `S3StorageReader`, `no_dist`. Durable: the server has answered"
    durable = True
    where: ClassVar[tuple[str, ...]] = (S3,)
    works: ClassVar[tuple[str, ...]] = ("save", "restore")
    needs: ClassVar[tuple[str, ...]] = ("s3torchconnector",)

    def prepare(self) -> None:
        super().prepare()
        environment(self.place.options)
        self.path = f"s3://{self.place.path}/"

    def writer(self) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        return S3StorageWriter(REGION, self.path, s3client_config=config(), thread_count=THREADS)

    def reader(self) -> Any:
        from s3torchconnector.dcp import S3StorageReader

        return S3StorageReader(REGION, self.path, s3client_config=config())


def environment(options: dict[str, Any]) -> dict[str, Any]:
    """Its client takes credentials, and its DCP storage the endpoint too, from the environment alone."""
    os.environ["AWS_ACCESS_KEY_ID"] = options["key"]
    os.environ["AWS_SECRET_ACCESS_KEY"] = options["secret"]
    os.environ["AWS_ENDPOINT_URL"] = options["endpoint_url"]
    os.environ["AWS_REGION"] = REGION
    return options


def config() -> Any:
    """Path-style addresses: the test server has no name of its own for each bucket."""
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True)


S3TORCH: tuple[type[Rival], ...] = (S3TorchDcp, S3Torch)
