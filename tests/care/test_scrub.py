"""Scrub: everything is read in turn, what is found is remembered, and no record can do harm."""

from __future__ import annotations

import itertools
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptstore import InvalidArgumentError, Repository, keys
from ckptstore.catalog import Catalog
from ckptstore.checked import END, MAX_STRETCHES, Checked, Stretch, decode_checked, load, mark, merged, oldest, save
from ckptstore.errors import AccessError, CorruptionError, TransientError
from ckptstore.manifest import encode_signed
from ckptstore.scrub import Budget, Scrub, ScrubReport
from ckptstore.stores import LocalStore, MemoryStore
from ckptstore.stores.base import Store
from ckptstore.stores.trace import StoreEvent, TraceStore
from ckptstore.testing import CrashStore, Fault, FaultStore, SimulatedCrash
from tests.repository.helpers import Clock, assert_no_debris, contents, make_state, open_repo, pour

DAY = 86_400.0


def filled(store: Store, *epochs: int) -> Repository:
    repo = open_repo(store)
    for epoch in epochs or (1, 2, 3):
        repo.save(epoch, make_state(epoch))
    return repo


def chunks_of(store: Store) -> dict[str, int]:
    return {info.key: info.size for info in store.list(keys.ATTEMPTS) if "/chunks/" in info.key}


class Reads:
    """Which chunks are read through it, in their order."""

    def __init__(self, store: Store) -> None:
        self.keys: list[str] = []
        self.store = TraceStore(store, self._note)

    def _note(self, event: StoreEvent) -> None:
        if event.verb == "get" and "/chunks/" in event.key:
            self.keys.append(event.key)

    def repo(self) -> Repository:
        return open_repo(self.store)


def rot(store: Store, key: str) -> None:
    store.put(key, store.get(key)[:-1] + b"?")


# ---- rounds -------------------------------------------------------------------------------------------------


def test_everything_is_read_in_turn() -> None:
    """Each run reads what was read longest ago; when each chunk was read once, they begin anew."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    filled(store)
    sizes = chunks_of(store)
    largest = max(sizes.values())
    order: list[str] = []
    complete = False
    while not complete:
        reads = Reads(store)
        report = reads.repo().scrub(max_bytes=2 * largest, older_than=DAY)
        assert report.ok
        assert report.recorded
        assert report.chunks_read == len(reads.keys) > 0
        assert report.bytes_read == sum(sizes[key] for key in reads.keys) <= 2 * largest
        assert (report.oldest_seconds is None) == (not report.complete)
        order += sorted(reads.keys, key=lambda key: key.rpartition("/")[2])
        complete = report.complete
        clock.go(60)
    assert sorted(order) == sorted(sizes)
    assert order == sorted(sizes, key=lambda key: key.rpartition("/")[2])
    again = Reads(store)
    assert again.repo().scrub(older_than=DAY).chunks_read == 0
    assert again.keys == []
    clock.go(DAY)
    oldest_first = Reads(store)
    report = oldest_first.repo().scrub(max_bytes=1, older_than=DAY)  # one in any case
    assert (report.chunks_read, oldest_first.keys) == (1, order[:1])


def test_a_run_without_limits_reads_all_once() -> None:
    """As a deep verify does, and says how old the oldest check is."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    filled(store)
    reads = Reads(store)
    report = reads.repo().scrub()
    assert sorted(reads.keys) == sorted(chunks_of(store))
    assert (report.complete, report.oldest_seconds, report.chunks) == (True, 0.0, len(reads.keys))
    assert report.bytes_stored == report.bytes_read == sum(chunks_of(store).values())
    clock.go(100)
    assert open_repo(store).scrub(older_than=1000).oldest_seconds == 100
    open_repo(store).gc(grace=0)
    assert_no_debris(store)
    assert store.info(keys.CHECKED).size < 400


def test_a_limit_of_time() -> None:
    """It ends when the time is up, after one chunk at least, and the next goes on there."""
    store = MemoryStore()
    filled(store)
    reports = [_hurried(store)]
    while not reports[-1].complete:
        reports.append(_hurried(store))
    assert len(reports) > 2
    assert all(report.chunks_read >= 1 for report in reports[:-1])
    assert sum(report.chunks_read for report in reports) == len(chunks_of(store))


