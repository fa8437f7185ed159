"""No operation without a finite deadline: real sockets that accept and never answer, trickle, or stop in the middle."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import AccessError, RetriesExhaustedError, StoreError, ThrottledError, TransientError
from ckptstore.patience import GRACE_SECONDS
from ckptstore.stores import RemoteStore, RetryEvent, RetryPolicy, RetryStore, Store, remote

if TYPE_CHECKING:
    from tests import servers
    from tests.servers import Reply, Request, ScriptedServer, s3_error
else:
    import servers
    from servers import Reply, Request, ScriptedServer, s3_error

pytestmark = pytest.mark.timeout(120)
CLIENTS = [("s3", "fsspec"), ("s3", "obstore"), ("gs", "fsspec")]
clients = pytest.mark.parametrize(("scheme", "transport"), CLIENTS)
KEY = "a/1"
VERBS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put(KEY, bytes(100_000)),
    "create": lambda store: store.put(KEY, b"x", if_absent=True),
    "get": lambda store: store.get(KEY),
    "range": lambda store: store.fetch(KEY, 0, 1000, memoryview(bytearray(1000))),
    "info": lambda store: store.info(KEY),
    "list": lambda store: list(store.list("a/")),
    "delete": lambda store: store.delete(KEY),
}


def options_for(scheme: str, endpoint: str, seconds: float) -> dict[str, Any]:
    """storage_options with small limits."""
    if scheme == "gs":
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
        return {"token": "anon", "endpoint_url": endpoint, "requests_timeout": limits}
    return {
        "key": servers.KEY,
        "secret": servers.SECRET,
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"connect_timeout": seconds, "read_timeout": seconds},
    }


@contextmanager
def raw_server(serve: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """An endpoint where each connection is served by a function, down to the bytes."""
    stopped = threading.Event()
    threads: list[threading.Thread] = []

    def talk(connection: socket.socket) -> None:
        with connection:
            try:
                serve(connection, stopped)
            except OSError:
                pass  # the client has left

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=talk, args=(connection,), daemon=True))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stopped.set()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for each in threads:
        each.join(10)


def silent(connection: socket.socket, stopped: threading.Event) -> None:
    """Takes the request and says nothing."""
    stopped.wait(60)


def request_of(connection: socket.socket) -> None:
    """Read up to the end of the headers."""
    seen = b""
    while b"\r\n\r\n" not in seen:
        part = connection.recv(65536)
        if not part:
            raise ConnectionError
        seen += part


def trickling(head: bytes) -> Callable[[socket.socket, threading.Event], None]:
    """Sends ``head``, then one byte at a time, always before any time-out between two bytes."""

    def serve(connection: socket.socket, stopped: threading.Event) -> None:
        request_of(connection)
        connection.sendall(head)
        while not stopped.wait(0.1):
            connection.sendall(b"x")

    return serve


BODY = b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-999/1000\r\nETag: "e"\r\n'
BODY += b"Last-Modified: Tue, 01 Dec 2026 00:00:00 GMT\r\nContent-Length: 1000\r\n\r\n"


@clients
@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_ends_under_a_server_that_never_answers(scheme: str, transport: str, verb: str) -> None:
    """Connected, request taken, silence: the attempt ends with the client's time-out, the call with its retries."""
    with raw_server(silent) as endpoint:
        inner = RemoteStore(scheme, "bucket", "run", storage_options=options_for(scheme, endpoint, 0.2),
                            transport=transport)  # fmt: skip
        inner._backend.stall = 0.4
        with RetryStore(inner, RetryPolicy(attempts=2, base=0.001)) as store:
            begin = time.monotonic()
            with pytest.raises(RetriesExhaustedError) as caught:
                VERBS[verb](store)
            assert time.monotonic() - begin < 60
            assert caught.value.attempts == 2


@clients
@pytest.mark.parametrize("head", [BODY, b"HTTP/1.1 200 OK\r\nX-Endless: "], ids=["body", "header"])
def test_an_answer_that_trickles_ends(scheme: str, transport: str, head: bytes, monkeypatch: Any) -> None:
    """A byte now and then satisfies every time-out between bytes; the limit of the whole attempt ends it."""
    monkeypatch.setattr(remote, "TRICKLE", 1e9)
    with raw_server(trickling(head)) as endpoint:
        store = RemoteStore(scheme, "bucket", "run", storage_options=options_for(scheme, endpoint, 30.0),
                            transport=transport)  # fmt: skip
        store._backend.stall = 0.5
        begin = time.monotonic()
        with store, pytest.raises(TransientError, match="not through after"):
            store.get(KEY, 0, 1000)
        assert 0.4 < time.monotonic() - begin < 60


