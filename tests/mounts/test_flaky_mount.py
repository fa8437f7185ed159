"""Whole cycles on a real mount that misbehaves: saved or a typed error, and nothing lost. See ``flaky_fs.py``."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ckptstore
from ckptstore import KeepLast, Repository, RetryPolicy
from ckptstore.errors import ObjectNotFoundError, StoreError
from ckptstore.keys import chunk_key
from ckptstore.stores import mounts
from ckptstore.stores.local import LocalStore
from ckptstore.testing.suite import at_once
from tests.mounts.flaky_fs import FlakyMount, Habits, missing

if TYPE_CHECKING:
    from tests.conftest import Count

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

OPERATIONS = (
    *("lookup", "getattr", "open", "create", "read", "write", "flush", "fsync", "release", "opendir", "readdir"),
    *("fsyncdir", "link", "rename", "unlink", "mkdir", "rmdir"),
)
PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN, errno.EINTR)
LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# The suite takes a third of all cases, each operation and each error among them.
THIRD = 1 if os.environ.get("CKPTSTORE_FULL_MATRIX") else 3
QUICK = RetryPolicy(attempts=6, base=0.001, cap=0.004, deadline=20)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FlakyMount]:
    with FlakyMount(tmp_path) as mount:
        yield mount


def state(epoch: int) -> dict[str, object]:
    rng = np.random.default_rng(epoch)
    return {"model": {"w": rng.integers(0, 256, 90_000, "u1"), "epoch": epoch}, "optimizer": {"m": rng.random(500)}}


def check(repo: Repository, epoch: int) -> None:
    """The epoch holds what was saved, bit for bit."""
    loaded = repo.checkpoint(epoch).load()
    expected = state(epoch)
    assert loaded.keys() == expected.keys()
    for name in ("model", "optimizer"):
        for key, value in expected[name].items():  # type: ignore[attr-defined]
            np.testing.assert_array_equal(loaded[name][key], value)


def cycle(repo: Repository, epoch: int) -> None:
    """Save, load, prune, sweep: all that a trainer does."""
    repo.save(epoch, state(epoch))
    latest = repo.latest()
    assert latest is not None
    assert latest.epoch == epoch
    check(repo, epoch)
    repo.prune(KeepLast(2))
    repo.gc()


def debris(mount: FlakyMount) -> list[str]:
    return [path.name for path in mount.backing.rglob("*") if ".tmp-" in path.name or path.parent.name == "leases"]


def chosen(op: str, codes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Number (from 0) and errno of the cases of an operation."""
    shift = OPERATIONS.index(op)
    yield from ((number, code) for number, code in enumerate(codes) if (number + shift) % THIRD == 0)


@pytest.mark.parametrize("op", OPERATIONS)
def test_each_error_once(mount: FlakyMount, op: str, count: Count) -> None:
    """An error that passes costs nothing: the cycle succeeds, at an early and at a later call, also if it was done."""
    epoch = 1
    with ckptstore.open(mount.path, retry=QUICK) as repo:
        cycle(repo, epoch)
        for number, code in chosen(op, PASSING):
            for after, done in ((0, False), (2 + number, False), (0, True)):
                epoch += 1
                # The kernel itself tries again after the first ESTALE.
                mount.fail(op, code, after=after, done=done, times=2 if code == errno.ESTALE else 1)
                cycle(repo, epoch)
                mount.heal()
                check(repo, epoch - 1)
                count("single faults of a mount")
        assert repo.epochs() == [epoch - 1, epoch]
        repo.gc(grace=0)
        assert debris(mount) == []


@pytest.mark.parametrize("op", OPERATIONS)
def test_each_error_for_ever(mount: FlakyMount, op: str, count: Count) -> None:
    """An error that stays is a typed one within the budget; what was saved is there, and the next save works."""
    with ckptstore.open(mount.path, retry=QUICK) as repo:
        repo.save(1, state(1))
        for epoch, code in chosen(op, (*PASSING, *LASTING)):
            if code == errno.EINTR and op not in ("link", "rename", "unlink", "mkdir", "rmdir"):
                continue  # Python repeats the others by itself, for ever: no kernel does that
            mount.fail(op, code, after=epoch % 3, times=None)
            try:
                repo.save(epoch + 2, state(epoch + 2))
            except (StoreError, ckptstore.OutcomeUnknownError):
                count("lasting faults of a mount that ended in a typed error")
            with suppress(StoreError):
                check(repo, 1)
            mount.heal()
            check(repo, 1)
            if epoch + 2 not in repo.epochs():
                repo.save(epoch + 2, state(epoch + 2))
            check(repo, epoch + 2)
        repo.gc(grace=0)
        assert debris(mount) == []


