"""open_store: URLs, wrappers, and what happens without the optional libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptstore.errors import AccessError, InvalidArgumentError, RetriesExhaustedError
from ckptstore.stores import (
    Body,
    LimitStore,
    LocalStore,
    MemoryStore,
    OpLog,
    RemoteStore,
    RetryPolicy,
    RetryStore,
    Store,
    TraceStore,
    open_store,
    probe_conditional_put,
)

if TYPE_CHECKING:
    from tests import servers
else:
    import servers

OPTIONS = {"key": "k", "secret": "s"}


def stack(store: Store) -> list[type[Store]]:
    """The classes of a store and what it wraps, outermost first."""
    kinds = []
    inner: Any = store
    while inner is not None:
        kinds.append(type(inner))
        inner = getattr(inner, "inner", None)
    return kinds


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("S3://bucket/run/", "s3://bucket/run"),
        ("s3://my.bucket-1/a/b=1/c d", "s3://my.bucket-1/a/b=1/c d"),
        ("gs://bucket/run", "gs://bucket/run"),
        ("gcs://bucket/run", "gs://bucket/run"),
        ("memory://some-name", "memory://some-name"),
        ("memory://some/name/", "memory://some/name"),
        ("file:///tmp/a%20b", "file:///tmp/a b"),
        ("file://localhost/tmp/x", "file:///tmp/x"),
        ("/tmp/x", "file:///tmp/x"),
        ("/tmp/with:colon", "file:///tmp/with:colon"),
    ],
)
def test_urls(url: str, expected: str) -> None:
    """Each form of URL opens the store it names."""
    remote = url.lower().startswith(("s3", "g"))
    options = ({"token": "anon"} if url.startswith("g") else OPTIONS) if remote else None
    with open_store(url, storage_options=options) as store:
        assert store.traits.url == expected


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path object, a relative path and a path's own URL are the same folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a b?#%41"
    for url in (folder, os.fspath(folder), folder.name, folder.as_uri()):
        with open_store(url) as store:
            store.put("a/1", b"x")
            assert store.traits.url == f"file://{folder}"
    assert (folder / "a" / "1").read_bytes() == b"x"
    assert os.listdir(tmp_path) == [folder.name]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3://",
        "s3:///run",
        "gs://",
        "s3:/bucket/run",
        "s3:bucket/run",
        "gs:/bucket",
        "file:/tmp/x",
        "memory:name",
        "https:/x",
        "s3://b",
        "s3://-bucket/x",
        "s3://buc ket/x",
        "s3://bucket..x/y",
        "s3://bucket//run",
        "s3://bucket/run//",
        "s3://bucket/../run",
        "s3://bucket/./run",
        "s3://bucket/run?versionId=1",
        "s3://bucket/run#1",
        "s3://bucket\\run",
        "s3://bucket/a\\b",
        "s3://bucket/a\nb",
        "memory://",
        "memory:///",
        "file://",
        "file:///",
        "file://host/tmp/x",
        "a\0b",
    ],
)
def test_urls_that_make_no_sense(url: str) -> None:
    """A URL that means nothing, or something else to each store, is refused with an example of a good one."""
    with pytest.raises(InvalidArgumentError, match="://"):
        open_store(url, storage_options=OPTIONS if url.startswith("s3") else None)


@pytest.mark.parametrize("url", ["http://host/x", "ftp://host/x", "az://container/x", "hdfs://x", "S4://bucket/x"])
def test_unknown_scheme(url: str) -> None:
    """An unknown scheme is refused, and the supported ones are listed."""
    with pytest.raises(InvalidArgumentError) as caught:
        open_store(url)
    for scheme in ("file://", "memory://", "s3://", "gs://", "gcs://"):
        assert scheme in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:hunter2@bucket/run",
        "s3://hunter2@bucket/run",
        "gs://user:hunter2@bucket",
        "s3://hunter2:9000/bucket",
        "https://user:hunter2@host/bucket",
        "s3:/user:hunter2@bucket",
        "file://user:hunter2@host/x",
    ],
)
def test_credentials_in_a_url(url: str) -> None:
    """Credentials in a URL are refused, and the message does not repeat them."""
    with pytest.raises(InvalidArgumentError) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", [b"/tmp/x", Path(os.devnull) / "x\0y"])
def test_no_text(url: Any) -> None:
    """Bytes and names with a zero byte are no URLs."""
    with pytest.raises((InvalidArgumentError, TypeError)):
        open_store(url)


@pytest.mark.parametrize("url", ["/tmp/x", "file:///tmp/x", "memory://x"])
def test_options_without_use(url: str) -> None:
    """storage_options for a store that has none are a mistake of the caller."""
    with pytest.raises(InvalidArgumentError, match="storage_options"):
        open_store(url, storage_options={"key": "x"})
    open_store(url, storage_options={}).close()


def test_wrappers() -> None:
    """The wrappers stand in this order, retries outermost: a sleeping retry holds no slot."""
    name = "memory://test-wrappers"
    assert stack(open_store(name)) == [RetryStore, LimitStore, MemoryStore]
    assert stack(open_store(name, on_request=OpLog())) == [RetryStore, TraceStore, LimitStore, MemoryStore]
    assert stack(open_store("/tmp/x"))[-1] is LocalStore
    assert stack(open_store("s3://bucket", storage_options=OPTIONS))[-1] is RemoteStore


def test_arguments(tmp_path: Path) -> None:
    """Concurrency, retry policy, observer and single-writer mode reach the stores that they are for."""
    log = OpLog()
    with open_store(tmp_path, concurrency=3, on_request=log) as store:
        assert store.traits.concurrency == 3
        store.put("a/1", b"x")
    assert log.count("put") == 1
    with open_store("s3://bucket", storage_options=OPTIONS) as store:
        assert store.traits.concurrency == 16
        assert store.traits.conditional_put is None
    with open_store("s3://bucket", storage_options=OPTIONS, concurrency=40, unsafe_single_writer=True) as store:
        assert store.traits.concurrency == 40
        assert store.traits.conditional_put is False
    options = {**OPTIONS, "endpoint_url": servers.unused_endpoint()}
    store = open_store("s3://bucket", storage_options=options, retry=RetryPolicy(2, base=0.001))
    with store, pytest.raises(RetriesExhaustedError, match="2 attempts"):
        list(store.list())


@pytest.mark.parametrize("concurrency", [0, -1])
def test_concurrency_that_makes_no_sense(concurrency: int) -> None:
    """A limit below one would let nothing through."""
    with pytest.raises(InvalidArgumentError):
        open_store("memory://x", concurrency=concurrency)


@pytest.mark.parametrize("library", ["s3fs", "gcsfs"])
def test_missing_library(library: str) -> None:
    """Without the library, importing works, other stores work, and its URL gives the pip line."""
    scheme = {"s3fs": "s3", "gcsfs": "gs"}[library]
    code = f"""