@clients
def test_a_body_that_stops_in_the_middle_ends(scheme: str, transport: str) -> None:
    """Half of a body, then nothing: the time-out between two bytes ends it."""

    def serve(connection: socket.socket, stopped: threading.Event) -> None:
        request_of(connection)
        connection.sendall(BODY + bytes(500))
        stopped.wait(60)

    with raw_server(serve) as endpoint:
        store = RemoteStore(scheme, "bucket", "run", storage_options=options_for(scheme, endpoint, 0.3),
                            transport=transport)  # fmt: skip
        begin = time.monotonic()
        with store, pytest.raises(TransientError):
            store.get(KEY, 0, 1000)
        assert time.monotonic() - begin < 60


def test_slow_but_steady_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that comes slowly, but faster than the floor, is taken."""
    monkeypatch.setattr(remote, "TRICKLE", 100.0)

    def serve(connection: socket.socket, stopped: threading.Event) -> None:
        request_of(connection)
        connection.sendall(BODY)
        for _ in range(10):
            stopped.wait(0.1)
            connection.sendall(bytes(100))
        stopped.wait(60)

    with raw_server(serve) as endpoint:
        options = options_for("s3", endpoint, 0.5)
        with RemoteStore("s3", "bucket", "run", storage_options=options, transport="fsspec") as store:
            assert store.get(KEY, 0, 1000) == bytes(1000)


@pytest.mark.parametrize("transport", ["fsspec", "obstore"])
def test_every_call_of_a_repository_ends_under_a_server_that_falls_silent(
    s3: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save, load, latest, verify, prune, gc, delete: with a server that answers no more each ends in a typed error."""
    quiet = threading.Event()
    begun: list[float] = []

    def script(_: Request) -> Reply | None:
        return Reply(hang=True) if quiet.is_set() else None

    def ends(act: Callable[[], object]) -> None:
        begun[:] = [time.monotonic()]
        with pytest.raises(StoreError):
            act()
        assert time.monotonic() - begun[0] < 15

    state = {"model": {"w": np.arange(1000)}}
    with ScriptedServer(script, s3.endpoint) as server:
        patient = {**s3.storage_options, "endpoint_url": server.endpoint}
        options = {**s3.storage_options, **options_for("s3", server.endpoint, 0.2)}
        retry = RetryPolicy(attempts=2, base=0.001)
        url = s3.url()
        repo = ckptstore.open(url, patient, retry, transport=transport)
        checkpoint = repo.save(1, state)
        monkeypatch.setattr(remote, "TRICKLE", 1e9)
        repo.store.inner.inner._backend.stall = 0.3  # type: ignore[attr-defined]
        quiet.set()
        for act in (
            lambda: repo.save(2, state),
            lambda: repo.save_async(2, state).result(60),
            repo.latest,
            repo.epochs,
            checkpoint.load,
            repo.verify,
            lambda: repo.prune(ckptstore.KeepLast(1)),
            repo.gc,
            lambda: repo.delete(1),
            lambda: ckptstore.open(url, options, retry, transport=transport),
        ):
            ends(act)
        repo.close()


@pytest.mark.parametrize("transport", ["fsspec", "obstore"])
def test_ctrl_c_drops_requests_of_worker_threads(s3: Any, transport: str) -> None:
    """A save whose chunks hang in a server that answers no more ends soon after a Ctrl-C."""
    quiet, waiting = threading.Event(), threading.Event()

    def script(request: Request) -> Reply | None:
        if not quiet.is_set() or "/chunks/" not in request.path:
            return None
        waiting.set()
        return Reply(hang=True)

    def interrupt() -> None:
        waiting.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    state = {"model": {"w": np.arange(100_000)}}
    with ScriptedServer(script, s3.endpoint) as server:
        options = {**s3.storage_options, "endpoint_url": server.endpoint}
        with ckptstore.open(s3.url(), options, transport=transport) as repo:
            repo.save(1, state)
            quiet.set()
            killer = threading.Thread(target=interrupt)
            killer.start()
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                repo.save(2, {"model": {"w": state["model"]["w"] + 1}})
            killer.join()
            assert time.monotonic() - begin < GRACE_SECONDS + 60
            quiet.clear()
            assert repo.latest().epoch == 1  # type: ignore[union-attr]


# --- asked to wait ------------------------------------------------------------------------------


@clients
@pytest.mark.parametrize("verb", ["get", "create", "list"])
def test_retry_after(scheme: str, transport: str, verb: str) -> None:
    """The header is honoured where the client shows it: always, but for bodies that travel by obstore."""
    if scheme == "s3":
        busy = s3_error(503, "SlowDown")
        listing = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        good = Reply(200, {"list": listing, "get": b"x", "create": b""}[verb], {"ETag": '"e"'})
    else:
        busy = Reply(429, b'{"error": {"code": 429, "message": "rateLimitExceeded"}}')
        bodies = {"list": b'{"kind": "storage#objects"}', "get": b"x", "create": b'{"name": "run/a/1", "size": "1"}'}
        good = Reply(200, bodies[verb], {"x-goog-generation": "1"})
    busy = Reply(busy.status, busy.body, {**busy.headers, "Retry-After": "7"})
    replies = [busy]
    heard: list[RetryEvent] = []
    with ScriptedServer(lambda _: replies.pop() if replies else good) as server:
        inner = RemoteStore(scheme, "bucket", "run", storage_options=options_for(scheme, server.endpoint, 5.0),
                            transport=transport)  # fmt: skip
        with RetryStore(inner, sleep=lambda seconds: None, on_retry=heard.append) as store:
            VERBS[verb](store)
    (event,) = heard
    assert isinstance(event.error, ThrottledError)
    assert event.failure == "throttled"
    shown = transport == "fsspec" or verb == "list"
    assert event.error.retry_after == (7.0 if shown else None)
    assert (event.wait >= 7.0) == shown


