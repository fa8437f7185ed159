"""Leases and sweeping, with a clock of our own: the living are spared, the dead swept, a zombie cannot commit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptstore import CorruptionError, EpochExistsError, KeepLast, Repository, TransactionError, TransientError, keys
from ckptstore.lease import EXPIRY, HEARTBEAT, LAPSE, HeldLease
from ckptstore.manifest import decode_lease, encode_signed
from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from ckptstore.testing import CrashStore, Fault, FaultStore, SimulatedCrash
from ckptstore.transaction import Transaction
from tests.repository.helpers import (
    Clock,
    Interfering,
    assert_no_debris,
    assert_same,
    contents,
    keys_of,
    make_state,
    open_repo,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    """A repository with epochs 1 and 2, on a store with a clock of our own."""
    made = MemoryStore(clock=clock)
    repo = open_repo(made)
    for epoch in (1, 2):
        repo.save(epoch, make_state(epoch))
    return made


def writing(store: Store, epoch: int = 3, seed: int | None = None, **options: Any) -> Transaction:
    """A transaction that has written everything and not yet committed. It reuses ``frozen`` of its base."""
    txn = open_repo(store).begin(epoch, **options)
    for name, state in make_state(epoch if seed is None else seed).items():
        txn.write(name, state)
    txn.settle()
    return txn


def lease_of(txn: Transaction) -> str:
    return keys.lease_key(txn._attempt)


def own_objects(store: Store, txn: Transaction) -> list[str]:
    return [key for key in keys_of(store) if key.startswith(f"attempts/{txn._attempt}/")]


def commit_is_whole(store: Store, txn: Transaction, seed: int) -> None:
    txn.commit()
    repo = open_repo(store)
    assert repo.verify().ok
    assert_same(repo.checkpoint(txn.epoch).load(), make_state(seed))
    repo.gc(grace=0)
    assert_no_debris(store)


# ---- the living ---------------------------------------------------------------------------------------------


def test_lease_names_what_it_builds_on(store: MemoryStore) -> None:
    """While a save runs, its lease tells its epoch, its base and every attempt whose objects it may refer to."""
    txn = writing(store)
    lease = decode_lease(store.get(lease_of(txn)), lease_of(txn))
    assert (lease.attempt, lease.epoch, lease.base, lease.state) == (txn._attempt, 3, keys.manifest_key(2, 1), "active")
    manifest = json.loads(store.get(keys.manifest_key(2, 1)))
    assert set(lease.uses) == set(manifest["attempts"])
    txn.abort()
    assert lease_of(txn) not in keys_of(store)


def test_gc_spares_a_save_in_progress(store: MemoryStore, clock: Clock) -> None:
    """P5: gc beside a living save removes nothing of it, and says why."""
    txn = writing(store)
    clock.go(EXPIRY - 1)
    report = open_repo(store).gc()
    assert report.removed == []
    assert set(own_objects(store, txn)) <= report.spared.keys()
    assert set(report.spared.values()) == {"a save in progress may refer to it"}
    commit_is_whole(store, txn, 3)


@pytest.mark.parametrize("how", ["prune", "delete", "replace"])
def test_the_base_of_a_save_in_progress_is_spared(store: MemoryStore, how: str) -> None:
    """P5: what a living save reuses from its base stays when the base is pruned, deleted or replaced meanwhile."""
    txn = writing(store)
    other = open_repo(store)
    if how == "prune":
        other.save(9, {"model": {"x": 1}})
        spared = other.prune(KeepLast(1)).spared
        assert spared
        assert set(spared.values()) == {"a save in progress may refer to it"}
    elif how == "delete":
        other.delete(1)
        other.delete(2)
    else:
        other.save(2, {"model": {"x": 1}}, replace=True)
        other.delete(1)
    other.gc()
    commit_is_whole(store, txn, 3)


def test_adopted_chunks_are_spared(store: MemoryStore, clock: Clock) -> None:
    """P5: what a save has adopted from a dead attempt is spared by gc, also when the dead one is long expired."""
    dead = writing(store)
    dead._lease.stop()
    clock.go(4 * HEARTBEAT)
    txn = writing(store)
    assert txn._claim.adopted == (dead._attempt,)
    assert [key for key in own_objects(store, txn) if "/chunks/" in key] == []
    clock.go(LAPSE - 1)
    report = open_repo(store).gc()
    chunks = [key for key in own_objects(store, dead) if "/chunks/" in key]
    assert chunks
    assert set(chunks) <= report.spared.keys()
    commit_is_whole(store, txn, 3)


def test_two_savers_adopt_the_same_dead_attempt(store: MemoryStore, clock: Clock) -> None:
    """P5: two saves adopt the same dead attempt: the loser's clean-up takes nothing from the winner."""
    dead = writing(store)
    dead._lease.stop()
    clock.go(4 * HEARTBEAT)
    first, second = writing(store), writing(store)
    assert first._claim.adopted == second._claim.adopted == (dead._attempt,)
    second.abort()
    commit_is_whole(store, first, 3)


