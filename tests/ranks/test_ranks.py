"""Ranks that save one checkpoint: together, late, failing, twice at once, again. Threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptstore import (
    Checkpoint,
    EpochExistsError,
    InvalidArgumentError,
    InvalidRecordError,
    KeepLast,
    RanksFailedError,
    Repository,
    StoreFullError,
    TransactionError,
    keys,
    meeting,
)
from ckptstore.lease import read_leases
from ckptstore.stores import MemoryStore
from ckptstore.sweep import condemn
from ckptstore.testing import Fault, FaultStore
from tests.ranks.helpers import (
    SECONDS,
    assert_saved,
    assert_whole,
    part_of,
    save_all,
    save_part,
    started,
    together,
    whole,
)
from tests.repository.helpers import assert_no_debris, assert_same, keys_of, open_repo

SHORT = 0.3  # seconds that a rank waits for one that is not meant to come


def named(found: dict[int, Any], *ranks: int) -> list[RanksFailedError]:
    """All these outcomes are RanksFailedError and name exactly these ranks."""
    errors = []
    for rank, error in found.items():
        assert isinstance(error, RanksFailedError), (rank, error)
        assert sorted(error.ranks) == list(ranks), error
        assert all(f"rank {number}: " in str(error) for number in ranks)
        errors.append(error)
    return errors


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_save_one_checkpoint(ranks: int) -> None:
    """P1, P2: one manifest with the records of all ranks; each rank gets that checkpoint; nothing is left but it."""
    store = started(ranks, 1)
    found = save_all(store, 2, ranks)
    assert_saved(found, 2)
    assert {outcome.attempt for outcome in map(manifest_of, found.values())} == {manifest_of(found[0]).attempt}
    # What is left is one small object that tells the ranks that it is committed, and goes with the next save.
    extra = {info.key for info in store.list() if keys.parse_note_key(info.key) is not None}
    assert len(extra) == 2  # of two launches
    assert_whole(store, {1: ranks, 2: ranks})


def manifest_of(checkpoint: Checkpoint) -> Any:
    return checkpoint._manifest


def test_the_same_processes_save_again_and_again() -> None:
    """What does not change is sent once, of the notes only the last stay, and rank r reads nothing of the others."""
    store = MemoryStore()
    repos = [open_repo(store, keep=KeepLast(2) if rank == 0 else None) for rank in range(3)]
    found: dict[int, Any] = {}
    for epoch in range(1, 5):
        found = together(dict(enumerate(part_save(repo, epoch, rank, 3) for rank, repo in enumerate(repos))))
        assert_saved(found, epoch)
        for outcome in found.values():
            assert outcome.report.chunks_reused == (outcome.report.chunks_sent if epoch > 1 else 0)
    assert [key for key in keys_of(store) if keys.parse_note_key(key)] == [
        keys.outcome_key(manifest_of(found[0]).attempt)
    ]
    assert_whole(store, {3: 3, 4: 3})


def part_save(repo: Repository, epoch: int, rank: int, ranks: int, **how: Any) -> Callable[[], Any]:
    return lambda: save_part(repo, epoch, rank, ranks, **how)


def test_a_rank_may_write_nothing_or_files(tmp_path: Path) -> None:
    """Record by record, from files, or nothing at all; metadata are those of rank 0."""
    store = MemoryStore()
    (tmp_path / "optim.bin").write_bytes(b"bytes of a trainer")

    def act(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        with repo.begin(epoch, {"rank": rank}, rank=rank, world_size=ranks, group="g") as txn:
            if rank == 1:
                txn.write_file("optim", tmp_path / "optim.bin")
            if rank == 2:
                txn.write("model", part_of(epoch, 2))
                txn.write("more", {"x": 1})
        return None

    assert save_all(store, 7, 4, act) == dict.fromkeys(range(4))
    checkpoint = open_repo(store).latest()
    assert checkpoint is not None
    assert checkpoint.metadata == {"rank": 0}
    assert sorted(checkpoint.records) == ["model", "more", "optim"]
    assert_same(checkpoint.load("model"), part_of(7, 2))


def test_nobody_writes_anything() -> None:
    """An epoch without records is refused, on all ranks."""
    found = save_all(MemoryStore(), 1, 3, lambda repo, epoch, rank, ranks: repo.save(
        epoch, {}, rank=rank, world_size=ranks, group="g"))  # fmt: skip
    assert isinstance(found.pop(0), TransactionError)
    named(found, 0)


def test_background_saves_of_ranks() -> None:
    """``save_async`` on every rank; one checkpoint; each handle has it."""
    store = MemoryStore()
    repos = [open_repo(store) for _ in range(3)]

    def act(rank: int) -> Any:
        records = {f"rank-{rank}": part_of(3, rank)}
        return repos[rank].save_async(3, records, rank=rank, world_size=3, group="g").result(SECONDS)

    assert_saved(together({rank: lambda rank=rank: act(rank) for rank in range(3)}), 3)  # type: ignore[misc]
    assert_whole(store, {3: 3})
    with pytest.raises(InvalidArgumentError, match="when_busy"):
        repos[0].save_async(4, {"x": {}}, rank=0, world_size=3, group="g", when_busy="skip")


def test_one_rank_is_an_ordinary_save() -> None:
    """world_size=1: the same objects and requests as without ranks."""
    one, other = MemoryStore(), MemoryStore()
    open_repo(one).save(1, {"rank-0": part_of(1, 0)}, rank=0, world_size=1)
    open_repo(other).save(1, {"rank-0": part_of(1, 0)})
    assert [key.count("/") for key in keys_of(one)] == [key.count("/") for key in keys_of(other)]
    assert_whole(one, {1: 1})


def test_one_record_of_two_ranks_is_refused() -> None:
    """The same plain record from two ranks: whose is it? Refused by name on all ranks; the next try works."""
    store = started(2, 1)
    found = save_all(store, 2, 2, lambda repo, epoch, rank, ranks: repo.save(
        epoch, {"model": part_of(epoch, rank)}, rank=rank, world_size=ranks, group="g"))  # fmt: skip
    assert isinstance(found[0], InvalidRecordError)
    (error,) = named({1: found[1]}, 0)
    assert "model" in str(error)
    assert "model" in str(found[0])
    assert_saved(save_all(store, 2, 2, group="g"), 2)
    assert_whole(store, {1: 2, 2: 2})


# ---- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("how", ["in the block", "before the first write", "a full store"])
def test_a_failing_rank_fails_all_at_once(victim: int, how: str) -> None:
    """Its own error there, RanksFailedError with its name and reason everywhere else; then the retry works."""
    store = started(4, 1)
    full = Fault("put", "/chunks/", error=StoreFullError("no space left"), times=None)
    bad: Any = FaultStore(store, [full])

    def act(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        state: dict[str, Any] = (
            {"bad": object()} if how.startswith("before") and rank == victim else part_of(epoch, rank)
        )
        if how != "in the block":
            return repo.save(epoch, {f"rank-{rank}": state}, rank=rank, world_size=ranks, group="g")
        with repo.begin(epoch, rank=rank, world_size=ranks, group="g") as txn:
            txn.write(f"rank-{rank}", state)
            if rank == victim:
                raise RuntimeError("out of memory on this device")
        return None

    stores = {rank: bad if how == "a full store" and rank == victim else store for rank in range(4)}
    found = save_all(stores, 2, 4, act)
    own = found.pop(victim)
    assert isinstance(own, {"in": RuntimeError, "be": InvalidRecordError, "a ": StoreFullError}[how[:2]]), own
    for error in named(found, victim):
        assert type(own).__name__ in error.ranks[victim]
        assert error.of_the_store == (how == "a full store")
    latest = open_repo(store).latest()
    assert latest is not None
    assert latest.epoch == 1
    assert_saved(save_all(store, 2, 4, group="g"), 2)
    assert_whole(store, {1: 4, 2: 4})


def test_what_the_others_have_sent_is_not_sent_again() -> None:
    """The retry of a save that failed on one rank adopts, on each rank, what that had sent."""
    store = started(3, 1)

    def act(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        with repo.begin(epoch, rank=rank, world_size=ranks, group="g") as txn:
            txn.write(f"rank-{rank}", part_of(epoch, rank))
            txn.settle()
            if rank == 1:
                raise RuntimeError
        return None

    save_all(store, 2, 3, act)
    found = save_all(store, 2, 3, group="g")
    assert_saved(found, 2)
    assert {outcome.report.chunks_sent for rank, outcome in found.items() if rank} == {0}
    assert_whole(store, {1: 3, 2: 3})


def test_a_rank_that_never_comes() -> None:
    """The others name it when their time is up; one that is still writing is told from one that has not begun."""
    store = started(3, 1)
    repo = open_repo(store)
    slow = repo.begin(2, rank=2, world_size=4, group="g", timeout=SHORT)
    slow.write("rank-2", part_of(2, 2))
    found = save_all(dict.fromkeys((0, 1), store), 2, 4, group="g", timeout=SHORT)
    for error in named(found, 2, 3):
        assert error.of_the_store
    with pytest.raises(RanksFailedError) as told:
        slow.commit()  # late: it hears how the others ended
    named({2: told.value}, 2, 3)
    assert_saved(save_all(store, 2, 4, group="g"), 2)
    assert_whole(store, {1: 3, 2: 4})


def test_rank_0_never_comes() -> None:
    """The others name it, and none of them waits for ever."""
    store = started(2, 1)
    found = save_all(dict.fromkeys((1, 2), store), 2, 3, group="g", timeout=SHORT)
    for error in named(found, 0):
        assert "has not begun" in str(error)
    assert_saved(save_all(store, 2, 3, group="g"), 2)


def test_rank_0_is_slower_than_the_others_wait() -> None:
    """They give up, and see to it that it cannot commit what they have reported as failed."""
    store = started(2, 1)
    slow = open_repo(store).begin(2, rank=0, world_size=2, group="g", timeout=SECONDS)
    slow.write("rank-0", part_of(2, 0))
    with pytest.raises(RanksFailedError) as gave_up:
        save_part(open_repo(store), 2, 1, 2, group="g", timeout=SHORT)
    named({1: gave_up.value}, 0)
    with pytest.raises(RanksFailedError) as late:
        slow.commit()
    named({0: late.value}, 0)
    assert open_repo(store).epochs() == [1]
    assert_saved(save_all(store, 2, 2, group="g"), 2)
    assert_whole(store, {1: 2, 2: 2})


def test_a_late_rank_hears_of_a_failure_that_it_missed() -> None:
    """It comes when all others have given up: it fails at once, with their reason, and the retry has all of them."""
    store = started(3, 1)

    def fail(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        with repo.begin(epoch, rank=rank, world_size=ranks, group="g") as txn:
            txn.write(f"rank-{rank}", part_of(epoch, rank))
            if rank == 1:
                raise RuntimeError("boom")
        return None

    save_all(dict.fromkeys((0, 1), store), 2, 3, fail)
    with pytest.raises(RanksFailedError, match="boom") as late:
        save_part(open_repo(store), 2, 2, 3, group="g")
    named({2: late.value}, 1)
    assert_saved(save_all(store, 2, 3, group="g"), 2)
    assert_whole(store, {1: 3, 2: 3})


def test_a_late_rank_joins_the_second_try() -> None:
    """It comes when the others are at their second try already: it joins that, and never the dead first one."""
    store = started(3, 1)
    named(save_all(dict.fromkeys((0, 1), store), 2, 3, group="g", timeout=SHORT), 2)
    acts = {rank: part_save(open_repo(store), 2, rank, 3, group="g") for rank in range(3)}
    third, begun = acts.pop(2), threading.Event()

    def late() -> Any:
        begun.wait(SECONDS)
        return third()

    def first() -> Any:
        with open_repo(store).begin(2, rank=0, world_size=3, group="g") as txn:
            begun.set()
            txn.write("rank-0", part_of(2, 0))
            return txn.commit()

    assert_saved(together({0: first, 1: acts[1], 2: late}), 2)
    assert_whole(store, {1: 3, 2: 3})


def test_what_an_earlier_launch_of_the_same_name_left_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures from before this process began concern nobody: the save waits for the new rank 0 and works."""
    store = started(2, 1)

    def fail(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        with repo.begin(epoch, rank=rank, world_size=ranks, group="g"):
            raise RuntimeError("killed")

    save_all(store, 2, 2, fail)
    monkeypatch.setattr(meeting, "process", meeting._Process())
    member = open_repo(store)
    thread = threading.Thread(target=lambda: found.append(save_part(member, 2, 1, 2, group="g")), daemon=True)
    found: list[Any] = []
    thread.start()
    assert_saved({0: save_part(open_repo(store), 2, 0, 2, group="g")}, 2)
    thread.join(SECONDS)
    assert_saved(dict(enumerate(found)), 2)
    assert_whole(store, {1: 2, 2: 2})


# ---- several at once ----------------------------------------------------------------------------------------


def test_two_launches_at_once() -> None:
    """P2: two groups save the same epoch. One wins with all its ranks, the other loses on all; nothing is mixed."""
    store = started(3, 1)
    for epoch in range(2, 8):
        acts: dict[int, Callable[[], Any]] = {}
        for rank in range(3):
            acts[rank] = part_save(open_repo(store), epoch, rank, 3, group="one")
            acts[10 + rank] = lambda rank=rank, epoch=epoch: open_repo(store).save(  # type: ignore[misc]
                epoch, {f"rank-{rank}": part_of(100 + epoch, rank)}, rank=rank, world_size=3, group="two")  # fmt: skip
        found = together(acts)
        one, two = ([found[base + rank] for rank in range(3)] for base in (0, 10))
        won = isinstance(one[0], Checkpoint)
        winners, losers = (one, two) if won else (two, one)
        assert_saved(dict(enumerate(winners)), epoch)
        for loser in losers:
            assert isinstance(loser, EpochExistsError), loser
        assert_same(open_repo(store).checkpoint(epoch).load(), whole(epoch if won else 100 + epoch, 3))
    open_repo(store).gc(grace=0)
    assert_no_debris(store)


def test_two_launches_that_take_up_what_the_same_dead_one_has_sent() -> None:
    """The first to commit sweeps that; the other is told that the epoch exists, and not that it was silent."""
    store = started(3, 1)

    def failing(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        with repo.begin(epoch, rank=rank, world_size=ranks, group="dead") as txn:
            txn.write(f"rank-{rank}", part_of(epoch, rank))
            txn.settle()
            raise RuntimeError

    save_all(store, 2, 3, failing)
    dead = [sighting.attempt for sighting in read_leases(store)]
    assert len(dead) == 3
    written = threading.Barrier(3, timeout=SECONDS)

    def late(repo: Repository, epoch: int, rank: int, ranks: int) -> Any:
        with repo.begin(epoch, rank=rank, world_size=ranks, group="late") as txn:
            txn.write(f"rank-{rank}", part_of(epoch, rank))
            txn.settle()
            assert txn.tally.chunks_sent == 0
            if written.wait() == 0:
                save_all(store, epoch, 3, group="early")
                for attempt in dead:  # as its sweep does, for the moment until it sees that others need them
                    condemn(store, attempt)
            written.wait()
        return None

    for error in save_all(store, 2, 3, late).values():
        assert isinstance(error, EpochExistsError), error
    assert_whole(store, {1: 3, 2: 3})


def test_an_epoch_that_exists() -> None:
    """All ranks are told, at once, and leave nothing; with ``replace`` they save it anew."""
    store = started(3, 1)
    before = keys_of(store)
    for error in save_all(store, 1, 3, group="again").values():
        assert isinstance(error, EpochExistsError)
    assert keys_of(store) == before
    assert_saved(save_all(store, 1, 3, group="again", replace=True), 1)
    assert_whole(store, {1: 3})


def test_two_processes_with_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that call themselves rank 1 of one group are refused, and so is the save."""
    store = started(2, 1)
    first = open_repo(store).begin(2, rank=1, world_size=3, group="g")
    monkeypatch.setattr("ckptstore.lease.socket.gethostname", lambda: "elsewhere")
    second = open_repo(store).begin(2, rank=1, world_size=3, group="g")
    monkeypatch.undo()
    with pytest.raises(RanksFailedError, match="two processes") as told:
        save_part(open_repo(store), 2, 0, 3, group="g")
    named({0: told.value}, 1)
    for txn in (first, second):
        txn.abort()
    assert open_repo(store).epochs() == [1]


def test_world_sizes_that_differ() -> None:
    """The rank is told so at once; the others hear it."""
    store = started(2, 1)
    found = together({
        0: part_save(open_repo(store), 2, 0, 2, group="g"),
        1: part_save(open_repo(store), 2, 1, 3, group="g", timeout=SHORT),
    })  # fmt: skip
    assert isinstance(found[1], InvalidArgumentError), found
    assert "world_size=2" in str(found[1])
    named({0: found[0]}, 1)


# ---- what it costs ------------------------------------------------------------------------------------------


class Counting(MemoryStore):
    """Counts the requests of one rank; all ranks share the objects."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(clock=inner._clock)
        self._space = inner._space
        self.requests: list[tuple[str, str]] = []

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        self.requests.append(("put", key))
        super().put(key, data, if_absent=if_absent)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.requests.append(("get", key))
        return super().get(key, start, end)

    def info(self, key: str) -> Any:
        self.requests.append(("info", key))
        return super().info(key)

    def list(self, prefix: str = "", *, partial: bool = False) -> Any:
        self.requests.append(("list", prefix))
        return super().list(prefix, partial=partial)

    def delete(self, key: str) -> None:
        self.requests.append(("delete", key))
        super().delete(key)


def requests_of_a_save(ranks: int) -> tuple[int, int]:
    """Requests of a commit in which nobody waits for a slower one: of a rank, its polls aside, and of rank 0."""
    inner = MemoryStore()
    stores = [Counting(inner) for _ in range(ranks)]
    repos = [open_repo(store) for store in stores]
    for epoch in (1, 2):  # the second is that of a run that goes on
        begun = [repo.begin(epoch, rank=rank, world_size=ranks, group="g") for rank, repo in enumerate(repos)]
        for rank, txn in enumerate(begun):
            txn.write(f"rank-{rank}", part_of(epoch, rank, items=10))
            txn.settle()
        for store in stores:
            store.requests.clear()

        def last(first: Any = begun[0]) -> Any:
            while sum(keys.parse_part_key(info.key) is not None for info in inner.list()) < ranks - 1:
                threading.Event().wait(0.01)
            return first.commit()

        assert_saved(together({**{rank: begun[rank].commit for rank in range(1, ranks)}, 0: last}), epoch)
    polls = sum(key.startswith("leases/") and verb == "get" for verb, key in stores[1].requests)
    return len(stores[1].requests) - polls, len(stores[0].requests)


def test_requests_are_linear_in_the_ranks() -> None:
    """A rank makes as many requests with 24 ranks as with 6, and rank 0 a fixed number more for each."""
    few, many = requests_of_a_save(6), requests_of_a_save(24)
    assert few[0] == many[0] <= 8
    assert many[1] - few[1] <= 18 * 6


def test_leases_of_ranks_are_found_by_one_short_listing() -> None:
    """Ranks list and read the leases of their own rank and epoch, not those of everybody."""
    inner = started(3, 1)
    others = [open_repo(inner).begin(5, rank=rank, world_size=8, group="other") for rank in range(8)]
    store = Counting(inner)
    txn = open_repo(store).begin(2, rank=1, world_size=3, group="g")
    assert [key for verb, key in store.requests if verb == "get" and key.startswith("leases/")] == []
    assert len(read_leases(inner)) == 9
    for other in (*others, txn):
        other.abort()
