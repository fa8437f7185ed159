"""Repair: what is damaged comes back bit for bit from wherever a good copy lies, and nothing ever gets worse."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import (
    EpochNotFoundError,
    InvalidArgumentError,
    KeepLast,
    RepairReport,
    Repository,
    RepositoryNotFoundError,
    keys,
)
from ckptstore.catalog import Catalog
from ckptstore.errors import AccessError, CorruptionError
from ckptstore.lease import read_leases
from ckptstore.manifest import ChunkRef, Manifest
from ckptstore.stores import LocalStore, MemoryStore, open_store
from ckptstore.stores.base import Store
from ckptstore.testing import CrashStore, Fault, FaultStore, SimulatedCrash
from tests.conftest import Bucket
from tests.repository.helpers import (
    Interfering,
    assert_no_debris,
    assert_same,
    contents,
    keys_of,
    make_state,
    open_repo,
    pour,
)

EPOCHS = (1, 2, 3)


def filled(store: Store, epochs: tuple[int, ...] = EPOCHS, **options: Any) -> Repository:
    repo = open_repo(store, **options)
    for epoch in epochs:
        repo.save(epoch, make_state(epoch), {"loss": 1 / epoch})
    return repo


def manifest_of(store: Store, epoch: int) -> Manifest:
    catalog = Catalog(store)
    return catalog.manifest(catalog.committed(epoch)[-1])


def chunks_of(store: Store, epoch: int, record: str = "") -> list[ChunkRef]:
    """The chunks that an epoch needs (or one record of it), those first that it has sent itself."""
    catalog, manifest = Catalog(store), manifest_of(store, epoch)
    found = {
        chunk.key: chunk
        for entry in manifest.records
        if record in ("", entry.name)
        for chunk in catalog.index(entry).chunks
    }
    return sorted(found.values(), key=lambda chunk: (chunk.attempt != manifest.attempt, chunk.key))


def index_key(store: Store, epoch: int, record: str = "model") -> str:
    entry = manifest_of(store, epoch).record(record)
    assert entry is not None
    return entry.key


def flip(store: Store, key: str, at: int = -5) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 1
    store.put(key, bytes(data))


def cut(store: Store, key: str) -> None:
    store.put(key, store.get(key)[:-7])


def lose(store: Store, key: str) -> None:
    store.delete(key)


def empty(store: Store, key: str) -> None:
    store.put(key, b"")


DAMAGES = (flip, cut, lose, empty)


def mirrored(store: Store) -> MemoryStore:
    target = MemoryStore()
    open_repo(store).mirror(open_repo(target))
    return target


def copied(store: Store) -> MemoryStore:
    """As any tool copies a folder or a bucket."""
    target = MemoryStore()
    pour(contents(store), target)
    return target


def assert_whole(store: Store, epochs: tuple[int, ...] = EPOCHS) -> None:
    """All epochs are there, bit for bit, and nothing else is."""
    repo = open_repo(store)
    assert repo.epochs() == list(epochs)
    report = repo.verify()
    assert report.ok, report.problems
    for epoch in epochs:
        assert_same(repo.checkpoint(epoch).load(), make_state(epoch))
        assert repo.checkpoint(epoch).metadata == {"loss": 1 / epoch}
    repo.gc(grace=0)
    assert_no_debris(store)


def states(report: RepairReport) -> dict[int, str]:
    return {row.epoch: row.state for row in report.epochs}


# ---- chunks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("copy", [mirrored, copied])
def test_a_chunk_comes_back_from_a_second_copy(
    damage: Callable[[Store, str], None], copy: Callable[[Store], Store]
) -> None:
    """The very bytes that were there; the report names object, reason and source, and no other object is touched."""
    store = MemoryStore()
    filled(store)
    other = copy(store)
    before = contents(store)
    victim = chunks_of(store, 3)[0].key
    damage(store, victim)
    repo = open_repo(store)
    assert not repo.verify().ok
    report = repo.repair(sources=[open_repo(other)])
    assert report.ok
    assert states(report) == {1: "intact", 2: "intact", 3: "mended"}
    [mend] = report.objects
    assert mend.key == victim
    assert mend.ok
    assert mend.reason
    assert mend.source.startswith("memory://")
    assert contents(store) == before
    assert_whole(store)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_chunk_comes_back_from_another_epoch(damage: Callable[[Store, str], None]) -> None:
    """The same content under another attempt of the same repository will do; no source is asked for."""
    store = MemoryStore()
    filled(store, (1,))
    repo = open_repo(store)
    frozen = {chunk.digest: chunk.key for chunk in chunks_of(store, 1)}
    with repo.begin(2, {"loss": 1 / 2}) as txn:  # the chunks that it could reuse are sent anew
        txn._claim.known._chunks.clear()
        txn._claim.known._arrays.clear()
        for name, value in make_state(2).items():
            txn.write(name, value)
    shared = [chunk for chunk in chunks_of(store, 2) if chunk.digest in frozen and chunk.key != frozen[chunk.digest]]
    assert shared
    before = contents(store)
    damage(store, shared[0].key)
    report = open_repo(store).repair()
    assert report.ok
    assert frozen[shared[0].digest] in report.objects[0].source
    assert contents(store) == before
    assert_whole(store, (1, 2))


def test_what_epochs_share_is_mended_once_for_all() -> None:
    """A chunk that all epochs need is looked for, put and counted once."""
    store = MemoryStore()
    filled(store)
    other = mirrored(store)
    needed = [{chunk.key for chunk in chunks_of(store, epoch)} for epoch in EPOCHS]
    victim = sorted(set.intersection(*needed))[0]
    flip(store, victim)
    report = open_repo(store).repair(sources=[open_repo(other)])
    assert states(report) == dict.fromkeys(EPOCHS, "mended")
    assert [mend.key for mend in report.objects] == [victim]
    assert_whole(store)


def test_content_that_was_coded_in_another_way_elsewhere() -> None:
    """A copy whose frame has another length is coded anew; if no codec gives the length, the epoch is made anew."""
    store = MemoryStore()
    filled(store)
    victim = next(chunk for chunk in chunks_of(store, 3) if chunk.stored_length < chunk.raw_length)
    raw = open_repo(MemoryStore(), codec="raw")
    raw.save(9, make_state(3))
    before = contents(store)
    flip(store, victim.key)
    copies = [chunk for chunk in chunks_of(raw.store, 9) if chunk.digest == victim.digest]
    assert copies
    assert copies[0].stored_length > victim.stored_length
    report = open_repo(store).repair(sources=[raw])
    assert report.ok, report.objects
    assert contents(store) == before


def test_a_length_that_no_codec_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another version of zstd had made the frame: then the epoch comes back as a whole."""
    store = MemoryStore()
    filled(store)
    source = mirrored(store)
    victim = chunks_of(store, 3)[0]
    flip(store, victim.key)
    for chunk in chunks_of(source, 3):  # the mirror has it, but coded in another way
        if chunk.digest == victim.digest:
            monkeypatch.setattr("ckptstore.spares.Spares.frame", lambda self, chunk: None)
    report = open_repo(store).repair(sources=[open_repo(source)])
    assert report.ok, report.objects
    assert states(report)[3] == "mended"
    assert open_repo(store).checkpoint(3).generation == 2
    assert_whole(store)


