"""S3 through obstore: the bodies of objects go by way of Rust, everything else by s3fs as before.

Nearly all bytes and all of the CPU time of a client are in bodies. Listing, looking and deleting stay with s3fs, which
also settles what obstore cannot know: endpoint, addressing, region and credentials are asked of its botocore client,
so profiles, SSO and roles work, and both send every request to the same place under the same name.

obstore steps aside for s3fs where it would do worse: in a forked child (its threads do not survive), on servers that
answer ranges with 200 or send clients to another region, and for uploads after one was too slow.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckptstore.errors import TransientError
from ckptstore.stores.base import Body
from ckptstore.stores.remote_answers import check_length, check_object
from ckptstore.stores.remote_backends import S3Backend, Upload

SLOWEST = 128 * 1024.0
"""Bytes per second. obstore does not tell how far an upload is: one slower than this is left to s3fs, which does.

One that stands still ends earlier where the kernel can tell (Linux: half a minute).
"""

_log = logging.getLogger(__name__)
_spoilt = False
"""Whether this process was forked from one that had obstore: its requests would wait for ever."""


_ONLY_OBSTORE = re.compile("AWS_(SERVER_SIDE_ENCRYPTION|SSE_.+|CHECKSUM_ALGORITHM|PROXY_.+)")
"""Variables that would change the requests of obstore and not those of s3fs, and cannot be overruled."""


def _note_fork() -> None:
    global _spoilt
    _spoilt = _spoilt or "obstore" in sys.modules


os.register_at_fork(after_in_child=_note_fork)

# What is followed exactly: used to ask botocore (so it acts on both libraries), translated below, or without any
# meaning for single requests. An option that is not here might change requests in a way that obstore does not know.
_FOLLOWED = {
    "": "anon key secret token username password profile endpoint_url use_ssl client_kwargs config_kwargs "
    "requester_pays cache_regions default_block_size default_fill_cache default_cache_type use_listings_cache "
    "listings_expiry_time max_paths max_concurrency fixed_upload_size local_expiry_check skip_instance_cache "
    "asynchronous",
    "client_kwargs ": "region_name endpoint_url aws_access_key_id aws_secret_access_key aws_session_token use_ssl "
    "api_version",
    "config_kwargs ": "connect_timeout read_timeout max_pool_connections retries region_name s3 use_dualstack_endpoint "
    "use_fips_endpoint request_checksum_calculation response_checksum_validation",
    "config_kwargs s3 ": "addressing_style use_accelerate_endpoint use_dualstack_endpoint us_east_1_regional_endpoint",
}


def installed() -> bool:
    """Whether obstore can be had here."""
    return importlib.util.find_spec("obstore") is not None


def untranslatable(options: Mapping[str, Any]) -> str | None:
    """The name of an option of s3fs that obstore would not follow exactly, or None."""
    config = options.get("config_kwargs") or {}
    given = (options, options.get("client_kwargs") or {}, config, config.get("s3") or {})
    for (group, followed), values in zip(_FOLLOWED.items(), given, strict=True):
        for name, value in values.items():
            if value is not None and name not in followed.split():
                return f"{group}{name}"
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if config.get(name, "when_required") != "when_required":
            return f"config_kwargs {name}"
    return None


class TimedUpload(Upload):
    """The body of a put that shows no progress: it has a time limit in place of one between reads."""

    def __init__(self, data: Any, size: int, too_slow: Callable[[], None]) -> None:
        super().__init__(data, size)
        self._too_slow = too_slow

    def overdue(self, stall: float) -> str | None:
        taken, limit = time.monotonic() - self.touched, stall + self.size / SLOWEST
        if taken <= limit:
            return None
        self._too_slow()
        return f"the upload was not through after {taken:.0f} s"


class Reply(Exception):
    """A refusal by the server, in the form that botocore gives it, so that one table judges both."""

    def __init__(self, message: str, response: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.response = response


class NotUnderstood(Exception):
    """An answer that obstore cannot do anything with, although it may be a good one."""


class Elsewhere(NotUnderstood):
    """A redirect."""


@dataclass(frozen=True, slots=True)
class _Clients:
    """Two stores of obstore on one bucket: time-outs are theirs, not those of a request."""

    fs: Any
    credentials: tuple[str | None, ...]
    reading: Any
    writing: Any


class ObstoreBackend(S3Backend):
    """Bodies by obstore, the rest by s3fs."""

    def __init__(self, bucket: str, options: Mapping[str, Any], concurrency: int) -> None:
        super().__init__(bucket, options, concurrency)
        self._made: _Clients | None = None
        self._aside: set[str] = set()
        """What s3fs does from now on: "put", "range", "all"."""

    def upload(self, name: str, data: Body) -> Upload:
        plain = super().upload(name, data)
        if self._is_aside("put"):
            return plain
        slow = partial(self._step_aside, "put", "an upload was too slow")
        return TimedUpload(plain.getvalue(), plain.size, slow)

    async def put(self, fs: Any, name: str, body: Upload, create: bool) -> None:
        clients = await self._clients(fs) if isinstance(body, TimedUpload) else None
        if clients is None:
            await super().put(fs, name, body, create)
            return
        import obstore

        try:
            with _understood():
                await obstore.put_async(
                    clients.writing, name, body.getvalue(),
                    mode="create" if create else "overwrite", use_multipart=False,
                )  # fmt: skip
        except Elsewhere:
            self._step_aside("all", "the bucket is elsewhere")
            await super().put(fs, name, body, create)
        except NotUnderstood:  # no ETag
            await self._check_stored(fs, name, body)

    async def get(self, fs: Any, name: str, start: int, end: int | None) -> bytes | memoryview:
        ranged = not (start == 0 and end is None)
        clients = None if self._is_aside("range" if ranged else "all") else await self._clients(fs)
        if clients is None:
            return await super().get(fs, name, start, end)
        import obstore

        options: Any = {"range": {"offset": start} if end is None else (start, end)} if ranged else None
        try:
            with _understood():
                reply = await obstore.get_async(clients.reading, name, options=options)
                data = memoryview(await reply.bytes_async())
        except NotUnderstood as error:
            found = await super().get(fs, name, start, end)  # an answer that nobody understands is no reason
            what = "all" if isinstance(error, Elsewhere) or not ranged else "range"
            self._step_aside(what, str(error))
            return found
        meta = reply.meta
        check_object(name, reply.attributes.get("Content-Type"), meta["e_tag"], meta["last_modified"].timestamp() > 0)
        first, last = reply.range
        check_length(data, name, last - first)
        return data

    async def close(self, fs: Any) -> None:
        self._made = None
        await super().close(fs)

    def _is_aside(self, what: str) -> bool:
        return bool({what, "all"} & self._aside)

    def _step_aside(self, what: str, why: str) -> None:
        _log.debug("s3://%s: %s by s3fs from now on: %s", self.bucket, what, why)
        self._aside = self._aside | {what}

    async def _clients(self, fs: Any) -> _Clients | None:
        """The clients for the credentials of this moment; None where s3fs must do it, or says best why it cannot."""
        if _spoilt or self._is_aside("all") or any(map(_ONLY_OBSTORE.fullmatch, os.environ)):
            return None
        await fs.set_session()
        client = await fs.get_s3(self.bucket)
        credentials: tuple[str | None, ...] = ()
        if not fs.anon:
            holder = client._request_signer._credentials
            if holder is None:
                return None
            found = await holder.get_frozen_credentials()
            credentials = (found.access_key, found.secret_key, found.token)
        made = self._made
        if made is None or made.fs is not fs or made.credentials != credentials:
            try:
                self._made = made = await self._make(fs, client, credentials)
            except Exception as error:  # noqa: BLE001  (whatever it is, s3fs needs none of it)
                self._step_aside("all", f"cannot set up obstore: {type(error).__name__}")
                return None
        return made

    async def _make(self, fs: Any, client: Any, credentials: tuple[str | None, ...]) -> _Clients:
        S3Store: Any = importlib.import_module("obstore.store").S3Store  # noqa: N806
        endpoint, virtual, region = await self._endpoint(client)
        limits = self.options["config_kwargs"]
        network: dict[str, Any] = {
            "allow_http": endpoint.startswith("http:"),
            "connect_timeout": _duration(limits["connect_timeout"]),
            "timeout": "7d",  # for a whole request; the limits that count are others
            "pool_idle_timeout": "15s",
        }
        if endpoint.startswith("https:"):
            network["root_certificate"] = _certificates(fs)
        settings: dict[str, Any] = {
            # Each of these also keeps a variable of the environment, which only obstore reads, from having a say.
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,
            "virtual_hosted_style_request": virtual,
            "region": region,
            "skip_signature": not credentials,
            "request_payer": bool(self.options.get("requester_pays")),
            "conditional_put": "etag",
            "unsigned_payload": False,
            "s3_express": False,
            "retry_config": {"max_retries": 0},  # the store above retries, and knows when it must not
        }
        if credentials:
            access, secret, token = credentials
            fixed = {"access_key_id": access, "secret_access_key": secret, "token": token, "expires_at": None}
            settings["credential_provider"] = lambda: fixed
        patient = {**network, "read_timeout": _duration(limits["read_timeout"])}
        return _Clients(
            fs,
            credentials,
            reading=S3Store(self.bucket, client_options=patient, **settings),
            writing=S3Store(self.bucket, client_options=network, **settings),
        )

    async def _endpoint(self, client: Any) -> tuple[str, bool, str]:
        """Where botocore would send a request for an object, whether the host names the bucket, and the region."""
        # A request that is answered before it is sent, of a kind that nobody makes in earnest.
        client.meta.events.register_first("before-call.s3.GetObjectAcl", _tell, unique_id="ckptstore-endpoint")
        told = await client.get_object_acl(Bucket=self.bucket, Key="x")
        url = urlsplit(told["Url"])
        base, virtual = url.path.removesuffix("/x"), True
        if base.endswith(f"/{self.bucket}"):
            base, virtual = base.removesuffix(f"/{self.bucket}"), False
        region = told["Region"] or client.meta.region_name
        return f"{url.scheme}://{url.netloc}{base}", virtual, _REGIONS.get(region, region)


@dataclass(frozen=True, slots=True)
class _NotSent:
    status_code: int = 200


def _tell(params: Mapping[str, Any], context: Mapping[str, Any], **_: object) -> tuple[_NotSent, dict[str, Any]]:
    return _NotSent(), {"Url": params["url"], "Region": (context.get("signing") or {}).get("region")}


_REGIONS = {None: "us-east-1", "aws-global": "us-east-1"}
"""What botocore signs for where nobody has named a region."""


def _duration(seconds: object) -> str:
    """For obstore; botocore takes None for "no limit"."""
    return f"{max(1, round(float(str(seconds)) * 1000))}ms" if seconds is not None else "7d"


def _certificates(fs: Any) -> bytes:
    """The authorities that s3fs trusts (obstore trusts those of the system besides)."""
    from botocore.httpsession import get_cert_path

    chosen = fs.session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    return Path(chosen or get_cert_path(True)).read_bytes()


# --- errors -------------------------------------------------------------------------------------

_STATUS = re.compile(r"status code: (\d{3})")
_TAG = re.compile(r"(?s)<(Code|Message|Region|Endpoint)>(.*?)</\1>")
_KIND = re.compile(r"\bkind: (\w+)")
_REASON = re.compile(r'(?:message: |error: |ConnectError\(\s*)"([^"]{1,200})"')
_WITHOUT_STATUS = {
    "AlreadyExistsError": 412,
    "PreconditionError": 412,
    "PermissionDeniedError": 403,
    "UnauthenticatedError": 401,
    "FileNotFoundError": 404,
}


@contextmanager
def _understood() -> Iterator[None]:
    """Give the errors of obstore the forms that :func:`ckptstore.stores.remote_errors.judge` knows."""
    try:
        yield
    except (MemoryError, TransientError):
        raise
    except Exception as error:
        raise explain(error) from error


def explain(error: Exception) -> Exception:
    """An exception that says the same as one of obstore, whose class tells little and whose text tells all."""
    text, _, debug = str(error).partition("\n\nDebug source:")
    status = _STATUS.search(text)
    number = int(status[1]) if status else _WITHOUT_STATUS.get(type(error).__name__, 0)
    if number:
        details = dict(_TAG.findall(text))
        return Reply(text, {"Error": details, "ResponseMetadata": {"HTTPStatusCode": number}})
    if "edirect" in text:
        return Elsewhere(text)
    if "HttpError" in debug or "HTTP error" in text:
        return _failed_transport(text, debug)
    return NotUnderstood(text) if type(error).__name__ == "GenericError" else error


def _failed_transport(text: str, debug: str) -> Exception:
    reasons = [*dict.fromkeys([*_KIND.findall(debug), *_REASON.findall(debug)])]
    said = f"{text} ({', '.join(reasons)})" if reasons else text
    if "certificate" in said.lower() or "InvalidCertificate" in debug:
        return ssl.SSLCertVerificationError(1, said)
    return TimeoutError(said) if "TimedOut" in debug else ConnectionError(said)
