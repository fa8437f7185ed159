"""RemoteStore on real servers, and on servers that misbehave."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import s3fs

from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    InvalidArgumentError,
    ObjectExistsError,
    ObjectNotFoundError,
    RepositoryNotFoundError,
    RetriesExhaustedError,
    StoreError,
    StoreFullError,
    ThrottledError,
    TransientError,
)
from ckptstore.stores import RemoteStore, RetryPolicy, RetryStore, Store, probe_conditional_put, remote, remote_obstore
from ckptstore.stores.remote_backends import S3Backend, parse_time

if TYPE_CHECKING:
    from tests import servers
    from tests.servers import Reply, Request, ScriptedServer, s3_error
else:
    import servers
    from servers import Reply, Request, ScriptedServer, s3_error

pytestmark = pytest.mark.timeout(180)

KEY = "manifests/000000000001-000001.json"
LISTING = b"<ListBucketResult><Name>bucket</Name></ListBucketResult>"
FAST = RetryPolicy(attempts=5, base=0.001, cap=0.01)
VERBS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put(KEY, b"x"),
    "create": lambda store: store.put(KEY, b"x", if_absent=True),
    "get": lambda store: store.get(KEY),
    "range": lambda store: store.get(KEY, 1, 2),
    "info": lambda store: store.info(KEY),
    "list": lambda store: list(store.list("manifests/")),
    "delete": lambda store: store.delete(KEY),
}
every_verb = pytest.mark.parametrize("verb", VERBS)
both = pytest.mark.parametrize(
    ("kind", "transport"), [("s3", "fsspec"), ("s3", "obstore"), ("gcs", "fsspec")], indirect=["transport"]
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whatever concerns S3 is run over both transports."""
    chosen = any("transport" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if not chosen and not {"gcs", "faulty_gcs"} & {*metafunc.fixturenames}:
        metafunc.parametrize("transport", remote.TRANSPORTS, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """What carries the bodies of stores that are opened without a word about it."""
    with pytest.MonkeyPatch.context() as patch:
        name: str = getattr(request, "param", "fsspec")
        patch.setattr(remote, "_PREFERRED", name)
        yield name


def opened(bucket: Any, prefix: str | None = None, **options: Any) -> RemoteStore:
    """A store in the bucket, by default under a prefix of its own."""
    prefix = bucket.prefix() if prefix is None else prefix
    return RemoteStore(bucket.scheme, bucket.name, prefix, storage_options={**bucket.storage_options, **options})


@pytest.fixture
def bucket(request: pytest.FixtureRequest, kind: str) -> Any:
    """The bucket of that kind."""
    return request.getfixturevalue(kind)


@contextmanager
def scripted(script: Callable[[Request], Reply | None], bucket: Any = None, **options: Any) -> Iterator[Any]:
    """A scripted S3 server (before the real one, if given) and a store on it."""
    with ScriptedServer(script, bucket.endpoint if bucket else None) as server:
        name, prefix = (bucket.name, bucket.prefix()) if bucket else ("bucket", "run")
        settings = {"key": servers.KEY, "secret": servers.SECRET, "client_kwargs": {"region_name": "us-east-1"}}
        with RemoteStore(
            "s3", name, prefix, storage_options={**settings, "endpoint_url": server.endpoint, **options}
        ) as store:
            yield server, store


@contextmanager
def scripted_gcs(script: Callable[[Request], Reply | None], **options: Any) -> Iterator[Any]:
    """A scripted Google Cloud Storage server and a store on it."""
    with ScriptedServer(script) as server:
        settings = {"token": "anon", "endpoint_url": server.endpoint, **options}
        with RemoteStore("gs", "bucket", "run", storage_options=settings) as store:
            yield server, store


@pytest.fixture(scope="module")
def faulty(transport: str) -> Iterator[Any]:
    """A scripted S3 server and a store on it, shared because opening a client takes its time."""
    with scripted(lambda _: None) as pair:
        yield pair


@pytest.fixture(scope="module")
def faulty_gcs() -> Iterator[Any]:
    """The same for Google Cloud Storage."""
    with scripted_gcs(lambda _: None) as pair:
        yield pair


# --- what must never look like an empty store ---------------------------------------------------


@every_verb
def test_wrong_secret(s3: Any, verb: str) -> None:
    """Wrong credentials are an AccessError for every verb, and the message holds no secret."""
    with opened(s3, secret="not-the-secret") as store, pytest.raises(AccessError) as caught:
        VERBS[verb](store)
    assert "not-the-secret" not in "".join(traceback.format_exception(caught.value))
    assert "credentials" in str(caught.value)
    assert s3.name in str(caught.value)


def test_no_credentials(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing credentials are an AccessError that says where to put them."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    with opened(s3, key=None, secret=None) as store, pytest.raises(AccessError, match="storage_options"):
        list(store.list())


@both
@pytest.mark.parametrize("verb", ["get", "range", "info", "list"])
def test_missing_bucket(bucket: Any, verb: str) -> None:
    """A missing bucket is neither an empty one nor a missing object."""
    store = RemoteStore(bucket.scheme, "no-such-bucket-here", "run", storage_options=bucket.storage_options)
    with store, pytest.raises(RepositoryNotFoundError, match="no-such-bucket-here"):
        VERBS[verb](store)


@pytest.mark.parametrize(
    ("kind", "transport"),
    [("gcs", "fsspec"), ("s3_no_conditions", "fsspec"), ("s3_no_conditions", "obstore")],
    indirect=["transport"],
)
@pytest.mark.parametrize("verb", ["put", "create", "delete"])
def test_missing_bucket_when_writing(bucket: Any, verb: str) -> None:
    """No bucket is made on the way, and nothing is taken for deleted (SeaweedFS makes buckets for an admin)."""
    store = RemoteStore(bucket.scheme, "no-such-bucket-here", "run", storage_options=bucket.storage_options)
    with store, pytest.raises(RepositoryNotFoundError, match="no-such-bucket-here"):
        VERBS[verb](store)


@both
@every_verb
def test_endpoint_down(bucket: Any, verb: str) -> None:
    """Where nothing listens every verb raises TransientError; no listing is empty, no object missing."""
    with opened(bucket, endpoint_url=servers.unused_endpoint()) as store, pytest.raises(TransientError):
        VERBS[verb](store)


def test_endpoint_without_a_name() -> None:
    """A host name that does not resolve is a TransientError, within seconds."""
    options = {"key": "k", "secret": "s", "endpoint_url": "http://no-such-host.invalid:9"}
    with RemoteStore("s3", "bucket", storage_options=options) as store, pytest.raises(TransientError):
        list(store.list())


def test_empty_prefix_of_a_bucket_is_empty(s3: Any) -> None:
    """A prefix without objects is an empty store, also after its last object was deleted."""
    with opened(s3) as store:
        store.put(KEY, b"x")
        store.delete(KEY)
        assert list(store.list()) == list(store.list("manifests/")) == []


def test_neighbours_are_not_listed(s3: Any) -> None:
    """The store at ``exp`` neither lists nor deletes anything of ``exp2``."""
    prefix = s3.prefix()
    with opened(s3, prefix) as one, opened(s3, prefix + "2") as two:
        one.put("a/1", b"1")
        two.put("a/1", b"2")
        assert [item.key for item in one.list()] == ["a/1"]
        one.delete("a/1")
        assert list(one.list()) == []
        assert two.get("a/1") == b"2"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<IsTruncated>true</IsTruncated>", StoreError),
        ("<IsTruncated>true</IsTruncated><NextContinuationToken>same</NextContinuationToken>", StoreError),
        ("<IsTruncated>true", TransientError),
    ],
)
def test_listing_that_cannot_be_complete(page: str, expected: type[StoreError]) -> None:
    """A listing that is cut short, goes in circles or is no XML raises: it proves nothing."""
    body = f'<?xml version="1.0"?><ListBucketResult>{page}' + ("</ListBucketResult>" if page.endswith(">") else "")
    with scripted(lambda _: Reply(200, body.encode())) as (_, store), pytest.raises(expected) as caught:
        list(store.list())
    assert type(caught.value) is expected


def test_second_page_fails(s3: Any) -> None:
    """An error on a later page is an error of the listing, not its end."""

    def script(request: Request) -> Reply | None:
        return s3_error(503, "SlowDown") if "continuation-token" in request.query else None

    prefix = s3.prefix()
    with opened(s3, prefix) as store:
        for number in range(3):
            store.put(f"a/{number}", b"")
    with scripted(script, s3) as (server, store), pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "PAGE", 2)
        store._root = f"{prefix}/"
        with pytest.raises(TransientError):
            list(store.list())
        server.script = lambda _: None
        assert [item.key for item in store.list()] == ["a/0", "a/1", "a/2"]


