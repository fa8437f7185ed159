"""torch Distributed Checkpoint in one process: on a folder, through fsspec, and in the background."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.rivals.base import S3, Rival, sync_tree
from benchmarks.states import State

THREADS = 2


class Dcp(Rival):
    """With a writer and a reader of its own kind."""

    name = "torch DCP"
    about = "`FileSystemWriter(sync_files=False, thread_count=2)`, `no_dist`; loads in place. Nothing is synced"
    durable = False
    works: ClassVar[tuple[str, ...]] = ("save", "restore", "partial")
    sync = False

    def prepare(self) -> None:
        warnings.filterwarnings("ignore", module="torch.distributed")
        self.path = self.place.path

    def writer(self) -> Any:
        """A new writer: one may be used once."""
        return dcp.FileSystemWriter(self.path, sync_files=self.sync, thread_count=THREADS)

    def reader(self) -> Any:
        """The reader for what the writer wrote."""
        return dcp.FileSystemReader(self.path)

    def save(self, state: State, number: int) -> None:
        dcp.save(state, storage_writer=self.writer(), no_dist=True)

    def restore(self, target: State | None) -> Any:
        dcp.load(target, storage_reader=self.reader(), no_dist=True)
        return target

    def partial(self, names: list[str]) -> dict[str, Any]:
        from torch import empty

        reader = self.reader()
        known = reader.read_metadata().state_dict_metadata
        wanted = {f"model.{name}": known[f"model.{name}"] for name in names}
        target = {name: empty(item.size, dtype=item.properties.dtype) for name, item in wanted.items()}
        dcp.load(target, storage_reader=self.reader(), no_dist=True)
        return target


class DcpSynced(Dcp):
    """Its files are synced by itself; the names are not."""

    name = "torch DCP + fsync"
    about = "`FileSystemWriter(sync_files=True, thread_count=2)`, `no_dist`; fsync of the folders added"
    durable = True
    works: ClassVar[tuple[str, ...]] = ("save", "restore", "restore cold", "partial")
    sync = True

    def save(self, state: State, number: int) -> None:
        super().save(state, number)
        sync_tree(self.place.path)


class DcpAsync(Dcp):
    """In the background."""

    name = "torch DCP async"
    about = (
        "`async_save` in a thread, `DefaultStager` that keeps its staging copy, a gloo group; files and folders synced"
    )
    durable = True
    works: ClassVar[tuple[str, ...]] = ("stall",)

    def prepare(self) -> None:
        super().prepare()
        os.makedirs(self.path, exist_ok=True)
        store = dist.FileStore(os.path.join(self.path, "rendezvous"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        # One stager for all saves: only the first one allocates its copy. Pinned memory needs a GPU.
        self.stager = DefaultStager(StagingOptions(False, False, False, False))

    def stall(self, state: State, number: int) -> Callable[[], None]:
        path = os.path.join(self.path, str(number))
        writer = dcp.FileSystemWriter(path, sync_files=True, thread_count=THREADS)
        future: Any = dcp.async_save(state, storage_writer=writer, async_stager=self.stager)

        def wait() -> None:
            future.result()
            sync_tree(path)

        return wait

    def close(self) -> None:
        self.stager.close()
        dist.destroy_process_group()


class DcpFsspec(Dcp):
    """Through fsspec, the only way to S3 that comes with torch."""

    name = "torch DCP, FsspecWriter"
    about = "`FsspecWriter(thread_count=2)` and `FsspecReader` over s3fs, `no_dist`. Durable: the server has answered"
    durable = True
    where: ClassVar[tuple[str, ...]] = (S3,)
    works: ClassVar[tuple[str, ...]] = ("save", "restore")

    def prepare(self) -> None:
        super().prepare()
        self.place.client()
        self.path = f"s3://{self.place.path}/"

    def writer(self) -> Any:
        # sync_files calls sync() of the whole machine for each file here: of no use to a server, so off.
        return FsspecWriter(self.path, sync_files=False, thread_count=THREADS, **self.place.options)

    def reader(self) -> Any:
        return FsspecReader(self.path, **self.place.options)


DCP: tuple[type[Rival], ...] = (DcpSynced, Dcp, DcpAsync, DcpFsspec)
