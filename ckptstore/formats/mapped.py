"""A foreign file in memory without reading it: arrays are ranges of its mapping, and pages come when touched."""

from __future__ import annotations

import math
import mmap
import os
import stat
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ckptstore.arrays import ArraySpec
from ckptstore.dtypes import numpy_dtype, torch_dtype
from ckptstore.errors import CorruptionError, FormatError, InvalidRecordError, NotFoundError

# Not in Python's mmap before 3.13. Without it Linux counts every page of a private mapping as if it were to be written,
# and refuses files that are larger than the memory.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class Snapshot:
    """What a file was when it was first looked at: mapped bytes that change meanwhile would be a mixture."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._look()

    def _look(self) -> tuple[int, ...]:
        try:
            now = os.stat(self._path)
        except (OSError, ValueError):
            return ()
        return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns

    def check(self) -> None:
        """Raises InvalidRecordError unless the file is as it was."""
        if self._look() != self._seen:
            raise InvalidRecordError(f"{self._path} changed or vanished while it was being read: read it again")


class MappedFile:
    """A regular file, mapped copy-on-write: who changes an array changes a copy of its pages, never the file.

    Raises:
        NotFoundError: there is no such file.
        InvalidRecordError: it is no regular file, or cannot be read.
    """

    def __init__(self, path: Path, named: Path | None = None) -> None:
        """``named`` is what errors call it, where ``path`` is a scratch file."""
        self.path = named or path
        fd = open_regular(path)
        try:
            self.size = os.fstat(fd).st_size
            self._map = self._mapped(fd) if self.size else None
        finally:
            os.close(fd)

    def _mapped(self, fd: int) -> mmap.mmap:
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        try:
            return mmap.mmap(fd, self.size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError, OverflowError) as error:
            raise InvalidRecordError(f"{self.path} cannot be mapped ({error}): copy it to a disk") from error

    def read(self, start: int, length: int) -> bytes:
        """A copy of some bytes; fewer at the end of the file."""
        return b"" if self._map is None else self._map[start : start + length]

    def array(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, *, fortran: bool = False
    ) -> np.ndarray[Any, Any]:
        """The array whose elements begin at byte ``start``; not a copy. CorruptionError if the file ends before it."""
        length = math.prod(shape) * dtype.itemsize
        self._check_range(start, length)
        order: Literal["F", "C"] = "F" if fortran else "C"
        try:
            memory, at = (self._map, start) if length else (None, 0)
            made: np.ndarray[Any, Any] = np.ndarray(shape, dtype, memory, at, None, order)
            return made
        except (ValueError, TypeError) as error:  # empty arrays may have sizes that multiply to more than a memory
            text = f"{self.path} holds an array of shape {str(shape)[:80]}, which NumPy cannot hold ({error})"
            raise FormatError(text, key=str(self.path)) from error

    def value(self, spec: ArraySpec, start: int, torch: Any) -> Any:
        """The array, tensor (NumPy where ``torch`` is None), ``bytes`` or ``bytearray`` of that kind."""
        if spec.kind == "torch" and torch is not None:
            dtype = torch_dtype(torch, spec.dtype)
            raw = torch.from_numpy(self.array(np.dtype(np.uint8), (spec.nbytes,), start))
            return raw.view(dtype).reshape(spec.shape) if spec.nbytes else torch.empty(spec.shape, dtype=dtype)
        if spec.kind in ("bytes", "bytearray"):
            self._check_range(start, spec.nbytes)
            data = self.read(start, spec.nbytes)
            return data if spec.kind == "bytes" else bytearray(data)
        return self.array(numpy_dtype(spec.dtype), spec.shape, start)

    def _check_range(self, start: int, length: int) -> None:
        if start < 0 or start + length > self.size:
            raise CorruptionError(
                f"{self.path} is damaged: it has {self.size} bytes and should have at least {start + length}. "
                "It was cut, or is still being written: use another copy",
                key=str(self.path),
            )


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file. NotFoundError or InvalidRecordError, as MappedFile."""
    try:
        # Not blocking: opening a pipe would wait for somebody to write to it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{path} does not exist: nothing to read") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidRecordError(f"{path} cannot be read ({why}): nothing was read") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidRecordError(f"{path} is not a regular file: nothing was read")
    return fd