def test_folder_markers_are_no_objects(s3: Any) -> None:
    """The empty objects with which consoles mark folders do not make a store look used."""
    prefix = s3.prefix()
    fs = s3fs.S3FileSystem(**s3.storage_options, skip_instance_cache=True)
    fs.call_s3("put_object", Bucket=s3.name, Key=f"{prefix}/manifests/", Body=b"")
    with opened(s3, prefix) as store:
        assert list(store.list()) == []


# --- create-only --------------------------------------------------------------------------------


@both
def test_probe_finds_conditions(bucket: Any) -> None:
    """A server that honours create-only puts is recognised, and the probe leaves nothing."""
    with opened(bucket) as store:
        assert store.traits.conditional_put is None
        assert probe_conditional_put(store) is True
        assert list(store.list()) == []


def test_probe_finds_ignored_conditions(s3_no_conditions: Any) -> None:
    """A server that answers 200 and overwrites is recognised, and the probe leaves nothing."""
    with opened(s3_no_conditions) as store:
        assert probe_conditional_put(store) is False
        assert list(store.list()) == []


def test_probe_finds_refused_conditions() -> None:
    """A server that does not implement the header is one without conditional puts."""

    def script(request: Request) -> Reply:
        return s3_error(501, "NotImplemented") if request.method == "PUT" else Reply(204)

    with scripted(script) as (_, store):
        assert probe_conditional_put(store) is False