def test_two_savers_of_different_epochs_share_a_base(store: MemoryStore) -> None:
    """P5: the end of one save takes nothing from another that builds on the same base."""
    first, second = writing(store, 3), writing(store, 4)
    open_repo(store).delete(2)
    first.abort()
    open_repo(store).delete(1)
    commit_is_whole(store, second, 4)


def test_heartbeat_keeps_a_slow_save_alive(store: MemoryStore, clock: Clock) -> None:
    """P5: a save of hours is spared as long as its lease is renewed."""
    txn = writing(store)
    for _ in range(20):
        clock.go(EXPIRY - 1)
        txn._lease.renew()
        open_repo(store).gc()
    assert set(own_objects(store, txn)) <= set(keys_of(store))
    txn._lease.lapsed = False
    commit_is_whole(store, txn, 3)


# ---- the dead and the undead --------------------------------------------------------------------------------


def test_gc_sweeps_an_expired_attempt(store: MemoryStore, clock: Clock) -> None:
    """An attempt whose lease has expired is removed: objects, lease and flag, and nothing else."""
    before = set(keys_of(store))
    txn = writing(store)
    txn._lease.stop()
    clock.go(EXPIRY + 1)
    report = open_repo(store).gc()
    assert set(own_objects(store, txn)) == set()
    assert {removal.key for removal in report.removed} >= {lease_of(txn)}
    assert all(removal.reason for removal in report.removed)
    assert set(keys_of(store)) == before
    assert_no_debris(store)


@pytest.mark.parametrize("grace", [EXPIRY, 0.0])
def test_a_zombie_cannot_commit(store: MemoryStore, clock: Clock, grace: float) -> None:
    """P1: a save that was silent until it was swept cannot commit: TransactionError, and nothing of it is visible."""
    txn = writing(store)
    clock.go(EXPIRY + 1)
    open_repo(store).gc(grace=grace)
    with pytest.raises(TransactionError, match="Save again"):
        txn.commit()
    txn._give_up(TransactionError("as leaving the block does"))
    repo = open_repo(store)
    assert repo.epochs() == [1, 2]
    repo.save(3, make_state(3))
    repo.gc(grace=0)
    assert_no_debris(store)
    assert repo.verify().ok


STEPS = [
    ("info", "leases/"), ("put", "leases/"), ("put", "manifests/"), ("list", "manifests/"), ("info", "condemned/"),
    ("list", "attempts/"),
]  # fmt: skip


def long_ago(txn: Transaction) -> None:
    """Its last renewal is longer ago than a heartbeat, so that it renews before it commits."""
    txn._lease._put_at = float("-inf")


