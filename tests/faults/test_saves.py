"""Whole saves and loads through a line that fails: each way to a server meets each scene."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

import ckptstore
from ckptstore import KeepLast, RetryPolicy, keys
from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    CorruptionError,
    ObjectExistsError,
    RepositoryNotFoundError,
    RetriesExhaustedError,
    StoreError,
)
from tests.faults.conftest import PORTALS, QUICK, Way, both_s3, every_way, holds, state
from tests.proxy import Action, Rule
from tests.proxy_faults import answer, cut, edit, gcs_error, misbehaving, reset, s3_error
from tests.proxy_wire import Reply, Seen
from tests.servers import READER_KEY, READER_SECRET

CHUNKS, RECORDS, MANIFESTS, LEASES = "/chunks/", "/records/", "/manifests/", "/leases/"
PATIENT = RetryPolicy(attempts=1000, deadline=60.0, base=0.01, cap=0.2)


def refused(way: Way, status: int = 403) -> Action:
    """A refusal that is final."""
    return gcs_error(status, "forbidden") if way.gcs else s3_error(status, "AccessDenied")


def busy(way: Way) -> Action:
    """A refusal that may pass."""
    return gcs_error(503, "backendError") if way.gcs else s3_error(503, "SlowDown")


def inside(seen: list[Seen], verbs: str = "put create") -> list[str]:
    """The keys of the requests with these verbs, without the prefix of the repository."""
    return [one.key.partition("/")[2] for one in seen if one.verb in verbs.split()]


def flip(reply: Reply) -> Reply:
    """One bit of the body is another."""
    body = bytearray(reply.body)
    body[len(body) // 2] ^= 1
    return replace(reply, body=bytes(body))


# --- what is sent -------------------------------------------------------------------------------


@every_way
def test_every_object_is_one_plain_put(way: Way) -> None:
    """29, 30, 31: no multipart upload, no resumable one; no body is larger than a chunk, whatever the record's size."""
    with way.proxy.play() as seen:
        repo = way.repo(chunk_size=1 << 20)
        repo.save(1, {"tensor": state(1, chunks=101)["model"], "bytes": os.urandom((5 << 20) + 1)})
        path = "/bin/bash"  # a stream
        with repo.begin(2) as txn:
            txn.write_file("file", path)
    assert {one.verb for one in seen} <= {"put", "create", "get", "list", "info", "delete"}
    sizes = [one.size for one in seen if CHUNKS in one.key and one.verb == "create"]
    assert len(sizes) > 12
    assert max(sizes) <= (1 << 20) + 4096
    assert min(sizes) > 0
    if not way.gcs:
        listed = way.fs().call_s3("list_multipart_uploads", Bucket=way.bucket.name)
        assert not listed.get("Uploads")


@every_way
def test_default_chunks_are_one_plain_put(way: Way) -> None:
    """29, 30: the same with chunks of the default size."""
    with way.proxy.play() as seen:
        way.repo(chunk_size=ckptstore.chunks.CHUNK_SIZE).save(1, state(1, chunks=520))
    assert "multipart" not in {one.verb for one in seen}
    assert len([one for one in seen if CHUNKS in one.key and one.verb == "create"]) == 2


@every_way
def test_the_commit_is_the_last_put_and_nothing_is_renamed(way: Way) -> None:
    """63, 64: in save, replace, prune, delete and gc nothing is copied or moved; a save ends with its one manifest."""
    repo = way.repo()
    acts: list[Callable[[], object]] = [
        lambda: repo.save(1, state(1)),
        lambda: repo.save(1, state(2), replace=True),
        lambda: repo.save(2, state(3)),
        lambda: repo.save(3, state(4)),
    ]
    for act in acts:
        with way.proxy.play() as seen:
            act()
        assert {one.verb for one in seen} <= {"put", "create", "get", "list", "info", "delete"}
        written = inside(seen)
        assert [keys.parse_manifest_key(key) is not None for key in written] == [False] * (len(written) - 1) + [True]
    with way.proxy.play() as seen:
        repo.prune(KeepLast(2))
        repo.delete(2)
        repo.gc(grace=0)
    assert {one.verb for one in seen} <= {"put", "create", "get", "list", "info", "delete"}
    assert repo.epochs() == [3]
    assert holds(repo, 3, 4)


