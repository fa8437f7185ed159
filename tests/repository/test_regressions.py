"""Failures that were once possible, each as the kind that it belongs to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import KeepBest, KeepLast, retention
from ckptstore.catalog import Catalog
from ckptstore.stores.memory import MemoryStore


def test_values_that_change_and_change_back(tmp_path: Path) -> None:
    """P3, P7: an array that changed during one save is never mistaken for unchanged by a later, undisturbed one."""
    repo = ckptstore.open(tmp_path / "r", chunk_size=1 << 20)
    noise = np.random.default_rng(0)
    array = np.full(65536, 1, "u1")
    state: dict[str, Any] = {"x": array} | {f"b{i}": noise.integers(0, 255, 1 << 20, dtype="u1") for i in range(200)}
    repo.save(1, {"m": state}, progress=lambda done, total: array.fill(2))
    array.fill(1)
    repo.save(2, {"m": state})
    assert ckptstore.open(tmp_path / "r").checkpoint(2).load("m", paths=["x"])["x"].max() == 1


def test_too_many_records_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """P4: a save that reported success can be read: what no reader accepts is refused by the writer."""
    repo = ckptstore.open(tmp_path / "r")
    with pytest.raises(ckptstore.InvalidRecordError, match="10000"):
        repo.save(1, {f"r{i}": i for i in range(10_001)})
    with pytest.raises(ckptstore.InvalidRecordError, match="metadata"):
        repo.save(1, {"m": 1}, metadata={"text": "x" * (9 << 20)})
    assert repo.epochs() == []
    assert sorted(os.listdir(tmp_path / "r")) == ["ckptstore.json"]


def test_scan_that_misses_both_generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: an epoch that is replaced during a listing is never reported as absent."""
    repo = ckptstore.open(tmp_path / "r")
    repo.save(1, {"m": 1})
    other = ckptstore.open(tmp_path / "r")
    real = os.scandir
    replaced: list[str] = []

    def scandir(path: Any) -> Any:
        found = real(path)
        if str(path).endswith("manifests") and not replaced:
            replaced.append(str(path))
            with found:
                entries = list(found)  # the names are taken, and only now the epoch is replaced
            other.save(1, {"m": 2}, replace=True)
            return _Entries(entries)
        return found

    monkeypatch.setattr(os, "scandir", scandir)
    latest = repo.latest()
    assert replaced
    assert latest is not None
    assert latest.load("m") == 2


class _Entries(list[Any]):
    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_gc_with_no_grace_beside_a_save_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """P4, P5: a save that begins after gc looked at the leases is not swept: it succeeds and verifies, or it fails."""
    store = MemoryStore()
    repo = ckptstore.Repository(store)
    repo.save(1, {"m": np.arange(10)})
    txn: list[ckptstore.Transaction] = []
    real = retention._list_debris

    def begin_first(inner: Any) -> Any:
        txn.append(repo.begin(2))
        txn[0].write("m", np.arange(1000))
        return real(inner)

    monkeypatch.setattr(retention, "_list_debris", begin_first)
    retention.gc(Catalog(store), grace=0)
    txn[0].commit()
    assert repo.verify().ok
    assert repo.epochs() == [1, 2]


def test_repository_that_vanishes(tmp_path: Path) -> None:
    """P4: when the folder is gone (a mount went away), nothing is "empty" and nothing is saved into the void."""
    root = tmp_path / "r"
    repo = ckptstore.open(root)
    repo.save(1, {"m": 1})
    shutil.rmtree(root)
    root.mkdir()
    calls: list[Any] = [repo.latest, repo.epochs, repo.verify, repo.gc]
    calls += [
        lambda: repo.delete(1),
        lambda: repo.verify(1),
        lambda: repo.checkpoint(1),
        lambda: repo.prune(KeepLast(1)),
        lambda: repo.save(2, {"m": 1}),
    ]
    for call in calls:
        with pytest.raises(ckptstore.RepositoryNotFoundError, match="vanished"):
            call()
    assert os.listdir(root) == []


def test_prune_reads_the_newest_in_full(tmp_path: Path) -> None:
    """P5: an epoch whose bytes rotted does not count as intact when prune decides what may go."""
    repo = ckptstore.open(tmp_path / "r")
    for epoch in (1, 2):
        repo.save(epoch, {"m": np.random.default_rng(epoch).random(1000)})
    newest = max((tmp_path / "r").glob("attempts/*/chunks/*"), key=lambda path: path.stat().st_mtime_ns)
    body = bytearray(newest.read_bytes())
    body[len(body) // 2] ^= 1
    newest.write_bytes(bytes(body))
    fresh = ckptstore.open(tmp_path / "r")
    fresh.prune(KeepLast(1))
    latest = fresh.latest(deep=True)
    assert latest is not None
    assert latest.epoch == 1


def test_pruning_after_a_save_that_reused_rotten_bytes(tmp_path: Path) -> None:
    """P5: the newest intact epoch survives although newer ones share a chunk that rotted."""
    repo = ckptstore.open(tmp_path / "r")
    noise = np.random.default_rng(0)
    repo.save(0, {"m": noise.random(1000)})
    shared = noise.random(300_000)
    repo.save(1, {"m": shared})
    largest = max((tmp_path / "r").glob("attempts/*/chunks/*"), key=lambda path: path.stat().st_size)
    body = bytearray(largest.read_bytes())
    body[len(body) // 2] ^= 1
    largest.write_bytes(bytes(body))
    fresh = ckptstore.open(tmp_path / "r", keep=KeepLast(1))
    fresh.save(2, {"m": shared, "n": 1})
    latest = fresh.latest(deep=True)
    assert latest is not None
    assert latest.epoch == 0


def test_mistyped_metric_deletes_nothing(tmp_path: Path) -> None:
    """P5: a metric that no epoch has is a mistake, not a reason to delete all epochs."""
    repo = ckptstore.open(tmp_path / "r", keep=KeepBest("los", 1))
    for epoch in range(3):
        repo.save(epoch, {"m": epoch}, metadata={"loss": 1.0})
    assert repo.epochs() == [0, 1, 2]


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, float])
def test_metrics_of_any_number_type(kind: Any, tmp_path: Path) -> None:
    """P5: the best epoch is kept whatever number type its metric has."""
    repo = ckptstore.open(tmp_path / "r", keep=KeepLast(1) | KeepBest("loss", 1))
    for epoch, loss in enumerate([0.25, 0.5, 0.75, 1.0]):
        repo.save(epoch, {"m": epoch}, metadata={"loss": kind(loss)})
    assert repo.epochs() == [0, 3]


