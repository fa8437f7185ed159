"""LocalStore: objects as files under a folder, on a local disk or a network mount (POSIX).

A put writes a scratch file beside the final name, syncs it, and only then gives it that name:
``link`` for create-only (it never overwrites; see ``mounts.py`` for what else there is), ``replace``
otherwise. Nobody can see a part of an object, and a crash leaves at most a scratch file, which
``list(partial=True)`` shows to a sweeper.

A network mount believes for a while what it saw: a folder is asked for anew before it is listed, and an object
that has to be there (a chunk or record: somebody named it) and is not is looked for again, a few seconds at most.

Symbolic links below the root are foreign: listings pass over them, nothing is read or written through them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from ckptstore import patience
from ckptstore.errors import (
    CkptStoreError,
    InvalidArgumentError,
    ObjectExistsError,
    ObjectNotFoundError,
    TransientError,
)
from ckptstore.keys import check_key, parse_content_key, parse_partial_key, partial_key
from ckptstore.stores._folders import TRIES, Folders
from ckptstore.stores._posix import (
    CREATE,
    FOLDER,
    NO_HARD_LINKS,
    READ,
    Identity,
    changed,
    discard,
    flat,
    holds,
    is_file,
    link,
    look_and_rename,
    read_into,
    read_range,
    regular,
    rename,
    replace,
    write_file,
)
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.local_errors import local_error
from ckptstore.stores.mounts import Ground, Lag, Way
from ckptstore.stores.space import Space, space_of

_SCRATCH = re.compile(r".*\.tmp-[0-9a-f]{16}")
_ACTS: dict[Way, Callable[[str, str, int], None]] = {"link": link, "rename": rename, "look": look_and_rename}
_SCANS = 8

T = TypeVar("T")


class LocalStore(Store):
    """Objects as files under ``root``, which is made by the first put.

    File and folder modes follow the umask (and setgid bits and default ACLs) as for any program.

    Args:
        root: the folder. It may be a symbolic link.
        single_writer: the user promises that one process at a time writes, so that a look before a rename will do
            where the file system has nothing better.
    """

    def __init__(self, root: str | os.PathLike[str], *, single_writer: bool = False) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._ground = Ground(self._root, single_writer=single_writer)
        self._folders = Folders(self._root, self._ground)
        self._lag = Lag()

    @property
    def root(self) -> str:
        """The absolute path of the folder."""
        return self._root

    @property
    def traits(self) -> StoreTraits:
        mount = self._ground.known
        return StoreTraits(
            url=f"file://{self._root}",
            conditional_put=self._ground.conditional_put,
            concurrency=4,
            filesystem=mount.filesystem,
            network=mount.network,
            create_only=self._ground.way,
            weak=mount.weak,
        )

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        if _SCRATCH.fullmatch(check_key(key)):
            raise InvalidArgumentError(f"{key!r} has the form of a scratch file: choose another key", key=key)
        body = flat(data)
        with self._mapped("put", key, body.nbytes):
            self._ground.require()
            folder, name = self._folders.locate(key)
            scratch, handle, place = self._create(folder, name)
            try:
                identity = write_file(handle, body)
                self._folders.settle(folder, place)
                # Given up meanwhile, and the buffer in other use: what was written may be anything.
                patience.current().check(f"putting {key!r} in place")
                if if_absent:
                    self._give(key, scratch, name, place, body, identity)
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
            handle = self._find(key, lambda path: os.open(path, READ))
            try:
                size = regular(os.fstat(handle)).st_size
                yield handle, size if end is None else min(end, size)
            finally:
                os.close(handle)

    def info(self, key: str) -> ObjectInfo:
        check_key(key)
        with self._mapped("look at", key), self._absent(key):
            found = regular(self._find(key, os.lstat))
            return ObjectInfo(key, found.st_size, found.st_mtime)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        if prefix:
            check_key(prefix + "0")  # a prefix is sound when some key can start with it
        return self._walk(prefix, partial)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._mapped("delete", key):
            folder, name = self._folders.locate(key)
            with suppress(ObjectNotFoundError), self._absent(key):
                place = os.open(folder, FOLDER)
                try:
                    self._unlink(folder, name, place)
                    # A manifest must not come back after a crash when the chunks deleted next do not.
                    self._folders.sync(place)
                finally:
                    os.close(place)
            self._folders.remove_empty(folder)

    def space(self) -> Space | None:
        return space_of(self._root)

    def close(self) -> None:
        """Nothing to release: no file stays open between calls."""

    def _find(self, key: str, look: Callable[[str], T]) -> T:
        """``look`` at the file of a key; on a network mount not at what the kernel remembers of it."""
        folder, name = self._folders.locate(key)
        path = os.path.join(folder, name)
        if self._ground.look().network:
            if parse_content_key(key) is None:
                self._folders.refresh(folder)  # it may come, change and go, and others decide by what they see
            else:
                for wait in self._lag.waits(folder):
                    with suppress(FileNotFoundError):
                        return look(path)
                    time.sleep(wait)
                    self._folders.refresh(folder)
        return look(path)

    def _unlink(self, folder: str, name: str, place: int) -> None:
        """Remove a file. It may be gone already; but maybe not yet on disk."""
        try:
            os.unlink(name, dir_fd=place)
        except FileNotFoundError:
            if self._ground.look().network:
                self._folders.refresh(folder)
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=place)

    def _create(self, folder: str, name: str) -> tuple[str, int, int]:
        """A new scratch file for ``name``: its name, its descriptor and that of the folder."""
        for _ in range(TRIES):
            try:
                place = os.open(folder, FOLDER)
            except FileNotFoundError:
                self._folders.make(folder)
                continue
            scratch = partial_key(name)
            try:
                self._ground.ask(name, place)
                return scratch, os.open(scratch, CREATE, 0o666, dir_fd=place), place
            except (FileNotFoundError, FileExistsError):
                # Others remove empty folders; and on NFS "exists" may be our own call, sent twice.
                discard(scratch, place)
                os.close(place)
            except BaseException:
                discard(scratch, place)
                os.close(place)
                self._folders.remove_empty(folder, shared=True)
                raise
        raise FileNotFoundError(errno.ENOENT, "the folder vanishes as fast as it is made", folder)

    def _give(self, key: str, scratch: str, name: str, place: int, body: memoryview, identity: Identity) -> None:
        """Give a finished scratch file its name, if nothing has it."""
        way = self._ground.ask(name, place)
        for _ in range(TRIES):
            try:
                _ACTS[way](scratch, name, place)
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
                if way != "link" or error.errno not in NO_HARD_LINKS:
                    raise
                way = self._ground.ask(name, place, without="link")
        raise FileNotFoundError(errno.ENOENT, "comes and goes as fast as it is linked", name)

    def _sync_entry(self, key: str, place: int) -> None:
        try:
            self._folders.sync(place)
        except OSError as error:
            # Only a transient error may leave the new content behind, whatever the errno says.
            raise TransientError(
                f"{key!r} is in {self._root} but its folder could not be synced: {error.strerror}; put it again",
                key=key,
                errno=error.errno,
            ) from error

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
        folder = self._folders.locate(f"{inner}/" if inner else "")[0]
        if self._ground.look().network:
            self._folders.refresh(folder)
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
        folder, _ = self._folders.locate(f"{inner}/" if inner else "")
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
        except CkptStoreError as error:
            if error.key is None:
                error.key = key or None
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
        free = left.f_bavail * left.f_frsize
        # Another thread may have freed an inode since: where the bytes would fit, they are not the reason.
        if left.f_files and (not left.f_favail or (free > 2 * nbytes and left.f_favail < 64)):
            return "it has no inodes left: remove files, for example by pruning old checkpoints"
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