def test_a_copy_that_is_damaged_too_is_no_copy() -> None:
    """Its bytes are proved before they are put; the next source is asked; without one the damage is as it was."""
    store = MemoryStore()
    filled(store)
    good, bad = mirrored(store), mirrored(store)
    victim = chunks_of(store, 3)[0]
    for chunk in chunks_of(bad, 3):
        if chunk.digest == victim.digest:
            flip(bad, chunk.key)
    flip(store, victim.key)
    damaged = contents(store)
    report = open_repo(store).repair(sources=[open_repo(bad)])
    assert not report.ok
    assert contents(store) == damaged
    report = open_repo(store).repair(sources=[open_repo(bad), open_repo(good)])
    assert report.ok
    assert_whole(store)


def test_what_cannot_be_mended_is_said_with_what_is_left() -> None:
    """The rest is mended all the same, and the report names the records that can still be restored."""
    store = MemoryStore()
    filled(store)
    other = mirrored(store)
    hopeless, curable = chunks_of(store, 3, "optim")[0], chunks_of(store, 2, "optim")[0]
    for chunk in chunks_of(other, 3):
        if chunk.digest == hopeless.digest:
            other.delete(chunk.key)
    flip(store, hopeless.key)
    flip(store, curable.key)
    report = open_repo(store).repair(sources=[open_repo(other)])
    assert not report.ok
    assert states(report) == {1: "intact", 2: "mended", 3: "damaged"}
    row = report.epochs[-1]
    assert (row.whole, row.lost) == (("model",), ("optim",))
    assert_same(open_repo(store).checkpoint(3).load("model"), make_state(3)["model"])
    with pytest.raises(CorruptionError):
        open_repo(store).checkpoint(3).load("optim")
    latest = open_repo(store).latest(deep=True)
    assert latest is not None
    assert latest.epoch == 2


