"""Servers with a proxy in front, and the three ways to them."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import Repository, RetryPolicy
from ckptstore.stores import RemoteStore, RetryStore, Store
from tests.conftest import Bucket
from tests.proxy import Proxy
from tests.proxy_faults import answer
from tests.proxy_wire import Reply
from tests.repository.helpers import keys_of, reached

QUICK = RetryPolicy(attempts=8, deadline=20.0, base=0.002, cap=0.05)


@dataclass
class Way:
    """A bucket behind a proxy, and what carries the bodies there."""

    bucket: Bucket
    proxy: Proxy
    transport: str
    prefix: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:12]}")
    _opened: list[Any] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.bucket.url(self.prefix)

    @property
    def gcs(self) -> bool:
        return self.bucket.scheme == "gs"

    def options(self, **more: Any) -> dict[str, Any]:
        """Storage options that lead through the proxy."""
        return {**self.bucket.storage_options, "endpoint_url": self.proxy.endpoint, **more}

    def store(self, retry: RetryPolicy | None = None, **options: Any) -> Store:
        """A store through the proxy, by default without retries."""
        name, chosen = self.bucket.name, self.options(**options)
        store: Store = RemoteStore(
            self.bucket.scheme, name, self.prefix, storage_options=chosen, transport=self.transport
        )
        self._opened.append(store)
        return store if retry is None else RetryStore(store, retry)

    def repo(self, retry: RetryPolicy = QUICK, options: dict[str, Any] | None = None, **rest: Any) -> Repository:
        """A repository through the proxy."""
        chosen = self.options(**(options or {}))
        rest = {"chunk_size": 1 << 16, "codec": "raw", **rest}
        repo = ckptstore.open(self.url, chosen, retry, transport=self.transport, **rest)
        self._opened.append(repo)
        return repo

    def behind(self, create: bool = False) -> Repository:
        """The same repository, past the proxy."""
        repo = ckptstore.open(self.url, self.bucket.storage_options, create=create)
        self._opened.append(repo)
        return repo

    def fs(self) -> Any:
        """The bare client, past the proxy."""
        import s3fs

        return s3fs.S3FileSystem(**self.bucket.storage_options)

    def stored(self) -> list[str]:
        """All objects of the repository."""
        store = RemoteStore(
            self.bucket.scheme, self.bucket.name, self.prefix, storage_options=self.bucket.storage_options
        )
        self._opened.append(store)
        return keys_of(store)

    def debris(self) -> set[str]:
        """Objects that no checkpoint needs."""
        store = self.behind().store
        return set(keys_of(store)) - reached(store)

    def lend(self) -> None:
        """What was opened last is somebody else's to close."""
        self._opened.pop()

    def close(self) -> None:
        for one in self._opened:
            one.close()


@pytest.fixture(autouse=True, scope="session")
def _one_loader() -> Iterator[None]:
    """All clients read botocore's description of S3 from memory: it is most of what opening one costs."""
    import botocore.session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.lru_cache(botocore.session.create_loader))
        yield


PORTALS = [
    answer(Reply(200, b"<html><body>Please log in</body></html>", {"Content-Type": "text/html"}), name="page"),
    answer(Reply(200, b"", {"Content-Type": "text/html; charset=utf-8"}), name="nothing"),
    answer(Reply(200, b"{}", {"Content-Type": "application/json"}), name="json"),
    answer(Reply(502, b"<html><body>Bad Gateway</body></html>", {"Content-Type": "text/html"}), name="gateway"),
]
"""Answers that are not from the store."""

WAYS = {"s3fs": ("s3", "fsspec"), "obstore": ("s3", "obstore"), "gcsfs": ("gcs", "fsspec")}


@pytest.fixture(scope="session")
def proxy_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Proxy]]:
    """One proxy for each server."""
    made: dict[str, Proxy] = {}

    def proxy(kind: str) -> Proxy:
        if kind not in made:
            made[kind] = Proxy(request.getfixturevalue(kind).endpoint).__enter__()
        return made[kind]

    yield proxy
    for one in made.values():
        one.__exit__(None)


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest, proxy_of: Callable[[str], Proxy]) -> Iterator[Way]:
    """Each way to a server: both S3 transports, and GCS."""
    kind, transport = WAYS[request.param]
    found = Way(request.getfixturevalue(kind), proxy_of(kind), transport)
    yield found
    found.close()


every_way = pytest.mark.parametrize("way", list(WAYS), indirect=True)
both_s3 = pytest.mark.parametrize("way", ["s3fs", "obstore"], indirect=True)
s3fs_way = pytest.mark.parametrize("way", ["s3fs"], indirect=True)
gcs_way = pytest.mark.parametrize("way", ["gcsfs"], indirect=True)


def state(seed: int, chunks: int = 3) -> dict[str, Any]:
    """A model of that many chunks of 64 KiB, none like those of another seed, and a small optimizer."""
    weights = np.random.default_rng(seed).integers(0, 256, chunks << 16, "u1")
    return {"model": {"w": weights}, "optimizer": {"step": seed}}


def holds(repo: Repository, epoch: int, seed: int | None = None, chunks: int = 3) -> bool:
    """Whether the epoch loads as it was saved."""
    found, wanted = repo.checkpoint(epoch).load(), state(epoch if seed is None else seed, chunks)
    return bool(np.array_equal(found["model"]["w"], wanted["model"]["w"]) and found["optimizer"] == wanted["optimizer"])
