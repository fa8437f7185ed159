"""torch DCP on one or several processes: with our writer and reader, and with those of others.

Every rank makes a rival of its own. A number names the checkpoint: each process saves, or loads, number 0 before the
clock starts, so that neither imports nor first connections count.
"""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.rivals.base import FOLDER, S3, Place, Rival, sync_tree
from benchmarks.rivals.dcp import THREADS
from benchmarks.rivals.limits import Memcpy, ObstoreParts, PlainFile
from benchmarks.rivals.s3torch import REGION, config, environment
from benchmarks.sharded import local
from benchmarks.states import State
from ckptstore.stores import OpLog


class OfRanks(Rival):
    """One way to save and to load together with all other ranks."""

    works: ClassVar[tuple[str, ...]] = ("save", "restore", "stall")

    def load(self, target: State, number: int) -> None:
        """Fill this rank's share with checkpoint ``number``."""
        raise NotImplementedError


class Dcp(OfRanks):
    """Through DCP."""

    def prepare(self) -> None:
        warnings.filterwarnings("ignore", module="torch.distributed")
        # One stager for all saves, as DCP advises: only the first one allocates its copy.
        self.stager = self.make_stager()

    def make_stager(self) -> Any:
        """What copies the state for a save in the background. Pinned memory needs a GPU."""
        return DefaultStager(StagingOptions(False, False, False, False))

    @abstractmethod
    def writer(self, number: int) -> Any:
        """A new writer: one may be used once."""

    @abstractmethod
    def reader(self, number: int) -> Any:
        """A reader for what the writer wrote."""

    def save(self, state: State, number: int) -> None:
        dcp.save(state, storage_writer=self.writer(number))
        self.durable_now(number)

    def load(self, target: State, number: int) -> None:
        dcp.load(target, storage_reader=self.reader(number))

    def stall(self, state: State, number: int) -> Callable[[], None]:
        future: Any = dcp.async_save(state, storage_writer=self.writer(number), async_stager=self.stager)

        def wait() -> None:
            future.result()
            self.durable_now(number)

        return wait

    def durable_now(self, number: int) -> None:
        """What a writer leaves out of making its save durable."""
        return

    def close(self) -> None:
        self.stager.close()


class Ours(Dcp):
    """On a repository."""

    name = "ckptstore"
    about = (
        "`CkptStoreWriter`, `CkptStoreReader` and `CkptStoreStager`, default codec. Durable: every file and folder is "
        "synced, or the server has answered"
    )
    where: ClassVar[tuple[str, ...]] = (FOLDER, S3)
    arguments: ClassVar[dict[str, Any]] = {}

    def prepare(self) -> None:
        super().prepare()
        self.log = OpLog()
        self.repo = self.place.open(on_request=self.log, **self.arguments)

    def make_stager(self) -> Any:
        from ckptstore.adapters.dcp_staging import CkptStoreStager

        return CkptStoreStager()

    def writer(self, number: int) -> Any:
        from ckptstore.adapters.dcp import CkptStoreWriter

        self.log.clear()
        return CkptStoreWriter(self.repo, number)

    def reader(self, number: int) -> Any:
        from ckptstore.adapters.dcp import CkptStoreReader

        self.log.clear()
        return CkptStoreReader(self.repo, number)

    def facts(self) -> dict[str, float]:
        return {"verbs": self.log.count()}

    def close(self) -> None:
        super().close()
        self.repo.close()


class OursRaw(Ours):
    """Without compression."""

    name = "ckptstore, codec raw"
    about = 'the same with `codec="raw"`: digests and structure, no compression'
    where: ClassVar[tuple[str, ...]] = (FOLDER,)
    arguments: ClassVar[dict[str, Any]] = {"codec": "raw"}


