"""FlakyMount: a real FUSE mount that passes everything through to a folder and misbehaves as told.

It needs Linux, root and /dev/fuse and nothing else: the program in ``flaky_server.py`` speaks the kernel's protocol
itself, in a process of its own. ::

    with FlakyMount(tmp_path) as mount:          # mount.path: the mounted folder; mount.backing: what is under it
        repo = ckptstore.open(mount.path)
        mount.fail("fsync", errno.EIO)           # once; times=3: three times; times=None: for ever
        mount.fail("write", errno.EIO, after=5)  # let five pass
        mount.fail("link", errno.ESTALE, done=True)            # it is done, but the reply is lost
        mount.fail("unlink", errno.EBUSY, path=r"attempts/.*")  # only where the whole relative path matches
        mount.delay("read", 0.5, times=None)     # seconds
        mount.hang("write")                      # never answered ...
        mount.release()                          # ... until this (or the end of the mount)
        assert mount.fired() == [1, ...]         # how often each rule has acted, in the order in which they were made
        mount.heal()                             # forget all rules
        mount.calls()                            # {"write": 17, ...}: requests so far
        mount.die()                              # the server is killed: every call gets ENOTCONN

Operations: lookup getattr setattr open create read write flush (= close) fsync release opendir readdir fsyncdir link
rename unlink mkdir rmdir statfs, or "*". ``kill -9`` of the testing process takes the mount with it.

What the kernel adds: it tries a call with a path again by itself after ESTALE (so fail twice for an error that a
program sees), it locks a folder while a name in it changes (so a hanging ``mkdir`` also holds up a listing of that
folder), and it asks a mount that knows no operation only once. As on NFS, only a fatal signal ends a process in a call
that hangs, and no thread of it alone: leave the ``with`` block, or ``release``, before you join such a thread.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

SERVER = Path(__file__).with_name("flaky_server.py")


def missing() -> str | None:
    """Why there can be no FUSE mount here, or None."""
    if sys.platform != "linux":
        return "FUSE mounts are tested on Linux only"
    if os.geteuid() != 0:
        return "mounting needs root"
    return None if os.access("/dev/fuse", os.R_OK | os.W_OK) else "there is no /dev/fuse"


@dataclass(frozen=True)
class Habits:
    """What kind of file system it is.

    Attributes:
        filesystem: the type in the mount table.
        source: what is mounted, in the mount table.
        hard_links: without, ``link`` gives EPERM.
        noreplace: whether ``renameat2(RENAME_NOREPLACE)`` is known; without, it gives EINVAL.
        rename_copies: a rename is a copy in pieces and a delete, as on mounts of object stores.
        silly: what is removed while it is open stays as ``.nfs...`` until it is closed.
        folder_sync: without, a sync of a folder gives EINVAL.
        entry_timeout: seconds for which the kernel believes a name.
        negative_timeout: seconds for which it believes that there is no such name.
        attr_timeout: seconds for which it believes sizes and times, and with them listings.
    """

    filesystem: str = "fuse.flaky"
    source: str = "flaky"
    hard_links: bool = True
    noreplace: bool = True
    rename_copies: bool = False
    silly: bool = False
    folder_sync: bool = True
    entry_timeout: float = 0.0
    negative_timeout: float = 0.0
    attr_timeout: float = 0.0


class FlakyMount:
    """See the module. Two mounts of one ``backing`` are two nodes that share a file system.

    Args:
        folder: an empty folder in which to mount.
        habits: the kind of file system.
        backing: what is shown; by default a new folder, in memory where that is possible: syncs cost nothing there.
    """

    def __init__(self, folder: Path, habits: Habits = Habits(), *, backing: Path | None = None, name: str = "mnt"):
        memory = Path("/dev/shm")
        self._own = Path(tempfile.mkdtemp(prefix="flaky-", dir=memory if memory.is_dir() else folder))
        self.backing = backing or self._own
        self.path = folder / name
        self.path.mkdir()
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, str(SERVER), str(self.backing), str(self.path), json.dumps(asdict(habits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        try:
            self._ask("ready")
        except BaseException:
            self.close()
            raise

    def fail(
        self,
        op: str,
        code: int,
        *,
        after: int = 0,
        times: int | None = 1,
        path: str = ".*",
        done: bool = False,
    ) -> None:
        """Answer ``op`` with an errno, after ``after`` good ones; with ``done`` after the work was done."""
        self._ask("rule", op=op, errno=code, after=after, times=times, path=path, done=done)

    def delay(self, op: str, seconds: float, *, after: int = 0, times: int | None = 1, path: str = ".*") -> None:
        """Answer late."""
        self._ask("rule", op=op, seconds=seconds, after=after, times=times, path=path)

    def hang(self, op: str, *, after: int = 0, times: int | None = 1, path: str = ".*") -> None:
        """Do not answer until ``release``."""
        self._ask("rule", op=op, hang=True, after=after, times=times, path=path)

    def release(self) -> None:
        """Go on with all that hangs, and forget the rules."""
        self._ask("release")

    def heal(self) -> None:
        """Forget the rules."""
        self._ask("heal")

    def fired(self) -> list[int]:
        """How often each rule has acted, in the order in which the rules were made."""
        fired: list[int] = self._ask("fired")
        return fired

    def calls(self) -> Mapping[str, int]:
        """Requests so far, by operation."""
        calls: dict[str, int] = self._ask("calls")
        return calls

    def die(self) -> None:
        """Kill the server; the mount stays and answers ENOTCONN."""
        self._server.kill()
        self._server.wait()

    def close(self) -> None:
        """Unmount. May be called twice."""
        self.die()
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()
        while os.path.ismount(self.path) or _is_dead(self.path):
            done = subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{self.path} could not be unmounted: {done.stderr}")
        shutil.rmtree(self._own, ignore_errors=True)

    def __enter__(self) -> FlakyMount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, command: str, **arguments: object) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with self._lock:
            self._server.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            answer = self._server.stdout.readline()
        if not answer:
            raise OSError(f"the file system at {self.path} has ended with status {self._server.wait()}")
        return json.loads(answer)


def _is_dead(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError:
        return True
    return False
