"""Scenes of interrupted saves, and of which epoch is found afterwards."""

from __future__ import annotations

import math
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    CorruptionError,
    EpochExistsError,
    InvalidRecordError,
    KeepBest,
    KeepLast,
    OutcomeUnknownError,
    Repository,
    StoreError,
    keys,
)
from ckptstore.stores.local import LocalStore
from ckptstore.testing import Fault, FaultStore
from tests.repository.helpers import assert_no_debris, assert_same, make_state, manifests_of, open_repo, tiny_state


@pytest.fixture
def folder(fast_folder: Path) -> Path:
    return fast_folder / "repository"


def chunks_of(folder: Path, epoch: int) -> list[Path]:
    """The chunks that only this epoch needs."""
    attempt = next(m.attempt for m in manifests_of(LocalStore(folder)) if m.epoch == epoch)
    return sorted((folder / keys.chunks_prefix(attempt)).iterdir())


def three_epochs(folder: Path) -> None:
    with open_repo(LocalStore(folder)) as repo:
        for epoch in (1, 2, 3):
            repo.save(epoch, make_state(epoch))


def test_an_epoch_that_lacks_an_object_is_stepped_over(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """2: the newest whole epoch is found; the one that lacks an object is named once, an empty folder never."""
    three_epochs(folder)
    gone = chunks_of(folder, 3)[0]
    gone.unlink()
    (folder / "attempts" / keys.new_attempt() / "chunks").mkdir(parents=True)
    (folder / "000000000004").mkdir()
    found = open_repo(LocalStore(folder)).latest()
    assert found is not None
    assert found.epoch == 2
    assert [(skipped.epoch, skipped.key) for skipped in found.skipped] == [(3, gone.relative_to(folder).as_posix())]
    assert "missing" in found.skipped[0].reason
    assert sum("skipped epoch 3" in record.getMessage() for record in caplog.records) == 1
    assert not any("epoch 4" in record.getMessage() for record in caplog.records)


def test_a_write_that_fails_halfway_changes_nothing(folder: Path) -> None:
    """4: of eight records the fifth breaks off: the last epoch is the one before, and nothing of it was touched."""
    records = {f"r{number}": tiny_state(number)["model"] for number in range(8)}
    with open_repo(LocalStore(folder)) as repo:
        repo.save(1, records)
    broken = [0]

    def fifth(key: str) -> bool:
        broken[0] += "/chunks/" in key
        return "/chunks/" in key and broken[0] == 5

    changed = {name: tiny_state(number + 100)["model"] for number, name in enumerate(records)}
    script = [Fault("put", fifth, when="torn", error=StoreError("the line was cut"))]
    with pytest.raises(StoreError), FaultStore(LocalStore(folder), script) as store:
        open_repo(store).save(2, changed)
    fresh = open_repo(LocalStore(folder))
    assert fresh.epochs() == [1]
    assert fresh.verify().ok
    assert_same(fresh.checkpoint(1).load(), records)
    victim = chunks_of(folder, 1)[0]
    victim.write_bytes(b"")
    with pytest.raises(CorruptionError) as caught:
        fresh.checkpoint(1).load()
    assert caught.value.key == victim.relative_to(folder).as_posix()


def litter(folder: Path) -> dict[str, bytes | None]:
    """Things that others leave in a folder; None for a folder."""
    attempt = next((folder / "attempts").iterdir()).name
    shutil.copytree(folder / "attempts" / attempt, folder / "attempts" / f"{attempt}.tmp")
    (folder / "manifests" / "tmp").mkdir()
    (folder / "99999").mkdir()
    manifest = (folder / keys.manifest_key(3, 1)).read_bytes()
    for name, content in {
        "tmp": b"",
        "epoch-9.tmp": b"half",
        ".DS_Store": b"\0\0\0\1Bud1",
        "latest": b"7",
        "manifests/000000000009-000001.json.tmp": manifest,
        "manifests/9-1.json": manifest,
        "manifests/000000000009-000000.json": manifest,
        "manifests/last": b"",
        f"attempts/{attempt}/chunks/._0": b"x",
    }.items():
        (folder / name).write_bytes(content)
    return foreign(folder)


def foreign(folder: Path) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for at, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(at) / name
            key = path.relative_to(folder).as_posix()
            if path.is_file() and not keys.is_ours(key):
                found[key] = path.read_bytes()
    return found


def test_litter_is_ignored_and_left_alone(folder: Path) -> None:
    """5: leftovers and foreign files in the root are no candidates, disturb nothing, and are never deleted."""
    three_epochs(folder)
    before = litter(folder)
    assert len(before) > 9
    with open_repo(LocalStore(folder)) as repo:
        assert repo.epochs() == [1, 2, 3]
        newest = repo.latest()
        assert newest is not None
        assert (newest.epoch, newest.skipped) == (3, ())
        repo.save(4, make_state(4))
        assert sorted(repo.prune(KeepLast(2)).removed) == [1, 2]
        repo.gc(grace=0)
        assert repo.epochs() == [3, 4]
        assert repo.verify().ok
    assert foreign(folder) == before
    assert (folder / "99999").is_dir()
    assert (folder / "manifests" / "tmp").is_dir()


def test_no_epoch_that_can_be_read_is_an_error_with_all_reasons(folder: Path) -> None:
    """13: newest to oldest, each reason told; with none left it raises, and nothing is written over by itself."""
    three_epochs(folder)
    flipped, gone = chunks_of(folder, 3)[0], chunks_of(folder, 2)[0]
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    gone.unlink()
    found = open_repo(LocalStore(folder)).latest(deep=True)
    assert found is not None
    assert found.epoch == 1
    assert [(skipped.epoch, skipped.key) for skipped in found.skipped] == [
        (epoch, path.relative_to(folder).as_posix()) for epoch, path in ((3, flipped), (2, gone))
    ]
    chunks_of(folder, 1)[0].write_bytes(b"")
    repo = open_repo(LocalStore(folder))
    with pytest.raises(CorruptionError) as caught:
        repo.latest(deep=True)
    assert all(f"epoch {epoch}" in str(caught.value) for epoch in (1, 2, 3))
    with pytest.raises(EpochExistsError, match="replace=True"):
        repo.save(1, make_state(7))
    repo.save(1, make_state(7), replace=True)
    assert_same(repo.checkpoint(1).load(), make_state(7))


def test_a_save_that_was_cut_off_is_made_again(folder: Path) -> None:
    """3: what an unfinished save left never blocks the same epoch, in a new process or this one, without any flag."""
    with open_repo(LocalStore(folder)) as repo:
        repo.save(4, make_state(4))
        abandoned = repo.begin(5)
        abandoned.write("model", make_state(5)["model"])
        abandoned.settle()
        with pytest.raises(OutcomeUnknownError), open_repo(commit_lost(folder)) as other:
            other.save(6, make_state(6))
    for epoch in (5, 6):
        with open_repo(LocalStore(folder)) as repo:
            repo.save(epoch, make_state(epoch))
            assert_same(repo.checkpoint(epoch).load(), make_state(epoch))
    abandoned.abort()
    with open_repo(LocalStore(folder)) as repo:
        repo.gc(grace=0)
        assert_no_debris(repo.store)
        assert repo.epochs() == [4, 5, 6]


def commit_lost(folder: Path) -> FaultStore:
    """A store on which the commit never arrives, and which cannot be read afterwards."""
    error = ckptstore.TransientError("no answer")
    return FaultStore(
        LocalStore(folder),
        [Fault("put", "manifests/", error=error), Fault("get", "manifests/000000000006", error=error, times=None)],
    )


def test_links_and_folders_in_the_root(folder: Path) -> None:
    """76: loops, dangling links and a folder called latest are harmless: the newest epoch is in no link or pointer."""
    three_epochs(folder)
    os.symlink("latest", folder / "latest")
    os.symlink("nowhere", folder / "best")
    os.symlink(folder, folder / "attempts" / "loop")
    os.symlink("gone.json", folder / "manifests" / "last.json")
    (folder / "last").mkdir()
    with open_repo(LocalStore(folder), keep=KeepLast(2)) as repo:
        newest = repo.latest()
        assert newest is not None
        assert newest.epoch == 3
        repo.save(4, make_state(4))
        repo.gc(grace=0)
        assert repo.epochs() == [3, 4]
        assert repo.verify().ok
    assert all(os.path.lexists(folder / name) for name in ("latest", "best", "attempts/loop", "manifests/last.json"))


@pytest.mark.parametrize("name", ["latest", "best", "last", "manifest", "manifests", "attempts", "ckptstore.json"])
def test_names_that_mean_something_elsewhere(folder: Path, name: str) -> None:
    """76: a record or a metric may be called latest, best or manifest: no name of the user's becomes a key."""
    with open_repo(LocalStore(folder)) as repo:
        repo.save(1, {name: tiny_state(1)["model"]}, {name: 1.0})
        repo.save(2, {name: tiny_state(2)["model"]}, {name: 2.0})
        newest = repo.latest()
        assert newest is not None
        assert newest.epoch == 2
        assert_same(newest.load(name), tiny_state(2)["model"])
        assert repo.prune(KeepBest(name), dry_run=True).kept.keys() == {1, 2}  # the best one, and the newest
        assert all(keys.is_ours(info.key) for info in repo.store.list())


ODD = {"val/loss": math.nan, "a=b,c": 1, "": 0, "x" * 300: 2, "ü": -0.0, "../../evil": 3.5, "latest": None}


def test_metrics_of_any_name(folder: Path, tmp_path: Path) -> None:
    """77: names and values of metrics come back exactly, and the places of objects do not depend on them."""
    with open_repo(LocalStore(folder)) as repo, open_repo(LocalStore(tmp_path / "plain")) as plain:
        repo.save(1, tiny_state(1), ODD)
        plain.save(1, tiny_state(1))
        found = repo.checkpoint(1).metadata
        assert_same(found, ODD)
        assert struct.pack("<d", found["ü"]) == struct.pack("<d", -0.0)
        assert list(layout(folder)) == list(layout(tmp_path / "plain"))
    assert not (folder.parent / "evil").exists()


def layout(folder: Path) -> Iterator[str]:
    """Keys without what is random in them."""
    attempt = next((folder / "attempts").iterdir()).name
    for key in sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()):
        yield key.replace(attempt, "<attempt>").split("/records/")[0]


