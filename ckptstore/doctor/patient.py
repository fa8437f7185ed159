"""The store under examination: what was found so far, and everything that was put there, which is gone at the end."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TypeVar

from ckptstore import keys
from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    DeadlineError,
    InvalidArgumentError,
    RetriesExhaustedError,
    StoreFullError,
)
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.bucket import Bucket, base_of, bucket_of
from ckptstore.stores.local import LocalStore
from ckptstore.stores.mounts import Mount, mount_of
from ckptstore.stores.space import Space
from ckptstore.stores.watch import WatchStore

T = TypeVar("T")
log = logging.getLogger("ckptstore")

_LOOKS = 4
"""How often is looked for what came to be after it was deleted: a request that was given up may still arrive."""
_PAUSE_SECONDS = 0.5


class Probes(Store):
    """Lets through puts of probe keys and no others, and knows which of them may be there."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.pending: set[str] = set()
        """Keys that may hold something now."""
        self.used: set[str] = set()
        """All keys that were ever put."""
        self.interrupted = False
        """Whether a put was given up, so that it may still take effect."""
        self.unanswered = 0
        """How many calls since the last answer of the store were not answered."""

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        if not key.startswith(keys.PROBES):
            raise InvalidArgumentError(f"{key!r} is no key of a probe: nothing else is put here", key=key)
        with self._lock:
            new = key not in self.pending
            self.pending.add(key)
            self.used.add(key)
        try:
            with self._answering():
                self._inner.put(key, data, if_absent=if_absent)
        except (AccessError, StoreFullError):  # these leave what was there
            if new:
                self._gone(key)
            raise
        except BaseException as error:
            self.interrupted |= not isinstance(error, CkptStoreError) or isinstance(error, DeadlineError)
            raise

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with self._answering():
            return self._inner.get(key, start, end)

    def info(self, key: str) -> ObjectInfo:
        with self._answering():
            return self._inner.info(key)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        with self._answering():
            return iter(tuple(self._inner.list(prefix, partial=partial)))

    def delete(self, key: str) -> None:
        if not key.startswith(keys.PROBES):
            raise InvalidArgumentError(f"{key!r} is no key of a probe: nothing else is deleted here", key=key)
        with self._answering():
            self._inner.delete(key)
        self._gone(key)

    def space(self) -> Space | None:
        return self._inner.space()

    def close(self) -> None:
        self._inner.close()

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (DeadlineError, RetriesExhaustedError):
            self.unanswered += 1
            raise
        except CkptStoreError:
            self.unanswered = 0  # a refusal is an answer
            raise
        else:
            self.unanswered = 0

    def _gone(self, key: str) -> None:
        with self._lock:
            self.pending.discard(key)


class Patient:
    """A store, what checks have found out about it for later ones, and how to leave it as it was.

    Used as a context manager: at its end, however that comes about, all that was put is deleted.

    Attributes:
        store: takes probes only.
        local: the folder, if it is one.
        bucket: the bucket, if it is in one.
        single_writer: the user promises that one process at a time writes.
        key: of the object that is put, got and deleted first.
        may_put, may_delete, conditional: what the checks found; None: not found out.
        locked: nothing that is put can be deleted for good, for so long.
        nowhere: there is no such bucket.
        versions: the bucket keeps old versions.
        ahead: the store's time minus that of this machine, in seconds, as far as it is known.
        epochs: how many there are; None where there is no repository.
        newest: bytes that the newest epoch takes, once that is known.
        remains: keys that could not be deleted at the end.
        kept: why old versions of them stay; "" where none do.
    """

    def __init__(self, store: Store, *, single_writer: bool = False) -> None:
        self.store = Probes(store)
        base = base_of(store)
        self.concurrency = base.traits.concurrency if base.traits.concurrency else 1
        self.local = base if isinstance(base, LocalStore) else None
        self.bucket: Bucket | None = bucket_of(store)
        self.single_writer = single_writer
        self.key = keys.probe_key()
        self.may_put: bool | None = None
        self.may_delete: bool | None = None
        self.conditional: bool | None = None
        self.nowhere = False
        self.versions = False
        self.locked = ""
        self.ahead = 0.0
        self.newest: int | None = None
        self.epochs: int | None = None
        self.remains: tuple[str, ...] = ()
        self.kept = ""
        self._watch = _watch_of(store)
        self._missing: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where it is."""
        return self.store.traits.url

    def mount(self) -> Mount:
        """What the folder is on. DeadlineError if it hangs."""
        assert self.local is not None
        root = self.local.root
        return self._watched("look at the mount", lambda: mount_of(root))

    def look_around(self) -> None:
        """Remember which folders are not there yet. DeadlineError if the mount hangs."""
        if self.local is not None:
            root = self.local.root
            inner = os.path.join(root, keys.PROBES.rstrip("/"))
            self._missing = self._watched("look at the folder", lambda: _missing(inner))

    def __enter__(self) -> Patient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._clear(late=kind is not None)
        except Exception as failure:  # noqa: BLE001 (what remains is told, whatever the reason)
            log.debug("cleaning up: %s", failure)
        self.remains = tuple(sorted(self.store.pending))
        if self.remains and kind is not None:
            log.warning("%s could not be removed from %s", ", ".join(self.remains), self.url)

    def _clear(self, late: bool) -> None:
        """Delete what was put; ``late``: what was given up may still come to be."""
        store = self.store
        for key in sorted(store.pending):
            try:
                store.delete(key)
            except (DeadlineError, RetriesExhaustedError):
                raise
            except Exception as failure:  # noqa: BLE001 (the others are deleted all the same)
                log.debug("%s could not be deleted: %s", key, failure)
        if late or store.interrupted:
            self._catch_stragglers()
        self._clear_scratch()
        if self.bucket is not None and self.versions and store.used:
            try:
                self.bucket.forget(store.used, keys.PROBES)
            except CkptStoreError as failure:
                self.kept = str(failure)
        self._remove_folders()

    def _catch_stragglers(self) -> None:
        for look in range(_LOOKS):
            found = {info.key for info in self.store.list(keys.PROBES)} & self.store.used
            for key in sorted(found):
                self.store.delete(key)
            if look and not found:
                return
            time.sleep(_PAUSE_SECONDS)

    def _clear_scratch(self) -> None:
        if self.local is None:
            return
        for info in list(self.store.list(keys.PROBES, partial=True)):
            if keys.parse_partial_key(info.key) in self.store.used:
                self.store.delete(info.key)

    def _remove_folders(self) -> None:
        def remove() -> None:
            with suppress(OSError):  # something else is in it by now
                for folder in self._missing:
                    with suppress(FileNotFoundError):
                        os.rmdir(folder)

        if self.local is not None and self._missing:
            self._watched("remove folders", remove)

    def _watched(self, what: str, run: Callable[[], T]) -> T:
        return run() if self._watch is None else self._watch.watched(what, run)


def _watch_of(store: Store) -> WatchStore | None:
    """The wrapper that ends calls which hang, if there is one."""
    layer: object = store
    while isinstance(layer, Store):
        if isinstance(layer, WatchStore):
            return layer
        layer = getattr(layer, "inner", None)
    return None


def _missing(folder: str) -> tuple[str, ...]:
    """``folder`` and its parents, as far as they are not there, the innermost first."""
    found = []
    while not os.path.lexists(folder) and folder != os.path.dirname(folder):
        found.append(folder)
        folder = os.path.dirname(folder)
    return tuple(found)