def _hurried(store: Store) -> ScrubReport:
    ticks = itertools.count()
    return Scrub(Catalog(store), Budget(max_seconds=0.0), older_than=DAY, clock=lambda: float(next(ticks))).run()


def test_the_rate_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes go through a throttle."""
    let: list[int] = []
    monkeypatch.setattr("ckptstore.throttle.Throttle.wait", lambda self, nbytes: let.append(nbytes))
    store = MemoryStore()
    report = filled(store).scrub(limit=1e6)
    assert sum(let) == report.bytes_read > 0
    with pytest.raises(InvalidArgumentError):
        open_repo(store).scrub(limit=0)


def test_progress_is_told() -> None:
    """Up to all that is read."""
    store = MemoryStore()
    told: list[tuple[int, int]] = []
    lock = threading.Lock()

    def progress(done: int, total: int) -> None:
        with lock:
            told.append((done, total))

    report = filled(store).scrub(progress=progress)
    assert max(told)[0] == report.bytes_read == told[0][1]


# ---- damage ---------------------------------------------------------------------------------------------------


def test_damage_is_remembered_until_it_is_mended() -> None:
    """Every run, however small, looks at it again, for each epoch that needs it, until it is good."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    repo = filled(store)
    shared = set.intersection(
        *({c.key for e in m.records for c in Catalog(store).index(e).chunks} for _, m in manifests(store))
    )
    victim = sorted(shared)[0]
    sound = store.get(victim)
    rot(store, victim)
    found = repo.scrub()
    assert not found.ok
    assert [problem.key for problem in found.problems] == [victim]
    assert [health.epoch for health in found.epochs if not health.ok] == [1, 2, 3]
    clock.go(10)
    small = open_repo(store).scrub(max_bytes=1, older_than=DAY)
    assert [problem.key for problem in small.problems] == [victim]
    assert not open_repo(store).verify(resume=True).ok
    store.put(victim, sound)
    assert open_repo(store).scrub(older_than=DAY).ok
    assert decode_checked(store.get(keys.CHECKED)).problems == ()


def manifests(store: Store) -> list[Any]:
    catalog = Catalog(store)
    return catalog.manifests(catalog.committed())


def test_what_is_missing_or_above_chunks() -> None:
    """A lost chunk, a damaged index, a damaged manifest: each with its object; and quarantine on demand."""
    store = MemoryStore()
    repo = filled(store)
    lost = manifests(store)
    own = [c for e in lost[0][1].records for c in Catalog(store).index(e).chunks if c.attempt == lost[0][1].attempt]
    unshared = [c for c in own if all(c.key not in Catalog(store).reach(m) for _, m in lost[1:])]
    store.delete(unshared[0].key)
    index = lost[1][1].records[0].key
    rot(store, index)
    rot(store, keys.manifest_key(3, 1))
    report = repo.scrub(quarantine=True)
    by_epoch = {health.epoch: {problem.key for problem in health.problems} for health in report.epochs}
    assert unshared[0].key in by_epoch[1]
    assert index in by_epoch[2]
    assert by_epoch[3] == {keys.manifest_key(3, 1)}
    assert list(repo.quarantined()) == [1, 2, 3]


def test_an_epoch_that_goes_meanwhile_is_no_damage() -> None:
    """What a delete takes while it is to be read was not damaged."""
    store = MemoryStore()
    filled(store)
    other = open_repo(store)
    gone: list[int] = []

    class Deleting(FaultStore):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if "/chunks/" in key and not gone:
                gone.append(1)
                other.delete(1)
            return super().get(key, start, end)

    assert open_repo(Deleting(store, [])).scrub().ok
    assert gone
    assert open_repo(store).scrub().ok
    assert decode_checked(store.get(keys.CHECKED)).problems == ()


# ---- verify --resume ------------------------------------------------------------------------------------------


