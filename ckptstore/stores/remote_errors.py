"""What the many errors of s3fs, gcsfs, botocore and aiohttp mean: one table per kind of evidence.

:func:`translate` looks at, in this order: the S3 error code, the HTTP status, the class of the
exception, the errno. What it does not know becomes a plain StoreError; whoever raises the translation
chains the original to it. The tables are shown in docs/retries.md.
"""

from __future__ import annotations

import errno
import math
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    Failure,
    InvalidArgumentError,
    RepositoryNotFoundError,
    StoreError,
    StoreFullError,
    ThrottledError,
    TransientError,
    reworded,
)


class Missing(StoreError):
    """HTTP 404 that may concern the object or its bucket. Stays inside the remote store."""

    failure: Failure = "settled"


class PreconditionRefused(StoreError):
    """A condition of the request did not hold: the object exists. Stays inside the remote store."""

    failure: Failure = "settled"


class RangeRefused(StoreError):
    """No byte of the object lies in the range asked for. Stays inside the remote store."""

    failure: Failure = "settled"


class NotSupported(StoreError):
    """The server does not know this request or one of its headers."""


class CredentialsExpired(AccessError):
    """The credentials were good once; fresh ones may be had by opening the file system again."""

    failure: Failure = "auth-refresh"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an error means to a caller, and what its reader should do."""

    kind: type[CkptStoreError]
    advice: str
    unsettled: bool = False

    @property
    def failure(self) -> Failure:
        """The class of the failure."""
        return "unsettled" if self.unsettled else self.kind("").failure


TRANSIENT = Verdict(TransientError, "it may pass: try again")
THROTTLED = Verdict(ThrottledError, "the store is asked too often or too busy: try again later, with fewer requests")
CONFLICT = Verdict(TransientError, "another request for it is under way: try again", unsettled=True)
FULL = Verdict(StoreFullError, "free space or raise the quota, for example by pruning old checkpoints")
DENIED = Verdict(
    AccessError,
    "check the credentials in storage_options or the environment and their permissions "
    "(listing included: without it even a missing object is refused)",
)
EXPIRED = Verdict(CredentialsExpired, "renew the credentials")
NO_CREDENTIALS = Verdict(AccessError, "give credentials in storage_options or the environment")
CLOCK = Verdict(AccessError, "set the clock of this machine")
NO_BUCKET = Verdict(RepositoryNotFoundError, "check its name, or create it: ckptstore makes no buckets")
MISSING = Verdict(Missing, "check the URL")
EXISTS = Verdict(PreconditionRefused, "choose another name")
NO_RANGE = Verdict(RangeRefused, "ask for bytes inside the object")
UNSUPPORTED = Verdict(NotSupported, "use a server or gateway that supports it")
REGION = Verdict(StoreError, "set the bucket's own region or endpoint")
CERTIFICATE = Verdict(StoreError, "the server's certificate was not accepted: check endpoint_url and the CA bundle")
ARCHIVED = Verdict(StoreError, "the object is archived: restore it to a storage class that can be read at once")
TOO_LARGE = Verdict(StoreError, "use smaller chunks")
CHECKSUMS = Verdict(
    StoreError,
    "the server may not take checksum trailers: leave config_kwargs request_checksum_calculation at 'when_required'",
)
OPTIONS = Verdict(InvalidArgumentError, "check the URL and storage_options")
UNKNOWN = Verdict(StoreError, "see the chained exception")


def _table(groups: Mapping[Verdict, str]) -> dict[str, Verdict]:
    return {name: verdict for verdict, names in groups.items() for name in names.split()}


S3_CODES: dict[str, Verdict] = _table(
    {
        TRANSIENT: (
            "InternalError InternalFailure RequestTimeout RequestTimeoutException IncompleteBody BadDigest "
            "XAmzContentSHA256Mismatch XAmzContentChecksumMismatch XMinioServerNotInitialized XMinioBackendDown "
            "XMinioReadQuorum XMinioWriteQuorum ClientDisconnected"
        ),
        THROTTLED: (
            "SlowDown SlowDownRead SlowDownWrite Throttling ThrottlingException RequestThrottled TooManyRequests "
            "RequestLimitExceeded BandwidthLimitExceeded ServiceUnavailable Busy"
        ),
        CONFLICT: "ConditionalRequestConflict OperationAborted ConcurrentModification",
        FULL: (
            "QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded XMinioObjectQuotaExceeded "
            "InsufficientStorage InsufficientCapacity ServiceQuotaExceededException"
        ),
        DENIED: (
            "AccessDenied AccessForbidden Forbidden AccountProblem AllAccessDisabled InvalidAccessKeyId "
            "InvalidSecurity InvalidPayer NotSignedUp SignatureDoesNotMatch InvalidToken InvalidClientTokenId "
            "InvalidSignatureException UnrecognizedClientException CredentialsNotSupported "
            "MissingSecurityHeader MissingAuthenticationToken KMS.DisabledException "
            "KMS.NotFoundException KMS.AccessDeniedException"
        ),
        EXPIRED: "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired",
        CLOCK: "RequestTimeTooSkewed",
        NO_BUCKET: "NoSuchBucket NoSuchBucketException",
        MISSING: "NoSuchKey NoSuchVersion NotFound",
        EXISTS: "PreconditionFailed",
        NO_RANGE: "InvalidRange",
        UNSUPPORTED: "NotImplemented MethodNotAllowed XNotImplemented",
        REGION: (
            "PermanentRedirect TemporaryRedirect Redirect AuthorizationHeaderMalformed "
            "IllegalLocationConstraintException InvalidRegion"
        ),
        ARCHIVED: "InvalidObjectState",
        TOO_LARGE: "EntityTooLarge MaxMessageLengthExceeded",
        CHECKSUMS: "MissingContentLength MissingContentMD5 InvalidDigest",
        OPTIONS: "InvalidBucketName KeyTooLongError",
        UNKNOWN: "InvalidArgument InvalidRequest InvalidBucketState MalformedXML",
    }
)
"""S3 error codes, those of the compatible servers included. A code decides before the status does."""

STATUSES: dict[int, Verdict] = {
    301: REGION,
    307: REGION,
    401: DENIED,
    403: DENIED,
    404: MISSING,
    405: UNSUPPORTED,
    408: TRANSIENT,
    409: CONFLICT,  # what is settled has its own code
    411: CHECKSUMS,
    412: EXISTS,
    413: TOO_LARGE,
    416: NO_RANGE,
    425: TRANSIENT,
    429: THROTTLED,
    499: TRANSIENT,
    501: UNSUPPORTED,
    507: FULL,
    503: THROTTLED,
    509: THROTTLED,
    **dict.fromkeys((500, 502, 504, *range(520, 531)), TRANSIENT),
}
"""HTTP statuses, where there is no known code."""

CLASSES: dict[str, Verdict] = _table(
    {
        TRANSIENT: (
            "botocore.exceptions.HTTPClientError botocore.exceptions.ConnectionError "
            "botocore.exceptions.IncompleteReadError botocore.exceptions.ResponseStreamingError "
            "botocore.exceptions.CredentialRetrievalError botocore.exceptions.MetadataRetrievalError "
            "botocore.parsers.ResponseParserError "
            "aiohttp.client_exceptions.ClientError urllib3.exceptions.HTTPError requests.exceptions.RequestException "
            "google.auth.exceptions.TransportError gcsfs.retry.ChecksumError fsspec.exceptions.FSTimeoutError "
            "builtins.TimeoutError asyncio.exceptions.TimeoutError concurrent.futures._base.TimeoutError "
            "builtins.ConnectionError builtins.EOFError socket.gaierror ssl.SSLError json.decoder.JSONDecodeError"
        ),
        NO_CREDENTIALS: (
            "botocore.exceptions.NoCredentialsError botocore.exceptions.PartialCredentialsError "
            "botocore.exceptions.NoAuthTokenError botocore.exceptions.ProfileNotFound "
            "google.auth.exceptions.DefaultCredentialsError"
        ),
        EXPIRED: (
            "botocore.exceptions.TokenRetrievalError botocore.exceptions.SSOError "
            "botocore.exceptions.UnauthorizedSSOTokenError google.auth.exceptions.RefreshError"
        ),
        DENIED: "google.auth.exceptions.GoogleAuthError gcsfs.retry.NonRetryableError",
        OPTIONS: (
            "botocore.exceptions.ParamValidationError botocore.exceptions.NoRegionError "
            "botocore.exceptions.ValidationError botocore.exceptions.InvalidConfigError "
            "botocore.exceptions.EndpointProviderError botocore.exceptions.InvalidEndpointConfigurationError "
            "aiohttp.client_exceptions.InvalidURL requests.exceptions.InvalidURL"
        ),
    }
)
"""Exception classes by full name, so that no library need be imported to know them. Subclasses count."""

ERRNO_NAMES: dict[Verdict, str] = {
    TRANSIENT: (
        "ECONNRESET ECONNREFUSED ECONNABORTED EPIPE ETIMEDOUT EHOSTUNREACH EHOSTDOWN ENETUNREACH ENETDOWN ENETRESET "
        "EAGAIN EINTR EBUSY EIO EMFILE ENFILE ENOBUFS ESHUTDOWN ENOTCONN"
    ),
    FULL: "ENOSPC EDQUOT",
    DENIED: "EACCES EPERM",
}
ERRNOS: dict[int, Verdict] = {getattr(errno, name): verdict for name, verdict in _table(ERRNO_NAMES).items()}
"""Error numbers of the operating system (those that s3fs makes up come with a code, which decides)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go, for messages. ``secrets`` are strings that no message may hold."""

    url: str
    endpoint: str | None = None
    region: str | None = None
    secrets: frozenset[str] = frozenset()

    def clean(self, text: str) -> str:
        """``text`` on one line, cut short, without anything secret."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        text = re.sub(r"//[^/@\s]+@", "//***@", text)
        text = re.sub(r"(?i)((?:token|secret|signature|password|credential)[\w-]*=)[^&\s]+", r"\1***", text)
        return " ".join(text.split())[:300]

    def __str__(self) -> str:
        return self.url + (f" (endpoint {self.clean(self.endpoint)})" if self.endpoint else "")


