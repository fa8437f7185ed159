"""What the machine can do: the same bytes without names, structure or checks. Not checkpoints, but yardsticks."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import blake3
import numpy as np

from benchmarks.rivals.base import FOLDER, S3, Rival, sync_file, sync_tree
from benchmarks.states import Bytes, State, parts, pieces
from ckptstore.pipeline import cores

THREADS = 8


class PlainFile(Rival):
    """One file, one write after the other."""

    name = "plain file"
    about = "`write` of all bytes into one file, fsync of file and folder; `readinto` the same buffers"
    limit = True
    works: ClassVar[tuple[str, ...]] = ("save", "restore", "restore cold", "again")

    def prepare(self) -> None:
        os.makedirs(self.place.path, exist_ok=True)
        self.path = os.path.join(self.place.path, "bytes")

    def save(self, state: State, number: int) -> None:
        with open(self.path, "wb", buffering=0) as file:
            for piece in pieces(state):
                write_all(file.fileno(), piece)
            sync_file(file.fileno())
        sync_tree(self.place.path)

    def restore(self, target: State | None) -> Any:
        filled = pieces(target)
        with open(self.path, "rb", buffering=0) as file:
            for piece in filled:
                view = piece.data
                while len(view):
                    count = file.readinto(view)
                    if not count:
                        raise EOFError(self.path)
                    view = view[count:]
        return filled


class Memcpy(Rival):
    """A copy in memory, into pages that exist already."""

    name = "memcpy"
    about = "a copy in memory: no storage at all"
    limit = True
    durable = False
    works: ClassVar[tuple[str, ...]] = ("save", "stall")
    where: ClassVar[tuple[str, ...]] = (FOLDER,)

    def save(self, state: State, number: int) -> None:
        source = pieces(state)
        if not hasattr(self, "copies"):
            self.copies = [np.ones(piece.size, np.uint8) for piece in source]
        for copy, piece in zip(self.copies, source, strict=True):
            np.copyto(copy, piece)

    def stall(self, state: State, number: int) -> Callable[[], None]:
        self.save(state, number)
        return lambda: None


class Hashing(Rival):
    """Only the digests that ckptstore needs to find out what changed."""

    name = "blake3"
    about = "BLAKE3 of all bytes, 32 MiB at a time, with as many threads as ckptstore takes: no storage at all"
    limit = True
    durable = False
    works: ClassVar[tuple[str, ...]] = ("again",)

    def save(self, state: State, number: int) -> None:
        with ThreadPoolExecutor(cores()) as pool:
            list(pool.map(_hash, parts(state)))


class S3fsParts(Rival):
    """ckptstore's usual client alone."""

    name = "s3fs, 8 threads"
    about = "s3fs `pipe_file` and `cat_file` of 32 MiB parts in 8 threads. Durable: the server has answered"
    limit = True
    in_place = False
    where: ClassVar[tuple[str, ...]] = (S3,)

    def prepare(self) -> None:
        self.fs = self.place.client()

    def save(self, state: State, number: int) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda item: self._put(*item), enumerate(parts(state))))

    def _put(self, number: int, part: list[Bytes]) -> None:
        self.fs.pipe_file(f"{self.place.path}/{number:06}", b"".join(piece.data for piece in part))

    def restore(self, target: State | None) -> Any:
        keys = sorted(self.fs.ls(self.place.path, detail=False))
        with ThreadPoolExecutor(THREADS) as pool:
            return [np.frombuffer(data, np.uint8) for data in pool.map(self.fs.cat_file, keys)]


class ObstoreParts(Rival):
    """The Rust client alone."""

    name = "obstore, 8 threads"
    about = "obstore `put` and `get` of 32 MiB parts in 8 threads. Durable: the server has answered"
    limit = True
    in_place = False
    where: ClassVar[tuple[str, ...]] = (S3,)
    needs: ClassVar[tuple[str, ...]] = ("obstore",)

    def prepare(self) -> None:
        from obstore.store import S3Store

        bucket, _, prefix = self.place.path.partition("/")
        options = self.place.options
        self.store: Any = S3Store(
            bucket,
            prefix=prefix,
            endpoint=options["endpoint_url"],
            access_key_id=options["key"],
            secret_access_key=options["secret"],
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        list(self.store.list())

    def save(self, state: State, number: int) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda item: self._put(*item), enumerate(parts(state))))

    def _put(self, number: int, part: list[Bytes]) -> None:
        self.store.put(f"{number:06}", b"".join(piece.data for piece in part), use_multipart=False)

    def restore(self, target: State | None) -> Any:
        keys = sorted(str(meta["path"]) for page in self.store.list() for meta in page)
        with ThreadPoolExecutor(THREADS) as pool:
            return [np.frombuffer(data, np.uint8) for data in pool.map(self._get, keys)]

    def _get(self, key: str) -> Any:
        return self.store.get(key).bytes()


def write_all(handle: int, data: Bytes) -> None:
    """Write all of it: one call may take less."""
    view = data.data
    while len(view):
        view = view[os.write(handle, view) :]


def _hash(part: list[Bytes]) -> str:
    total = blake3.blake3()
    for piece in part:
        total.update(piece.data)
    return total.hexdigest()


LIMITS: tuple[type[Rival], ...] = (PlainFile, Memcpy, Hashing, S3fsParts, ObstoreParts)
