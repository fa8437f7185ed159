"""The tables that say what the errors of the libraries mean."""

from __future__ import annotations

import asyncio
import errno
import pickle
import socket
import ssl

import aiohttp
import botocore.exceptions
import botocore.parsers
import google.auth.exceptions
import pytest
import requests
from botocore.exceptions import ClientError
from fsspec.exceptions import FSTimeoutError
from gcsfs.retry import ChecksumError, HttpError, NonRetryableError
from s3fs.errors import translate_boto_error

from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    InvalidArgumentError,
    RepositoryNotFoundError,
    StoreError,
    StoreFullError,
    ThrottledError,
    TransientError,
)
from ckptstore.stores.remote_errors import (
    CLASSES,
    S3_CODES,
    STATUSES,
    CredentialsExpired,
    Missing,
    NotSupported,
    Place,
    PreconditionRefused,
    RangeRefused,
    judge,
    translate,
)

PLACE = Place("s3://bucket/run", "http://minio:9000", "eu-west-1", frozenset({"s3cr3t"}))


def client_error(code: str, status: int, message: str = "said so") -> ClientError:
    """What botocore raises."""
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "PutObject",
    )


def kind_of(error: BaseException) -> type[CkptStoreError]:
    """The class of the translation."""
    return type(translate(error, "put", "a/1", PLACE))


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("SlowDown", 503, ThrottledError),
        ("InternalError", 500, TransientError),
        ("RequestTimeout", 400, TransientError),
        ("XAmzContentSHA256Mismatch", 400, TransientError),
        ("BadDigest", 400, TransientError),
        ("IncompleteBody", 400, TransientError),
        ("ConditionalRequestConflict", 409, TransientError),
        ("OperationAborted", 409, TransientError),
        ("ConcurrentModification", 409, TransientError),
        ("409", 409, TransientError),
        ("429", 429, ThrottledError),
        ("SomethingNew", 503, ThrottledError),
        ("SomethingNew", 522, TransientError),
        ("PreconditionFailed", 412, PreconditionRefused),
        ("412", 412, PreconditionRefused),
        ("NoSuchKey", 404, Missing),
        ("404", 404, Missing),
        ("NoSuchBucket", 404, RepositoryNotFoundError),
        ("InvalidRange", 416, RangeRefused),
        ("416", 416, RangeRefused),
        ("AccessDenied", 403, AccessError),
        ("403", 403, AccessError),
        ("InvalidAccessKeyId", 403, AccessError),
        ("SignatureDoesNotMatch", 403, AccessError),
        ("RequestTimeTooSkewed", 403, AccessError),
        ("ExpiredToken", 400, CredentialsExpired),
        ("QuotaExceeded", 403, StoreFullError),
        ("XMinioStorageFull", 507, StoreFullError),
        ("507", 507, StoreFullError),
        ("NotImplemented", 501, NotSupported),
        ("InvalidArgument", 400, StoreError),
        ("InvalidBucketState", 409, StoreError),
        ("PermanentRedirect", 301, StoreError),
        ("301", 301, StoreError),
        ("AuthorizationHeaderMalformed", 400, StoreError),
        ("EntityTooLarge", 400, StoreError),
        ("SomethingNew", 400, StoreError),
        ("SomethingNew", 418, StoreError),
    ],
)
def test_s3_codes(code: str, status: int, expected: type[CkptStoreError]) -> None:
    """An S3 code decides, else the status; the same through the disguise of s3fs."""
    error = client_error(code, status)
    assert kind_of(error) is expected
    assert kind_of(translate_boto_error(error)) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("b/x/o/y"), Missing),
        (FileExistsError("b/x/o"), PreconditionRefused),
        (OSError("Forbidden: b/x/o\nno access"), AccessError),
        (OSError("Forbidden: b/x/o\nRate limit exceeded"), ThrottledError),
        (HttpError({"code": 401, "message": "Invalid Credentials"}), CredentialsExpired),
        (HttpError({"code": 401, "message": "Anonymous caller"}), AccessError),
        (HttpError({"code": "429", "message": ""}), ThrottledError),
        (HttpError({"code": 503}), ThrottledError),
        (HttpError({"code": 416}), RangeRefused),
        (HttpError({"code": 507}), StoreFullError),
        (HttpError({"code": 400, "message": "no"}), StoreError),
        (HttpError(), StoreError),
        (ValueError("Bad Request: x\ninvalid"), StoreError),
        (requests.exceptions.ProxyError(), TransientError),
        (ChecksumError(), TransientError),
        (NonRetryableError("no refresh token"), AccessError),
        (google.auth.exceptions.TransportError("metadata"), TransientError),  # type: ignore[no-untyped-call]
        (google.auth.exceptions.RefreshError("expired"), CredentialsExpired),  # type: ignore[no-untyped-call]
        (google.auth.exceptions.DefaultCredentialsError("none"), AccessError),  # type: ignore[no-untyped-call]
    ],
)
def test_gcs_errors(error: Exception, expected: type[CkptStoreError]) -> None:
    """gcsfs tells by its own class, by built-in classes and by their text."""
    assert kind_of(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (botocore.exceptions.EndpointConnectionError(endpoint_url="x"), TransientError),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="x"), TransientError),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="x"), TransientError),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="x"), TransientError),
        (botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), TransientError),
        (botocore.parsers.ResponseParserError("no XML"), TransientError),
        (botocore.exceptions.NoCredentialsError(), AccessError),
        (botocore.exceptions.PartialCredentialsError(provider="env", cred_var="secret"), AccessError),
        (botocore.exceptions.ParamValidationError(report="Bucket"), InvalidArgumentError),
        (botocore.exceptions.NoRegionError(), InvalidArgumentError),
        (aiohttp.ClientPayloadError("not completed"), TransientError),
        (aiohttp.ServerDisconnectedError(), TransientError),
        (aiohttp.ServerTimeoutError(), TransientError),
        (aiohttp.InvalidURL("x"), InvalidArgumentError),
        (asyncio.TimeoutError(), TransientError),
        (TimeoutError(), TransientError),
        (FSTimeoutError(), TransientError),
        (ConnectionResetError(errno.ECONNRESET, "reset"), TransientError),
        (BrokenPipeError(), TransientError),
        (socket.gaierror(-2, "Name or service not known"), TransientError),
        (ssl.SSLError("bad record"), TransientError),
        (ssl.SSLCertVerificationError("self-signed"), StoreError),
        (OSError(errno.ENOSPC, "no space"), StoreFullError),
        (OSError(errno.EDQUOT, "quota"), StoreFullError),
        (OSError(errno.EHOSTUNREACH, "no route"), TransientError),
        (PermissionError(errno.EACCES, "no"), AccessError),
        (RuntimeError("never seen"), StoreError),
        (TypeError("a bug"), StoreError),
        (KeyError("a bug"), StoreError),
    ],
)
def test_transport_errors(error: Exception, expected: type[CkptStoreError]) -> None:
    """Transport and credential problems are told by class and errno; the unknown is a plain StoreError."""
    assert kind_of(error) is expected


