"""Mirror and copy: the copy is the original, only what is missing is sent, and nobody's epochs are harmed."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    CorruptionError,
    EpochExistsError,
    EpochNotFoundError,
    InvalidArgumentError,
    KeepDaily,
    KeepLast,
    KeepWithin,
    Repository,
    StoreError,
    keys,
)
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import AccessError, TransientError
from ckptstore.lease import read_leases
from ckptstore.manifest import Manifest
from ckptstore.stores import LocalStore, MemoryStore, open_store
from ckptstore.stores.base import Store
from ckptstore.stores.trace import StoreEvent, TraceStore
from ckptstore.testing import CrashStore, Fault, FaultStore, SimulatedCrash
from tests.conftest import Bucket
from tests.repository.helpers import (
    CHUNK,
    Clock,
    Interfering,
    assert_no_debris,
    assert_same,
    contents,
    keys_of,
    make_state,
    open_repo,
    pour,
)

EPOCHS = (3, 7, 8)


def filled(store: Store, epochs: tuple[int, ...] = EPOCHS, **options: Any) -> Repository:
    repo = open_repo(store, **options)
    for epoch in epochs:
        repo.save(epoch, make_state(epoch), {"loss": 1 / epoch, "odd": float("nan")})
    return repo


def manifest_of(store: Store, epoch: int) -> Manifest:
    catalog = Catalog(store)
    return catalog.manifest(catalog.committed(epoch)[-1])


def chunks_of(store: Store, epoch: int) -> dict[str, str]:
    """Digest → key of the chunks that an epoch needs."""
    catalog = Catalog(store)
    manifest = manifest_of(store, epoch)
    return {c.digest: c.key for entry in manifest.records for c in catalog.index(entry).chunks}


def assert_copied(source: Store, target: Store, epochs: tuple[int, ...] = EPOCHS) -> None:
    """The target has these epochs, bit for bit and in every word, and verifies in full."""
    one, two = open_repo(source), open_repo(target)
    report = two.verify(deep=True)
    assert report.ok, report.problems
    for epoch in epochs:
        left, right = one.checkpoint(epoch), two.checkpoint(epoch)
        assert_same(left.load(), right.load())
        assert_same(left.metadata, right.metadata)
        assert (left.created, left.run_id, left.bytes_state) == (right.created, right.run_id, right.bytes_state)
        assert list(left.records) == list(right.records)
        assert set(chunks_of(source, epoch)) == set(chunks_of(target, epoch))
        assert manifest_of(source, epoch).first == manifest_of(target, epoch).first


def damage(store: Store, key: str, *, at: int = -5) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 1
    store.delete(key)
    store.put(key, bytes(data))


def assert_outcomes(report: Any, **outcomes: list[int]) -> None:
    found: dict[str, list[int]] = {}
    for copy in report.epochs:
        found.setdefault(copy.outcome, []).append(copy.epoch)
    assert found == outcomes


Make = Callable[[], Store]


@pytest.fixture(params=["memory→memory", "local→memory", "memory→local", "s3→local", "local→s3"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, Store]:
    """Two empty places, of every kind, in both roles."""

    def place(kind: str, name: str) -> Store:
        if kind == "local":
            return LocalStore(str(tmp_path / name))
        if kind == "s3":
            bucket: Bucket = request.getfixturevalue("s3")
            return open_store(bucket.url(), storage_options=bucket.storage_options)
        return MemoryStore()

    one, _, two = request.param.partition("→")
    return place(one, "one"), place(two, "two")


def test_a_mirror_is_the_same_and_a_second_one_sends_nothing(pair: tuple[Store, Store]) -> None:
    """Every epoch arrives bit for bit; shared chunks travel once; the next mirror finds all there."""
    one, two = pair
    source, target = filled(one, run_id="seed-1"), open_repo(two)
    seen: list[tuple[int, int]] = []
    report = source.mirror(target, progress=lambda done, total: seen.append((done, total)))
    assert_outcomes(report, copied=list(EPOCHS))
    assert report.ok
    assert_copied(one, two)
    assert_no_debris(two)
    total = sum(source.checkpoint(epoch).bytes_state for epoch in EPOCHS)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    frozen = 12_000 * 8  # the same in all epochs: sent with the first only
    assert [copy.bytes_reused >= frozen for copy in report.epochs] == [True, True, False]
    chunks = {digest for epoch in EPOCHS for digest in chunks_of(one, epoch)}
    there = [key for key in keys_of(two) if "/chunks/" in key]
    assert len(there) == len(chunks)

    before = contents(two)
    again = source.mirror(target)
    assert_outcomes(again, there=list(EPOCHS))
    assert again.bytes_sent == 0
    assert contents(two) == before


def test_a_mirror_follows_its_source() -> None:
    """Only what is new is copied; what the target pruned or wrote itself meanwhile is its own affair."""
    one, two = MemoryStore(), MemoryStore()
    source, target = filled(one), open_repo(two)
    source.mirror(target)
    target.save(9, make_state(90))
    target.delete(7)
    source.save(10, make_state(10))
    source.delete(3)
    assert_outcomes(source.mirror(target, keep=KeepLast(2)), copied=[10], there=[8])
    assert target.epochs() == [3, 8, 9, 10]
    assert_same(target.checkpoint(9).load(), make_state(90))
    assert_copied(one, two, (8, 10))
    assert_no_debris(two)


def test_a_mirror_of_a_mirror_knows_the_first(tmp_path: Path) -> None:
    """Copies of a copy are the same checkpoint, and the way back finds all there."""
    one, two, three = MemoryStore(), MemoryStore(), MemoryStore()
    source, middle, last = filled(one), open_repo(two), open_repo(three)
    source.mirror(middle)
    middle.mirror(last)
    assert_copied(one, three)
    assert_outcomes(last.mirror(source), there=list(EPOCHS))
    source.delete(7)
    assert_outcomes(last.mirror(source), there=[3, 8], copied=[7])
    assert_copied(three, one)
    assert_no_debris(one)


def test_only_the_epochs_asked_for() -> None:
    """``epochs`` and ``keep`` choose; a number that is not there is an error before anything is copied."""
    one, two = MemoryStore(), MemoryStore()
    source, target = filled(one), open_repo(two)
    with pytest.raises(EpochNotFoundError, match="no epoch 5"):
        source.mirror(target, epochs=[3, 5])
    assert target.epochs() == []
    assert_outcomes(source.mirror(target, epochs=[7, 3], keep=KeepLast(1)), copied=[7])
    assert_outcomes(source.mirror(target, epochs=iter((3,))), copied=[3])
    assert target.epochs() == [3, 7]


def test_an_older_epoch_is_copied_into_a_gap() -> None:
    """What the epochs around it share is not sent again."""
    one, two = MemoryStore(), MemoryStore()
    source, target = filled(one), open_repo(two)
    source.mirror(target, epochs=[8])
    done = source.copy(3, target)
    assert done.outcome == "copied"
    assert done.bytes_reused >= 12_000 * 8
    assert_copied(one, two, (3, 8))


# ---- what the target has already -------------------------------------------------------------------------------


def test_an_epoch_of_the_targets_own_stays() -> None:
    """The same number with another content is a conflict, reported; ``replace`` is for those who mean it."""
    one, two = MemoryStore(), MemoryStore()
    source, target = filled(one), open_repo(two)
    target.save(7, make_state(70))
    report = source.mirror(target)
    assert_outcomes(report, copied=[3, 8], conflict=[7])
    assert not report.ok
    assert_same(target.checkpoint(7).load(), make_state(70))
    with pytest.raises(EpochExistsError, match="epoch of its own"):
        source.copy(7, target)
    done = source.copy(7, target, replace=True)
    assert (done.outcome, done.generation) == ("copied", 2)
    assert_copied(one, two)
    assert_no_debris(two)


def test_a_replaced_epoch_replaces_its_copy_and_never_the_other_way() -> None:
    """Newer contents of an epoch go over older ones; older ones never over newer."""
    one, two, old = MemoryStore(), MemoryStore(), MemoryStore()
    source, target, stale = filled(one), open_repo(two), open_repo(old)
    source.mirror(target)
    source.mirror(stale)
    source.save(7, make_state(77), replace=True)
    assert_outcomes(source.mirror(target), there=[3, 8], copied=[7])
    assert_same(target.checkpoint(7).load(), make_state(77))
    assert Catalog(two).committed(7) == [Committed(7, 2)]
    assert_no_debris(two)
    report = stale.mirror(target)
    assert_outcomes(report, there=[3, 8], newer=[7])
    assert report.ok
    assert_same(target.checkpoint(7).load(), make_state(77))
    assert_outcomes(target.mirror(stale), there=[3, 8], copied=[7])


def test_a_copy_that_lost_an_object_is_sent_anew() -> None:
    """What is in the target counts only if it is whole by name and size."""
    one, two = MemoryStore(), MemoryStore()
    source, target = filled(one), open_repo(two)
    source.mirror(target)
    alone = sorted(set(chunks_of(two, 8)) - set(chunks_of(two, 7)))[0]
    two.delete(chunks_of(two, 8)[alone])
    assert_outcomes(source.mirror(open_repo(two)), there=[3, 7], copied=[8])
    assert_copied(one, two)
    assert_no_debris(two)
    assert_outcomes(source.mirror(target), there=list(EPOCHS))


def test_a_manifest_that_cannot_be_read_is_not_replaced_unasked() -> None:
    """Whose epoch it is cannot be told; the others arrive."""
    one, two = MemoryStore(), MemoryStore()
    source, target = filled(one), open_repo(two)
    source.mirror(target, epochs=[7])
    damage(two, keys.manifest_key(7, 1))
    report = source.mirror(target)
    assert_outcomes(report, copied=[3, 8], conflict=[7])
    assert "damaged" in report.epochs[1].reason
    assert source.copy(7, target, replace=True).generation == 2
    assert_copied(one, two)


def test_a_damaged_copy_keeps_the_records_that_the_source_has_dropped() -> None:
    """What is sent anew would have fewer records: that is for a person to decide."""
    one, two = MemoryStore(), MemoryStore()
    source, target = filled(one), open_repo(two)
    source.mirror(target)
    source.prune({"model": KeepLast(9), "optim": KeepLast(1)})
    assert "optim" not in source.checkpoint(7).records
    two.delete(next(c.key for c in Catalog(two).index(manifest_of(two, 7).records[0]).chunks if c.key.count("/") == 3))
    report = source.mirror(open_repo(two), epochs=[7])
    assert_outcomes(report, conflict=[7])
    assert "dropped (optim)" in report.epochs[0].reason
    assert_same(target.checkpoint(7).load("optim"), make_state(7)["optim"])
    assert source.copy(7, open_repo(two), replace=True).outcome == "copied"
    assert "optim" not in open_repo(two).checkpoint(7).records


def test_a_mirror_with_nothing_to_do_asks_little() -> None:
    """A few requests for each epoch, however many there are, and no chunk is read."""
    asked: list[tuple[int, int]] = []
    for count in (6, 18):
        one, two = MemoryStore(), MemoryStore()
        source = open_repo(one)
        for epoch in range(count):
            source.save(epoch, {"model": {"frozen": np.zeros(9000), "step": np.full(9000, epoch)}})
        source.mirror(open_repo(two))
        events: list[StoreEvent] = []
        watched = TraceStore(two, events.append)
        quiet = FaultStore(one, [Fault("get", "/chunks/", error=AccessError("no"), times=None)])
        assert open_repo(quiet).mirror(open_repo(watched)).of("there") == list(range(count))
        asked.append((count, len(events)))
    (few, requests), (many, more) = asked
    assert more - requests <= 3 * (many - few)  # manifest, index, and the listing of its attempt


# ---- damage in the source --------------------------------------------------------------------------------------


def test_damage_in_the_source_never_arrives() -> None:
    """A flipped bit, a cut chunk, a lost index, a lost manifest byte: reported by name, and all others copied."""
    one, two = MemoryStore(), MemoryStore()
    filled(one, (1, 2, 3, 4, 5))

    def own(epoch: int) -> str:
        rest = set().union(*(chunks_of(one, other) for other in range(1, 6) if other != epoch))
        return chunks_of(one, epoch)[sorted(set(chunks_of(one, epoch)) - rest)[0]]

    flipped, cut = own(1), own(2)
    lost = manifest_of(one, 3).records[0].key
    damage(one, flipped)
    data = one.get(cut)
    one.delete(cut)
    one.put(cut, data[:-1])
    one.delete(lost)
    damage(one, keys.manifest_key(4, 1))
    source = open_repo(one)  # nothing remembered
    report = source.mirror(open_repo(two))
    assert_outcomes(report, damaged=[1, 2, 3, 4], copied=[5])
    assert not report.ok
    assert [copy.key for copy in report.epochs][:4] == [flipped, cut, lost, keys.manifest_key(4, 1)]
    assert_copied(one, two, (5,))
    assert_no_debris(two)
    assert [info.key for info in two.list(keys.LEASES)] == []
    with pytest.raises(CorruptionError) as caught:
        source.copy(1, open_repo(two))
    assert (caught.value.key, caught.value.epoch) == (flipped, 1)


def test_a_wrong_byte_on_the_way_is_read_again() -> None:
    """Only what is wrong twice is damage."""
    one, two = MemoryStore(), MemoryStore()
    filled(one)

    class Noisy(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self._space = one._space
            self.noisy: set[str] = set()

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            data = bytearray(super().get(key, start, end))
            if key not in self.noisy:
                self.noisy.add(key)
                data[-1] ^= 8
            return bytes(data)

    noisy = Noisy()
    noisy.noisy.add(keys.MARKER)
    report = open_repo(noisy).mirror(open_repo(two))
    assert_outcomes(report, copied=list(EPOCHS))
    assert len(noisy.noisy) > 12
    assert_copied(one, two)


# ---- beside others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False])
def test_the_source_may_replace_or_delete_an_epoch_meanwhile(held: bool) -> None:
    """Held: what was asked for is copied. Else the new content is, or it is reported as gone; never as damage."""
    one, two = Interfering(MemoryStore()), MemoryStore()
    source = filled(one)
    other = open_repo(one)

    class Reading(Interfering):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            self._hook("get", key, False)
            return super().get(key, start, end)

        def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
            if not held:
                raise AccessError("read only")
            super().put(key, data, if_absent=if_absent)

    reading = Reading(one)
    reading.after = False
    gone_chunk = chunks_of(one, 8)
    own = {gone_chunk[digest] for digest in set(gone_chunk) - set(chunks_of(one, 7))}
    reading.at = lambda verb, key: verb == "get" and key in own
    reading.interfere = lambda: other.save(8, make_state(88), replace=True)
    assert open_repo(reading).copy(8, open_repo(two)).outcome == "copied"
    assert_same(open_repo(two).checkpoint(8).load(), make_state(8 if held else 88))
    assert open_repo(reading).copy(8, open_repo(two)).outcome == ("copied" if held else "there")
    assert_same(open_repo(two).checkpoint(8).load(), make_state(88))

    own = set(chunks_of(one, 7).values())
    reading.interfere = lambda: other.delete(7)
    report = open_repo(reading).mirror(open_repo(two), epochs=[3, 7])
    assert_outcomes(report, **{"copied": [3, 7]} if held else {"copied": [3], "gone": [7]})
    assert report.ok
    assert source.epochs() == [3, 8]
    assert_no_debris(two)


def test_a_prune_of_the_source_spares_what_is_being_copied() -> None:
    """P5: the epoch is held while it is read, with the reason, and no longer. The next prune takes it."""
    one, two = MemoryStore(), Interfering(MemoryStore())
    source, trainer = filled(one), open_repo(one)
    pruned: list[Any] = []

    def interfere() -> None:
        pruned.append(trainer.prune(KeepLast(1)))
        pruned.append(trainer.holds())

    two.at, two.interfere = lambda verb, key: verb == "put" and "/chunks/" in key, interfere
    assert source.copy(7, open_repo(two)).outcome == "copied"
    report, holds = pruned
    assert list(holds) == [7]
    assert holds[7].endswith(f": copied to {two.traits.url}")
    assert source.epochs() == [7, 8]
    assert report.kept[7] == holds[7]
    assert not read_leases(one)
    trainer.prune(KeepLast(1))
    assert source.epochs() == [8]
    assert_same(open_repo(two).checkpoint(7).load(), make_state(7))


def test_a_source_that_refuses_writes_is_copied_without_a_hold() -> None:
    """Who may only read can copy all the same."""
    one, two = MemoryStore(), MemoryStore()
    filled(one)
    refusing = FaultStore(one, [Fault(verb, error=AccessError("read only"), times=None) for verb in ("put", "delete")])
    assert_outcomes(open_repo(refusing).mirror(open_repo(two)), copied=[3, 7, 8])
    assert_copied(one, two, (3, 7, 8))


def test_gc_and_prune_in_the_target_leave_a_mirror_alone() -> None:
    """What is being copied is under a lease, and so is the epoch whose chunks it refers to."""
    clock = Clock()
    one, two = MemoryStore(), Interfering(MemoryStore(clock=clock))
    source = filled(one)
    source.mirror(open_repo(two), epochs=[3])
    sweeper = open_repo(two)
    swept: list[Any] = []

    def interfere() -> None:
        clock.go(600)
        swept.append(sweeper.gc())
        sweeper.delete(3)
        swept.append(sweeper.gc())

    puts: list[str] = []

    def at(verb: str, key: str) -> bool:
        if verb == "put" and "/chunks/" in key:
            puts.append(key)
        return len(puts) == 2

    two.at, two.interfere = at, interfere
    report = source.mirror(open_repo(two), epochs=[7, 8])
    assert_outcomes(report, copied=[7, 8])
    assert len(swept) == 2
    assert_copied(one, two, (7, 8))


def test_two_mirrors_at_once() -> None:
    """Both succeed; each epoch is there once, and neither takes the other's objects."""
    one, two = MemoryStore(), MemoryStore()
    source = filled(one, (1, 2, 3, 4))
    reports: list[Any] = []
    errors: list[BaseException] = []
    together = threading.Barrier(3)

    def work() -> None:
        try:
            mine = open_repo(one)
            theirs = open_repo(two)
            together.wait()
            reports.append(mine.mirror(theirs))
        except BaseException as error:  # noqa: BLE001 (shown by the main thread)
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    copied = sorted(epoch for report in reports for epoch in report.of("copied"))
    assert copied == [1, 2, 3, 4]
    assert all(report.ok and len(report.epochs) == 4 for report in reports)
    assert_copied(one, two, (1, 2, 3, 4))
    assert_no_debris(two)
    assert source.epochs() == [1, 2, 3, 4]


