"""Quarantine: what is set aside is not resumed from, not built on, not pruned; and it is there when it is asked for."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import CorruptionError, EpochNotFoundError, InvalidArgumentError, KeepLast, Repository, keys
from ckptstore.catalog import Catalog
from ckptstore.quarantine import UNKNOWN
from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from ckptstore.testing import CrashStore, SimulatedCrash
from tests.repository.helpers import Interfering, assert_no_debris, assert_same, keys_of, make_state, open_repo


def filled(store: Store, *epochs: int, **options: Any) -> Repository:
    repo = open_repo(store, **options)
    for epoch in epochs:
        repo.save(epoch, make_state(epoch))
    return repo


def latest(repo: Repository) -> tuple[int, list[str]]:
    found = repo.latest()
    assert found is not None
    return found.epoch, [str(step) for step in found.skipped]


def marks(store: Store) -> list[str]:
    return [key for key in keys_of(store) if key.startswith(keys.QUARANTINES)]


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_what_is_set_aside(tmp_path: Path, kind: str) -> None:
    """``latest`` passes it by and says why; its number still gives it; released it is the newest again."""
    repo = filled(MemoryStore(), 1, 2, 3) if kind == "memory" else ckptstore.open(tmp_path / "r")
    if kind == "folder":
        for epoch in (1, 2, 3):
            repo.save(epoch, make_state(epoch))
    repo.quarantine(3, "the loss exploded")
    for one in (repo, open_repo(repo.store)):
        assert latest(one) == (2, ["epoch 3: it is quarantined: the loss exploded"])
        assert one.latest(deep=True).epoch == 2  # type: ignore[union-attr]
        assert one.quarantined() == {3: "the loss exploded"}
        assert_same(one.checkpoint(3).load(), make_state(3))
        assert one.epochs() == [1, 2, 3]
    repo.quarantine(3, "another reason")
    assert repo.quarantined() == {3: "another reason"}
    assert repo.release(3)
    assert not repo.release(3)
    assert latest(repo) == (3, [])
    assert repo.quarantined() == {}
    assert marks(repo.store) == []


def test_all_epochs_are_set_aside() -> None:
    """P4: then there is an error that says so, never "no checkpoint"; and nothing is pruned."""
    repo = filled(MemoryStore(), 1, 2)
    for epoch in (1, 2):
        repo.quarantine(epoch, "why")
    with pytest.raises(CorruptionError, match="quarantined: why"):
        repo.latest()
    repo.prune(KeepLast(1))
    assert repo.epochs() == [1, 2]


def test_no_prune_takes_it_and_the_plan_says_why() -> None:
    """P5: nor does it count as the newest intact one, which stays beside it."""
    repo = filled(MemoryStore(), 1, 2, 3, 4)
    repo.quarantine(1, "to be looked at")
    repo.quarantine(4, "suspect")
    plan = repo.plan(KeepLast(1))
    assert plan.kept == {
        1: "quarantined: to be looked at",
        3: "the newest intact epoch",
        4: "quarantined: suspect",
    }
    assert repo.prune(KeepLast(1)).kept == plan.kept
    repo.prune({"model": KeepLast(9), "optim": KeepLast(1)})
    assert sorted(repo.checkpoint(1).records) == ["model", "optim"]
    assert repo._reclaim.deletable() == set()
    repo.delete(1)
    assert repo.quarantined() == {4: "suspect"}
    assert repo.verify().ok


def test_a_quarantine_that_comes_while_a_prune_looks() -> None:
    """A prune asks for marks after all that takes time, right before it deletes."""
    store = Interfering(MemoryStore())
    repo = filled(store, 1, 2, 3)
    other = open_repo(store)
    store.after = False
    store.at = lambda verb, key: verb == "info" or "records" in key
    store.interfere = lambda: other.quarantine(1, "just now")
    repo.prune(KeepLast(1))
    assert store.interfere is None
    assert repo.epochs() == [1, 3]


def test_nothing_is_built_on_it() -> None:
    """A save refers to no object of it, not even one that has just saved it itself; released, it is built on again."""
    store = MemoryStore()
    repo = filled(store, 1)
    repo.quarantine(1, "who knows what its bytes are")
    for number, saver in ((2, repo), (3, open_repo(store))):
        if number == 3:
            saver.quarantine(2, "that one too")
        saver.save(number, make_state(number))
        manifest = saver.checkpoint(number)._manifest
        assert manifest.attempts == (manifest.attempt,)
        assert manifest.base is None
    repo.release(2)
    repo.quarantine(3, "and that")
    saved = repo.save(4, make_state(4))
    assert saved._manifest.base == keys.manifest_key(2, 1)


def test_it_is_about_the_content_not_the_number() -> None:
    """A replacement is not set aside, nor what is saved under the number after a delete, whatever crashed before."""
    store = MemoryStore()
    repo = filled(store, 1, 2)
    repo.quarantine(2, "bad")
    repo.save(2, make_state(22), replace=True)
    assert latest(repo) == (2, [])
    assert marks(store) == []
    repo.quarantine(2, "bad again")
    repo.delete(2)
    assert marks(store) == []

    filled(store, 2)
    repo.quarantine(2, "bad")
    crashing = CrashStore(store, 2, "before")  # the manifest is gone, the mark is not
    with pytest.raises(SimulatedCrash):
        open_repo(crashing).delete(2)
    assert marks(store) != []
    stale = store.get(marks(store)[0])
    filled(store, 2)
    assert latest(open_repo(store)) == (2, [])
    assert open_repo(store).quarantined() == {}
    repo.delete(2)
    store.put(keys.quarantine_key(2, 1), stale)
    repo.gc(grace=0)
    assert_no_debris(store)


def test_a_quarantine_of_nothing() -> None:
    """There is none without an epoch and a reason."""
    store = MemoryStore()
    repo = filled(store, 1)
    with pytest.raises(EpochNotFoundError):
        repo.quarantine(2, "why")
    for reason in ("", "  ", "x" * 5000, "\ud800", None, 7):
        with pytest.raises(InvalidArgumentError, match="quarantine"):
            repo.quarantine(1, reason)  # type: ignore[arg-type]
    for epoch in (-1, "1", True):
        with pytest.raises(InvalidArgumentError):
            repo.quarantine(epoch, "why")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError):
            repo.release(epoch)  # type: ignore[arg-type]
    between = Interfering(store)
    between.after = False
    between.at = lambda verb, key: verb == "put" and key.startswith(keys.QUARANTINES)
    between.interfere = lambda: repo.delete(1)
    with pytest.raises(EpochNotFoundError):
        open_repo(between).quarantine(1, "too late")
    assert marks(store) == []


def test_a_damaged_mark_still_counts() -> None:
    """Of a mark whose bytes are lost only the reason is; a foreign object is nobody's mark."""
    store = MemoryStore()
    repo = filled(store, 1, 2, 3)
    repo.quarantine(3, "why")
    store.put(marks(store)[0], b"{nonsense")
    assert repo.quarantined() == {3: UNKNOWN}
    assert latest(repo)[0] == 2
    store.put("manifests/quarantine-000000000002-1.json", b"")
    store.put("manifests/quarantine-000000000002-000001.json.bak", b"")
    assert list(repo.quarantined()) == [3]
    repo.gc(grace=0)
    assert len(list(store.list("manifests/quarantine-"))) == 3


