"""Export: a checkpoint as files that other programs read. Verified, in bounded memory, and never half there.

Everything is written into a scratch folder beside its place and synced; names are given when all of it is whole. A
folder that is new appears in one step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from ckptstore.catalog import Catalog
from ckptstore.errors import AlreadyExistsError, InvalidArgumentError, RecordNotFoundError
from ckptstore.formats import lightning, npytree
from ckptstore.formats.layout import FILES, is_layout, layout_of
from ckptstore.formats.structure import Held
from ckptstore.manifest import Manifest, RecordEntry
from ckptstore.outputs import (
    Copy,
    Source,
    foreign_types,
    write_npy_tree,
    write_raw,
    write_record_npz,
    write_record_safetensors,
    write_safetensors,
    write_torch_file,
)
from ckptstore.pipeline import Meter, Progress
from ckptstore.placing import aside, file_name, folder, place, place_folder, refuse_existing, sync_folder, writing
from ckptstore.reader import copy_arrays

Format = Literal["safetensors", "npz", "files"]
FORMATS: tuple[Format, ...] = ("safetensors", "npz", "files")


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file (or a folder, where the record became one): the records it holds, where it lies, and their raw bytes.

    ``overwrites``: something lay there before.
    """

    records: tuple[str, ...]
    path: Path
    nbytes: int
    overwrites: bool = False


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote, or with ``dry_run`` would write.

    ``foreign_types`` are arrays ("record: name") whose element type the format lacks: they are there as rows of
    bytes (safetensors) or unsigned integers of that width (npz, files), and ``formats.read`` gives them as they were.
    """

    epoch: int
    format: Format
    files: tuple[ExportedFile, ...]
    foreign_types: tuple[str, ...]
    dry_run: bool = False


class _Array(int):
    """The number of an array, where a tree has plain numbers too."""


@dataclass(frozen=True, slots=True)
class _Output:
    """A file or folder to be written below the target."""

    path: str
    records: tuple[str, ...]
    nbytes: int
    write: Callable[[Path, Copy], None]
    is_folder: bool = False
    foreign_types: tuple[str, ...] = ()


def export(
    catalog: Catalog,
    manifest: Manifest,
    to: Path,
    form: Format,
    records: Sequence[str] | None,
    force: bool,
    progress: Progress | None,
    dry_run: bool = False,
) -> ExportReport:
    """Write records of a checkpoint into a folder; ``Repository.export`` says how."""
    if form not in FORMATS:
        raise InvalidArgumentError(f"format must be one of {', '.join(FORMATS)}, not {form!r}")
    if to.exists() and not to.is_dir():
        raise InvalidArgumentError(f"{to} is no folder: choose another")
    with catalog.reading(manifest), writing(to):
        sources = {entry.name: Source.of(entry, catalog.index(entry)) for entry in _chosen(manifest, form, records)}
        outputs = _files(sources, _layout(catalog, manifest)) if form == "files" else _OUTPUTS[form](sources)
        _refuse(outputs, to, force)
        files = tuple(
            ExportedFile(one.records, path, one.nbytes, os.path.lexists(path))
            for one in outputs
            for path in [to / one.path]
        )
        copied = partial(copy_arrays, catalog.store, meter=Meter(progress, sum(one.nbytes for one in outputs)))
        if not dry_run:
            _write(outputs, to, force, cast(Copy, copied))
    odd = tuple(odd for one in outputs for odd in one.foreign_types)
    return ExportReport(manifest.epoch, form, files, odd, dry_run)


def _chosen(manifest: Manifest, form: str, records: Sequence[str] | None) -> list[RecordEntry]:
    names = [entry.name for entry in manifest.records] if records is None else list(dict.fromkeys(records))
    entries = {entry.name: entry for entry in manifest.records}
    for name in names:
        if name not in entries:
            why = manifest.left_out.get(name)
            raise RecordNotFoundError(
                f"epoch {manifest.epoch} has no record {name!r}{f' ({why})' if why else ''}; it has {sorted(entries)}",
                epoch=manifest.epoch,
            )
    if not names:
        raise InvalidArgumentError("records must name at least one record", epoch=manifest.epoch)
    files = [name for name in names if entries[name].kind == "file"]
    if files and form != "files":
        are = "is a file" if len(files) == 1 else "are files"
        raise InvalidArgumentError(
            f"{', '.join(files)} of epoch {manifest.epoch} {are} and cannot become {form}: "
            'use format="files", or choose the other records',
            epoch=manifest.epoch,
        )
    return [entries[name] for name in names]


# ---------------------------------------------------------------- what goes where


def _whole(path: str, source: Source, form: str, write: Callable[[Path, Copy, Source], None]) -> _Output:
    """All of a record as one file or folder."""
    odd = tuple(f"{source.name}: {array}" for array in foreign_types(source, form))
    is_folder = form == "files"
    return _Output(path, (source.name,), _size(source), lambda at, copy: write(at, copy, source), is_folder, odd)


def _safetensors(sources: dict[str, Source]) -> list[_Output]:
    write = write_record_safetensors
    return [_whole(f"{name}.safetensors", source, "safetensors", write) for name, source in sources.items()]


def _npz(sources: dict[str, Source]) -> list[_Output]:
    return [_whole(f"{name}.npz", source, "npz", write_record_npz) for name, source in sources.items()]


def _files(sources: dict[str, Source], layout: Source | None) -> list[_Output]:
    """Files under their names; what a foreign checkpoint was, as it was; everything else as folders."""
    rest = dict(sources)
    outputs = list(_as_imported(rest, layout)) if layout is not None else []
    for name, source in rest.items():
        if source.entry.kind == "file":
            path = file_name(source.index.skeleton, name).replace("/", "_").replace("\0", "_")
            outputs.append(_raw(path if path not in ("", ".", "..") else "record", source, 0))
        else:
            outputs.append(_whole(name, source, "files", write_npy_tree))
    return outputs


_OUTPUTS = {"safetensors": _safetensors, "npz": _npz}


def _raw(path: str, source: Source, number: int) -> _Output:
    nbytes = source.specs[number].nbytes
    return _Output(path, (source.name,), nbytes, lambda where, copy: write_raw(where, copy, source.index, number))


def _size(source: Source) -> int:
    return sum(spec.nbytes for spec in source.specs)


def _layout(catalog: Catalog, manifest: Manifest) -> Source | None:
    """The record that says how the files of a foreign checkpoint lay, if it has one."""
    entry = manifest.record(FILES)
    if entry is None or entry.kind != "state":
        return None
    source = Source.of(entry, catalog.index(entry))
    return source if is_layout(source.tree(_Array)) else None


def _as_imported(rest: dict[str, Source], layout: Source) -> Iterator[_Output]:
    """The files of a checkpoint that ``formats.read`` took in; takes its records out of ``rest``."""
    records, files = layout_of(layout.tree(_Array))
    if rest.pop(FILES, None) is not None:
        for name, number in files.items():
            if type(number) is not _Array or layout.specs[number].dtype != "uint8":
                raise InvalidArgumentError(f"{name!r} in the record 'files' is no file: export the other records alone")
            yield _raw(name, layout, number)
    for name, entry in records.items():
        if name in rest:
            kind = entry["kind"]
            yield from _lightning(entry, name, rest) if kind == "lightning" else _foreign(entry, rest.pop(name))


def _foreign(entry: dict[str, Any], source: Source) -> Iterator[_Output]:
    """The file, or the shards, that a record was."""
    kind = entry["kind"]
    if kind == "torch":
        write = lambda path, copy: write_torch_file(path, copy, [source], lambda states: states[source.name])  # noqa: E731
        yield _Output(entry["file"], (source.name,), _size(source), write)
        return
    numbers = source.arrays_by_name()
    shards: dict[str, list[str]] = {}
    for name in numbers:
        shards.setdefault(entry["weight_map"].get(name, "") if "weight_map" in entry else entry["file"], []).append(
            name
        )
    if "" in shards:
        raise InvalidArgumentError(f"record {source.name!r} has arrays that its index does not: export it alone")
    for file, names in shards.items():
        nbytes = sum(source.specs[numbers[name]].nbytes for name in names)
        if kind == "torch-sharded":
            write = partial(_write_shard, source, names)
        else:
            noted = entry["metadata"] if kind == "safetensors" else entry["metadata"].get(file, {})
            arrays = [(numbers[name], Held(name, source.specs[numbers[name]])) for name in names]
            write = partial(_write_tensors, source, arrays, noted)
        yield _Output(file, (source.name,), nbytes, write)


def _write_tensors(
    source: Source, arrays: list[tuple[int, Held]], noted: dict[str, str], path: Path, copy: Copy
) -> None:
    write_safetensors(path, copy, source, arrays, {str(key): str(text) for key, text in noted.items()})


def _write_shard(source: Source, names: list[str], path: Path, copy: Copy) -> None:
    write_torch_file(path, copy, [source], lambda states: {name: states[source.name][name] for name in names})


def _lightning(entry: dict[str, Any], name: str, rest: dict[str, Source]) -> Iterator[_Output]:
    """One .ckpt of four records."""
    parts = {record: key for key, record in lightning.RECORDS.items() if key in entry["keys"]}
    missing = [record for record in parts if record not in rest]
    if missing:
        raise InvalidArgumentError(
            f"{entry['file']} needs {', '.join(missing)} too: choose all records of it, or {name!r} not"
        )
    sources = [rest.pop(record) for record in (*parts, name)]

    def build(states: dict[str, Any]) -> dict[str, Any]:
        whole = {**states[name], **{key: states[record] for record, key in parts.items()}}
        return {key: whole[key] for key in (*(key for key in entry["keys"] if key in whole), *whole)}

    names = tuple(source.name for source in sources)
    nbytes = sum(_size(source) for source in sources)
    yield _Output(entry["file"], names, nbytes, lambda path, copy: write_torch_file(path, copy, sources, build))


# ---------------------------------------------------------------- onto the disk


def _refuse(outputs: list[_Output], to: Path, force: bool) -> None:
    """Everything that could go wrong by choice, before a byte is read."""
    owners: dict[str, str] = {}
    folders: set[str] = set()
    for one in outputs:
        key = one.path.casefold()  # some file systems do not tell a from A
        above = {str(parent) for parent in PurePosixPath(key).parents}
        clash = next((owners[at] for at in (key, *above) if at in owners), one.path if key in folders else None)
        if clash is not None:
            raise InvalidArgumentError(
                f"two records would go to {clash}: export them one by one, into different folders"
            )
        owners[key] = one.path
        folders |= above
        path = to / one.path
        if not one.is_folder:
            refuse_existing(path, force)
        elif os.path.lexists(path) and not (force and npytree.is_npy_tree(path)):
            rest = "" if force else ", or pass force=True to overwrite it"
            raise AlreadyExistsError(f"{path} exists: choose another folder{rest}")


def _write(outputs: list[_Output], to: Path, force: bool, copy: Copy) -> None:
    new = not to.exists()
    home = to.parent if new else to
    with folder(home), aside(home) as scratch:
        whole = scratch / "whole"
        whole.mkdir()
        for one in outputs:
            path = whole / one.path
            path.parent.mkdir(parents=True, exist_ok=True)
            one.write(path, copy)
        for inner, _, _ in os.walk(whole):
            sync_folder(Path(inner))
        if new:
            place_folder(whole, to)
        else:
            for one in outputs:
                path = to / one.path
                path.parent.mkdir(parents=True, exist_ok=True)
                if one.is_folder:
                    place_folder(whole / one.path, path, scratch if force else None)
                else:
                    place(whole / one.path, path, force)
                sync_folder(path.parent)
        sync_folder(home)