def test_the_targets_own_save_of_the_same_epoch_wins() -> None:
    """A trainer that commits the number while it is copied keeps it."""
    one, two = MemoryStore(), Interfering(MemoryStore())
    source = filled(one, (5,))
    trainer = open_repo(two)
    two.after = False
    two.at = lambda verb, key: verb == "put" and keys.parse_manifest_key(key) is not None
    mine = open_repo(two)

    def save() -> None:
        trainer.save(5, make_state(50))

    two.interfere = save
    report = source.mirror(mine)
    assert_outcomes(report, conflict=[5])
    assert_same(trainer.checkpoint(5).load(), make_state(50))
    assert_no_debris(two)


# ---- failures --------------------------------------------------------------------------------------------------


def test_after_a_failure_only_what_is_missing_is_sent() -> None:
    """A target that fails in the middle: nothing half appears, and the next mirror takes up what was sent."""
    one, two = MemoryStore(), MemoryStore()
    source = filled(one)
    puts = itertools.count()
    broken = FaultStore(two, [Fault("put", lambda key: "/chunks/" in key and next(puts) >= 2, error=AccessError("no"))])
    with pytest.raises(StoreError):
        source.mirror(open_repo(broken))
    assert Catalog(two).committed() == []
    left = {keys.parse_content_key(key)[2] for key in keys_of(two) if "/chunks/" in key}  # type: ignore[index]
    assert left
    report = source.mirror(open_repo(two))
    assert_outcomes(report, copied=list(EPOCHS))
    sent = sum(copy.bytes_sent for copy in report.epochs)
    whole = open_repo(MemoryStore())
    assert sent < source.mirror(whole).bytes_sent
    assert left <= set(chunks_of(two, 8))
    assert_copied(one, two)
    assert_no_debris(two)


