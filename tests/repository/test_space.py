"""Space: full disks, the reserve, what may be deleted for a save, second stores, and failures that are forgiven.

On real file systems of a few megabytes wherever a disk is said to be full.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import (
    AccessError,
    EpochExistsError,
    InvalidArgumentError,
    InvalidRecordError,
    KeepLast,
    Preflight,
    RepositoryNotFoundError,
    StoreError,
    StoreFullError,
    keys,
)
from ckptstore.failures import Failures
from ckptstore.policies import EpochInfo, Policy
from ckptstore.preflight import human
from ckptstore.stores import LocalStore, MemoryStore, OpLog, RetryPolicy, TraceStore, open_store
from ckptstore.stores.reserve import SIZE
from ckptstore.stores.space import _Quota, space_of
from ckptstore.testing import CrashStore, Fault, FaultStore, SimulatedCrash
from tests.repository.helpers import assert_no_debris, assert_same, contents, keys_of, make_state, open_repo, reached
from tests.stores.test_local import mount

__all__ = ["mount"]

MIB = 1 << 20
Mount = Callable[[str], Path]


def noise(seed: int, mib: float) -> dict[str, Any]:
    """What no codec makes smaller."""
    return {"m": {"w": np.random.default_rng(seed).integers(0, 256, int(mib * MIB), dtype=np.uint8)}}


def used(folder: Path) -> int:
    stat = os.statvfs(folder)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def free(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bfree * stat.f_frsize


def fill(folder: Path, leave: int = 0) -> Path:
    """Somebody else's file that leaves so many bytes, or fewer if a save that is under way is faster."""
    ballast = folder / "ballast"
    with suppress(OSError), open(ballast, "ab") as file:
        while (more := min(free(folder) - leave, MIB)) > 0:
            file.write(bytes(more))
            file.flush()
    return ballast


def hog_inodes(folder: Path) -> list[Path]:
    """Somebody else's empty files, as many as there can be."""
    made: list[Path] = []
    while os.statvfs(folder).f_ffree:
        made.append(folder / f"hog-{len(made)}")
        made[-1].touch()
    return made


def of(repo: ckptstore.Repository) -> LocalStore:
    """The folder of a repository, with no wrapper."""
    return LocalStore(repo.url.removeprefix("file://"))


# ---- making room -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_the_oldest_go_one_at_a_time_until_it_fits(mount: Mount, how: str) -> None:
    """Scenario 21: with ``on_full="oldest"`` only epoch 1 is deleted for epoch 3."""
    folder = mount("size=24m")
    with ckptstore.open(folder / "r", on_full="oldest", chunk_size=MIB) as repo:
        for epoch in (1, 2):
            repo.save(epoch, noise(epoch, 8))
        saved = repo.save(3, noise(3, 12)) if how == "save" else repo.save_async(3, noise(3, 12)).result()
        assert saved.epoch == 3
        assert repo.epochs() == [2, 3]
        assert_same(repo.checkpoint(2).load(), noise(2, 8))
        assert_same(repo.checkpoint(3).load(), noise(3, 12))
        assert_no_debris(of(repo))


def test_nothing_is_deleted_for_what_cannot_fit_anyway(mount: Mount) -> None:
    """Scenario 21, 20 MiB: refused before the first write, with what is needed and free; both epochs are there."""
    folder = mount("size=24m")
    with ckptstore.open(folder / "r", on_full="oldest", chunk_size=MIB) as repo:
        for epoch in (1, 2):
            repo.save(epoch, noise(epoch, 8))
        before = contents(of(repo))
        with pytest.raises(StoreFullError, match="use a larger disk") as caught:
            repo.save(3, noise(3, 20))
        assert contents(of(repo)) == before
        error = caught.value
        assert (error.errno, error.epoch, list(error.deletable)) == (errno.ENOSPC, 3, [1])
        assert error.needed is not None
        assert 20 * MIB < error.needed < 21 * MIB
        assert error.free == free(folder)
        assert 8 * MIB <= error.deletable[1] < 8.1 * MIB
        assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
        assert_same(repo.latest().load(), noise(2, 8))  # type: ignore[union-attr]