@pytest.mark.parametrize(
    ("header", "expected"),
    [("3", 3.0), ("0", 0.0), ("-5", 0.0), ("soon", None), ("nan", None), ("Tue, 01 Dec 2020 00:00:00 GMT", 0.0)],
)
def test_retry_after_in_all_forms(header: str, expected: float | None) -> None:
    """Seconds, a date, or something that is none."""
    from ckptstore.stores.remote_errors import Place, translate

    error = RuntimeError("busy")
    headers = {"retry-after": header}
    error.response = {"ResponseMetadata": {"HTTPStatusCode": 503, "HTTPHeaders": headers}}  # type: ignore[attr-defined]
    ours = translate(error, "get", "k", Place("s3://b"))
    assert isinstance(ours, ThrottledError)
    assert ours.retry_after == expected


# --- credentials that expire --------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["fsspec", "obstore"])
def test_rotated_credentials(s3: Any, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile whose keys are rotated in the middle of a run is read again, once, by all threads together."""
    if s3.storage_options["key"] != servers.KEY:
        pytest.skip("needs the keys of the server that the tests start")
    profile = tmp_path / "credentials"

    def rotate(key: str) -> None:
        profile.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={servers.SECRET}\n")

    valid = ["first"]

    def script(request: Request) -> Reply | None:
        if f"Credential={valid[0]}/" not in request.headers["authorization"]:
            return s3_error(400, "ExpiredToken")
        if valid[0] == servers.KEY:
            return None
        body = b"<ListBucketResult/>" if "list-type" in request.query else b"x"
        return Reply(200, body, {"ETag": '"e"', "Last-Modified": "Tue, 01 Dec 2026 00:00:00 GMT"})

    for name, value in (("AWS_SHARED_CREDENTIALS_FILE", profile), ("AWS_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, str(value))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    rotate("first")
    heard: list[RetryEvent] = []
    with ScriptedServer(script, s3.endpoint) as server:
        options = {"endpoint_url": server.endpoint, "client_kwargs": {"region_name": "us-east-1"}}
        inner = RemoteStore("s3", s3.name, s3.prefix(), storage_options=options, transport=transport)
        with RetryStore(inner, RetryPolicy(base=0.001, cap=0.01), on_retry=heard.append) as store:
            assert store.get(KEY) == b"x"
            first = inner._opened
            rotate(servers.KEY)
            valid[:] = [servers.KEY]
            with pytest.raises(AccessError):  # as they were read a moment ago, they are taken for bad
                store.put(KEY, b"1")
            inner._opened = (*first[:2], first[2] - 3600)  # an hour later
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda number: store.put(f"a/{number}", b"body"), range(8)))
            assert {event.failure for event in heard} == {"auth-refresh"}
            assert len(heard) <= 8
            assert {event.wait for event in heard} == {0.0}
            assert inner._opened[0] is not first[0]
            assert sorted(info.key for info in store.list()) == [f"a/{number}" for number in range(8)]


def test_credentials_that_stay_bad() -> None:
    """They are read again once; then it is an AccessError that says what to do, not a row of retries."""
    with ScriptedServer(lambda _: s3_error(400, "ExpiredToken")) as server:
        inner = RemoteStore("s3", "bucket", "run", storage_options=options_for("s3", server.endpoint, 5.0))
        inner._opened = (*inner._opened[:2], inner._opened[2] - 3600)
        with RetryStore(inner) as store:
            with pytest.raises(AccessError, match="renew the credentials"):
                store.get(KEY)
            assert len(server.requests) == 2


def test_a_gcs_token_that_expired() -> None:
    """A 401 for invalid credentials makes the client anew and tries once more; an anonymous 401 does not."""
    replies = [Reply(401, b'{"error": {"code": 401, "message": "Invalid Credentials"}}')]
    with ScriptedServer(lambda _: replies.pop() if replies else Reply(200, b"x", {"x-goog-generation": "1"})) as server:
        inner = RemoteStore("gs", "bucket", "run", storage_options=options_for("gs", server.endpoint, 5.0))
        first = inner._opened
        inner._opened = (*first[:2], first[2] - 3600)
        with RetryStore(inner) as store:
            assert store.get(KEY) == b"x"
            assert inner._opened[0] is not first[0]
