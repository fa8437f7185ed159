"""A record as a folder: one .npy file for each array, and ``skeleton.json`` with everything else.

The description (``structure.py``) lies in ``skeleton.json``; the name of each array is that of its file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptstore.errors import CorruptionError
from ckptstore.formats.mapped import MappedFile
from ckptstore.formats.npz import npy_value, open_npy
from ckptstore.formats.pytorch import torch_for
from ckptstore.formats.structure import Held, described, rebuilt

SKELETON = "skeleton.json"
SUFFIX = ".npy"
_BEGIN = b'{"version":'
_LONGEST = 150


def fit_name(path: str) -> str:
    """A file's name that every file system takes, without the suffix."""
    name = re.sub(r"[^\w.\-+=@,()\[\] ]", "_", path)
    while len(name.encode()) > _LONGEST:
        name = name[:-1]
    name = name.strip(". ") or "_"
    # Names that Windows keeps for devices.
    return f"_{name}" if re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name) else name


def is_npy_tree(path: Path) -> bool:
    """Whether a folder is one that was exported so."""
    file = path / SKELETON
    return file.is_file() and MappedFile(file).read(0, len(_BEGIN)) == _BEGIN


def read_npy_tree(path: Path, note: Callable[[Path], object]) -> Any:
    """The record that was exported.

    Raises:
        CorruptionError: a file is cut, changed or malformed.
        NotFoundError: an array's file is missing.
        FormatError: it was written by a newer version.
    """
    file = path / SKELETON
    note(file)
    whole = MappedFile(file)
    skeleton, held = described(whole.read(0, whole.size), file)
    torch = torch_for(held)

    def value(one: Held) -> Any:
        place = path / (one.name + SUFFIX)
        if "/" in one.name or "\\" in one.name or "\0" in one.name:
            raise CorruptionError(f"{file} is damaged: {one.name[:80]!r} is no name of a file beside it", key=str(file))
        note(place)
        mapped = MappedFile(place)
        return npy_value(open_npy(mapped, 0, mapped.size, str(place)), one, torch)

    return rebuilt(skeleton, held, value, file)
