"""``ckptstore.open``: from a URL to a repository."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from ckptstore.replication import Lower
from ckptstore.repository import Repository
from ckptstore.spill import SpillRepository
from ckptstore.stores import RetryPolicy
from ckptstore.stores.opening import SUPPORTED, is_bucket
from ckptstore.stores.trace import StoreEvent
from ckptstore.tier import Tier
from ckptstore.tiers import TieredRepository


def open(  # noqa: A001 (used as ckptstore.open)
    url: str | os.PathLike[str] | Tier | Sequence[str | os.PathLike[str] | Tier],
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
        url: a folder (also ``file://``), ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``memory://name``; or a list
            of such tiers, the fast one first: saves go there and are copied to the others in the background. A ``Tier``
            has options of its own; ``keep`` is the first one's. See docs/tiers.md.
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
    tiers = _as_tiers(url)
    if spill is not None and (len(tiers) > 1 or not isinstance(spill, (str, os.PathLike))):
        raise InvalidArgumentError(
            "spill is for a repository in one place: name the second store as a tier, or as spill"
            if len(tiers) > 1
            else f"url and spill must be {SUPPORTED}"
        )
    repo: Repository = _opener(tiers, stores, repositories, spill, spill_options)()
    try:
        repo.spill  # noqa: B018 (a second store that is not there is found out now, not when it is needed)
    except BaseException:
        repo.close()
        raise
    return repo


def repository_of(where: Repository | str | os.PathLike[str]) -> Repository:
    """For adapters: an open repository as it is, or the one at a URL, opened without options."""
    return where if isinstance(where, Repository) else open(where)


def _as_tiers(url: Any) -> list[Tier]:
    """What was given to ``open`` as places, the first one first."""
    places = [url] if isinstance(url, (str, os.PathLike, Tier)) or not isinstance(url, Sequence) else list(url)
    if not places or not all(isinstance(place, (str, os.PathLike, Tier)) for place in places):
        raise InvalidArgumentError(f"url and spill must be {SUPPORTED}, or a list of such tiers")
    tiers = [place if isinstance(place, Tier) else Tier(place) for place in places]
    if len({os.fspath(tier.url) for tier in tiers}) < len(tiers):
        raise InvalidArgumentError("two tiers are the same place")
    if tiers[0].limit is not None:
        raise InvalidArgumentError("the first tier takes the saves themselves: a limit is for the others")
    return tiers


def _opener(
    tiers: Sequence[Tier],
    stores: dict[str, Any],
    repositories: dict[str, Any],
    spill: str | os.PathLike[str] | None,
    spill_options: Mapping[str, Any] | None,
) -> Opener:
    if spill is None and spill_options is not None:
        raise InvalidArgumentError("spill_options without spill: name the second store")
    first = tiers[0]
    if first.keep is not None:
        if repositories["keep"] is not None:
            raise InvalidArgumentError("keep is given twice for the first tier")
        repositories = {**repositories, "keep": check_policy(first.keep)}
    if first.unsafe_single_writer is not None:
        repositories = {**repositories, "unsafe_single_writer": first.unsafe_single_writer}
    url, several = os.fspath(first.url), len(tiers) > 1
    here = _store_options(first, stores, several=several)
    if several:
        lower = [_lower(tier, stores, repositories) for tier in tiers[1:]]
        return Opener(TieredRepository, url, here, {**repositories, "lower": lower})
    if spill is None:
        return Opener(Repository, url, here, repositories)
    there = {**stores, "storage_options": spill_options, "transport": None}
    second = Opener(Repository, os.fspath(spill), there, {**repositories, "on_error": "raise"})
    return Opener(SpillRepository, url, here, {**repositories, "spill": second})


def _store_options(tier: Tier, stores: dict[str, Any], *, several: bool) -> dict[str, Any]:
    """Those of the tier, else those of ``open``; in a list, what only buckets have is for buckets."""
    names = ("storage_options", "retry", "concurrency", "unsafe_single_writer", "transport")
    own = {name: getattr(tier, name) for name in names if getattr(tier, name) is not None}
    for_all = dict(stores)
    if several and not is_bucket(os.fspath(tier.url)):
        for_all.update(storage_options=None, transport=None)
    return {**for_all, **own}


def _lower(tier: Tier, stores: dict[str, Any], repositories: dict[str, Any]) -> Lower:
    url, here, policy = os.fspath(tier.url), _store_options(tier, stores, several=True), check_policy(tier.keep)
    names = ("run_id", "exit_timeout", "chunk_size", "codec")
    facts = {name: repositories[name] for name in names} | {"keep": policy}
    facts["unsafe_single_writer"] = here["unsafe_single_writer"]
    find, make = (Opener(Repository, url, here, {**facts, "create": create}) for create in (False, True))
    return Lower(url, find, make, policy, tier.limit)
