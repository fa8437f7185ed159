"""The requests that RemoteStore makes, as one class for s3fs and one for gcsfs.

Each verb is one HTTP request by the libraries' low-level call, never a file object, a cached listing or
a multipart upload; the libraries' own retries are off. Errors leave here untranslated.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import json
import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, ClassVar

from ckptstore.errors import InvalidArgumentError, StoreError, TransientError
from ckptstore.stores.base import Body, ObjectInfo
from ckptstore.stores.remote_answers import check_length, check_listing, check_object
from ckptstore.stores.remote_errors import MISSING, Place, judge

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
PAGE = 1000
_SMALL = 1 << 20

Page = tuple[list[ObjectInfo], str | None]
_FORCED = {"use_listings_cache": False, "skip_instance_cache": True, "asynchronous": False}


class Upload(io.BytesIO):
    """The body of one put request, which notes when its last byte was taken.

    A file-like body is sent in pieces: no second copy in the send buffer, an event loop that stays
    responsive, and a way to see that an upload has stalled (the read time-out starts after the upload).
    """

    def __init__(self, content: bytes, size: int, content_type: str = "application/octet-stream") -> None:
        super().__init__(content)
        self.size = size
        self.content_type = content_type
        self.touched = time.monotonic()

    def read(self, size: int | None = -1, /) -> bytes:
        self.touched = time.monotonic()
        return super().read(size)

    def overdue(self, stall: float) -> str | None:
        """Why the upload should be given up, or None; ``stall``: how many seconds it may stand still."""
        idle = time.monotonic() - self.touched
        return f"no byte of the upload was taken for {idle:.0f} s" if idle > stall else None


class Backend(ABC):
    """One bucket as seen through one fsspec file system. Names are whole object names in the bucket."""

    scheme: ClassVar[str]
    library: ClassVar[str]

    def __init__(self, bucket: str, options: Mapping[str, Any], concurrency: int) -> None:
        self.bucket = bucket
        self.options: dict[str, Any] = {**options, **_FORCED}
        self.stall = CONNECT_SECONDS + READ_SECONDS
        self._concurrency = concurrency

    def open(self) -> Any:
        """A new file system that shares nothing with any other.

        Raises:
            InvalidArgumentError: the library is not installed.
        """
        try:
            return self._open()
        except ImportError as error:
            raise InvalidArgumentError(
                f"{self.scheme}:// URLs need {self.library}: pip install {self.library} ({error})"
            ) from error

    @abstractmethod
    def place(self, url: str) -> Place:
        """Where requests go, for messages."""

    @abstractmethod
    def upload(self, name: str, data: Body) -> Upload:
        """The body of a put request."""

    @abstractmethod
    async def put(self, fs: Any, name: str, body: Upload, create: bool) -> None:
        """Put in a single request; with ``create``, on the condition that there is no such object."""

    @abstractmethod
    async def get(self, fs: Any, name: str, start: int, end: int | None) -> bytes | memoryview:
        """The bytes ``[start, end)``, where ``end`` may lie beyond the object."""

    @abstractmethod
    async def info(self, fs: Any, name: str) -> ObjectInfo:
        """Size and time of an object."""

    @abstractmethod
    async def page(self, fs: Any, prefix: str, token: str | None, limit: int) -> Page:
        """One page of the listing, and the token of the next."""

    @abstractmethod
    async def delete(self, fs: Any, name: str) -> None:
        """Delete one object."""

    @abstractmethod
    async def close(self, fs: Any) -> None:
        """Close the connections."""

    @abstractmethod
    def _open(self) -> Any: ...


def check_options(given: Iterable[str], *kinds: type) -> None:
    """Refuse a mistyped option: some of the libraries ignore what they do not know.

    Raises:
        InvalidArgumentError: no constructor of ``kinds`` and their bases takes it.
    """
    makers = [vars(base)["__init__"] for kind in kinds for base in kind.__mro__[:-1] if "__init__" in vars(base)]
    known = {name for maker in makers for name in inspect.signature(maker).parameters}
    known = (known | {*_FORCED, "listings_expiry_time", "max_paths"}) - {"self", "args", "kwargs"}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]!r}?" if near else "see the documentation of s3fs or gcsfs"
            raise InvalidArgumentError(f"there is no storage option {name!r}: {advice}")


class S3Backend(Backend):
    """s3fs: every request is a ``call_s3`` of one botocore operation."""

    scheme = "s3"
    library = "s3fs"

    def __init__(self, bucket: str, options: Mapping[str, Any], concurrency: int) -> None:
        super().__init__(bucket, options, concurrency)
        config: dict[str, Any] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "max_pool_connections": max(32, 2 * concurrency),
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            # Compatible servers refuse checksum trailers and answer ranged reads with the checksum of the
            # whole object; our own digests are the proof.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **(options.get("config_kwargs") or {}),
        }
        self.options["config_kwargs"] = config
        self.stall = (config["connect_timeout"] or CONNECT_SECONDS) + (config["read_timeout"] or READ_SECONDS)
        self._tuned: Any = None

    def place(self, url: str) -> Place:
        client = self.options.get("client_kwargs") or {}
        env = os.environ
        endpoint = (
            self.options.get("endpoint_url")
            or client.get("endpoint_url")
            or env.get("AWS_ENDPOINT_URL_S3")
            or env.get("AWS_ENDPOINT_URL")
        )
        region = client.get("region_name") or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
        hidden = [self.options.get(name) for name in ("secret", "token", "password")]
        hidden += [client.get("aws_secret_access_key"), client.get("aws_session_token")]
        return Place(url, endpoint, region, frozenset(text for text in hidden if isinstance(text, str) and text))

    def upload(self, name: str, data: Body) -> Upload:
        content = bytes(data)
        return Upload(content, len(content))

    async def put(self, fs: Any, name: str, body: Upload, create: bool) -> None:
        await self._tune(fs)
        condition = {"IfNoneMatch": "*"} if create else {}
        reply = await self._call(fs, "put_object", Key=name, Body=body, **condition)
        if not reply.get("ETag"):
            await self._check_stored(fs, name, body)

    async def get(self, fs: Any, name: str, start: int, end: int | None) -> bytes | memoryview:
        ranged = {} if start == 0 and end is None else {"Range": _range(start, end)}
        reply = await self._call(fs, "get_object", Key=name, **ranged)
        async with reply["Body"] as stream:
            data: bytes = await stream.read()
        check_object(name, reply.get("ContentType"), reply.get("ETag"), reply.get("LastModified"))
        check_length(data, name, reply.get("ContentLength"), reply.get("ContentRange"))
        partial = reply["ResponseMetadata"]["HTTPStatusCode"] == 206 or reply.get("ContentRange")
        return data if partial or not ranged else data[start:end]

    async def info(self, fs: Any, name: str) -> ObjectInfo:
        reply = await self._call(fs, "head_object", Key=name)
        check_object(name, reply.get("ContentType"), reply.get("LastModified"))
        return ObjectInfo(name, int(reply["ContentLength"]), reply["LastModified"].timestamp())

    async def page(self, fs: Any, prefix: str, token: str | None, limit: int) -> Page:
        more = {"ContinuationToken": token} if token else {}
        reply = await self._call(fs, "list_objects_v2", Prefix=prefix, MaxKeys=limit, **more)
        check_listing(reply, prefix, "Name", "IsTruncated", "KeyCount", "Contents")
        found = [ObjectInfo(o["Key"], int(o["Size"]), o["LastModified"].timestamp()) for o in reply.get("Contents", ())]
        following = reply.get("NextContinuationToken")
        if reply.get("IsTruncated") and not following:
            raise StoreError(f"the listing of {prefix!r} is cut short without a continuation token")
        return found, following if reply.get("IsTruncated") else None

    async def delete(self, fs: Any, name: str) -> None:
        reply = await self._call(fs, "delete_object", Key=name)
        check_object(name, reply["ResponseMetadata"].get("HTTPHeaders", {}).get("content-type"))

    async def close(self, fs: Any) -> None:
        creator = getattr(fs, "_s3creator", None)
        if creator is not None:
            await creator.__aexit__(None, None, None)

    def _open(self) -> Any:
        import s3fs
        from aiobotocore.session import AioSession

        check_options(self.options, s3fs.S3FileSystem, AioSession)
        fs = s3fs.S3FileSystem(**self.options)
        fs.retries = 1  # the store above retries, and knows when it must not
        return fs

    async def _check_stored(self, fs: Any, name: str, body: Upload) -> None:
        """A gateway can answer 200 and an error document: only an ETag, or what is stored, proves a put.

        The size alone would not do for small bodies: one that replaces another is often just as long.
        """
        try:
            same = (await self.info(fs, name)).size == body.size
            if same and 0 < body.size <= _SMALL:
                same = await self.get(fs, name, 0, body.size) == body.getvalue()
        except Exception as error:
            if judge(error)[0] is not MISSING:
                raise
            same = False
        if not same:
            raise TransientError(f"the store acknowledged {name!r} but does not hold it whole")

    async def _call(self, fs: Any, operation: str, **arguments: Any) -> Any:
        return await fs._call_s3(operation, Bucket=self.bucket, **arguments)

    async def _tune(self, fs: Any) -> None:
        """Keep botocore from adding ``Expect: 100-continue`` to file-like bodies.

        aiohttp waits for the answer to it without any limit, and not every gateway gives one.
        """
        await fs.set_session()
        client = await fs.get_s3(self.bucket)
        if client is not self._tuned:
            from botocore.handlers import add_expect_header

            client.meta.events.unregister("before-call.s3", add_expect_header)
            self._tuned = client


class GCSBackend(Backend):
    """gcsfs: every request is one call of its JSON API request function, below its retry loop."""

    scheme = "gs"
    library = "gcsfs"

    def __init__(self, bucket: str, options: Mapping[str, Any], concurrency: int) -> None:
        super().__init__(bucket, options, concurrency)
        limit = options.get("requests_timeout")
        seconds = limit if isinstance(limit, int | float) else getattr(limit, "sock_read", None)
        self.stall = CONNECT_SECONDS + (seconds or READ_SECONDS)

    def place(self, url: str) -> Place:
        endpoint = self.options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
        token = self.options.get("token")
        hidden = token.values() if isinstance(token, Mapping) else [token]
        long = (text for text in hidden if isinstance(text, str) and len(text) > 16 and not os.path.exists(text))
        return Place(url, endpoint, secrets=frozenset(long))

    def upload(self, name: str, data: Body) -> Upload:
        # A random boundary: the fixed one of gcsfs could occur in the data, and would cut the object there.
        boundary = uuid.uuid4().hex
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps({'name': name})}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        view = memoryview(data)
        payload = view if view.c_contiguous else view.tobytes()
        content = b"".join([head.encode(), payload, f"\r\n--{boundary}--\r\n".encode()])
        return Upload(content, view.nbytes, f'multipart/related; boundary="{boundary}"')

    async def put(self, fs: Any, name: str, body: Upload, create: bool) -> None:
        path = f"{fs._location}/upload/storage/v1/b/{{}}/o"
        condition = {"ifGenerationMatch": "0"} if create else {}
        reply = await self._json(
            fs, "POST", path, self.bucket, uploadType="multipart", data=body,
            headers={"Content-Type": body.content_type}, **condition,
        )  # fmt: skip
        if reply.get("name") != name or int(reply.get("size", -1)) != body.size:
            await self._withdraw(fs, name, reply)
            raise TransientError(f"the store acknowledged {name!r} but does not hold it whole")

    async def get(self, fs: Any, name: str, start: int, end: int | None) -> bytes:
        ranged = {} if start == 0 and end is None else {"headers": {"Range": _range(start, end)}}
        status, headers, data = await self._request(fs, "GET", "b/{}/o/{}", self.bucket, name, alt="media", **ranged)
        marks = ("ETag", "Last-Modified", "X-Goog-Generation", "X-Goog-Hash")
        check_object(name, headers.get("Content-Type"), *map(headers.get, marks))
        if "Content-Encoding" not in headers:
            check_length(data, name, headers.get("Content-Length"), headers.get("Content-Range"))
        return data if status == 206 or not ranged else data[start:end]

    async def info(self, fs: Any, name: str) -> ObjectInfo:
        reply = await self._json(fs, "GET", "b/{}/o/{}", self.bucket, name)
        check_object(name, None, reply.get("updated"))
        return _gcs_info(reply)

    async def page(self, fs: Any, prefix: str, token: str | None, limit: int) -> Page:
        reply = await self._json(
            fs, "GET", "b/{}/o", self.bucket, prefix=prefix, maxResults=limit, pageToken=token,
            fields="kind,nextPageToken,items(name,size,updated)",
        )  # fmt: skip
        check_listing(reply, prefix, "kind", "items")
        return [_gcs_info(item) for item in reply.get("items", ())], reply.get("nextPageToken") or None

    async def delete(self, fs: Any, name: str) -> None:
        _, headers, _ = await self._request(fs, "DELETE", "b/{}/o/{}", self.bucket, name)
        check_object(name, headers.get("Content-Type"))

    async def close(self, fs: Any) -> None:
        if fs._session is not None:
            await fs._session.close()

    def _open(self) -> Any:
        # Else gcsfs asks for the type of each bucket over gRPC, and waits a minute where there is no gRPC.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        from aiohttp import ClientTimeout, TraceConfig
        from gcsfs.core import GCSFileSystem

        check_options(self.options, GCSFileSystem)
        limits = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        listener = TraceConfig()
        listener.on_request_end.append(_keep_answer)
        session = dict(self.options.get("session_kwargs") or {})
        session["trace_configs"] = [*session.get("trace_configs", ()), listener]
        return GCSFileSystem(**{"requests_timeout": limits, **self.options, "session_kwargs": session})

    async def _withdraw(self, fs: Any, name: str, reply: Mapping[str, Any]) -> None:
        """Delete what an upload made of its body, exactly that: else it would be in the way of the next try."""
        if reply.get("name") == name and "generation" in reply:
            with contextlib.suppress(Exception):  # the upload has failed all the same
                await self._request(
                    fs, "DELETE", "b/{}/o/{}", self.bucket, name, ifGenerationMatch=str(reply["generation"])
                )

    async def _request(self, fs: Any, method: str, path: str, *names: str, **rest: Any) -> tuple[int, Any, bytes]:
        function = type(fs)._request
        single = getattr(function, "__wrapped__", function)
        try:
            status, headers, _, contents = await single(fs, method, path, *names, **rest)
        except Exception as error:
            answer = _answer.get(None)
            if answer is not None:
                error.http_status, error.retry_after = answer  # type: ignore[attr-defined]
            raise
        return status, headers, contents

    async def _json(self, fs: Any, method: str, path: str, *names: str, **rest: Any) -> dict[str, Any]:
        _, _, contents = await self._request(fs, method, path, *names, **rest)
        reply = json.loads(contents)
        if not isinstance(reply, dict):
            raise TransientError(f"the answer to {method} is not a JSON object")
        return reply


_answer: ContextVar[tuple[int, str | None] | None] = ContextVar("status and Retry-After of the last answer")


async def _keep_answer(_session: Any, _context: Any, end: Any) -> None:
    """gcsfs turns a refusal into an exception without its headers. Called in the task of the request."""
    _answer.set((end.response.status, end.response.headers.get("Retry-After")))


def _gcs_info(item: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(item["name"], int(item.get("size", 0)), parse_time(item["updated"]))


def parse_time(text: str) -> float:
    """Seconds since 1970 of an RFC 3339 time with any number of fractional digits."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d)(\.\d+)?([Zz]|[+-]\d\d:\d\d)", text)
    if match is None:
        raise StoreError(f"the store gave a time that is none: {text[:40]!r}")
    zone = "+00:00" if match[3] in "Zz" else match[3]
    return datetime.fromisoformat(match[1] + zone).timestamp() + float(match[2] or 0)


def _range(start: int, end: int | None) -> str:
    return f"bytes={start}-" if end is None else f"bytes={start}-{end - 1}"