class Full(LocalStore):
    """A folder that tells no space, as many mounts do: it shows only when it is full."""

    def space(self) -> None:
        return None


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("spare", range(0, 256 * 1024, 32 * 1024))
def test_whatever_fits_is_saved(mount: Mount, spare: int, tells: bool) -> None:
    """Whatever room there is: what the disk could hold without the reserve is saved, all else is refused and leaves
    nothing behind. (Between the two there is room for indexes and folders, nothing more.)
    """
    folder = mount("size=12m")
    store = LocalStore(folder / "r") if tells else Full(folder / "r")
    repo = open_repo(store, codec="raw")
    repo.save(1, noise(1, 1))
    assert (keys.RESERVE in keys_of(store)) is tells
    size = 2 * MIB
    reserve = SIZE if tells else 0
    ballast = fill(folder, size + spare - reserve)
    try:
        repo.save(2, noise(2, 2))
    except StoreFullError:
        assert spare < (33 + 8) * 4096
        assert set(keys_of(store)) == reached(store)
    else:
        assert spare >= 32 * 4096, "each frame of a chunk takes a page more than the chunk"
        assert_same(repo.checkpoint(2).load(), noise(2, 2))
    assert_same(repo.checkpoint(1).load(), noise(1, 1))
    ballast.unlink()
    repo.save(3, noise(3, 1))
    repo.gc(grace=0)
    assert_no_debris(store)


def test_what_can_be_reused_or_compressed_is_not_refused(mount: Mount) -> None:
    """A state far larger than the disk is saved where zeros, or the epoch before, make it small."""
    folder = mount("size=16m")
    state = noise(1, 8)
    with ckptstore.open(folder / "r", chunk_size=MIB) as repo:
        repo.save(1, {"m": {"w": np.zeros(64 * MIB, np.uint8)}})
        repo.save(2, state)
        repo.save(3, {"m": {"w": state["m"]["w"], "zeros": np.zeros(64 * MIB, np.uint8)}})
        assert repo.verify().ok


@pytest.mark.parametrize("on_full", ["prune", "oldest"])
def test_what_the_policy_drops_goes_first(mount: Mount, on_full: Any) -> None:
    """A pruning that failed earlier is made up for before the new epoch is durable, and is enough."""
    folder = mount("size=24m")
    open_repo(LocalStore(folder / "r")).save(1, noise(1, 6))
    open_repo(LocalStore(folder / "r")).save(2, noise(2, 6))
    with ckptstore.open(folder / "r", keep=KeepLast(1), on_full=on_full, chunk_size=MIB) as repo:
        repo.save(3, noise(3, 14))
        assert repo.epochs() == [3]


def test_raise_deletes_nothing(mount: Mount) -> None:
    """``on_full="raise"``: neither epochs nor debris, whatever the policy drops."""
    folder = mount("size=24m")
    for epoch in (1, 2):
        open_repo(LocalStore(folder / "r")).save(epoch, noise(epoch, 6))
    with ckptstore.open(folder / "r", keep=KeepLast(1), on_full="raise", chunk_size=MIB) as repo:
        with pytest.raises(StoreFullError, match=r"delete epoch 1 \(6.0 MiB\)"):
            repo.save(3, noise(3, 14))
        assert repo.epochs() == [1, 2]


def test_debris_of_the_dead_makes_room_at_once(mount: Mount) -> None:
    """What a killed save has left is removed for the next one: its process is gone, so nobody waits 15 minutes."""
    folder = mount("size=24m")
    open_repo(LocalStore(folder / "r")).save(1, noise(1, 2))
    crashing = CrashStore(LocalStore(folder / "r"), 13)
    child = os.fork()
    if child == 0:
        try:
            open_repo(crashing, chunk_size=MIB).save(2, noise(2, 14))
        except SimulatedCrash:
            pass
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert used(folder) > 9 * MIB
    with ckptstore.open(folder / "r", chunk_size=MIB) as repo:
        repo.save(3, noise(3, 18))
        assert repo.epochs() == [1, 3]
        assert_no_debris(of(repo))


