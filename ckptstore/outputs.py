"""Writers of one exported file each: the bytes come chunk by chunk, in any order, straight to their places in it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckptstore.arrays import ArraySpec
from ckptstore.errors import CorruptionError, FormatError
from ckptstore.formats import npytree, npz, safetensors
from ckptstore.formats.mapped import MappedFile
from ckptstore.formats.pytorch import installed_torch, write_torch
from ckptstore.formats.structure import NAME, Held, array_names, describe
from ckptstore.manifest import RecordEntry, RecordIndex
from ckptstore.placing import new_file, sync_folder, write_at
from ckptstore.reader import Sink, array_specs
from ckptstore.skeleton import leaf_paths, pairs, split, unflatten

Copy = Callable[[Iterable[tuple[RecordIndex, Mapping[int, Sink]]]], None]
"""Reads arrays of records, and gives their verified bytes to sinks."""

_BLOCK = 1 << 20
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Source:
    """A record to be written: its entry, its index, and what its arrays are."""

    entry: RecordEntry
    index: RecordIndex
    specs: list[ArraySpec]

    @classmethod
    def of(cls, entry: RecordEntry, index: RecordIndex) -> Source:
        """CorruptionError if the index does not add up."""
        specs = array_specs(index, entry.key)
        if entry.kind != "file" and max(leaf_paths(index.skeleton), default=-1) >= len(specs):
            raise CorruptionError(f"{entry.key} is damaged: it refers to an array that it does not list", key=entry.key)
        return cls(entry, index, specs)

    @property
    def name(self) -> str:
        return self.entry.name

    def held(self, names: Sequence[str]) -> list[Held]:
        """Its arrays under the names that they have in a file."""
        return [Held(name, spec) for name, spec in zip(names, self.specs, strict=True)]

    def tree(self, value: Callable[[int], object]) -> Any:
        """Its state, with ``value(i)`` for array ``i``."""
        return unflatten(self.index.skeleton, value, len(self.specs))

    def arrays_by_name(self) -> dict[str, int]:
        """The numbers of its arrays, if it is a dict of nothing but arrays; else FormatError."""
        tag, body = split(self.index.skeleton, 0)
        found = pairs(tag, body) if tag in ("dict", "odict") else []
        numbers = {name: split(child, 1) for name, child in found}
        if tag not in ("dict", "odict") or any(type(n) is not str or node[0] != "array" for n, node in numbers.items()):
            raise FormatError(f"record {self.name!r} is not as it was imported: it holds more than arrays by name")
        return {name: node[1] for name, node in numbers.items()}


def write_raw(path: Path, copy: Copy, index: RecordIndex, number: int) -> None:
    """The bytes of one array, and nothing else."""
    with new_file(path) as fd:
        copy([(index, {number: partial(write_at, fd)})])


# ---------------------------------------------------------------- safetensors


def safetensors_names(source: Source) -> list[str]:
    """Names of the arrays of a record."""
    return array_names(source.index.skeleton, len(source.specs), reserved=[safetensors.METADATA])


def write_record_safetensors(path: Path, copy: Copy, source: Source) -> None:
    """A record as one safetensors file that ``formats.read`` gives back exactly."""
    held = source.held(safetensors_names(source))
    description = describe(source.index.skeleton, held).decode("utf-8", "surrogatepass")
    # "pt" is what readers look for; where it is missing, Transformers refuses the file.
    write_safetensors(path, copy, source, list(enumerate(held)), {"format": "pt", NAME: description})


def write_safetensors(
    path: Path, copy: Copy, source: Source, arrays: list[tuple[int, Held]], metadata: Mapping[str, str]
) -> None:
    """Some arrays (by number) of a record under given names: the header first, then the bytes to their places."""
    header, starts, size = safetensors.plan((held for _, held in arrays), metadata, f"record {source.name!r}")
    with new_file(path) as fd:
        write_at(fd, header, 0)
        os.ftruncate(fd, size)
        copy([(source.index, _sinks(fd, ((number, at) for (number, _), at in zip(arrays, starts, strict=True))))])


def _sinks(fd: int, places: Iterable[tuple[int, int]]) -> dict[int, Sink]:
    """For each array a sink that writes it to its place (or places) in a file."""
    starts: dict[int, list[int]] = {}
    for number, start in places:
        starts.setdefault(number, []).append(start)
    return {number: partial(_write_all, fd, tuple(where)) for number, where in starts.items()}


def _write_all(fd: int, starts: tuple[int, ...], data: memoryview, at: int) -> None:
    for start in starts:
        write_at(fd, data, start + at)


# ---------------------------------------------------------------- npz


def npz_names(source: Source) -> list[str]:
    """Names of the arrays of a record."""
    return array_names(source.index.skeleton, len(source.specs), npz.fit_name, [npz.DESCRIPTION])


def write_record_npz(path: Path, copy: Copy, source: Source) -> None:
    """A record as one npz file that NumPy reads without pickle, and ``formats.read`` gives back exactly."""
    held = source.held(npz_names(source))
    description = describe(source.index.skeleton, held)
    members = [(one.name, npz.stored_dtype(one.spec), one.spec.shape) for one in held]
    plan = npz.NpzPlan([*members, (npz.DESCRIPTION, np.dtype(np.uint8), (len(description),))])
    with new_file(path) as fd:
        os.ftruncate(fd, plan.size)
        for start, head in plan.heads:
            write_at(fd, head, start)
        write_at(fd, description, plan.starts[-1])
        copy([(source.index, _sinks(fd, enumerate(plan.starts[:-1])))])
        checksums = [_checksum(fd, start, length) for _, start, length in plan.members]
        for at, data in plan.finish(checksums):
            write_at(fd, data, at)


def _checksum(fd: int, start: int, length: int) -> int:
    found = 0
    for at in range(start, start + length, _BLOCK):
        found = zlib.crc32(os.pread(fd, min(_BLOCK, start + length - at), at), found)
    return found


# ---------------------------------------------------------------- a folder of .npy files


def npy_names(source: Source) -> list[str]:
    """Names of the files of a record's arrays, without the suffix."""
    return array_names(source.index.skeleton, len(source.specs), npytree.fit_name, fold=True)