def test_probe_believes_no_refusal_of_a_changed_body() -> None:
    """A server that says "exists" but overwrites all the same does not pass the probe."""
    held: list[bytes] = []

    def script(request: Request) -> Reply:
        if request.method == "PUT":
            held.append(request.body)
            return s3_error(412, "PreconditionFailed") if len(held) > 1 else Reply(200, b"", {"ETag": '"e"'})
        body = b"" if request.method == "DELETE" else held[-1]
        return Reply(200, body, {"Last-Modified": "Tue, 01 Dec 2026 00:00:00 GMT"})

    with scripted(script) as (_, store):
        assert probe_conditional_put(store) is False


@both
def test_lost_reply_of_a_create(bucket: Any) -> None:
    """A create whose reply was lost is a success on the retry, whoever resends; other bytes are refused as ever."""
    body, lost = os.urandom(3 << 20), [1, 2, 3]

    def script(request: Request) -> Reply | None:
        if request.method in ("PUT", "POST") and lost:
            lost.pop()
            return Reply(forward=True, close=True)
        return None

    with ScriptedServer(script, bucket.endpoint) as server, opened(bucket, endpoint_url=server.endpoint) as store:
        with pytest.raises(TransientError):
            store.put(KEY, body, if_absent=True)
        assert store.get(KEY) == body
        RetryStore(store, FAST).put(KEY, body, if_absent=True)
        assert not lost
        with pytest.raises(ObjectExistsError) as caught:
            store.put(KEY, b"yours", if_absent=True)
        assert caught.value.key == KEY
        assert store.get(KEY) == body


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted", "ConcurrentModification", "Other"])
def test_conflict_is_not_settled(code: str) -> None:
    """A 409 promises nothing about the object: it is tried again, never taken for "exists"."""
    with scripted(lambda _: s3_error(409, code)) as (_, store), pytest.raises(TransientError):
        store.put(KEY, b"x", if_absent=True)


def test_readback_that_fails_is_not_a_conflict() -> None:
    """When the object behind a 412 cannot be read, the outcome is unknown and not "exists"."""

    def script(request: Request) -> Reply:
        return s3_error(412, "PreconditionFailed") if request.method == "PUT" else s3_error(503, "SlowDown")

    with scripted(script) as (_, store), pytest.raises(TransientError):
        store.put(KEY, b"x", if_absent=True)


