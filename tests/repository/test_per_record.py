"""Retention per record: an epoch whose optimizer was dropped still offers its model, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import ckptstore
from ckptstore import (
    InvalidArgumentError,
    KeepBest,
    KeepDaily,
    KeepEvery,
    KeepLast,
    RecordNotFoundError,
    Repository,
    keys,
)
from ckptstore.catalog import Catalog
from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from ckptstore.testing import CrashStore, SimulatedCrash
from tests.repository.helpers import Clock, Interfering

POLICY = {"model": KeepLast(3), "optimizer": KeepLast(1)}


def state(epoch: int) -> dict[str, Any]:
    return {
        "model": {"w": bytes([epoch]) * 70_000},
        "optimizer": {"m": bytes([epoch + 100]) * 200_000, "shared": b"the same" * 10_000},
        "scheduler": {"step": epoch, "shared": b"the same" * 10_000},
    }


def filled(store: Store, last: int = 5, **options: Any) -> Repository:
    repo = Repository(store, **options)
    for epoch in range(1, last + 1):
        repo.save(epoch, state(epoch), metadata={"loss": 1 / epoch})
    return repo


def records(repo: Repository) -> dict[int, list[str]]:
    return {epoch: sorted(repo.checkpoint(epoch).records) for epoch in repo.epochs()}


WHOLE = ["model", "optimizer", "scheduler"]
THIN = ["model", "scheduler"]


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_records_go_epochs_stay(tmp_path: Path, kind: str) -> None:
    """What no policy keeps is gone from the store; all that stays is bit for bit what was saved, and verifies."""
    repo = filled(MemoryStore()) if kind == "memory" else ckptstore.open(tmp_path / "r")
    if kind == "folder":
        for epoch in range(1, 6):
            repo.save(epoch, state(epoch))
    before = sum(info.size for info in repo.store.list(keys.ATTEMPTS))
    plan = repo.plan(POLICY)
    report = repo.prune(POLICY)
    assert (plan.kept, plan.removed, plan.dropped) == (report.kept, report.removed, report.dropped)
    assert {r.key for r in plan.objects if "/chunks/" in r.key} == {
        r.key for r in report.objects if "/chunks/" in r.key
    }
    assert report.removed.keys() == {1, 2}
    assert report.dropped == {3: {"optimizer": "no policy keeps it"}, 4: {"optimizer": "no policy keeps it"}}
    assert records(repo) == {3: THIN, 4: THIN, 5: WHOLE}
    for epoch in (3, 4):
        checkpoint = repo.checkpoint(epoch)
        assert checkpoint.load() == {name: state(epoch)[name] for name in THIN}
        assert checkpoint.left_out == {"optimizer": "no policy keeps it"}
        with pytest.raises(RecordNotFoundError, match="need="):
            checkpoint.load("optimizer")
    assert repo.checkpoint(5).load() == state(5)
    assert repo.verify().ok
    needed = {key for _, m in Catalog(repo.store).manifests(Catalog(repo.store).committed())
              for key in Catalog(repo.store).reach(m)}  # type: ignore[arg-type]  # fmt: skip
    assert {info.key for info in repo.store.list(keys.ATTEMPTS)} == needed
    assert sum(info.size for info in repo.store.list(keys.ATTEMPTS)) < before
    assert not [*repo.store.list(keys.LEASES)]
    again = repo.prune(POLICY)
    assert (again.removed, again.dropped) == ({}, {})
    assert repo.latest(need=["optimizer"]).epoch == 5  # type: ignore[union-attr]


def test_it_follows_every_save(tmp_path: Path) -> None:
    """As ``keep`` of a repository it holds after each save, also one in the background."""
    with ckptstore.open(tmp_path / "r", keep=POLICY) as repo:
        for epoch in range(1, 7):
            if epoch % 2:
                repo.save(epoch, state(epoch))
            else:
                repo.save_async(epoch, state(epoch)).result(60)
        assert records(repo) == {4: THIN, 5: THIN, 6: WHOLE}
        assert repo.verify().ok


def test_facts_are_kept() -> None:
    """A thinned epoch is of the run, time and metadata of its save: another policy chooses as it did before."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    repo = Repository(store, run_id="mine")
    for epoch in range(1, 5):
        clock.go(86400)
        repo.save(epoch, state(epoch), metadata={"loss": 1 / epoch})
    created = [repo.checkpoint(epoch).created for epoch in repo.epochs()]
    clock.go(10 * 86400)
    before = repo.plan(KeepDaily(3)).kept
    repo.prune({"model": KeepLast(9), "optimizer": KeepLast(1)})
    assert repo.plan(KeepDaily(3)).kept == before
    assert [repo.checkpoint(epoch).created for epoch in repo.epochs()] == created
    assert {repo.checkpoint(epoch).run_id for epoch in repo.epochs()} == {"mine"}
    assert repo.checkpoint(2).metadata == {"loss": 1 / 2}
    clock.go(86400)
    repo.prune({"model": KeepLast(9), "scheduler": KeepLast(1)})  # thinned again: still the first time
    assert repo.plan(KeepDaily(3)).kept == before
    assert records(repo)[1] == ["model"]


def test_what_is_never_thinned() -> None:
    """P5: neither the newest intact epoch, nor a pinned one, nor the one resumed from loses a record."""
    store = MemoryStore()
    filled(store, 6)
    attempt = Catalog(store).manifest(Catalog(store).committed(6)[0]).attempt
    for info in list(store.list(keys.chunks_prefix(attempt))):
        store.delete(info.key)
    repo = Repository(store)
    repo.checkpoint(2).load()
    repo.pin(3, "why")
    repo.prune({"model": KeepLast(9), "optimizer": KeepBest("loss", 1, mode="max")})
    assert records(repo) == {1: WHOLE, 2: WHOLE, 3: WHOLE, 4: THIN, 5: WHOLE, 6: WHOLE}