# --- refused, gone, silent ----------------------------------------------------------------------


def down(way: Way, cause: str) -> list[Rule]:
    """Rules under which the repository cannot be read."""
    action = {"503": busy(way), "403": refused(way)}[cause]
    return [Rule(action, on="get info list", times=None)]


@every_way
@pytest.mark.parametrize("cause", ["503", "403", "refused", "no such host"])
def test_a_failure_is_not_an_empty_store(way: Way, cause: str) -> None:
    """12: with an epoch in the store, a failing network, server or permission raises; ``latest()`` is never None."""
    with way.proxy.play():
        way.repo().save(3, state(3))
        repo = way.repo(RetryPolicy(attempts=3, base=0.001, cap=0.002))
    if cause == "refused":
        way.proxy.down()
    elsewhere = {"endpoint_url": "http://no-such-host.invalid:9"} if cause == "no such host" else {}
    try:
        with way.proxy.play(*(down(way, cause) if cause.isdigit() else ())):
            for create in (True, False):
                with pytest.raises(StoreError) as caught:
                    way.repo(RetryPolicy(attempts=2, base=0.001, cap=0.002), elsewhere, create=create).latest()
                assert isinstance(caught.value, AccessError if cause == "403" else RetriesExhaustedError)
            if not elsewhere:
                for ask in (repo.latest, repo.epochs):
                    with pytest.raises(StoreError):
                        ask()
    finally:
        way.proxy.up()
    found = repo.latest()
    assert found is not None
    assert found.epoch == 3


@every_way
def test_an_empty_place_is_empty(way: Way) -> None:
    """12: an existing bucket without checkpoints is proof; a missing bucket is an error."""
    with way.proxy.play():
        assert way.repo().latest() is None
        if way.gcs:
            error: Action = gcs_error(404, "The specified bucket does not exist.")
        else:
            error = s3_error(404, "NoSuchBucket")
    with way.proxy.play(Rule(error, times=None)), pytest.raises(RepositoryNotFoundError):
        way.repo().latest()


@every_way
def test_a_place_that_cannot_be_written(way: Way) -> None:
    """25: a missing bucket and a refused put are typed errors when the repository is opened; reading writes nothing."""
    missing = gcs_error(404, "The specified bucket does not exist.") if way.gcs else s3_error(404, "NoSuchBucket")
    with way.proxy.play(Rule(missing, times=None)), pytest.raises(RepositoryNotFoundError):
        way.repo()
    with way.proxy.play(Rule(refused(way), on="put", times=None)) as seen, pytest.raises(AccessError):
        way.repo()
    assert len(inside(seen)) == 1
    way.behind(create=True).save(1, state(1))
    with way.proxy.play(Rule(refused(way), on="put delete", times=None, optional=True)) as seen:
        assert holds(way.repo(create=False), 1)
        assert way.repo(create=False).verify().ok
    assert not inside(seen, "put create delete copy other")


@both_s3
def test_somebody_who_may_only_read(way: Way) -> None:
    """25: by the server's own permissions: opening to write is refused at once, opening to read writes nothing."""
    if way.bucket.server is None:
        pytest.skip("only our own server has somebody who may only read")
    way.behind(create=True).save(1, state(1))
    reader = {"key": READER_KEY, "secret": READER_SECRET}
    with way.proxy.play() as seen:
        repo = way.repo(options=reader, create=False)
        assert holds(repo, 1)
        assert not inside(seen, "put create delete copy other")
        with pytest.raises(AccessError):
            repo.save(2, state(2))
        way.prefix += "-new"
        with pytest.raises(AccessError):
            way.repo(options=reader)
    assert {one.status for one in seen if one.verb in ("put", "create")} == {403}
    assert max(Counter(inside(seen)).values()) == 1


@every_way
def test_what_is_not_wanted_is_not_read(way: Way) -> None:
    """118: one record, or one array of it, is loaded without a request for the chunks of the others."""
    with way.proxy.play():
        repo = way.repo()
        repo.save(
            1, {"model": {"a": state(1)["model"]["w"], "b": state(2)["model"]["w"]}, "optim": state(3, 6)["model"]}
        )
        checkpoint = repo.checkpoint(1)
    for paths, chunks in ((None, 6), (["a"], 3)):
        with way.proxy.play() as seen:
            checkpoint.load("model", paths)
        assert sum(CHUNKS in one.key for one in seen if one.verb == "get") == chunks


