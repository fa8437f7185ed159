"""Checkpoints of more than one file: arrays in shards with an index, and the folder of a Hugging Face Trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ckptstore.errors import CorruptionError, FormatError, InvalidRecordError, UnsafeFileError
from ckptstore.formats.layout import FILES, is_inside, layout_record
from ckptstore.formats.mapped import MappedFile
from ckptstore.formats.pytorch import read_torch
from ckptstore.formats.safetensors import open_safetensors, torch_of
from ckptstore.formats.structure import record_name

INDEX_SAFETENSORS = ".safetensors.index.json"
INDEX_TORCH = ".bin.index.json"
_TORCH = (".pt", ".pth", ".bin")
_MARKS = ("trainer_state.json", "model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
_BINS = ("pytorch_model", "adapter_model", "optimizer", "scheduler")
_MAX_INDEX = 100_000_000
_MAX_FILES = 100_000
Note = Callable[[Path], object]
"""Told of each file that arrays are mapped from."""


def is_trainer_folder(path: Path) -> bool:
    """Whether a folder looks like what a Trainer (or ``save_pretrained``) writes."""
    marks = (*_MARKS, "model" + INDEX_SAFETENSORS, "pytorch_model" + INDEX_TORCH)
    return path.is_dir() and any((path / mark).is_file() for mark in marks)


# ---------------------------------------------------------------- arrays in shards


def read_sharded(path: Path, note: Note) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(arrays by name, layout entry)`` of all shards that an index names, in the order of the index.

    Raises:
        CorruptionError: the index is malformed, or a shard has not exactly the arrays that it should have.
        NotFoundError: a shard is missing.
        UnsafeFileError, FormatError, InvalidRecordError: as for a single file.
    """
    weights = _weight_map(path)
    safetensors = path.name.endswith(INDEX_SAFETENSORS)
    found: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    for shard in dict.fromkeys(weights.values()):
        file = path.with_name(shard)
        note(file)
        if safetensors:
            opened = open_safetensors(file)
            arrays, metadata[shard] = opened.arrays(torch_of(opened.metadata)), opened.metadata
        else:
            arrays = _dict_of(file, read_torch(file))
        wanted = {name for name, where in weights.items() if where == shard}
        if arrays.keys() != wanted:
            odd = sorted(map(str, set(arrays) ^ wanted))[:3]
            _damaged(file, f"its arrays are not those that {path.name} lists ({', '.join(odd)})")
        found.update(arrays)
    note(path)
    ordered = {name: found[name] for name in weights}
    kind = "safetensors-sharded" if safetensors else "torch-sharded"
    return ordered, {"kind": kind, "index": path.name, "weight_map": weights, "metadata": metadata}


def _dict_of(file: Path, tree: Any) -> dict[Any, Any]:
    if not isinstance(tree, dict):
        _damaged(file, "it holds no arrays by name")
    return tree


def _weight_map(path: Path) -> dict[str, str]:
    index = MappedFile(path)
    if index.size > _MAX_INDEX:
        _damaged(path, "it is larger than any index")
    try:
        weights = json.loads(index.read(0, index.size))["weight_map"]
        good = bool(weights) and all(type(shard) is str and "/" not in shard for shard in weights.values())
        good = good and all(is_inside(shard) for shard in set(weights.values()))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise CorruptionError(f"{path} is damaged: it is no index of shards ({error})", key=str(path)) from error
    if not good:
        _damaged(path, "it names files that are not beside it")
    return dict(weights)


def read_safetensors(path: Path) -> tuple[Any, dict[str, Any]]:
    """``(tree, layout entry)`` of a single file."""
    opened = open_safetensors(path)
    entry = {"kind": "safetensors", "file": path.name, "metadata": opened.metadata}
    return opened.record(), entry


# ---------------------------------------------------------------- a Trainer's folder


def read_trainer_folder(path: Path, note: Note) -> dict[str, Any]:
    """The records of a ``checkpoint-N`` folder: model, optimizer, scheduler, random states, and ``files``.

    Every file with arrays is a record; everything else, and what only its own code could read (``training_args.bin``),
    is kept byte for byte in the record ``files``.

    Raises:
        CorruptionError, NotFoundError, InvalidRecordError: one of the files is damaged, missing or cannot be read.
        FormatError: one of them cannot be read here.
    """
    names = sorted(_walk(path))
    records: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    read: set[str] = set()

    def add(stem: str, tree: Any, entry: dict[str, Any]) -> None:
        name = "model" if stem == "pytorch_model" and "model" not in records else record_name(stem)
        while name in records or name == FILES:
            name += "_"
        records[name], entries[name] = tree, entry

    for name in names:
        for suffix in (INDEX_SAFETENSORS, INDEX_TORCH):
            if name.endswith(suffix) and "/" not in name:
                tree, entry = read_sharded(path / name, note)
                add(name.removesuffix(suffix), tree, entry)
                read.update(entry["weight_map"].values())
    for name in names:
        stem, suffix = os.path.splitext(name)
        if name in read or "/" in name:
            continue
        if suffix == ".safetensors":
            note(path / name)
            add(stem, *read_safetensors(path / name))
            read.add(name)
        elif _is_torch(path / name):
            note(path / name)
            try:
                tree = read_torch(path / name)
            except UnsafeFileError:
                continue  # it stays a file: nobody here needs to understand it
            add(stem, tree, {"kind": "torch", "file": name})
            read.add(name)
    kept = [name for name in names if name not in read]
    for name in kept:
        note(path / name)
    records[FILES] = layout_record("huggingface", entries, {name: file_bytes(path / name) for name in kept})
    return records


def _is_torch(path: Path) -> bool:
    """Whether a file is torch's: ``.bin`` is also what everybody calls a file of bytes."""
    if path.suffix != ".bin":
        return path.suffix in _TORCH
    return path.stem in _BINS or MappedFile(path).read(0, 4).startswith((b"PK\x03\x04", b"\x80\x02"))


def file_bytes(path: Path) -> np.ndarray[Any, Any]:
    """The content of a file as a row of bytes, mapped."""
    file = MappedFile(path)
    return file.array(np.dtype(np.uint8), (file.size,), 0)


def _walk(root: Path) -> Iterator[str]:
    """All files below a folder, as relative paths with ``/``."""
    count = 0

    def refuse(error: OSError) -> None:
        raise InvalidRecordError(f"{error.filename} cannot be read ({error.strerror}): nothing was read") from error

    for folder, inner, files in os.walk(root, onerror=refuse):
        for name in inner:
            if os.path.islink(os.path.join(folder, name)):
                raise InvalidRecordError(f"{folder}/{name} links to another folder: copy it, or leave it out")
        for name in files:
            count += 1
            if count > _MAX_FILES:
                raise FormatError(f"{root} has more than {_MAX_FILES} files: it is no checkpoint of one epoch")
            yield Path(folder, name).relative_to(root).as_posix()


def _damaged(path: Path, why: str) -> NoReturn:
    message = f"{path} is damaged: {why}. Nothing was read: use another copy, or save the epoch again"
    raise CorruptionError(message, key=str(path))