def test_a_repaired_epoch_is_no_longer_taken_for_damaged() -> None:
    """A repository that has found the damage itself builds on the epoch again once it is mended."""
    store = MemoryStore()
    repo = filled(store)
    other = mirrored(store)
    flip(store, chunks_of(store, 3)[0].key)
    found = repo.latest(deep=True)
    assert found is not None
    assert found.epoch == 2
    assert repo.repair(sources=[open_repo(other)]).ok
    assert repo._catalog._damaged == set()
    latest = repo.latest()
    assert latest is not None
    assert (latest.epoch, latest.skipped) == (3, ())


# ---- indexes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("copy", [mirrored, copied])
def test_an_index_comes_back(damage: Callable[[Store, str], None], copy: Callable[[Store], Store]) -> None:
    """Copied, or rebuilt from that of a mirror, which names other places; and what lies below it is mended with it."""
    store = MemoryStore()
    filled(store)
    other = copy(store)
    before = contents(store)
    victim, below = index_key(store, 3), chunks_of(store, 3, "model")[0].key
    damage(store, victim)
    flip(store, below)
    report = open_repo(store).repair(sources=[open_repo(other)])
    assert report.ok, report.objects
    assert {mend.key for mend in report.objects} == {victim, below}
    assert contents(store) == before
    assert_whole(store)


