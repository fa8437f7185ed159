"""Pins and plans: what no prune takes, and what a prune says beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import EpochNotFoundError, InvalidArgumentError, KeepLast, Repository, keys
from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from tests.repository.helpers import Interfering


def filled(store: Store, *epochs: int, **options: Any) -> Repository:
    repo = Repository(store, **options)
    for epoch in epochs:
        repo.save(epoch, {"model": {"w": epoch}, "shared": {"w": b"the same" * 20_000}})
    return repo


def test_a_pinned_epoch_outlives_every_prune(tmp_path: Path) -> None:
    """P5: a pin holds against a policy, the policy of every save, and a reopened repository; delete takes both."""
    with ckptstore.open(tmp_path / "r", keep=KeepLast(1)) as repo:
        repo.save(1, {"m": {"w": 1}})
        repo.pin(1, "the one in the paper")
        repo.save(2, {"m": {"w": 2}})
        repo.save(3, {"m": {"w": 3}})
        assert repo.epochs() == [1, 3]
        assert repo.pins() == {1: "the one in the paper"}
    with ckptstore.open(tmp_path / "r") as repo:
        assert repo.prune(KeepLast(1)).kept == {1: "pinned: the one in the paper", 3: "one of the last 1"}
        assert repo.unpin(1)
        assert not repo.unpin(1)
        assert repo.prune(KeepLast(1)).removed.keys() == {1}
        repo.pin(3, "a")
        repo.pin(3, "b")
        assert repo.pins() == {3: "b"}
        repo.delete(3)
        assert repo.pins() == {}
        assert repo.epochs() == []


def test_a_pin_of_nothing(tmp_path: Path) -> None:
    """There is no pin without an epoch and a reason, and none in what is no repository."""
    repo = filled(MemoryStore(), 1)
    with pytest.raises(EpochNotFoundError):
        repo.pin(2, "why")
    for reason in ("", "  ", "x" * 5000, "\ud800", None, 7):
        with pytest.raises(InvalidArgumentError):
            repo.pin(1, reason)  # type: ignore[arg-type]
    for epoch in (-1, "1", True):
        with pytest.raises(InvalidArgumentError):
            repo.pin(epoch, "why")  # type: ignore[arg-type]
    assert repo.pins() == {}
    assert [info.key for info in repo.store.list(keys.PINS)] == []


def test_a_damaged_pin_still_pins() -> None:
    """Of a pin whose bytes are lost only the reason is."""
    store = MemoryStore()
    repo = filled(store, 1, 2, 3)
    repo.pin(1, "why")
    store.put(keys.pin_key(1), b"{nonsense")
    assert repo.pins() == {1: "(its reason cannot be read)"}
    repo.prune(KeepLast(1))
    assert repo.epochs() == [1, 3]
    store.put(keys.pin_key(1).replace("1.json", "1x.json"), b"")  # a foreign object is nobody's pin
    assert list(repo.pins()) == [1]


def test_a_pin_that_comes_while_a_prune_looks() -> None:
    """A prune asks for pins after all that takes time, right before it deletes."""
    store = Interfering(MemoryStore())
    repo = filled(store, 1, 2, 3)
    other = Repository(store)
    store.after = False
    store.at = lambda verb, key: verb == "info" or "records" in key
    store.interfere = lambda: other.pin(1, "just now")
    repo.prune(KeepLast(1))
    assert store.interfere is None
    assert repo.epochs() == [1, 3]


def test_a_pin_that_comes_too_late_says_so() -> None:
    """A prune that takes the epoch while the pin is put leaves no pin behind, and whoever pinned it hears of it."""
    store = Interfering(MemoryStore())
    repo = filled(store, 1, 2)
    store.after = False
    store.at = lambda verb, key: verb == "put" and key.startswith(keys.PINS)
    store.interfere = lambda: repo.delete(1)
    with pytest.raises(EpochNotFoundError):
        repo.pin(1, "too late")
    assert repo.pins() == {}


def test_a_full_disk_does_not_take_a_pinned_epoch() -> None:
    """Making room looks at pins as any prune does."""
    repo = filled(MemoryStore(), 1, 2, 3)
    repo.pin(2, "why")
    assert repo._reclaim.deletable() == {1}


def test_a_plan_is_what_the_prune_does() -> None:
    """The plan names every epoch with a reason, and the very objects and bytes that the prune then deletes."""
    store = MemoryStore()
    repo = filled(store, 1, 2, 3, 4)
    repo.pin(2, "why")
    before = {info.key: info.size for info in store.list("")}
    plan = repo.plan(KeepLast(1))
    assert plan.dry_run
    assert {info.key: info.size for info in store.list("")} == before
    done = repo.prune(KeepLast(1))
    assert {**plan.kept, **plan.removed}.keys() == {1, 2, 3, 4}
    assert (plan.kept, plan.removed, plan.spared) == (done.kept, done.removed, done.spared)
    assert sorted(plan.objects, key=lambda r: r.key) == sorted(done.objects, key=lambda r: r.key)
    gone = before.keys() - {info.key for info in store.list("")}
    assert gone == {removal.key for removal in plan.objects}
    assert plan.bytes_freed == sum(before[key] for key in gone if not key.startswith(keys.MANIFESTS)) > 0
    assert repo.verify().ok