def test_emulated_create(s3_no_conditions: Any) -> None:
    """For one writer at a time, create-only works on a server without conditions."""
    bucket = s3_no_conditions
    store = RemoteStore(
        bucket.scheme, bucket.name, bucket.prefix(), storage_options=bucket.storage_options, emulate_create=True
    )
    with store:
        assert store.traits.conditional_put is False
        for _ in range(2):
            store.put(KEY, b"mine", if_absent=True)
        with pytest.raises(ObjectExistsError):
            store.put(KEY, b"yours", if_absent=True)
        assert store.get(KEY) == b"mine"


# --- requests -----------------------------------------------------------------------------------


def test_big_put_is_one_request(s3: Any) -> None:
    """48 MiB go up in one plain PUT: no multipart upload, no trailer, no waiting for a 100."""
    body = os.urandom(1 << 20) * 48
    with scripted(lambda _: None, s3) as (server, store):
        store.put(KEY, memoryview(bytearray(body)), if_absent=True)
        (request,) = server.requests
        assert request.method == "PUT"
        assert len(request.body) == len(body)
        assert request.headers["if-none-match"] == "*"
        assert not {"expect", "x-amz-trailer", "transfer-encoding", "content-encoding"} & set(request.headers)
        assert not {"uploads", "uploadId"} & set(request.query)
        assert store.get(KEY) == body
        uploads = store._opened[0].call_s3("list_multipart_uploads", Bucket=s3.name)
        assert not uploads.get("Uploads")
        store.delete(KEY)


def test_body_may_hold_any_boundary(gcs: Any) -> None:
    """Bytes that look like the framing of an upload are stored like any others."""
    body = b"\r\n--==0==--\r\n\n--==0==--" * 3
    with opened(gcs) as store:
        store.put(KEY, body)
        assert store.get(KEY) == body


@pytest.mark.parametrize("ranged", [206, 200])
def test_ranges_of_odd_servers(ranged: int) -> None:
    """A server that ignores ranges, or answers them with 200, gives the same bytes."""
    body = bytes(range(100))

    def script(request: Request) -> Reply:
        if ranged == 206:
            return Reply(200, body[10:20], {"Content-Range": "bytes 10-19/100", "ETag": '"e"'})
        return Reply(200, body, {"ETag": '"e"'})

    with scripted(script) as (_, store):
        assert store.get(KEY, 10, 20) == body[10:20]


def test_short_body(s3: Any) -> None:
    """A body that ends early is a TransientError; the retry gets all of it."""
    body, cuts = os.urandom(100_000), [0.0, 0.6, 0.99]

    def script(request: Request) -> Reply | None:
        if request.method == "GET" and cuts:
            size = int(len(body) * cuts.pop())
            return Reply(200, body[:size], announce=len(body))
        return None

    with scripted(script, s3) as (_, store):
        store.put(KEY, body)
        with pytest.raises(TransientError):
            store.get(KEY)
        assert RetryStore(store, FAST).get(KEY) == body
        assert not cuts