@pytest.mark.parametrize("grace", [EXPIRY, 0.0])
@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("step", STEPS, ids=" ".join)
def test_gc_at_every_step_of_a_commit(
    store: MemoryStore, clock: Clock, step: tuple[str, str], after: bool, silent: bool, grace: float
) -> None:
    """P4: gc at any step of a commit, even without grace: the commit is refused, or it is whole."""
    between = Interfering(store)
    txn = writing(between)
    if step[1] == "leases/":
        long_ago(txn)
    if silent:
        clock.go(EXPIRY + 1)
    else:
        clock.go(1)

    def collect() -> None:
        clock.go(1)
        open_repo(store).gc(grace=grace)

    between.after = after
    between.at = lambda verb, key: (verb, key.split("/")[0] + "/") == step
    between.interfere = collect
    try:
        txn.commit()
        committed = True
    except TransactionError as error:
        txn._give_up(error)
        committed = False
    repo = open_repo(store)
    assert repo.epochs() == ([1, 2, 3] if committed else [1, 2])
    report = repo.verify()
    assert report.ok, report.problems
    repo.gc(grace=0)
    assert_no_debris(store)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("step", STEPS, ids=" ".join)
def test_pause_of_hours_at_every_step_of_a_commit(
    store: MemoryStore, clock: Clock, step: tuple[str, str], after: bool
) -> None:
    """P4: a writer that stands still for hours while others collect commits what is whole, or nothing."""
    between = Interfering(store)
    txn = writing(between)
    if step[1] == "leases/":
        long_ago(txn)

    def hours() -> None:
        clock.go(10 * EXPIRY)
        other = open_repo(store)
        other.save(9, {"model": {"x": 1}})
        other.prune(KeepLast(1))
        other.gc()
        clock.go(10 * EXPIRY)

    between.after = after
    between.at = lambda verb, key: (verb, key.split("/")[0] + "/") == step
    between.interfere = hours
    try:
        txn.commit()
    except TransactionError as error:
        txn._give_up(error)
    repo = open_repo(store)
    assert 9 in repo.epochs()
    report = repo.verify()
    assert report.ok, report.problems
    repo.gc(grace=0)
    assert_no_debris(store)


def test_lapsed_lease_with_intact_objects_commits(store: MemoryStore, clock: Clock) -> None:
    """A save that was silent for too long but was not swept proves that all is there, and commits."""
    txn = writing(store)
    clock.go(10 * EXPIRY)
    commit_is_whole(store, txn, 3)


@pytest.mark.parametrize("what", ["chunk", "record", "base", "damaged base"])
def test_lapsed_lease_with_missing_objects_does_not_commit(store: MemoryStore, clock: Clock, what: str) -> None:
    """P4: a save that was silent for too long and lacks any object is refused, and nothing of it is visible."""
    txn = writing(store)
    clock.go(10 * EXPIRY)
    if what == "base":
        store.delete(keys.manifest_key(2, 1))
    elif what == "damaged base":
        store.put(keys.manifest_key(2, 1), store.get(keys.manifest_key(2, 1))[:-1])
    else:
        store.delete(next(key for key in own_objects(store, txn) if f"/{what}s/" in key))
    with pytest.raises(TransactionError, match="Save again"):
        txn.commit()
    txn._give_up(TransactionError("as leaving the block does"))
    assert 3 not in open_repo(store).epochs()


def test_a_condemned_attempt_is_not_adopted(store: MemoryStore, clock: Clock) -> None:
    """P5: a dead attempt that a sweeper has flagged is not built upon: all is sent again."""
    dead = writing(store)
    dead._lease.stop()
    clock.go(4 * HEARTBEAT)
    store.put(keys.condemned_key(dead._attempt), b"condemned\n")
    txn = writing(store)
    assert txn._claim.adopted == ()
    for key in own_objects(store, dead):
        store.delete(key)
    commit_is_whole(store, txn, 3)


