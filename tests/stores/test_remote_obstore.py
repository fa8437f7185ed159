"""The obstore transport: who is chosen, that it does carry the bodies, and when it steps aside."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckptstore
from ckptstore.errors import CkptStoreError, InvalidArgumentError, StoreError, TransientError
from ckptstore.stores import RemoteStore, open_store, remote, remote_obstore
from ckptstore.stores.remote_backends import GCSBackend, S3Backend
from ckptstore.stores.remote_errors import Missing, Place, PreconditionRefused, translate
from ckptstore.stores.remote_obstore import ObstoreBackend

if TYPE_CHECKING:
    from tests.servers import Reply, Request, ScriptedServer, s3_error
else:
    from servers import Reply, Request, ScriptedServer, s3_error

exceptions = pytest.importorskip("obstore.exceptions", reason="obstore has no wheel for this Python")
pytestmark = pytest.mark.timeout(60)

KEY = "manifests/000000000001-000001.json"
OPTIONS: dict[str, Any] = {"key": "AKIATEST", "secret": "secret-of-the-test"}
HEADERS = {"ETag": '"e"', "Last-Modified": "Tue, 01 Dec 2026 00:00:00 GMT"}


def serve(request: Request) -> Reply:
    """A server whose objects all hold ``0123456789``."""
    body = b"0123456789" if request.method in ("GET", "HEAD") else b""
    asked = request.headers.get("range", "").removeprefix("bytes=")
    if not asked:
        return Reply(200, body, HEADERS)
    first, _, last = asked.partition("-")
    part = body[int(first) : int(last or 9) + 1]
    return Reply(206, part, {**HEADERS, "Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/10"})


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server that knows one object, and can be told otherwise."""
    with ScriptedServer(serve) as running:
        yield running


def opened(server: ScriptedServer, transport: str | None = "obstore", **options: Any) -> RemoteStore:
    """A store on it."""
    given = {**OPTIONS, "endpoint_url": server.endpoint, **options}
    return RemoteStore("s3", "bucket", "run", storage_options=given, transport=transport)


def carriers(server: ScriptedServer) -> list[str]:
    """Who made the requests that the server has seen."""
    agents = [request.headers["user-agent"] for request in server.requests]
    return ["obstore" if agent.startswith("object_store") else "s3fs" for agent in agents]


# --- the choice ---------------------------------------------------------------------------------


def test_default_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore for S3 where it is installed and knows every option; fsspec otherwise, without a word."""

    def kind(scheme: str = "s3", transport: str | None = None, **options: Any) -> type:
        given = {"token": "anon"} if scheme == "gs" else {**OPTIONS, **options}
        with RemoteStore(scheme, "bucket", storage_options=given, transport=transport) as store:
            assert isinstance(store, RemoteStore)
            return type(store._backend)

    assert kind() is ObstoreBackend
    assert kind(transport="fsspec") is S3Backend
    assert kind(s3_additional_kwargs={"ServerSideEncryption": "AES256"}) is S3Backend
    assert kind("gs") is kind("gs", "fsspec") is GCSBackend
    monkeypatch.setattr(remote, "installed", lambda: False)
    assert kind() is S3Backend


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}, "s3_additional_kwargs"),
        ({"session": object()}, "session"),
        ({"client_kwargs": {"verify": False}}, "client_kwargs verify"),
        ({"config_kwargs": {"proxies": {"http": "x"}}}, "config_kwargs proxies"),
        ({"config_kwargs": {"s3": {"payload_signing_enabled": False}}}, "config_kwargs s3 payload_signing_enabled"),
        ({"config_kwargs": {"request_checksum_calculation": "when_supported"}}, "request_checksum_calculation"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)
def test_options_that_obstore_would_not_follow(options: dict[str, Any], named: str) -> None:
    """Who insists on obstore is told which option it would not follow."""
    with pytest.raises(InvalidArgumentError, match=named):
        open_store("s3://bucket/run", storage_options={**OPTIONS, **options}, transport="obstore")


def test_choices_that_make_no_sense(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A transport that does not exist, has no use for the URL or is not installed."""
    for url, transport in (("s3://bucket", "pigeon"), ("gs://bucket", "obstore"), (tmp_path, "obstore")):
        with pytest.raises(InvalidArgumentError, match="transport"):
            ckptstore.open(url, transport=transport)
    monkeypatch.setattr(remote, "installed", lambda: False)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'ckptstore\[fast\]'"):
        ckptstore.open("s3://bucket", OPTIONS, transport="obstore")