def test_a_source_that_fails_is_no_damage() -> None:
    """ "Damaged" is said of bytes, never of a store that does not answer."""
    one, two = MemoryStore(), MemoryStore()
    filled(one)
    flaky = FaultStore(one, [Fault("get", "/chunks/", error=TransientError("gone away"))])
    with pytest.raises(StoreError):
        open_repo(flaky).mirror(open_repo(two))
    assert Catalog(two).committed() == []
    assert [s.lease.state for s in read_leases(two) if s.lease is not None] == ["abandoned"]


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_crash_at_every_mutation(mode: Any) -> None:
    """Killed anywhere: what is there is whole, what was there is as it was, and the next mirror comes to its end."""
    one = MemoryStore()
    source = filled(one, (3, 7))
    prepared = MemoryStore()
    open_repo(prepared).save(5, make_state(5))
    source.mirror(open_repo(prepared), epochs=[3])
    source.save(3, make_state(33), replace=True)  # so one epoch is replaced there, and one is new
    for at in range(1, 200):
        two = MemoryStore()
        pour(contents(prepared), two)
        try:
            open_repo(one).mirror(open_repo(CrashStore(two, at, mode)))
        except SimulatedCrash:
            repo = open_repo(two)
            assert {3, 5} <= {*repo.epochs()} <= {3, 5, 7}
            assert repo.verify().ok
            assert_same(repo.checkpoint(5).load(), make_state(5))
            assert repo.checkpoint(3).load("optim")["step"] in (3, 33)
            assert open_repo(one).mirror(repo).ok
        else:
            assert at > 15
            assert_copied(one, two, (3, 7))
            return
        assert_copied(one, two, (3, 7))
        repo.gc(grace=0)
        assert_no_debris(two)
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "50", True])
def test_bad_limits_are_refused(limit: Any) -> None:
    """A limit is a number of bytes a second."""
    with pytest.raises(InvalidArgumentError, match="bytes a second"):
        filled(MemoryStore()).mirror(open_repo(MemoryStore()), limit=limit)


