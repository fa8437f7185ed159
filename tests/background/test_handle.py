"""Handles: the moments of a save, its errors, what is in flight, and what other calls do meanwhile."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    BusyError,
    DeadlineError,
    EpochExistsError,
    InvalidArgumentError,
    KeepLast,
    Repository,
    SaveHandle,
    StoreFullError,
)
from ckptstore.pipeline import cores
from ckptstore.stores import MemoryStore
from ckptstore.testing import Fault, FaultStore
from tests.background.helpers import SECONDS, Gate, small_state
from tests.repository.helpers import assert_no_debris, assert_same, make_state, open_repo


def full(match: str = "chunks/", times: int | None = 1) -> FaultStore:
    """A store that has no space left, for a while."""
    return FaultStore(MemoryStore(), [Fault("put", match, error=lambda: StoreFullError("no space"), times=times)])


# ---- moments ---------------------------------------------------------------------------------------------------


def test_moments() -> None:
    """Staged, uploaded and committed are seen one after the other, each exactly when it is true."""
    with Gate("chunks/") as chunks, Gate("manifests/", chunks.store) as manifests, Gate("", MemoryStore()):
        repo = open_repo(manifests.store)
        handle = repo.save_async(1, small_state())
        assert (handle.stage, handle.done(), handle.skipped, handle.epoch) == ("staged", False, False, 1)
        assert chunks.reached.wait(SECONDS)
        assert not handle.wait(0, until="uploaded")
        chunks.opened.set()
        assert handle.wait(SECONDS, until="uploaded")
        assert manifests.reached.wait(SECONDS)
        assert (handle.stage, handle.done(), repo.epochs()) == ("uploaded", False, [])
        manifests.opened.set()
        assert handle.wait(SECONDS, until="committed")
        assert repo.epochs() == [1]
        assert handle.wait(SECONDS)
        assert (handle.stage, handle.done()) == ("committed", True)
        seconds = list(handle.seconds.items())
        assert [name for name, _ in seconds] == ["staged", "uploaded", "committed", "done"]
        assert sorted(at for _, at in seconds) == [at for _, at in seconds]
        assert "epoch 1, committed" in repr(handle)


def test_committed_comes_before_pruning() -> None:
    """A checkpoint is seen as committed when it exists; what follows in the background cannot undo that."""
    pruning, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        pruning.set()
        assert go_on.wait(SECONDS)

    store = FaultStore(MemoryStore(), [Fault("delete", "manifests/", error=hold, times=1)])
    repo = open_repo(store, keep=KeepLast(1))
    repo.save(1, small_state(1))
    handle = repo.save_async(2, small_state(2))
    assert handle.wait(SECONDS, until="committed")
    assert pruning.wait(SECONDS)
    assert not handle.done()
    go_on.set()
    assert handle.result().epoch == 2
    assert repo.epochs() == [2]
    assert_no_debris(store)


def test_result_is_the_checkpoint() -> None:
    """``result`` gives what ``save`` would have returned, with its report, each time."""
    repo = open_repo(MemoryStore())
    handle = repo.save_async(4, make_state(4), {"loss": 0.5})
    checkpoint = handle.result()
    assert checkpoint is handle.result(0)
    assert handle.exception() is None
    assert (checkpoint.epoch, checkpoint.metadata) == (4, {"loss": 0.5})
    assert checkpoint.report is not None
    assert checkpoint.report.bytes_state > 0
    assert_same(checkpoint.load(), make_state(4))


def test_waiting_has_an_end() -> None:
    """Asking for a result with a timeout raises DeadlineError, and the save goes on."""
    with Gate() as gate:
        handle = open_repo(gate.store).save_async(1, small_state())
        assert handle.wait(0.01) is False
        for ask in (handle.result, handle.exception):
            with pytest.raises(DeadlineError, match=r"epoch 1 .* goes on") as caught:
                ask(0.01)
            assert caught.value.epoch == 1
        gate.opened.set()
        assert handle.result(SECONDS).epoch == 1
    with pytest.raises(InvalidArgumentError):
        handle.wait(until="someday")  # type: ignore[arg-type]


def test_progress() -> None:
    """The callback is told of all bytes of the copy, as with ``save``."""
    told: list[tuple[int, int]] = []
    state = make_state(1)
    total = sum(v.nbytes for record in state.values() for v in record.values() if isinstance(v, np.ndarray))
    open_repo(MemoryStore()).save_async(1, state, progress=lambda done, of: told.append((done, of))).result()
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_its_share_of_the_cores() -> None:
    """A background save keeps at most ``background_cores`` threads busy; by default half of the cores."""
    seen: set[threading.Thread] = set()
    before = {*threading.enumerate()}  # those of earlier tests that left a save behind

    def note() -> None:
        seen.update(thread for thread in threading.enumerate() if "ckptstore-cpu" in thread.name)

    store = FaultStore(MemoryStore(), [Fault("put", "chunks/", error=note, times=None)])
    repo = open_repo(store, background_cores=1)
    repo.save_async(1, make_state(1, items=200_000)).result()
    assert len(seen - before) == 1
    assert open_repo(MemoryStore())._background_cores == max(1, cores() // 2)
    bad: list[tuple[str, Any]] = [("background_cores", value) for value in (0, -1, 1.5, True, "2")]
    bad += [("exit_timeout", value) for value in (-1, float("nan"), float("inf"), "2", None)]
    for name, value in bad:
        with pytest.raises(InvalidArgumentError, match=name):
            open_repo(MemoryStore(), **{name: value})


# ---- in flight -------------------------------------------------------------------------------------------------


def test_wait_until_the_earlier_one_is_done() -> None:
    """By default a second save waits for the first: never two in flight, and both are right."""
    with Gate() as gate:
        repo = open_repo(gate.store)
        first = repo.save_async(1, make_state(1))
        assert gate.reached.wait(SECONDS)
        found: list[SaveHandle] = []
        thread = threading.Thread(target=lambda: found.append(repo.save_async(2, make_state(2))))
        thread.start()
        thread.join(0.05)
        assert not found
        gate.opened.set()
        thread.join(SECONDS)
        assert first.done()
        assert_same(found[0].result().load(), make_state(2))
        assert_same(first.result().load(), make_state(1))


def test_skip() -> None:
    """With "skip" a save is left out while another is in flight; its handle says so, and nothing else complains."""
    with Gate() as gate:
        repo = open_repo(gate.store)
        first = repo.save_async(1, small_state())
        skipped = repo.save_async(2, small_state(), when_busy="skip")
        assert (skipped.skipped, skipped.stage, skipped.done(), skipped.wait(0)) == (True, "skipped", True, True)
        with pytest.raises(BusyError, match=r"epoch 2 was not saved.*epoch 1"):
            skipped.result()
        gate.opened.set()
        first.result()
        again = repo.save_async(3, small_state(), when_busy="skip")
        assert not again.skipped
        again.result()
        repo.close()
        assert open_repo(gate.inner).epochs() == [1, 3]


def test_error() -> None:
    """With "error" a save is refused while another is in flight, by an error that names that one."""
    with Gate() as gate:
        repo = open_repo(gate.store)
        first = repo.save_async(1, small_state())
        with pytest.raises(BusyError) as caught:
            repo.save_async(2, small_state(), when_busy="error")
        assert caught.value.epoch == 1
        gate.opened.set()
        first.result()
        assert repo.save_async(2, small_state(), when_busy="error").result().epoch == 2


def test_many_threads() -> None:
    """Saves from many threads come one after the other, and all are right."""
    repo = open_repo(MemoryStore())
    handles: dict[int, SaveHandle] = {}

    def save(epoch: int) -> None:
        handles[epoch] = repo.save_async(epoch, make_state(epoch))

    threads = [threading.Thread(target=save, args=(epoch,)) for epoch in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for epoch in range(8):
        assert_same(handles[epoch].result().load(), make_state(epoch))


@pytest.mark.parametrize("act", ["save", "begin"])
def test_other_saves_wait(act: str) -> None:
    """``save`` and ``begin`` first wait for the save in flight."""
    with Gate() as gate:
        repo = open_repo(gate.store)
        handle = repo.save_async(1, small_state())
        assert gate.reached.wait(SECONDS)
        threading.Timer(0.05, gate.opened.set).start()
        if act == "save":
            repo.save(2, small_state())
        else:
            with repo.begin(2) as txn:
                assert handle.done()
                txn.write("model", 1)
        assert handle.done()
        assert repo.epochs() == [1, 2]


def test_what_goes_on_meanwhile() -> None:
    """Reading, verifying, pruning, gc and deleting go on beside a save in flight, and do it no harm."""
    with Gate(inner=MemoryStore()) as gate:
        gate.opened.set()
        repo = open_repo(gate.store)
        for epoch in (1, 2, 3):
            repo.save(epoch, make_state(epoch))
        gate.opened.clear()
        gate.reached.clear()
        handle = repo.save_async(4, make_state(4))
        assert gate.reached.wait(SECONDS)
        latest = repo.latest(deep=True)
        assert latest is not None
        assert_same(latest.load(), make_state(3))
        repo.prune(KeepLast(2))
        repo.delete(2)
        repo.gc()
        assert repo.verify().ok
        assert not handle.done()
        gate.opened.set()
        assert_same(handle.result().load(), make_state(4))
        assert repo.epochs() == [3, 4]
        assert repo.verify().ok


# ---- errors ----------------------------------------------------------------------------------------------------


def test_errors_are_raised_by_result(caplog: pytest.LogCaptureFixture) -> None:
    """An error keeps its type, names the epoch, is raised at every ``result``, and then by nothing else."""
    repo = open_repo(full())
    with caplog.at_level(logging.ERROR, "ckptstore"):
        handle = repo.save_async(7, small_state())
        assert handle.wait(SECONDS)
    assert "epoch 7" in caplog.text  # logged when it happened, whether or not anybody asks
    for _ in range(3):
        with pytest.raises(
            StoreFullError, match=r"background save of epoch 7 to memory:.* failed: .*no space"
        ) as caught:
            handle.result()
        assert caught.value.epoch == 7
    assert handle.stage == "failed"
    error = handle.exception()
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    repo.save_async(7, small_state()).result()
    repo.close()


def save(repo: Repository) -> object:
    return repo.save(8, small_state())


def save_async(repo: Repository) -> object:
    return repo.save_async(8, small_state()).result()


def begin(repo: Repository) -> object:
    with repo.begin(8) as txn:
        txn.write("model", 1)
    return None


@pytest.mark.parametrize("act", [save, save_async, begin])
def test_errors_are_raised_by_the_next_save(act: Callable[[Repository], object]) -> None:
    """An error that nobody has asked for is raised by the next save, once; called again, that save is made."""
    repo = open_repo(full())
    repo.save_async(7, small_state())
    with pytest.raises(StoreFullError, match="epoch 7"):
        act(repo)
    assert repo.epochs() == []
    act(repo)
    assert repo.epochs() == [8]
    repo.close()


def test_errors_are_raised_by_close() -> None:
    """An error that nobody has asked for is raised by ``close``, which has closed all the same, once."""
    closed = []

    class Store(MemoryStore):
        def close(self) -> None:
            closed.append(1)

    store = FaultStore(Store(), [Fault("put", "chunks/", error=StoreFullError("no space"))])
    repo = open_repo(store)
    repo.save_async(7, small_state())
    with pytest.raises(StoreFullError, match="epoch 7"):
        repo.close()
    assert closed == [1]
    repo.close()


def test_errors_of_the_block_come_first() -> None:
    """Leaving ``with repo`` by an error raises that one; the background save is waited for, and heard elsewhere."""
    handle = None
    with pytest.raises(ZeroDivisionError), open_repo(full()) as repo:
        handle = repo.save_async(7, small_state())
        raise ZeroDivisionError
    assert handle is not None
    assert handle.done()
    assert isinstance(handle.exception(), StoreFullError)
    with pytest.raises(StoreFullError), open_repo(full()) as repo:
        repo.save_async(7, small_state())


def test_refused_saves() -> None:
    """An epoch that is there already is found out in the background, and the repository is as it was."""
    store = MemoryStore()
    repo = open_repo(store)
    repo.save(1, make_state(1))
    assert isinstance(repo.save_async(1, make_state(2)).exception(), EpochExistsError)
    assert_same(repo.checkpoint(1).load(), make_state(1))
    assert_no_debris(store)
    assert_same(repo.save_async(1, make_state(2), replace=True).result().load(), make_state(2))


def test_other_errors_say_the_epoch() -> None:
    """An error that is not ours keeps its type and is passed on; where Python can, it is noted which save it ended."""

    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError("mine")

    handle = open_repo(MemoryStore()).save_async(5, make_state(1), progress=fail)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        handle.result()
    notes: list[str] = getattr(caught.value, "__notes__", ["epoch 5"])
    assert "epoch 5" in notes[0]


def test_errors_keep_no_memory() -> None:
    """A failed save that nobody asks about does not hold on to the staging memory once the repository is closed."""
    repo = open_repo(full(times=None))
    handle = repo.save_async(1, make_state(1, items=100_000))
    assert handle.wait(SECONDS)
    buffer = weakref.ref(repo._background.arena._buffer)
    with pytest.raises(StoreFullError):
        repo.close()
    gc.collect()
    assert buffer() is None
    assert isinstance(handle.exception(), StoreFullError)


# ---- closing ---------------------------------------------------------------------------------------------------


def test_close_waits() -> None:
    """``close`` waits for the save in flight; it may be called twice."""
    with Gate() as gate:
        repo = open_repo(gate.store)
        handle = repo.save_async(1, small_state())
        threading.Timer(0.05, gate.opened.set).start()
        repo.close()
        assert handle.result(0).epoch == 1
        repo.close()


def test_close_does_not_wait_for_ever() -> None:
    """``close`` gives up after ``exit_timeout`` with DeadlineError; the save goes on, and close can be called again."""
    with Gate() as gate:
        repo = open_repo(gate.store, exit_timeout=0.05)
        handle = repo.save_async(1, small_state())
        with pytest.raises(DeadlineError, match="epoch 1"):
            repo.close()
        gate.opened.set()
        assert handle.result(SECONDS).epoch == 1
        repo.close()


def test_no_thread_is_left() -> None:
    """Between saves no thread of ours runs."""
    repo = open_repo(MemoryStore())
    before = {*threading.enumerate()}  # not their number: threads of earlier tests may end meanwhile
    for epoch in range(3):
        repo.save_async(epoch, small_state()).result()
    for thread in threading.enumerate():
        if thread.name == "ckptstore-save":
            thread.join(SECONDS)
    assert {*threading.enumerate()} <= before


def test_front_door(tmp_path: Any) -> None:
    """``ckptstore.open`` takes both options, and checks them before it makes anything."""
    with ckptstore.open(tmp_path / "a", background_cores=1, exit_timeout=5) as repo:
        assert repo.save_async(1, small_state()).result().epoch == 1
    options: list[dict[str, Any]] = [{"background_cores": 0}, {"exit_timeout": -1}]
    for option in options:
        with pytest.raises(InvalidArgumentError):
            ckptstore.open(tmp_path / "b", **option)
    assert not (tmp_path / "b").exists()
