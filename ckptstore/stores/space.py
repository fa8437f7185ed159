"""Space: what is left in a place, as far as the system tells. One or two system calls; nothing is written."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

# File systems of Linux that store bytes as they are. Others compress, or repeat what a server says.
_PLAIN = {0xEF53: "ext2/3/4", 0x58465342: "xfs", 0x01021994: "tmpfs", 0x858458F6: "ramfs"}

_QUOTACTL_FD = 443  # the same number on every architecture that Python runs on
_GET_USER, _GET_GROUP = 0x800007 << 8, 0x800007 << 8 | 1
_QUOTA_BLOCK = 1024
_HAS_BYTES, _HAS_FILES = 1 | 2, 4 | 8  # limits and usage


@dataclass(frozen=True, slots=True)
class Space:
    """What is left in a place. None: the system does not tell, or there is no such limit.

    Attributes:
        free: bytes that this user can write, by the file system.
        files: how many files can be made.
        quota: bytes left of the quota of this user, or of its group, whichever is less.
        quota_files: files left of it.
        ceiling: bytes beyond which nothing can be written for sure: known only where a file takes at least its length.
        block: bytes by which a file grows on the disk.
    """

    free: int | None
    files: int | None
    quota: int | None = None
    quota_files: int | None = None
    ceiling: int | None = None
    block: int = 4096

    @property
    def room(self) -> int | None:
        """Bytes that can be written, by file system and quota."""
        return min((n for n in (self.free, self.quota) if n is not None), default=None)

    @property
    def room_for_files(self) -> int | None:
        """Files that can be made, by file system and quota."""
        return min((n for n in (self.files, self.quota_files) if n is not None), default=None)


def space_of(root: str) -> Space | None:
    """The space below a folder, or where it would be made; None if the system does not tell."""
    path = root
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        left = os.statvfs(path)
    except OSError:
        return None
    free = files = ceiling = None
    if left.f_blocks:
        # The blocks that file systems hold back are there for root, who may be us.
        free = (left.f_bfree if os.geteuid() == 0 else left.f_bavail) * left.f_frsize
        ceiling = left.f_bfree * left.f_frsize if _stores_plainly(path) else None
    if left.f_files:
        files = left.f_ffree if os.geteuid() == 0 else left.f_favail
    quota, quota_files = _quota(path)
    return Space(free, files, quota, quota_files, ceiling, left.f_frsize or 4096)


@cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


def _stores_plainly(path: str) -> bool:
    """Whether the file system is known to store bytes as they are."""
    libc = _libc()
    if libc is None or not hasattr(libc, "statfs"):
        return False
    facts = (ctypes.c_ulong * 64)()  # struct statfs is at most 120 bytes, and begins with the type
    if libc.statfs(os.fsencode(path), ctypes.byref(facts)):
        return False
    return facts[0] & 0xFFFFFFFF in _PLAIN


class _Quota(ctypes.Structure):
    """``struct if_dqblk`` of Linux."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("block_limit", "block_soft", "space", "file_limit", "file_soft")),
        *((name, ctypes.c_uint64) for name in ("files", "block_time", "file_time")),
        ("valid", ctypes.c_uint32),
    ]  # fmt: skip

    block_limit: int
    space: int
    file_limit: int
    files: int
    valid: int

    def left(self) -> tuple[int | None, int | None]:
        """Bytes and files below the hard limits."""
        size = files = None
        if self.valid & _HAS_BYTES == _HAS_BYTES and self.block_limit:
            size = max(0, self.block_limit * _QUOTA_BLOCK - self.space)
        if self.valid & _HAS_FILES == _HAS_FILES and self.file_limit:
            files = max(0, self.file_limit - self.files)
        return size, files


def _quota(path: str) -> tuple[int | None, int | None]:
    """Bytes and files left of the quotas of this user and its group. (Those of projects are in ``statvfs``.)"""
    libc = _libc()
    if libc is None or os.geteuid() == 0:  # nobody holds root to a quota
        return None, None
    sizes, counts = [], []
    with suppress(OSError):
        place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for command, number in ((_GET_USER, os.geteuid()), (_GET_GROUP, os.getegid())):
                answer = _Quota()
                if libc.syscall(_QUOTACTL_FD, place, command, number, ctypes.byref(answer)) == 0:
                    size, files = answer.left()
                    sizes += [size] if size is not None else []
                    counts += [files] if files is not None else []
        finally:
            os.close(place)
    return min(sizes, default=None), min(counts, default=None)
