"""RemoteStore: objects in a bucket of S3, Google Cloud Storage or a compatible server, through fsspec or obstore.

Every put is one request with the complete body, so nothing half-written can ever be seen or be left
behind. Create-only puts are conditional requests. When one is refused because the object exists, the object
is read back: the same bytes mean that an earlier try of ours got through and only its answer was lost.

Nothing here tries twice: :class:`~ckptstore.stores.retry.RetryStore` does, and sees every failure.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ckptstore import patience
from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    DeadlineError,
    InvalidArgumentError,
    NotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
    RepositoryNotFoundError,
    StoreError,
    TransientError,
)
from ckptstore.keys import check_key
from ckptstore.patience import GRACE_SECONDS, TICK_SECONDS
from ckptstore.pool import LateExecutor, executors_have_ended
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.remote_backends import PAGE, Backend, GCSBackend, Page, S3Backend, Upload
from ckptstore.stores.remote_errors import (
    CredentialsExpired,
    Missing,
    PreconditionRefused,
    RangeRefused,
    chain,
    translate,
)
from ckptstore.stores.remote_obstore import ObstoreBackend, installed, untranslatable

_BACKENDS: dict[str, type[Backend]] = {"s3": S3Backend, "gs": GCSBackend}
TRANSPORTS = ("fsspec", "obstore")
_PREFERRED = "obstore"
_log = logging.getLogger(__name__)
_FRESH_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
TRICKLE = 32 * 1024.0
"""Bytes per second. A request may take its time-outs and the time for its bytes at this speed: a trickle ends too."""
PAGE_BYTES = 1024 * 1024
"""What any request without a body of ours is reckoned as: a page of a listing."""
WHOLE_BYTES = 64 * 1024 * 1024
"""What a get of a whole object is reckoned as."""
_inherited: list[Any] = []
"""File systems made before a fork. Their finalizers must not run: they would close the parent's sockets."""

T = TypeVar("T")
Step = Callable[[Any], Coroutine[Any, Any, T]]


