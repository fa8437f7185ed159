"""Several writers in one place: runs with and without names, zombies that are fenced off, and what pruning may take."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    CorruptionError,
    EpochExistsError,
    FencedError,
    InvalidArgumentError,
    KeepBest,
    KeepLast,
    Repository,
    TransactionError,
    TransientError,
    keys,
)
from ckptstore.fence import new_session
from ckptstore.lease import EXPIRY, HEARTBEAT, LAPSE
from ckptstore.manifest import decode_manifest, digest_of
from ckptstore.stores import MemoryStore, OpLog, TraceStore
from ckptstore.stores.base import Store
from ckptstore.testing import CrashStore, Fault, FaultStore, SimulatedCrash
from ckptstore.transaction import Transaction
from tests.repository.helpers import (
    Clock,
    Interfering,
    assert_no_debris,
    assert_same,
    keys_of,
    make_state,
    manifests_of,
    open_repo,
    tiny_state,
)

_numbers = itertools.count()
RUN = "llama-7"


def process(store: Store, run: str = RUN, **options: Any) -> Repository:
    """A repository as another process would open it: with a session of its own."""
    repo = open_repo(store, run_id=run, **options)
    repo._fence.session = f"{next(_numbers):032x}"
    return repo


def claims(store: Store) -> list[str]:
    return [key for key in keys_of(store) if key.startswith(keys.WRITERS)]


def writing(repo: Repository, epoch: int, **options: Any) -> Transaction:
    txn = repo.begin(epoch, **options)
    for name, state in make_state(epoch).items():
        txn.write(name, state)
    txn.settle()
    return txn


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[MemoryStore]:
    """An empty place with a clock of our own. In the end every epoch is whole, and there is no debris."""
    made = MemoryStore(clock=clock)
    yield made
    repo = open_repo(made)
    assert repo.verify().ok
    repo.gc(grace=0)
    for key in claims(made):
        made.delete(key)
    assert_no_debris(made)


# ---- numbers --------------------------------------------------------------------------------------------------


def test_a_run_claims_its_number_when_it_first_saves(store: MemoryStore) -> None:
    """Reading claims nothing, the first save does, and the manifest tells run and number."""
    repo = process(store)
    assert repo.run_id == RUN
    assert repo.latest() is None
    assert repo.epochs() == []
    assert claims(store) == []
    assert repo.save(1, tiny_state(1)).run_id == RUN
    assert repo.save(2, tiny_state(2)).run_id == RUN
    assert len(claims(store)) == 1
    successor = process(store)
    successor.save(3, tiny_state(3))
    assert [(m.run, m.writer_number) for m in manifests_of(store)] == [(RUN, 1), (RUN, 1), (RUN, 2)]


def test_requests() -> None:
    """A name costs a save one request, and the first save of a process three more; no name costs nothing."""
    counts = {}
    for run in ("", RUN):
        log = OpLog()
        repo = process(TraceStore(MemoryStore(), log), run)
        for epoch in range(3):
            log.clear()
            report = repo.save(epoch, {"m": {"w": np.full(100_000, epoch)}}).report
            assert report is not None
            counts[run, epoch] = log.count() - report.chunks_sent - 1
    assert [counts["", epoch] for epoch in range(3)] == [10, 8, 8]
    assert [counts[RUN, epoch] for epoch in range(3)] == [13, 9, 9]


def test_repositories_of_one_process_share_a_number(store: MemoryStore) -> None:
    """Two repositories that a process opens for its run are one writer."""
    first, second = open_repo(store, run_id=RUN), open_repo(store, run_id=RUN)
    assert first._fence.session == second._fence.session == new_session()
    first.save(1, tiny_state(1))
    second.save(2, tiny_state(2))
    first.save(3, tiny_state(3))
    assert [m.writer_number for m in manifests_of(store)] == [1, 1, 1]


def test_writers_that_start_in_the_same_moment(store: MemoryStore) -> None:
    """Each gets a number of its own; the highest goes on, the others are refused."""
    repos = [process(store) for _ in range(12)]
    threads = [threading.Thread(target=repo._fence.enter) for repo in repos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = sorted(repo._fence.number for repo in repos)
    assert numbers == list(range(1, 13))
    for repo in repos:
        if repo._fence.number == 12:
            repo.save(1, tiny_state(1))
        else:
            with pytest.raises(FencedError, match="number 12"):
                repo.save(repo._fence.number, tiny_state(1))
    assert open_repo(store).epochs() == [1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_claim_whose_reply_is_lost(store: MemoryStore, when: Any) -> None:
    """The next save finds its own claim, if it got through, and goes on under it."""
    repo = process(FaultStore(store, [Fault("put", keys.WRITERS, when=when, error=TransientError("reset"))]))
    with pytest.raises(TransientError):
        repo.save(1, tiny_state(1))
    repo.save(1, tiny_state(1))
    assert len(claims(store)) == 1
    assert [m.writer_number for m in manifests_of(store)] == [1]


def test_a_damaged_claim_still_counts(store: MemoryStore) -> None:
    """What is in a claim decides nothing but whose it is: a damaged one fences as well, and the next number follows."""
    old = process(store)
    old.save(1, tiny_state(1))
    process(store)._fence.enter()
    key = claims(store)[-1]
    store.put(key, store.get(key)[:-1])
    with pytest.raises(FencedError):
        old.save(2, tiny_state(2))
    third = process(store)
    third.save(2, tiny_state(2))
    assert third._fence.number == 3


@pytest.mark.parametrize("name", ["a", "run-1", "slurm:1234/5@host", "A" * 127])
def test_names(store: MemoryStore, name: str) -> None:
    """Names that people give; names that differ by case only are different runs, also where files are not."""
    process(store, name).save(1, tiny_state(1))
    process(store, name.swapcase()).save(2, tiny_state(2))
    process(store, name + "x").save(3, tiny_state(3))
    assert [m.writer_number for m in manifests_of(store)] == [1, 1, 1]
    assert len({key.lower() for key in claims(store)}) == len(claims(store))


@pytest.mark.parametrize("name", ["a b", "../x", "-x", "é", "a\n", "A" * 129, 7, b"x", "x\0"])
def test_names_that_are_none(store: MemoryStore, name: Any) -> None:
    """Refused at once, and the message does not repeat a novel."""
    with pytest.raises(InvalidArgumentError, match="run_id"):
        open_repo(store, run_id=name)
    with pytest.raises(InvalidArgumentError, match="run_id"):
        ckptstore.open("memory://nobody", run_id=name)


def test_the_environment_names_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPTSTORE_RUN_ID is the default of ``run_id``; "" does without."""
    monkeypatch.setenv("CKPTSTORE_RUN_ID", "from-outside")
    assert ckptstore.open("memory://env").run_id == "from-outside"
    assert ckptstore.open("memory://env", run_id="mine").run_id == "mine"
    assert ckptstore.open("memory://env", run_id="").run_id == ""
    monkeypatch.setenv("CKPTSTORE_RUN_ID", "no good")
    with pytest.raises(InvalidArgumentError):
        ckptstore.open("memory://env")


