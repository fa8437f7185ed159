"""A sweep beside saves and other deletes: whatever comes in between, no committed epoch loses an object (P5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptstore import Repository, TransactionError, keys
from ckptstore.policies import KeepLast
from ckptstore.stores import MemoryStore
from tests.repository.helpers import CHUNK, Interfering, open_repo

FROZEN = np.random.default_rng(0).standard_normal(2 * CHUNK)


def state(epoch: int) -> dict[str, Any]:
    return {"model": {"frozen": FROZEN, "step": epoch}}


class Slow(Interfering):
    """Something happens before the ``at``-th call that matches, and something else before the next that matches."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.plans: list[tuple[Callable[[str, str], bool], Callable[[], object]]] = []

    def _hook(self, verb: str, key: str, after: bool) -> None:
        if self.plans and not after and self.plans[0][0](verb, key):
            self.plans.pop(0)[1]()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._hook("get", key, False)
        return super().get(key, start, end)

    def delete(self, key: str) -> None:
        self._hook("delete", key, False)
        super().delete(key)


def check(store: MemoryStore, epochs: list[int]) -> None:
    repo = open_repo(store)
    assert repo.epochs() == epochs
    assert repo.verify().problems == ()
    for epoch in epochs:
        np.testing.assert_array_equal(repo.checkpoint(epoch).load("model")["frozen"], FROZEN)


def shared() -> tuple[MemoryStore, Slow, Repository]:
    """Epochs 1 and 2 share a chunk; the sweeper's store, and a repository of somebody else."""
    store = MemoryStore()
    trainer = open_repo(store)
    trainer.save(1, state(1))
    trainer.save(2, state(2))
    return store, Slow(store), trainer


def test_a_base_is_pruned_while_its_manifest_is_to_be_read() -> None:
    """A delete lists the manifests; before it reads them the trainer saves on top of the last and prunes that."""
    store, slow, trainer = shared()

    def train() -> None:
        trainer.save(3, state(3))
        trainer.prune(KeepLast(1))

    listed: list[None] = []

    def second_get_of_a_manifest(verb: str, key: str) -> bool:
        if verb == "list" and key == keys.MANIFESTS and not open_repo(store)._catalog.committed(1):
            listed.append(None)
        return bool(listed) and verb == "get" and key == keys.manifest_key(2, 1)

    slow.plans = [(second_get_of_a_manifest, train)]
    open_repo(slow).delete(1)
    assert slow.plans == []
    check(store, [3])


@pytest.mark.parametrize("commits", ["before", "after"])
def test_two_deletes_beside_a_save(commits: str) -> None:
    """The lease of a save comes after a sweeper has looked for leases; its base goes before that reads manifests."""
    store, slow, trainer = shared()
    other = open_repo(store)
    txn: list[Any] = []

    def begin_and_lose_the_base() -> None:
        txn.append(trainer.begin(3))
        txn[0].write("model", state(3)["model"])
        txn[0].settle()
        other.delete(2)

    def leases_were_listed(verb: str, key: str) -> bool:
        return verb == "list" and key == keys.MANIFESTS and not open_repo(store)._catalog.committed(1)

    def commit() -> None:
        txn[0].commit()

    deletes = (lambda verb, key: verb == "delete" and key.startswith(keys.ATTEMPTS), commit)
    slow.plans = [(leases_were_listed, begin_and_lose_the_base), *([deletes] if commits == "before" else [])]
    open_repo(slow).delete(1)
    if slow.plans or commits == "after":
        commit()
    check(store, [3])


def test_manifests_that_vanish_as_fast_as_they_are_read() -> None:
    """Then nothing is deleted: what they needed is unknown."""
    store, slow, trainer = shared()
    number = [3]

    def train() -> None:
        trainer.save(number[0], state(number[0]))
        trainer.delete(number[0] - 1)
        number[0] += 1
        slow.plans.append((newest, train))

    def newest(verb: str, key: str) -> bool:
        gone = not open_repo(store)._catalog.committed(1)
        return gone and verb == "get" and key == keys.manifest_key(number[0] - 1, 1)

    slow.plans = [(newest, train)]
    open_repo(slow).delete(1)
    slow.plans = []
    check(store, [number[0] - 1])
    open_repo(store).gc(grace=0)
    check(store, [number[0] - 1])


def test_a_transaction_that_lost_says_so() -> None:
    """What was swept before the commit is noticed by the commit, not by a load."""
    store, _, trainer = shared()
    txn = trainer.begin(3)
    txn.write("model", state(3)["model"])
    txn.settle()
    manifest = open_repo(store).checkpoint(2)._manifest
    for info in list(store.list(keys.attempt_prefix(open_repo(store).checkpoint(1)._manifest.attempt))):
        store.delete(info.key)
    assert manifest.attempts
    with pytest.raises(TransactionError):
        txn.commit()
    assert open_repo(store).epochs() == [1, 2]