def test_a_verification_that_was_killed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is read once until it has come to its end, whatever it was killed at; then the next begins anew."""
    monkeypatch.setattr("ckptstore.scrub._SAVE_SECONDS", 0.0)
    monkeypatch.setattr("ckptstore.scrub._BATCH_CHUNKS", 2)
    clock = Clock()
    store = MemoryStore(clock=clock)
    filled(store)
    read: list[str] = []
    killed = 0
    for at in (3, 4, 5, 4):
        reads = Reads(store)
        with pytest.raises(SimulatedCrash):
            open_repo(CrashStore(reads.store, at)).verify(resume=True)
        killed += 1
        read += reads.keys
        clock.go(100)
    reads = Reads(store)
    report = reads.repo().verify(resume=True)
    read += reads.keys
    assert report.ok
    assert [health.epoch for health in report.epochs] == [1, 2, 3]
    assert all(health.bytes_state for health in report.epochs)
    assert set(read) == {*chunks_of(store)}
    assert len(reads.keys) < len(chunks_of(store))
    assert len(read) <= len(chunks_of(store)) + 2 * killed  # at most a batch is read twice for each kill
    clock.go(1)
    anew = Reads(store)
    assert anew.repo().verify(resume=True).ok
    assert sorted(anew.keys) == sorted(chunks_of(store))
    for wrong in ({"epoch": 1}, {"deep": False}, {"sample": 0.5}):
        with pytest.raises(InvalidArgumentError):
            open_repo(store).verify(resume=True, **wrong)


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_a_scrub_that_is_killed_at_any_mutation(mode: Any, fast_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository is as it was, and the next scrub goes on or begins anew."""
    monkeypatch.setattr("ckptstore.scrub._SAVE_SECONDS", 0.0)
    monkeypatch.setattr("ckptstore.scrub._BATCH_CHUNKS", 3)
    made = MemoryStore()
    filled(made)
    before = contents(made)
    for at in itertools.count(1):
        store: Store = LocalStore(str(fast_folder / f"{mode}{at}")) if mode == "torn" else MemoryStore()
        pour(before, store)
        crashing = CrashStore(store, at, mode)
        try:
            open_repo(crashing).scrub()
        except SimulatedCrash:
            pass
        assert {key: data for key, data in contents(store).items() if key in before} == before
        report = open_repo(store).scrub()
        assert report.ok
        assert report.complete
        open_repo(store).gc(grace=0)
        assert_no_debris(store)
        if not crashing.crashed:
            break
    assert at > 3


# ---- the record -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bytes_",
    [
        b"",
        b"{}",
        b'{"digest":"' + b"0" * 64 + b'",}',
        encode_signed(Checked(place="x", stretches=())),
        encode_signed(Checked(place="x", stretches=(Stretch("a", 1.0),))),
        encode_signed(Checked(place="x", stretches=(Stretch(END, -1.0),))),
        encode_signed(Checked(place="x", stretches=(Stretch("b", 1.0), Stretch("a", 1.0), Stretch(END, 1.0)))),
        encode_signed(Checked(format=2, place="x")),
        encode_signed(Checked(place="x", stretches=(Stretch(END, 1.0),))),  # of another place
        b"x" * 2_000_000,
    ],
    ids=range(10),
)
def test_a_record_that_makes_no_sense_is_forgotten(bytes_: bytes) -> None:
    """Then all is read again; nothing fails, nothing is left out."""
    store = MemoryStore()
    filled(store)
    open_repo(store).scrub()
    store.put(keys.CHECKED, bytes_)
    reads = Reads(store)
    report = reads.repo().scrub(older_than=DAY)
    assert report.complete
    assert sorted(reads.keys) == sorted(chunks_of(store))


def test_a_record_of_another_place_or_from_the_future_is_not_believed() -> None:
    """A copy of a repository was never read; and a clock that ran ahead must not save a chunk from being read."""
    clock = Clock()
    store = MemoryStore("one", clock=clock)
    filled(store)
    clock.go(1000 * DAY)
    open_repo(store).scrub()
    copy = MemoryStore("two", clock=clock)
    pour(contents(store), copy)
    assert open_repo(copy).scrub(older_than=DAY).chunks_read == len(chunks_of(copy))
    clock.go(-500 * DAY)
    assert open_repo(store).scrub(older_than=DAY).chunks_read == len(chunks_of(store))


def test_every_flipped_byte_of_a_record_is_harmless() -> None:
    """P8: it is believed as it was, or not at all."""
    store = MemoryStore(clock=Clock())
    repo = filled(store, 1)
    repo.scrub()
    sound = store.get(keys.CHECKED)
    for at in range(len(sound)):
        data = bytearray(sound)
        data[at] ^= 1 << at % 8
        with pytest.raises(CorruptionError):
            decode_checked(bytes(data))
    document = json.loads(sound)
    assert document["stretches"][-1][0] == END