# ---- zombies --------------------------------------------------------------------------------------------------


def test_a_zombie_is_refused(store: MemoryStore) -> None:
    """P1: once a successor has claimed, its predecessor can neither begin a save nor commit one."""
    zombie = process(store)
    zombie.save(1, make_state(1))
    txn = writing(zombie, 2)
    successor = process(store)
    successor.save(2, make_state(2))
    for _ in range(2):
        with pytest.raises(FencedError, match=f"in {zombie.url} .* newer writer .number 2, this one is 1.") as caught:
            zombie.save(3, make_state(3))
        assert caught.value.key == claims(store)[-1]
    with pytest.raises(EpochExistsError):
        txn.commit()
    txn._give_up(FencedError("as leaving the block does"))
    assert successor.epochs() == [1, 2]
    with pytest.raises(FencedError):
        zombie.save_async(3, make_state(3)).result()
    successor.save(3, make_state(3))
    zombie.close()


def test_leaving_the_block_of_a_fenced_save(store: MemoryStore) -> None:
    """P1: a save that is fenced amid the block raises, and takes with it only what it wrote."""
    zombie, successor = process(store), process(store)
    zombie.save(1, make_state(1))
    with pytest.raises(FencedError), zombie.begin(2) as txn:
        txn.write("model", make_state(2)["model"])
        successor.save(5, make_state(5))
    assert successor.epochs() == [1, 5]


def test_without_a_name_nobody_is_fenced(store: MemoryStore) -> None:
    """Two processes without a name are two writers: the first to commit an epoch has it."""
    one, two = process(store, ""), process(store, "")
    one.save(1, tiny_state(1))
    two.save(2, tiny_state(2))
    one.save(3, tiny_state(3))
    with pytest.raises(EpochExistsError):
        two.save(3, tiny_state(3))
    assert claims(store) == []


