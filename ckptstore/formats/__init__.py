"""Checkpoints of other programs as trees of arrays, ready to be saved.

>>> found = formats.read("out/checkpoint-500")
>>> repo.save(500, found)

Nothing in a file is executed, no size in it is trusted, and no array is read before it is used: it lies in a mapping
of its file. That has one price: a file that is *cut* while it is mapped ends the process (SIGBUS), as it does for every
program that maps files. So read what is finished; ``check_unchanged`` tells afterwards whether it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ckptstore.errors import FormatError
from ckptstore.formats import folders, lightning, npytree
from ckptstore.formats.dcp import is_dcp_folder, read_dcp
from ckptstore.formats.mapped import MappedFile, Snapshot
from ckptstore.formats.npz import read_npz
from ckptstore.formats.pytorch import read_torch
from ckptstore.formats.structure import record_name

Kind = Literal[
    "safetensors", "safetensors-sharded", "torch", "torch-sharded", "lightning", "huggingface", "dcp", "npz", "files"
]

_ADVICE = (
    "known are .safetensors and its .index.json, .pt, .pth, .bin and .ckpt of torch, .npz, a Trainer's "
    "checkpoint-N folder and one of torch's DCP; store any other file as it is (`ckptstore save URL NAME=FILE`)"
)


class ForeignCheckpoint(Mapping[str, Any]):
    """What was read: record name → tree, as ``repo.save`` takes it.

    Attributes:
        path, kind: what was read.
        metadata: for each record, the texts that a safetensors file keeps beside its arrays; empty for others.
    """

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path = path
        self.kind = kind
        self.metadata: dict[str, dict[str, str]] = {}
        self._records: dict[str, Any] = {}
        self._seen: list[Snapshot] = []

    def __repr__(self) -> str:
        return f"<ForeignCheckpoint {self.path} ({self.kind}) records={sorted(self._records)}>"

    def __getitem__(self, name: str) -> Any:
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def note(self, path: Path) -> None:
        """Remember what a file is like now: before it is read."""
        self._seen.append(Snapshot(path))

    def check_unchanged(self) -> None:
        """After the arrays were used: were they of one state of the files?

        Raises:
            InvalidRecordError: a file was changed, replaced or deleted since it was read: what was saved is a mixture.
        """
        for seen in self._seen:
            seen.check()

    def fill(self) -> None:
        """Read all records; once."""
        self._records.update(_READERS[self.kind](self))


def read(path: str | os.PathLike[str]) -> ForeignCheckpoint:
    """Read a checkpoint of another program.

    ================================  ==========================================================================
    what                              records
    ================================  ==========================================================================
    ``x.safetensors``                 ``x``: arrays by name; as it was, if ckptstore exported it
    ``x.safetensors.index.json``      ``x``: the arrays of all shards
    ``x.pt``, ``x.pth``, ``x.bin``    ``x``: what ``torch.save`` was given (needs torch from 2.10 on)
    ``pytorch_model.bin.index.json``  ``pytorch_model``: the arrays of all shards
    ``x.ckpt`` of Lightning           ``model``, ``optimizer``, ``lr_scheduler``, ``trainer`` (the rest), ``files``
    ``checkpoint-N/`` of a Trainer    ``model``, ``optimizer``, ``scheduler``, ``rng_state``, ..., ``files``
    a folder of torch's DCP           the dicts at the top of its state dict, and ``state_dict`` with the rest
    ``x.npz``                         ``x``: arrays by name; as it was, if ckptstore exported it
    a folder exported as ``files``    the record that was exported
    ================================  ==========================================================================

    Arrays of torch and safetensors come as tensors where torch is installed. They lie in a mapping of the file: use
    them (``repo.save``) before you change it.

    Raises:
        NotFoundError: there is no such file, or one that belongs to it is missing.
        CorruptionError: cut, garbage, or something in it does not add up; ``.key`` is the file.
        UnsafeFileError: it holds a pickle of objects; nothing of it was run.
        FormatError: of a kind that cannot be read here.
        InvalidRecordError: it cannot be read, or is no regular file.
    """
    place = Path(path)
    found = ForeignCheckpoint(place, detect(place))
    found.fill()
    return found


def detect(path: str | os.PathLike[str]) -> Kind:
    """What kind of checkpoint lies there, by its name and its first bytes; nothing is read or run.

    Raises:
        NotFoundError: there is nothing.
        FormatError: none that is known.
        InvalidRecordError: it cannot be read.
    """
    place = Path(path)
    if place.is_dir():
        if is_dcp_folder(place):
            return "dcp"
        if folders.is_trainer_folder(place):
            return "huggingface"
        if npytree.is_npy_tree(place):
            return "files"
        raise FormatError(f"{place} holds no checkpoint that is known here: {_ADVICE}", key=str(place))
    for suffix, kind in _SUFFIXES.items():
        if place.name.endswith(suffix):
            MappedFile(place)  # is it there?
            return kind
    head = MappedFile(place).read(0, 64)
    if head.startswith(b"PK\x03\x04"):
        return "npz" if b".npy" in head else "torch"
    if head.startswith(b"\x80\x02"):
        return "torch"
    if head[8:9] == b"{" and head[4:8] == bytes(4):
        return "safetensors"
    raise FormatError(f"{place} is no checkpoint that is known here: {_ADVICE}", key=str(place))


_SUFFIXES: dict[str, Kind] = {
    folders.INDEX_SAFETENSORS: "safetensors-sharded", folders.INDEX_TORCH: "torch-sharded",
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "lightning",
    ".npz": "npz",
}  # fmt: skip


def _safetensors(found: ForeignCheckpoint) -> dict[str, Any]:
    found.note(found.path)
    tree, entry = folders.read_safetensors(found.path)
    name = record_name(found.path.stem)
    found.metadata[name] = entry["metadata"]
    return {name: tree}


def _sharded(found: ForeignCheckpoint) -> dict[str, Any]:
    suffix = folders.INDEX_SAFETENSORS if found.kind == "safetensors-sharded" else folders.INDEX_TORCH
    tree, entry = folders.read_sharded(found.path, found.note)
    name = record_name(found.path.name.removesuffix(suffix))
    found.metadata[name] = {key: text for shard in entry["metadata"].values() for key, text in shard.items()}
    return {name: tree}


def _torch(found: ForeignCheckpoint) -> dict[str, Any]:
    """A file of torch; Lightning's are told by what is in them, whatever they are called."""
    found.note(found.path)
    whole = read_torch(found.path)
    if not lightning.is_lightning(whole):
        found.kind = "torch"
        return {record_name(found.path.stem): whole}
    found.kind = "lightning"
    return lightning.split(whole, found.path.name)


def _npz(found: ForeignCheckpoint) -> dict[str, Any]:
    found.note(found.path)
    return {record_name(found.path.stem): read_npz(found.path)}


def _trainer_folder(found: ForeignCheckpoint) -> dict[str, Any]:
    return folders.read_trainer_folder(found.path, found.note)


def _dcp(found: ForeignCheckpoint) -> dict[str, Any]:
    return read_dcp(found.path, found.note)


def _npy_tree(found: ForeignCheckpoint) -> dict[str, Any]:
    return {record_name(found.path.name): npytree.read_npy_tree(found.path, found.note)}


_READERS = {
    "safetensors": _safetensors, "safetensors-sharded": _sharded, "torch": _torch, "torch-sharded": _sharded,
    "lightning": _torch, "huggingface": _trainer_folder, "npz": _npz, "files": _npy_tree, "dcp": _dcp,
}  # fmt: skip

__all__ = ["ForeignCheckpoint", "Kind", "detect", "read"]
