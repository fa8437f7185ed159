"""open_store: the one place that reads URLs and stacks the wrappers of a store."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from ckptstore.errors import AccessError, InvalidArgumentError, ObjectExistsError
from ckptstore.events import RetryEvent
from ckptstore.keys import probe_key
from ckptstore.stores.base import Store
from ckptstore.stores.limit import LimitStore
from ckptstore.stores.local import LocalStore
from ckptstore.stores.memory import MemoryStore
from ckptstore.stores.remote import RemoteStore
from ckptstore.stores.remote_errors import NotSupported
from ckptstore.stores.retry import RetryPolicy, RetryStore
from ckptstore.stores.trace import StoreEvent, TraceStore
from ckptstore.stores.watch import WatchStore

SUPPORTED = "a folder, file:///folder, memory://name, s3://bucket/prefix or gs://bucket/prefix (gcs:// is the same)"

_REMOTE = {"s3": "s3", "gs": "gs", "gcs": "gs"}
_SCHEMES = {*_REMOTE, "file", "memory"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_TYPO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/?)")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")


def open_store(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    retry: RetryPolicy | None = None,
    concurrency: int | None = None,
    unsafe_single_writer: bool = False,
    on_request: Callable[[StoreEvent], None] | None = None,
    on_retry: Callable[[RetryEvent], object] | None = None,
    transport: str | None = None,
) -> Store:
    """The store at ``url``, with a limit on its concurrency and with retries.

    Args:
        url: a folder, ``file:///folder``, ``memory://name``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        storage_options: for s3fs or gcsfs: endpoint, credentials, time-outs, ...
        retry: how long to go on after failures that may pass.
        concurrency: how many requests at once; by default what the store takes with profit.
        unsafe_single_writer: do without conditional puts. Only for servers and mounts that lack them, and only where
            one process at a time writes.
        on_request: told of every call, retries included.
        on_retry: told of every failed call that is tried again, before the wait.
        transport: "fsspec" or "obstore", for s3 and gs; by default the faster one that takes all options.

    Raises:
        InvalidArgumentError: the URL or an option makes no sense, or a library for it is not installed.
    """
    _check_types(url, storage_options, retry, concurrency, on_request, on_retry)
    policy = retry or RetryPolicy()
    base = _base(os.fspath(url), storage_options, concurrency, unsafe_single_writer, transport)
    if isinstance(base, LocalStore):
        base = WatchStore(base, policy.hang)
    store: Store = LimitStore(base, base.traits.concurrency if concurrency is None else concurrency)
    if on_request is not None:
        store = TraceStore(store, on_request)
    return RetryStore(store, policy, on_retry=on_retry)


def _check_types(
    url: object, options: object, retry: object, concurrency: object, on_request: object, on_retry: object
) -> None:
    checks = (
        ("url", url, isinstance(url, (str, os.PathLike)), SUPPORTED),
        ("storage_options", options, options is None or isinstance(options, Mapping), "a dict"),
        ("retry", retry, retry is None or isinstance(retry, RetryPolicy), "a RetryPolicy"),
        ("concurrency", concurrency, concurrency is None or type(concurrency) is int, "a whole number"),
        ("on_request", on_request, on_request is None or callable(on_request), "a function"),
        ("on_retry", on_retry, on_retry is None or callable(on_retry), "a function"),
    )
    for name, value, good, wanted in checks:
        if not good:
            raise InvalidArgumentError(f"{name} must be {wanted}, not of type {type(value).__name__}")


def probe_conditional_put(store: Store) -> bool:
    """Whether the store honours create-only puts: tried on a key of its own, which is deleted afterwards.

    Some servers answer "done" to a conditional put and overwrite, so a put that succeeds proves nothing: the
    second must be refused *and* the object must still be the first.

    Raises:
        StoreError: the store could not be asked.
    """
    verdict = _refuses_second(store)
    if verdict is None:  # a gc that grants no time may take the key away between two puts: not twice
        verdict = _refuses_second(store)
    return bool(verdict)


def _refuses_second(store: Store) -> bool | None:
    """Whether the second of two puts is refused; None if it was let in."""
    key = probe_key()
    first, second = b"first " + key.encode(), b"second " + key.encode()
    try:
        store.put(key, first, if_absent=True)
    except NotSupported:
        return False
    try:
        store.put(key, second, if_absent=True)
    except ObjectExistsError:
        # A range that shows a longer one too; and a verdict that lasts is not built on one reading.
        return any(store.get(key, 0, len(second)) == first for _ in range(2))
    else:
        return None
    finally:
        with suppress(AccessError):  # one may be allowed to write and not to delete
            store.delete(key)


def _base(
    url: str, options: Mapping[str, Any] | None, concurrency: int | None, single_writer: bool, transport: str | None
) -> Store:
    scheme, rest = _split(url)
    if scheme in _REMOTE:
        bucket, prefix = _bucket_and_prefix(scheme, rest)
        return RemoteStore(
            _REMOTE[scheme],
            bucket,
            prefix,
            storage_options=options,
            concurrency=16 if concurrency is None else concurrency,
            emulate_create=single_writer,
            transport=transport,
        )
    if transport is not None:
        raise InvalidArgumentError("a transport can be chosen for s3:// and gs:// only")
    if options:
        raise InvalidArgumentError("storage_options are for s3:// and gs:// only")
    if scheme == "memory":
        if not rest.strip("/"):
            raise InvalidArgumentError("memory:// needs a name: memory://name")
        return MemoryStore(rest.strip("/"))
    return LocalStore(_file_path(rest) if scheme == "file" else url, single_writer=single_writer)


def is_bucket(url: str) -> bool:
    """Whether a URL means a bucket, which takes ``storage_options`` and a ``transport``."""
    return _split(url)[0] in _REMOTE


def _split(url: object) -> tuple[str | None, str]:
    """Scheme (None for a plain path) and what follows it. Messages never repeat a URL: it may hold secrets."""
    if not isinstance(url, str) or not url or "\0" in url:
        raise InvalidArgumentError(f"the URL is empty or no text: use {SUPPORTED}")
    match = _URL.fullmatch(url)
    if match is None:
        typo = _TYPO.match(url)
        if typo and (typo[2] or typo[1].lower() in _SCHEMES):
            raise InvalidArgumentError(f"after {typo[1]!r} comes '://' in a URL: use {SUPPORTED}")
        return None, url
    scheme = match[1].lower()
    if scheme not in _SCHEMES:
        raise InvalidArgumentError(f"no store for {scheme}:// URLs: use {SUPPORTED}")
    return scheme, match[2]


def _bucket_and_prefix(scheme: str, rest: str) -> tuple[str, str]:
    bucket, _, prefix = rest.partition("/")
    example = f"{scheme}://bucket/prefix"
    if not bucket:
        raise InvalidArgumentError(f"the URL names no bucket: use {example}")
    if "@" in bucket or ":" in bucket:
        raise InvalidArgumentError(
            f"credentials, hosts and ports do not belong in the URL: use {example}"
            " and put them into storage_options (key, secret, endpoint_url, token)"
        )
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise InvalidArgumentError(f"{bucket!r} is no name of a bucket: use {example}")
    prefix = prefix.removesuffix("/")
    if prefix and not all(_is_segment(part) for part in prefix.split("/")):
        raise InvalidArgumentError(
            f"the prefix {prefix!r} means different things to different stores: use {example}"
            r" without empty, '.' or '..' parts, '?', '#', '\' and control characters"
        )
    return bucket, prefix


def _is_segment(part: str) -> bool:
    return part not in ("", ".", "..") and part.isprintable() and not set(part) & set("?#\\")


def _file_path(rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash or not path.strip("/"):
        raise InvalidArgumentError("a file URL has no host and an absolute path: file:///folder")
    return "/" + unquote(path)