def test_an_index_that_cannot_be_rebuilt_brings_the_epoch_back_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another version of zstd has made it: a new generation, of the same identity, time and metadata."""
    store = MemoryStore()
    filled(store)
    other = mirrored(store)
    was = manifest_of(store, 3)
    saved = Catalog(store).commit_times(3)
    flip(store, index_key(store, 3))
    monkeypatch.setattr("ckptstore.spares._encoded", lambda index, entry: None)
    report = open_repo(store).repair(sources=[open_repo(other)])
    assert report.ok, report.objects
    now = manifest_of(store, 3)
    assert (now.generation, now.first, now.created) == (2, was.first, was.created)
    assert now.saved == pytest.approx(next(iter(saved.values())), abs=1e-3)
    assert report.epochs[-1].generation == 2
    assert_whole(store)
    assert all(copy.outcome == "there" for copy in open_repo(store).mirror(open_repo(other)).epochs)


# ---- manifests and the marker -------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [flip, cut, empty])
@pytest.mark.parametrize("copy", [mirrored, copied])
@pytest.mark.parametrize("epoch", EPOCHS)
def test_a_manifest_comes_back(
    damage: Callable[[Store, str], None], copy: Callable[[Store], Store], epoch: int
) -> None:
    """As the next generation; the damaged one goes. Also with a chunk and an index damaged beside it."""
    store = MemoryStore()
    filled(store)
    other = copy(store)
    was, below = manifest_of(store, epoch), chunks_of(store, epoch)[0].key
    damage(store, was.key)
    flip(store, below)
    repo = open_repo(store)
    report = repo.repair(sources=[open_repo(other)])
    assert report.ok, report.objects
    assert states(report)[epoch] == "mended"
    now = manifest_of(store, epoch)
    assert (now.generation, now.first, now.created) == (2, was.first, was.created)
    assert [commit.generation for commit in Catalog(store).committed(epoch)] == [2]
    assert_whole(store)


def test_the_manifest_of_another_content_is_never_taken() -> None:
    """The number was used again since the copy was made: that copy must not come back in its place."""
    store = MemoryStore()
    filled(store)
    old_mirror, old_copy = mirrored(store), copied(store)
    repo = open_repo(store)
    repo.delete(3)
    repo.save(3, make_state(33), {"loss": 1})
    empty(store, keys.manifest_key(3, 1))
    damaged = contents(store)
    report = open_repo(store).repair(sources=[open_repo(old_mirror), open_repo(old_copy)])
    assert states(report) == {1: "intact", 2: "intact", 3: "damaged"}
    assert contents(store) == damaged


def test_an_outdated_manifest_that_is_damaged_goes() -> None:
    """What an interrupted replace has left blocks every sweep when it is damaged, and nobody needs it."""
    store = MemoryStore()
    repo = filled(store)
    old = store.get(keys.manifest_key(3, 1))
    repo.save(3, make_state(3), {"loss": 1 / 3}, replace=True)
    store.put(keys.manifest_key(3, 1), old[:-3])
    report = open_repo(store).repair()
    assert report.ok
    assert [(row.generation, row.state) for row in report.epochs if row.epoch == 3] == [(1, "mended"), (2, "intact")]
    assert_whole(store)


def test_a_newer_generation_that_is_beyond_repair_leaves_the_older_one() -> None:
    """What an interrupted replace has left is then what can still be restored: it is mended, and stays."""
    store = MemoryStore()
    repo = filled(store)
    other, before = mirrored(store), contents(store)
    repo.save(3, make_state(33), replace=True)
    for key in before.keys() - {*keys_of(store)}:
        store.put(key, before[key])
    flip(store, manifest_of(store, 3).records[1].key)
    victim = next(key for key in sorted(before) if key not in keys_of(mirrored_without(store)) and "/chunks/" in key)
    flip(store, victim)
    report = open_repo(store).repair(sources=[open_repo(other)])
    rows = {(row.epoch, row.generation): row.state for row in report.epochs}
    assert (rows[3, 1], rows[3, 2]) == ("mended", "damaged")
    latest = open_repo(store).latest(deep=True)
    assert latest is not None
    assert (latest.epoch, latest.generation) == (3, 1)
    assert_same(latest.load(), make_state(3))


def mirrored_without(store: Store) -> Store:
    """What is left when the first generation of epoch 3 goes."""
    rest = MemoryStore()
    pour(contents(store), rest)
    rest.delete(keys.manifest_key(3, 1))
    open_repo(rest).gc(grace=0)
    return rest


def test_the_marker_comes_back() -> None:
    """From the manifests, which tell the same id."""
    store = MemoryStore()
    repo = filled(store)
    flip(store, keys.MARKER)
    report = open_repo(store).repair(dry_run=True)
    assert report.marker is not None
    assert report.marker.ok
    again = open_repo(store)
    assert again.repair().ok
    assert again.repair().marker is None
    assert open_repo(store).id == repo.id
    assert_whole(store)


# ---- nothing gets worse ---------------------------------------------------------------------------------------


def battered() -> tuple[dict[str, bytes], MemoryStore]:
    """Everything that can be damaged at once, and a mirror."""
    store = MemoryStore()
    filled(store)
    other = mirrored(store)
    flip(store, chunks_of(store, 3)[0].key)
    lose(store, chunks_of(store, 2)[0].key)
    cut(store, index_key(store, 2, "optim"))
    flip(store, keys.manifest_key(1, 1))
    flip(store, keys.MARKER)
    return contents(store), other


def damage_of(store: Store) -> dict[str, bytes | None]:
    """What is wrong, by the eyes of a verify."""
    return {problem.key: None for problem in open_repo(store).verify().problems}


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_a_repair_that_is_killed_at_any_mutation_makes_nothing_worse(mode: Any, fast_folder: Path) -> None:
    """P5: what was wrong is wrong or mended, nothing else is touched, and the next repair mends it all."""
    objects, other = battered()
    probe = MemoryStore()
    pour(objects, probe)
    broken = set(damage_of(probe))
    for at in itertools.count(1):
        folder = fast_folder / f"{mode}-{at}"
        store: Store = LocalStore(str(folder)) if mode == "torn" else MemoryStore()
        pour(objects, store)
        crashing = CrashStore(store, at, mode)
        try:
            open_repo(crashing).repair(sources=[open_repo(other)])
        except SimulatedCrash:
            pass
        assert set(damage_of(store)) <= broken, at
        assert open_repo(store).epochs() == list(EPOCHS)
        for key, data in objects.items():
            if key not in broken and key != keys.MARKER and not key.startswith(keys.MANIFESTS):
                assert store.get(key) == data, (at, key)
        assert open_repo(store).repair(sources=[open_repo(other)]).ok, at
        assert_whole(store)
        shutil.rmtree(folder, ignore_errors=True)
        if not crashing.crashed:
            break
    assert at > 10


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_failing_put_is_raised_and_leaves_the_damage(when: Any) -> None:
    """A store that refuses is an error; what was mended by then stays."""
    objects, other = battered()
    for verb in ("put", "delete"):
        store = MemoryStore()
        pour(objects, store)
        fault = Fault(verb, "attempts/" if verb == "put" else "manifests/", when, AccessError("no"), times=None)
        with FaultStore(store, [fault]) as failing:
            try:
                open_repo(failing).repair(sources=[open_repo(other)])
            except AccessError:
                assert verb == "put"
        assert open_repo(store).repair(sources=[open_repo(other)]).ok
        assert_whole(store)


def test_what_reads_back_wrong_is_not_called_mended() -> None:
    """A store that takes the bytes and gives others: the report says so."""

    class Rotten(MemoryStore):
        def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
            if "/chunks/" in key and not if_absent:
                data = bytes(data)[:-1] + b"?"
            super().put(key, data, if_absent=if_absent)

    store = MemoryStore()
    filled(store)
    other = mirrored(store)
    flip(store, chunks_of(store, 3)[0].key)
    rotten = Rotten()
    pour(contents(store), rotten)
    for key, data in contents(store).items():
        MemoryStore.put(rotten, key, data)
    report = open_repo(rotten).repair(sources=[])
    assert not report.ok
    report = open_repo(rotten).repair(sources=[open_repo(other)])
    assert [mend for mend in report.objects if mend.failed and "reads back" in mend.failed] or report.ok
    healths = {health.epoch: health.ok for health in open_repo(rotten).verify().epochs}
    assert healths[3] == report.ok


def test_a_dry_run_writes_nothing_and_foretells() -> None:
    """It reads and proves the copies, and says what the repair then does."""
    objects, other = battered()
    store = MemoryStore()
    pour(objects, store)

    class Deaf(FaultStore):
        def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
            raise AssertionError(f"put {key}")

        def delete(self, key: str) -> None:
            raise AssertionError(f"delete {key}")

    told = open_repo(Deaf(store, [])).repair(sources=[open_repo(other)], dry_run=True)
    assert told.dry_run
    assert told.ok
    assert contents(store) == objects
    done = open_repo(store).repair(sources=[open_repo(other)])
    assert states(told) == dict.fromkeys(EPOCHS, "mendable")
    assert states(done) == dict.fromkeys(EPOCHS, "mended")
    assert {(m.key, m.reason, m.source) for m in told.objects} == {(m.key, m.reason, m.source) for m in done.objects}
    assert_whole(store)


# ---- beside others --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "act"),
    [
        *(("chunk", act) for act in ("delete", "delete and save again", "prune and gc")),
        *(("index", act) for act in ("replace", "save on top")),
        *(("manifest", act) for act in ("delete", "replace", "delete and save again")),
    ],
)
def test_others_at_every_step_of_a_repair(act: str, what: str) -> None:
    """P5: whatever comes in between at any call, no committed epoch is harmed and no old content comes back."""
    steps = 0
    while _interfered(act, what, steps := steps + 1):
        pass
    assert steps > 5


def _interfered(act: str, what: str, step: int) -> bool:
    """Repair, and let somebody act before call number ``step``. False: the repair made fewer calls."""
    store = MemoryStore()
    trainer = filled(store, (2, 3))
    other = mirrored(store)
    keys_at_risk = {
        "chunk": chunks_of(store, 3)[0].key,
        "index": index_key(store, 3),
        "manifest": keys.manifest_key(3, 1),
    }
    flip(store, keys_at_risk[what])
    seen = itertools.count(1)

    def interfere() -> None:
        if act.startswith("delete"):
            trainer.delete(3)
        if act in ("replace", "delete and save again"):
            trainer.save(3, make_state(33), replace=act == "replace")
        elif act == "save on top":
            trainer.save(4, make_state(4))
        elif act == "prune and gc":
            open_repo(store).prune(KeepLast(1))
            open_repo(store).gc(grace=0)

    between = Interfering(store)
    between.after = False
    between.at = lambda verb, key: next(seen) == step
    between.interfere = interfere
    with suppress(EpochNotFoundError):
        open_repo(between).repair(epoch=3, sources=[open_repo(other)])
    acted = between.interfere is None
    repo = open_repo(store)
    if acted and act in ("replace", "delete and save again"):
        assert_same(repo.checkpoint(3).load(), make_state(33))
    elif acted and act == "delete":
        assert repo.epochs() == [2]
    again = repo.repair(sources=[open_repo(other)])
    assert again.ok, (step, again.objects)
    repo.gc(grace=0)
    assert_no_debris(store)
    return acted


def test_two_repairs_at_once() -> None:
    """Both put the same; one of two that bring an epoch back as a whole is late, and says nothing worse."""
    from concurrent.futures import ThreadPoolExecutor

    objects, other = battered()
    store = MemoryStore()
    pour(objects, store)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: open_repo(store).repair(sources=[open_repo(other)]), range(4)))
    assert any(report.ok for report in reports)
    assert open_repo(store).repair(sources=[open_repo(other)]).ok
    assert_whole(store)


def test_a_reader_beside_a_repair_sees_damage_or_the_content(fast_folder: Path) -> None:
    """P3: never a third thing."""
    import threading

    store = LocalStore(str(fast_folder))
    filled(store)
    other = mirrored(store)
    victim = chunks_of(store, 3)[0].key
    stop = threading.Event()
    seen: set[str] = set()
    wrong: list[Exception] = []

    def read() -> None:
        while not stop.is_set():
            try:
                assert_same(open_repo(store).checkpoint(3).load(), make_state(3))
                seen.add("good")
            except CorruptionError:
                seen.add("damaged")
            except Exception as error:  # noqa: BLE001 (whatever it is, the test must hear of it)
                wrong.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(10):
            flip(store, victim)
            assert open_repo(store).repair(epoch=3, sources=[open_repo(other)]).ok
    finally:
        stop.set()
        reader.join()
    assert wrong == []
    assert_whole(store)


def test_a_lease_is_held_while_objects_are_put_back() -> None:
    """And is gone afterwards."""
    store = MemoryStore()
    filled(store)
    other = mirrored(store)
    flip(store, chunks_of(store, 3)[0].key)
    held: list[Any] = []

    class Watching(FaultStore):
        def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
            if key.startswith(keys.ATTEMPTS):
                held.extend(read_leases(store))
            super().put(key, data, if_absent=if_absent)

    assert open_repo(Watching(store, [])).repair(sources=[open_repo(other)]).ok
    assert {sighting.lease.uses for sighting in held} == {manifest_of(store, 3).attempts}
    assert read_leases(store) == []


# ---- places ---------------------------------------------------------------------------------------------------


def test_sources_by_url(tmp_path: Path) -> None:
    """A folder by its path; none that is the repository itself, and none where there is no repository."""
    with ckptstore.open(tmp_path / "run", chunk_size=64 * 1024) as repo:
        repo.save(1, make_state(1))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    victim = next((tmp_path / "run").glob("attempts/*/chunks/*"))
    victim.write_bytes(b"nonsense")
    with ckptstore.open(tmp_path / "run") as repo:
        with pytest.raises(InvalidArgumentError, match="another place"):
            repo.repair(sources=[tmp_path / "run"])
        with pytest.raises(InvalidArgumentError, match="another place"):
            repo.repair(sources=[repo])
        with pytest.raises(RepositoryNotFoundError):
            repo.repair(sources=[tmp_path / "nowhere"])
        with pytest.raises(EpochNotFoundError):
            repo.repair(epoch=9)
        assert not repo.repair().ok
        assert repo.repair(sources=[tmp_path / "copy"]).ok
        assert repo.verify().ok
        assert_same(repo.checkpoint(1).load(), make_state(1))


def test_repair_on_s3(s3: Bucket, tmp_path: Path) -> None:
    """The same on a bucket, from a folder."""
    store = open_store(s3.url(), storage_options=s3.storage_options)
    filled(store)
    with ckptstore.open(tmp_path / "copy") as other:
        open_repo(store).mirror(other)
        flip(store, chunks_of(store, 3)[0].key)
        lose(store, index_key(store, 2))
        flip(store, keys.manifest_key(1, 1))
        report = open_repo(store).repair(sources=[other])
        assert report.ok, report.objects
    assert_whole(store)


def test_an_empty_repository_has_nothing_to_mend() -> None:
    """And says so."""
    report = open_repo(MemoryStore()).repair()
    assert report.ok
    assert report.epochs == ()


def test_an_epoch_that_is_gone_altogether_is_told() -> None:
    """In a source and not here: listed with the source, no damage; what is foreign or set aside there is not listed."""
    store, copy = MemoryStore(), MemoryStore()
    repo, mirror = filled(store, (1, 2, 3, 4)), open_repo(copy)
    repo.mirror(mirror)
    mirror.save(9, make_state(9))  # of its own
    mirror.quarantine(3, "it diverged")
    store.delete(keys.manifest_key(2, 1))
    repo.delete(3)
    report = repo.repair(sources=[mirror])
    assert report.ok
    assert report.absent == {2: mirror.url}
    assert repo.repair(epoch=1, sources=[mirror]).absent == {}
    with pytest.raises(EpochNotFoundError, match="has it, and a mirror from there brings it"):
        repo.repair(epoch=2, sources=[mirror])
    with pytest.raises(EpochNotFoundError, match=r"there is no epoch 9 in [^;]*$"):
        repo.repair(epoch=9, sources=[mirror])
    mirror.mirror(repo, [2])
    assert repo.repair(sources=[mirror]).absent == {}
    copy.delete(keys.manifest_key(4, 1))
    assert mirror.repair(sources=[repo]).absent == {4: repo.url}  # the way back: the mirror has lost one


@pytest.mark.parametrize("kind", ["chunks", "records"])
def test_a_folder_where_an_object_should_be(kind: str, tmp_path: Path) -> None:
    """That epoch says so, the others are mended; with a copy of all of it, it comes back in another place."""
    place = tmp_path / "repo"
    with ckptstore.open(place) as repo, ckptstore.open(tmp_path / "copy") as copy:
        for epoch in EPOCHS:
            repo.save(epoch, make_state(epoch))
        repo.mirror(copy)
        key = index_key(repo.store, 2) if kind == "records" else chunks_of(repo.store, 2)[0].key
        other = chunks_of(repo.store, 1)[0].key
        (place / key).unlink()
        (place / key).mkdir()
        (place / key / "mine").write_text("a file of somebody's")
        (place / other).unlink()
        plain = tmp_path / "chunks of it"  # has the content, and no epoch to bring back
        shutil.copytree(tmp_path / "copy", plain)
        for manifest in (plain / "manifests").glob("*000002-*.json"):
            manifest.unlink()
        report = repo.repair(sources=[plain])
        states = {row.epoch: row.state for row in report.epochs}
        assert (states[1], states[2]) == ("mended", "damaged")
        [mend] = [mend for mend in report.objects if mend.key == key]
        if kind == "chunks":
            assert "a folder is where a file is needed" in mend.failed
        assert not mend.ok
        assert repo.repair(sources=[copy]).ok
        assert repo.verify().ok
        assert (place / key / "mine").exists()