def test_never_the_resumed_the_newest_intact_or_the_one_being_replaced(mount: Mount) -> None:
    """P5: for no save does ``on_full="oldest"`` delete them. The newest is rotten, so the newest intact is older."""
    folder = mount("size=32m")
    with ckptstore.open(folder / "r", chunk_size=MIB) as repo:
        for epoch in range(1, 6):
            repo.save(epoch, noise(epoch, 4))
    with ckptstore.open(folder / "r", on_full="oldest", chunk_size=MIB) as repo:
        repo.checkpoint(2).load()
        store = of(repo)
        rotten = sorted(repo._catalog.reach(repo._catalog.manifest(repo._catalog.committed(5)[0])))
        chunk = next(key for key in rotten if "/chunks/" in key)
        body = bytearray(store.get(chunk))
        body[-1] ^= 1
        store.put(chunk, bytes(body))
        with pytest.raises(StoreFullError):
            repo.save(1, noise(9, 24), replace=True)
        assert repo.epochs() == [1, 2, 3, 4, 5]  # nothing goes in vain
        repo.save(6, noise(6, 14))
        assert {2, 4, 6} <= set(repo.epochs()), "2: resumed from; 4: the newest that was intact"
        assert_same(repo.checkpoint(2).load(), noise(2, 4))
        assert_same(repo.checkpoint(4).load(), noise(4, 4))


class Broken(Policy):
    """A policy of the user's that cannot do what it should."""

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        raise ZeroDivisionError


def test_a_policy_that_fails_does_not_hide_the_full_disk(mount: Mount) -> None:
    """The error is still about space, with everything in place."""
    folder = mount("size=8m")
    with ckptstore.open(folder / "r", keep=Broken(), on_full="oldest", chunk_size=MIB) as repo:
        repo.save(1, noise(1, 2))
        with pytest.raises(StoreFullError):
            repo.save(2, noise(2, 9))
        assert repo.epochs() == [1]


def test_record_by_record_cleans_up_and_says_what_could_go(mount: Mount) -> None:
    """``begin`` cannot try again: nothing of the attempt remains, and the error names the epochs to delete."""
    folder = mount("size=16m")
    with ckptstore.open(folder / "r", chunk_size=MIB) as repo:
        for epoch in (1, 2):
            repo.save(epoch, noise(epoch, 5))

        def write() -> None:
            with repo.begin(3) as txn:
                txn.write("a", noise(3, 3)["m"])
                txn.write("b", noise(4, 6)["m"])

        with pytest.raises(StoreFullError, match=r"delete epoch 1 \(5.0 MiB\)") as caught:
            write()
        assert caught.value.deletable.keys() == {1}
        assert_no_debris(of(repo))
        repo.delete(1)
        write()
        assert repo.epochs() == [2, 3]


# ---- the reserve -----------------------------------------------------------------------------------------------


def test_the_reserve_is_made_used_and_made_again(mount: Mount) -> None:
    """It really takes its room. When all chunks are there and the disk is full, index and manifest take it and the
    epoch exists; after the next save it is there again.
    """
    folder = mount("size=16m")
    repo = open_repo(LocalStore(folder / "r"), chunk_size=MIB)
    assert keys.RESERVE not in keys_of(of(repo)), "nothing is set aside before the first save"
    repo.save(1, noise(1, 1))
    assert os.stat(folder / "r" / keys.RESERVE).st_blocks * 512 >= SIZE
    with repo.begin(2) as txn:
        txn.write("m", noise(2, 4)["m"])
        txn._writer._pipeline.finish()
        ballast = fill(folder)
        checkpoint = txn.commit()
    assert_same(checkpoint.load(), noise(2, 4))
    assert keys.RESERVE not in keys_of(of(repo))
    ballast.unlink()
    repo.save(3, noise(3, 1))
    assert keys.RESERVE in keys_of(of(repo))
    assert repo.epochs() == [1, 2, 3]


