"""Folders that others may make, remove and replace at the same time: found, made, synced and removed.

As in ``_posix.py`` a plain ``OSError`` is raised; :mod:`ckptstore.stores.local` gives it its meaning.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from ckptstore.stores._posix import FOLDER, Identity, refresh, sync_folder
from ckptstore.stores.mounts import Ground

TRIES = 32


class Folders:
    """The folders below ``root``, and what is known of them."""

    def __init__(self, root: str, ground: Ground) -> None:
        self._root = root
        self._ground = ground
        # Folders whose entries all the way up are on disk, and the folder up to which that has to be so:
        # above the root only where we made its parents.
        self._settled: dict[str, Identity] = {}
        self._top = root
        self._inside: set[str] = set()

    def locate(self, key: str) -> tuple[str, str]:
        """Folder and file name of a key, after a look that no symbolic link leads out of the root."""
        inner, _, name = key.rpartition("/")
        if not inner:
            return self._root, name
        folder = os.path.join(self._root, inner)
        if folder not in self._inside:
            path = self._root
            for part in inner.split("/"):
                path = os.path.join(path, part)
                try:
                    facts = os.lstat(path)
                except (FileNotFoundError, NotADirectoryError):
                    return folder, name  # what the verb itself is about to meet
                if stat.S_ISLNK(facts.st_mode):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            self._inside.add(folder)
        return folder, name

    def make(self, folder: str) -> None:
        """Make a folder and its missing parents while others may make and remove them too."""
        missing = [folder]
        for _ in range(TRIES):
            path = missing[-1]
            parent = os.path.dirname(path)
            if len(path) <= len(self._root) and len(parent) < len(self._top):
                self._top = parent  # before it is made, so that no other thread settles for less
            try:
                os.mkdir(path)
                self._settled.pop(path, None)
            except FileNotFoundError:
                missing.append(parent)
                continue
            except FileExistsError:
                with suppress(FileNotFoundError):
                    if not stat.S_ISDIR(os.stat(path).st_mode):
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
            missing.pop()
            if not missing:
                return

    def settle(self, folder: str, place: int) -> None:
        """See that the folder itself survives a crash, whoever made it and its parents."""
        facts = os.fstat(place)
        identity = facts.st_dev, facts.st_ino
        known = self._settled.get(folder)
        if known == identity:
            return
        if known is not None:  # removed and made again, or mounted over
            self._inside.clear()
            self._settled.clear()
            self._ground.forget()
        path = folder
        while len(path) > len(self._top):
            path = os.path.dirname(path)
            parent = os.open(path, FOLDER)
            try:
                self.sync(parent)
            finally:
                os.close(parent)
        self._settled[folder] = identity

    def sync(self, place: int) -> None:
        """Sync an open folder, where the file system knows such a thing."""
        if not sync_folder(place):
            self._ground.folders_do_not_sync()

    def remove_empty(self, folder: str, *, shared: bool = False) -> None:
        """Remove folders that a delete left empty. What cannot go (in use, filled again) stays.

        On a network mount those right below the root stay, unless ``shared``: some servers (SeaweedFS) remove a folder
        in which somebody is making a file at that moment, and these are the folders that all writers share.
        """
        least = len(self._root)
        if self._ground.look().network and not shared:
            least += 1 + len(folder[least + 1 :].partition("/")[0])
        while len(folder) > least:
            self._settled.pop(folder, None)
            self._inside.discard(folder)
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                return
            folder = os.path.dirname(folder)

    def refresh(self, folder: str) -> None:
        """Let the kernel ask the server of a network mount anew, for the root and all down to ``folder``."""
        path = self._root
        refresh(path)
        for part in folder[len(path) + 1 :].split("/"):
            path = os.path.join(path, part)
            refresh(path)