def test_not_a_number_is_never_best(folder: Path) -> None:
    """77: NaN, and epochs without the metric, lose against any number, whichever way is up."""
    with open_repo(LocalStore(folder)) as repo:
        for epoch, value in enumerate([math.nan, 3.0, 1.0, math.inf, -math.inf, math.nan]):
            repo.save(epoch, tiny_state(epoch), {"val/loss": value})
        repo.save(6, tiny_state(6))
        low = repo.prune(KeepBest("val/loss", 2), dry_run=True).kept
        high = repo.prune(KeepBest("val/loss", 2, mode="max"), dry_run=True).kept
    assert low.keys() == {2, 4, 6}
    assert high.keys() == {1, 3, 6}


def test_metrics_that_are_no_plain_values(folder: Path) -> None:
    """77: an array as a metric is refused before anything is written."""
    with open_repo(LocalStore(folder)) as repo:
        before = sorted(info.key for info in repo.store.list())
        with pytest.raises(InvalidRecordError, match="array"):
            repo.save(1, tiny_state(1), {"loss": np.ones(3)})
        assert sorted(info.key for info in repo.store.list()) == before


def test_the_root_may_hold_nothing_foreign_at_first(tmp_path: Path) -> None:
    """5: a place that holds something else and no repository is refused, not taken over."""
    (tmp_path / "epoch-9.tmp").write_bytes(b"half")
    with pytest.raises(ckptstore.FormatError, match="something else"):
        Repository(LocalStore(tmp_path))
    assert os.listdir(tmp_path) == ["epoch-9.tmp"]