def translate(error: BaseException, action: str, key: str | None, place: Place) -> CkptStoreError:
    """The error of ours that says what ``error``, met during ``action``, means."""
    target = f"{action} {key!r} in {place}" if key is not None else f"{action} {place}"
    if isinstance(error, CkptStoreError):
        return reworded(error, f"cannot {target}: {error}", key)
    verdict, detail = judge(error)
    if verdict is REGION:
        detail += _regions(error, place)
    number = error.errno if isinstance(error, OSError) and _response(error) is None else None
    ours = verdict.kind(f"cannot {target}: {place.clean(detail)}; {verdict.advice}", key=key, errno=number)
    ours.failure = verdict.failure
    if isinstance(ours, ThrottledError):
        ours.retry_after = _retry_after(error)
    return ours


def judge(error: BaseException) -> tuple[Verdict, str]:
    """The verdict on an exception, and what the server or library said."""
    response = _response(error)
    if response is not None:
        return _judge_s3(response)
    if any(isinstance(link, ssl.SSLCertVerificationError) for link in chain(error, contexts=True)):
        return CERTIFICATE, _said(error)
    verdict = _judge_gcs(error)
    for link in chain(error):
        verdict = verdict or _judge_class(link)
    return verdict or UNKNOWN, _said(error)


def _judge_s3(response: Mapping[str, Any]) -> tuple[Verdict, str]:
    details = response.get("Error") or {}
    code = str(details.get("Code", ""))
    status = _number((response.get("ResponseMetadata") or {}).get("HTTPStatusCode")) or _number(code)
    said = f"{code} {details.get('Message') or ''}".strip() or "no reason given"
    return S3_CODES.get(code) or STATUSES.get(status, UNKNOWN), f"{said} (HTTP {status})" if status else said


