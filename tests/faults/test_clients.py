"""Several clients, awkward names, busy servers, and what clients of S3 and GCS can be told."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ckptstore import KeepLast, RetryPolicy, keys
from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    CorruptionError,
    EpochExistsError,
    StoreError,
    StoreFullError,
    TransientError,
)
from ckptstore.stores import LimitStore, RetryEvent, RetryStore, Store, remote
from tests.faults.conftest import QUICK, Way, both_s3, every_way, gcs_way, holds, s3fs_way, state
from tests.proxy import Action, Exchange, Rule
from tests.proxy_faults import TooFast, answer, gcs_error, misbehaving, reset, s3_error
from tests.proxy_wire import Reply, Seen

CHUNKS, MANIFESTS = "/chunks/", "/manifests/"


# --- two clients --------------------------------------------------------------------------------


@every_way
def test_no_listing_is_remembered(way: Way) -> None:
    """39: what another client saves or prunes is seen at once, whatever caching was asked for."""
    with way.proxy.play():
        one = way.repo(options={"use_listings_cache": True})
        one.save(1, state(1))
        assert [one.latest().epoch, one.epochs()] == [1, [1]]  # type: ignore[union-attr]
        other = way.behind()
        other.save(2, state(2))
        assert [one.latest().epoch, one.epochs()] == [2, [1, 2]]  # type: ignore[union-attr]
        other.prune(KeepLast(1))
        assert [one.latest().epoch, one.epochs()] == [2, [2]]  # type: ignore[union-attr]
    with way.proxy.play() as seen:
        for _ in range(3):
            one.latest()
    assert sum(one.verb == "list" for one in seen) >= 3


@every_way
def test_no_size_is_remembered(way: Way) -> None:
    """40: an epoch that another client replaces by a longer or shorter one is read whole; a grown object is damage."""
    with way.proxy.play():
        one, other = way.repo(options={"use_listings_cache": True}), way.behind()
        one.save(2, state(1, 3))
        checkpoint = one.checkpoint(2)
        for seed, chunks in ((2, 5), (3, 1)):
            other.save(2, state(seed, chunks), replace=True)
            assert holds(one, 2, seed, chunks)
        with pytest.raises(CkptStoreError):
            checkpoint.load()  # its chunks are gone: an error, no mixture
        store = way.store()
        key = next(info.key for info in store.list("attempts/") if CHUNKS in info.key)
        store.put(key, store.get(key) + b"more")
        with pytest.raises(CorruptionError, match="more than"):
            one.checkpoint(2).load()


@every_way
def test_neighbours(way: Way) -> None:
    """51: deleting epoch 1 leaves 10, 11 and 100, and a run called like the beginning of another leaves that alone."""
    with way.proxy.play():
        repo = way.repo()
        way.prefix += "2"
        neighbour = way.repo()
        for epoch in (1, 10, 11, 100):
            repo.save(epoch, state(epoch, 1))
            neighbour.save(epoch, state(epoch, 1))
        repo.delete(1)
        repo.gc(grace=0)
        assert repo.epochs() == [10, 11, 100]
        for epoch in repo.epochs():
            repo.delete(epoch)
        repo.gc(grace=0)
        assert neighbour.epochs() == [1, 10, 11, 100]
        assert neighbour.verify().ok
        way.prefix = way.prefix[:-1]
        assert {key.split("/")[0] for key in way.stored()} == {keys.MARKER}


@every_way
def test_an_upload_that_is_repeated_is_the_same(way: Way) -> None:
    """50: a save that was cut off and is done again has the objects of a clean one, at the places where they belong."""

    def objects(way: Way) -> set[str]:
        kinds: set[str] = set()
        for key in way.stored():
            content = keys.parse_content_key(key)  # an index is named by content, and that names the attempt
            assert content or keys.parse_manifest_key(key) or key == keys.MARKER
            kinds.add(key if content is None else content[1] if content[1] == "records" else content[2])
        return kinds

    final = gcs_error(403, "forbidden") if way.gcs else s3_error(403, "AccessDenied")
    with way.proxy.play():
        repo = way.repo(concurrency=1)
    with way.proxy.play(Rule(final, on="put", key=CHUNKS, skip=3)), pytest.raises(AccessError):
        repo.save(1, state(1, 6))
    with way.proxy.play() as seen:
        repo.save(1, state(1, 6))
    assert sum(CHUNKS in one.key and one.verb == "create" for one in seen) < 6, "what had arrived was sent again"
    repo.gc(grace=0)
    again = objects(way)
    way.prefix += "-clean"
    way.repo().save(1, state(1, 6))
    assert objects(way) == again


NAMES = [
    "line\nfeed", "\x01", "\x7f", "a b", "a+b", "100%", "#1", "what?", "😀", "é", "n" * 1100, "..", ".", "../../up",
    "/abs", "a//b", "folder/", "C:\\x", "~user", "[1]", "*", "", "manifests/000000000009-000001.json",
]  # fmt: skip


@every_way
def test_odd_names(way: Way) -> None:
    """48: names of records and arrays come back exactly or are refused before the first put; no key holds one."""
    with way.proxy.play():
        repo = way.repo()
    kept: dict[str, Any] = {}
    for name in NAMES:
        with way.proxy.play() as seen:
            try:
                repo.save(1, {name: {"w": 1}}, replace=True)
                kept[name] = {name: 2, "w": np.arange(3)}
            except (ValueError, TypeError) as error:
                assert isinstance(error, CkptStoreError)  # noqa: PT017
                assert not [one for one in seen if one.verb in ("put", "create")], name
    assert kept
    with way.proxy.play() as seen:
        repo.save(2, {**kept, "inside": dict.fromkeys(NAMES, 7)})
        found = repo.checkpoint(2).load()
        repo.save(3, state(3))
        repo.prune(KeepLast(1))
        assert repo.epochs() == [3]
    assert {*found} == {*kept, "inside"}
    assert found["inside"] == dict.fromkeys(NAMES, 7)
    assert all(found[name][name] == 2 for name in kept)
    assert all(re.fullmatch(rf"{way.prefix}(/[a-z0-9.-]*)*", one.key) for one in seen)
    assert not way.debris()


# --- deletes ------------------------------------------------------------------------------------


@every_way
def test_deletes_are_single_and_may_fail(way: Way) -> None:
    """37: nothing is deleted in bulk; a delete that is refused fails no save, is logged, and comes again later."""
    content_md5 = Rule(s3_error(400, "MissingContentMD5"), on="bulk-delete", times=None, optional=True)
    final = gcs_error(403, "forbidden") if way.gcs else s3_error(403, "AccessDenied")
    with way.proxy.play(content_md5) as seen:
        repo = way.repo(keep=KeepLast(2))
        for epoch in range(1, 4):
            repo.save(epoch, state(epoch))
        assert repo.epochs() == [2, 3]
    with way.proxy.play(Rule(final, on="delete", key=f"{MANIFESTS}|{CHUNKS}", times=None)) as more:
        repo.save(4, state(4))
    assert holds(repo, 4)
    with way.proxy.play(Rule(final, on="delete", key=CHUNKS, times=1)) as one_key:
        repo.save(5, state(5))
    with way.proxy.play() as last:
        repo.save(6, state(6))
        assert repo.epochs() == [5, 6]
        repo.gc(grace=0)
    assert "bulk-delete" not in {one.verb for one in (*seen, *more, *one_key, *last)}
    assert not way.debris()


# --- busy servers -------------------------------------------------------------------------------


@every_way
def test_a_throttled_server(way: Way) -> None:
    """46: eight writers on a server that takes few requests a second: all end, without a storm and not in step."""
    slow_down = gcs_error(429, "rateLimitExceeded") if way.gcs else s3_error(503, "SlowDown")
    events: list[list[RetryEvent]] = [[] for _ in range(8)]
    with way.proxy.play():
        inner = way.store()
        inner.put("warm", b"x")
    stores = [RetryStore(LimitStore(inner, 4), on_retry=told.append) for told in events]

    def write(number: int) -> None:
        for chunk in range(4):
            stores[number].put(f"{number}/{chunk}", b"x", if_absent=True)

    rule = Rule(slow_down, times=None, when=TooFast(20, burst=4))
    with way.proxy.play(rule) as seen, ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert sum(one.verb == "create" and one.status == 200 for one in seen) == 32
    assert len(seen) < 3 * 32
    waits = [event.wait for told in events for event in told]
    assert len({*waits}) == len(waits), "two waited for the same time"
    assert max(waits) > 0.1, "the gaps do not grow"


@gcs_way
def test_no_object_is_changed_twice_a_second(way: Way) -> None:
    """57: ten quick saves in a row never change one object twice within a second, except to end what is temporary."""
    with way.proxy.play():
        repo = way.repo(keep=KeepLast(3))
    rule = Rule(gcs_error(429, "rateLimitExceeded"), on="put", times=None, optional=True, when=TooFast(1, per_key=True))
    with way.proxy.play(rule) as seen:
        for epoch in range(1, 11):
            repo.save(epoch, state(epoch, 1))
    assert sum(one.status == 429 for one in seen) <= 2
    latest = repo.latest()
    assert latest is not None
    assert latest.epoch == 10
    assert repo.epochs() == [8, 9, 10]


# --- uploads to GCS -----------------------------------------------------------------------------


def shortened() -> Action:
    """The server takes half of the payload for all of it."""

    async def run(exchange: Exchange) -> None:
        body = await exchange.receive()
        start = body.index(b"octet-stream\r\n\r\n") + 16
        end = body.rindex(b"\r\n--")
        await exchange.send(await exchange.forward(body[: (start + end) // 2] + body[end:]))

    return Action("half of the payload", run)


@gcs_way
def test_an_upload_that_is_stored_in_part(way: Way) -> None:
    """56: one request with the whole body, no session to resume; what is stored in part is never committed."""
    with way.proxy.play():
        repo = way.repo()
    with way.proxy.play(Rule(reset(after=True), on="put", key=CHUNKS, times=2)) as seen:
        repo.save(1, state(1))
    assert "multipart" not in {one.verb for one in seen}
    assert {one.query["uploadType"] for one in seen if one.verb in ("put", "create")} == {"multipart"}
    for part in (CHUNKS, "/records/", MANIFESTS):
        with way.proxy.play(Rule(shortened(), on="put", key=part)):
            repo.save(2, state(2), replace=True)
        assert repo.verify().ok
        assert holds(way.behind(), 2)
    with way.proxy.play(Rule(shortened(), on="put", key=CHUNKS, times=None)), pytest.raises(StoreError):
        repo.save(3, state(3))
    assert repo.epochs() == [1, 2]


# --- what S3 clients are told -------------------------------------------------------------------

CHECKSUMS = ("x-amz-trailer", "x-amz-sdk-checksum-algorithm", "x-amz-checksum-crc32", "x-amz-checksum-crc64nvme")


def has_checksum(seen: Seen) -> bool:
    """Whether a put carries what older servers do not know."""
    return any(name in seen.headers for name in CHECKSUMS) or "aws-chunked" in seen.headers.get("content-encoding", "")


@both_s3
def test_checksums_that_the_server_does_not_know(way: Way) -> None:
    """38: no trailer and no checksum header is sent; who asks for them learns from the error which option it was."""
    rule = Rule(s3_error(400, "InvalidDigest"), on="put", times=None, when=has_checksum, optional=True)
    with way.proxy.play(rule) as seen:
        repo = way.repo()
        repo.save(1, state(1))
        assert holds(repo, 1)
    assert not any(map(has_checksum, seen))
    if way.transport == "fsspec":
        rule.optional = False
        asked = {"config_kwargs": {"request_checksum_calculation": "when_supported"}}
        with way.proxy.play(rule), pytest.raises(StoreError, match="request_checksum_calculation"):
            way.repo(options=asked).save(2, state(2))


@both_s3
def test_redirects_name_region_and_endpoint(way: Way) -> None:
    """62: a bucket of another region is an error after few requests, and names where it was asked and where it is."""
    moved = s3_error(301, "PermanentRedirect", x_amz_bucket_region="eu-west-3")
    acts: dict[str, Callable[[Store], object]] = {
        "put": lambda store: store.put("k", b"x"),
        "get": lambda store: store.get("k"),
        "list": lambda store: list(store.list()),
    }
    for verb, act in acts.items():
        begin = time.monotonic()
        with way.proxy.play(Rule(moved, times=None)) as seen, pytest.raises(StoreError) as caught:
            act(way.store(QUICK))
        assert not isinstance(caught.value, TransientError)
        assert time.monotonic() - begin < 20
        assert len(seen) <= 4, verb
        for word in ("us-east-1", way.proxy.endpoint, "eu-west-3"):
            assert word in str(caught.value), verb


@both_s3
def test_addressing_and_headers(way: Way) -> None:
    """62: path style, requester pays, encryption and anonymous access reach the wire as asked."""
    with way.proxy.play() as seen:
        way.store(requester_pays=True).put("k", b"x")
    assert seen[0].target == f"/{way.bucket.name}/{way.prefix}/k"
    assert seen[0].headers["x-amz-request-payer"] == "requester"
    assert "authorization" in seen[0].headers
    fine = answer(Reply(200, b"x", {"ETag": '"e"'}), name="fine")
    with way.proxy.play(Rule(fine, times=None)) as seen:
        way.store(anon=True, key=None, secret=None).get("k")
    assert [one for one in seen if "authorization" in one.headers] == []


@s3fs_way
def test_virtual_hosts_and_encryption(way: Way) -> None:
    """62: the bucket goes into the host name where that is asked for, and the headers of encryption are sent."""
    fine = answer(Reply(200, b"", {"ETag": '"e"'}), name="fine")
    config = {"s3": {"addressing_style": "virtual"}, "proxies": {"http": way.proxy.endpoint}}
    options: dict[str, Any] = {
        "endpoint_url": "http://s3.example.org",
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/mine"},
        "config_kwargs": config,
    }
    with way.proxy.play(Rule(fine)) as seen:
        way.store(**options).put("k", b"x")
    (request,) = seen
    assert request.headers["host"] == f"{way.bucket.name}.s3.example.org"
    assert request.key == f"{way.prefix}/k"
    assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
    assert request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/mine"


@every_way
def test_tokens_that_expire(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that expire in the middle of a save are read again; those that stay bad end it."""
    monkeypatch.setattr(remote, "_FRESH_SECONDS", 0.0)
    expired = gcs_error(401, "Invalid Credentials") if way.gcs else s3_error(400, "ExpiredToken")
    with way.proxy.play():
        repo = way.repo()
    with way.proxy.play(Rule(expired, on="put", key=CHUNKS)):
        repo.save(1, state(1))
    assert holds(way.behind(), 1)
    with way.proxy.play(Rule(expired, on="put", key=CHUNKS, times=None)), pytest.raises(StoreError) as caught:
        repo.save(2, state(2))
    assert "redential" in str(caught.value)
    assert way.behind().epochs() == [1]