@pytest.mark.parametrize("op", ["write", "fsync", "link", "read", "lookup", "fsyncdir", "opendir"])
def test_errno_and_path_are_kept(mount: FlakyMount, op: str) -> None:
    """The last error says where and with which errno, however long it was tried."""
    with ckptstore.open(mount.path, retry=QUICK) as repo:
        repo.save(1, state(1))
        mount.fail(op, errno.ESTALE, times=None)
        with pytest.raises(StoreError) as caught:
            cycle(repo, 2)
    assert caught.value.errno == errno.ESTALE
    assert str(mount.path) in str(caught.value)


@pytest.mark.parametrize("op", ["flush", "fsync"])
@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC])
def test_errors_that_come_late(mount: FlakyMount, op: str, code: int) -> None:
    """A full disk that only the sync or the close tells of is a full disk."""
    with ckptstore.open(mount.path, retry=QUICK) as repo:
        repo.save(1, state(1))
        mount.fail(op, code, path="attempts/.*", times=None)
        with pytest.raises(ckptstore.StoreFullError):
            repo.save(2, state(2))
        mount.heal()
        assert repo.epochs() == [1]
        repo.save(2, state(2))
        check(repo, 2)


@pytest.mark.parametrize("code", PASSING)
def test_lost_replies_without_hard_links(tmp_path: Path, code: int) -> None:
    """Where names are given by renames, one that was done although it failed is a success; another is retried."""
    with FlakyMount(tmp_path, Habits(hard_links=False)) as mount, ckptstore.open(mount.path, retry=QUICK) as repo:
        assert repo.store.traits.create_only == "rename"
        for epoch, (done, after) in enumerate(((True, 0), (True, 2), (False, 0), (False, 2)), 1):
            mount.fail("rename", code, done=done, after=after, times=2 if code == errno.ESTALE and not done else 1)
            cycle(repo, epoch)
            assert mount.fired()[-1] > 0
            mount.heal()
        assert debris(mount) == []


def test_the_server_dies(mount: FlakyMount) -> None:
    """A mount whose server is gone (ENOTCONN) is a typed error, never "no checkpoint"; what was saved is there."""
    with ckptstore.open(mount.path, retry=QUICK) as repo:
        repo.save(1, state(1))
        with pytest.raises(StoreError), repo.begin(2) as transaction:
            transaction.write("model", state(2)["model"])
            mount.die()
            transaction.write("optimizer", state(2)["optimizer"])
        for act in (repo.latest, repo.epochs, lambda: ckptstore.open(mount.path, retry=QUICK)):
            with pytest.raises(StoreError) as caught:
                act()
            assert caught.value.errno == errno.ENOTCONN
    with ckptstore.open(mount.backing) as repo:
        assert repo.epochs() == [1]
        check(repo, 1)
        repo.save(2, state(2))


# --- what is removed stays for a while -------------------------------------------------------------


def test_silly_names(tmp_path: Path) -> None:
    """What somebody still reads stays under a hidden name: nobody is hindered, and the folder goes the next time."""
    with (
        FlakyMount(tmp_path, Habits(silly=True)) as mount,
        ckptstore.open(mount.path, retry=QUICK, keep=KeepLast(1)) as repo,
        ExitStack() as held,
    ):
        repo.save(1, state(1))
        files = [held.enter_context(open(path, "rb")) for path in mount.path.rglob("attempts/*/chunks/*")]
        folder = os.path.dirname(files[0].name)
        repo.save(2, state(2))
        assert repo.epochs() == [2]
        assert len(os.listdir(folder)) == len(files)
        assert all(name.startswith(".nfs") for name in os.listdir(folder))
        assert all(".nfs" not in entry.key for entry in repo.store.list())
        check(repo, 2)
        assert repo.gc().removed == []
        assert files[0].read()
        held.close()
        wait_until(lambda: os.listdir(folder) == [])
        repo.save(3, state(3))
        assert repo.epochs() == [3]


def test_shared_folders_stay(mount: FlakyMount) -> None:
    """On a network mount the folders that all writers share stay when they are empty; those of an attempt go."""
    store = LocalStore(mount.path)
    for key in ("leases/1", chunk_key("a" * 32, "b" * 64)):
        store.put(key, b"1")
        store.delete(key)
    assert sorted(os.listdir(mount.path)) == ["attempts", "leases"]
    assert os.listdir(mount.path / "attempts") == []


@pytest.mark.parametrize("op", ["rmdir", "unlink"])
@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOTEMPTY])
@pytest.mark.parametrize("times", [3, None])
def test_a_delete_that_is_refused(mount: FlakyMount, op: str, code: int, times: int | None) -> None:
    """Busy, not empty: the save goes on, the old epoch is gone from the list at once, the rest goes later."""
    with ckptstore.open(mount.path, retry=QUICK, keep=KeepLast(1)) as repo:
        repo.save(1, state(1))
        mount.fail(op, code, path="attempts/.*/chunks.*", times=times)
        repo.save(2, state(2))
        assert repo.epochs() == [2]
        mount.heal()
        repo.save(3, state(3))
        assert repo.epochs() == [3]
        repo.gc(grace=0)
        assert len({path.parent for path in mount.backing.rglob("chunks/*")}) == 1


