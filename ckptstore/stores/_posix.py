"""Files the durable way: what LocalStore does with one file or folder, in terms of descriptors.

These functions raise plain ``OSError``; :mod:`ckptstore.stores.local` gives them their meaning.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ckptstore.keys import partial_key
from ckptstore.stores.base import Body

CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a foreign pipe must not hang; it means nothing to regular files.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

Identity = tuple[int, int]
"""Device and inode: says whether two names are one file."""

NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_NO_FLAGS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EPERM}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
_COMPARE = 1 << 20

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_AT_STATX_FORCE_SYNC = 0x2000
_STATX_BASIC = 0x7FF
_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def flat(data: Body) -> memoryview:
    """The bytes of a body, copied only where they are not contiguous."""
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def write_file(handle: int, body: memoryview, *, sync: bool = True) -> Identity:
    """Write, sync and close a new file. Network mounts may tell of a full disk only at the end."""
    try:
        done = 0
        while done < body.nbytes:
            count = os.write(handle, body[done:] if done else body)
            if count == 0:  # or this would never end
                raise OSError(errno.EIO, "nothing was written")
            done += count
        if sync:
            os.fsync(handle)
        facts = os.fstat(handle)
    except BaseException:
        with suppress(OSError):
            os.close(handle)
        raise
    os.close(handle)
    return facts.st_dev, facts.st_ino


def read_range(handle: int, start: int, end: int) -> bytes:
    """Bytes ``[start, end)`` of a file. One read gets them all, but a network mount may give less."""
    parts = []
    while start < end:
        part = os.pread(handle, end - start, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(handle: int, start: int, room: memoryview) -> memoryview:
    """As ``read_range``, into ``room``; the part of it that was filled."""
    filled = 0
    while filled < len(room):
        count = os.preadv(handle, [room[filled:]], start + filled)
        if count == 0:
            break
        filled += count
    return room[:filled]


def replace(scratch: str, name: str, place: int, identity: Identity) -> None:
    """Give a finished scratch file its name, in place of what had it before."""
    try:
        os.replace(scratch, name, src_dir_fd=place, dst_dir_fd=place)
    except OSError:
        if not is_file(name, place, identity):  # else it was done, the reply was lost
            raise


def is_file(name: str, place: int, identity: Identity) -> bool:
    """Whether a name in a folder is known to be that very file."""
    try:
        facts = os.stat(name, dir_fd=place, follow_symlinks=False)
    except OSError:
        return False
    return (facts.st_dev, facts.st_ino) == identity


def holds(name: str, place: int, body: memoryview, identity: Identity) -> bool | None:
    """Whether a file holds exactly these bytes; None when it is gone."""
    try:
        handle = os.open(name, READ, dir_fd=place)
    except FileNotFoundError:
        return None
    try:
        facts = os.fstat(handle)
        if (facts.st_dev, facts.st_ino) == identity:  # our own link, sent twice by a network mount
            return True
        if regular(facts).st_size != body.nbytes:
            return False
        # The comparison of bytes is far faster than that of views.
        for at in range(0, body.nbytes, _COMPARE):
            piece = body[at : at + _COMPARE]
            if read_range(handle, at, at + piece.nbytes) != bytes(piece):
                return False
        return True
    finally:
        os.close(handle)


def regular(facts: os.stat_result) -> os.stat_result:
    """Links, folders and devices are no objects."""
    if stat.S_ISLNK(facts.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not stat.S_ISREG(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return facts


def discard(name: str, place: int) -> None:
    """Remove a scratch file if possible; a sweeper finds it otherwise."""
    with suppress(OSError):
        os.unlink(name, dir_fd=place)


def sync_folder(place: int) -> bool:
    """Sync a folder; False where the file system knows no such thing."""
    try:
        os.fsync(place)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
        return False
    return True


def link(scratch: str, name: str, place: int) -> None:
    """Give a file a second name, if nothing has that name."""
    os.link(scratch, name, src_dir_fd=place, dst_dir_fd=place, follow_symlinks=False)


def rename(scratch: str, name: str, place: int) -> None:
    """Give a file another name, if nothing has that name. EINVAL or ENOSYS where there is no such call."""
    call = getattr(_libc, "renameat2", None)  # Linux; the C library has it since 2018
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(place, os.fsencode(scratch), place, os.fsencode(name), _RENAME_NOREPLACE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def look_and_rename(scratch: str, name: str, place: int) -> None:
    """Give a file another name, if nothing had that name a moment ago. Safe with one writer only."""
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=place, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
    os.replace(scratch, name, src_dir_fd=place, dst_dir_fd=place)


def probe_link(name: str, place: int) -> bool:
    """Whether hard links work in this folder and never overwrite."""
    return _probe(link, NO_HARD_LINKS, name, place)


def probe_rename(name: str, place: int) -> bool:
    """Whether ``rename`` works in this folder, never overwrites, and moves the file itself (a copy is another one)."""
    return _probe(rename, _NO_FLAGS, name, place)


def _probe(act: Callable[[str, str, int], None], refusals: set[int], name: str, place: int) -> bool:
    """Whether ``act`` gives a free name and refuses one that is taken. ``name``: what the scratch files are for."""
    with _scratch_file(name, place) as (first, identity), _scratch_file(name, place) as (second, _):
        target = partial_key(name)
        try:
            try:
                act(first, target, place)
            except OSError as error:
                if not is_file(target, place, identity):  # else it was done, the reply was lost
                    if error.errno in refusals:
                        return False
                    raise
            with suppress(FileExistsError):
                act(second, target, place)
                return False
            return is_file(target, place, identity)
        finally:
            discard(target, place)


@contextmanager
def _scratch_file(name: str, place: int) -> Iterator[tuple[str, Identity]]:
    scratch = partial_key(name)
    try:
        yield scratch, write_file(os.open(scratch, CREATE, 0o666, dir_fd=place), memoryview(b""), sync=False)
    finally:
        discard(scratch, place)


def refresh(folder: str) -> None:
    """Let the kernel ask the server of a network mount what is in a folder now, where it knows how to.

    A cached listing and cached names of a folder are good as long as its cached facts are: these are renewed.
    """
    call = getattr(_libc, "statx", None)
    if call is not None:
        # Whatever goes wrong here, the verb itself is about to meet.
        call(_AT_FDCWD, os.fsencode(folder), _AT_STATX_FORCE_SYNC, _STATX_BASIC, ctypes.create_string_buffer(256))


def changed(folder: str) -> int | None:
    """When a name was last added to or removed from a folder, in nanoseconds."""
    try:
        return os.stat(folder).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None