def test_cause_decides_context_does_not() -> None:
    """An exception means what it was raised from, not what happened to be handled when it came up."""
    wrapped, unrelated = RuntimeError("wrapped"), RuntimeError("a bug")
    wrapped.__cause__ = client_error("SlowDown", 503)
    unrelated.__context__ = client_error("SlowDown", 503)
    assert kind_of(wrapped) is ThrottledError
    assert kind_of(unrelated) is StoreError
    for bug in (TypeError("a bug"), RuntimeError("a bug")):
        bug.__cause__ = FileNotFoundError("something local")
        assert kind_of(bug) is StoreError


def test_certificate_problems_are_not_tried_again() -> None:
    """A certificate that is not accepted stays so, although the library calls it a connection error."""
    error = botocore.exceptions.SSLError(endpoint_url="x", error="verify failed")
    error.__context__ = ssl.SSLCertVerificationError("self-signed")
    assert kind_of(error) is StoreError
    assert "CA bundle" in str(translate(error, "get", None, PLACE))


def test_chains_may_be_circular() -> None:
    """A chain of causes that bites its tail ends."""
    one, two = RuntimeError("1"), RuntimeError("2")
    one.__cause__, two.__cause__ = two, one
    assert kind_of(one) is StoreError


def test_message() -> None:
    """A message says what failed, where, why and what to do; the key travels with it, also through pickle."""
    error = translate(client_error("AccessDenied", 403, "you may not"), "put", "a/1", PLACE)
    for part in ("put", "a/1", "s3://bucket/run", "http://minio:9000", "AccessDenied", "you may not", "permissions"):
        assert part in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.key) == (AccessError, str(error), "a/1")


@pytest.mark.parametrize(
    "text",
    [
        "the s3cr3t key",
        "http://user:s3cr3t@proxy:80/",
        "http://user:other@proxy:80/",
        "GET https://x/tokeninfo?access_token=other&y=1",
        "X-Amz-Signature=other&X-Amz-Security-Token=other",
    ],
)
def test_no_secrets(text: str) -> None:
    """Messages never show a secret, wherever a library put it."""
    message = str(translate(RuntimeError(text), "get", "a/1", PLACE))
    assert "s3cr3t" not in message
    assert "other" not in message
    assert "***" in message


def test_region() -> None:
    """A redirect names the region and endpoint that were asked for and those that would do."""
    error = client_error("PermanentRedirect", 301)
    error.response["Error"]["Endpoint"] = "bucket.s3.eu-west-3.amazonaws.com"
    error.response["ResponseMetadata"]["HTTPHeaders"] = {"x-amz-bucket-region": "eu-west-3"}
    message = str(translate(error, "put", "a/1", PLACE))
    for part in ("eu-west-1", "http://minio:9000", "eu-west-3", "bucket.s3.eu-west-3.amazonaws.com"):
        assert part in message


def test_checksum_hint() -> None:
    """A server that stumbles over checksum trailers gets the option named."""
    assert "request_checksum_calculation" in str(
        translate(client_error("MissingContentLength", 411), "put", "a", PLACE)
    )


def test_own_errors_stay_what_they_are() -> None:
    """An error of ours from inside a request keeps its class and gains key and place."""
    error = translate(TransientError("cut short"), "get", "a/1", PLACE)
    assert type(error) is TransientError
    assert error.key == "a/1"
    assert "cut short" in str(error)
    assert "s3://bucket/run" in str(error)


@pytest.mark.parametrize("response", [{}, {"Error": None}, {"Error": {}, "ResponseMetadata": None}])
def test_replies_without_details(response: dict[str, object]) -> None:
    """A reply without code or status is an unknown error, not a crash."""
    error = RuntimeError("odd")
    error.response = response  # type: ignore[attr-defined]
    assert judge(error)[0].kind is StoreError


def test_tables_are_sound() -> None:
    """Every class in the table exists under that name, and every entry has advice."""
    import importlib

    for name in CLASSES:
        module, _, attribute = name.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), attribute), type), name
    assert all(verdict.advice for table in (S3_CODES, STATUSES, CLASSES) for verdict in table.values())