@pytest.mark.parametrize(("url", "name"), [("s3://bucket", "endpoint_ulr"), ("gs://bucket", "endpont_url")])
def test_mistyped_option(url: str, name: str) -> None:
    """A storage option that does not exist is refused by name, with the one that was meant, for every library."""
    good = {"token": "anon"} if url.startswith("gs") else OPTIONS
    with pytest.raises(InvalidArgumentError, match=f"'{name}': did you mean 'endpoint_url'"):
        open_store(url, storage_options={**good, name: "http://127.0.0.1:1"})


# --- what is sent -------------------------------------------------------------------------------


def test_who_carries_what(server: ScriptedServer) -> None:
    """Bodies go by obstore, all else by s3fs; a chunk is not copied on its way in."""
    with opened(server) as store:
        store.put(KEY, b"x")
        store.put(KEY, b"x", if_absent=True)
        assert store.get(KEY) == b"0123456789"
        assert store.get(KEY, 2, 4) == b"23"
        assert store.get(KEY, 8) == store.get(KEY, 8, 99) == b"89"
        found = store.fetch(KEY, 0, 10, memoryview(bytearray(10)))
        assert bytes(found) == b"0123456789"
        assert type(found.obj).__name__ == "Bytes"
        assert carriers(server) == ["obstore"] * 7
        assert server.requests[1].headers["if-none-match"] == "*"
        assert server.requests[0].headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD"
        store.info(KEY)
        store.delete(KEY)
        assert carriers(server)[7:] == ["s3fs"] * 2


@pytest.mark.parametrize("prefix", ["a b=1/ü", "per%cent", "~tilde+plus"])
def test_names(s3: Any, prefix: str) -> None:
    """Both transports mean the same object by the same key, whatever is in the prefix."""
    prefix = f"{s3.prefix()}/{prefix}"
    stores = [
        RemoteStore("s3", s3.name, prefix, storage_options=s3.storage_options, transport=name)
        for name in remote.TRANSPORTS
    ]
    for one, other in (stores, stores[::-1]):
        one.put(KEY, one.traits.url.encode())
        assert other.get(KEY) == one.traits.url.encode()
        assert [item.key for item in other.list()] == [KEY]
        other.delete(KEY)
    for store in stores:
        store.close()


def test_options_are_followed(server: ScriptedServer) -> None:
    """Options that change requests reach those of obstore."""
    with opened(server, requester_pays=True, client_kwargs={"region_name": "eu-west-3"}) as store:
        store.get(KEY)
        assert server.requests[-1].headers["x-amz-request-payer"] == "requester"
        assert "/eu-west-3/s3/" in server.requests[-1].headers["authorization"]
    with opened(server, key=None, secret=None, anon=True) as store:
        store.get(KEY)
        assert "authorization" not in server.requests[-1].headers
    with opened(server, token="session-token") as store:
        store.put(KEY, b"x")
        assert server.requests[-1].headers["x-amz-security-token"] == "session-token"
    assert carriers(server) == ["obstore"] * 3


