"""What an epoch remembers of the files that it was made of, in its metadata: enough to know them again unread, and to
put them back under the names that their trainer expects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore.files import Identity

KEY = "ckptstore.files"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an epoch comes from.

    Attributes:
        paths: of each record's file, below ``folder``, with ``/``.
        identities: of those files, when they were stored.
        sizes: bytes that they hold, out of gzip.
    """

    layout: str
    folder: str
    paths: Mapping[str, str]
    identities: Mapping[str, Identity]
    sizes: Mapping[str, int]

    def metadata(self) -> dict[str, Any]:
        """As plain values, under a key of its own."""
        files = {
            name: {"path": path, "content": self.sizes[name], **self.identities[name]._asdict()}
            for name, path in self.paths.items()
        }
        return {KEY: {"layout": self.layout, "folder": self.folder, "files": files}}


def origin_of(metadata: Mapping[str, Any]) -> Origin | None:
    """What ``metadata`` tells; None where it tells nothing, or not what it should (it comes from a store)."""
    try:
        found = metadata[KEY]
        files = {str(name): dict(file) for name, file in found["files"].items()}
        paths = {name: str(file["path"]) for name, file in files.items()}
        identities = {name: Identity(*(int(file[key]) for key in Identity._fields)) for name, file in files.items()}
        sizes = {name: int(file["content"]) for name, file in files.items()}
        origin = Origin(str(found["layout"]), str(found["folder"]), paths, identities, sizes)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return origin if all(is_below(path) for path in paths.values()) else None


def is_below(path: str) -> bool:
    """Whether a path (with ``/``) leads to something below a folder, whatever the store says."""
    return "\0" not in path and "\\" not in path and not {"", ".", ".."} & set(path.split("/"))
