"""Which failures are tried again: each one behind each client, counted in requests. And what never ends by itself."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    RepositoryNotFoundError,
    RetriesExhaustedError,
    StoreError,
    TransientError,
)
from ckptstore.stores import RetryPolicy, RetryStore, Store
from tests.faults.conftest import PORTALS, QUICK, Way, both_s3, every_way, gcs_way
from tests.proxy import Action, Rule
from tests.proxy_faults import cut, gcs_error, reset, s3_error, stall

VERBS: dict[str, Callable[[Store, str], object]] = {
    "put": lambda store, key: store.put(key, b"12345"),
    "create": lambda store, key: store.put(key, b"12345", if_absent=True),
    "get": lambda store, key: store.get(key),
    "info": lambda store, key: store.info(key),
    "list": lambda store, key: list(store.list(key)),
    "delete": lambda store, key: store.delete(key),
}
BODILESS = "info"  # the reply to a HEAD has a status and no code
S3: dict[Action, type[CkptStoreError] | None] = {
    s3_error(403, "AccessDenied"): AccessError,
    s3_error(403, "SignatureDoesNotMatch"): AccessError,
    s3_error(403, "RequestTimeTooSkewed"): AccessError,
    s3_error(404, "NoSuchBucket"): RepositoryNotFoundError,
    s3_error(400, "InvalidArgument"): StoreError,
    s3_error(400, "RequestTimeout"): None,
    s3_error(400, "XAmzContentSHA256Mismatch"): None,
    s3_error(429, "TooManyRequests"): None,
    s3_error(500, "InternalError"): None,
    s3_error(502, "BadGateway"): None,
    s3_error(503, "SlowDown"): None,
    s3_error(504, "GatewayTimeout"): None,
}
GCS: dict[Action, type[CkptStoreError] | None] = {
    gcs_error(400, "invalid"): StoreError,
    gcs_error(401, "Anonymous caller"): AccessError,
    gcs_error(403, "forbidden"): AccessError,
    gcs_error(403, "rateLimitExceeded"): None,
    gcs_error(408, "slow"): None,
    gcs_error(429, "rateLimitExceeded"): None,
    gcs_error(500, "backendError"): None,
    gcs_error(502, "bad gateway"): None,
    gcs_error(503, "backendError"): None,
    gcs_error(504, "timeout"): None,
}
LINES: dict[Action, str] = {
    reset(): "put create get info list delete",
    reset(after=True): "put create get info list delete",
    reset(received=2): "put create",
    cut(0.5): "get list",
    cut(0.5, rst=True): "get list",
    **dict.fromkeys(PORTALS[:2], "put create get info list delete"),
    PORTALS[2]: "put create get info list",
    PORTALS[3]: "put create get info list delete",
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[Way], Store]]:
    """One store for each way: opening a client takes its time."""
    made: dict[str, Store] = {}

    def store(way: Way) -> Store:
        name = way.bucket.scheme + way.transport
        if name not in made:
            way.prefix = "errors"
            made[name] = way.store()
            way.lend()
        return made[name]

    yield store
    for one in made.values():
        one.close()


def meet(way: Way, store: Store, verb: str, action: Action, expected: type[CkptStoreError] | None) -> None:
    """The verb meets the failure: once if it is final, three times if it may pass."""
    key = f"{verb}/{time.monotonic_ns()}"
    retrying = RetryStore(store, QUICK)
    if verb not in ("put", "create"):
        store.put(key, b"12345")
    with way.proxy.play(Rule(action, on=verb, times=1 if expected else 3)) as seen:
        if expected:
            with pytest.raises(expected) as caught:
                VERBS[verb](retrying, key)
            assert type(caught.value) is expected, action
        else:
            VERBS[verb](retrying, key)
    assert sum(one.verb == verb for one in seen) == (1 if expected else 4), (verb, action)
    if verb in ("put", "create"):
        assert expected or store.get(key) == b"12345"


@both_s3
@pytest.mark.parametrize("action", S3, ids=lambda action: action.name)
def test_s3_errors(way: Way, shared: Callable[[Way], Store], action: Action) -> None:
    """What is final is asked once; what may pass is tried until it passes."""
    store = shared(way)
    for verb in VERBS:
        known_by_code = action.name.startswith("400") or "Bucket" in action.name
        if not (verb == BODILESS and known_by_code):
            meet(way, store, verb, action, S3[action])


@gcs_way
@pytest.mark.parametrize("action", GCS, ids=lambda action: action.name)
def test_gcs_errors(way: Way, shared: Callable[[Way], Store], action: Action) -> None:
    """The same for Google Cloud Storage."""
    for verb in VERBS:
        meet(way, shared(way), verb, action, GCS[action])


@every_way
@pytest.mark.parametrize("action", LINES, ids=lambda action: action.name)
def test_broken_answers(way: Way, shared: Callable[[Way], Store], action: Action) -> None:
    """What breaks before, amid or after a request or reply, or is no answer, is tried again; nothing is lost."""
    for verb in LINES[action].split():
        meet(way, shared(way), verb, action, None)


SECONDS = 0.2
PATIENCE = RetryPolicy(attempts=100, deadline=1.0, base=0.01, cap=0.05)


def limited(way: Way, **options: object) -> Store:
    """A store whose attempts may last a moment, and its operations a second."""
    from aiohttp import ClientTimeout

    gcs = {"requests_timeout": ClientTimeout(total=None, sock_connect=SECONDS, sock_read=SECONDS)}
    s3 = {"config_kwargs": {"connect_timeout": SECONDS, "read_timeout": SECONDS}}
    return way.store(PATIENCE, **(gcs if way.gcs else s3), **options)


def give_up(store: Store, verb: str) -> float:
    """How many seconds the verb takes to give up."""
    begin = time.monotonic()
    with pytest.raises((RetriesExhaustedError, TransientError)):
        VERBS[verb](store, verb)
    return time.monotonic() - begin


@every_way
def test_silent_server(way: Way) -> None:
    """A server that takes requests and never answers, or not to the end: each attempt and each operation ends."""
    store = limited(way)
    with way.proxy.play():
        store.put("get", b"12345")
        store.delete("get")
        store.put("get", b"12345")
    rules = [Rule(stall(at=0.5), on="get", times=2), Rule(stall(), times=None)]
    with way.proxy.play(*rules) as seen, ThreadPoolExecutor(6) as pool:
        assert max(pool.map(give_up, [store] * 6, VERBS)) < 6
    for verb in VERBS:
        assert sum(one.verb == verb for one in seen) >= 2, f"{verb}: one attempt must not use up the time of all"


@every_way
def test_address_that_swallows_everything(way: Way) -> None:
    """Where no answer to a connection attempt ever comes, the attempt ends, and so does the operation."""
    with socket.socket() as full, socket.socket() as one, socket.socket() as two, ThreadPoolExecutor(6) as pool:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for client in (one, two):  # the queue is full: from now on the kernel drops what comes
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        store = limited(way, endpoint_url=f"http://127.0.0.1:{full.getsockname()[1]}")
        assert max(pool.map(give_up, [store] * 6, VERBS)) < 6
