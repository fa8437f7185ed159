"""Coordinators that fall silent, and stores that do: a rank says what it knows, and no more."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from ckptstore import (
    Checkpoint,
    OutcomeUnknownError,
    RanksFailedError,
    StoreError,
    TransientError,
    keys,
    meeting,
    member,
)
from ckptstore.lease import SILENCE, clock
from ckptstore.manifest import Lease, decode_lease
from ckptstore.meeting import Signs
from ckptstore.stores import MemoryStore
from ckptstore.testing import CrashStore, Fault, FaultStore
from tests.ranks.helpers import SECONDS, assert_saved, part_of, save_all, save_part, started
from tests.repository.helpers import Interfering, keys_of, open_repo


def lease_of(store: MemoryStore, epoch: int, rank: int) -> Lease:
    prefix = f"leases/{keys.ranks_prefix(epoch)}{rank:04x}"
    (key,) = [key for key in keys_of(store) if key.startswith(prefix)]
    return decode_lease(store.get(key), key)


def test_a_missing_heartbeat_is_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease whose counter stands still for three heartbeats is a dead process's; one that beats never is."""
    store = started(2, 1)
    txn = open_repo(store).begin(2, rank=1, world_size=2, group="g")
    now, signs, lease = clock(), Signs(), lease_of(store, 2, 1)
    assert signs.death(lease) is None
    monkeypatch.setattr(meeting, "clock", lambda: now + SILENCE - 1)
    assert signs.death(lease) is None
    monkeypatch.setattr(meeting, "clock", lambda: now + SILENCE + 2)
    assert "no sign of life" in str(signs.death(lease))
    assert signs.death(msgspec.structs.replace(lease, beat=lease.beat + 1)) is None
    monkeypatch.undo()
    txn.abort()


@pytest.mark.parametrize("at", ["before the manifest", "after the manifest"])
def test_the_coordinator_falls_silent_around_its_commit(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Its heartbeat ends right before or after the manifest: the rank looks, and says which of the two."""
    store = started(2, 1)
    mode: Any = at.split(" ")[0]

    class AtManifest(CrashStore):
        def _mutate(self, key: str, *rest: Any) -> None:
            self._at = self.mutations + 1 if key.startswith("manifests/") else -1
            super()._mutate(key, *rest)

    monkeypatch.setattr(meeting, "SILENCE", 0.5)
    found = save_all({0: AtManifest(store, -1, mode), 1: store}, 2, 2, group="g", timeout=2.0)
    there = 2 in open_repo(store).epochs()
    assert there == (mode == "after")
    if there:
        assert isinstance(found[1], Checkpoint)
    else:
        assert isinstance(found[1], RanksFailedError)
        assert list(found[1].ranks) == [0]


def test_what_was_reported_as_failed_cannot_be_committed_later() -> None:
    """Rank 0 stands still right before its manifest; rank 1 gives up; then rank 0 goes on, and withdraws."""
    store = started(2, 1)
    stopped, go_on = threading.Event(), threading.Event()
    slow = Interfering(store)
    slow.after = False
    slow.at = lambda verb, key: verb == "put" and key.startswith("manifests/0")

    def stand_still() -> None:
        stopped.set()
        go_on.wait(SECONDS)

    slow.interfere = stand_still
    told: list[Any] = []

    def give_up(repo: Any, epoch: int, rank: int, ranks: int) -> Any:
        try:
            return save_part(repo, epoch, rank, ranks, group="g", timeout=0.2 if rank else SECONDS)
        except BaseException as error:
            told.append(error)
            if rank:
                go_on.set()
            raise

    found = save_all({0: slow, 1: store}, 2, 2, give_up)
    assert stopped.is_set()
    assert isinstance(found[1], RanksFailedError)
    assert not isinstance(found[0], Checkpoint)
    assert open_repo(store).epochs() == [1]
    assert_saved(save_all(store, 2, 2, group="again"), 2)


def test_a_store_that_fails_after_the_part_was_given() -> None:
    """The rank cannot ask any more: OutcomeUnknownError, which says so; before that it is an ordinary StoreError."""
    store = started(2, 1)
    error = TransientError("connection reset")
    deaf = FaultStore(store, [Fault("get", f"leases/{keys.ranks_prefix(2)}0000", error=error, times=None)])
    with pytest.raises(StoreError):
        early = open_repo(deaf)
        with early.begin(2, rank=1, world_size=2, group="first", timeout=SECONDS) as txn:
            open_repo(store).begin(2, rank=0, world_size=2, group="first")
            txn.write("rank-1", part_of(2, 1))

    faults = [Fault("get", f"leases/{keys.ranks_prefix(3)}0000", error=_second_time(error), times=None)]
    found = save_all({0: store, 1: FaultStore(store, faults)}, 3, 2, group="second")
    assert isinstance(found[0], Checkpoint)
    assert isinstance(found[1], OutcomeUnknownError)
    assert open_repo(store).epochs() == [1, 3]


def _second_time(error: BaseException) -> Any:
    calls = iter([None])
    return lambda: next(calls, error)


def test_the_wait_for_a_last_request_is_bounded() -> None:
    """What a killed process sent last has its effect within seconds, or never."""
    assert 0 < member.SETTLE <= 5
