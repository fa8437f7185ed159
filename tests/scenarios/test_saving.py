"""Scenes of saves: the order of syncs, what retention may touch at each instant, and failures in the background."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptstore import CorruptionError, KeepBest, KeepLast, StoreError
from ckptstore.policies import Policy
from ckptstore.stores.base import Store
from ckptstore.stores.local import LocalStore
from ckptstore.stores.memory import MemoryStore
from ckptstore.testing import CrashStore, Fault, FaultStore, SimulatedCrash
from tests.repository.helpers import assert_same, make_state, manifests_of, open_repo, tiny_state


def test_all_is_synced_before_the_commit_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """19: every chunk and index is synced and linked, and its folder synced, before the manifest gets its name; after
    that its folder is synced before the save returns.
    """
    log: list[tuple[str, str]] = []
    real_sync, real_link = os.fsync, os.link

    def sync(handle: int) -> None:
        log.append(("sync", os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path)))
        real_sync(handle)

    def link(source: str, target: str, **options: Any) -> None:
        folder = options.get("dst_dir_fd")
        at = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else ""
        log.append(("link", os.path.relpath(os.path.join(at, target), tmp_path)))
        real_link(source, target, **options)

    with open_repo(LocalStore(tmp_path)) as repo:
        repo.save(1, make_state(1))  # the folders are there
        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "link", link)
        repo.save(2, make_state(2))
        monkeypatch.undo()
        manifest = next(m for m in manifests_of(repo.store) if m.epoch == 2)
        content = [info.key for info in repo.store.list(f"attempts/{manifest.attempt}/")]
    assert len(content) > 4
    commit = log.index(("link", manifest.key))
    for key in content:
        linked = log.index(("link", key))
        assert any(what == "sync" and name.startswith(f"{key}.tmp-") for what, name in log[:linked]), key
        assert ("sync", os.path.dirname(key)) in log[linked:commit], key
    assert any(what == "sync" and name.startswith(f"{manifest.key}.tmp-") for what, name in log[:commit])
    assert ("sync", "manifests") in log[commit:]


def test_zeros_of_the_right_length_are_damage(tmp_path: Path) -> None:
    """19: what a power cut leaves where nothing was synced, zeros under the right name, is told for any object."""
    with open_repo(LocalStore(tmp_path)) as repo:
        repo.save(1, make_state(1))
        objects = [info.key for info in repo.store.list("attempts/")]
    for key in objects:
        data = (tmp_path / key).read_bytes()
        (tmp_path / key).write_bytes(bytes(len(data)))
        with pytest.raises(CorruptionError) as caught:
            open_repo(LocalStore(tmp_path)).checkpoint(1).load()
        assert caught.value.key == key
        (tmp_path / key).write_bytes(data)


LOSSES = {"oldest": [0.1, 0.5, 0.6, 0.7], "middle": [0.5, 0.1, 0.6, 0.7], "newest": [0.5, 0.6, 0.7, 0.1], "none": None}


@pytest.mark.parametrize("outcome", ["succeeds", "fails", "is killed"])
@pytest.mark.parametrize("best", LOSSES)
@pytest.mark.parametrize("last", [1, 2, 3])
def test_at_each_instant_something_loads(last: int, best: str, outcome: str) -> None:
    """68: before and after whatever a save and its pruning do to the store, the newest intact epoch loads in full."""
    losses = LOSSES[best]
    policy: Policy = KeepLast(last) | KeepBest("loss") if losses else KeepLast(last)
    store = MemoryStore()
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        newest = open_repo(store).latest(deep=True)
        assert newest is not None
        assert_same(newest.load(), tiny_state(newest.epoch))

    def metadata(epoch: int) -> dict[str, float]:
        return {"loss": losses[epoch - 1]} if losses else {}

    for epoch in (1, 2, 3):
        open_repo(store).save(epoch, tiny_state(epoch), metadata(epoch))
    if outcome == "succeeds":
        open_repo(watched(store, look), keep=policy).save(4, tiny_state(4), metadata(4))
        best_epoch = 1 + losses.index(min(losses)) if losses else 4
        assert open_repo(store).epochs() == sorted({*range(5 - last, 5), best_epoch})
    elif outcome == "fails":
        broken = FaultStore(store, [Fault("put", "/chunks/", error=StoreError("no"))])
        with pytest.raises(StoreError):
            open_repo(watched(broken, look), keep=policy).save(4, tiny_state(4), metadata(4))
        assert open_repo(store).epochs() == [1, 2, 3]
    else:
        for at in range(1, 40, 3):
            crashing = CrashStore(store, at)
            try:
                open_repo(watched(crashing, look), keep=policy).save(4, tiny_state(4), metadata(4), replace=True)
            except SimulatedCrash:
                pass
            look()
        assert 4 in open_repo(store).epochs()
    assert looks >= 3


def watched(store: Store, look: Callable[[], None]) -> Store:
    """``look`` is called before each mutation."""
    return FaultStore(store, [Fault("put", error=look, times=None), Fault("delete", error=look, times=None)])


@pytest.mark.parametrize("ask", ["wait", "save"])
def test_a_failed_background_save_never_existed(ask: str) -> None:
    """80: its error is raised once, with its type; retention and the next save know nothing of its epoch."""
    store = FaultStore(MemoryStore(), [Fault("put", "/chunks/", error=StoreError("the disk is on fire"))])
    repo = open_repo(store, keep=KeepLast(1))
    handle = repo.save_async(1, tiny_state(1))
    if ask == "wait":
        with pytest.raises(StoreError, match="on fire") as caught:
            handle.result()
    else:
        with pytest.raises(StoreError, match="on fire") as caught:
            repo.save(2, tiny_state(2))
        assert repo.epochs() == []  # that save was not made
    assert type(caught.value) is StoreError
    assert caught.value.epoch == 1
    assert any(entry.name == "_send" for entry in caught.traceback), "the traceback leads to the cause"
    repo.save(2, tiny_state(2))
    report = repo.prune()
    assert (report.removed, list(report.kept)) == ({}, [2])
    assert repo.epochs() == [2]
    repo.close()


def test_the_counting_of_looks_is_real() -> None:
    """The scene of 68 would notice: a store on which nothing loads any more fails it."""
    store = MemoryStore()
    open_repo(store).save(1, tiny_state(1))

    def look() -> None:
        if open_repo(store).latest() is None:
            raise AssertionError("nothing loads")

    repo = open_repo(watched(store, look))
    with pytest.raises(AssertionError, match="nothing loads"):
        repo.delete(1)