# --- replies that lie or get lost ---------------------------------------------------------------


def false_success(way: Way) -> Action:
    """An error in the body of a reply that says 200."""
    if way.gcs:
        return answer(Reply(200, b'{"error": {"code": 500, "message": "backendError"}}'), name="error inside")
    return s3_error(200, "InternalError")


@every_way
@pytest.mark.parametrize("part", [CHUNKS, RECORDS, MANIFESTS])
def test_a_success_with_an_error_inside(way: Way, part: str) -> None:
    """35: a put is done only when the reply proves it: else it is tried again, and in the end the save fails."""
    with way.proxy.play():
        repo = way.repo(RetryPolicy(attempts=3, base=0.001, cap=0.002))
    with way.proxy.play(Rule(false_success(way), on="put", key=part)):
        repo.save(1, state(1))
    assert holds(way.behind(), 1)
    with way.proxy.play(Rule(false_success(way), on="put", key=part, times=None)):
        with pytest.raises(StoreError) as caught:
            repo.save(2, state(2))
        assert not isinstance(caught.value, RepositoryNotFoundError)
    assert way.behind().epochs() == [1]
    repo.save(2, state(2))
    assert holds(way.behind(), 2)


@every_way
@pytest.mark.parametrize("at", [0, 1, 3])
def test_one_chunk_that_fails(way: Way, at: int) -> None:
    """33: a chunk that fails once is sent again; one that fails each time ends the save, and nothing is published."""
    internal = gcs_error(500, "backendError") if way.gcs else s3_error(500, "InternalError")
    with way.proxy.play():
        repo = way.repo(RetryPolicy(attempts=3, base=0.001, cap=0.002), concurrency=4)
    with way.proxy.play(Rule(internal, on="put", key=CHUNKS, skip=at)):
        repo.save(1, state(1, 4))
    assert holds(way.behind(), 1, chunks=4)
    chosen: list[str] = []

    def the_same(seen: Seen) -> bool:
        chosen.append(seen.key)
        return seen.key == chosen[at if at < len(chosen) else 0]

    hit = Rule(internal, on="put", key=CHUNKS, skip=at, times=None, when=the_same)
    with way.proxy.play(hit) as seen, pytest.raises(RetriesExhaustedError):
        repo.save(2, state(2, 4))
    assert not [key for key in inside(seen) if key.startswith(keys.MANIFESTS)]
    assert way.behind().epochs() == [1]


@every_way
@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_interrupted_save_publishes_nothing(way: Way, error: BaseException) -> None:
    """32: what was written when an exception ends a save is no object that anything reaches, then or later."""
    import gc

    with way.proxy.play():
        repo = way.repo()
        repo.save(1, state(1))
    with way.proxy.play() as seen:
        with pytest.raises(type(error)), repo.begin(2) as txn:
            txn.write("model", state(2, 6)["model"])
            raise error
        count = len(seen)
        gc.collect()
        assert len(seen) == count
    assert not [key for key in inside(seen) if key.startswith(keys.MANIFESTS)]
    assert way.behind().epochs() == [1]
    way.behind().gc(grace=0)
    assert not way.debris()
    if not way.gcs:
        assert not way.fs().call_s3("list_multipart_uploads", Bucket=way.bucket.name).get("Uploads")


@every_way
@pytest.mark.parametrize("lost", ["reply", "request"])
def test_lost_reply_of_the_commit(way: Way, lost: str) -> None:
    """The manifest is put once, whether its request or the reply to it was lost; with no retries it is read back."""
    with way.proxy.play():
        repo, plain = way.repo(), way.repo(RetryPolicy(attempts=1))
    with way.proxy.play(Rule(reset(after=lost == "reply"), on="create", key=MANIFESTS, times=3)):
        repo.save(1, state(1))
    with way.proxy.play(Rule(reset(after=lost == "reply"), on="create", key=MANIFESTS, times=None)):
        if lost == "reply":
            plain.save(2, state(2))
        else:
            with pytest.raises(StoreError):
                plain.save(2, state(2))
    behind = way.behind()
    assert behind.epochs() == ([1, 2] if lost == "reply" else [1])
    assert holds(behind, behind.epochs()[-1])
    assert behind.checkpoint(1).generation == 1