@pytest.mark.parametrize("lacks", ["bytes", "inodes", "both"])
@pytest.mark.parametrize("act", ["gc", "prune", "delete", "a failed save"])
def test_a_disk_that_is_completely_full_can_be_cleaned(mount: Mount, lacks: str, act: str) -> None:
    """0 bytes, 0 files: gc, prune, delete and the clean-up of a save that fails do all that they should."""
    folder = mount("size=16m,nr_inodes=200")
    repo = open_repo(LocalStore(folder / "r"), chunk_size=MIB)
    for epoch in (1, 2):
        repo.save(epoch, noise(epoch, 1))
    txn = repo.begin(3)
    txn.write("m", noise(3, 2)["m"])
    if act != "a failed save":
        txn._writer.close()
        txn._lease.abandon()
    if lacks != "bytes":
        hog_inodes(folder)
    if lacks != "inodes":
        fill(folder) if lacks == "bytes" else _grow(folder)
    if act == "gc":
        repo.gc(grace=0)
        assert repo.epochs() == [1, 2]
    elif act == "prune":
        repo.prune(KeepLast(1))
        assert repo.epochs() == [2]
    elif act == "delete":
        repo.delete(1)
        assert repo.epochs() == [2]
    else:
        with pytest.raises(StoreFullError), txn:
            txn.write("more", noise(4, 1)["m"])
        assert_no_debris(of(repo))
    if act in ("gc", "prune"):
        repo.gc(grace=0)
        assert_no_debris(of(repo))
    assert repo.verify().ok


def _grow(folder: Path) -> None:
    """Fill up without a new file."""
    with open(folder / "hog-0", "ab") as file:
        while free(folder):
            file.write(bytes(min(free(folder), MIB)))
            file.flush()


def test_no_reserve_where_none_is_needed() -> None:
    """A store that tells no space, a bucket say, gets none, and asks nothing more for it."""
    store, log = MemoryStore(), OpLog()
    repo = open_repo(TraceStore(store, log))
    repo.save(1, make_state(1))
    assert keys.RESERVE not in keys_of(store)
    assert [event for event in log.events if event.key == keys.RESERVE] == []


def test_a_reserve_costs_a_save_nothing(tmp_path: Path) -> None:
    """Once it is there, no request is for it, in this process or the next."""
    log = OpLog()
    repo = open_repo(TraceStore(LocalStore(tmp_path), log))
    repo.save(1, make_state(1))
    log.clear()
    repo.save(2, make_state(2))
    assert [event for event in log.events if event.key == keys.RESERVE] == []


@pytest.mark.parametrize("error", [StoreError("no"), StoreFullError("full"), AccessError("refused")])
def test_a_reserve_that_cannot_be_made_fails_no_save(tmp_path: Path, error: StoreError) -> None:
    """It is a help, no condition."""
    with FaultStore(LocalStore(tmp_path), [Fault("put", keys.RESERVE, error=error, times=None)]) as store:
        open_repo(store).save(1, make_state(1))
    assert open_repo(LocalStore(tmp_path)).epochs() == [1]


# ---- preflight -------------------------------------------------------------------------------------------------


