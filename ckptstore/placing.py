"""Files for people: written aside, synced, and given their names only when all of them are whole."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptstore.errors import AccessError, AlreadyExistsError, InvalidArgumentError, StoreError, StoreFullError

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)


@contextmanager
def folder(to: Path) -> Iterator[None]:
    """Make a folder and its parents; if they were made for nothing, remove them again."""
    made = [place for place in (to, *to.parents) if not place.exists()]
    to.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for place in made:
            try:
                place.rmdir()
            except OSError:
                break
        raise


@contextmanager
def aside(to: Path) -> Iterator[Path]:
    """A scratch folder on the same file system as ``to``."""
    scratch = to / f".ckptstore-{uuid.uuid4().hex[:12]}"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_existing(path: Path, force: bool) -> None:
    """AlreadyExistsError if something is there that must not be overwritten: with ``force`` that is a folder."""
    refuse_impossible(path)
    if os.path.lexists(path) and (not force or (path.is_dir() and not path.is_symlink())):
        rest = "" if force else ", or pass force=True to overwrite it"
        raise AlreadyExistsError(f"{path} exists: choose another folder{rest}")


def refuse_impossible(path: Path) -> None:
    """InvalidArgumentError if nothing can have that name: it may come from a store."""
    try:
        os.fsencode(path)
    except ValueError as error:
        raise InvalidArgumentError(f"{str(path)!r} is no name that a file can have: choose other records") from error


def place(written: Path, path: Path, force: bool) -> None:
    """Give a file its name, without overwriting what came there meanwhile."""
    if force:
        os.replace(written, path)
        return
    try:
        os.link(written, path)
    except FileExistsError as error:
        raise AlreadyExistsError(f"{path} appeared meanwhile and was not overwritten") from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        refuse_existing(path, force)
        os.rename(written, path)


def place_folder(written: Path, path: Path, scratch: Path | None = None) -> None:
    """Give a folder its name. What is there is an error, unless it is empty, or ``scratch`` is given to move it to."""
    if scratch is not None and os.path.lexists(path):
        os.rename(path, scratch / uuid.uuid4().hex)
    try:
        os.rename(written, path)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        raise AlreadyExistsError(f"{path} appeared meanwhile and was not overwritten") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system says of a file that cannot be written, as an error that says where and what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, (StoreError, AlreadyExistsError)):
            raise
        kind = StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else AccessError
        raise kind(f"{path} could not be written: {error.strerror}. It is as it was", errno=error.errno) from error


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A new file, open for writing and reading; synced at the end."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *_NO_LINKS):
            raise
    finally:
        os.close(fd)


def write_at(fd: int, data: bytes | memoryview, at: int) -> None:
    """All of ``data``, from byte ``at`` on."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)


def file_name(skeleton: Any, record: str) -> str:
    """The name of the file that a file record was made of, from its skeleton; never a path that leads elsewhere."""
    found = skeleton.get("file") if isinstance(skeleton, dict) else None
    # From the store, so not to be trusted as a path.
    safe = isinstance(found, str) and found == os.path.basename(found) and found not in ("", ".", "..")
    return str(found) if safe else record.rpartition("/")[2]