# --- two nodes -------------------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[FlakyMount, FlakyMount]]:
    """Two mounts of one folder; the second believes for a while what it saw."""
    habits = Habits(entry_timeout=0.8, negative_timeout=0.8, attr_timeout=0.8)
    with (
        FlakyMount(tmp_path, name="a") as first,
        FlakyMount(tmp_path, habits, backing=first.backing, name="b") as second,
    ):
        yield first, second


def test_a_chunk_that_is_seen_late(nodes: tuple[FlakyMount, FlakyMount]) -> None:
    """A key that somebody named but that a cache denies is looked at again until it is there."""
    first, second = nodes
    key = chunk_key("a" * 32, "b" * 64)
    writer, reader = LocalStore(first.path), LocalStore(second.path)
    writer.put(chunk_key("a" * 32, "c" * 64), b"other")
    assert not os.path.exists(second.path / key)
    writer.put(key, b"body")
    assert not os.path.exists(second.path / key), "the cache of this mount does not deny it"
    assert reader.get(key) == b"body"
    assert reader.info(key).size == 4


def test_the_patience_has_an_end(nodes: tuple[FlakyMount, FlakyMount], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there is waited for once a folder, a few seconds; other keys and other file systems not at all."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    store = LocalStore(nodes[1].path)
    for digest in "bcd":
        with pytest.raises(ObjectNotFoundError):
            store.get(chunk_key("a" * 32, digest * 64))
    assert 3 <= sum(waited) <= 5
    waited.clear()
    for key in ("manifests/1", "ckptstore.json", "leases/x"):
        with pytest.raises(ObjectNotFoundError):
            store.get(key)
    with pytest.raises(ObjectNotFoundError):
        LocalStore(nodes[0].backing).get(chunk_key("a" * 32, "b" * 64))
    assert waited == []
    monkeypatch.setattr(mounts, "SPENT_SECONDS", -1.0)
    for _ in range(2):
        with pytest.raises(ObjectNotFoundError):
            store.get(chunk_key("e" * 32, "b" * 64))
    assert sum(waited) > 6


def test_a_listing_is_asked_for_anew(nodes: tuple[FlakyMount, FlakyMount]) -> None:
    """What a cache holds of a folder is no listing of it: new names are there and old ones are not."""
    first, second = nodes
    writer, reader = LocalStore(first.path), LocalStore(second.path)
    writer.put("leases/1", b"1")
    assert [entry.key for entry in reader.list()] == ["leases/1"]
    assert os.listdir(second.path / "leases") == ["1"]
    writer.put("leases/2", b"2")
    writer.delete("leases/1")
    assert os.listdir(second.path / "leases") == ["1"], "this mount does not cache listings"
    assert [entry.key for entry in reader.list("leases/")] == ["leases/2"]


def test_two_nodes(nodes: tuple[FlakyMount, FlakyMount]) -> None:
    """A reader on a node that lags behind sees the old or the new epoch, whole, and never an error."""
    first, second = nodes
    with ckptstore.open(first.path) as writer, ckptstore.open(second.path, create=False) as reader:
        stop = threading.Event()
        seen: list[int] = []

        def read() -> None:
            while not stop.is_set():
                latest = reader.latest()
                if latest is not None:
                    np.testing.assert_array_equal(latest.load()["model"]["epoch"], latest.epoch)
                    seen.append(latest.epoch)

        failures: list[BaseException] = []

        def guarded() -> None:
            try:
                read()
            except BaseException as error:  # noqa: BLE001 (the main thread raises it)
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        for epoch in range(1, 7):
            writer.save(epoch, state(epoch))
        wait_until(lambda: bool(failures) or (bool(seen) and seen[-1] == 6))
        stop.set()
        thread.join(30)
        assert failures == []
        assert seen == sorted(seen)


def test_many_make_one_folder(mount: FlakyMount) -> None:
    """Writers that make the same folders at one moment all go on."""
    root = mount.path / "root"

    def make(number: int) -> None:
        for folder in range(6):
            LocalStore(root).put(f"new/{folder}/deep/{number}", b"1", if_absent=True)

    assert at_once(8, make) == [None] * 8
    assert len(list(LocalStore(root).list())) == 48


def test_a_folder_that_exists_already(mount: FlakyMount) -> None:
    """ "Exists" is a success where a folder is there, whoever made it."""
    mount.fail("mkdir", errno.EEXIST, times=3, done=True)
    LocalStore(mount.path / "root").put("a/b/c", b"1", if_absent=True)
    assert (mount.path / "root" / "a" / "b" / "c").read_bytes() == b"1"


def wait_until(true: Callable[[], bool]) -> None:
    """Until it is true, but not for ever."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
