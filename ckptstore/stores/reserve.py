"""ReserveStore: a file that holds room on a disk, and gives it back when the disk is full.

On a disk with no bytes or no files left not even a clean-up can begin: its flag is a file, and where writing copies
(btrfs, ZFS) a delete takes room as well. And a save whose chunks are all there should not fail for want of a few
bytes for its manifest. So a little is set aside beforehand, for the small objects that commits and clean-ups are made
of. Chunks may not use it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

from ckptstore import keys
from ckptstore.errors import CkptStoreError, ObjectExistsError, ObjectNotFoundError, StoreFullError
from ckptstore.locks import ForkLock
from ckptstore.patience import indispensable
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.space import Space

SIZE = 512 * 1024

log = logging.getLogger("ckptstore")


class ReserveStore(Store):
    """Passes all on to ``inner``; small puts and deletes that find it full are tried once more without the reserve.

    Only a store that tells its space (a folder) gets a reserve: in a bucket nothing is set aside by an object.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._lock = ForkLock()
        self._looked = False

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def make(self) -> None:
        """Set the reserve aside, unless it is there or the place is too small. Never fails; once made, costs nothing.

        Random bytes, which no file system can compress or leave as a hole. The folders of its key count: where
        there is a limit on files, releasing it gives six of them back, as the flag of a clean-up and the index and
        manifest of a commit need at most (a folder, a scratch file, and on tmpfs a link, at a time).
        """
        if self._looked:
            return
        space = self._inner.space()
        if space is not None and _spacious(space):
            try:
                self._inner.info(keys.RESERVE)
            except ObjectNotFoundError:
                if not self._is_a_repository():
                    return
                self._put()
            except CkptStoreError as error:
                log.debug("no look at the reserve: %s", error)
                return
            self._looked = True
        elif space is None:
            self._looked = True

    def _is_a_repository(self) -> bool:
        """Where a mount has vanished nothing is written: it would look like a place again."""
        try:
            self._inner.info(keys.MARKER)
        except CkptStoreError:
            return False
        return True

    def _put(self) -> None:
        try:
            self._inner.put(keys.RESERVE, os.urandom(SIZE), if_absent=True)
        except ObjectExistsError:
            pass  # another process has just made it
        except CkptStoreError as error:
            log.debug("no reserve: %s", error)

    def release(self) -> int:
        """Give the reserve back; how many bytes that frees. It is made again after the next save."""
        with indispensable(), self._lock:
            self._looked = False
            try:
                size = self._inner.info(keys.RESERVE).size
                self._inner.delete(keys.RESERVE)
            except CkptStoreError:
                return 0
        log.info("%s is full: the reserve of %d bytes is released", self.traits.url, size)
        return size

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        if keys.is_bulk(key):
            self._inner.put(key, data, if_absent=if_absent)
        else:
            self._again_if_full(lambda: self._inner.put(key, data, if_absent=if_absent))

    def delete(self, key: str) -> None:
        self._again_if_full(lambda: self._inner.delete(key))

    def _again_if_full(self, call: Callable[[], None]) -> None:
        try:
            call()
        except StoreFullError:
            if self._inner.space() is None:
                raise
            self.release()  # another thread may have done it; then there is room as well
            call()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._inner.get(key, start, end)

    def fetch(self, key: str, start: int, end: int, room: memoryview) -> memoryview:
        return self._inner.fetch(key, start, end, room)

    def info(self, key: str) -> ObjectInfo:
        return self._inner.info(key)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, partial=partial)

    def space(self) -> Space | None:
        return self._inner.space()

    def close(self) -> None:
        self._inner.close()


def _spacious(space: Space) -> bool:
    """Whether the reserve would leave some room for what it is meant to protect."""
    room, files = space.room, space.room_for_files
    return (room is None or room >= 4 * SIZE) and (files is None or files >= 16)