def test_an_epoch_whose_manifest_is_damaged() -> None:
    """It can be set aside too; a repair takes the mark along, and whoever mended it releases it."""
    store = MemoryStore()
    repo = filled(store, 1, 2)
    other = open_repo(MemoryStore())
    repo.mirror(other)
    data = store.get(keys.manifest_key(2, 1))
    store.put(keys.manifest_key(2, 1), data[:-5])
    repo.quarantine(2, "damaged")
    assert repo.quarantined() == {2: "damaged"}
    assert repo.repair(sources=[other]).ok
    assert repo.quarantined() == {2: "damaged"}
    assert latest(repo)[0] == 1
    repo.release(2)
    assert latest(open_repo(store)) == (2, [])
    repo.gc(grace=0)
    assert_no_debris(store)


def test_a_mirror_leaves_it_out_unless_it_is_named() -> None:
    """In the target nobody would know."""
    repo = filled(MemoryStore(), 1, 2)
    repo.quarantine(2, "bad")
    target = open_repo(MemoryStore())
    repo.mirror(target)
    assert target.epochs() == [1]
    repo.mirror(target, epochs=[2])
    assert target.epochs() == [1, 2]


def test_verify_sets_damage_aside() -> None:
    """On demand, with the object and the reason; what is set aside already keeps its own."""
    store = MemoryStore()
    repo = filled(store, 1, 2, 3)
    catalog = Catalog(store)
    for epoch in (2, 3):
        manifest = catalog.manifest(catalog.committed(epoch)[-1])
        own = [c for e in manifest.records for c in catalog.index(e).chunks if c.attempt == manifest.attempt]
        store.put(own[0].key, store.get(own[0].key)[:-1] + b"?")
    repo.quarantine(2, "known")
    assert not repo.verify().ok
    assert list(repo.quarantined()) == [2]
    assert not repo.verify(quarantine=True).ok
    found = repo.quarantined()
    assert found[2] == "known"
    assert found[3].startswith("damaged: attempts/")
    assert latest(open_repo(store))[0] == 1


def test_a_crash_at_every_mutation_of_a_quarantine() -> None:
    """It is set aside or not, and nothing else has changed."""
    store = MemoryStore()
    for at in itertools.count(1):
        store = MemoryStore()
        filled(store, 1, 2)
        crashing = CrashStore(store, at)
        try:
            open_repo(crashing).quarantine(2, "why")
        except SimulatedCrash:
            assert latest(open_repo(store))[0] in (1, 2)
            assert open_repo(store).verify().ok
            continue
        break
    assert latest(open_repo(store))[0] == 1