def write_npy_tree(path: Path, copy: Copy, source: Source) -> None:
    """A record as a folder: one .npy file for each array, and its structure as JSON."""
    path.mkdir(parents=True)
    held = source.held(npy_names(source))
    sinks: dict[int, Sink] = {}
    for number, one in enumerate(held):
        dtype = npz.stored_dtype(one.spec)
        head = npz.npy_header(dtype, one.spec.shape)
        file = path / (one.name + npytree.SUFFIX)
        file.write_bytes(head)
        os.truncate(file, len(head) + one.spec.nbytes)
        sinks[number] = partial(_write_into, file, len(head))
    copy([(source.index, sinks)])
    for one in held:
        _sync(path / (one.name + npytree.SUFFIX))
    with new_file(path / npytree.SKELETON) as fd:
        write_at(fd, describe(source.index.skeleton, held), 0)
    sync_folder(path)


def _write_into(file: Path, start: int, data: memoryview, at: int) -> None:
    # Opened anew each time: a record may have more arrays than a process may have open files.
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_at(fd, data, start + at)
    finally:
        os.close(fd)


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- torch


def write_torch_file(path: Path, copy: Copy, sources: Sequence[Source], build: Callable[[dict[str, Any]], Any]) -> None:
    """What ``build`` makes of the states of some records, by ``torch.save``.

    torch wants the whole of it, so the arrays go to a scratch file first and lie in a mapping of that.

    Raises:
        FormatError: torch is not installed.
    """
    torch = installed_torch()
    if torch is None:
        raise FormatError(f"{path.name} can only be written with PyTorch: pip install 'ckptstore[torch]'")
    scratch = path.with_name(f".{path.name}.arrays")
    at = 0
    starts: list[list[int]] = []
    for source in sources:
        starts.append([])
        for spec in source.specs:
            starts[-1].append(at)
            at += -(-spec.nbytes // _ALIGN) * _ALIGN
    try:
        with new_file(scratch) as fd:
            os.ftruncate(fd, at)
            copy((one.index, _sinks(fd, enumerate(where))) for one, where in zip(sources, starts, strict=True))
        mapped = MappedFile(scratch)

        def state(one: Source, where: list[int]) -> Any:
            return one.tree(lambda number: mapped.value(one.specs[number], where[number], torch))

        states = {one.name: state(one, where) for one, where in zip(sources, starts, strict=True)}
        write_torch(path, build(states), torch)
    finally:
        scratch.unlink(missing_ok=True)
    _sync(path)


_NAMES = {"safetensors": safetensors_names, "npz": npz_names, "files": npy_names}


def foreign_types(source: Source, form: str) -> Iterator[str]:
    """Arrays whose type the format lacks: a plain reader sees other numbers, only ``formats.read`` gives them back."""
    names = _NAMES[form](source)
    for name, spec in zip(names, source.specs, strict=True):
        if spec.kind not in ("numpy", "torch"):
            continue
        if form == "safetensors":
            same = safetensors.stored_as(spec) == (spec.dtype, spec.shape)
        else:
            same = npz.stored_dtype(spec).name == spec.dtype or npz.stored_dtype(spec).str == spec.dtype
        if not same:
            yield name
