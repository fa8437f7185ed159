"""What all rivals have in common: a place, and the works that they know."""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import ckptstore
from benchmarks.states import State

FOLDER, S3 = "folder", "s3"


@dataclass(frozen=True)
class Place:
    """Where one measurement goes: a folder of its own, or a prefix of its own in a bucket."""

    path: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def remote(self) -> bool:
        """Whether it is in a bucket."""
        return bool(self.options)

    @property
    def where(self) -> str:
        """The kind of place."""
        return S3 if self.remote else FOLDER

    def client(self) -> Any:
        """The client below ckptstore, with its connection made."""
        import s3fs

        fs = s3fs.S3FileSystem(**self.options, use_listings_cache=False)
        fs.exists(self.path)
        return fs

    def open(self, **more: Any) -> ckptstore.Repository:
        """A ckptstore repository here."""
        url = f"s3://{self.path}" if self.remote else self.path
        return ckptstore.open(url, storage_options=self.options or None, **more)

    def stored(self) -> int:
        """Bytes that are in it now."""
        if self.remote:
            return int(self.client().du(self.path))
        return sum(path.stat().st_size for path in Path(self.path).rglob("*") if path.is_file())


class Rival(ABC):
    """One way to save and to restore. Connections are made before the clock starts, as in a training run.

    Attributes:
        about: how it is used, and what its durability rests on.
        durable: what it saved survives a crash of the machine once ``save`` has returned. Durable and
            non-durable figures are never put in one table.
        limit: no checkpoint (no names, no checks): what the machine can do.
        in_place: ``restore`` fills the state that it is given; else it makes its own.
        needs: modules that must be installed.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    durable: ClassVar[bool] = True
    limit: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    where: ClassVar[tuple[str, ...]] = (FOLDER,)
    works: ClassVar[tuple[str, ...]] = ("save", "restore")
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, place: Place) -> None:
        self.place = place

    @classmethod
    def unavailable(cls) -> str:
        """Why it cannot be measured here; empty if it can."""
        missing = [name for name in cls.needs if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(missing)}" if missing else ""

    def prepare(self) -> None:  # noqa: B027 (most have nothing to do)
        """Get ready, not timed: connections, folders, an open repository."""

    @abstractmethod
    def save(self, state: State, number: int) -> None:
        """Store the state as checkpoint ``number``."""

    def restore(self, target: State | None) -> Any:
        """Read the newest one back, into ``target`` where it can: a state, or its bytes as a list of arrays."""
        raise NotImplementedError

    def partial(self, names: list[str]) -> dict[str, Any]:
        """Read only these tensors of the record ``model``."""
        raise NotImplementedError

    def stall(self, state: State, number: int) -> Callable[[], None]:
        """Begin to save in the background; what the call returns waits for the end."""
        raise NotImplementedError

    def facts(self) -> dict[str, float]:
        """More numbers about what was just done."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Release what ``prepare`` opened."""


def sync_file(handle: int) -> None:
    """Make a file's bytes durable."""
    os.fsync(handle)


def sync_tree(path: str) -> None:
    """Make all files and names below a folder durable: the fsync that a rival leaves out, added after it."""
    for folder, _, files in os.walk(path, topdown=False):
        for name in [*(os.path.join(folder, file) for file in files), folder]:
            handle = os.open(name, os.O_RDONLY)
            try:
                sync_file(handle)
            finally:
                os.close(handle)
    parent = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        sync_file(parent)
    finally:
        os.close(parent)