class RemoteStore(Store):
    """Objects in a bucket, under an optional prefix.

    Args:
        scheme: ``"s3"`` or ``"gs"``.
        bucket: its name. It must exist.
        prefix: what all names in the bucket start with, joined to the key by a slash.
        storage_options: as for ``s3fs.S3FileSystem`` or ``gcsfs.GCSFileSystem``; they win over the defaults of
            this store, except that listing caches are always off.
        concurrency: how many requests the store is used with at once.
        emulate_create: look, put and read back where the server has no conditional puts. Not safe with two
            writers of one key.
        transport: "fsspec" or "obstore"; by default obstore for S3 if it is installed and knows all of
            ``storage_options``.

    Raises:
        InvalidArgumentError: the library for the scheme is not installed, or its options make no sense.
        AccessError: there are no usable credentials.
    """

    def __init__(
        self,
        scheme: str,
        bucket: str,
        prefix: str = "",
        *,
        storage_options: Mapping[str, Any] | None = None,
        concurrency: int = 16,
        emulate_create: bool = False,
        transport: str | None = None,
    ) -> None:
        options = storage_options or {}
        self._backend = _backend(scheme, options, transport)(bucket, options, concurrency)
        self._root = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._url = f"{scheme}://{bucket}/{self._root}".rstrip("/")
        self._place = self._backend.place(self._url)
        self._emulate = emulate_create
        self._concurrency = concurrency
        self._opened = self._open()

    @property
    def traits(self) -> StoreTraits:
        known = False if self._emulate else None
        return StoreTraits(url=self._url, conditional_put=known, concurrency=self._concurrency, copies=True)

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        check_key(key)
        if if_absent and self._emulate:
            self._emulated_create(key, data)
            return
        try:
            self._send(key, data, create=if_absent)
        except PreconditionRefused as error:
            if not if_absent:
                raise
            try:
                same = self._holds(key, data)
            except ObjectNotFoundError:
                raise TransientError(f"{key!r} in {self._place} existed and is gone: try again", key=key) from error
            if not same:
                raise self._taken(key) from error

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return bytes(self._read(key, start, end))

    def fetch(self, key: str, start: int, end: int, room: memoryview) -> memoryview:
        return memoryview(self._read(key, start, end))  # in the memory of the client: no copy

    def _read(self, key: str, start: int, end: int | None) -> bytes | memoryview:
        check_key(key)
        if start < 0 or (end is not None and end < 0):
            raise InvalidArgumentError(f"range [{start}, {end}) of {key!r}: use offsets from 0", key=key)
        if end is not None and end <= start:
            self.info(key)
            return b""
        try:
            nbytes = WHOLE_BYTES if end is None else end - start
            return self._call("get", key, lambda fs: self._backend.get(fs, self._root + key, start, end), None, nbytes)
        except Missing as error:
            raise self._absent(key) from error
        except RangeRefused:
            if self.info(key).size > start:
                raise
            return b""

    def info(self, key: str) -> ObjectInfo:
        check_key(key)
        try:
            found = self._call("look at", key, lambda fs: self._backend.info(fs, self._root + key))
        except Missing as error:
            raise self._absent(key) from error
        return ObjectInfo(key, found.size, found.modified)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        if prefix:
            check_key(prefix + "0")  # a prefix is sound when some key can start with it
        return iter(()) if partial else self._walk(prefix)

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            self._call("delete", key, lambda fs: self._backend.delete(fs, self._root + key))
        except Missing:
            with suppress(AccessError):  # where listing is not allowed, the reply itself has to do
                self._page(self._root, None, 1)  # raises where the whole bucket is missing

    @property
    def scheme(self) -> str:
        """ "s3" or "gs"."""
        return self._backend.scheme

    @property
    def root(self) -> str:
        """What all names in the bucket begin with: the prefix and a slash, or nothing."""
        return self._root

    def ask(self, action: str, step: Callable[[Any, Any], Coroutine[Any, Any, T]]) -> T:
        """Run a request that is none of the verbs (see ``bucket``): ``step`` is given backend and file system.

        Raises:
            StoreError: as the verbs do; ``Missing`` where the server has nothing of the kind.
        """
        return self._call(action, None, lambda fs: step(self._backend, fs))

    def close(self) -> None:
        fs, pid, _ = self._opened
        if pid != os.getpid():
            return
        with suppress(Exception):  # nothing depends on how the connections end
            future = asyncio.run_coroutine_threadsafe(self._backend.close(fs), fs.loop)
            wait([future], timeout=_CLOSE_SECONDS)

    def _send(self, key: str, data: Body, *, create: bool) -> None:
        name = self._root + key
        with self._backend.upload(name, data) as body:
            try:
                self._call("put", key, lambda fs: self._backend.put(fs, name, body, create), body, body.size)
            except Missing as error:
                raise RepositoryNotFoundError(str(error), key=key) from error

    def _emulated_create(self, key: str, data: Body) -> None:
        try:
            same = self._holds(key, data)
        except ObjectNotFoundError:
            self._send(key, data, create=False)
            same = self._holds(key, data)
        if not same:
            raise self._taken(key)

    def _holds(self, key: str, data: Body) -> bool:
        """Whether the object has exactly these bytes. A difference counts when it was seen twice."""
        body = bytes(data)
        if self.info(key).size != len(body):
            return False
        # A range, because its reply also says how long it has to be.
        return self.get(key, 0, len(body)) == body or self.get(key, 0, len(body)) == body

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        start, token, seen = self._root + prefix, None, set[str]()
        while True:
            found, token = self._page(start, token, PAGE)
            for item in found:
                # Names that end in a slash are folder markers of consoles and gateways, not objects.
                if item.key.startswith(start) and not item.key.endswith("/"):
                    yield ObjectInfo(item.key[len(self._root) :], item.size, item.modified)
            if token is None:
                return
            if token in seen:
                raise StoreError(f"the listing of {self._place} goes round in circles: it is not complete")
            seen.add(token)

    def _page(self, start: str, token: str | None, limit: int) -> Page:
        try:
            return self._call("list", None, lambda fs: self._backend.page(fs, start, token, limit))
        except Missing as error:
            raise RepositoryNotFoundError(str(error)) from error

    def _absent(self, key: str) -> NotFoundError:
        """What a 404 was about: the object, or the whole bucket. HEAD replies do not say."""
        try:
            self._page(self._root, None, 1)
        except RepositoryNotFoundError as error:
            return error
        except AccessError:
            pass  # may not list, so the reply to the request itself has to do
        return ObjectNotFoundError(f"no object {key!r} in {self._place}", key=key)

    def _taken(self, key: str) -> ObjectExistsError:
        return ObjectExistsError(f"{key!r} already holds other bytes in {self._place}", key=key)

    def _call(
        self, action: str, key: str | None, step: Step[T], body: Upload | None = None, nbytes: int = PAGE_BYTES
    ) -> T:
        """Run one request, of about ``nbytes`` at most, and give its result, or our error for what went wrong."""
        patience.current().check(f"{action} {key or ''!r}")
        fs, _, born = self._current()
        if executors_have_ended():
            # In an atexit hook: looking up a host's address, for one, wants a thread of a pool.
            fs.loop.call_soon_threadsafe(fs.loop.set_default_executor, LateExecutor(1))
        try:
            return _run(step(fs), fs.loop, self._backend.stall, nbytes, body)
        except MemoryError:
            raise
        except Exception as error:
            raise self._translated(error, action, key, born) from error

    def _translated(self, error: Exception, action: str, key: str | None, born: float) -> CkptStoreError:
        ours = translate(error, action, key, self._place)
        if type(ours) is not StoreError:  # of what is not understood the traceback is needed
            _release(error)
        if isinstance(ours, CredentialsExpired) and time.monotonic() - born > _FRESH_SECONDS:
            if self._opened[2] == born:  # else another thread was faster
                self._opened = self._open()  # reads the credentials again
            return TransientError(str(ours), key=key, failure="auth-refresh")
        return ours

    def _current(self) -> tuple[Any, int, float]:
        opened = self._opened
        if opened[1] != os.getpid():  # an event loop does not survive a fork
            _inherited.append(opened[0])
            opened = self._opened = self._open()
        return opened

    def _open(self) -> tuple[Any, int, float]:
        try:
            return self._backend.open(), os.getpid(), time.monotonic()
        except InvalidArgumentError:
            raise
        except (TypeError, ValueError, KeyError) as error:
            reason = self._place.clean(f"{type(error).__name__}: {error}")
            raise InvalidArgumentError(f"cannot open {self._place} with these storage_options: {reason}") from error
        except Exception as error:  # noqa: BLE001  (whatever the libraries raise)
            # Unchained: the libraries put tokens into the URLs that their errors tell of.
            raise translate(error, "open", None, self._place) from None