def test_acknowledged_but_not_stored() -> None:
    """A 200 without an ETag, as with an error document in it, is not believed."""

    def script(request: Request) -> Reply:
        error = s3_error(200, "InternalError")
        return error if request.method == "PUT" else Reply(200, b"", {"Last-Modified": "Tue, 01 Dec 2026 00:00:00 GMT"})

    with scripted(script) as (_, store), pytest.raises(TransientError):
        store.put(KEY, b"12345")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "AccessDenied", AccessError),
        (400, "InvalidArgument", StoreError),
        (404, "NoSuchBucket", RepositoryNotFoundError),
        (507, "XMinioStorageFull", StoreFullError),
        (400, "RequestTimeout", TransientError),
        (400, "XAmzContentSHA256Mismatch", TransientError),
        (429, "TooManyRequests", ThrottledError),
        (500, "InternalError", TransientError),
        (502, "BadGateway", TransientError),
        (503, "SlowDown", ThrottledError),
        (504, "GatewayTimeout", TransientError),
    ],
)
@pytest.mark.parametrize("verb", ["put", "create", "get", "list", "delete"])
def test_each_failure_is_one_request(
    faulty: Any, status: int, code: str, expected: type[CkptStoreError], verb: str
) -> None:
    """Nothing below us tries again: each failure is seen at its first reply. What may pass succeeds on try 4."""
    server, store = faulty
    good = Reply(
        200,
        {"list": b"<ListBucketResult><Name>bucket</Name></ListBucketResult>", "get": b"x"}.get(verb, b""),
        {"ETag": '"e"'},
    )
    replies = [s3_error(status, code)] * 4
    server.script = lambda _: replies.pop() if replies else good
    server.requests.clear()
    with pytest.raises(expected) as caught:
        VERBS[verb](store)
    assert len(server.requests) == 1
    assert type(caught.value) is expected
    retrying = RetryStore(store, FAST)
    if issubclass(expected, TransientError):
        VERBS[verb](retrying)
        assert len(server.requests) == 5
    else:
        with pytest.raises(expected):
            VERBS[verb](retrying)
        assert len(server.requests) == 2


@every_verb
def test_dropped_connection(verb: str) -> None:
    """A connection that ends without an answer is a TransientError, after at most the one resend of aiohttp."""
    with scripted(lambda _: Reply(close=True)) as (server, store):
        with pytest.raises(TransientError):
            VERBS[verb](store)
        assert len(server.requests) <= 2


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, "invalid argument", StoreError),
        (401, "Anonymous caller", AccessError),
        (403, "no permission", AccessError),
        (408, "", TransientError),
        (429, "rateLimitExceeded", ThrottledError),
        (500, "", TransientError),
        (502, "", TransientError),
        (503, "", ThrottledError),
        (503, "invalid backend state", ThrottledError),
        (500, "invalid backend state", TransientError),
        (507, "", StoreFullError),
    ],
)
@pytest.mark.parametrize("verb", ["create", "get", "list", "delete"])
def test_each_gcs_failure_is_one_request(
    faulty_gcs: Any, status: int, message: str, expected: type[CkptStoreError], verb: str
) -> None:
    """The same for Google Cloud Storage, whose library tries six times if it is let."""
    server, store = faulty_gcs
    server.script = lambda _: Reply(status, b'{"error": {"code": %d, "message": "%s"}}' % (status, message.encode()))
    server.requests.clear()
    with pytest.raises(expected) as caught:
        VERBS[verb](store)
    assert len(server.requests) == 1
    assert type(caught.value) is expected


@pytest.mark.parametrize(
    "reply",
    [
        s3_error(301, "PermanentRedirect", "<Endpoint>bucket.elsewhere.example</Endpoint>"),
        s3_error(400, "AuthorizationHeaderMalformed", "<Region>eu-west-3</Region>"),
    ],
)
def test_wrong_region(reply: Reply) -> None:
    """A redirect fails fast and names the region and endpoint asked for and those of the bucket."""
    with scripted(lambda request: reply if request.method != "HEAD" else Reply(400)) as (server, store):
        with pytest.raises(StoreError) as caught:
            store.put(KEY, b"x")
        assert not isinstance(caught.value, TransientError)
        assert "us-east-1" in str(caught.value)
        assert server.endpoint in str(caught.value)
        assert "eu-west-3" in str(caught.value) or "bucket.elsewhere.example" in str(caught.value)
        assert len(server.requests) <= 3


@pytest.mark.parametrize("verb", ["put", "get", "list", "delete", "info"])
def test_silent_server(verb: str) -> None:
    """A server that takes a request and never answers costs the read time-out, not the run."""
    limits = {"connect_timeout": 1, "read_timeout": 1}
    with scripted(lambda _: Reply(hang=True), config_kwargs=limits) as (_, store):
        begin = time.monotonic()
        with pytest.raises(TransientError):
            VERBS[verb](store)
        assert time.monotonic() - begin < 8


