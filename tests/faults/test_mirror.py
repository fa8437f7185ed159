"""Mirrors over a line that fails, in both directions."""

from __future__ import annotations

import pytest

from ckptstore import RetryPolicy, StoreError
from ckptstore.stores import MemoryStore
from tests.faults.conftest import Way, every_way, holds, s3fs_way, state
from tests.proxy import Rule
from tests.proxy_faults import edit, misbehaving, reset, s3_error
from tests.proxy_wire import Reply
from tests.repository.helpers import assert_no_debris, open_repo

PATIENT = RetryPolicy(attempts=50, deadline=120, base=0.002, cap=0.03)


def _flip(reply: Reply) -> Reply:
    body = bytearray(reply.body)
    body[-1] ^= 1
    return Reply(reply.status, bytes(body), reply.headers)


@every_way
def test_there_and_back_on_a_bad_day(way: Way) -> None:
    """Refusals, resets, lost replies, cut and slow bodies: every epoch arrives, in both directions."""
    home = open_repo(MemoryStore(), codec="raw")
    for epoch in (1, 2, 3):
        home.save(epoch, state(epoch, 2))
    rules = misbehaving(11, gcs=way.gcs, part=0.25, slow=0.02)
    back = open_repo(MemoryStore())
    with way.proxy.play(*rules):
        away = way.repo(PATIENT)
        assert home.mirror(away).of("copied") == [1, 2, 3]
        assert away.mirror(back).of("copied") == [1, 2, 3]
    assert sum(rule.fired for rule in rules) >= 5
    assert all(holds(repo, epoch, chunks=2) for repo in (way.behind(), back) for epoch in (1, 2, 3))
    assert not way.debris()
    assert_no_debris(back.store)


@s3fs_way
def test_a_lost_reply_to_the_commit_of_a_copy(way: Way) -> None:
    """The manifest arrived, its reply did not: it is the copy, and no conflict."""
    home = open_repo(MemoryStore(), codec="raw")
    home.save(1, state(1))
    with way.proxy.play(Rule(reset(after=True), on="create", key="/manifests/")):
        assert home.mirror(way.repo()).of("copied") == [1]
    assert holds(way.behind(), 1)
    assert not way.debris()


@s3fs_way
def test_bytes_that_change_on_the_way_are_never_written(way: Way) -> None:
    """Once is read again; always is damage, reported by name; a store that refuses is neither."""
    away = way.repo()
    away.save(1, state(1))
    once, target = Rule(edit(_flip), on="get", key="/chunks/", each=1), open_repo(MemoryStore())
    with way.proxy.play(once):
        assert way.repo().mirror(target).of("copied") == [1]
    assert once.fired >= 3
    assert holds(target, 1)
    with way.proxy.play(Rule(edit(_flip), on="get", key="/chunks/", times=None)):
        nothing = open_repo(MemoryStore())
        [copy] = way.repo().mirror(nothing).epochs
    assert copy.outcome == "damaged"
    assert "/chunks/" in copy.key
    assert nothing.epochs() == []
    assert_no_debris(nothing.store)
    refused = Rule(s3_error(403, "AccessDenied"), on="get", key="/chunks/", times=None)
    with way.proxy.play(refused), pytest.raises(StoreError):
        way.repo().mirror(open_repo(MemoryStore()))