class Files(Dcp):
    """DCP's own files, synced."""

    name = "FileSystemWriter + fsync"
    about = "`FileSystemWriter(sync_files=True, thread_count=2)` and `FileSystemReader`; fsync of the folders added"

    def writer(self, number: int) -> Any:
        return dcp.FileSystemWriter(f"{self.place.path}/{number}", sync_files=True, thread_count=THREADS)

    def reader(self, number: int) -> Any:
        return dcp.FileSystemReader(f"{self.place.path}/{number}")

    def durable_now(self, number: int) -> None:
        if dist.get_rank() == 0:
            sync_tree(f"{self.place.path}/{number}")


class Fsspec(Dcp):
    """DCP's own way to S3."""

    name = "FsspecWriter"
    about = "`FsspecWriter(thread_count=2)` and `FsspecReader` over s3fs. Durable: the server has answered"
    where: ClassVar[tuple[str, ...]] = (S3,)

    def prepare(self) -> None:
        super().prepare()
        self.place.client()

    def writer(self, number: int) -> Any:
        # sync_files calls sync() of the whole machine for each file here: of no use to a server, so off.
        path = f"s3://{self.place.path}/{number}/"
        return FsspecWriter(path, sync_files=False, thread_count=THREADS, **self.place.options)

    def reader(self, number: int) -> Any:
        return FsspecReader(f"s3://{self.place.path}/{number}/", **self.place.options)


class S3Torch(Dcp):
    """Amazon's connector."""

    name = "s3torchconnector"
    about = "`S3StorageWriter(thread_count=2)` and `S3StorageReader`. Durable: the server has answered"
    where: ClassVar[tuple[str, ...]] = (S3,)
    needs: ClassVar[tuple[str, ...]] = ("s3torchconnector",)

    def prepare(self) -> None:
        super().prepare()
        environment(self.place.options)

    def writer(self, number: int) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        path = f"s3://{self.place.path}/{number}/"
        return S3StorageWriter(REGION, path, s3client_config=config(), thread_count=THREADS)

    def reader(self, number: int) -> Any:
        from s3torchconnector.dcp import S3StorageReader

        return S3StorageReader(REGION, f"s3://{self.place.path}/{number}/", s3client_config=config())


class Limit(OfRanks):
    """The bytes alone: each rank for itself, as a limit does it in one process."""

    limit = True
    kind: ClassVar[type[Rival]]

    def prepare(self) -> None:
        self._made: dict[int, Rival] = {}

    def _of(self, number: int) -> Rival:
        path = f"{self.place.path}/{number}/{dist.get_rank()}"
        if number not in self._made:
            self._made[number] = self.kind(Place(path, self.place.options))
            self._made[number].prepare()
        return self._made[number]

    def save(self, state: State, number: int) -> None:
        self._of(number).save(local(state), number)

    def load(self, target: State, number: int) -> None:
        self._of(number).restore(local(target))


class WriteAndSync(Limit):
    """One file a rank."""

    name = "write + fsync"
    about = "each rank writes its bytes into one file, and syncs file and folder; `readinto` the same buffers"
    works: ClassVar[tuple[str, ...]] = ("save", "restore")
    kind = PlainFile

    def prepare(self) -> None:
        super().prepare()
        os.makedirs(self.place.path, exist_ok=True)


class PutAndGet(Limit):
    """The Rust client alone."""

    name = "obstore, 8 threads"
    about = "each rank puts its bytes, in parts of 32 MiB in 8 threads. Durable: the server has answered"
    works: ClassVar[tuple[str, ...]] = ("save",)
    where: ClassVar[tuple[str, ...]] = (S3,)
    needs: ClassVar[tuple[str, ...]] = ("obstore",)
    kind = ObstoreParts


class Copy(Limit):
    """No storage at all."""

    name = "memcpy"
    about = Memcpy.about
    durable = False
    works: ClassVar[tuple[str, ...]] = ("stall",)
    kind = Memcpy

    def stall(self, state: State, number: int) -> Callable[[], None]:
        return self._of(0).stall(local(state), number)


RANKS: tuple[type[OfRanks], ...] = (Ours, OursRaw, Files, Fsspec, S3Torch, WriteAndSync, PutAndGet, Copy)
