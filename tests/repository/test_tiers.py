"""Tiers: what is committed in the first, how it gets to the others, what is read from where."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import (
    CorruptionError,
    EpochExistsError,
    EpochNotFoundError,
    InvalidArgumentError,
    KeepBest,
    KeepLast,
    RecordNotFoundError,
    Repository,
    RepositoryNotFoundError,
    RetriesExhaustedError,
    StoreError,
    Tier,
    TieredRepository,
    events,
    replication,
)
from ckptstore.catalog import Catalog
from ckptstore.manifest import Manifest
from ckptstore.policies import Policy
from ckptstore.replication import Lower
from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from ckptstore.testing import Fault, FaultStore
from tests.conftest import Bucket
from tests.repository.helpers import CHUNK, assert_no_debris, assert_same, contents, make_state, tiny_state

ROOT = Path(__file__).parents[2]
DOWN = RetriesExhaustedError("the bucket does not answer")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts at a tier that fails follow each other at once."""
    monkeypatch.setattr(replication, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(replication, "LONGEST_WAIT_SECONDS", 0.02)


@contextmanager
def tiered(
    first: Store, *lower: Store, keeps: tuple[Policy | None, ...] = (), **named: Any
) -> Iterator[TieredRepository]:
    """A repository over these stores. Lower ones are opened as ``ckptstore.open`` would."""
    below = []
    for number, store in enumerate(lower):
        keep = keeps[number] if number < len(keeps) else None

        def make(create: bool, store: Store = store, keep: Policy | None = keep) -> Repository:
            return Repository(store, keep=keep, create=create, chunk_size=CHUNK, run_id=named.get("run_id", ""))

        below.append(Lower(store.traits.url, lambda make=make: make(False), lambda make=make: make(True), keep, None))  # type: ignore[misc]
    named.setdefault("exit_timeout", 10.0)
    repo = TieredRepository(first, lower=below, chunk_size=CHUNK, **named)
    with repo:
        yield repo


class Switch:
    """A store that is down while ``down`` is set."""

    def __init__(self, inner: Store) -> None:
        self.down = threading.Event()
        faults = [Fault(verb, error=self._error, times=None) for verb in ("put", "get", "info", "list", "delete")]
        self.store = FaultStore(inner, faults)

    def _error(self) -> BaseException | None:
        return DOWN if self.down.is_set() else None


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for what a thread of the repository is about to do."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def open_two(folder: Path, **named: Any) -> TieredRepository:
    repo = ckptstore.open([folder / "fast", folder / "slow"], chunk_size=CHUNK, exit_timeout=10.0, **named)
    assert isinstance(repo, TieredRepository)
    return repo


# --- saving and copying --------------------------------------------------------------------------------


def test_what_is_saved_arrives_everywhere(tmp_path: Path) -> None:
    """Bit for bit, with metadata, in three tiers, each with its own retention; the status says so."""
    tiers: list[Path | Tier] = [
        tmp_path / "nvme",
        Tier(tmp_path / "nas", keep=KeepLast(3)),
        Tier(tmp_path / "bucket", keep=None, limit=1e9),
    ]
    with ckptstore.open(tiers, keep=KeepLast(1), chunk_size=CHUNK) as repo:
        assert isinstance(repo, TieredRepository)
        for epoch in range(1, 6):
            assert repo.save(epoch, make_state(epoch), {"loss": 1 / epoch}).epoch == epoch
            assert repo.wait_for_tiers(30)
        nvme, nas, bucket = repo.members
        assert (nvme.epochs(), nas.epochs(), bucket.epochs()) == ([5], [3, 4, 5], [1, 2, 3, 4, 5])
        assert repo.epochs() == [1, 2, 3, 4, 5]
        statuses = repo.tiers()
        assert [(s.newest, s.epochs, s.waiting, s.bytes_waiting, s.error) for s in statuses] == [
            (5, 1, (), 0, ""),
            (5, 3, (), 0, ""),
            (5, 5, (), 0, ""),
        ]
        assert all(s.age is not None and 0 <= s.age < 60 for s in statuses)
        for member in (nas, bucket):
            checkpoint = member.checkpoint(4)
            assert_same(checkpoint.load(), make_state(4))
            assert checkpoint.metadata == {"loss": 0.25}
        assert_same(repo.checkpoint(2).load(), make_state(2))  # the last tier alone has it
    for name in ("nvme", "nas", "bucket"):
        with ckptstore.open(tmp_path / name, create=False) as alone:
            assert alone.verify().ok
            assert_no_debris(alone.store)


def test_background_saves_every_and_policies_per_record(tmp_path: Path) -> None:
    """save_async, ``every`` and a policy for each record work; a record that the first tier dropped is read below."""
    keep = {"model": KeepLast(3), "optim": KeepLast(1)}
    with open_two(tmp_path, keep=keep, every={"optim": 2}) as repo:
        for epoch in range(1, 7):
            repo.save_async(epoch, make_state(epoch)).result()
            assert repo.wait_for_tiers(30)
        repo.prune()
        first, second = repo.members
        assert list(first.checkpoint(4).records) == ["model"]
        assert sorted(second.checkpoint(4).records) == ["model", "optim"]
        assert_same(repo.checkpoint(4).load("optim"), make_state(4)["optim"])
        with pytest.raises(RecordNotFoundError, match="every 2 epochs"):
            repo.checkpoint(5).load("optim")
        found = repo.latest(need=["model", "optim"])
        assert found is not None
        assert found.epoch == 6


def test_a_bucket_that_is_down_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    """Saves go on at once and say nothing but to the log and the status; afterwards all comes, the newest first."""
    fast, slow = MemoryStore(), MemoryStore()
    switch = Switch(slow)
    arrived: list[None] = []

    def note() -> None:
        arrived.append(None)

    trace = FaultStore(switch.store, [Fault("put", "manifests/", "after", error=note, times=None)])
    with tiered(fast, trace, keep=KeepLast(2)) as repo:
        repo.save(1, tiny_state(1))
        assert repo.wait_for_tiers(20)
        switch.down.set()
        for epoch in range(2, 7):
            repo.save(epoch, tiny_state(epoch))
        eventually(lambda: repo.tiers(look=False)[1].failures > 2)
        status = repo.tiers(look=False)[1]
        assert (status.newest, status.waiting) == (1, (2, 3, 4, 5, 6))
        assert status.bytes_waiting > 0
        assert "does not answer" in status.error
        assert repo.tiers()[1].error == status.error
        assert not repo.wait_for_tiers(0.05)
        # The policy of the first tier keeps two, but nothing goes that is nowhere else.
        assert repo.members[0].epochs() == [2, 3, 4, 5, 6]
        assert repo.plan().kept[3].startswith("not in ")
        assert "the next attempt in" in caplog.text
        with pytest.raises(StoreError):  # no answer is no proof that the bucket has nothing newer
            repo.latest()
        switch.down.clear()
        assert repo.wait_for_tiers(20)
        assert repo.tiers()[1].failures == 0
        repo.save(7, tiny_state(7))
        assert repo.wait_for_tiers(20)
        repo.prune()
        assert repo.members[0].epochs() == [6, 7]
    assert len(arrived) == 7
    with Repository(slow, create=False) as alone:
        assert alone.epochs() == [1, 2, 3, 4, 5, 6, 7]
        assert alone.verify().ok


def test_copies_are_told() -> None:
    """Each epoch that has arrived, when it was committed first, and each failure, by its class; of the run's url."""
    switch = Switch(MemoryStore())
    heard: list[events.AnyEvent] = []
    with tiered(MemoryStore(), switch.store, on_event=heard.append) as repo:
        repo.save(1, tiny_state(1))
        assert repo.wait_for_tiers(20)
        switch.down.set()
        repo.save(2, tiny_state(2))
        eventually(lambda: repo.tiers(look=False)[1].failures > 0)
        switch.down.clear()
        assert repo.wait_for_tiers(20)
        lower = repo.members[1].url
    copied = [event for event in heard if isinstance(event, events.TierCopied)]
    committed = {event.epoch: event for event in heard if isinstance(event, events.SaveCommitted)}
    assert [event.epoch for event in copied] == [1, 2]
    for event in copied:
        assert (event.url, event.to) == (committed[event.epoch].url, lower)
        assert event.committed_at == committed[event.epoch].committed_at
        assert event.bytes_sent > 0
    failed = [event for event in heard if isinstance(event, events.TierFailed)]
    assert failed[0].to == lower
    assert [event.failures for event in failed] == list(range(1, len(failed) + 1))
    assert "does not answer" in failed[0].message


def test_the_newest_goes_first() -> None:
    """Whoever has fallen behind brings what would be missed most; what the tier's policy drops is never sent."""
    fast, slow = MemoryStore(), MemoryStore()
    with Repository(fast, chunk_size=CHUNK) as home:
        for epoch in range(1, 8):
            home.save(epoch, tiny_state(epoch), {"loss": abs(3 - epoch)})
    order: list[str] = []
    seen = FaultStore(slow, [Fault("put", lambda key: _note(order, key), error=_nothing, times=None)])
    with tiered(fast, seen, keeps=(KeepLast(2) | KeepBest("loss"),)) as repo:
        assert repo.wait_for_tiers(20)
        assert repo.members[1].epochs() == [3, 6, 7]
    assert [int(key.split("/")[1].split("-")[0]) for key in order] == [7, 6, 3]


def _nothing() -> None:
    return None


def _note(order: list[str], key: str) -> bool:
    if key.startswith("manifests/"):
        order.append(key)
    return False


def test_the_next_process_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Closing beside a bucket that is down ends at once and says what is left; the next open brings it."""
    fast, slow = MemoryStore(), MemoryStore()
    switch = Switch(slow)
    with tiered(fast, switch.store) as repo:
        repo.save(1, tiny_state(1))
        assert repo.wait_for_tiers(20)
        switch.down.set()
        repo.save(2, tiny_state(2))
        eventually(lambda: repo.tiers(look=False)[1].failures > 0)
        begun = time.monotonic()
    assert time.monotonic() - begun < 8
    assert "lacks epoch 2" in caplog.text
    switch.down.clear()
    with tiered(fast, switch.store) as repo:
        assert repo.wait_for_tiers(20)
    assert Repository(slow, create=False).epochs() == [1, 2]


def test_closing_waits_for_what_is_under_way() -> None:
    """All that was saved is there when ``close`` returns, as long as the tier is well."""
    fast, slow = MemoryStore(), MemoryStore()
    with tiered(fast, slow) as repo:
        for epoch in range(1, 6):
            repo.save(epoch, tiny_state(epoch))
    assert Repository(slow, create=False).epochs() == [1, 2, 3, 4, 5]
    repo.close()  # again: nothing happens
    assert_no_debris(slow)


def test_closing_in_the_middle_of_a_copy_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A put that hangs is left behind; the next process sends only what is missing."""
    fast, slow = MemoryStore(), MemoryStore()
    hanging, go = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        go.wait(60)

    second = [False]

    def pick(key: str) -> bool:
        chunk = "/chunks/" in key
        was, second[0] = second[0], second[0] or chunk
        return chunk and was

    stuck = FaultStore(slow, [Fault("put", pick, error=hang)])
    with tiered(fast, stuck, exit_timeout=0.2) as repo:
        repo.save(1, make_state(1))
        assert hanging.wait(20)
        begun = time.monotonic()
    assert time.monotonic() - begun < 15
    assert "lacks epoch 1" in caplog.text
    go.set()
    with tiered(fast, slow) as repo:
        assert repo.wait_for_tiers(20)
        assert_same(repo.members[1].checkpoint(1).load(), make_state(1))
        repo.members[1].gc(grace=0)
    assert_no_debris(slow)


# --- opening -----------------------------------------------------------------------------------------------


def test_a_tier_that_cannot_work_is_found_out_at_once(tmp_path: Path) -> None:
    """Two names of one place, a place that holds something else, options that make no sense."""
    with ckptstore.open(tmp_path / "a", chunk_size=CHUNK):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(InvalidArgumentError, match="same"):
        ckptstore.open([tmp_path / "a", tmp_path / "link"])
    with pytest.raises(InvalidArgumentError, match="same place"):
        ckptstore.open([tmp_path / "a", tmp_path / "a"])
    (tmp_path / "lower").mkdir()
    (tmp_path / "link2").symlink_to(tmp_path / "lower")
    with pytest.raises(InvalidArgumentError, match="same repository"):
        ckptstore.open([tmp_path / "a", tmp_path / "lower", tmp_path / "link2"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    with pytest.raises(ckptstore.FormatError, match="something else"):
        ckptstore.open([tmp_path / "a", tmp_path / "other"])
    for bad in ([], [1], 3, [tmp_path / "a", None], [Tier(tmp_path / "a", limit=1.0), tmp_path / "b"]):
        with pytest.raises(InvalidArgumentError):
            ckptstore.open(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="tier"):
        ckptstore.open([tmp_path / "a", tmp_path / "b"], spill=tmp_path / "c")
    with pytest.raises(InvalidArgumentError, match="twice"):
        ckptstore.open([Tier(tmp_path / "a", keep=KeepLast(1)), tmp_path / "b"], keep=KeepLast(2))
    for named in ({"keep": 3}, {"limit": 0}, {"url": 3}):
        with pytest.raises(InvalidArgumentError):
            Tier(**{"url": "x", **named})  # type: ignore[arg-type]
    with pytest.raises(RepositoryNotFoundError):
        ckptstore.open([tmp_path / "none", tmp_path / "nothing"], create=False)
    assert not (tmp_path / "none").exists()


def test_open_does_not_wait_for_a_tier_that_is_down() -> None:
    """It is tried again in the background; its epochs are not taken for none."""
    fast, slow = MemoryStore(), MemoryStore()
    switch = Switch(slow)
    switch.down.set()
    with tiered(fast, switch.store) as repo:
        repo.save(1, tiny_state(1))
        assert repo.tiers(look=False)[1].epochs is None
        with pytest.raises(StoreError):
            repo.latest()
        with pytest.raises(StoreError):
            repo.members  # noqa: B018
        switch.down.clear()
        assert repo.wait_for_tiers(20)
    assert Repository(slow, create=False).epochs() == [1]


def test_looking_alone_writes_nothing(tmp_path: Path) -> None:
    """With ``create=False`` nothing is copied until something is saved."""
    with ckptstore.open(tmp_path / "fast", chunk_size=CHUNK) as home:
        home.save(1, tiny_state(1))
    with open_two(tmp_path, create=False) as repo:
        assert repo.epochs() == [1]
        assert repo.tiers()[1].waiting == (1,)
        assert repo.tiers()[1].epochs is None
        time.sleep(0.05)
        assert not (tmp_path / "slow").exists()
        repo.save(2, tiny_state(2))
        assert repo.wait_for_tiers(20)
        assert repo.members[1].epochs() == [1, 2]


# --- reading -------------------------------------------------------------------------------------------


def chunk_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("chunks/*") if path.is_file())


def test_each_chunk_from_the_nearest_place_that_has_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Missing, cut and rotten chunks of the first tier come from the second, the rest does not."""
    with open_two(tmp_path) as repo:
        repo.save(1, make_state(1))
        assert repo.wait_for_tiers(20)
    first = chunk_files(tmp_path / "fast")
    assert len(first) >= 4
    first[0].unlink()
    first[1].write_bytes(first[1].read_bytes()[:-1])
    rotten = bytearray(first[2].read_bytes())
    rotten[-1] ^= 1
    first[2].write_bytes(rotten)
    events: list[Any] = []
    with open_two(tmp_path, create=False, on_request=events.append) as repo:
        found = repo.latest()
        assert found is not None
        assert found.skipped == ()
        events.clear()
        assert_same(found.load(), make_state(1))
        read = [
            event.key for event in events if event.verb == "get" and "/chunks/" in event.key and event.error is None
        ]
        own = {str(path.relative_to(tmp_path / "fast")) for path in first}
        assert len([key for key in read if key not in own]) == 3
        into = make_state(2)
        found.load(into=into)
        assert_same(into, make_state(1))
        with pytest.raises(CorruptionError):
            repo.members[0].checkpoint(1).load()
    assert "reading from file://" in caplog.text


def test_damage_in_both_tiers_but_not_in_one_chunk(tmp_path: Path) -> None:
    """An epoch of which the tiers have every chunk together is intact; one chunk gone in both is damage."""
    with open_two(tmp_path) as repo:
        repo.save(1, tiny_state(1))
        repo.save(2, make_state(2))
        assert repo.wait_for_tiers(20)
        catalog = Catalog(repo.members[0].store)
        [(_, manifest)] = catalog.manifests(catalog.committed(2))
        assert isinstance(manifest, Manifest)
        index = {chunk.digest for entry in manifest.records for chunk in catalog.index(entry).chunks}
    own = sorted(index)
    for name, digest in (("fast", own[0]), ("slow", own[1])):
        for path in chunk_files(tmp_path / name):
            if path.name == digest:
                path.unlink()
    with open_two(tmp_path, create=False) as repo:
        found = repo.latest(deep=True)
        assert found is not None
        assert found.epoch == 2
        assert_same(found.load(), make_state(2))
    for path in chunk_files(tmp_path / "slow"):
        if path.name == own[0]:
            path.unlink()
    with open_two(tmp_path, create=False) as repo:
        found = repo.latest()
        assert found is not None
        assert found.epoch == 1
        assert {skipped.epoch for skipped in found.skipped} == {2}
        with pytest.raises(CorruptionError):
            repo.checkpoint(2).load()


@pytest.mark.parametrize("what", ["manifests/*.json", "attempts/*/records/*", "ckptstore.json", "*"])
def test_a_first_tier_that_is_damaged_or_empty(tmp_path: Path, what: str) -> None:
    """A manifest, an index, the marker, or all of it lost: everything is restored from the next tier, files too."""
    (tmp_path / "tokens").write_bytes(os.urandom(200_000))
    with open_two(tmp_path) as repo:
        repo.save(1, make_state(1))
        with repo.begin(2) as txn:
            txn.write("model", make_state(2)["model"])
            txn.write_file("tokens", tmp_path / "tokens")
        assert repo.wait_for_tiers(20)
    for path in (tmp_path / "fast").glob(what):
        if path.is_dir():
            shutil.rmtree(path)
        elif what == "*":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-7])
    with open_two(tmp_path, create=False) as repo:
        found = repo.latest()
        assert found is not None
        assert found.epoch == 2
        assert_same(found.load("model"), make_state(2)["model"])
        found.read_file("tokens", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == (tmp_path / "tokens").read_bytes()
        assert_same(repo.checkpoint(1).load(), make_state(1))
        assert repo.epochs() == [1, 2]
        repo.save(3, make_state(3))
        assert repo.wait_for_tiers(20)
        assert repo.members[1].verify().ok
        assert repo.members[1].epochs() == [1, 2, 3]


def test_a_first_tier_whose_reads_fail(tmp_path: Path) -> None:
    """A device that answers chunks with an error is no reason not to restore."""
    fast, slow = MemoryStore(), MemoryStore()
    with tiered(fast, slow) as repo:
        repo.save(1, make_state(1))
        assert repo.wait_for_tiers(20)
    dying = FaultStore(fast, [Fault("get", "/chunks/", error=RetriesExhaustedError("EIO"), times=None)])
    with tiered(dying, slow, create=False) as repo:
        assert_same(repo.checkpoint(1).load(), make_state(1))
    assert dying.fired[0] < 20


def test_an_epoch_that_only_the_bucket_has_is_not_saved_again() -> None:
    """It is committed, wherever it lies; ``replace`` replaces it there as well."""
    fast, slow = MemoryStore(), MemoryStore()
    with tiered(fast, slow) as repo:
        for epoch in (1, 2):
            repo.save(epoch, tiny_state(epoch))
    new = MemoryStore()
    with tiered(new, slow) as repo:
        assert repo.wait_for_tiers(20)
        with pytest.raises(EpochExistsError):
            repo.save(2, tiny_state(5))
        repo.save(2, tiny_state(5), replace=True)
        assert repo.wait_for_tiers(20)
        assert_same(repo.members[1].checkpoint(2).load(), tiny_state(5))
        repo.save(2, tiny_state(6), replace=True)
        assert repo.wait_for_tiers(20)
        assert_same(repo.members[1].checkpoint(2).load(), tiny_state(6))
        assert_same(repo.checkpoint(1).load(), tiny_state(1))


def test_a_replaced_epoch_does_not_come_back_in_its_old_form() -> None:
    """The first tier lets go of a new content only when the old one, in the second, is gone or replaced."""
    fast, slow = MemoryStore(), MemoryStore()
    switch = Switch(slow)
    with tiered(fast, switch.store, keep=KeepLast(1), keeps=(KeepLast(2),)) as repo:
        repo.save(1, tiny_state(1))
        assert repo.wait_for_tiers(20)
        switch.down.set()
        repo.save(1, tiny_state(9), replace=True)
        for epoch in (2, 3, 4):
            repo.save(epoch, tiny_state(epoch))
        assert Repository(fast, create=False).epochs() == [1, 3, 4]
        switch.down.clear()
        assert repo.wait_for_tiers(20)
        assert repo.members[1].epochs() == [3, 4]
        repo.prune()
        assert repo.epochs() == [3, 4]


def test_another_content_under_the_number_is_a_conflict(caplog: pytest.LogCaptureFixture) -> None:
    """It stays, as does the epoch of the first tier, and the status says why; deleting it clears the way."""
    fast, slow = MemoryStore(), MemoryStore()
    for store, seed in ((fast, 1), (slow, 2)):
        with Repository(store, chunk_size=CHUNK) as one:
            one.save(1, tiny_state(seed))
    with tiered(fast, slow, keep=KeepLast(1)) as repo:
        assert not repo.wait_for_tiers(20)
        assert "under that number" in repo.tiers()[1].stuck[1]
        repo.save(2, tiny_state(3))
        assert not repo.wait_for_tiers(20)
        assert repo.members[0].epochs() == [1, 2]
        assert_same(repo.members[1].checkpoint(1).load(), tiny_state(2))
        repo.members[1].delete(1)
        assert repo.wait_for_tiers(20)
        assert repo.tiers()[1].stuck == {}
        assert_same(repo.members[1].checkpoint(1).load(), tiny_state(1))
    assert "cannot be copied" in caplog.text


def test_what_is_damaged_below_is_mended_before_the_first_lets_go(tmp_path: Path) -> None:
    """A copy of which an object is missing does not count; the next process sends it again."""
    with open_two(tmp_path) as repo:
        for epoch in (1, 2):
            repo.save(epoch, make_state(epoch))
        assert repo.wait_for_tiers(20)
    for path in chunk_files(tmp_path / "slow")[::3]:
        path.unlink()
    with open_two(tmp_path, keep=KeepLast(1)) as repo:
        assert repo.wait_for_tiers(20)
        repo.prune()
        first, second = repo.members
        assert first.epochs() == [2]
        assert second.verify().ok
        assert_same(repo.checkpoint(1).load(), make_state(1))


_SCRIPT = """
import sys, numpy as np, ckptstore
repo = ckptstore.open([sys.argv[1], sys.argv[2]], exit_timeout=20)
for epoch in range(1, 6):
    repo.save(epoch, {"model": {"w": np.full(100_000, epoch)}})
"""


def test_the_exit_of_the_interpreter_waits_too(tmp_path: Path) -> None:
    """A script that never closes anything leaves nothing behind in the first tier alone."""
    script = [sys.executable, "-c", _SCRIPT, str(tmp_path / "fast"), str(tmp_path / "slow")]
    done = subprocess.run(
        script, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stderr) == (0, "")
    with ckptstore.open(tmp_path / "slow", create=False) as alone:
        assert alone.epochs() == [1, 2, 3, 4, 5]


# --- removing ------------------------------------------------------------------------------------------------


def test_a_full_disk_takes_what_is_nowhere_else_last(caplog: pytest.LogCaptureFixture) -> None:
    """What is copied goes first; what is not goes only for want of space, never the newest, and it is said."""
    fast, slow = MemoryStore(), MemoryStore()
    switch = Switch(slow)
    full = [0]

    def no_room() -> BaseException | None:
        if full[0] == 0:
            return None
        full[0] -= 1
        return ckptstore.StoreFullError("no space left on the device")

    disk = FaultStore(fast, [Fault("put", "/chunks/", error=no_room, times=None)])
    with tiered(disk, switch.store, keep=KeepLast(2)) as repo:
        for epoch in (1, 2, 3):
            repo.save(epoch, tiny_state(epoch))
            assert repo.wait_for_tiers(20)
        switch.down.set()
        for epoch in (4, 5, 6):
            repo.save(epoch, tiny_state(epoch))
        assert repo.members[0].epochs() == [4, 5, 6]
        full[0] = 1
        repo.save(7, tiny_state(7))
        assert "for want of space" in caplog.text
        assert repo.members[0].epochs() == [5, 6, 7]
        switch.down.clear()
        assert repo.wait_for_tiers(20)


def test_pins_are_kept_in_every_tier() -> None:
    """Also where the epoch arrives after it was pinned; unpinning takes them all away."""
    fast, slow = MemoryStore(), MemoryStore()
    switch = Switch(slow)
    with tiered(fast, switch.store, keep=KeepLast(1), keeps=(KeepLast(1),)) as repo:
        repo.save(1, tiny_state(1))
        assert repo.wait_for_tiers(20)
        repo.pin(1, "for the paper")
        switch.down.set()
        repo.save(2, tiny_state(2))
        with pytest.raises(StoreError):
            repo.pin(2, "too")
        switch.down.clear()
        assert repo.wait_for_tiers(20)
        for epoch in (3, 4):
            repo.save(epoch, tiny_state(epoch))
            assert repo.wait_for_tiers(20)
        assert repo.pins() == {1: "for the paper", 2: "too"}
        assert [member.pins() for member in repo.members] == [repo.pins()] * 2
        assert [member.epochs() for member in repo.members] == [[1, 2, 4]] * 2
        assert repo.unpin(1)
        assert not repo.unpin(1)
        assert [member.pins() for member in repo.members] == [{2: "too"}] * 2
        with pytest.raises(EpochNotFoundError):
            repo.pin(9, "x")


def test_delete_deletes_everywhere() -> None:
    """From all tiers that have it, and what is just arriving does not come back."""
    fast, slow = MemoryStore(), MemoryStore()
    act: list[Callable[[], object]] = []

    def delete() -> None:
        act.pop()()

    spy = FaultStore(slow, [Fault("put", "manifests/000000000003", error=delete, times=1)])
    with tiered(fast, spy) as repo:
        for epoch in (1, 2):
            repo.save(epoch, tiny_state(epoch))
        assert repo.wait_for_tiers(20)
        repo.delete(1)
        assert [member.epochs() for member in repo.members] == [[2], [2]]
        with pytest.raises(EpochNotFoundError):
            repo.delete(1)
        deleted = threading.Event()

        def meanwhile() -> None:
            repo.delete(3)
            deleted.set()

        act.append(meanwhile)
        repo.save(3, tiny_state(3))
        assert deleted.wait(20)
        assert repo.wait_for_tiers(20)
        assert repo.epochs() == [2]
    assert_no_debris(slow)


def test_a_lower_tier_that_is_full(caplog: pytest.LogCaptureFixture) -> None:
    """Its own policy makes room there, and the copy is tried again."""
    fast, slow = MemoryStore(), MemoryStore()
    full = FaultStore(slow, [Fault("put", "/chunks/", error=ckptstore.StoreFullError("no space"), times=2)])
    with tiered(fast, full, keeps=(KeepLast(1),)) as repo:
        for epoch in (1, 2):
            repo.save(epoch, tiny_state(epoch))
            assert repo.wait_for_tiers(20)
        assert repo.members[1].epochs() == [2]
    assert full.fired == (2,)
    assert "no space" in caplog.text


# --- buckets -------------------------------------------------------------------------------------------------


def test_a_new_node_and_a_pickle_beside_a_real_bucket(tmp_path: Path, s3: Bucket) -> None:
    """Options go to the bucket alone; a pickle holds no secret, and gets it anew; a new node goes on."""
    places: list[Path | str] = [tmp_path / "nvme", s3.url()]
    named: dict[str, Any] = {"keep": KeepLast(1), "chunk_size": CHUNK}
    with ckptstore.open(places, s3.storage_options, **named) as repo:
        handles = [repo.save_async(epoch, make_state(epoch)) for epoch in (1, 2, 3)]
        assert handles[-1].result().epoch == 3
        assert repo.wait_for_tiers(60)
        data = pickle.dumps(repo)
    assert s3.storage_options["secret"].encode() not in data
    with pickle.loads(data).with_credentials(s3.storage_options) as again:
        assert again.epochs() == [1, 2, 3]
        assert_same(again.checkpoint(1).load(), make_state(1))
    shutil.rmtree(tmp_path / "nvme")
    with ckptstore.open(places, s3.storage_options, **named) as repo:
        found = repo.latest()
        assert found is not None
        assert found.epoch == 3
        assert_same(found.load(), make_state(3))
        repo.save(4, make_state(4))
        assert repo.wait_for_tiers(60)
        assert [status.newest for status in repo.tiers()] == [4, 4]
        assert repo.members[1].verify().ok


# --- several processes ---------------------------------------------------------------------------------------


def test_two_at_once_do_no_harm(tmp_path: Path) -> None:
    """Two that copy the same epochs to the same tier: each arrives once, and nothing is left over."""
    with open_two(tmp_path) as one, open_two(tmp_path) as two:
        for epoch in range(1, 9):
            (one if epoch % 2 else two).save(epoch, make_state(epoch))
        assert one.wait_for_tiers(60)
        assert two.wait_for_tiers(60)
    with ckptstore.open(tmp_path / "slow", create=False) as alone:
        assert alone.epochs() == list(range(1, 9))
        assert alone.verify().ok
        alone.gc(grace=0)
        assert_no_debris(alone.store)


def test_a_zombie_is_refused_in_the_bucket_too(caplog: pytest.LogCaptureFixture) -> None:
    """A process on another node whose run was taken over brings nothing to the bucket any more."""
    slow = MemoryStore()
    with tiered(MemoryStore(), slow, run_id="seed-1") as old:
        old._fence.session = old._fence.session + "a"
        old.save(1, tiny_state(1))
        assert old.wait_for_tiers(20)
        with tiered(MemoryStore(), slow, run_id="seed-1") as new:
            new._replicators[0].repository(create=True)._fence.session = "another"  # type: ignore[union-attr]
            assert new.latest().epoch == 1  # type: ignore[union-attr]
            new.save(2, tiny_state(2))
            assert new.wait_for_tiers(20)
            old.save(3, tiny_state(3))  # its own disk takes it
            assert not old.wait_for_tiers(20)
            assert "taken it over" in old.tiers()[1].error
            assert new.members[1].epochs() == [1, 2]
    assert "no more is copied by this process" in caplog.text


def test_a_forked_child_copies_for_itself(tmp_path: Path) -> None:
    """It neither waits for its parent's threads nor stops them, and what it saves arrives."""
    with open_two(tmp_path) as repo:
        repo.save(1, tiny_state(1))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                repo.save(2, tiny_state(2))
                if repo.wait_for_tiers(30):
                    repo.close()
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        repo.save(3, tiny_state(3))
        assert repo.wait_for_tiers(30)
        assert repo.members[1].epochs() == [1, 2, 3]


def test_a_pickle_knows_its_tiers(tmp_path: Path) -> None:
    """A repository and a checkpoint of a lower tier come back, and nothing is copied until something is saved."""
    with open_two(tmp_path, keep=KeepLast(1)) as repo:
        for epoch in (1, 2):
            repo.save(epoch, tiny_state(epoch))
            assert repo.wait_for_tiers(20)
        repo.prune()
        assert repo.members[0].epochs() == [2]
        data = pickle.dumps((repo, repo.checkpoint(1)))
    again, checkpoint = pickle.loads(data)
    with again:
        assert again.epochs() == [1, 2]
        assert_same(checkpoint.load(), tiny_state(1))
        again.save(3, tiny_state(3))
        assert again.wait_for_tiers(20)
        assert again.members[1].epochs() == [1, 2, 3]


def test_a_process_that_must_end_waits_for_the_copy(tmp_path: Path) -> None:
    """A node that is taken away takes its disk along: what is under way counts, where the tier is well."""
    fast, slow = MemoryStore(), MemoryStore()
    at, go = threading.Event(), threading.Event()

    def hold() -> None:
        at.set()
        go.wait(30)

    switch = Switch(FaultStore(slow, [Fault("put", "/chunks/", error=hold, times=1)]))
    with tiered(fast, switch.store) as repo:
        repo.save(1, tiny_state(1))
        assert at.wait(20)
        assert repo._flights.now()
        go.set()
        assert repo.wait_for_tiers(20)
        assert repo._flights.now() == set()
        switch.down.set()
        repo.save(2, tiny_state(2))
        eventually(lambda: repo.tiers(look=False)[1].failures > 0)
        assert repo._flights.now() == set()


def test_a_policy_that_fails_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A policy of the user's that raises is an error of the status; saves go on, and it is tried again."""

    class Moody(Policy):
        angry = True

        def keep(self, epochs: Any) -> dict[int, str]:
            if self.angry:
                raise ZeroDivisionError("a policy")
            return {info.epoch: "all" for info in epochs}

    fast, slow = MemoryStore(), MemoryStore()
    moody = Moody()
    with caplog.at_level(logging.WARNING), tiered(fast, slow, keeps=(moody,)) as repo:
        repo.save(1, tiny_state(1))
        eventually(lambda: repo._replicators[0].failures > 1)
        moody.angry = False
        assert repo.wait_for_tiers(20)
        assert repo.members[1].epochs() == [1]
        before = contents(slow)
        assert repo.wait_for_tiers(20)
        assert contents(slow) == before


def test_what_is_set_aside_is_not_copied_and_not_chosen(tmp_path: Path) -> None:
    """A quarantine holds in all tiers; the copy follows when the epoch is released."""
    with ckptstore.open([tmp_path / "fast", tmp_path / "slow"]) as repo:
        repo.save(1, {"m": {"w": 1}})
        repo.save(2, {"m": {"w": 2}})
        assert repo.wait_for_tiers(60)
        repo.quarantine(2, "the loss is wrong")
        assert repo.quarantined() == {2: "the loss is wrong"}
        assert repo.members[1].quarantined() == {2: "the loss is wrong"}
        newest = repo.latest()
        assert newest is not None
        assert newest.epoch == 1
        repo.members[1].delete(2)
        assert repo.wait_for_tiers(60)
        assert repo.members[1].epochs() == [1]
        assert repo.release(2)
        assert repo.wait_for_tiers(60)
        assert repo.members[1].epochs() == [1, 2]
        again = repo.latest()
        assert again is not None
        assert again.epoch == 2


def test_damage_of_one_copy_sets_aside_that_copy(tmp_path: Path) -> None:
    """The good one in another tier is chosen and loaded, and stays free of marks."""
    with open_two(tmp_path) as repo:
        repo.save(1, {"m": {"w": b"1" * 5000}})
        repo.save(2, {"m": {"w": b"2" * 5000}})
        assert repo.wait_for_tiers(60)
        attempt = repo.members[0].checkpoint(2)._manifest.attempt
        [chunk] = (tmp_path / "fast" / "attempts" / attempt / "chunks").iterdir()
        chunk.write_bytes(b"\0" * chunk.stat().st_size)
        assert not repo.verify(quarantine=True).ok
        assert list(repo.members[0].quarantined()) == [2]
        assert repo.members[1].quarantined() == {}
        newest = repo.latest()
        assert newest is not None
        assert newest.load() == {"m": {"w": b"2" * 5000}}
        assert repo.release(2)
        assert not repo.scrub(quarantine=True).ok
        assert repo.members[1].quarantined() == {}


def test_an_epoch_that_another_process_deleted_from_all_tiers_can_be_saved_again(tmp_path: Path) -> None:
    """What this process knows of a lower tier is asked for anew before a save is refused for it."""
    with open_two(tmp_path) as repo:
        repo.save(1, tiny_state(1))
        repo.save(2, tiny_state(2))
        assert repo.wait_for_tiers(60)
        with ckptstore.open(tmp_path / "fast") as fast, ckptstore.open(tmp_path / "slow") as slow:
            fast.delete(2)
            with pytest.raises(EpochExistsError, match="slow"):
                repo.save(2, tiny_state(2))
            slow.delete(2)
        repo.save(2, tiny_state(2))
        assert repo.wait_for_tiers(60)
        assert repo.members[1].epochs() == [1, 2]


def test_holds_of_all_tiers_are_told(tmp_path: Path) -> None:
    """An epoch that only a lower tier has is held there."""
    with open_two(tmp_path, keep=KeepLast(1)) as repo:
        for epoch in (1, 2):
            repo.save(epoch, tiny_state(epoch))
            assert repo.wait_for_tiers(60)
        repo.prune()
        assert repo.members[0].epochs() == [2]
        with repo.hold(1, "evaluation"), repo.hold(2):
            assert list(repo.holds()) == [1, 2]
            assert "evaluation" in repo.holds()[1]
        assert repo.holds() == {}


def test_repair_takes_good_copies_from_the_lower_tiers(tmp_path: Path) -> None:
    """Nobody has to name them; one that does not answer is left out."""
    with open_two(tmp_path) as repo:
        for epoch in (1, 2):
            repo.save(epoch, tiny_state(epoch))
        assert repo.wait_for_tiers(60)
        for chunk in (tmp_path / "fast" / "attempts").glob("*/chunks/*"):
            chunk.write_bytes(b"rotten")
        assert repo.repair(dry_run=True).ok
        assert repo.repair(epoch=1).ok
        (tmp_path / "slow").rename(tmp_path / "away")
        assert repo.repair().of("damaged") == [2]
        (tmp_path / "away").rename(tmp_path / "slow")
        assert repo.repair().ok
        assert repo.members[0].verify().ok


def test_a_process_that_closes_knows_what_others_have_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It looks before it says that a tier lacks something."""
    with open_two(tmp_path) as repo:
        repo.save(1, tiny_state(1))
        assert repo.wait_for_tiers(60)
        with open_two(tmp_path) as reader:
            assert reader.wait_for_tiers(60)
            repo.save(2, tiny_state(2))
            assert repo.wait_for_tiers(60)
    assert "lacks epoch" not in caplog.text


def test_a_replace_that_failed_gives_no_leave_to_the_next_save() -> None:
    """What a tier that did not answer then has under the number is a conflict, as without the failure."""
    fast, slow = MemoryStore(), MemoryStore()
    with Repository(slow, chunk_size=CHUNK) as one:
        one.save(1, tiny_state(9))
    switch = Switch(slow)
    switch.down.set()
    with tiered(fast, switch.store) as repo:
        with pytest.raises(ValueError, match="given up"), repo.begin(1, replace=True):
            raise ValueError("given up")
        repo.save(1, tiny_state(1))
        switch.down.clear()
        assert not repo.wait_for_tiers(20)
        assert "under that number" in repo.tiers()[1].stuck[1]
        assert_same(repo.members[1].checkpoint(1).load(), tiny_state(9))


def test_a_new_node_that_only_reads_writes_nothing(tmp_path: Path) -> None:
    """A first tier that is not there is made by the first save, and not before; also in another process."""
    with ckptstore.open(tmp_path / "slow", chunk_size=CHUNK) as home:
        home.save(1, tiny_state(1))
        home.pin(1, "the paper")
    with open_two(tmp_path, create=False) as repo:
        assert repo.epochs() == [1]
        assert_same(repo.checkpoint(1).load(), tiny_state(1))
        latest = repo.latest()
        assert latest is not None
        assert latest.epoch == 1
        assert repo.verify().ok
        assert repo.pins() == {1: "the paper"}
        assert repo.plan(KeepLast(1)).removed == {}
        assert repo.tiers()[0].epochs == 0
        assert repo.du().bytes_total == 0
        assert not (tmp_path / "fast").exists()
        repo.save(2, tiny_state(2))
        assert repo.wait_for_tiers(20)
        with ckptstore.open(tmp_path / "fast", create=False) as first:
            assert (first.id, first.epochs()) == (repo.id, [2])
    with ckptstore.open(tmp_path / "slow", create=False) as home:
        assert home.epochs() == [1, 2]


def test_a_new_node_is_made_for_another_process_and_only_once(tmp_path: Path) -> None:
    """What comes out of a pickle saves to the same repository; one that was made meanwhile is taken."""
    with ckptstore.open(tmp_path / "slow", chunk_size=CHUNK) as home:
        home.save(1, tiny_state(1))
    with open_two(tmp_path, create=False) as one, open_two(tmp_path, create=False) as two:
        with pickle.loads(pickle.dumps(one)) as child:
            child.save(2, tiny_state(2))
            assert child.id == one.id
        two.save(3, tiny_state(3))
        assert two.id == one.id
    with ckptstore.open(tmp_path / "fast", create=False) as first:
        assert first.epochs() == [2, 3]
