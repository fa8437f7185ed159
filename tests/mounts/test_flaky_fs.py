"""The flaky mount is a real file system: it passes through, and misbehaves exactly as told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptstore.stores.base import Store
from ckptstore.stores.local import LocalStore
from ckptstore.testing.suite import StoreSuite
from tests.mounts.flaky_fs import FlakyMount, Habits, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def wait_until(true: Callable[[], bool]) -> None:
    """Until it is true, but not for ever."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FlakyMount]:
    with FlakyMount(tmp_path) as mount:
        yield mount


class TestConformance(StoreSuite):
    """A store on a FUSE mount owes what every store owes."""

    many = 50
    overwrites = 5

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with FlakyMount(tmp_path) as mount, LocalStore(mount.path / "root") as store:
            yield store


def test_rules(mount: FlakyMount) -> None:
    """A rule acts on its operation and path, after and as often as it says, and counts."""
    mount.fail("mkdir", errno.EDQUOT, after=1, times=2, path="[ab].")
    results = []
    for name in ("a1", "c1", "a2", "b1", "b2"):
        try:
            os.mkdir(mount.path / name)
            results.append(0)
        except OSError as error:
            results.append(error.errno or 0)
    assert results == [0, 0, errno.EDQUOT, errno.EDQUOT, 0]
    assert mount.fired() == [2]
    assert sorted(os.listdir(mount.backing)) == ["a1", "b2", "c1"]
    assert mount.calls()["mkdir"] == 5
    mount.fail("mkdir", errno.EIO, times=None)
    mount.heal()
    os.mkdir(mount.path / "healed")


def test_lost_reply(mount: FlakyMount) -> None:
    """With ``done`` the work is done although the caller hears of an error."""
    mount.fail("mkdir", errno.EIO, done=True)
    with pytest.raises(OSError, match="Input/output"):
        os.mkdir(mount.path / "x")
    assert os.listdir(mount.path) == ["x"]


def test_hang(mount: FlakyMount) -> None:
    """What hangs stays so until it is released, and the rest of the mount goes on."""
    (mount.path / "d").mkdir()
    mount.hang("mkdir", path="d/x")
    caller = threading.Thread(target=os.mkdir, args=(mount.path / "d" / "x",))
    caller.start()
    wait_until(lambda: mount.fired() == [1])
    assert os.listdir(mount.path) == ["d"]
    assert caller.is_alive()
    mount.release()
    caller.join(30)
    assert os.listdir(mount.path / "d") == ["x"]


@pytest.mark.kill
def test_hanging_processes_can_be_killed(mount: FlakyMount) -> None:
    """As on NFS, a process that hangs ends with a signal that is fatal."""
    mount.hang("fsync")
    code = "import os, sys; file = open(sys.argv[1], 'w'); os.fsync(file.fileno())"
    process = subprocess.Popen([sys.executable, "-c", code, str(mount.path / "x")])
    wait_until(lambda: mount.fired() == [1])
    assert process.poll() is None
    process.kill()
    assert process.wait(30) == -signal.SIGKILL


def test_dead_server(mount: FlakyMount) -> None:
    """A mount whose server is gone says so."""
    mount.die()
    with pytest.raises(OSError) as caught:
        os.listdir(mount.path)
    assert caught.value.errno == errno.ENOTCONN


def test_silly_rename(tmp_path: Path) -> None:
    """What is removed while it is open stays under a hidden name until it is closed."""
    with FlakyMount(tmp_path, Habits(silly=True)) as mount:
        (mount.path / "d").mkdir()
        with open(mount.path / "d" / "x", "wb") as file:
            file.write(b"1")
            os.unlink(mount.path / "d" / "x")
            (hidden,) = os.listdir(mount.path / "d")
            assert hidden.startswith(".nfs")
            with pytest.raises(OSError, match="not empty"):
                os.rmdir(mount.path / "d")
        wait_until(lambda: not os.listdir(mount.path / "d"))  # a close does not wait for the release of the file
        os.rmdir(mount.path / "d")


def test_negative_names_are_believed(tmp_path: Path) -> None:
    """Of two nodes, one does not see for a while what the other made, if it looked too early."""
    with FlakyMount(tmp_path, name="a") as first:
        habits = Habits(negative_timeout=0.4)
        with FlakyMount(tmp_path, habits, backing=first.backing, name="b") as second:
            assert not os.path.exists(second.path / "x")
            (first.path / "x").write_bytes(b"1")
            assert not os.path.exists(second.path / "x")
            wait_until(lambda: os.path.exists(second.path / "x"))
