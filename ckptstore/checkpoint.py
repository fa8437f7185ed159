"""Checkpoint: the read side of one committed epoch."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckptstore import garbage
from ckptstore.catalog import Catalog, Skipped
from ckptstore.errors import (
    CorruptionError,
    InvalidArgumentError,
    InvalidRecordError,
    RecordNotFoundError,
    StoreError,
)
from ckptstore.files import FileSource, same_bytes
from ckptstore.loading import Loading, run_all
from ckptstore.manifest import Manifest, RecordEntry, RecordIndex
from ckptstore.pipeline import Meter, Progress
from ckptstore.placing import file_name, new_file, write_at, writing
from ckptstore.reader import Spare, array_specs, copy_arrays
from ckptstore.tree import mismatches, prune, unflatten
from ckptstore.writer import Tally


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a checkpoint: its name, kind ("state" or "file"), number of arrays, and sizes in bytes."""

    name: str
    kind: str
    arrays: int
    chunks: int
    bytes_state: int
    bytes_stored: int


class Checkpoint:
    """One committed checkpoint. Cheap to hold; bytes are read when asked for, and verified before they are returned."""

    def __init__(
        self,
        catalog: Catalog,
        manifest: Manifest,
        *,
        skipped: Sequence[Skipped] = (),
        report: Tally | None = None,
        on_load: Callable[[int, int, float], None] = lambda epoch, nbytes, seconds: None,
        on_damage: Callable[[CorruptionError], None] = lambda error: None,
        again: Callable[..., Checkpoint] | None = None,
        spare: Spare | None = None,
    ) -> None:
        self._catalog = catalog
        self._spare = spare
        self._manifest = manifest
        self._on_load = on_load
        self._on_damage = on_damage
        self._again = again
        self.skipped = tuple(skipped)
        """Newer epochs that ``latest()`` stepped over, and why."""
        self.report = report
        """What the save moved, on a checkpoint returned by a save; else None."""

    def __repr__(self) -> str:
        return f"<Checkpoint epoch={self.epoch} records={sorted(self.records)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Into a pickle: its manifest, and the repository that it is of."""
        if self._again is None:
            raise TypeError("only a checkpoint of a repository that was made by ckptstore.open can be pickled")
        return self._again, (self._manifest, self.skipped, self.report)

    @property
    def url(self) -> str:
        """The repository that it lies in."""
        return self._catalog.store.traits.url

    @property
    def epoch(self) -> int:
        """The number that it was saved under."""
        return self._manifest.epoch

    @property
    def generation(self) -> int:
        """1, or more if the epoch was replaced."""
        return self._manifest.generation

    @property
    def metadata(self) -> dict[str, Any]:
        """What was given as ``metadata`` to the save, exactly."""
        return metadata_of(self._manifest)

    @property
    def created(self) -> str:
        """When it was committed, by the writer's clock (RFC 3339). For people: nothing is decided by it."""
        return self._manifest.created

    @property
    def run_id(self) -> str:
        """The name of the run that saved it; empty if it had none."""
        return self._manifest.run

    @property
    def records(self) -> MappingProxyType[str, Record]:
        """Its records by name."""
        fields = ("name", "kind", "arrays", "chunks", "bytes_state", "bytes_stored")
        entries = self._manifest.records
        return MappingProxyType({e.name: Record(*(getattr(e, field) for field in fields)) for e in entries})

    @property
    def left_out(self) -> dict[str, str]:
        """Records of the run that this epoch does not have, each with the reason (``every`` of ``open``)."""
        return dict(self._manifest.left_out)

    @property
    def bytes_state(self) -> int:
        """Bytes of all its arrays and files, before the codec."""
        return self._manifest.bytes_state

    def load(
        self,
        name: str | None = None,
        paths: Sequence[str] | None = None,
        into: Any = None,
        progress: Progress | None = None,
        strict: bool = True,
    ) -> Any:
        """Load one record, or all of them as a dict by name.

        Arrays come back as they went in: torch tensors (on the CPU, contiguous) where torch has been imported, else
        NumPy arrays, with bfloat16 and float8 through ml_dtypes. A file record comes back as bytes.

        Args:
            name: the record; None for all.
            paths: patterns such as ``"encoder.*"``; only what matches is loaded and only its chunks are read. Keys are
                joined by dots; dicts keep the matching entries, other list and tuple items become None.
            into: an equal structure to load into, in place, with no second copy. A ``ShardedArray`` in it stands for
                the boxes of an array that are wanted: only their chunks are read. It is checked first and left as it
                was if it does not match. If a chunk turns out damaged, arrays loaded before it are already new.
            progress: called with ``(bytes done, bytes in all)``, from worker threads.
            strict: False leaves what only ``into`` has as it is, and what only the checkpoint has out, records and
                paths: ``mismatches`` lists them. Kind, shape and element type of what both have must fit all the same.

        Raises:
            RecordNotFoundError: no such record, or no path matches.
            InvalidRecordError: ``into`` has another structure; the message lists the paths, of all records.
            CorruptionError: a byte on the store is wrong or missing; ``.key`` names the object.
            EpochNotFoundError: the epoch was deleted meanwhile.
        """
        entries = [self._entry(name)] if name is not None else list(self._manifest.records)
        if isinstance(paths, str):
            paths = [paths]
        if not _are_patterns(paths):
            raise InvalidArgumentError(f'paths must be a list of patterns such as "encoder.*", not {paths!r}')
        begun = time.perf_counter()
        with self._reading():
            plans = self._plans(entries, paths, {name: into} if name is not None else into, strict)
            if not plans:
                what = f"record {name!r}" if name is not None else f"epoch {self.epoch}"
                raise RecordNotFoundError(f"nothing in {what} matches {list(paths or ())}", epoch=self.epoch)
            meter = Meter(progress, sum(plan.nbytes for plan in plans))
            values = run_all(plans, self._catalog.store, meter, self._spare)
        self._on_load(self.epoch, sum(plan.nbytes for plan in plans), time.perf_counter() - begun)
        return values[name] if name is not None else values

    def mismatches(self, name: str, state: object, strict: bool = True) -> list[str]:
        """Why ``load(name, into=state)`` would be refused: a line for each path, none if it fits. No array is read.

        Args:
            strict: False for what is refused there by ``strict=False`` too: another kind, shape or element type.

        Raises:
            RecordNotFoundError: no such record.
            CorruptionError, EpochNotFoundError: as ``load``.
        """
        entry = self._entry(name)
        with self._reading():
            index = self._index(entry)
            if entry.kind == "file":
                return [f"{name}: a file in the checkpoint, {type(state).__name__} here"]
            return mismatches(index.skeleton, array_specs(index, entry.key), state, name, strict=strict)

    def structure(self, name: str) -> Any:
        """A record as ``load`` gives it, with an ``ArraySpec`` (dtype, shape, nbytes) for each array: none is read.

        Raises:
            RecordNotFoundError, CorruptionError, EpochNotFoundError: as ``load``.
        """
        entry = self._entry(name)
        with self._reading():
            index = self._index(entry)
            specs = array_specs(index, entry.key)
            skeleton = index.skeleton if entry.kind != "file" else {"array": 0}
            return unflatten(skeleton, specs.__getitem__, len(specs))

    def read_file(self, name: str, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
        """Write the bytes of a file record to ``path``: complete and verified, or ``path`` stays as it was.

        Raises:
            RecordNotFoundError: no such record.
            InvalidArgumentError: the record holds a state, not a file.
            CorruptionError, EpochNotFoundError: as ``load``.
            StoreFullError, AccessError: ``path`` cannot be written.
        """
        entry = self._entry(name)
        if entry.kind != "file":
            raise InvalidArgumentError(f"record {name!r} is a state, not a file: use load({name!r})", epoch=self.epoch)
        begun = time.perf_counter()
        with self._reading():
            index = self._index(entry)
            _write_aside(Path(path), lambda fd: self._copy(index, fd, progress))
        self._on_load(self.epoch, entry.bytes_state, time.perf_counter() - begun)

    def holds_file(self, name: str, path: str | os.PathLike[str] | FileSource) -> bool:
        """Whether a file record has just the bytes of this file, by its digests: the record's bytes are not fetched.

        Raises:
            RecordNotFoundError: no such record.
            NotFoundError, InvalidRecordError: no such file, or it cannot be read.
        """
        entry = self._entry(name)
        if entry.kind != "file":
            return False
        with self._reading():
            index = self._catalog.index(entry)
        with nullcontext(path) if isinstance(path, FileSource) else FileSource(Path(path)) as source:
            return same_bytes(source, index)

    def file_name(self, name: str) -> str:
        """The name that a file record had where it came from."""
        entry = self._entry(name)
        with self._reading():
            skeleton = self._index(entry).skeleton
        return file_name(skeleton if entry.kind == "file" else None, name)

    def _entry(self, name: str) -> RecordEntry:
        entry = self._manifest.record(name)
        if entry is None:
            why = self._manifest.left_out.get(name)
            hint = f" ({why}): latest(need=[{name!r}]) finds the newest epoch that has it" if why is not None else ""
            raise RecordNotFoundError(
                f"epoch {self.epoch} has no record {name!r}{hint}; it has {sorted(self.records)}", epoch=self.epoch
            )
        return entry

    def _index(self, entry: RecordEntry) -> RecordIndex:
        try:
            return self._catalog.index(entry)
        except (CorruptionError, StoreError) as error:
            index = self._spare.index(entry.name, error) if self._spare is not None else None
            if index is None:
                raise
            return index

    def _plans(self, entries: list[RecordEntry], paths: Sequence[str] | None, into: Any, strict: bool) -> list[Loading]:
        names = [entry.name for entry in entries]
        if into is None:
            into = dict.fromkeys(names)
        if not isinstance(into, dict):
            raise InvalidArgumentError(f"into must be a dict with the records {names}", epoch=self.epoch)
        if strict:
            self._same_records(names, into)
        plans: list[Loading | None] = []
        refused: list[str] = []
        with garbage.paused():
            for entry in entries:
                if entry.name in into:
                    try:
                        plans.append(self._plan(entry, paths, into[entry.name], strict))
                    except InvalidRecordError as error:
                        refused.append(error.message)
        if refused:
            raise InvalidRecordError("\n".join(refused), epoch=self.epoch)
        return [plan for plan in plans if plan is not None]

    def _same_records(self, names: list[str], into: Mapping[str, Any]) -> None:
        for name in into:
            self._entry(name)
        missing = [name for name in names if name not in into]
        if missing:
            raise InvalidArgumentError(
                f"into must be a dict with the records {names}: it lacks {missing}", epoch=self.epoch
            )

    def _plan(self, entry: RecordEntry, paths: Sequence[str] | None, into: Any, strict: bool) -> Loading | None:
        index = self._index(entry)
        specs = array_specs(index, entry.key)
        if entry.kind == "file":
            if into is not None:
                raise InvalidArgumentError(
                    f"record {entry.name!r} is a file: use read_file, not into", epoch=self.epoch
                )
            return Loading(index, {"array": 0}, specs, None) if paths is None else None
        skeleton = index.skeleton
        if paths is not None:
            skeleton = prune(skeleton, paths)
            if skeleton is None:
                return None
        return Loading(index, skeleton, specs, into, strict=strict, partial=paths is not None)

    def _copy(self, index: RecordIndex, fd: int, progress: Progress | None) -> None:
        meter = Meter(progress, sum(span.length for span in index.arrays[0].spans))
        sinks = {0: partial(write_at, fd)}
        copy_arrays(self._catalog.store, [(index, sinks)], meter=meter, spare=self._spare)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Tell damage from a delete that happened meanwhile, and remember damage."""
        try:
            with self._catalog.reading(self._manifest):
                yield
        except CorruptionError as error:
            self._on_damage(error)
            raise


def _are_patterns(paths: object) -> bool:
    return paths is None or (isinstance(paths, Sequence) and all(isinstance(path, str) for path in paths))


def metadata_of(manifest: Manifest) -> dict[str, Any]:
    """The user's metadata, decoded from a manifest."""
    value = unflatten(manifest.metadata, lambda number: None)
    return value if isinstance(value, dict) else {}


def _write_aside(path: Path, write: Callable[[int], None]) -> None:
    """Write a scratch file beside ``path``, sync it, and put it in place of ``path``."""
    scratch = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with writing(path):
            with new_file(scratch) as fd:
                write(fd)
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
