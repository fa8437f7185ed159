"""Records that are saved less often: what the other epochs say, what is found, and what is never pruned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import InvalidArgumentError, InvalidRecordError, KeepLast, RecordNotFoundError, keys
from ckptstore.stores import MemoryStore

EVERY = {"optimizer": 3}


def state(epoch: int) -> dict[str, Any]:
    return {"model": {"w": epoch}, "optimizer": {"m": -epoch}}


@pytest.mark.parametrize("background", [False, True])
def test_records_are_saved_less_often(tmp_path: Path, background: bool) -> None:
    """Epochs that are no multiple lack the record and say why; ``need`` finds the newest that has it."""
    with ckptstore.open(tmp_path / "r", every=EVERY) as repo:
        for epoch in range(8):
            if background:
                repo.save_async(epoch, state(epoch)).result(60)
            else:
                repo.save(epoch, state(epoch))
    with ckptstore.open(tmp_path / "r") as repo:
        newest = repo.latest()
        assert newest is not None
        assert (newest.epoch, [*newest.records]) == (7, ["model"])
        assert newest.left_out == {"optimizer": "it is saved every 3 epochs"}
        assert newest.load() == {"model": {"w": 7}}
        with pytest.raises(RecordNotFoundError, match=r"every 3 epochs.*need="):
            newest.load("optimizer")
        whole = repo.latest(need=("model", "optimizer"))
        assert whole is not None
        assert (whole.epoch, whole.left_out, whole.load()) == (6, {}, state(6))
        assert repo.latest(need=["scheduler"]) is None
        assert repo.verify().ok


@pytest.mark.parametrize("spill", [False, True])
def test_what_can_be_resumed_from_is_never_pruned(tmp_path: Path, spill: bool) -> None:
    """P5: beside the newest intact epoch a prune keeps the newest that has what it lacks, damaged ones passed by."""
    options: dict[str, Any] = {"spill": tmp_path / "s"} if spill else {}
    with ckptstore.open(tmp_path / "r", every=EVERY, keep=KeepLast(1), **options) as repo:
        for epoch in range(1, 9):
            repo.save(epoch, state(epoch))
        assert repo.epochs() == [6, 8]
        kept = repo.plan().kept
        assert kept == {6: "the newest intact epoch that has 'optimizer'", 8: "one of the last 1"}
        whole = repo.latest(need=["optimizer"])
        assert whole is not None
        assert whole.load() == state(6)
        repo.save(9, state(9))
        assert repo.epochs() == [9]


def test_a_damaged_one_does_not_count() -> None:
    """An epoch whose optimizer is damaged is not what a run can resume from: the one before stays."""
    store = MemoryStore()
    repo = ckptstore.Repository(store, every=EVERY)
    for epoch in range(1, 9):
        repo.save(epoch, {"model": {"w": epoch}, "optimizer": {"m": bytes([epoch]) * 100_000}})
    attempt = repo.checkpoint(6)._manifest.attempt
    for info in list(store.list(keys.attempt_prefix(attempt))):
        store.put(info.key, b"rotten")
    assert repo.prune(KeepLast(1)).kept.keys() == {3, 8}
    whole = repo.latest(need=["optimizer"])
    assert whole is not None
    assert whole.epoch == 3


def test_a_record_that_is_given_explicitly() -> None:
    """``every`` is about ``save``; a transaction writes what it is told to."""
    repo = ckptstore.Repository(MemoryStore(), every=EVERY)
    with repo.begin(1) as txn:
        txn.write("optimizer", {"m": 1})
    assert repo.checkpoint(1).left_out == {}
    with pytest.raises(InvalidRecordError, match="no record"):
        repo.save(2, {"optimizer": {"m": 1}})
    assert repo.epochs() == [1]


@pytest.mark.parametrize("every", [5, {"optimizer": 0}, {"optimizer": True}, {"": 1}, {"a/b": "1"}, ["optimizer"]])
def test_nonsense_is_refused(tmp_path: Path, every: Any) -> None:
    """Bad input is a typed error before anything is written."""
    with pytest.raises((InvalidArgumentError, InvalidRecordError)):
        ckptstore.open(tmp_path / "r", every=every)
    assert not (tmp_path / "r").exists()
    repo = ckptstore.open(tmp_path / "q")
    for need in ("model", 3, [3]):
        with pytest.raises(InvalidArgumentError):
            repo.latest(need=need)  # type: ignore[arg-type]
