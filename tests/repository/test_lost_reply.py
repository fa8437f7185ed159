"""Lost replies: a request took effect and nobody heard of it. Above all the one that commits."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from ckptstore import (
    EpochExistsError,
    OutcomeUnknownError,
    Repository,
    RetriesExhaustedError,
    RetryPolicy,
    StoreError,
    TransientError,
    keys,
)
from ckptstore.stores import MemoryStore, RetryStore
from ckptstore.stores.base import Store
from ckptstore.testing import Fault, FaultStore
from tests.conftest import Count
from tests.repository.helpers import assert_no_debris, assert_same, contents, make_state, open_repo, pour

POLICY = RetryPolicy(attempts=3, base=0.0, cap=0.0)
MANIFEST = "manifests/"


def lost(times: int | None = 1) -> TransientError:
    return TransientError("the connection was reset: the reply is lost")


def prepared() -> dict[str, bytes]:
    store = MemoryStore()
    open_repo(store).save(1, make_state(1))
    return contents(store)


class Numbered:
    """Matches the mutation with one number, counted over all keys."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.key = ""

    def __call__(self, key: str) -> bool:
        self.left -= 1
        if self.left == 0:
            self.key = key
        return self.left == 0


def with_retry(store: Store) -> Store:
    return RetryStore(store, POLICY, sleep=lambda seconds: None)


def count_of(objects: dict[str, bytes], verb: str, act: Callable[[Repository], object]) -> int:
    """How many requests of a verb an undisturbed run makes."""
    inner = MemoryStore()
    pour(objects, inner)
    numbered = Numbered(10**9)
    act(open_repo(FaultStore(inner, [Fault(verb, numbered, "after", lost)])))  # type: ignore[arg-type]
    return 10**9 - numbered.left


def save(repo: Repository) -> object:
    return repo.save(2, make_state(2))


