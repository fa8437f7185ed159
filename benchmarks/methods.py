"""Ways to save and to restore a training state, all behind one interface, for ``save_restore.py``.

What ``prepare`` does is not timed: a training run has its connection and its repository open long before it saves.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import s3fs
import torch

import ckptstore

PART = 32 * 1024 * 1024
THREADS = 8

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Place:
    """Where one save goes: a folder of its own, or a prefix of its own in a bucket."""

    path: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def remote(self) -> bool:
        return bool(self.options)

    def client(self) -> Any:
        """The client below ckptstore, with its connection made."""
        fs = s3fs.S3FileSystem(**self.options, use_listings_cache=False)
        fs.exists(self.path)
        return fs

    def open(self, **more: Any) -> ckptstore.Repository:
        """A ckptstore repository here."""
        url = f"s3://{self.path}" if self.remote else self.path
        return ckptstore.open(url, storage_options=self.options or None, **more)


class Method(ABC):
    """One way to save and to restore."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def prepare(self, state: Any) -> None:
        """Get ready, not timed. ``state`` is None before a restore."""

    @abstractmethod
    def save(self, state: Any) -> None:
        """Store the state. Durable when it returns."""

    @abstractmethod
    def restore(self) -> Any:
        """Read it back: the state, or its bytes as a list of arrays."""


class Ckptstore(Method):
    """A whole checkpoint, verified when it is read."""

    codec = "auto"

    def prepare(self, state: Any) -> None:
        self.repository = self.place.open(codec=self.codec)
        if self.place.remote:
            self.repository.latest()

    def save(self, state: Any) -> None:
        self.repository.save(1, state)

    def restore(self) -> Any:
        checkpoint = self.repository.latest()
        assert checkpoint is not None
        return checkpoint.load()


class CkptstoreRaw(Ckptstore):
    """The same without compression."""

    codec = "raw"


class TorchFile(Method):
    """``torch.save`` into a scratch file, made durable and renamed: what careful trainers do by hand."""

    def prepare(self, state: Any) -> None:
        os.makedirs(self.place.path, exist_ok=True)
        self.path = os.path.join(self.place.path, "state.pt")

    def save(self, state: Any) -> None:
        with open(self.path + ".tmp", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path + ".tmp", self.path)
        sync_folder(self.place.path)

    def restore(self) -> Any:
        return torch.load(self.path, weights_only=True)


class PlainFile(Method):
    """The same bytes one after the other in one file: no names, no checks. What the disk can do."""

    def prepare(self, state: Any) -> None:
        os.makedirs(self.place.path, exist_ok=True)
        self.path = os.path.join(self.place.path, "bytes")

    def save(self, state: Any) -> None:
        with open(self.path, "wb", buffering=0) as file:
            for tensor in tensors(state):
                write_all(file.fileno(), flat_bytes(tensor))
            os.fsync(file.fileno())
        sync_folder(self.place.path)

    def restore(self) -> Any:
        data: Bytes = torch.empty(os.path.getsize(self.path), dtype=torch.uint8).numpy()
        with open(self.path, "rb", buffering=0) as file:
            filled = 0
            while filled < data.size:
                filled += file.readinto(data[filled:].data) or 0
        return [data]


class Memcpy(Method):
    """A copy in memory into pages that exist already: no storage at all."""

    def prepare(self, state: Any) -> None:
        self.source = [] if state is None else [flat_bytes(tensor) for tensor in tensors(state)]
        self.target = [np.ones(part.size, np.uint8) for part in self.source]

    def save(self, state: Any) -> None:
        for target, source in zip(self.target, self.source, strict=True):
            np.copyto(target, source)

    def restore(self) -> Any:
        raise NotImplementedError


class S3Parts(Method):
    """32 MiB parts of the same bytes through 8 threads of the same client: no names, no checks. The limit on S3."""

    def prepare(self, state: Any) -> None:
        self.fs = self.place.client()
        self.keys = [] if state is not None else sorted(self.fs.ls(self.place.path, detail=False))

    def save(self, state: Any) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            jobs = [pool.submit(self._put, *item) for item in enumerate(parts(tensors(state)))]
            for job in jobs:
                job.result()

    def _put(self, number: int, part: list[Bytes]) -> None:
        self.fs.pipe_file(f"{self.place.path}/{number:06}", b"".join(piece.data for piece in part))

    def restore(self) -> Any:
        with ThreadPoolExecutor(THREADS) as pool:
            return [np.frombuffer(data, np.uint8) for data in pool.map(self.fs.cat_file, self.keys)]


class S3Torch(Method):
    """``torch.save`` into memory, then one put: what trainers do by hand."""

    def prepare(self, state: Any) -> None:
        self.fs = self.place.client()
        self.key = f"{self.place.path}/state.pt"

    def save(self, state: Any) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.fs.pipe_file(self.key, buffer.getvalue())

    def restore(self) -> Any:
        return torch.load(io.BytesIO(self.fs.cat_file(self.key)), weights_only=True)


LOCAL: dict[str, type[Method]] = {
    "ckptstore": Ckptstore,
    "ckptstore, codec raw": CkptstoreRaw,
    "torch.save + fsync": TorchFile,
    "plain file + fsync": PlainFile,
    "memcpy": Memcpy,
}
REMOTE: dict[str, type[Method]] = {
    "ckptstore": Ckptstore,
    "ckptstore, codec raw": CkptstoreRaw,
    "torch.save + s3fs": S3Torch,
    "s3fs, 8 threads": S3Parts,
}


def tensors(state: Any) -> list[torch.Tensor]:
    """All tensors of a state in order, tied ones once."""
    found: dict[int, torch.Tensor] = {}

    def walk(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            found.setdefault(node.data_ptr(), node)
        elif isinstance(node, (dict, list, tuple)):
            for child in node.values() if isinstance(node, dict) else node:
                walk(child)

    walk(state)
    return list(found.values())


def flat_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor, without a copy."""
    data: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def parts(items: Sequence[torch.Tensor]) -> Iterator[list[Bytes]]:
    """The bytes of all tensors, cut into parts of ``PART`` bytes."""
    part: list[Bytes] = []
    room = PART
    for item in items:
        data = flat_bytes(item)
        while data.size:
            part.append(data[:room])
            data, room = data[room:], room - part[-1].size
            if not room:
                yield part
                part, room = [], PART
    if part:
        yield part


def write_all(handle: int, data: Bytes) -> None:
    """Write all of it: one call may take less."""
    view = data.data
    while len(view):
        view = view[os.write(handle, view) :]


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def stored_bytes(place: Place) -> int:
    """What the save takes on the store."""
    if place.remote:
        return int(place.client().du(place.path))
    return sum(path.stat().st_size for path in Path(place.path).rglob("*") if path.is_file())