def test_preflight_of_a_folder(mount: Mount) -> None:
    """Free bytes and files, what is stored, what may go, and an estimate by the ratio of the last save."""
    folder = mount("size=24m,nr_inodes=500")
    with ckptstore.open(folder / "r", keep=KeepLast(2), chunk_size=MIB) as repo:
        half = np.zeros(2 * MIB, np.uint8)
        for epoch in (1, 2):
            repo.save(epoch, {"m": {"w": noise(epoch, 4)["m"]["w"], "zeros": half}})
        before = contents(of(repo))
        found = repo.preflight(6 * MIB)
        assert contents(of(repo)) == before, "it leaves nothing"
        assert isinstance(found, Preflight)
        assert (found.ok, found.writable, found.conditional_put) == (True, True, True)
        assert (found.free, found.files) == (free(folder), os.statvfs(folder).f_ffree)
        assert 4 * MIB < found.bytes_needed < 4.5 * MIB, "a third of the last state took no room"
        assert 8 * MIB < found.bytes_stored < 8.1 * MIB
        assert found.bytes_peak == found.bytes_stored + found.bytes_needed
        assert (found.prunable, list(found.deletable)) == ({}, [1])
        assert 4 * MIB <= found.deletable[1] < 4.1 * MIB
        assert repo.preflight({"m": {"w": np.zeros(100)}}).bytes_state == 800
        found.raise_if_not_ok()
        no = repo.preflight(40 * MIB)
        assert not no.ok
        assert "use a larger disk" in no.advice
        assert str(no).startswith(f"{repo.url}: NOT ok")
        with pytest.raises(StoreFullError, match="larger disk"):
            no.raise_if_not_ok()
        tight = repo.preflight(24 * MIB)
        assert not tight.ok
        assert "delete epoch 1" in tight.advice
    with ckptstore.open(folder / "r", on_full="oldest") as repo:
        assert repo.preflight(24 * MIB).ok
    with ckptstore.open(folder / "r", keep=KeepLast(1)) as repo:
        dropped = repo.preflight(24 * MIB)
        assert (dropped.ok, list(dropped.prunable)) == (True, [1])


def test_a_save_can_reuse_no_more_than_is_there(mount: Mount) -> None:
    """After a save that reused everything, a state that has grown beyond the disk is not taken for one that fits: the
    preflight says so, and the save is refused before the first write.
    """
    folder = mount("size=8m")
    repo = ckptstore.open(folder / "r")
    for epoch in (1, 2):
        repo.save(epoch, noise(0, 1))
    large = {**noise(0, 1), "n": noise(1, 16)["m"]}
    found = repo.preflight(large)
    assert not found.ok
    assert 16 * MIB < found.bytes_least < found.bytes_needed < 18 * MIB
    with pytest.raises(StoreFullError, match="nothing was written"):
        repo.save(3, large)
    assert repo.preflight(MIB).bytes_least < MIB // 2  # all of it may be there
    repo.close()


def test_preflight_of_a_place_without_files(mount: Mount) -> None:
    """A few inodes are too few, whatever the bytes."""
    folder = mount("size=24m,nr_inodes=30")
    with ckptstore.open(folder / "r") as repo:
        repo.save(1, noise(1, 1))
        hog_inodes(folder)
        found = repo.preflight(1)
        assert not found.ok
        assert "files can be made" in found.reason


def test_preflight_says_what_is_refused() -> None:
    """Permissions are in the answer, with the store's own words; a store that does not answer raises."""
    store = MemoryStore()
    open_repo(store).save(1, make_state(1))
    refusing = FaultStore(store, [Fault("put", "probes/", error=AccessError("policy denies it"), times=None)])
    found = open_repo(refusing).preflight(5)
    assert (found.ok, found.writable) == (False, False)
    assert "policy denies it" in found.reason
    assert found.advice == "check credentials and permissions"
    with pytest.raises(AccessError, match="policy denies it"):
        found.raise_if_not_ok()
    with pytest.raises(StoreError, match="down"):
        open_repo(FaultStore(store, [Fault("put", "probes/", error=StoreError("down"))])).preflight(5)


def test_preflight_gives_the_advice_of_the_refusal(mount: Mount) -> None:
    """A read-only file system is nothing that credentials could change; what to do is said once."""
    folder = mount("size=8m")
    with ckptstore.open(folder / "r") as repo:
        repo.save(1, make_state(1))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        found = repo.preflight(5)
        assert found.reason.endswith("Read-only file system)")
        assert found.advice == "mount the file system for writing or choose another folder"
        with pytest.raises(AccessError, match="mount the file system for writing"):
            found.raise_if_not_ok()


@pytest.mark.parametrize("what", [-1, "x", None, 1.5, True])
def test_preflight_of_no_size(what: Any) -> None:
    """The message names both kinds of answers."""
    with pytest.raises(InvalidArgumentError, match=f"records .* or their bytes .* not {what!r}"):
        open_repo(MemoryStore()).preflight(what)