@every_way
def test_bodies_that_end_early(way: Way) -> None:
    """44: a body that is cut, also with a length that fits, is read again; one that never comes whole is an error."""
    with way.proxy.play():
        repo = way.repo()
        repo.save(1, state(1))
    for action in (cut(0.6), cut(0.6, rst=True), cut(0.6, announce=True)):
        with way.proxy.play(Rule(action, on="get", each=2)) as seen:
            assert holds(repo, 1), action
        assert [CHUNKS in one.key for one in seen].count(True) == 9, action
        impatient = way.repo(RetryPolicy(attempts=3, base=0.001, cap=0.002))
        with way.proxy.play(Rule(action, on="get", key=CHUNKS, times=None)), pytest.raises(CkptStoreError):
            impatient.checkpoint(1).load()


@every_way
@pytest.mark.parametrize("harm", ["cut", "flipped"])
def test_every_object_is_read_again(way: Way, harm: str) -> None:
    """Whatever is read, probe, marker, manifest, index or chunk: a wrong or short body at first changes nothing."""
    rule = Rule(cut(0.5, announce=True) if harm == "cut" else edit(flip), on="get", each=1)
    with way.proxy.play(rule) as seen:
        way.repo().save(1, state(1))
        repo = way.repo(create=False)
        latest = repo.latest(deep=True)
        assert latest is not None
        assert (latest.epoch, latest.skipped) == (1, ())
        assert holds(repo, 1)
    harmed = " ".join(one.key for one in seen if one.rule)
    assert all(part in harmed for part in ("/probes/", keys.MARKER, MANIFESTS, RECORDS, CHUNKS))


@every_way
@pytest.mark.parametrize("harm", ["cut", "flipped"])
def test_a_read_back_that_is_wrong(way: Way, harm: str) -> None:
    """A create whose reply was lost is read back: bytes that were cut or changed on the way make no conflict of it."""
    action = cut(0.5, announce=True) if harm == "cut" else edit(flip)
    with way.proxy.play():
        store = way.store(QUICK)
    with way.proxy.play(Rule(reset(after=True), on="create"), Rule(action, on="get")):
        store.put("key", b"0123456789" * 100, if_absent=True)
    with way.proxy.play(Rule(action, on="get")), pytest.raises(ObjectExistsError):
        store.put("key", b"1234567890" * 100, if_absent=True)


@every_way
def test_uploads_that_break_off(way: Way) -> None:
    """Connections that are reset amid an upload leave nothing, and the save goes on."""
    with way.proxy.play(Rule(reset(received=20_000), on="put", key=CHUNKS, each=2)):
        way.repo().save(1, state(1))
    assert holds(way.behind(), 1)
    assert not way.debris()


@both_s3
@pytest.mark.parametrize("tag", ["0123456789abcdef0123456789abcdef", "0123456789abcdef0123456789abcdef-7"])
def test_tags_are_not_checksums(way: Way, tag: str) -> None:
    """61: ETags may be anything; a changed byte under the same ETag is found."""

    def retag(reply: Reply) -> Reply:
        return replace(reply, headers={**reply.headers, "etag": f'"{tag}"'}) if "etag" in reply.headers else reply

    with way.proxy.play(Rule(edit(retag), times=None)):
        repo = way.repo()
        repo.save(1, state(1))
        assert holds(repo, 1)
        assert repo.verify().ok
    with way.proxy.play(Rule(edit(flip), on="get", key=CHUNKS, times=None)), pytest.raises(CorruptionError):
        repo.checkpoint(1).load()