def test_a_base_that_goes_before_the_lease_is_not_used(store: MemoryStore) -> None:
    """P5: a base that is deleted before the lease is seen is not built upon."""
    between = Interfering(store)
    between.at = lambda verb, key: verb == "put" and key.startswith("leases/")
    between.after = False

    def remove() -> None:
        other = open_repo(store)
        other.delete(1)
        other.delete(2)
        other.gc(grace=0)

    between.interfere = remove
    txn = writing(between)
    commit_is_whole(store, txn, 3)
    assert json.loads(store.get(keys.manifest_key(3, 1)))["attempts"] == [txn._attempt]


def test_an_abandoned_attempt_is_adopted_at_once(store: MemoryStore) -> None:
    """P1: a save that failed leaves its chunks to the next one, which sends only what is missing."""
    faults = FaultStore(store, [Fault("put", "/records/", error=TransientError("reset"))])
    with pytest.raises(TransientError):
        open_repo(faults).save(3, make_state(3))
    report = open_repo(store).save(3, make_state(3)).report
    assert report is not None
    assert report.bytes_reused > 0
    assert open_repo(store).verify().ok
    open_repo(store).gc(grace=0)
    assert_no_debris(store)


@pytest.mark.parametrize("epoch", [3, 2])
def test_a_damaged_attempt_is_not_adopted(store: MemoryStore, clock: Clock, epoch: int) -> None:
    """P3: a save that died right after its commit and is damaged is replaced without its damaged chunks."""
    replace = epoch == 2
    dying = CrashStore(store, 10**9)
    txn = writing(dying, epoch, seed=7, replace=replace)
    long_ago(txn)
    with pytest.raises(SimulatedCrash):
        for at in range(dying.mutations + 1, dying.mutations + 10):
            dying._at = at + 2  # the lease and the manifest go through, the clean-up does not
            txn.commit()
    txn._lease.stop()
    assert epoch in open_repo(store).epochs()
    chunk = max((key for key in own_objects(store, txn) if "/chunks/" in key), key=lambda key: len(store.get(key)))
    store.put(chunk, bytes(len(store.get(chunk))))
    clock.go(4 * HEARTBEAT)
    repo = open_repo(store)
    with pytest.raises(CorruptionError):
        repo.checkpoint(epoch).load()
    repo.save(epoch, make_state(7), replace=True)
    assert open_repo(store).verify(epoch).ok
    assert_same(open_repo(store).checkpoint(epoch).load(), make_state(7))
    repo.gc(grace=0)
    assert_no_debris(store)


def test_a_living_attempt_is_not_adopted(store: MemoryStore, clock: Clock) -> None:
    """A save of the same epoch that is still alive is left alone; the first to commit wins."""
    first = writing(store)
    clock.go(2 * HEARTBEAT)
    second = writing(store)
    assert second._claim.adopted == ()
    second.commit()
    with pytest.raises(EpochExistsError):
        first.commit()
    first.abort()
    open_repo(store).gc(grace=0)
    assert_no_debris(store)


# ---- gc and prune -------------------------------------------------------------------------------------------


def crashed(store: Store, epoch: int) -> None:
    """A save of ``epoch`` that died right before its commit."""
    counting = CrashStore(store, 10**9)
    txn = writing(counting, epoch)
    counting._at = counting.mutations + 1
    with pytest.raises(SimulatedCrash):
        txn.commit()
    txn._lease.stop()


FOREIGN = [
    "notes.txt",
    "manifests/backup.json",
    "manifests/000000000001-000001.json.bak",
    "attempts/README",
    "chunks/x",
    "leases/mine.json",
    "condemned/x",
    "attempts/" + "0" * 31 + "/chunks/" + "0" * 64,
    "probes/x",
    "99999",
    "attempts/" + "0" * 32 + "/other/" + "0" * 64,
    "manifests/1-1.json",
    "epoch-9.tmp",
]


