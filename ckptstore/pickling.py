"""How a repository was opened, so that another process can open it again: ``pickle``, spawned children, job queues.

A pickle holds no secrets. Of ``storage_options`` only what is known to be none travels; credentials come from the
environment of the process that unpickles, or are given anew (``Repository.with_credentials``). Unpickling asks the
store nothing, so it cannot fail for want of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ckptstore.errors import InvalidArgumentError
from ckptstore.fence import Fence
from ckptstore.foundation import Foundation
from ckptstore.stores import open_store
from ckptstore.stores.opening import is_bucket

log = logging.getLogger("ckptstore")

# A list of what may travel, not of what may not: an option that nobody has thought of stays behind.
_PUBLIC = {
    "access", "addressing_style", "anon", "cache_regions", "check_connection", "client_kwargs", "config_kwargs",
    "connect_timeout", "consistency", "default_block_size", "default_cache_type", "default_fill_cache",
    "default_location", "endpoint_url", "location", "max_attempts", "max_concurrency", "max_pool_connections",
    "mode", "payload_signing_enabled", "profile", "project", "read_timeout", "region_name",
    "request_checksum_calculation", "requester_pays", "requests_timeout", "response_checksum_validation", "retries",
    "s3", "signature_version", "tcp_keepalive", "timeout", "token", "total_max_attempts",
    "us_east_1_regional_endpoint", "use_accelerate_endpoint", "use_dualstack_endpoint", "use_ssl", "verify",
    "version_aware",
}  # fmt: skip
_NESTED = {"client_kwargs", "config_kwargs", "retries", "s3"}
_WAYS = ("anon", "browser", "cache", "cloud", "google_default")  # values of gcsfs' ``token`` that are no token
_PLAIN = (str, int, float, bool, type(None))


def public(options: Mapping[str, Any], path: str = "") -> tuple[dict[str, Any], list[str]]:
    """The storage options that may travel, and the names of those that stay behind."""
    kept: dict[str, Any] = {}
    left: list[str] = []
    for name, value in options.items():
        if name in _NESTED and isinstance(value, Mapping):
            inner, left_inside = public(value, f"{path}{name}.")
            left += left_inside
            if inner:
                kept[name] = inner
        elif name in _PUBLIC and isinstance(value, _PLAIN) and _is_public(name, value):
            kept[name] = value
        else:
            left.append(f"{path}{name}")
    return kept, left


def _is_public(name: str, value: object) -> bool:
    if name == "token":
        return value is None or value in _WAYS or (isinstance(value, str) and os.path.isfile(value))
    if name == "endpoint_url" and isinstance(value, str):
        return "@" not in urlsplit(value).netloc
    return True


@dataclass(frozen=True, slots=True)
class Passport:
    """What a repository takes along into another process, beside the way it was opened."""

    id: str
    resumed: frozenset[int]
    has_saved: bool
    session: str
    number: int


class Opener:
    """Opens one repository, with the same arguments each time."""

    def __init__(
        self, make: Callable[..., Any], url: str, store: Mapping[str, Any], repository: Mapping[str, Any]
    ) -> None:
        """``store`` goes to ``open_store``; what that gives, and ``repository``, to ``make``."""
        self._make = make
        self._url = url
        self._store = dict(store)
        self._repository = dict(repository)

    def __call__(self, passport: Passport | None = None) -> Any:
        """The repository; with a ``passport`` without asking the store whether it is there."""
        store = open_store(self._url, **self._store)
        try:
            repo = self._make(store, **self._repository, passport=passport)
        except BaseException:
            store.close()
            raise
        if "://" not in self._url:
            self._url = os.path.abspath(self._url)  # now: a child, or this process later, may stand elsewhere
        repo._opener = self
        return repo

    def with_options(self, storage_options: Mapping[str, Any]) -> Opener:
        """The same, with more or other storage options; of several tiers, those that are buckets have them."""
        options = {**(self._store.get("storage_options") or {}), **storage_options}
        store, lower = {**self._store, "storage_options": options}, self._repository.get("lower")
        if lower is None:
            return Opener(self._make, self._url, store, self._repository)
        repository = {**self._repository, "lower": [tier.with_options(storage_options) for tier in lower]}
        return Opener(self._make, self._url, store if is_bucket(self._url) else self._store, repository)

    def __reduce__(self) -> tuple[Any, ...]:
        kept, left = public(self._store.get("storage_options") or {})
        # Callbacks belong to their process.
        store = {**self._store, "storage_options": kept or None, "on_request": None, "on_retry": None}
        return _unpack, (self._make, self._url, store, {**self._repository, "on_event": None}, left)


def _unpack(
    make: Callable[..., Any], url: str, store: dict[str, Any], repository: dict[str, Any], left: list[str]
) -> Opener:
    if left:
        log.info("%s comes out of a pickle, which holds no secrets: %s stayed behind", url, ", ".join(left))
    return Opener(make, url, store, repository)


P = TypeVar("P", bound="Portable")


class Portable:
    """A repository that can be pickled, if ``ckptstore.open`` has made it."""

    _foundation: Foundation
    _fence: Fence
    _resumed: set[int]
    _has_saved: bool
    _opener: Opener | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return self._required(), (self._passport(),)

    def with_credentials(self: P, storage_options: Mapping[str, Any]) -> P:
        """The same repository, opened with these storage options in addition to its own.

        For one that came out of a pickle, which holds no secrets, where the environment has none either. Close both.

        Raises:
            InvalidArgumentError: options that make no sense.
            TypeError: it was not made by ``ckptstore.open``.
        """
        if not isinstance(storage_options, Mapping):
            raise InvalidArgumentError(f"storage_options must be a dict, not of type {type(storage_options).__name__}")
        repo: P = self._required().with_options(storage_options)(self._passport())
        return repo

    def _required(self) -> Opener:
        if self._opener is None:
            raise TypeError("only a repository that was made by ckptstore.open can be pickled")
        return self._opener

    def _passport(self) -> Passport:
        fence = self._fence
        self._foundation.settle()
        return Passport(self._foundation.id, frozenset(self._resumed), self._has_saved, fence.session, fence.number)

    def _show(self, passport: Passport) -> None:
        self._resumed, self._has_saved = set(passport.resumed), passport.has_saved
        self._fence.session, self._fence.number = passport.session, passport.number