def _backend(scheme: str, options: Mapping[str, Any], transport: str | None) -> type[Backend]:
    """Who makes the requests; what a caller insists on and cannot have is an error."""
    if scheme not in _BACKENDS:
        raise InvalidArgumentError(f"no remote store for {scheme!r}: use one of {sorted(_BACKENDS)}")
    if transport not in (None, *TRANSPORTS):
        raise InvalidArgumentError(f"no transport {transport!r}: use one of {', '.join(TRANSPORTS)}")
    if (transport or _PREFERRED) == "fsspec":
        return _BACKENDS[scheme]
    option = untranslatable(options)
    if scheme != "s3":
        reason = f"obstore carries s3:// only: leave transport out for {scheme}://"
    elif not installed():
        reason = "obstore is not installed: pip install 'ckptstore[fast]'"
    elif option:
        reason = f"obstore would not follow the storage option {option}: leave it or transport='obstore' out"
    else:
        return ObstoreBackend
    if transport:
        raise InvalidArgumentError(reason)
    _log.debug("transport fsspec: %s", reason)
    return _BACKENDS[scheme]


def _run(
    step: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, stall: float, nbytes: int, body: Upload | None
) -> T:
    """Run a request on the library's loop and wait for it.

    Given up when its upload stands still for ``stall`` seconds, when it trickles, and some time after the work that
    it belongs to was given up.
    """
    mine = patience.current()
    future = asyncio.run_coroutine_threadsafe(step, loop)
    limit = stall + nbytes / TRICKLE
    pause = min(TICK_SECONDS, stall / 4)
    end = time.monotonic() + limit
    try:
        with mine.telling(partial(_cancel_soon, loop, future.cancel)):
            while not wait([future], timeout=max(0.0, min(pause, end - time.monotonic()))).done:
                reason = body.overdue(stall) if body is not None else None
                if reason is None and time.monotonic() >= end:
                    reason = f"it was not through after {limit:.0f} s"
                if reason:
                    raise TimeoutError(reason)
        if future.cancelled() and mine.ended:
            raise DeadlineError("the work that it belongs to was given up")
        return future.result()
    except BaseException:
        future.cancel()  # also on Ctrl-C: the server forgets an upload whose connection is dropped
        raise
    finally:
        del future  # it holds the exception, whose traceback holds this frame


def _cancel_soon(loop: asyncio.AbstractEventLoop, cancel: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # closed
        loop.call_soon_threadsafe(loop.call_later, GRACE_SECONDS, cancel)


def _release(error: BaseException) -> None:
    """Let go of the frames of a failed request.

    The libraries keep exceptions in local variables, so those frames are reference cycles: without this, the body
    of a failed put, and everything its caller holds, would stay in memory until the garbage collector runs.
    """
    for link in chain(error, contexts=True):
        link.__traceback__ = None