def test_environment_of_obstore_has_no_say(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that only obstore knows, or would prefer to the options, change nothing."""
    for name, value in {
        "AWS_SESSION_TOKEN": "stray-token",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_REGION": "us-west-2",
        "AWS_UNSIGNED_PAYLOAD": "true",
        "AWS_REQUEST_PAYER": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
    }.items():
        monkeypatch.setenv(name, value)
    with opened(server, client_kwargs={"region_name": "us-east-1"}) as store:
        store.put(KEY, b"x")
        headers = server.requests[0].headers
        assert not {"x-amz-security-token", "x-amz-request-payer"} & set(headers)
        assert headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD"
        assert "/us-east-1/s3/" in headers["authorization"]
        assert server.requests[0].path == f"/bucket/run/{KEY}"
        monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "AES256")  # this one cannot be overruled
        store.put(KEY, b"x")
    assert carriers(server) == ["obstore", "s3fs"]


def test_credentials_of_a_profile(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials are those that s3fs would find: in a profile, say; and when they change obstore uses the new ones."""
    file = tmp_path / "credentials"
    file.write_text("[p]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = hush\n")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with opened(server, key=None, secret=None, profile="p") as opened_store:
        store: Any = opened_store
        store.get(KEY)
        store._opened[0]._s3._request_signer._credentials.access_key = "AKIARENEWED"
        store.get(KEY)
    signed = [request.headers["authorization"] for request in server.requests]
    assert "AKIAPROFILE" in signed[0]
    assert "AKIARENEWED" in signed[1]
    assert carriers(server) == ["obstore"] * 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "https://bucket.s3.eu-west-3.amazonaws.com"),
        ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, "https://s3.eu-west-3.amazonaws.com"),
        ({"config_kwargs": {"use_dualstack_endpoint": True}}, "https://bucket.s3.dualstack.eu-west-3.amazonaws.com"),
        ({"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, "https://bucket.s3-accelerate.amazonaws.com"),
        ({"client_kwargs": {"region_name": None}}, "https://bucket.s3.amazonaws.com"),
        ({"client_kwargs": {"region_name": "cn-north-1"}}, "https://bucket.s3.cn-north-1.amazonaws.com.cn"),
        ({"endpoint_url": "http://minio:9000"}, "http://minio:9000"),
        ({"endpoint_url": "http://gateway/s3"}, "http://gateway/s3"),
    ],
)  # fmt: skip
def test_endpoints(options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go where botocore would send them, and are signed for the region it would name."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    given = {**OPTIONS, "client_kwargs": {"region_name": "eu-west-3"}, **options}
    with RemoteStore("s3", "bucket", storage_options=given, transport="obstore") as opened_store:
        store: Any = opened_store
        backend, fs = store._backend, store._opened[0]

        async def ask() -> Any:
            await fs.set_session()
            return await backend._endpoint(await fs.get_s3("bucket"))

        assert asyncio.run_coroutine_threadsafe(ask(), fs.loop).result(30) == (
            expected, "//bucket." in expected, given["client_kwargs"]["region_name"] or "us-east-1"
        )  # fmt: skip


def test_private_authority(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A certificate is accepted where s3fs would accept it, and is a StoreError of its own elsewhere."""
    _make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    server._server.socket = context.wrap_socket(server._server.socket, server_side=True)
    server.endpoint = server.endpoint.replace("http:", "https:")
    with opened(server) as store, pytest.raises(StoreError, match="certificate") as caught:
        store.get(KEY)
    assert type(caught.value) is StoreError
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    with opened(server) as store:
        assert store.get(KEY) == b"0123456789"
    assert carriers(server) == ["obstore"]


def _make_certificates(folder: Path) -> None:
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    for command in (
        ["req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2"],
        ["req", *new, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1"],
        ["x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
         "-extfile", "names", "-out", "server.pem"],
    ):  # fmt: skip
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)


# --- stepping aside -----------------------------------------------------------------------------


def test_server_without_partial_answers(server: ScriptedServer) -> None:
    """Where ranges are answered with 200 s3fs reads them, from the second time on at once; the rest stays."""
    server.script = lambda request: Reply(200, b"0123456789" if request.method == "GET" else b"", HEADERS)
    with opened(server) as store:
        assert store.get(KEY, 2, 4) == b"23"
        assert store.get(KEY, 3, 5) == b"34"
        store.put(KEY, b"x")
        store.get(KEY)
    assert carriers(server) == ["obstore", "s3fs", "s3fs", "obstore", "obstore"]


def test_redirect(server: ScriptedServer) -> None:
    """A bucket in another region is found by s3fs, which then does everything."""
    moved = s3_error(301, "PermanentRedirect", "<Endpoint>bucket.elsewhere.example</Endpoint>")
    server.script = lambda request: moved if request.method != "HEAD" else Reply(400)
    with opened(server) as store:
        with pytest.raises(StoreError, match=r"bucket\.elsewhere\.example"):
            store.put(KEY, b"x")
        server.script = serve
        store.put(KEY, b"x")
    assert carriers(server)[0] == "obstore"
    assert set(carriers(server)[1:]) == {"s3fs"}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child(server: ScriptedServer) -> None:
    """A forked child, in which the threads of obstore are gone, reads by s3fs."""
    with opened(server) as store:
        store.get(KEY)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if store.get(KEY) == b"0123456789" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        store.get(KEY)
    assert carriers(server) == ["obstore", "s3fs", "obstore"]


def test_obstore_that_cannot_be_set_up(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever obstore has against its settings, the store works."""

    async def fail(*_: object) -> None:
        raise exceptions.UnknownConfigurationKeyError("no such key")

    monkeypatch.setattr(ObstoreBackend, "_make", fail)
    with opened(server) as store:
        assert store.get(KEY) == b"0123456789"
    assert carriers(server) == ["s3fs"]


def test_range_shorter_than_announced(server: ScriptedServer) -> None:
    """A part with fewer bytes than its header says is not believed."""
    server.script = lambda _: Reply(206, b"234", {**HEADERS, "Content-Range": "bytes 2-8/10"})
    with opened(server) as store, pytest.raises(TransientError, match="3 of 7 bytes"):
        store.get(KEY, 2, 9)


# --- errors -------------------------------------------------------------------------------------

SAID = "Error performing PUT http://h/b/k in 1ms - Server returned non-2xx status code: {}: {}\n\nDebug source:\n{{}}"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: exceptions.AlreadyExistsError(SAID.format("412 Precondition Failed", "")), PreconditionRefused),
        (lambda: exceptions.AlreadyExistsError(SAID.format("409 Conflict", "")), TransientError),
        (lambda: exceptions.AlreadyExistsError("exists"), PreconditionRefused),
        (lambda: exceptions.PreconditionError("refused"), PreconditionRefused),
        (lambda: exceptions.PermissionDeniedError("no"), ckptstore.AccessError),
        (lambda: exceptions.UnauthenticatedError("who"), ckptstore.AccessError),
        (lambda: FileNotFoundError("gone"), Missing),
        (
            lambda: FileNotFoundError(SAID.format("404 Not Found", "<Code>NoSuchBucket</Code>")),
            ckptstore.RepositoryNotFoundError,
        ),
        (lambda: exceptions.GenericError(SAID.format("503 Service Unavailable", "<html>")), ckptstore.ThrottledError),
        (lambda: exceptions.GenericError("HTTP error: x\n\nDebug source:\nHttpError {kind: Connect}"), TransientError),
        (lambda: exceptions.GenericError("what is this"), StoreError),
        (lambda: exceptions.NotSupportedError("never heard of it"), StoreError),
    ],
)  # fmt: skip
def test_errors(make: Callable[[], Exception], expected: type[CkptStoreError]) -> None:
    """What obstore says only in words lands in the same tree; what it does not say at all is a StoreError."""
    error = remote_obstore.explain(make())
    assert type(translate(error, "put", KEY, Place("s3://bucket"))) is expected


def test_messages(server: ScriptedServer) -> None:
    """A message tells the code and what the server said, on one line, and none of the debug output."""
    server.script = lambda _: s3_error(403, "AccessDenied")
    with opened(server) as store, pytest.raises(ckptstore.AccessError) as caught:
        store.put(KEY, b"x")
    text = str(caught.value)
    assert "AccessDenied said so (HTTP 403)" in text
    assert server.endpoint in text
    assert "Debug" not in text
    assert "\n" not in text
    assert "secret-of-the-test" not in text