def test_a_store_that_may_only_be_read() -> None:
    """The check is made all the same, and says that nobody will know."""
    store = MemoryStore()
    filled(store)
    refusing = [
        Fault("put", error=AccessError("no"), times=None),
        Fault("delete", error=AccessError("no"), times=None),
    ]
    report = open_repo(FaultStore(store, refusing)).scrub()
    assert report.complete
    assert not report.recorded
    assert report.chunks_read == len(chunks_of(store))


def test_a_store_that_fails_in_the_middle() -> None:
    """The error is raised, what was read by then is noted, and the next run goes on there."""
    store = MemoryStore()
    filled(store)
    ordered = sorted(chunks_of(store), key=lambda key: key.rpartition("/")[2])
    down = FaultStore(store, [Fault("get", ordered[-1], error=TransientError("down"), times=None)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptstore.scrub._BATCH_CHUNKS", 2)
        with pytest.raises(TransientError):
            open_repo(down).scrub()
    report = open_repo(store).scrub(older_than=DAY)
    assert report.complete
    assert report.chunks_read <= 4


def test_scrubs_at_once() -> None:
    """Their records add up, and each reads what it should."""
    store = MemoryStore()
    filled(store)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: open_repo(store).scrub(max_bytes=200_000), range(8)))
    assert all(report.ok for report in reports)
    report = open_repo(store).scrub(older_than=DAY)
    assert report.complete
    assert report.chunks_read < len(chunks_of(store))


@pytest.mark.parametrize("name", ["max_bytes", "max_seconds", "older_than"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "5"])
def test_nonsense_is_refused(name: str, value: Any) -> None:
    """Before anything is read."""
    with pytest.raises(InvalidArgumentError):
        open_repo(MemoryStore()).scrub(**{name: value})


def test_nothing_to_scrub() -> None:
    """An empty repository is complete."""
    report = open_repo(MemoryStore()).scrub()
    assert (report.ok, report.complete, report.chunks) == (True, True, 0)


# ---- stretches --------------------------------------------------------------------------------------------------


def test_stretches_against_a_plain_table() -> None:
    """Marks and merges do what they would do in a table with a time for each digest; the record stays small."""
    chance = random.Random(7)
    digests = [f"{number:02x}" for number in range(256)]

    def times(stretches: tuple[Stretch, ...]) -> list[float]:
        return [next(s.at for s in stretches if digest < s.upto) for digest in digests]

    for _ in range(50):
        pair = []
        for _ in range(2):
            stretches: tuple[Stretch, ...] = (Stretch(END, 0.0),)
            table = [0.0] * 256
            for at in range(1, 30):
                start, stop = sorted((chance.choice(["", *digests]), chance.choice([*digests, END])))
                stretches = mark(stretches, start, stop, float(at))
                table = [float(at) if start <= d < stop else was for d, was in zip(digests, table, strict=True)]
                assert times(stretches) == table
                assert [s.upto for s in stretches] == sorted({s.upto for s in stretches})
                first, last, age = oldest(stretches)
                assert age == min(s.at for s in stretches)
                assert all(age == was for d, was in zip(digests, table, strict=True) if first <= d < last)
            pair.append((stretches, table))
        (one, first_table), (two, second_table) = pair
        assert times(merged(one, two)) == [max(both) for both in zip(first_table, second_table, strict=True)]


def test_too_many_stretches_are_told_as_older_ones() -> None:
    """A record is never large, and never says that something was checked later than it was."""
    exact = tuple(Stretch(f"{n:04x}", float(n * n % 10_007)) for n in range(1, 3000))
    exact = (*exact, Stretch(END, 1.0))
    small = merged(exact, (Stretch(END, 0.0),))
    assert len(small) <= MAX_STRETCHES
    for stretch in exact:
        assert next(s.at for s in small if s.upto >= stretch.upto) <= stretch.at
    store = MemoryStore()
    empty = load(store, 0.0)
    save(store, Checked(place=empty.place, stretches=small))
    assert load(store, 1e9).stretches == small
