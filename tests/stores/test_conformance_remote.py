"""Stores in buckets keep the whole contract of ``ckptstore.stores.base`` on real servers."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.stores import LimitStore, RemoteStore, RetryPolicy, RetryStore, Store
from ckptstore.stores.remote_obstore import installed
from ckptstore.testing.suite import StoreSuite

pytestmark = pytest.mark.timeout(300)
needs_obstore = pytest.mark.skipif(not installed(), reason="obstore has no wheel for this Python")


class _Remote(StoreSuite):
    bucket: Any
    transport: str | None = "fsspec"
    emulate_create = False

    def make_store(self) -> Store:
        return RemoteStore(
            self.bucket.scheme, self.bucket.name, self.bucket.prefix(), storage_options=self.bucket.storage_options,
            emulate_create=self.emulate_create, transport=self.transport,
        )  # fmt: skip


class TestS3(_Remote):
    @pytest.fixture(autouse=True)
    def _server(self, s3: Any) -> None:
        self.bucket = s3


@needs_obstore
class TestS3ThroughObstore(TestS3):
    transport = "obstore"
    many = 30  # listing is the same code


class TestGCS(_Remote):
    @pytest.fixture(autouse=True)
    def _server(self, gcs: Any) -> None:
        self.bucket = gcs


class TestStackOverS3(TestS3):
    transport = None  # whichever is preferred
    many = 30  # TestS3 has the long listing

    def make_store(self) -> Store:
        return RetryStore(LimitStore(super().make_store(), 4), RetryPolicy(attempts=3))


class TestWithoutConditions(_Remote):
    """A server that ignores conditions still keeps the rest, for a single writer."""

    transport = None
    conditional_put = False
    emulate_create = True
    many = 30
    # rclone keeps objects as files: it answers 500 where a name is a folder or where a folder goes away, and an object
    # that is being overwritten is missing meanwhile.
    test_delete = None  # type: ignore[assignment]
    test_folders_come_and_go = None  # type: ignore[assignment]
    test_readers_never_see_a_torn_body = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _server(self, s3_no_conditions: Any) -> None:
        self.bucket = s3_no_conditions

    def make_store(self) -> Store:
        # rclone fails now and then when two puts make one folder
        return RetryStore(super().make_store(), RetryPolicy(attempts=5))
