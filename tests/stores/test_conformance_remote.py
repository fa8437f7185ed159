"""Stores in buckets keep the whole contract of ``ckptstore.stores.base`` on real servers."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.stores import LimitStore, RemoteStore, RetryPolicy, RetryStore, Store
from ckptstore.testing.suite import StoreSuite

pytestmark = pytest.mark.timeout(300)


class _Remote(StoreSuite):
    bucket: Any

    def make_store(self) -> Store:
        return RemoteStore(
            self.bucket.scheme, self.bucket.name, self.bucket.prefix(), storage_options=self.bucket.storage_options
        )


class TestS3(_Remote):
    @pytest.fixture(autouse=True)
    def _server(self, s3: Any) -> None:
        self.bucket = s3


class TestGCS(_Remote):
    @pytest.fixture(autouse=True)
    def _server(self, gcs: Any) -> None:
        self.bucket = gcs


class _Short(TestS3):
    many = 30  # TestS3 has the long listing


class TestRetryOverS3(_Short):
    def make_store(self) -> Store:
        return RetryStore(super().make_store(), RetryPolicy(attempts=3))


class TestLimitOverS3(_Short):
    def make_store(self) -> Store:
        return LimitStore(super().make_store(), 4)


class TestWithoutConditions(_Remote):
    """A server that ignores conditions still keeps the rest, for a single writer."""

    conditional_put = False
    many = 30
    # rclone keeps objects as files: it answers 500 where a name is a folder or where a folder goes away.
    test_delete = None  # type: ignore[assignment]
    test_folders_come_and_go = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _server(self, s3_no_conditions: Any) -> None:
        self.bucket = s3_no_conditions

    def make_store(self) -> Store:
        bucket = self.bucket
        return RemoteStore(
            bucket.scheme, bucket.name, bucket.prefix(), storage_options=bucket.storage_options, emulate_create=True
        )