@pytest.mark.parametrize("what", [{}, {"m": print}])
def test_preflight_of_no_state(what: Any) -> None:
    """What cannot be saved has no size."""
    with pytest.raises(InvalidRecordError):
        open_repo(MemoryStore()).preflight(what)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (208, "208 B"),
        (7139, "7.0 KiB"),
        (262_147, "0.3 MiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_small_sizes_are_told(nbytes: int, text: str) -> None:
    """An epoch that gives back 208 bytes is not said to give 0.0 MiB."""
    assert human(nbytes) == text


def test_space_of_a_folder_yet_to_be_made(tmp_path: Path) -> None:
    """It is that of the nearest folder above; what the system does not tell is None."""
    there, here = space_of(str(tmp_path / "a" / "b")), space_of(str(tmp_path))
    assert there is not None
    assert here is not None
    assert there.block == here.block
    assert (there.files or 0) > 0
    assert MemoryStore().space() is None
    wrapped = open_store(tmp_path, on_request=lambda _: None).space()
    assert wrapped is not None
    assert wrapped.block == here.block


def test_where_file_systems_may_compress_nothing_is_certain() -> None:
    """A refusal before the first write needs a file system known to store bytes as they are."""
    proc = space_of("/proc")
    assert proc is None or proc.ceiling is None


def test_quota_is_read_as_the_kernel_writes_it() -> None:
    """Limits are in blocks of 1 KiB, usage in bytes; a limit of 0 is none, and what is not valid is not told."""
    quota = _Quota(block_limit=4096, space=MIB, file_limit=20, files=18, valid=15)
    assert quota.left() == (3 * MIB, 2)
    quota.valid = 12
    assert quota.left() == (None, 2)
    quota.valid, quota.file_limit = 15, 0
    assert quota.left() == (3 * MIB, None)
    quota.space = 5 * MIB
    assert quota.left() == (0, None)


# ---- failures that are forgiven --------------------------------------------------------------------------------


def failing(times: int | None, *, error: BaseException | None = None, match: str = "manifests/") -> FaultStore:
    """A store that fails commits, after epoch 1."""
    store = MemoryStore()
    open_repo(store).save(1, make_state(1))
    return FaultStore(store, [Fault("put", match, error=error or StoreError("the store is away"), times=times)])


def try_save(repo: ckptstore.Repository, epoch: int, how: str) -> Any:
    return repo.save(epoch, make_state(epoch)) if how == "save" else repo.save_async(epoch, make_state(epoch)).result()


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_failing_save_need_not_end_a_run(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """``on_error="warn"``: None, and the log says how old the newest durable epoch is; the third in a row raises."""
    with open_repo(failing(None), on_error="warn", max_failures=3) as repo:
        repo.latest()
        for epoch, remaining in ((2, 2), (3, 1)):
            caplog.clear()
            assert try_save(repo, epoch, how) is None
            line = caplog.records[-1].getMessage()
            assert f"epoch {epoch} was NOT saved" in line
            assert f"{remaining} more" in line
            assert "newest durable epoch is 1, " in line
            assert "seconds old" in line
        for epoch in (4, 5):
            with pytest.raises(StoreError, match="away"):
                try_save(repo, epoch, how)
        assert repo.epochs() == [1]
        caplog.clear()
    assert "the last 4 saves" in caplog.text, "close does not hide it either"


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_success_forgives_all(how: str) -> None:
    """Only failures in a row count."""
    repo = open_repo(failing(2), on_error="warn", max_failures=3)
    assert [try_save(repo, epoch, how) is not None for epoch in (2, 3, 4)] == [False, False, True]
    assert repo.epochs() == [1, 4]


def test_a_handle_tells_what_was_forgiven() -> None:
    """The error of a background save is there for who asks, and raised nowhere."""
    with open_repo(failing(1), on_error="warn") as repo:
        handle = repo.save_async(2, make_state(2))
        assert handle.result() is None
        assert handle.forgiven
        assert handle.stage == "failed"
        assert "away" in str(handle.exception())
        repo.save(3, make_state(3))


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_mistakes_are_never_forgiven(how: str) -> None:
    """What is not the store's fault is raised at once, as ever."""
    repo = open_repo(failing(1), on_error="warn")
    with pytest.raises(InvalidRecordError):
        getattr(repo, how)(2, {"m": print})
    with pytest.raises(InvalidArgumentError):
        getattr(repo, how)(-2, make_state(2))
    with pytest.raises(EpochExistsError):
        try_save(repo, 1, how)
    interrupted = open_repo(failing(1, error=KeyboardInterrupt()), on_error="warn")
    with pytest.raises(KeyboardInterrupt):
        try_save(interrupted, 2, how)
    wrong = open_repo(failing(1, error=ZeroDivisionError()), on_error="warn")
    with pytest.raises(ZeroDivisionError):
        try_save(wrong, 2, how)


def test_a_place_that_vanishes_is_forgiven(tmp_path: Path) -> None:
    """A mount that is gone is a failure of the store; nothing is saved into the void."""
    store = LocalStore(tmp_path / "r")
    repo = open_repo(store, on_error="warn", max_failures=2)
    repo.save(1, make_state(1))
    os.rename(tmp_path / "r", tmp_path / "elsewhere")
    assert repo.save(2, make_state(2)) is None
    with pytest.raises(RepositoryNotFoundError):
        repo.save(3, make_state(3))
    os.rename(tmp_path / "elsewhere", tmp_path / "r")
    repo.save(4, make_state(4))
    assert repo.epochs() == [1, 4]


def test_age_of_the_newest_epoch() -> None:
    """The log speaks of it as people do, and not at all of what was deleted."""
    failures = Failures("here", "warn", 3)
    assert "neither saved nor loaded" in failures.newest()
    failures.note(7, "2026-01-01T00:00:00+00:00")
    failures.note(6, "2026-01-02T00:00:00+00:00")
    from datetime import datetime, timezone

    for hour, words in ((1, "60 minutes"), (3, "3 hours"), (23, "23 hours")):
        assert f"is 7, {words} old" in failures.newest(datetime(2026, 1, 1, hour, tzinfo=timezone.utc))
    failures.forget(7)
    assert "neither saved nor loaded" in failures.newest()


@pytest.mark.parametrize(
    "options",
    [{"on_full": "x"}, {"on_full": None}, {"on_error": "ignore"}, {"max_failures": 0}, {"max_failures": True}],
)
def test_bad_options(options: dict[str, Any], tmp_path: Path) -> None:
    """Refused before anything happens."""
    with pytest.raises(InvalidArgumentError):
        ckptstore.open(tmp_path / "r", **options)
    assert not (tmp_path / "r").exists()


# ---- a second store --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_second_store_takes_what_the_first_cannot(
    mount: Mount, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a commit of its own; ``latest`` and ``epochs`` find it; the run moves on when the first is well again."""
    caplog.set_level(logging.WARNING)
    folder = mount("size=8m")
    with ckptstore.open(folder / "r", spill=tmp_path / "spill", chunk_size=MIB) as repo:
        repo.save(1, noise(1, 1))
        ballast = fill(folder, MIB // 2)
        for epoch in (2, 3):
            state = noise(epoch, 2)
            saved = repo.save(epoch, state) if how == "save" else repo.save_async(epoch, state).result()
            assert saved.url == repo.spill.url  # type: ignore[union-attr]
            assert f"epoch {epoch} lies in {saved.url}" in caplog.text
        assert (repo.epochs(), repo.spill.epochs()) == ([1, 2, 3], [2, 3])  # type: ignore[union-attr]
    with ckptstore.open(folder / "r", spill=tmp_path / "spill", chunk_size=MIB) as repo:
        latest = repo.latest()
        assert latest is not None
        assert (latest.epoch, latest.url) == (3, repo.spill.url)  # type: ignore[union-attr]
        assert_same(latest.load(), noise(3, 2))
        assert_same(repo.checkpoint(2).load(), noise(2, 2))
        assert [health.epoch for health in repo.verify().epochs] == [1, 2, 3]
        repo.save(4, noise(4, 2))
        ballast.unlink()
        caplog.clear()
        repo.save(5, noise(5, 1))
        assert "takes saves again" in caplog.text
        latest = repo.latest()
        assert latest is not None
        assert (latest.epoch, latest.url) == (5, repo.url)
        repo.delete(3)
        assert repo.epochs() == [1, 2, 4, 5]
    with ckptstore.open(tmp_path / "spill", create=False) as second:
        assert second.epochs() == [2, 4]
        assert second.verify().ok


QUICK = RetryPolicy(attempts=1)


def test_both_stores_fail(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    """The error is that of the first store, the log names the second; with "warn" it is forgiven as ever."""
    folder, other = mount("size=8m"), mount("size=8m")
    options: dict[str, Any] = {"spill": other / "r", "chunk_size": MIB, "retry": QUICK}
    with ckptstore.open(folder / "r", on_error="warn", max_failures=2, **options) as repo:
        assert repo.save(1, noise(1, 20)) is None
        assert f"the second store, file://{other}/r, cannot take epoch 1 either" in caplog.text
        with pytest.raises(StoreFullError, match=str(folder)):
            repo.save(1, noise(1, 20))
        assert repo.epochs() == []
        assert repo.latest() is None
        repo.save(1, noise(1, 1))
        assert repo.latest().url == repo.url  # type: ignore[union-attr]


def test_of_two_epochs_with_one_number_the_first_store_counts(mount: Mount, tmp_path: Path) -> None:
    """And replacing is left to it alone: which of two is newer could not be told later."""
    folder = mount("size=8m")
    with ckptstore.open(folder / "r", spill=tmp_path / "spill", chunk_size=MIB) as repo:
        ballast = fill(folder, MIB)
        repo.save(1, noise(1, 2))
        ballast.unlink()
        repo.save(1, noise(2, 2))
        assert_same(repo.latest().load(), noise(2, 2))  # type: ignore[union-attr]
        ballast = fill(folder, MIB // 2)
        with pytest.raises(StoreFullError):
            repo.save(1, noise(3, 4), replace=True)
        assert_same(repo.checkpoint(1).load(), noise(2, 2))
        repo.delete(1)
        assert repo.epochs() == []


def test_a_second_store_that_does_not_answer_is_not_empty(tmp_path: Path) -> None:
    """P4: the newest of both is known only if both answer."""
    with ckptstore.open(tmp_path / "r", spill=tmp_path / "spill", retry=QUICK) as repo:
        repo.save(1, make_state(1))
        os.rename(tmp_path / "spill", tmp_path / "away")
        with pytest.raises(RepositoryNotFoundError):
            repo.latest()
        os.rename(tmp_path / "away", tmp_path / "spill")
        assert repo.latest().epoch == 1  # type: ignore[union-attr]


def test_the_second_store_is_checked_when_it_is_opened(tmp_path: Path) -> None:
    """Not when it is needed; and it is another one."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        ckptstore.open(tmp_path / "r", spill=tmp_path / "file", retry=QUICK)
    with pytest.raises(InvalidArgumentError, match="same repository"):
        ckptstore.open(tmp_path / "r", spill=tmp_path / "r")
    with pytest.raises(InvalidArgumentError, match="spill_options"):
        ckptstore.open(tmp_path / "r", spill_options={"key": "x"})


def test_a_repository_with_a_second_store_travels(tmp_path: Path) -> None:
    """By pickle, with both."""
    with ckptstore.open(tmp_path / "r", spill=tmp_path / "spill") as repo:
        repo.save(1, make_state(1))
        with pickle.loads(pickle.dumps(repo)) as copy:
            copy.save(2, make_state(2))
            assert copy.spill.id == repo.spill.id  # type: ignore[union-attr]
        assert repo.epochs() == [1, 2]
