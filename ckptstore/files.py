"""A file as the source of a record."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from ckptstore.arrays import ArraySpec
from ckptstore.errors import InvalidRecordError, NotFoundError
from ckptstore.manifest import RecordIndex, digest_of


class Identity(NamedTuple):
    """By what a file is known again without reading it. A file that is written to gets another one."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> Identity:
        """Of what ``stat`` says."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class FileSource:
    """A file read piece by piece by many threads (``pread``: no shared position).

    Args:
        detached: what counts is the file that was opened: its name may go, or go over to another file, meanwhile.
    """

    item_size = 0  # the codec probes for the width of whatever numbers the file holds
    align = 8

    def __init__(self, path: Path, *, detached: bool = False) -> None:
        self.path = path
        self._detached = detached
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
        self.identity = Identity.of(self._stat)
        self.nbytes = self._stat.st_size
        self.spec = ArraySpec("bytes", "uint8", (self.nbytes,))

    @property
    def name(self) -> str:
        """Its name, without the folder."""
        return self.path.name.encode("utf-8", "backslashreplace").decode()

    def unchanged(self) -> bool:
        """Whether it has kept its form: a file always has. ``check_unchanged`` is about its bytes."""
        return True

    def fileno(self) -> int:
        """The open file. Nobody else moves its position."""
        return self._fd

    def read(self, start: int, stop: int) -> memoryview:
        parts = bytearray(stop - start)
        view = memoryview(parts)
        filled = 0
        while filled < len(parts):
            try:
                count = os.preadv(self._fd, [view[filled:]], start + filled)
            except OSError as error:
                raise InvalidRecordError(f"{self.path} cannot be read ({error.strerror}): save it again") from error
            if count == 0:
                raise InvalidRecordError(f"{self.path} became shorter while it was being saved: save it again")
            filled += count
        return view

    def check_unchanged(self) -> None:
        """Raises InvalidRecordError unless the file is as it was when it was opened."""
        try:
            longer, now = bool(os.pread(self._fd, 1, self.nbytes)), self._now()
        except OSError as error:
            raise InvalidRecordError(
                f"{self.path} cannot be read any more ({error.strerror}): save it again"
            ) from error
        if now != self.identity:
            raise InvalidRecordError(f"{self.path} changed while it was being saved: save it again")
        if longer:
            # What files of /proc look like: bytes, but no size.
            raise InvalidRecordError(f"{self.path} is longer than it says: copy it to an ordinary file first")

    def _now(self) -> Identity:
        """Asked for by opening it anew: then a network mount asks its server."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if not self._detached:
                raise
            return Identity.of(os.fstat(self._fd))
        try:
            now = Identity.of(os.fstat(fd))
        finally:
            os.close(fd)
        return now if now.inode == self.identity.inode or not self._detached else Identity.of(os.fstat(self._fd))

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def same_bytes(source: FileSource, index: RecordIndex) -> bool:
    """Whether a file record has just the bytes of a file, as far as digests tell: nothing of the record is read."""
    entry = index.arrays[0]
    if sum(span.length for span in entry.spans) != source.nbytes:
        return False
    if entry.digest:
        return digest_of(source.read(0, source.nbytes)) == entry.digest
    at = 0
    for span in entry.spans:
        chunk = index.chunks[span.chunk]
        if span.offset or span.length != chunk.raw_length:
            return False
        if digest_of(source.read(at, at + span.length)) != chunk.digest:
            return False
        at += span.length
    return True
