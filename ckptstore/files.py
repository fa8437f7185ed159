"""A file as the source of a record."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ckptstore.arrays import ArraySpec
from ckptstore.errors import InvalidRecordError, NotFoundError


class FileSource:
    """A file read piece by piece by many threads (``pread``: no shared position)."""

    item_size = 0  # the codec probes for the width of whatever numbers the file holds
    align = 8

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Not blocking: opening a pipe would wait for somebody to write to it.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"{path} does not exist: nothing to store") from error
        except OSError as error:
            raise InvalidRecordError(f"{path} cannot be read ({error.strerror}): nothing to store") from error
        self._stat = os.fstat(self._fd)
        if not stat.S_ISREG(self._stat.st_mode):
            os.close(self._fd)
            raise InvalidRecordError(f"{path} is not a regular file: nothing to store")
        self.nbytes = self._stat.st_size
        self.spec = ArraySpec("bytes", "uint8", (self.nbytes,))

    def read(self, start: int, stop: int) -> memoryview:
        parts = bytearray(stop - start)
        view = memoryview(parts)
        filled = 0
        while filled < len(parts):
            count = os.preadv(self._fd, [view[filled:]], start + filled)
            if count == 0:
                raise InvalidRecordError(f"{self._path} became shorter while it was being saved: save it again")
            filled += count
        return view

    def check_unchanged(self) -> None:
        """Raises InvalidRecordError unless the file is as it was when it was opened."""
        if os.pread(self._fd, 1, self.nbytes):
            # Also what files of /proc look like: bytes, but no size.
            raise InvalidRecordError(f"{self._path} is longer than it says: copy it to an ordinary file first")
        now = os.stat(self._path)
        before = self._stat
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
            raise InvalidRecordError(f"{self._path} changed while it was being saved: save it again")

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