@both
def test_server_that_stops_reading(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload of which no byte is taken any more is given up, although the connection stands."""
    import socket

    monkeypatch.setattr(remote_obstore, "SLOWEST", 1e9)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts in the kernel, and never reads
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        s3 = {"key": "k", "secret": "s", "config_kwargs": {"connect_timeout": 1, "read_timeout": 1}}
        options: dict[str, Any] = s3 if kind == "s3" else {"token": "anon", "requests_timeout": 300}
        store = RemoteStore(
            "s3" if kind == "s3" else "gs", "bucket", storage_options={**options, "endpoint_url": endpoint}
        )
        store._backend.stall = 2.0
        with store, pytest.raises(TransientError, match=r"no byte|not through"):
            store.put(KEY, bytes(48 << 20))
        assert not isinstance(store._backend.upload(KEY, b""), remote_obstore.TimedUpload)  # s3fs tries next


def test_failed_puts_free_their_bodies() -> None:
    """A buffer whose put failed is free at once, without waiting for the garbage collector."""
    buffer = bytearray(1 << 20)
    with scripted(lambda _: s3_error(503, "SlowDown")) as (_, store):
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(TransientError):
                store.put(KEY, memoryview(buffer), if_absent=True)
            buffer.extend(b"no view of it is left")
        finally:
            gc.enable()


def test_expired_credentials_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that expire in the middle of a run are fetched anew once; if they stay bad it is an AccessError."""
    expired = [True]

    def script(request: Request) -> Reply:
        return s3_error(400, "ExpiredToken") if expired[0] else Reply(200, b"x", {"ETag": '"e"'})

    with scripted(script) as (_, store):
        with pytest.raises(AccessError):  # they were read a moment ago
            store.get(KEY)
        monkeypatch.setattr(remote, "_FRESH_SECONDS", 0.0)
        before = store._opened[0]
        with pytest.raises(TransientError):
            store.get(KEY)
        assert store._opened[0] is not before
        expired[0] = False
        assert store.get(KEY) == b"x"


# --- options ------------------------------------------------------------------------------------


def test_options_of_the_user_win() -> None:
    """Options reach the client; config_kwargs are merged with ours; caches stay off."""
    options = {
        "use_listings_cache": True,
        "requester_pays": True,
        "config_kwargs": {"read_timeout": 5, "retries": {"max_attempts": 2}, "max_pool_connections": 7},
    }
    given = {name: dict(value) if isinstance(value, dict) else value for name, value in options.items()}
    backend = S3Backend("bucket", options, 16)
    config = backend.options["config_kwargs"]
    assert (config["read_timeout"], config["connect_timeout"], config["max_pool_connections"]) == (5, 10.0, 7)
    assert config["retries"] == {"max_attempts": 2}
    assert config["request_checksum_calculation"] == config["response_checksum_validation"] == "when_required"
    assert backend.options["use_listings_cache"] is False
    assert backend.options["requester_pays"] is True
    assert options == given
    assert S3Backend("bucket", {}, 40).options["config_kwargs"]["max_pool_connections"] == 80


def test_headers_and_addressing() -> None:
    """Requester-pays and encryption headers are sent, addressing styles kept, anonymous requests not signed."""
    reply = Reply(200, b"", {"ETag": '"e"'})
    options = {"requester_pays": True, "s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}
    with scripted(lambda _: reply, **options) as (server, store):
        store.put(KEY, b"x")
        (request,) = server.requests
        assert request.headers["x-amz-request-payer"] == "requester"
        assert request.headers["x-amz-server-side-encryption"] == "AES256"
        assert request.path == f"/bucket/run/{KEY}"
        assert "authorization" in request.headers
    with scripted(lambda _: reply, anon=True, key=None, secret=None) as (server, store):
        store.get(KEY)
        assert "authorization" not in server.requests[0].headers


@pytest.mark.parametrize("options", [{"no_such_option": 1}, {"config_kwargs": {"no_such_option": 1}}])
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    """An option that the client does not know is an error of ours at the first use, not a hang."""
    with pytest.raises((InvalidArgumentError, StoreError)):
        RemoteStore("s3", "bucket", storage_options={"key": "k", "secret": "s", **options}).get(KEY)


def test_bad_gcs_token() -> None:
    """A token that cannot be used is refused when the store is opened, and is not shown."""
    with pytest.raises(CkptStoreError) as caught:
        RemoteStore("gs", "bucket", storage_options={"token": {"refresh_token": "very-secret-token-text"}})
    assert "very-secret-token-text" not in str(caught.value)


# --- processes and threads ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@both
def test_fork(bucket: Any) -> None:
    """Forked children read and write with the store of their parent, which goes on working."""
    with opened(bucket) as store:
        store.put("parent", b"0")
        children = []
        for number in range(1, 5):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    store.put(f"child/{number}", store.get("parent") * number, if_absent=True)
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        assert [_exit_code(pid) for pid in children] == [0] * 4
        assert sorted((item.key, item.size) for item in store.list("child/")) == [
            (f"child/{number}", number) for number in range(1, 5)
        ]
        store.put("parent", b"again")


def _exit_code(pid: int, seconds: float = 60.0) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    pytest.fail("a forked child hangs")


@both
def test_no_stale_listings(bucket: Any) -> None:
    """One instance sees at once what another one puts and deletes, whatever caching was asked for."""
    prefix = bucket.prefix()
    with opened(bucket, prefix, use_listings_cache=True) as one, opened(bucket, prefix) as two:
        two.put("a/1", b"1")
        assert [item.key for item in one.list()] == ["a/1"]
        two.put("a/2", b"22")
        two.put("a/1", b"longer")
        assert sorted((item.key, item.size) for item in one.list()) == [("a/1", 6), ("a/2", 2)]
        assert one.info("a/1").size == 6
        assert one.get("a/1") == b"longer"
        two.delete("a/1")
        assert [item.key for item in one.list()] == ["a/2"]
        with pytest.raises(ObjectNotFoundError):
            one.info("a/1")


@both
def test_sixteen_threads(bucket: Any) -> None:
    """One store serves sixteen threads at once."""

    def work(number: int) -> bool:
        body = bytes([number]) * (1 << 18)
        store.put(f"t/{number}", body, if_absent=True)
        return store.get(f"t/{number}") == body and store.info(f"t/{number}").size == len(body)

    with opened(bucket) as store, ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(48)))


