"""The same files as arrays: what ``formats`` can read safely, under record names that fit the layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore.formats import ForeignCheckpoint, read
from ckptstore.watching.layouts import Layout


def read_trees(
    folder: Path, layout: Layout | None, files: Mapping[str, str]
) -> tuple[dict[str, Any], list[ForeignCheckpoint]]:
    """Record name → state, and what has to be asked afterwards whether it is unchanged. Nothing is read before use.

    Raises:
        CorruptionError, FormatError, NotFoundError, InvalidRecordError: as of ``formats.read``.
    """
    if layout is not None and layout.tree:
        # The folder is one checkpoint: that of the file that lies highest.
        trees = {min(files.values(), key=lambda path: path.count("/")).rpartition("/")[0]: ""}
    else:
        trees = {path: name for name, path in files.items()}
    states: dict[str, Any] = {}
    found = []
    for path, name in sorted(trees.items()):
        foreign = read(folder / path)
        found.append(foreign)
        for inner, state in foreign.items():
            if len(foreign) == 1 and name:
                inner = name
            elif len(trees) > 1:
                inner = f"{name}/{inner}"
            states[inner] = state
    return states, found
