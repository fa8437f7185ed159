"""ckptstore, used as its README says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import ckptstore
from benchmarks.rivals.base import FOLDER, S3, Rival
from benchmarks.states import State, named
from ckptstore.stores import OpLog


class Ckptstore(Rival):
    """A whole checkpoint, verified when it is read."""

    name = "ckptstore"
    about = (
        "`repo.save`, `repo.latest().load(into=)`, default codec. Durable: every file and folder is synced, or the "
        "server has answered"
    )
    where: ClassVar[tuple[str, ...]] = (FOLDER, S3)
    works: ClassVar[tuple[str, ...]] = ("save", "restore", "restore cold", "partial", "again", "stall", "guards")
    arguments: ClassVar[dict[str, Any]] = {}

    def prepare(self) -> None:
        self.log = OpLog()
        self.repo = self.place.open(on_request=self.log, **self.arguments)
        self.repo.latest()
        self.log.clear()
        self.saved: ckptstore.Checkpoint | None = None

    def save(self, state: State, number: int) -> None:
        self.log.clear()
        self.saved = self.repo.save(number, state)

    def restore(self, target: State | None) -> Any:
        self.log.clear()
        checkpoint = self.repo.latest()
        assert checkpoint is not None
        return checkpoint.load(into=target)

    def partial(self, names: list[str]) -> dict[str, Any]:
        self.log.clear()
        checkpoint = self.repo.latest()
        assert checkpoint is not None
        return {f"model.{name}": tensor for name, tensor in named(checkpoint.load("model", paths=names)).items()}

    def stall(self, state: State, number: int) -> Callable[[], None]:
        save_async: Any = getattr(self.repo, "save_async")  # noqa: B009 (checked by unavailable_for)
        handle = save_async(number, state)
        return lambda: handle.result() and None

    def facts(self) -> dict[str, float]:
        found: dict[str, float] = {"verbs": self.log.count()}
        found.update({f"verbs {verb}": self.log.count(verb) for verb in ("put", "get", "info", "list", "delete")})
        report = self.saved.report if self.saved is not None else None
        if self.saved is not None and report is not None:
            found |= {"sent": report.bytes_sent, "reused": report.bytes_reused, "records": len(self.saved.records)}
            found["chunks"] = sum(record.chunks for record in self.saved.records.values())
            found["chunks sent"] = report.chunks_sent
        return found

    def close(self) -> None:
        self.repo.close()


class CkptstoreRaw(Ckptstore):
    """Without compression."""

    name = "ckptstore, codec raw"
    about = 'the same with `codec="raw"`: digests and structure, no compression'
    works: ClassVar[tuple[str, ...]] = ("save", "restore", "restore cold", "again")
    arguments: ClassVar[dict[str, Any]] = {"codec": "raw"}


class CkptstoreObstore(Ckptstore):
    """Over another client."""

    name = "ckptstore, obstore"
    about = 'the same with `transport="obstore"`'
    where: ClassVar[tuple[str, ...]] = (S3,)
    works: ClassVar[tuple[str, ...]] = ("save", "restore")
    needs: ClassVar[tuple[str, ...]] = ("obstore",)
    arguments: ClassVar[dict[str, Any]] = {"transport": "obstore"}

    @classmethod
    def unavailable(cls) -> str:
        if "transport" not in inspect.signature(ckptstore.open).parameters:
            return "this ckptstore has no open(transport=)"
        return super().unavailable()


class CkptstoreS3fs(CkptstoreObstore):
    """Over fsspec's client, whatever the default is."""

    name = "ckptstore, s3fs"
    about = 'the same with `transport="fsspec"`'
    needs: ClassVar[tuple[str, ...]] = ()
    arguments: ClassVar[dict[str, Any]] = {"transport": "fsspec"}


OURS: tuple[type[Rival], ...] = (Ckptstore, CkptstoreRaw, CkptstoreObstore, CkptstoreS3fs)