def test_runs_do_not_fence_each_other(store: MemoryStore) -> None:
    """Runs of different names, and those without, save side by side."""
    repos = [process(store, run) for run in ("a", "b", "")]
    for epoch in range(9):
        repos[epoch % 3].save(epoch, tiny_state(epoch))
    assert open_repo(store).epochs() == list(range(9))


def test_to_take_a_run_back(store: MemoryStore) -> None:
    """A process that opens the repository again is the next writer, and fences the one that fenced it."""
    first = process(store)
    first.save(1, tiny_state(1))
    second = process(store)
    second.save(2, tiny_state(2))
    again = process(store)
    again.save(3, tiny_state(3))
    with pytest.raises(FencedError, match="number 3"):
        second.save(4, tiny_state(4))


STEPS = [
    ("put", "manifests/"), ("list", "manifests/"), ("info", "condemned/"), ("list", "attempts/"), ("info", "leases/"),
    ("put", "leases/"),
]  # fmt: skip


@pytest.mark.parametrize("minutes", [0, 1.5, 30])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("step", STEPS, ids=" ".join)
def test_takeover_at_every_step_of_a_commit(
    store: MemoryStore, clock: Clock, step: tuple[str, str], after: bool, minutes: float
) -> None:
    """P1: whatever the step, the successor has seen the epoch when it took over, or the epoch is refused."""
    between = Interfering(store)
    zombie = process(between)
    zombie.save(1, make_state(1))
    txn = writing(zombie, 2)
    if step[1] == "leases/":
        txn._lease._put_at = float("-inf")  # silent for long, so that it renews
    seen: list[int] = []
    successor = process(store)

    def take_over() -> None:
        clock.go(60 * minutes)
        seen.extend(commit.epoch for commit in successor._fence.enter())
        clock.go(60 * minutes)

    between.after = after
    between.at = lambda verb, key: (verb, key.split("/")[0] + "/") == step
    between.interfere = take_over
    try:
        txn.commit()
    except FencedError as error:
        txn._give_up(error)
        assert successor.epochs() == [1]
    else:
        assert seen == [1, 2]
        assert successor.epochs() == [1, 2]
    assert successor._fence.number == 2
    successor.save(3, make_state(3))
    with pytest.raises(FencedError):
        zombie.save(4, make_state(4))


def test_what_was_committed_before_the_takeover_stays(store: MemoryStore, clock: Clock) -> None:
    """P5: a writer that is paused right after its commit does not withdraw what its successor has long resumed from."""
    between = Interfering(store)
    zombie = process(between)
    zombie.save(1, make_state(1))
    txn = writing(zombie, 2)
    successor = process(store)

    def hours() -> None:
        clock.go(HEARTBEAT + 1)
        latest = successor.latest()
        assert latest is not None
        assert latest.epoch == 2
        successor.save(3, make_state(3))

    between.at = lambda verb, key: verb == "put" and key == keys.manifest_key(2, 1)
    between.interfere = hours
    assert txn.commit().epoch == 2
    assert successor.epochs() == [1, 2, 3]
    with pytest.raises(FencedError):
        zombie.save(4, make_state(4))


def test_only_saving_is_refused(store: MemoryStore) -> None:
    """A zombie reads and tidies up as anybody may; what it deletes it was told to delete."""
    zombie = process(store)
    zombie.save(1, tiny_state(1))
    process(store).save(2, tiny_state(2))
    with pytest.raises(FencedError):
        zombie.save(3, tiny_state(3))
    assert_same(zombie.checkpoint(2).load(), tiny_state(2))
    assert list(zombie.prune(KeepLast(1)).removed) == [1]
    zombie.gc()
    zombie.delete(2)
    assert zombie.epochs() == []


def test_a_zombie_withdraws_only_its_own(store: MemoryStore) -> None:
    """P5: the successor has deleted the zombie's epoch and saved it anew: that one stays when the zombie withdraws."""
    between = Interfering(store)
    zombie = process(between)
    zombie.save(1, make_state(1))
    txn = writing(zombie, 2)
    successor = process(store)

    def anew() -> None:
        successor._fence.enter()
        successor.delete(2)
        successor.save(2, make_state(9))

    between.at = lambda verb, key: verb == "put" and key == keys.manifest_key(2, 1)
    between.interfere = anew
    with pytest.raises(FencedError) as caught:
        txn.commit()
    txn._give_up(caught.value)
    assert_same(successor.checkpoint(2).load(), make_state(9))