def test_foreign_objects_are_never_deleted(store: MemoryStore, clock: Clock) -> None:
    """P5: gc, prune, delete and saves leave alone what ckptstore did not write, and are not disturbed by it."""
    for key in FOREIGN:
        store.put(key, b"foreign")
    crashed(store, 3)
    clock.go(10 * EXPIRY)
    repo = open_repo(store)
    latest = repo.latest()
    assert latest is not None
    assert (latest.epoch, latest.skipped) == (2, ())
    repo.save(3, make_state(3))
    repo.prune(KeepLast(1))
    repo.delete(3)
    repo.gc(grace=0)
    assert {key for key in keys_of(store) if store.get(key) == b"foreign"} == set(FOREIGN)
    assert set(keys_of(store)) == {keys.MARKER, *FOREIGN}


def test_gc_dry_run(store: MemoryStore, clock: Clock) -> None:
    """A dry run of gc writes and deletes nothing and lists, with reasons, exactly what gc then removes."""
    crashed(store, 3)
    store.put("probes/" + "0" * 32, b"clock\n")
    before = contents(store)
    repo = open_repo(store)
    planned = repo.gc(grace=0, dry_run=True)
    assert contents(store) == before
    assert planned.dry_run
    done = repo.gc(grace=0)
    assert not done.dry_run
    plan = {removal.key for removal in planned.removed if not removal.key.startswith("condemned/")}
    assert plan == {removal.key for removal in done.removed if not removal.key.startswith("condemned/")}
    assert plan == set(before) - set(keys_of(store))
    assert all(removal.reason for removal in planned.removed)
    assert planned.bytes_freed == done.bytes_freed > 0
    assert_no_debris(store)


def test_prune_dry_run(store: MemoryStore) -> None:
    """A dry run of prune writes and deletes nothing and tells which epochs would go, and why the others stay."""
    before = contents(store)
    report = open_repo(store).prune(KeepLast(1), dry_run=True)
    assert contents(store) == before
    assert report.removed.keys() == {1}
    assert report.kept == {2: "one of the last 1"}
    assert {removal.key for removal in report.objects} == {
        removal.key for removal in open_repo(store).prune(KeepLast(1)).objects
    }


@pytest.mark.parametrize("age", [10.0, EXPIRY + 1])
def test_scratch_objects_go_after_the_grace(store: MemoryStore, clock: Clock, age: float) -> None:
    """What interrupted puts and probes left is removed when it is older than the grace, and not before."""
    key = "probes/" + "0" * 32
    store.put(key, b"x")
    clock.go(age)
    open_repo(store).gc()
    assert (key in keys_of(store)) == (age < EXPIRY)


@pytest.mark.parametrize("what", ["lease", "manifest"])
def test_what_cannot_be_read_blocks_deletion(store: MemoryStore, clock: Clock, what: str) -> None:
    """P5: while a living lease or a manifest cannot be read, what it needs is unknown, and nothing is deleted."""
    crashed(store, 3)
    clock.go(EXPIRY + 1)
    if what == "lease":
        broken = keys.lease_key("0" * 32)
        store.put(broken, b"{broken")
    else:
        broken = keys.manifest_key(1, 1)
        store.put(broken, b"{broken")
    before = {key for key in keys_of(store) if key.startswith("attempts/")}
    repo = open_repo(store)
    report = repo.gc()
    assert {key for key in keys_of(store) if key.startswith("attempts/")} == before
    assert report.spared
    assert all(broken in reason for reason in report.spared.values())
    repo.prune(KeepLast(1))
    assert {key for key in keys_of(store) if key.startswith("attempts/")} == before
    if what == "manifest":
        assert 1 in repo.epochs()  # prune does not touch what it cannot judge
        repo.delete(1)
    else:
        clock.go(EXPIRY + 1)
    repo.gc(grace=0)
    assert_no_debris(store)
    assert repo.verify().ok


