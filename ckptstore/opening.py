"""``ckptstore.open``: from a URL to a repository."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.chunks import CHUNK_SIZE
from ckptstore.errors import InvalidArgumentError
from ckptstore.events import Callback, listener_of
from ckptstore.failures import MAX_FAILURES, OnError
from ckptstore.options import (
    EXIT_TIMEOUT,
    RUN_ID,
    check_background_cores,
    check_chunk_size,
    check_codec,
    check_every,
    check_exit_timeout,
    check_max_failures,
    check_on_error,
    check_on_full,
    check_policy,
    check_run_id,
)
from ckptstore.pickling import Opener
from ckptstore.policies import AnyPolicy
from ckptstore.reclaim import OnFull
from ckptstore.repository import Repository
from ckptstore.spill import SpillRepository
from ckptstore.stores import RetryPolicy
from ckptstore.stores.opening import SUPPORTED
from ckptstore.stores.trace import StoreEvent


def open(  # noqa: A001 (used as ckptstore.open)
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    retry: RetryPolicy | None = None,
    keep: AnyPolicy | None = None,
    create: bool = True,
    *,
    unsafe_single_writer: bool = False,
    chunk_size: int = CHUNK_SIZE,
    codec: str = "auto",
    concurrency: int | None = None,
    on_event: Callback | None = None,
    on_request: Callable[[StoreEvent], None] | None = None,
    transport: str | None = None,
    background_cores: int | None = None,
    exit_timeout: float = EXIT_TIMEOUT,
    run_id: str | None = None,
    on_full: OnFull = "prune",
    on_error: OnError = "raise",
    max_failures: int = MAX_FAILURES,
    every: Mapping[str, int] | None = None,
    spill: str | os.PathLike[str] | None = None,
    spill_options: Mapping[str, Any] | None = None,
) -> Repository:
    """Open a repository, and make it if it does not exist (and ``create``).

    Args:
        url: a folder (also ``file://``), ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``memory://name``.
        storage_options: passed to s3fs or gcsfs, e.g. ``{"endpoint_url": ..., "key": ..., "secret": ...}``.
        retry: how transient failures are retried.
        keep: after each save, prune what this policy does not keep; or a policy for each of some records, as of
            ``Repository.prune``.
        create: False to open only what exists; then nothing is written until you save.
        unsafe_single_writer: accept a store that ignores conditional puts, or a folder on a mount without hard links
            and the like. Then two writers at the same time *can* destroy each other's commit: you promise that there
            is one.
        chunk_size: raw bytes per chunk of a large array, 64 KiB to 64 MiB.
        codec: "auto" (per byte plane, by a sample), "raw" or "max".
        concurrency: requests at once; default by kind of store.
        on_event: called with each event of ``ckptstore.events`` (a save has begun, was committed, has failed, a
            request is tried again, ...), one after the other, on a thread of its own. See docs/events.md.
        on_request: called with a ``StoreEvent`` after each request, from worker threads: for tracing.
        transport: "fsspec" (s3fs, gcsfs) or "obstore" (S3 only, ``pip install 'ckptstore[fast]'``); by default
            obstore where it is installed and would follow every one of ``storage_options``.
        background_cores: how many cores a background save (``save_async``) keeps busy; default half of them.
        exit_timeout: seconds that the exit of the interpreter, and ``close``, wait for a background save, up to a day.
        run_id: a name for the run, the same each time that it is started. Then a process that was given up for dead
            and goes on cannot save any more once its successor has (``FencedError``), and pruning takes only what this
            run has saved. By default the variable ``CKPTSTORE_RUN_ID`` of the environment; "" for no name.
        on_full: what a save may delete on a full store before it tries once more. "prune": debris, and what ``keep``
            drops of the epochs that exist. "oldest": more, the oldest epochs, one at a time until it fits. "raise":
            nothing. Never the newest intact epoch, nor the one that the run resumed from.
        on_error: "raise", or "warn": a save that the store fails is logged, returns None, and training goes on.
        max_failures: with "warn", so many failed saves in a row, and the last of them is raised.
        every: records that ``save`` and ``save_async`` store less often, e.g. ``{"optimizer": 5}``: only in epochs that
            are multiples of 5. Prunings keep the newest epoch that has it.
        spill: URL of a second store, which takes a save that the first cannot. See docs/full-disks.md.
        spill_options: its ``storage_options``.

    Raises:
        InvalidArgumentError: a URL or option that makes no sense, or a library that is not installed.
        RepositoryNotFoundError: no such bucket; or no repository and ``create`` is False.
        FormatError: a place that holds something else, a newer format, or a server without conditional puts.
        AccessError, StoreError: the store refused or did not answer.
    """
    run_id = check_run_id(os.environ.get(RUN_ID, "") if run_id is None else run_id)
    listener = listener_of(on_event)
    stores: dict[str, Any] = {
        "storage_options": storage_options,
        "retry": retry,
        "concurrency": concurrency,
        "unsafe_single_writer": unsafe_single_writer,
        "on_request": on_request,
        "on_retry": None if listener is None else listener.put,
        "transport": transport,
    }
    repositories: dict[str, Any] = {
        "keep": check_policy(keep),
        "create": create,
        "unsafe_single_writer": unsafe_single_writer,
        "chunk_size": check_chunk_size(chunk_size),
        "codec": check_codec(codec),
        "background_cores": background_cores,
        "exit_timeout": check_exit_timeout(exit_timeout),
        "run_id": run_id,
        "on_full": check_on_full(on_full),
        "on_error": check_on_error(on_error),
        "max_failures": check_max_failures(max_failures),
        "every": check_every(every),
        "on_event": listener,
    }
    check_background_cores(background_cores)
    if not all(isinstance(place, (str, os.PathLike)) for place in (url, *((spill,) if spill is not None else ()))):
        raise InvalidArgumentError(f"url and spill must be {SUPPORTED}")
    repo: Repository = _opener(url, stores, repositories, spill, spill_options)()
    try:
        repo.spill  # noqa: B018 (a second store that is not there is found out now, not when it is needed)
    except BaseException:
        repo.close()
        raise
    return repo


def _opener(
    url: str | os.PathLike[str],
    stores: dict[str, Any],
    repositories: dict[str, Any],
    spill: str | os.PathLike[str] | None,
    spill_options: Mapping[str, Any] | None,
) -> Opener:
    if spill is None:
        if spill_options is not None:
            raise InvalidArgumentError("spill_options without spill: name the second store")
        return Opener(Repository, os.fspath(url), stores, repositories)
    there = {**stores, "storage_options": spill_options, "transport": None}
    second = Opener(Repository, os.fspath(spill), there, {**repositories, "on_error": "raise"})
    return Opener(SpillRepository, os.fspath(url), stores, {**repositories, "spill": second})