@pytest.mark.parametrize("verb", ["put", "delete", "get", "info", "list"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_any_reply_lost_under_retries(verb: str, when: str, count: Count) -> None:
    """P4: with retries, a save that loses any one request or reply succeeds, commits once, leaves no debris."""
    objects = prepared()
    total = count_of(objects, verb, save)
    assert total >= 1
    for number in range(1, total + 1):
        inner = MemoryStore()
        pour(objects, inner)
        numbered = Numbered(number)
        faults = FaultStore(inner, [Fault(verb, numbered, when, lost)])  # type: ignore[arg-type]
        save(open_repo(with_retry(faults)))
        faults.assert_all_fired()
        repo = open_repo(inner)
        assert repo.epochs() == [1, 2]
        assert_same(repo.checkpoint(2).load(), make_state(2))
        assert repo.verify().ok
        assert_no_debris(inner)
    count("lost requests and replies", total)


@pytest.mark.parametrize("when", ["before", "after"])
def test_any_reply_lost_without_retries(when: str) -> None:
    """P1: without retries, a lost reply ends the save with its error or not at all; the epoch is whole or absent."""
    objects = prepared()
    for number in range(1, count_of(objects, "put", save) + 1):
        inner = MemoryStore()
        pour(objects, inner)
        numbered = Numbered(number)
        try:
            save(open_repo(FaultStore(inner, [Fault("put", numbered, when, lost)])))  # type: ignore[arg-type]
            saved = True
        except TransientError:
            saved = False
        repo = open_repo(inner)
        committed = repo.epochs() == [1, 2]
        assert saved == committed, numbered.key
        assert committed == (numbered.key.startswith(MANIFEST) and when == "after"), numbered.key
        assert repo.verify().ok
        if not committed:
            report = repo.save(2, make_state(2)).report
            assert report is not None
        assert_same(repo.checkpoint(2).load(), make_state(2))
        repo.gc(grace=0)
        assert_no_debris(inner)


def test_lost_reply_to_the_commit_is_recognised() -> None:
    """P4: when only the reply to the manifest is lost, the save reads it back and returns: committed exactly once."""
    inner = MemoryStore()
    repo = open_repo(FaultStore(inner, [Fault("put", MANIFEST, "after", lost)]))
    checkpoint = repo.save(2, make_state(2))
    assert checkpoint.epoch == 2
    assert checkpoint.generation == 1
    assert open_repo(inner).epochs() == [2]
    assert_no_debris(inner)
    with pytest.raises(EpochExistsError):
        repo.save(2, make_state(2))


@pytest.mark.parametrize("error", [TransientError("reset"), RetriesExhaustedError("still failing")])
def test_lost_reply_that_cannot_be_read_back(error: StoreError) -> None:
    """P4: when reading back after a lost reply to the commit fails too, the outcome is said to be unknown."""
    inner = MemoryStore()
    faults = [Fault("put", MANIFEST, "after", error), Fault("get", keys.manifest_key(2, 1), error=error, times=None)]
    with pytest.raises(OutcomeUnknownError, match="Look whether") as caught:
        open_repo(FaultStore(inner, faults)).save(2, make_state(2))
    assert caught.value.epoch == 2
    assert caught.value.key == keys.manifest_key(2, 1)
    repo = open_repo(inner)  # it did happen, and nothing was cleaned away
    assert_same(repo.checkpoint(2).load(), make_state(2))
    repo.gc(grace=0)
    assert repo.verify().ok
    assert_no_debris(inner)


def test_commit_that_never_arrived() -> None:
    """P4: when the manifest never arrived and the store answers again, the save fails with the store's error."""
    inner = MemoryStore()
    repo = open_repo(FaultStore(inner, [Fault("put", MANIFEST, "before", lost)]))
    with pytest.raises(TransientError):
        repo.save(2, make_state(2))
    assert repo.epochs() == []
    checkpoint = repo.save(2, make_state(2))
    assert checkpoint.report is not None
    assert checkpoint.report.bytes_reused > 0.9 * checkpoint.bytes_state  # the failed attempt is adopted
    repo.gc(grace=0)
    assert_no_debris(inner)


def test_a_strangers_commit_is_not_ours() -> None:
    """P1: a commit whose reply is lost because another writer was first is EpochExistsError, not a success."""
    inner = MemoryStore()

    def overtake() -> TransientError:
        open_repo(inner).save(2, make_state(22))
        return TransientError("reset")

    repo = open_repo(FaultStore(inner, [Fault("put", MANIFEST, "before", overtake)]))
    with pytest.raises(EpochExistsError):
        repo.save(2, make_state(2))
    assert_same(open_repo(inner).checkpoint(2).load(), make_state(22))
    open_repo(inner).gc(grace=0)
    assert_no_debris(inner)


def test_the_look_after_the_commit_fails() -> None:
    """P4: when the look that follows the commit fails, the outcome is said to be unknown; nothing is lost."""
    inner = MemoryStore()
    faults = [Fault("info", re.compile("condemned/|manifests/"), error=TransientError("reset"), times=None)]
    with pytest.raises(OutcomeUnknownError):
        open_repo(FaultStore(inner, faults)).save(2, make_state(2))
    repo = open_repo(inner)
    assert_same(repo.checkpoint(2).load(), make_state(2))


@pytest.mark.parametrize("match", ["leases/", "condemned/", "attempts/"])
def test_tidying_up_fails_after_the_commit(match: str) -> None:
    """P4: what fails after the commit does not turn the save into a failure; gc tidies up."""
    inner = MemoryStore()
    pour(prepared(), inner)
    error = TransientError("reset")
    repo = open_repo(FaultStore(inner, [Fault("delete", match, error=error, times=None)]))
    assert repo.save(1, make_state(3), replace=True).generation == 2
    fresh = open_repo(inner)
    assert_same(fresh.checkpoint(1).load(), make_state(3))
    fresh.gc(grace=0)
    assert_no_debris(inner)


@pytest.mark.parametrize("verb", ["get", "info", "list"])
def test_a_store_that_does_not_answer_is_not_empty(verb: str) -> None:
    """P4: "no checkpoint" is answered only on proof: a store that fails raises its error from every read."""
    inner = MemoryStore()
    pour(prepared(), inner)
    repo = open_repo(inner)
    repo._catalog.store = repo.store = FaultStore(inner, [Fault(verb, error=TransientError("down"), times=None)])  # type: ignore[arg-type]
    reads: list[Callable[[], object]] = [repo.latest, lambda: repo.checkpoint(1).load(), repo.verify]
    for read in reads:
        if verb == "info":
            read()  # reading needs none
        else:
            with pytest.raises(TransientError):
                read()
    assert open_repo(MemoryStore()).latest() is None
