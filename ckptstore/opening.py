"""``ckptstore.open``: from a URL to a repository."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.chunks import CHUNK_SIZE
from ckptstore.options import (
    EXIT_TIMEOUT,
    RUN_ID,
    check_background_cores,
    check_chunk_size,
    check_codec,
    check_exit_timeout,
    check_policy,
    check_run_id,
)
from ckptstore.pickling import Opener
from ckptstore.repository import Repository
from ckptstore.retention import Policy
from ckptstore.stores import RetryEvent, RetryPolicy
from ckptstore.stores.trace import StoreEvent


def open(  # noqa: A001 (used as ckptstore.open)
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    retry: RetryPolicy | None = None,
    keep: Policy | None = None,
    create: bool = True,
    *,
    unsafe_single_writer: bool = False,
    chunk_size: int = CHUNK_SIZE,
    codec: str = "auto",
    concurrency: int | None = None,
    on_event: Callable[[StoreEvent], None] | None = None,
    on_retry: Callable[[RetryEvent], object] | None = None,
    transport: str | None = None,
    background_cores: int | None = None,
    exit_timeout: float = EXIT_TIMEOUT,
    run_id: str | None = None,
) -> Repository:
    """Open a repository, and make it if it does not exist (and ``create``).

    Args:
        url: a folder (also ``file://``), ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``memory://name``.
        storage_options: passed to s3fs or gcsfs, e.g. ``{"endpoint_url": ..., "key": ..., "secret": ...}``.
        retry: how transient failures are retried.
        keep: after each save, prune what this policy does not keep.
        create: False to open only what exists; then nothing is written until you save.
        unsafe_single_writer: accept a store that ignores conditional puts. Then two writers at the same time *can*
            destroy each other's commit: you promise that there is one.
        chunk_size: raw bytes per chunk of a large array, 64 KiB to 64 MiB.
        codec: "auto" (per byte plane, by a sample), "raw" or "max".
        concurrency: requests at once; default by kind of store.
        on_event: called with a ``StoreEvent`` after each request, from worker threads.
        on_retry: called with a ``RetryEvent`` before each wait for another attempt, from worker threads. The logger
            "ckptstore" hears of them too.
        transport: "fsspec" (s3fs, gcsfs) or "obstore" (S3 only, ``pip install 'ckptstore[fast]'``); by default
            obstore where it is installed and would follow every one of ``storage_options``.
        background_cores: how many cores a background save (``save_async``) keeps busy; default half of them.
        exit_timeout: seconds that the exit of the interpreter, and ``close``, wait for a background save, up to a day.
        run_id: a name for the run, the same each time that it is started. Then a process that was given up for dead
            and goes on cannot save any more once its successor has (``FencedError``), and pruning takes only what this
            run has saved. By default the variable ``CKPTSTORE_RUN_ID`` of the environment; "" for no name.

    Raises:
        InvalidArgumentError: a URL or option that makes no sense, or a library that is not installed.
        RepositoryNotFoundError: no such bucket; or no repository and ``create`` is False.
        FormatError: a place that holds something else, a newer format, or a server without conditional puts.
        AccessError, StoreError: the store refused or did not answer.
    """
    check_policy(keep)
    check_chunk_size(chunk_size)
    check_codec(codec)
    check_background_cores(background_cores)
    check_exit_timeout(exit_timeout)
    run_id = check_run_id(os.environ.get(RUN_ID, "") if run_id is None else run_id)
    opener = Opener(
        Repository,
        os.fspath(url),
        {
            "storage_options": storage_options,
            "retry": retry,
            "concurrency": concurrency,
            "unsafe_single_writer": unsafe_single_writer,
            "on_event": on_event,
            "on_retry": on_retry,
            "transport": transport,
        },
        {
            "keep": keep,
            "create": create,
            "unsafe_single_writer": unsafe_single_writer,
            "chunk_size": chunk_size,
            "codec": codec,
            "background_cores": background_cores,
            "exit_timeout": exit_timeout,
            "run_id": run_id,
        },
    )
    repo: Repository = opener()
    return repo