class _Broken(ckptstore.Policy):
    def keep(self, epochs: Any) -> dict[int, str]:
        raise KeyError("a mistake in a policy")


def test_retention_cannot_fail_a_committed_save(tmp_path: Path) -> None:
    """P4: whatever goes wrong after the commit, the save has succeeded."""
    repo = ckptstore.open(tmp_path / "r", keep=KeepBest("loss") | _Broken())
    assert repo.save(1, {"m": 1}, metadata={"loss": 10**400}).epoch == 1
    with pytest.raises(ckptstore.InvalidArgumentError, match="policy"):
        ckptstore.open(tmp_path / "r", keep=3)  # type: ignore[arg-type]

    def listener(event: ckptstore.StoreEvent) -> None:
        raise RuntimeError("a mistake in a listener")

    with ckptstore.open(tmp_path / "r", on_request=listener) as watched:
        assert watched.save(2, {"m": 2}).epoch == 2


def test_interrupt_during_the_commit(tmp_path: Path) -> None:
    """P1: after an interrupt while the manifest is on its way, the epoch is whole or absent, never broken."""
    store = MemoryStore()
    repo = ckptstore.Repository(store)
    put = store.put

    def interrupted(key: str, data: Any, *, if_absent: bool = False) -> None:
        if key.startswith("manifests/"):
            late.append((key, bytes(data)))
            raise KeyboardInterrupt
        put(key, data, if_absent=if_absent)

    late: list[tuple[str, bytes]] = []
    store.put = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        repo.save(1, {"m": np.arange(100)})
    store.put = put  # type: ignore[method-assign]
    put(*late[0], if_absent=True)  # the request that was under way lands after all
    assert repo.verify().ok
    latest = repo.latest(deep=True)
    assert latest is not None
    assert latest.epoch == 1


@pytest.mark.parametrize("path", ["/proc/cpuinfo", "/dev/zero", "fifo"])
def test_files_that_are_none(path: str, tmp_path: Path) -> None:
    """P7: a file that cannot be stored as it is, is refused: no hang, no empty record."""
    if path == "fifo":
        path = str(tmp_path / "fifo")
        os.mkfifo(path)
    repo = ckptstore.open(tmp_path / "r")
    with pytest.raises(ckptstore.InvalidRecordError), repo.begin(1) as txn:
        txn.write_file("f", path)
    assert repo.epochs() == []


def test_very_large_keys(tmp_path: Path) -> None:
    """P7: keys of any size come back."""
    repo = ckptstore.open(tmp_path / "r")
    repo.save(1, {"m": {10**5000: np.arange(3)}})
    assert list(repo.checkpoint(1).load("m")) == [10**5000]


def test_targets_that_overlap(tmp_path: Path) -> None:
    """P3: loading in place into arrays that share memory is refused, not mixed."""
    repo = ckptstore.open(tmp_path / "r")
    repo.save(1, {"m": {"a": np.zeros(10), "b": np.ones(10)}})
    shared = np.full(15, 7.0)
    with pytest.raises(ckptstore.InvalidArgumentError, match="share memory"):
        repo.checkpoint(1).load("m", into={"a": shared[:10], "b": shared[5:]})
    assert (shared == 7).all()


def test_all_that_was_resumed_from_is_kept(tmp_path: Path) -> None:
    """P5: epochs loaded before the first save survive its pruning."""
    repo = ckptstore.open(tmp_path / "r")
    for epoch in (1, 2, 3):
        repo.save(epoch, {"m": epoch})
    resumed = ckptstore.open(tmp_path / "r", keep=KeepLast(1))
    resumed.checkpoint(1).load()
    resumed.checkpoint(3).load()
    resumed.save(4, {"m": 4})
    assert resumed.epochs() == [1, 3, 4]


def test_forked_child_does_not_end_the_save_of_its_parent(tmp_path: Path) -> None:
    """P1: a child that leaves the ``with`` block by an exception leaves the attempt alone."""
    script = f"""
        import os, ckptstore
        repo = ckptstore.open({str(tmp_path / "r")!r})
        with repo.begin(1) as txn:
            txn.write("m", 1)
            pid = os.fork()
            if pid == 0:
                try:
                    with txn:
                        raise RuntimeError
                except RuntimeError:
                    os._exit(0)
            os.waitpid(pid, 0)
        assert repo.checkpoint(1).load("m") == 1
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
