"""LocalStore: objects as files under a folder, on a local disk or a network mount (POSIX).

A put writes a scratch file beside the final name, syncs it, and only then gives it that name:
``link`` for create-only (it never overwrites), ``replace`` otherwise. Nobody can see a part of an
object, and a crash leaves at most a scratch file, which ``list(partial=True)`` shows to a sweeper.

Symbolic links below the root are foreign: listings pass over them, nothing is read or written through them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckptstore import patience
from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    InvalidArgumentError,
    ObjectExistsError,
    ObjectNotFoundError,
    TransientError,
)
from ckptstore.keys import check_key, parse_partial_key, partial_key
from ckptstore.stores._posix import (
    CREATE,
    FOLDER,
    READ,
    Identity,
    changed,
    discard,
    flat,
    holds,
    is_file,
    read_into,
    read_range,
    regular,
    replace,
    sync_folder,
    write_file,
)
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.local_errors import local_error

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}

_SCRATCH = re.compile(r".*\.tmp-[0-9a-f]{16}")
_TRIES = 32
_SCANS = 8


class LocalStore(Store):
    """Objects as files under ``root``, which is made by the first put.

    File and folder modes follow the umask (and setgid bits and default ACLs) as for any program.

    Args:
        root: the folder. It may be a symbolic link.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.fspath(root))
        # Folders whose entries all the way up are on disk, and the folder up to which that has to be so:
        # above the root only where we made its parents.
        self._settled: set[str] = set()
        self._top = self._root
        self._inside: set[str] = set()

    @property
    def root(self) -> str:
        """The absolute path of the folder."""
        return self._root

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(url=f"file://{self._root}", conditional_put=True, concurrency=4)

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        if _SCRATCH.fullmatch(check_key(key)):
            raise InvalidArgumentError(f"{key!r} has the form of a scratch file: choose another key", key=key)
        body = flat(data)
        with self._mapped("put", key, body.nbytes):
            folder, name = self._locate(key)
            scratch, handle, place = self._create(folder, name)
            try:
                identity = write_file(handle, body)
                self._settle(folder)
                # Given up meanwhile, and the buffer in other use: what was written may be anything.
                patience.current().check(f"putting {key!r} in place")
                if if_absent:
                    self._link(key, scratch, name, place, body, identity)
                else:
                    replace(scratch, name, place, identity)
                self._sync_entry(key, place)
            except BaseException:
                discard(scratch, place)
                raise
            else:
                if if_absent:
                    discard(scratch, place)
            finally:
                os.close(place)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with self._reading(key, start, end) as (handle, stop):
            return read_range(handle, start, stop)

    def fetch(self, key: str, start: int, end: int, room: memoryview) -> memoryview:
        with self._reading(key, start, end) as (handle, stop):
            return read_into(handle, start, room[: max(stop - start, 0)])

    @contextmanager
    def _reading(self, key: str, start: int, end: int | None) -> Iterator[tuple[int, int]]:
        """The open file of a key, and where to stop."""
        check_key(key)
        if start < 0 or (end is not None and end < 0):
            raise InvalidArgumentError(f"range [{start}, {end}) of {key!r}: use offsets from 0", key=key)
        with self._mapped("get", key), self._absent(key):
            folder, name = self._locate(key)
            handle = os.open(os.path.join(folder, name), READ)
            try:
                size = regular(os.fstat(handle)).st_size
                yield handle, size if end is None else min(end, size)
            finally:
                os.close(handle)

    def info(self, key: str) -> ObjectInfo:
        check_key(key)
        with self._mapped("look at", key), self._absent(key):
            folder, name = self._locate(key)
            found = regular(os.lstat(os.path.join(folder, name)))
            return ObjectInfo(key, found.st_size, found.st_mtime)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        if prefix:
            check_key(prefix + "0")  # a prefix is sound when some key can start with it
        return self._walk(prefix, partial)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._mapped("delete", key):
            folder, name = self._locate(key)
            with suppress(ObjectNotFoundError), self._absent(key):
                place = os.open(folder, FOLDER)
                try:
                    with suppress(FileNotFoundError):  # gone already; but maybe not yet on disk
                        os.unlink(name, dir_fd=place)
                    # A manifest must not come back after a crash when the chunks deleted next do not.
                    sync_folder(place)
                finally:
                    os.close(place)
            self._remove_empty(folder)

    def close(self) -> None:
        """Nothing to release: no file stays open between calls."""

    def _locate(self, key: str) -> tuple[str, str]:
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

    def _create(self, folder: str, name: str) -> tuple[str, int, int]:
        """A new scratch file for ``name``: its name, its descriptor and that of the folder."""
        for _ in range(_TRIES):
            try:
                place = os.open(folder, FOLDER)
            except FileNotFoundError:
                self._make(folder)
                continue
            scratch = partial_key(name)
            try:
                return scratch, os.open(scratch, CREATE, 0o666, dir_fd=place), place
            except (FileNotFoundError, FileExistsError):
                # Others remove empty folders; and on NFS "exists" may be our own call, sent twice.
                os.close(place)
            except BaseException:
                discard(scratch, place)
                os.close(place)
                raise
        raise FileNotFoundError(errno.ENOENT, "the folder vanishes as fast as it is made", folder)

    def _make(self, folder: str) -> None:
        """Make a folder and its missing parents while others may make and remove them too."""
        missing = [folder]
        for _ in range(_TRIES):
            path = missing[-1]
            parent = os.path.dirname(path)
            if len(path) <= len(self._root) and len(parent) < len(self._top):
                self._top = parent  # before it is made, so that no other thread settles for less
            try:
                os.mkdir(path)
                self._settled.discard(path)
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

    def _settle(self, folder: str) -> None:
        """See that the folder itself survives a crash, whoever made it and its parents."""
        if folder in self._settled:
            return
        path = folder
        while len(path) > len(self._top):
            path = os.path.dirname(path)
            place = os.open(path, FOLDER)
            try:
                sync_folder(place)
            finally:
                os.close(place)
        self._settled.add(folder)

    def _link(self, key: str, scratch: str, name: str, place: int, body: memoryview, identity: Identity) -> None:
        for _ in range(_TRIES):
            try:
                os.link(scratch, name, src_dir_fd=place, dst_dir_fd=place, follow_symlinks=False)
                return
            except FileExistsError:
                same = holds(name, place, body, identity)
                if same:
                    return
                if same is False:
                    raise ObjectExistsError(f"{key!r} already holds other bytes in {self._root}", key=key) from None
            except OSError as error:
                if is_file(name, place, identity):  # it was done, the reply was lost
                    return
                if error.errno in _NO_HARD_LINKS:
                    raise AccessError(
                        f"cannot put {key!r} in {self._root}: no hard links there ({error.strerror}), and a put that "
                        f"must not overwrite needs them; choose a folder on another file system",
                        key=key,
                        errno=error.errno,
                    ) from error
                raise
        raise FileNotFoundError(errno.ENOENT, "comes and goes as fast as it is linked", name)

    def _sync_entry(self, key: str, place: int) -> None:
        try:
            sync_folder(place)
        except OSError as error:
            # Only a transient error may leave the new content behind, whatever the errno says.
            raise TransientError(
                f"{key!r} is in {self._root} but its folder could not be synced: {error.strerror}; put it again",
                key=key,
                errno=error.errno,
            ) from error

    def _remove_empty(self, folder: str) -> None:
        """Remove folders that a delete left empty. What cannot go (in use, filled again) stays."""
        while len(folder) > len(self._root):
            self._settled.discard(folder)
            self._inside.discard(folder)
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                return
            folder = os.path.dirname(folder)

    def _walk(self, prefix: str, partial: bool) -> Iterator[ObjectInfo]:
        pending = {prefix.rpartition("/")[0]}
        while pending:
            inner = pending.pop()
            with self._mapped("list", inner or prefix):
                found = self._steady_scan(inner, prefix, partial, pending)
            yield from found

    def _steady_scan(self, inner: str, prefix: str, partial: bool, pending: set[str]) -> tuple[ObjectInfo, ...]:
        """One scan during which nothing changed, if there is one in a few.

        A scan is no snapshot: beside a writer that links a new name and unlinks the old one it can miss both.
        """
        found: dict[str, ObjectInfo] = {}
        folder = self._locate(f"{inner}/" if inner else "")[0]
        for _ in range(_SCANS):
            before = changed(folder)
            try:
                found = {info.key: info for info in self._scan(inner, prefix, partial, pending)}
            except FileNotFoundError:
                continue  # an entry went away between its name and its facts
            if changed(folder) == before:
                return tuple(found.values())
        with suppress(FileNotFoundError):
            for info in self._scan(inner, prefix, partial, pending):
                found[info.key] = info
        return tuple(found.values())

    def _scan(self, inner: str, prefix: str, partial: bool, pending: set[str]) -> Iterator[ObjectInfo]:
        """The objects right in one folder; its folders are added to ``pending``."""
        folder, _ = self._locate(f"{inner}/" if inner else "")
        try:
            entries = os.scandir(folder)
        except (FileNotFoundError, NotADirectoryError):
            self._check_root()
            return
        with entries:
            for entry in entries:
                key = f"{inner}/{entry.name}" if inner else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if f"{key}/".startswith(prefix) and _is_key(key):
                        pending.add(key)
                elif key.startswith(prefix) and _is_listed(key, partial) and entry.is_file(follow_symlinks=False):
                    facts = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(key, facts.st_size, facts.st_mtime)

    def _check_root(self) -> None:
        """Only a missing folder is empty: a root that is a file is a mistake to report."""
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(self._root).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self._root)

    @contextmanager
    def _absent(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._check_root()
            raise ObjectNotFoundError(f"no object {key!r} in {self._root}", key=key) from None

    @contextmanager
    def _mapped(self, verb: str, key: str, nbytes: int = 0) -> Iterator[None]:
        """Let no foreign exception out."""
        try:
            yield
        except CkptStoreError:
            raise
        except OSError as error:
            advice = self._space(nbytes) if error.errno == errno.ENOSPC else None
            raise local_error(error, f"cannot {verb} {key!r} in {self._root}", key, advice) from error

    def _space(self, nbytes: int) -> str:
        """What is lacking, asked for after the scratch file is gone."""
        path = self._root
        while not os.path.isdir(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
        try:
            left = os.statvfs(path)
        except OSError:
            return f"{nbytes} bytes are needed: free some space"
        if left.f_files and not left.f_favail:
            return "it has no inodes left: remove files, for example by pruning old checkpoints"
        free = left.f_bavail * left.f_frsize
        return f"{nbytes} bytes are needed and {free} are free: free some space, for example by pruning old checkpoints"


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except InvalidArgumentError:
        return False
    return True


def _is_listed(key: str, partial: bool) -> bool:
    if partial:
        return parse_partial_key(key) is not None
    return _SCRATCH.fullmatch(key) is None and _is_key(key)