import sys
sys.modules[{library!r}] = None
from ckptstore.errors import InvalidArgumentError
from ckptstore.stores import open_store
open_store("memory://x").put("a/1", b"x")
try:
    open_store("{scheme}://bucket/run")
except InvalidArgumentError as error:
    assert "pip install {library}" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_libraries_are_imported_late() -> None:
    """Nothing of the clients is imported before a URL needs it."""
    code = """
import sys
from ckptstore.stores import open_store
open_store("memory://x").put("a/1", b"x")
early = {"s3fs", "gcsfs", "fsspec", "botocore", "aiohttp"} & set(sys.modules)
assert not early, early
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_probe_of_stores_that_know(tmp_path: Path) -> None:
    """The probe tells the truth about folders and memory too, and cleans up."""
    for store in (MemoryStore(), LocalStore(tmp_path)):
        assert probe_conditional_put(store) is True
        assert list(store.list()) == []


class _Unwritable(MemoryStore):
    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        raise AccessError(f"may not put {key}", key=key)


class _Undeletable(MemoryStore):
    def delete(self, key: str) -> None:
        raise AccessError(f"may not delete {key}", key=key)


class _SweptOnce(MemoryStore):
    """A sweeper takes away the first object right after its put."""

    _puts = 0

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        self._puts += 1
        if self._puts == 1:
            self.delete(key)


def test_probe_that_a_sweeper_meets() -> None:
    """P4: what another process did is not laid to the server, whose user would be told to do without conditions."""
    assert probe_conditional_put(_SweptOnce()) is True


def test_probe_that_cannot_ask() -> None:
    """A store that refuses the put is an error of the probe, not a "no"; one that keeps the probe is no error."""
    with pytest.raises(AccessError, match="may not put"):
        probe_conditional_put(_Unwritable())
    assert probe_conditional_put(_Undeletable()) is True