GCS_TEXTS: tuple[tuple[str, str, Verdict], ...] = (
    ("FileNotFoundError", "", MISSING),
    ("FileExistsError", "", EXISTS),
    ("OSError", r"^Forbidden[\s\S]*rate.?limit", THROTTLED),
    ("OSError", r"^Forbidden[\s\S]*quota.?exceeded", FULL),
    ("OSError", r"^Forbidden", DENIED),
    ("HttpError", r"Invalid Credentials[\s\S]*\b401\b", EXPIRED),
)
"""gcsfs turns some statuses into exceptions that only their class and text tell apart. Else the status counts."""


def _judge_gcs(error: BaseException) -> Verdict | None:
    name = type(error).__name__
    if type(error).__module__ not in ("builtins", "gcsfs.retry"):
        return None
    for kind, pattern, verdict in GCS_TEXTS:
        if name == kind and re.search(pattern, str(error), re.IGNORECASE):
            return verdict
    if name == "HttpError":
        return STATUSES.get(_number(getattr(error, "code", None)))
    # Whatever has "invalid" in its text is a ValueError to gcsfs, also a server in trouble: then the status tells.
    return STATUSES.get(_number(getattr(error, "http_status", None))) if name == "ValueError" else None


def _retry_after(error: BaseException) -> float | None:
    """What the header asks for, in seconds; it holds a number or a date."""
    headers = ((_response(error) or {}).get("ResponseMetadata") or {}).get("HTTPHeaders") or {}
    kept = (getattr(link, "retry_after", None) for link in chain(error))  # gcsfs drops it, our backend does not
    text = str(headers.get("retry-after") or next(filter(None, kept), ""))
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _judge_class(error: BaseException) -> Verdict | None:
    if isinstance(error, OSError) and error.errno in ERRNOS:
        return ERRNOS[error.errno]
    for kind in type(error).__mro__:
        verdict = CLASSES.get(f"{kind.__module__}.{kind.__qualname__}")
        if verdict is not None:
            return verdict
    return None


def _response(error: BaseException) -> Mapping[str, Any] | None:
    """The parsed S3 reply that the exception, or one that it was raised from, carries."""
    for link in chain(error):
        response = getattr(link, "response", None)
        if isinstance(response, Mapping):
            return response
    return None


def chain(error: BaseException, *, contexts: bool = False) -> Iterator[BaseException]:
    """The exception, what it was raised from, and so on; with ``contexts`` also what was being handled."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (link.__context__ if contexts else None)


def _regions(error: BaseException, place: Place) -> str:
    response = _response(error) or {}
    details = response.get("Error") or {}
    headers = (response.get("ResponseMetadata") or {}).get("HTTPHeaders") or {}
    region = headers.get("x-amz-bucket-region") or details.get("Region") or "not told"
    endpoint = details.get("Endpoint") or headers.get("location") or "not told"
    return (
        f" [asked: region {place.region or 'default'}, endpoint {place.endpoint or 'default'};"
        f" the bucket's: region {region}, endpoint {endpoint}]"
    )


def _said(error: BaseException) -> str:
    text = str(error).strip().lstrip(", ")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _number(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return 0
