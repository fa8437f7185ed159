"""Fixtures: real servers, started once per test process and only when a test asks for one."""

from __future__ import annotations

import os
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # for `import servers` under importlib mode

if TYPE_CHECKING:
    from tests import servers  # the name under which the type checker knows it
else:
    import servers

settings.register_profile("dev", deadline=None, max_examples=30)
settings.register_profile(
    "ci", deadline=None, max_examples=100, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@dataclass(frozen=True)
class Bucket:
    """A bucket on a test server.

    Attributes:
        storage_options: for ``open_store``.
        server: the process, None when the endpoint came from the environment.
    """

    scheme: str
    name: str
    endpoint: str
    storage_options: dict[str, Any]
    server: servers.Server | None

    def prefix(self) -> str:
        """A prefix that no other test uses."""
        return f"test-{uuid.uuid4().hex[:12]}"

    def url(self, prefix: str | None = None) -> str:
        """URL of ``prefix`` in the bucket, by default of one that no other test uses."""
        return f"{self.scheme}://{self.name}/{self.prefix() if prefix is None else prefix}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests by the servers that they need, so that ``-m "not s3"`` leaves them out."""
    marks = {"s3": pytest.mark.s3, "s3_no_conditions": pytest.mark.s3, "gcs": pytest.mark.gcs}
    for item in items:
        needed = {*getattr(item, "fixturenames", ())}
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            needed.add(str(item.callspec.params.get("kind")))
        for name in needed & set(marks):
            item.add_marker(marks[name])


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """A bucket on SeaweedFS, or on the server that ``CKPTSTORE_TEST_S3_*`` names (MinIO, say)."""
    endpoint = os.environ.get("CKPTSTORE_TEST_S3_ENDPOINT")
    if endpoint:
        key, secret = os.environ["CKPTSTORE_TEST_S3_KEY"], os.environ["CKPTSTORE_TEST_S3_SECRET"]
        yield s3_bucket(endpoint, key, secret, os.environ.get("CKPTSTORE_TEST_S3_BUCKET"), None)
        return
    server = servers.seaweedfs()
    yield s3_bucket(server.endpoint, servers.KEY, servers.SECRET, None, server)
    server.stop()


@pytest.fixture(scope="session")
def s3_no_conditions() -> Iterator[Bucket]:
    """A bucket on a server that accepts conditional puts and ignores the condition."""
    server = servers.rclone_s3()
    yield s3_bucket(server.endpoint, servers.KEY, servers.SECRET, None, server)
    server.stop()


@pytest.fixture(scope="session")
def gcs() -> Iterator[Bucket]:
    """A bucket on fake-gcs-server, a new one or the one that ``CKPTSTORE_TEST_GCS_ENDPOINT`` names."""
    endpoint = os.environ.get("CKPTSTORE_TEST_GCS_ENDPOINT")
    server = None if endpoint else servers.fake_gcs()
    yield _gcs_bucket(endpoint or server.endpoint, server)  # type: ignore[union-attr]
    if server is not None:
        server.stop()


def s3_bucket(endpoint: str, key: str, secret: str, name: str | None, server: servers.Server | None) -> Bucket:
    import s3fs

    options = {"key": key, "secret": secret, "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    name = name or f"ckptstore-{uuid.uuid4().hex[:12]}"
    fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    try:
        fs.call_s3("create_bucket", Bucket=name)
    except FileExistsError:
        pass  # ours already, or of an earlier run
    return Bucket("s3", name, endpoint, options, server)


def _gcs_bucket(endpoint: str, server: servers.Server | None) -> Bucket:
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    from gcsfs.core import GCSFileSystem

    options = {"token": "anon", "endpoint_url": endpoint, "project": "test"}
    name = f"ckptstore-{uuid.uuid4().hex[:12]}"
    fs = GCSFileSystem(**options, skip_instance_cache=True)
    fs.call("POST", "b/", json={"name": name}, project="test")
    return Bucket("gs", name, endpoint, options, server)


# Here and not beside the tests that count: a parallel run loads only this file in the process that prints.
_COUNTED = "counted: "
Count = Callable[..., None]


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """``count(what, n=1)``: add to a number that is printed in the summary."""

    def add(what: str, n: int = 1) -> None:
        record_property(_COUNTED + what, n)

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            # Reports travel with their properties, also from the workers of a parallel run.
            if getattr(report, "when", "") == "call":
                for name, value in report.user_properties:
                    if name.startswith(_COUNTED):
                        totals[name.removeprefix(_COUNTED)] += value
    if totals:
        terminalreporter.section("counted by the tests")
        for what, n in sorted(totals.items()):
            terminalreporter.write_line(f"{what}: {n}")