def test_a_place_is_not_copied_to_itself(tmp_path: Path) -> None:
    """Whatever it is called: "all there already" would look like a second copy. A plain copy is a second one."""
    store = LocalStore(str(tmp_path / "one"))
    repo = filled(store)
    before = contents(store)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    again, link = (open_repo(LocalStore(str(tmp_path / name))) for name in ("one", "link"))
    for other in (repo, again, link):
        with pytest.raises(InvalidArgumentError, match="same place"):
            repo.mirror(other)
        with pytest.raises(InvalidArgumentError, match="same place"):
            repo.copy(1, other, replace=True)
    for other in (repo, again):
        with pytest.raises(InvalidArgumentError, match="same place"):
            repo.mirror(other, dry_run=True)
    assert contents(store) == before
    shutil.copytree(tmp_path / "one", tmp_path / "plain")
    assert_outcomes(repo.mirror(open_repo(LocalStore(str(tmp_path / "plain")))), there=list(EPOCHS))


def test_large_chunks_and_every_kind_of_record(tmp_path: Path) -> None:
    """Files, empty states, bytes, aliases and a codec of planes: copied frame by frame."""
    one, two = MemoryStore(), MemoryStore()
    source = Repository(one, codec="max")
    shared = np.arange(300_000, dtype=np.float32)
    (tmp_path / "a file").write_bytes(bytes(range(256)) * 3000)
    with source.begin(1, metadata={"x": (1, b"2")}) as txn:
        txn.write("a", {"w": shared, "same": shared, "raw": b"x" * 5000, "none": None, "empty": np.empty((0, 3))})
        txn.write("b", {"w": shared.copy()})
        txn.write("nothing", {})
        txn.write_file("file", tmp_path / "a file")
    source.mirror(open_repo(two))
    assert_copied(one, two, (1,))
    assert open_repo(two).checkpoint(1).file_name("file") == "a file"
    assert CHUNK