def test_gc_removes_claims_that_were_outdone(store: MemoryStore) -> None:
    """The highest claim of each run stays, and goes on refusing all the others."""
    writers = [process(store) for _ in range(4)]
    for epoch, repo in enumerate(writers):
        repo.save(epoch, tiny_state(epoch))
    process(store, "other").save(9, tiny_state(9))
    highest = [keys.writer_key(writers[3]._fence._digest, 4), *(k for k in claims(store) if "-000000000001" in k)]
    dry = open_repo(store).gc(dry_run=True)
    report = open_repo(store).gc()
    assert [r.key for r in dry.removed] == [r.key for r in report.removed]
    assert {r.reason for r in report.removed} == {"its run has a newer writer"}
    assert len(claims(store)) == 2
    assert set(claims(store)) <= set(highest)
    for repo in writers[:3]:
        with pytest.raises(FencedError):
            repo.save(20, tiny_state(20))
    writers[3].save(20, tiny_state(20))
    newest = process(store)
    newest.save(21, tiny_state(21))
    assert newest._fence.number == 5


# ---- the dead -------------------------------------------------------------------------------------------------


def expired(store: MemoryStore, clock: Clock) -> Transaction:
    """A save that builds on epochs 1 and 2, has written all, and is silent until its lease has expired."""
    repo = process(store, "")
    repo.save(1, make_state(1))
    repo.save(2, make_state(2))
    txn = writing(repo, 3)
    txn._lease.stop()
    clock.go(EXPIRY + 1)
    return txn


@pytest.mark.parametrize("act", ["delete", "prune", "replace"])
def test_an_expired_lease_holds_nothing_back(store: MemoryStore, clock: Clock, act: str) -> None:
    """P5: what a save that died long ago would have reused goes with its epoch, not with the next gc."""
    txn = expired(store, clock)
    repo = process(store, "")
    chunks = {key for key in keys_of(store) if "/chunks/" in key and txn._attempt not in key}
    if act == "delete":
        repo.delete(1)
        repo.delete(2)
    elif act == "prune":
        repo.save(9, {"m": 1})
        assert repo.prune(KeepLast(1)).spared == {}
    else:
        repo.delete(1)
        repo.save(2, {"m": 1}, replace=True)
    assert not chunks & set(keys_of(store))
    assert keys.condemned_key(txn._attempt) in keys_of(store)  # the flag first: else it might commit amid the sweep
    with pytest.raises(TransactionError, match="cleaned up"):
        txn.commit()
    txn._give_up(TransactionError("as leaving the block does"))


def test_a_lease_that_has_not_expired_holds_back(store: MemoryStore, clock: Clock) -> None:
    """P5: one that merely seems dead is believed: what it may refer to stays."""
    txn = expired(store, clock)
    txn._lease.renew()
    txn._lease.lapsed = False
    clock.go(LAPSE - 1)
    repo = process(store, "")
    repo.delete(1)
    repo.delete(2)
    txn.commit()
    assert repo.verify().ok
    assert_same(repo.checkpoint(3).load(), make_state(3))


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("step", STEPS, ids=" ".join)
def test_delete_at_every_step_of_a_commit(store: MemoryStore, clock: Clock, step: tuple[str, str], after: bool) -> None:
    """P5: a zombie wakes up, and its base is deleted at any step of its commit: refused, or whole."""
    between = Interfering(store)
    repo = process(between, "")
    repo.save(1, make_state(1))
    txn = writing(repo, 3)
    txn._lease.stop()
    txn._lease._put_at = float("-inf")
    clock.go(EXPIRY + 1)
    between.after = after
    between.at = lambda verb, key: (verb, key.split("/")[0] + "/") == step
    between.interfere = lambda: process(store, "").delete(1)
    try:
        txn.commit()
    except TransactionError as error:
        txn._give_up(error)
        assert process(store, "").epochs() == []
    else:
        assert_same(process(store, "").checkpoint(3).load(), make_state(3))
    assert between.interfere is None


# ---- pruning --------------------------------------------------------------------------------------------------