# --- outages, clocks, bad days ------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("at", ["put", "get"])
def test_outage_in_the_middle(way: Way, at: str) -> None:
    """A server that is away for a while in the middle of a save or a load: both wait, and end well."""
    with way.proxy.play():
        repo = way.repo(PATIENT, concurrency=2)
        if at == "get":
            repo.save(1, state(1, 8))
    gone = threading.Event()

    def strike(_: Seen) -> bool:
        if not gone.is_set():
            gone.set()
            threading.Thread(target=way.proxy.outage, args=(0.4,)).start()
        return False

    with way.proxy.play(Rule(reset(), on=at, key=CHUNKS, skip=2, when=strike, optional=True)):
        if at == "put":
            repo.save(1, state(1, 8))
        assert holds(repo, 1, chunks=8)
        assert gone.is_set()


@every_way
@pytest.mark.parametrize("hours", [-30, 30])
def test_clocks_that_are_wrong(way: Way, hours: int) -> None:
    """Dates in replies that are a day off change nothing: leases are judged by one clock only."""

    def skew(reply: Reply) -> Reply:
        date = datetime.now(timezone.utc) + timedelta(hours=hours)
        return replace(reply, headers={**reply.headers, "date": date.strftime("%a, %d %b %Y %H:%M:%S GMT")})

    with way.proxy.play(Rule(edit(skew), times=None)):
        repo = way.repo(keep=KeepLast(1))
        with repo.begin(1) as txn:
            txn.write("model", state(1)["model"])
            repo.gc()  # beside a living save
            txn.write("optimizer", state(1)["optimizer"])
        repo.save(2, state(2))
        assert holds(repo, 2)


@both_s3
def test_a_clock_that_the_server_refuses(way: Way) -> None:
    """RequestTimeTooSkewed ends the save at once, and says what to do."""
    with way.proxy.play():
        repo = way.repo()
    rule = Rule(s3_error(403, "RequestTimeTooSkewed"), on="put", key=CHUNKS, times=None)
    with way.proxy.play(rule) as seen, pytest.raises(AccessError, match="clock"):
        repo.save(1, state(1))
    assert max(Counter(key for key in inside(seen) if CHUNKS in f"/{key}").values()) == 1


@every_way
def test_a_bad_day(way: Way) -> None:
    """Saves of all kinds, loads, verify, prune, delete and gc through a mix of all faults: all end well."""
    rules = misbehaving(7, gcs=way.gcs, part=0.3, slow=0.02)
    with way.proxy.play(*rules) as seen:
        repo = way.repo(RetryPolicy(attempts=50, deadline=120, base=0.002, cap=0.03), keep=KeepLast(2))
        for epoch in range(1, 5):
            repo.save(epoch, state(epoch, 2))
            assert holds(repo, epoch, chunks=2)
        repo.save(4, state(5, 2), replace=True)
        repo.save_async(6, state(6, 2)).result()
        latest = repo.latest(deep=True)
        assert latest is not None
        assert (latest.epoch, latest.skipped) == (6, ())
        assert repo.verify().ok
        repo.delete(6)
        repo.gc(grace=0)
    assert sum(rule.fired for rule in rules) >= 10
    assert len({one.rule for one in seen}) >= 5
    behind = way.behind()
    assert behind.epochs() == [4]
    assert holds(behind, 4, 5, chunks=2)
    assert not way.debris()


# --- somebody else answers ----------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("portal", PORTALS, ids=lambda action: action.name)
def test_an_answer_of_somebody_else(way: Way, portal: Action) -> None:
    """12: a login page is no empty listing, no damaged object and no success: it is tried again, then an error."""
    with way.proxy.play():
        repo = way.repo()
        repo.save(3, state(3))
    with way.proxy.play(Rule(portal, on="list put get", each=2)) as seen:
        latest = way.repo().latest()
        assert latest is not None
        assert (latest.epoch, latest.skipped) == (3, ())
        assert holds(repo, 3)
        repo.save(4, state(4))
    assert {one.verb for one in seen if one.rule} >= {"list", "create", "get"}
    assert holds(way.behind(), 4)
    impatient = way.repo(RetryPolicy(attempts=2, base=0.001, cap=0.002))
    with way.proxy.play(Rule(portal, on="list", times=None)), pytest.raises(RetriesExhaustedError):
        impatient.latest()
    with way.proxy.play(Rule(portal, on="put", times=None)), pytest.raises(RetriesExhaustedError):
        impatient.save(5, state(5))