@every_way
def test_a_bucket_that_is_full(way: Way) -> None:
    """A quota that is used up ends the save as a lack of space, at once; the epochs before are as they were."""
    full = gcs_error(507, "full") if way.gcs else s3_error(507, "XMinioStorageFull")
    with way.proxy.play():
        repo = way.repo()
        repo.save(1, state(1))
    with way.proxy.play(Rule(full, on="put", key=CHUNKS, times=None)) as seen, pytest.raises(StoreFullError):
        repo.save(2, state(2))
    tries = [one.key for one in seen if one.rule]
    assert len(tries) == len({*tries})
    assert holds(repo, 1)


# --- bad days -----------------------------------------------------------------------------------


@every_way
def test_two_writers_on_a_bad_day(way: Way) -> None:
    """Whatever gets lost on the way, each epoch has one winner, who knows it, and a loser, who knows it too."""
    policy = RetryPolicy(attempts=50, deadline=120, base=0.002, cap=0.03)
    with way.proxy.play(*misbehaving(11, gcs=way.gcs, part=0.3, slow=0.02)), ThreadPoolExecutor(2) as pool:
        repos = [way.repo(policy), way.repo(policy)]

        def save(writer: int, epoch: int) -> bool:
            try:
                repos[writer].save(epoch, state(10 * epoch + writer, 2))
            except EpochExistsError:
                return False
            return True

        won = {epoch: list(pool.map(save, (0, 1), (epoch, epoch))) for epoch in range(1, 4)}
    behind = way.behind()
    assert behind.epochs() == [*won]
    for epoch, results in won.items():
        assert sorted(results) == [False, True], epoch
        assert holds(behind, epoch, 10 * epoch + results.index(True), chunks=2)
    behind.gc(grace=0)
    assert not way.debris()
