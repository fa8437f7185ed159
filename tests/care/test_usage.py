"""du: the figures are those of the store, measured by deleting and listing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore import KeepBest, KeepLast, Repository, keys
from ckptstore.catalog import Catalog
from ckptstore.errors import TransientError
from ckptstore.stores import LocalStore, MemoryStore, open_store
from ckptstore.stores.base import Store
from ckptstore.testing import Fault, FaultStore
from ckptstore.usage import usage
from tests.conftest import Bucket
from tests.repository.helpers import contents, make_state, open_repo, pour


def bytes_of(store: Store) -> int:
    return sum(info.size for info in store.list())


def clone(store: Store) -> MemoryStore:
    other = MemoryStore()
    pour(contents(store), other)
    return other


def grown(store: Store, epochs: int = 6) -> Repository:
    """Epochs that share some, by reuse over one or several steps, and some of the same chunks in two records."""
    repo = open_repo(store)
    dice = random.Random(3)
    parts = {name: np.random.default_rng(n).standard_normal(9000) for n, name in enumerate("abcdef")}
    for epoch in range(1, epochs + 1):
        for name in dice.sample("abcdef", 2):
            parts[name] = np.random.default_rng(100 * epoch + ord(name)).standard_normal(9000)
        model = {name: value.copy() for name, value in parts.items()}
        repo.save(
            epoch, {"model": model, "ema": {"a": parts["a"].copy()}, "optim": {"m": parts["b"] * 2}}, {"x": -epoch}
        )
    return repo


def assert_true(store: Store) -> None:
    """Each figure against the store itself."""
    found = open_repo(store).du()
    assert found.bytes_total == bytes_of(store)
    assert found.objects_missing == 0
    for row in found.epochs:
        other = clone(store)
        before = bytes_of(other)
        open_repo(other).delete(row.epoch)
        assert before - bytes_of(other) == row.bytes_alone, row
        catalog = Catalog(store)
        manifest = catalog.manifest(catalog.committed(row.epoch)[-1])
        needs = {manifest.key, *catalog.reach(manifest)}
        assert row.bytes_stored == sum(store.info(key).size for key in needs)
        assert row.bytes_shared == row.bytes_stored - row.bytes_alone
        assert row.bytes_state == manifest.bytes_state


@pytest.mark.parametrize("kind", ["memory", "local", "s3"])
def test_the_figures_are_those_of_the_store(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """Stored, shared, alone and total, on each kind of store."""
    store: Store = MemoryStore()
    if kind == "local":
        store = LocalStore(str(tmp_path))
    elif kind == "s3":
        bucket: Bucket = request.getfixturevalue("s3")
        store = open_store(bucket.url(), storage_options=bucket.storage_options)
    grown(store, 3 if kind == "s3" else 6)
    assert_true(store)


def test_what_a_prune_would_free_is_what_it_frees() -> None:
    """By epochs, by records, by both."""
    store = MemoryStore()
    grown(store)
    policies: list[Any] = [
        KeepLast(2),
        KeepLast(1) | KeepBest("x", 2, "max"),
        {"model": KeepLast(3), "optim": KeepLast(1)},
        {"optim": KeepLast(1)},
        KeepLast(99),
    ]
    for policy in policies:
        other = clone(store)
        told = open_repo(other).du(policy)
        assert contents(other) == contents(store)
        assert told.plan is not None
        before = bytes_of(other)
        report = open_repo(other).prune(policy)
        assert report.removed == told.plan.removed
        assert report.dropped == told.plan.dropped
        # Dropping a record writes the manifest anew, with a few words more about what was left out.
        slack = 2000 * len(report.dropped)
        assert abs(before - bytes_of(other) - told.bytes_freed) <= slack, policy


def test_debris_and_saves_under_way() -> None:
    """What a failed save left is debris; what one is writing is not, nor what was committed while we counted."""
    store = MemoryStore()
    repo = grown(store, 2)
    clean = repo.du()
    with pytest.raises(KeyboardInterrupt), repo.begin(7) as txn:
        txn.write("model", make_state(7)["model"])
        txn.settle()
        inside = open_repo(store).du()
        assert inside.bytes_in_progress > 12_000 * 8
        assert inside.bytes_debris == 0
        raise KeyboardInterrupt
    assert repo.du() == clean
    key = keys.chunk_key(keys.new_attempt(), "ab" * 32)
    store.put(key, b"x" * 777)
    found = repo.du()
    assert (found.bytes_debris, found.objects_debris, found.bytes_stored) == (777, 1, clean.bytes_stored)

    def commit_another() -> None:
        open_repo(store).save(9, make_state(9))

    with FaultStore(store, [Fault("list", lambda prefix: prefix == "", error=commit_another)]) as racing:
        assert usage(Catalog(racing)).bytes_debris == 777
    assert repo.gc(grace=0).bytes_freed == 777
    assert open_repo(store).du().bytes_debris == 0


def test_scratch_files_are_debris(tmp_path: Path) -> None:
    """What an interrupted put left in a folder counts."""
    store = LocalStore(str(tmp_path))
    repo = grown(store, 1)
    before = repo.du()
    (tmp_path / keys.partial_key(keys.manifest_key(4, 1))).write_bytes(b"half")
    found = repo.du()
    assert (found.bytes_debris - before.bytes_debris, found.objects_debris) == (4, 1)


def test_damage_is_reported_and_its_bytes_are_not_called_debris() -> None:
    """A lost chunk, a damaged index, a damaged manifest."""
    store = MemoryStore()
    grown(store, 3)
    good = open_repo(store).du()
    catalog = Catalog(store)
    second = catalog.manifest(catalog.committed(2)[-1])
    chunk = next(c for c in catalog.index(second.records[0]).chunks if c.attempt == second.attempt)
    store.delete(chunk.key)
    found = open_repo(store).du()
    assert found.objects_missing == 1
    assert found.bytes_stored == good.bytes_stored - chunk.stored_length

    index = store.get(second.records[0].key)
    store.delete(second.records[0].key)
    store.put(second.records[0].key, index[:-1] + bytes([index[-1] ^ 1]))
    found = open_repo(store).du()
    assert [bool(row.damaged) for row in found.epochs] == [False, True, False]
    assert found.bytes_unknown > 0
    assert found.bytes_debris == 0
    assert found.bytes_total == bytes_of(store)

    data = store.get(second.key)
    store.delete(second.key)
    store.put(second.key, data[:-2] + b"x}")
    found = open_repo(store).du()
    assert found.epochs[1].damaged
    assert found.epochs[1].bytes_state == 0
    assert found.bytes_debris == 0
    assert found.bytes_total == bytes_of(store)


def test_no_chunk_is_read_and_a_failing_store_is_an_error() -> None:
    """Only manifests and indexes are read."""
    store = MemoryStore()
    grown(store, 2)
    gone = [Fault("get", "/chunks/", error=TransientError("no"), times=None)]
    assert usage(Catalog(FaultStore(store, gone))) == open_repo(store).du()
    with pytest.raises(TransientError):
        usage(Catalog(FaultStore(store, [Fault("get", "/records/", error=TransientError("no"))])))


def test_many_objects_are_listed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts together are the whole."""
    store = MemoryStore()
    grown(store, 4)
    store.put(keys.chunk_key(keys.new_attempt(), "ab" * 32), b"x" * 777)
    one = open_repo(store).du()
    monkeypatch.setattr("ckptstore.usage._ONE_LISTING", 3)
    monkeypatch.setattr("ckptstore.usage._BATCH_CHUNKS", 5)
    monkeypatch.setattr("ckptstore.usage._BATCH_MANIFESTS", 3)
    seen: list[tuple[int, int]] = []
    assert open_repo(store).du(progress=lambda done, total: seen.append((done, total))) == one
    assert seen == [(3, 4), (4, 4)]
    assert one.bytes_debris == 777


def test_an_empty_repository() -> None:
    """Nothing is taken but by the marker."""
    store = MemoryStore()
    repo = open_repo(store)
    found = repo.du(KeepLast(1))
    assert (found.epochs, found.bytes_stored, found.bytes_total) == ((), 0, bytes_of(store))