def test_other_epochs_stay() -> None:
    """Epochs with none of the records that the policies name are nobody's to prune, and the plan says so."""
    repo = Repository(MemoryStore())
    repo.save(1, {"ema": {"w": 1}})
    for epoch in (2, 3, 4):
        repo.save(epoch, state(epoch))
    plan = repo.plan({"optimizr": KeepEvery(100), "modl": KeepEvery(100)})
    assert plan.kept[2] == "it has none of the records 'optimizr', 'modl'"
    report = repo.prune({"optimizer": KeepEvery(100)})
    assert report.kept == {1: "it has no record 'optimizer'", 4: "the newest intact epoch"}


def test_crash_at_every_mutation() -> None:
    """P1: killed anywhere in a thinning, every epoch is there, whole or without what was to go; gc clears the rest."""
    for at in range(1, 200):
        store = MemoryStore()
        filled(store, 4)
        try:
            Repository(CrashStore(store, at)).prune(POLICY)
            assert at > 10
            return
        except SimulatedCrash:
            pass
        repo = Repository(store)
        for epoch in repo.epochs():
            checkpoint = repo.checkpoint(epoch)
            assert sorted(checkpoint.records) in ([WHOLE] if epoch == 4 else [WHOLE, THIN])
            assert checkpoint.load() == {name: state(epoch)[name] for name in checkpoint.records}
        assert repo.verify().ok
        assert {2, 3, 4} <= {*repo.epochs()}
        repo = Repository(store)  # that one has loaded epochs: it would take them for what it resumed from
        repo.prune(POLICY)
        repo.gc(grace=0)
        assert records(repo) == {2: THIN, 3: THIN, 4: WHOLE}
        catalog = Catalog(store)
        needed = {key for _, m in catalog.manifests(catalog.committed()) for key in catalog.reach(m)}  # type: ignore[arg-type]
        assert {info.key for info in store.list(keys.ATTEMPTS)} == needed
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("what", ["delete", "replace", "thin", "gc"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("prefix", [keys.LEASES, keys.ATTEMPTS, keys.MANIFESTS])
def test_races(what: str, after: bool, prefix: str) -> None:
    """Whatever another process does in between, each epoch is complete or away, and what a save committed stays."""
    store = Interfering(MemoryStore())
    repo = filled(store, 4)
    other = Repository(store)
    acts: dict[str, Any] = {
        "delete": lambda: other.delete(3),
        "replace": lambda: other.save(3, state(33), replace=True),
        "thin": lambda: other.prune(POLICY),
        "gc": lambda: other.gc(grace=0),
    }
    store.after = after
    store.at = lambda verb, key: verb == "put" and key.startswith(prefix) and "pin-" not in key
    store.interfere = acts[what]
    repo.prune({"model": KeepLast(9), "optimizer": KeepEvery(2)})
    assert store.interfere is None
    reader = Repository(store)
    assert reader.verify().ok
    for epoch in reader.epochs():
        checkpoint = reader.checkpoint(epoch)
        loaded = checkpoint.load()
        source = 33 if what == "replace" and epoch == 3 and loaded["scheduler"]["step"] == 33 else epoch
        assert loaded == {name: state(source)[name] for name in checkpoint.records}
    if what == "replace":
        assert reader.checkpoint(3).load("scheduler")["step"] == 33
    assert {2, 4} <= {*reader.epochs()} or what == "thin"


@pytest.mark.parametrize("keep", [{}, {"model": 3}, {"": KeepLast(1)}, {3: KeepLast(1)}, {"model": None}])
def test_nonsense_is_refused(tmp_path: Path, keep: Any) -> None:
    """Bad input is a typed error before anything is written."""
    with pytest.raises((InvalidArgumentError, ckptstore.InvalidRecordError)):
        ckptstore.open(tmp_path / "r", keep=keep)
    assert not (tmp_path / "r").exists()


def test_old_manifests_read_as_ever() -> None:
    """A manifest without the members that thinning added is one of a whole epoch."""
    store = MemoryStore()
    filled(store, 1)
    manifest = Catalog(store).manifest(Catalog(store).committed()[0])
    assert (manifest.left_out, manifest.saved) == ({}, 0.0)
    assert msgspec.structs.replace(manifest, left_out={}).left_out == {}


def test_a_number_that_is_used_again_meanwhile() -> None:
    """P5: an epoch is deleted and saved anew at any step of a thinning of the old one: the new content stays."""
    policy = {"model": KeepLast(3), "optimizer": KeepLast(1)}
    acted, step = True, 0
    while acted:
        step += 1
        store = MemoryStore()
        filled(store, 3)
        other = Repository(store)
        seen = iter(range(1, 10_000))

        def use_again(other: Repository = other) -> None:
            other.delete(2)
            other.save(2, state(77), metadata={"loss": 0.0})

        between = Interfering(store)
        between.after = False
        between.at = lambda verb, key, seen=seen, step=step: next(seen) == step  # type: ignore[misc]
        between.interfere = use_again
        Repository(between).prune(policy)
        acted = between.interfere is None
        repo = Repository(store)
        if acted and 2 in repo.epochs():
            assert repo.checkpoint(2).load("model") == state(77)["model"], step
        assert repo.verify().ok, step
    assert step > 20
