"""What a folder is on: found in the mount table, probed, said, and refused where no put can be made right."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import AccessError, ObjectExistsError, RepositoryNotFoundError, TransactionError
from ckptstore.stores import _posix, mounts
from ckptstore.stores.local import LocalStore
from ckptstore.stores.mounts import Mount, mount_of
from tests.mounts.flaky_fs import FlakyMount, Habits, missing

needs_fuse = pytest.mark.skipif(missing() is not None, reason=str(missing()))

STATE = {"model": {"w": np.arange(50_000), "step": 7}}

TABLE = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:26 / /mnt/nfs rw - nfs4 server:/export rw,vers=4.2
31 30 0:27 / /mnt/nfs/inner rw - tmpfs tmpfs rw
32 22 0:28 / /mnt/with\\040space rw master:2 propagate_from:3 - fuse.rclone remote:bucket rw
33 22 8:1 /home /mnt/bind rw - xfs /dev/sdb1 rw
34 22 0:30 / /mnt/plain rw - fuse mountpoint-s3 rw
35 22 0:31 / /mnt/auto rw - autofs systemd-1 rw
36 35 0:32 / /mnt/auto rw - cifs //server/share rw
37 22 0:33 / /mnt/copy rw - fuse.gcsfuse bucket rw
nonsense
38 22
"""


