"""A failure that a rank reports stays one: whatever the coordinator does next, the epoch never comes to exist."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ckptstore import Checkpoint, OutcomeUnknownError, RanksFailedError, TransactionError, keys, member
from ckptstore.stores import MemoryStore
from ckptstore.transaction import Transaction
from tests.ranks.helpers import SECONDS, assert_saved, assert_whole, part_of, save_all, save_part, started
from tests.repository.helpers import Interfering, keys_of, open_repo


class Rank:
    """Rank 1 of two, which saves on a thread of its own; ``told`` is what its save returned or raised."""

    def __init__(self, store: MemoryStore) -> None:
        self.told: Any = None
        self._store = store
        self._txn: Transaction | None = None
        self._thread = threading.Thread(target=self._save, daemon=True)

    def _save(self) -> None:
        try:
            with open_repo(self._store).begin(2, rank=1, world_size=2, group="g", timeout=SECONDS) as txn:
                self._txn = txn
                txn.write("rank-1", part_of(2, 1))
            self.told = "committed"
        except BaseException as error:  # noqa: BLE001 (whatever it is: the test looks at it)
            self.told = error

    def give_part(self) -> None:
        """Begin, and go on until its part is there."""
        self._thread.start()
        wait_until(lambda: any(key.endswith("parts/000001.json") for key in keys_of(self._store)))

    def is_told_to_end(self) -> None:
        assert self._txn is not None
        self._txn.abandon()

    def hear(self) -> Any:
        """Wait until its save has ended."""
        self._thread.join(SECONDS)
        assert self.told is not None
        return self.told


def wait_until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def begin(store: MemoryStore, timeout: float = SECONDS) -> Any:
    """Rank 0 of two."""
    return open_repo(store).begin(2, rank=0, world_size=2, group="g", timeout=timeout)


def assert_failed(store: MemoryStore) -> None:
    """Epoch 2 is not there, nothing is left that a gc does not remove, and the next try works."""
    assert open_repo(store).epochs() == [1]
    assert_saved(save_all(store, 2, 2, group="again"), 2)
    assert_whole(store, {1: 2, 2: 2})


def test_a_gc_takes_the_lease_of_a_coordinator_that_goes_on() -> None:
    """Rank 1 begins amid a gc that has taken rank 0 for dead: it sees the lease, and then it sees none."""
    store = started(2, 1)
    first, rank = begin(store), Rank(store)
    collecting = Interfering(store)
    collecting.at = lambda verb, key: verb == "list" and key == keys.CONDEMNED  # the last that it looks for
    collecting.interfere = rank.give_part
    open_repo(collecting).gc(grace=0)
    assert isinstance(rank.hear(), RanksFailedError)
    first.write("rank-0", part_of(2, 0))
    with pytest.raises(TransactionError):
        first.commit()
    assert_failed(store)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("heartbeat", [True, False])
def test_a_lease_that_was_removed_comes_back(heartbeat: bool, flag: bool) -> None:
    """Rank 1 looks between the two; a gc may have removed its flag, too."""
    store = started(2, 1)
    first, rank = begin(store, SECONDS if flag else 1.0), Rank(store)
    first.write("rank-0", part_of(2, 0))
    rank.give_part()
    store.delete(keys.lease_key(first._attempt))
    assert isinstance(rank.hear(), RanksFailedError)
    for key in [key for key in keys_of(store) if key.startswith(keys.CONDEMNED) and not flag]:
        store.delete(key)
    if heartbeat:
        first._lease._put()
    with pytest.raises(TransactionError):
        first.commit()
    assert_failed(store)


def test_a_rank_gives_up_after_its_part_was_read() -> None:
    """Rank 0 is about to put its manifest, and has no flag any more: the look that follows finds a part missing."""
    store = started(2, 1)
    rank, pausing = Rank(store), Interfering(store)
    pausing.after = False
    pausing.at = lambda verb, key: verb == "put" and key.startswith("manifests/0")
    first = begin(pausing)

    def gone_meanwhile() -> None:
        store.delete(keys.lease_key(first._attempt))
        assert isinstance(rank.hear(), RanksFailedError)
        (flag,) = [key for key in keys_of(store) if key.startswith(keys.CONDEMNED)]
        store.delete(flag)

    pausing.interfere = gone_meanwhile
    first.write("rank-0", part_of(2, 0))
    rank.give_part()
    with pytest.raises(TransactionError, match="another rank has given this save up"):
        first.commit()
    assert pausing.interfere is None
    assert_failed(store)


def test_a_coordinator_is_told_to_end_right_before_its_commit() -> None:
    """Its lease says that it has given up, and its thread goes on to the manifest."""
    store = started(2, 1)
    rank, pausing = Rank(store), Interfering(store)
    pausing.at = lambda verb, key: verb == "put" and "/records/" in key
    first = begin(pausing)

    def told_to_end() -> None:
        first.abandon()
        error = rank.hear()
        assert isinstance(error, RanksFailedError)
        assert "told to end" in str(error)

    pausing.interfere = told_to_end
    first.write("rank-0", part_of(2, 0))
    rank.give_part()
    with pytest.raises(TransactionError):
        first.commit()
    assert pausing.interfere is None
    assert_failed(store)


def test_a_rank_is_told_to_end_after_it_has_given_its_part() -> None:
    """The others may save the epoch with that: it says that it does not know, and not that it failed."""
    store = started(2, 1)
    first, rank = begin(store), Rank(store)
    rank.give_part()
    rank.is_told_to_end()
    assert isinstance(rank.hear(), OutcomeUnknownError)
    first.write("rank-0", part_of(2, 0))
    assert isinstance(first.commit(), Checkpoint)
    assert_whole(store, {1: 2, 2: 2})


@pytest.mark.parametrize("withdraws", [True, False])
def test_a_manifest_that_may_yet_be_withdrawn(monkeypatch: pytest.MonkeyPatch, withdraws: bool) -> None:
    """Rank 1 finds no lease and a manifest, before rank 0 has looked once more: it waits a while for what it says."""
    monkeypatch.setattr(member, "SETTLE", 0.5 if not withdraws else SECONDS)
    store = started(2, 1)
    pausing, looked = Interfering(store), threading.Event()
    pausing.at = lambda verb, key: verb == "put" and key.startswith("manifests/0")

    class Looking(MemoryStore):
        def __init__(self) -> None:
            super().__init__(clock=store._clock)
            self._space = store._space

        def list(self, prefix: str = "", *, partial: bool = False) -> Any:
            found = tuple(super().list(prefix, partial=partial))
            if prefix == keys.epoch_prefix(2) and found:
                looked.set()
            return iter(found)

    def gc_takes_it() -> None:
        (lease,) = [key for key in keys_of(store) if key.startswith(f"leases/{keys.ranks_prefix(2)}0000")]
        attempt = keys.parse_lease_key(lease)
        assert attempt is not None
        store.delete(lease)
        if withdraws:
            store.put(keys.condemned_key(attempt), b"")
        looked.wait(5)

    pausing.interfere = gc_takes_it
    found = save_all({0: pausing, 1: Looking()}, 2, 2, save_part, group="g", timeout=SECONDS)
    assert pausing.interfere is None
    if withdraws:
        assert isinstance(found[1], RanksFailedError)
        assert_failed(store)
    else:
        assert_saved(found, 2)
        assert_whole(store, {1: 2, 2: 2})