def test_a_mirror_keeps_times_and_what_was_left_out(tmp_path: Path) -> None:
    """Policies by time choose in the copy as in the original; a thinned epoch is copied so, a whole one stays."""
    clock = Clock()
    source = Repository(MemoryStore(clock=clock))
    for epoch in range(1, 5):
        clock.go(86400)
        source.save(epoch, {"model": {"w": epoch}, "optimizer": {"m": epoch}})
    with ckptstore.open(tmp_path / "whole") as whole, ckptstore.open(tmp_path / "thin") as thin:
        assert source.mirror(whole).ok
        source.prune({"model": KeepLast(9), "optimizer": KeepLast(1)})
        assert source.mirror(whole).of("there") == [1, 2, 3, 4]
        assert source.mirror(thin).of("copied") == [1, 2, 3, 4]
        assert sorted(whole.checkpoint(1).records) == ["model", "optimizer"]
        assert thin.checkpoint(1).left_out == source.checkpoint(1).left_out != {}
        for policy in (KeepDaily(2), KeepWithin(30)):
            assert source.plan(policy).kept == whole.plan(policy).kept == thin.plan(policy).kept
        assert thin.checkpoint(1).load() == {"model": {"w": 1}}
        assert thin.verify().ok


def test_pins_come_along() -> None:
    """Of what is copied, of what an earlier mirror copied, and of no other epoch; nothing is unpinned in the target."""
    source, target = filled(MemoryStore(), (1, 2, 3, 4)), open_repo(MemoryStore())
    source.mirror(target, [1, 2])
    target.save(4, make_state(40))  # of its own, under the same number
    target.pin(2, "said there")
    for epoch in (1, 2, 3, 4):
        source.pin(epoch, f"reason {epoch}")
    before = contents(target.store)
    dry = source.mirror(target, dry_run=True)
    assert dry.pins == {1: "reason 1", 3: "reason 3"}
    assert contents(target.store) == before
    report = source.mirror(target)
    assert report.pins == dry.pins
    assert target.pins() == {1: "reason 1", 2: "said there", 3: "reason 3"}
    assert target.prune(KeepLast(1)).removed == {}
    source.unpin(1)
    assert source.mirror(target).pins == {}
    assert 1 in target.pins()


def test_a_pin_of_what_is_there_comes_before_the_copies() -> None:
    """Copies can take hours, and fail: a prune of the target must not take a pinned epoch meanwhile."""
    source = filled(MemoryStore(), (1, 2))
    source.mirror(open_repo(store := MemoryStore()), [1])
    source.pin(1, "the paper")
    broken = FaultStore(store, [Fault("put", keys.ATTEMPTS, error=AccessError("no"), times=None)])
    with pytest.raises(AccessError):
        source.mirror(open_repo(broken))
    assert open_repo(store).pins() == {1: "the paper"}