@pytest.mark.parametrize(
    ("path", "filesystem", "network", "own", "instead"),
    [
        ("/elsewhere/x", "ext4", False, True, None),
        ("/mnt/nfs", "nfs4", True, False, None),
        ("/mnt/nfs/runs/llama", "nfs4", True, False, None),
        ("/mnt/nfsx/runs", "ext4", False, True, None),
        ("/mnt/nfs/inner/x", "tmpfs", False, True, None),
        ("/mnt/with space/x", "fuse.rclone", True, False, None),
        ("/mnt/bind/x", "xfs", False, True, None),
        ("/mnt/plain/x", "fuse", True, False, "s3://"),
        ("/mnt/auto/x", "cifs", True, False, None),
        ("/mnt/copy/x", "fuse.gcsfuse", True, False, "gs://"),
    ],
)
def test_mount_table(
    tmp_path: Path, path: str, filesystem: str, network: bool, own: bool, instead: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The longest mount point wins, and the last mount on it; names are unescaped; nonsense is left out."""
    (tmp_path / "mountinfo").write_text(TABLE)
    monkeypatch.setattr(os.path, "lexists", lambda path: True)
    monkeypatch.setattr(os, "stat", lambda path: _none())
    mount = mount_of(path, str(tmp_path / "mountinfo"))
    assert (mount.filesystem, mount.network, mount.own, mount.instead) == (filesystem, network, own, instead)


def _none() -> os.stat_result:
    raise FileNotFoundError


def test_no_mount_table(tmp_path: Path) -> None:
    """Where there is no table, the file system is unknown, and asked."""
    assert mount_of(str(tmp_path), str(tmp_path / "missing")) == Mount(None)


@pytest.mark.parametrize("inner", ["", "not/made/yet"])
def test_links_lead_to_the_mount(tmp_path: Path, inner: str) -> None:
    """The root may be a symbolic link to a mount, or a folder that does not exist yet (real mount)."""
    if missing() is not None:
        pytest.skip(str(missing()))
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)
    try:
        os.symlink(folder, tmp_path / "link")
        assert mount_of(str(tmp_path / "link" / inner)).filesystem == "tmpfs"
        assert mount_of(str(tmp_path / inner)).filesystem != "tmpfs"
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@needs_fuse
def test_a_hidden_mount_does_not_count(tmp_path: Path) -> None:
    """A mount under a later one is still in the table, and is not what a path leads to."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(inner)], check=True)
    subprocess.run(["mount", "-t", "ramfs", "none", str(tmp_path / "a")], check=True)
    try:
        inner.mkdir()
        assert mount_of(str(inner)).filesystem == "ramfs"
    finally:
        subprocess.run(["umount", str(tmp_path / "a")], check=True)
        subprocess.run(["umount", str(inner)], check=True)


@needs_fuse
def test_open_says_what_it_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log and the traits tell of the file system, of the way to create, and once of each weakness."""
    caplog.set_level(logging.INFO, "ckptstore")
    with FlakyMount(tmp_path, Habits(folder_sync=False, filesystem="fuse.some")) as mount:
        with ckptstore.open(mount.path) as repo:
            traits = repo.store.traits
            assert (traits.filesystem, traits.network, traits.conditional_put) == ("fuse.some", True, True)
        with ckptstore.open(mount.path) as repo:
            repo.save(1, STATE)
            traits = repo.store.traits
            assert traits.create_only == "link"
            assert len(traits.weak) == 2
    said = [(record.levelname, record.getMessage()) for record in caplog.records if str(mount.path) in record.message]
    warned = [text for level, text in said if level == "WARNING"]
    assert len(warned) == 2
    assert "network or user-space" in warned[0]
    assert "cannot sync folders" in warned[1]
    informed = [text for level, text in said if level == "INFO"]
    assert f"{mount.path} is on fuse.some" in informed
    assert [text for text in informed if "by hard links" in text] == [
        f"{mount.path} on fuse.some: creates without overwriting by hard links"
    ]


def test_a_disk_is_not_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the kernel's own file systems nothing is asked, and nothing is said that is no news."""
    if mount_of(str(tmp_path)).filesystem not in ("ext4", "xfs", "btrfs"):
        pytest.skip("the tests do not run on a disk")
    monkeypatch.setattr(mounts, "probe_link", _none)
    store = LocalStore(tmp_path)
    store.put("a", b"body", if_absent=True)
    assert (store.traits.create_only, store.traits.network, store.traits.weak) == ("link", False, ())


@needs_fuse
def test_the_probe_is_cheap(tmp_path: Path) -> None:
    """It asks once per process and root, and leaves nothing behind."""
    with FlakyMount(tmp_path) as mount:
        LocalStore(mount.path).put("manifests/1", b"1", if_absent=True)
        first = mount.calls()
        assert (first["create"], first["link"], first["fsync"]) == (3, 2, 1)
        LocalStore(mount.path).put("manifests/2", b"1", if_absent=True)
        second = mount.calls()
        assert (second["create"] - first["create"], second["link"] - first["link"]) == (1, 1)
        assert sorted(os.listdir(mount.path / "manifests")) == ["1", "2"]


@needs_fuse
@pytest.mark.parametrize(
    ("habits", "way"),
    [
        (Habits(), "link"),
        (Habits(hard_links=False), "rename"),
        (Habits(hard_links=False, noreplace=False), None),
        (Habits(hard_links=False, rename_copies=True), None),
    ],
    ids=["links", "no links", "neither", "rename copies"],
)
def test_ways_to_create(tmp_path: Path, habits: Habits, way: str | None) -> None:
    """The best way that keeps the guarantee is found by trying; without one the mount is refused before any data."""
    with FlakyMount(tmp_path, habits) as mount:
        if way is None:
            with pytest.raises(AccessError, match="neither hard links nor a rename"):
                ckptstore.open(mount.path)
            assert os.listdir(mount.path) == []
        else:
            with ckptstore.open(mount.path) as repo:
                repo.save(1, STATE)
                assert repo.store.traits.create_only == way
                with pytest.raises(ObjectExistsError):
                    repo.store.put("ckptstore.json", b"other", if_absent=True)
                assert repo.latest() is not None
                assert repo.gc().removed == []
        assert not [path for path in mount.backing.rglob("*") if ".tmp-" in path.name]


@pytest.mark.parametrize("function", ["link", "rename"])
def test_a_way_that_overwrites_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """A call that accepts a name which is taken is not trusted."""

    def overwrite(scratch: str, name: str, place: int) -> None:
        os.replace(scratch, name, src_dir_fd=place, dst_dir_fd=place)

    place = os.open(tmp_path, os.O_RDONLY)
    probe = {"link": _posix.probe_link, "rename": _posix.probe_rename}[function]
    try:
        assert probe("name", place) is True
        monkeypatch.setattr(_posix, function, overwrite)
        assert probe("name", place) is False
    finally:
        os.close(place)
    assert os.listdir(tmp_path) == []


@needs_fuse
def test_one_writer_may_look_and_rename(tmp_path: Path) -> None:
    """Who promises a single writer may use a mount that can create in no safe way."""
    with FlakyMount(tmp_path, Habits(hard_links=False, noreplace=False)) as mount:
        with ckptstore.open(mount.path, unsafe_single_writer=True) as repo:
            repo.save(1, STATE)
            assert (repo.store.traits.create_only, repo.store.traits.conditional_put) == ("look", False)
            with pytest.raises(ckptstore.EpochExistsError):
                repo.save(1, STATE)
        with ckptstore.open(mount.path) as repo:
            assert repo.epochs() == [1]
            with pytest.raises(AccessError, match="neither hard links nor a rename"):
                repo.save(2, STATE)
            assert repo.epochs() == [1]


@needs_fuse
@pytest.mark.parametrize("single_writer", [False, True])
@pytest.mark.parametrize(
    ("filesystem", "source", "instead"),
    [
        ("fuse.s3fs", "s3fs", "s3://"),
        ("fuse.gcsfuse", "bucket", "gs://"),
        ("fuse.goofys", "bucket", "s3://"),
        ("fuse", "mountpoint-s3", "s3://"),
        ("fuse.blobfuse2", "blobfuse2", "another store"),
    ],
)
def test_mounts_of_buckets_are_refused(
    tmp_path: Path, filesystem: str, source: str, instead: str, single_writer: bool
) -> None:
    """Where a rename is a copy, a crash leaves half a file under its name: one writer is no help. Reading is fine."""
    with FlakyMount(tmp_path, Habits(filesystem=filesystem, source=source, rename_copies=True)) as mount:
        with pytest.raises(AccessError, match=f"use {instead}"):
            ckptstore.open(mount.path, unsafe_single_writer=single_writer)
        assert os.listdir(mount.path) == []
        with ckptstore.open(mount.backing) as repo:
            repo.save(1, STATE)
        with ckptstore.open(mount.path, create=False, unsafe_single_writer=single_writer) as repo:
            latest = repo.latest()
            assert latest is not None
            assert latest.load()["model"]["step"] == 7
            with pytest.raises(AccessError, match=f"use {instead}"):
                repo.save(2, STATE)
            assert repo.epochs() == [1]


@needs_fuse
def test_a_lost_reply_does_not_mislead_the_probe(tmp_path: Path) -> None:
    """A probe whose link was made although it failed finds out; one that cannot ask is tried again, not a no."""
    with FlakyMount(tmp_path) as mount:
        mount.fail("link", errno.EIO, done=True)
        with LocalStore(mount.path) as store:
            store.put("a", b"1", if_absent=True)
            assert store.traits.create_only == "link"
    with FlakyMount(tmp_path, name="other") as mount:
        mount.fail("link", errno.EIO)
        with ckptstore.open(mount.path) as repo:
            repo.save(1, STATE)
            assert repo.store.traits.create_only == "link"


@needs_fuse
def test_a_mount_that_vanishes(tmp_path: Path) -> None:
    """What is saved into the folder under a mount that went away is refused, also in the middle of a save."""
    with FlakyMount(tmp_path) as mount:
        repo = ckptstore.open(mount.path)
        repo.save(1, STATE)
        with pytest.raises((RepositoryNotFoundError, TransactionError)), repo.begin(2) as transaction:
            transaction.write("model", STATE["model"])
            subprocess.run(["umount", "--lazy", str(mount.path)], check=True)
            transaction.write("more", STATE["model"])
        with pytest.raises(RepositoryNotFoundError):
            repo.save(3, STATE)
        assert not [path for path in mount.path.rglob("*") if path.is_file()]
        repo.close()


@needs_fuse
def test_another_mount_in_place_of_the_first(tmp_path: Path) -> None:
    """A root that is mounted anew, of another kind, is looked at anew."""
    with FlakyMount(tmp_path) as mount:
        store = LocalStore(mount.path)
        store.put("a/b", b"1", if_absent=True)
        subprocess.run(["umount", "--lazy", str(mount.path)], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", str(mount.path)], check=True)
        try:
            (mount.path / "a").mkdir()
            store.put("a/c", b"1", if_absent=True)
            store.put("a/d", b"1", if_absent=True)
            assert store.traits.filesystem == "tmpfs"
            assert sorted(os.listdir(mount.path / "a")) == ["c", "d"]
        finally:
            subprocess.run(["umount", str(mount.path)], check=True)


def test_a_root_that_is_made_again_is_synced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that others removed and made again are new ones, and no link in their place is followed."""
    root, store = tmp_path / "root", LocalStore(tmp_path / "root")
    store.put("x/y/1", b"1")
    os.rename(root, tmp_path / "old")
    (root / "x" / "y").mkdir(parents=True)
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    store.put("x/y/2", b"2")
    assert {str(root / "x" / "y"), str(root / "x"), str(root)} <= set(synced)
    assert sorted(os.listdir(root / "x" / "y")) == ["2"]


def test_other_systems(tmp_path: Path) -> None:
    """Without a mount table and without Linux' calls the file system is asked by hard links, and that is enough."""
    code = """
import sys
import ckptstore.stores.mounts as mounts, ckptstore.stores._posix as posix
mounts.mount_of.__defaults__ = ("/nonexistent",)
posix._libc = None
import ckptstore
repo = ckptstore.open(sys.argv[1])
repo.save(1, {"model": 1})
traits = repo.store.traits
assert (traits.filesystem, traits.create_only, traits.network) == (None, "link", False), traits
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True, timeout=60)