def test_close_ends_the_connections(s3: Any) -> None:
    """After close no connection of the store stays open."""
    store = opened(s3)
    store.put(KEY, b"x")
    store.info(KEY)
    sessions = list(store._opened[0]._s3._endpoint.http_session._sessions.values())
    assert sessions
    store.close()
    store.close()
    assert all(session.closed for session in sessions)


def test_interrupt_drops_the_request() -> None:
    """A Ctrl-C while a request is under way ends it, and does not leave it running behind our back."""
    waiting = threading.Event()

    def script(_: Request) -> Reply:
        waiting.set()
        return Reply(hang=True)

    def interrupt() -> None:
        waiting.wait(30)
        os.kill(os.getpid(), 2)

    with scripted(script) as (_, store):
        killer = threading.Thread(target=interrupt)
        killer.start()
        with pytest.raises(KeyboardInterrupt):
            store.get(KEY)
        killer.join()


def test_exhausted_retries_tell_the_cause() -> None:
    """When a store stays away the error names the last failure, where and what to do."""
    with scripted(lambda _: s3_error(503, "SlowDown")) as (server, store):
        with pytest.raises(RetriesExhaustedError, match="SlowDown") as caught:
            RetryStore(store, FAST).put(KEY, b"x")
        assert KEY in str(caught.value)
        assert server.endpoint in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-12-02T06:35:19Z", 1796193319.0),
        ("2026-12-02T06:35:19.675461Z", 1796193319.675461),
        ("2026-12-02T06:35:19.6679Z", 1796193319.6679),
        ("2026-12-02T06:35:19.123456789Z", 1796193319.123456789),
        ("2026-12-02T08:35:19.5+02:00", 1796193319.5),
    ],
)
def test_times(text: str, seconds: float) -> None:
    """Times of Google Cloud Storage are read with any number of digits."""
    assert parse_time(text) == pytest.approx(seconds, abs=1e-6)


def test_times_that_are_none() -> None:
    """A time that cannot be read is an error of the store."""
    with pytest.raises(StoreError):
        parse_time("yesterday")