def test_a_damaged_index_spares_its_attempts(store: MemoryStore, clock: Clock) -> None:
    """P5: while an index is damaged, no chunk that it could need is deleted."""
    crashed(store, 3)
    clock.go(EXPIRY + 1)
    manifest = json.loads(store.get(keys.manifest_key(2, 1)))
    index = keys.record_key(manifest["records"][0]["attempt"], manifest["records"][0]["digest"])
    whole = store.get(index)
    store.put(index, bytes(len(whole)))
    open_repo(store).gc()
    open_repo(store).prune(KeepLast(1))
    store.put(index, whole)
    repo = open_repo(store)
    assert repo.verify(2).ok
    assert_same(repo.checkpoint(2).load(), make_state(2))


def test_prune_keeps_the_newest_intact(store: MemoryStore) -> None:
    """P5: when the newest epoch is damaged, prune keeps the newest intact one although no policy asks for it."""
    manifest = json.loads(store.get(keys.manifest_key(2, 1)))
    own = f"attempts/{manifest['attempt']}/chunks/"
    store.delete(next(key for key in keys_of(store) if key.startswith(own)))
    report = open_repo(store).prune(KeepLast(1))
    assert report.removed == {}
    assert report.kept[1] == "the newest intact epoch"
    assert_same(open_repo(store).checkpoint(1).load(), make_state(1))


def test_prune_without_an_intact_epoch_deletes_nothing(store: MemoryStore) -> None:
    """P5: when no epoch is intact, prune deletes nothing at all."""
    for key in [key for key in keys_of(store) if "/chunks/" in key]:
        store.put(key, b"x")
    before = contents(store)
    report = open_repo(store).prune(KeepLast(1))
    assert report.removed == {}
    assert contents(store) == before


def test_prune_keeps_what_the_run_resumed_from(store: MemoryStore) -> None:
    """P5: the epoch that this process has loaded from is kept."""
    repo: Repository = open_repo(store, keep=KeepLast(1))
    repo.checkpoint(1).load()
    repo.save(3, make_state(3))
    assert repo.epochs() == [1, 3]


def test_retention_runs_after_the_commit_and_cannot_fail_it(store: MemoryStore) -> None:
    """P5: with a policy, old epochs go after the new one is durable; a failing prune does not fail the save."""
    faults = FaultStore(store, [Fault("delete", "manifests/", error=TransientError("reset"), times=None)])
    checkpoint = open_repo(faults, keep=KeepLast(1)).save(3, make_state(3))
    assert checkpoint.epoch == 3
    assert open_repo(store).epochs() == [1, 2, 3]
    order: list[str] = []

    class Order(Interfering):
        def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
            super().put(key, data, if_absent=if_absent)
            order.append(f"put {key}")

        def delete(self, key: str) -> None:
            order.append(f"delete {key}")
            super().delete(key)

    open_repo(Order(store), keep=KeepLast(1)).save(4, make_state(4))
    deletes = [number for number, what in enumerate(order) if what.startswith(("delete manifests", "delete attempts"))]
    assert deletes
    assert min(deletes) > order.index(f"put {keys.manifest_key(4, 1)}")
    assert open_repo(store).epochs() == [4]


def test_lease_of_another_attempt_is_damage(store: MemoryStore) -> None:
    """P8: a lease that is copied under another name is not believed."""
    held = HeldLease(store, keys.new_attempt(), 3)
    held.claim(None, ())
    data = encode_signed(held.lease)
    with pytest.raises(CorruptionError):
        decode_lease(data, keys.lease_key("0" * 32))


def test_a_lease_that_is_put_with_more_to_name_tells_of_a_lapse(store: MemoryStore, clock: Clock) -> None:
    """As a renewal does: what a sweeper may have done in between is looked for before the commit."""
    lease = HeldLease(store, keys.new_attempt(), 3)
    lease.claim(None, ())
    clock.go(LAPSE)
    lease.claim(None, (keys.new_attempt(),))
    assert not lease.lapsed
    clock.go(LAPSE + 1)
    lease.claim(None, ())
    assert lease.lapsed