def test_pruning_takes_only_what_the_run_has_saved(store: MemoryStore) -> None:
    """P5: a named run counts and prunes its own epochs; without a name, those of no named run. The report says why."""
    for epoch, run in enumerate(("a", "b", "", "a", "b", "", "a", "b", "")):
        process(store, run).save(epoch, tiny_state(epoch), {"loss": 9.0 - epoch})
    dry = process(store, "a").prune(KeepLast(1), dry_run=True)
    report = process(store, "a").prune(KeepLast(1))
    assert dry.removed.keys() == report.removed.keys() == {0, 3}
    assert report.kept[1] == report.kept[7] == "belongs to run b"
    assert report.kept[2] == report.kept[8] == "belongs to no named run"
    assert process(store, "").prune(KeepBest("loss")).removed.keys() == {2, 5}
    assert process(store, "nobody").prune(KeepLast(1)).removed == {}
    assert open_repo(store).epochs() == [1, 4, 6, 7, 8]
    keeping = process(store, "b", keep=KeepLast(2))
    keeping.save(10, tiny_state(10))
    assert keeping.epochs() == [6, 7, 8, 10]


def test_the_newest_intact_epoch_of_each_run_stays(store: MemoryStore) -> None:
    """P5: another run's good epoch does not stand in for the last good one of this run."""
    a, b = process(store, "a"), process(store, "b")
    for epoch in (1, 2, 3):
        a.save(epoch, make_state(epoch))
    b.save(4, make_state(4))
    broken = max((k for k in keys_of(store) if "/chunks/" in k), key=lambda k: (_attempt_of(store, 3) in k, k))
    body = store.get(broken)
    store.put(broken, body[:-1] + bytes([body[-1] ^ 1]))
    report = process(store, "a").prune(KeepLast(1))
    assert report.removed.keys() == {1}
    assert report.kept[2] == "the newest intact epoch"
    store.put(broken, body)


def _attempt_of(store: Store, epoch: int) -> str:
    return next(m.attempt for m in manifests_of(store) if m.epoch == epoch)


def test_the_epoch_resumed_from_stays_for_every_run(store: MemoryStore) -> None:
    """P5: what a process has loaded before its first save is not pruned by it, whatever the run."""
    for run in ("a", ""):
        process(store, run).save(1 if run else 2, tiny_state(1))
    for run, epoch in (("a", 1), ("", 2)):
        repo = process(store, run, keep=KeepLast(1))
        repo.checkpoint(epoch).load()
        for step in (1, 2, 3):
            repo.save(10 * epoch + step, tiny_state(step))
    assert open_repo(store).epochs() == [1, 2, 13, 23]


def test_latest_of_a_run(store: MemoryStore) -> None:
    """``latest(run_id=..)`` looks only at what that run has saved; None says that it has saved nothing."""
    for epoch, run in enumerate(("a", "b", "", "a", "b")):
        process(store, run).save(epoch, tiny_state(epoch))
    repo = process(store, "a")
    found = {run: repo.latest(run_id=run) for run in ("a", "b", "", "nobody")}
    assert {run: ckpt and ckpt.epoch for run, ckpt in found.items()} == {"a": 3, "b": 4, "": 2, "nobody": None}
    manifest = keys.manifest_key(4, 1)
    body = store.get(manifest)
    store.put(manifest, body[:-1])
    assert repo.latest(run_id="a").epoch == 3  # type: ignore[union-attr]
    with pytest.raises(CorruptionError):  # whose it was nobody knows: it may have been of this run
        repo.latest(run_id="nobody")
    store.put(manifest, body)


def test_an_old_manifest_belongs_to_no_run(store: MemoryStore) -> None:
    """A manifest without these members reads as one of no named run."""
    process(store, "").save(1, tiny_state(1))
    key = keys.manifest_key(1, 1)
    told = json.loads(store.get(key))
    for name in ("digest", "run", "writer_number"):
        del told[name]
    rest = json.dumps(told, separators=(",", ":")).encode()[1:]
    store.put(key, b'{"digest":"' + digest_of(rest).encode() + b'",' + rest)
    manifest = decode_manifest(store.get(key), key)
    assert (manifest.run, manifest.writer_number) == ("", 0)


def test_a_crash_at_every_mutation_of_a_named_save(store: MemoryStore) -> None:
    """P1: killed anywhere, claim included, the run goes on under the next number, and the epoch is whole or absent."""
    for at in range(1, 20):
        for when in ("before", "after"):
            inner = MemoryStore()
            process(inner).save(1, tiny_state(1))
            died = False
            try:
                process(CrashStore(inner, at, when)).save(2, tiny_state(2))
            except SimulatedCrash:
                died = True
            repo = process(inner)
            assert repo.verify().ok
            if 2 not in repo.epochs():
                repo.save(2, tiny_state(2))
            assert_same(repo.checkpoint(2).load(), tiny_state(2))
            repo.gc(grace=0)
            if not died:
                return
    raise AssertionError("a save has fewer mutations than that")
