"""Campaign ``enospc``: the disk is full at every k-th write, and real file systems that are too small.

First the k-th write of a save (or new file, link, folder) meets a full disk, for every k: once, or from then on, or
after half of the bytes were written. Then, on a tmpfs of each size (and of each number of inodes) a trainer saves epoch
after epoch, prunes, and goes on when a save is refused. Afterwards there is room again, and all must work.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from ckptstore import CkptStoreError, KeepLast, Repository, StoreFullError
from ckptstore.stores import LocalStore
from tests.torture.content import CHUNK, content
from tests.torture.ledger import Ledger
from tests.torture.work import Work

Mode = Literal["once", "stays", "half"]

KEEP = 2
EPOCHS = 8
STEP = 24 * 1024  # bytes from one size to the next
LARGEST = 1400 * 1024  # bytes: enough for KEEP + 1 epochs and then some
WIDE = range(LARGEST, 5000 * 1024, 200 * 1024)  # up to what has room for a reserve as well
INODES = range(4, 64, 4)
MODES: tuple[Mode, ...] = ("once", "stays", "half")
ROOMY = "size=16m,nr_inodes=4000"


def run(work: Work) -> None:
    """``size`` cases of each kind, chosen by dice; 0: all of them."""
    at_every_write(work)
    if not work.enough:
        on_tmpfs(work)


# ---- every k-th write ------------------------------------------------------------------------------------------


class FullDisk:
    """The module ``os``, of which one call that needs room fails, and the later ones too if ``stays``."""

    def __init__(self, at: int, mode: Mode) -> None:
        self.at = at
        self.mode = mode
        self.room = True
        """Until this is False, nothing fails and nothing is counted."""
        self.calls = 0
        self.hits = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, handle: int, data: memoryview) -> int:
        if self._full():
            if self.mode == "half":
                os.write(handle, data[: len(data) // 2])
            self._raise()
        return os.write(handle, data)

    def open(self, path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT and self._full():
            self._raise()
        return os.open(path, flags, *more, **named)

    def link(self, *where: Any, **named: Any) -> None:
        if self._full():
            self._raise()
        os.link(*where, **named)

    def mkdir(self, *where: Any, **named: Any) -> None:
        if self._full():
            self._raise()
        os.mkdir(*where, **named)

    def _full(self) -> bool:
        if self.room:
            return False
        with self._lock:
            self.calls += 1
            return self.calls == self.at or (self.mode == "stays" and self.calls > self.at)

    def _raise(self) -> None:
        self.hits += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full_disk(at: int, mode: Mode) -> Iterator[FullDisk]:
    """The local store meets a full disk in this block."""
    disk = FullDisk(at, mode)
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("ckptstore.stores.") and getattr(module, "os", None) is os:
                stack.enter_context(patch.object(module, "os", disk))
        yield disk


def at_every_write(work: Work) -> None:
    """A third epoch, with pruning, for every k and mode."""
    with full_disk(0, "once") as counter:
        _case(work, "count", work.folder / "count", counter)
    cases = [(at, mode) for at in range(counter.calls + 2, 0, -1) for mode in MODES]  # the commit comes early
    if work.size:
        cases = work.dice("writes").sample(cases, min(work.size, len(cases)))
    for at, mode in cases:
        step = f"write {at}, {mode}"
        with full_disk(at, mode) as disk:
            _case(work, step, work.folder / f"{at}-{mode}", disk)
        work.done()
        if work.enough:
            return


def _case(work: Work, step: str, folder: Path, disk: FullDisk) -> None:
    """Two epochs while there is room, one when there is none, and one or two when there is room again."""
    store = LocalStore(folder)
    ledger = Ledger(work, store, KEEP)
    for epoch in (1, 2):
        _save(work, f"{step}, epoch {epoch}", store, ledger, epoch, 0, room=True)
    disk.room = False
    _save(work, step, store, ledger, 3, 1, room=False, look=False)
    disk.room = True
    work.count(faults=disk.hits)
    ledger.look(step)
    for epoch in (3, 4) if 3 not in ledger.done else (4,):
        _save(work, f"{step}, then epoch {epoch}", store, ledger, epoch, 2, room=True)
    ledger.sweep(step)
    shutil.rmtree(folder)


# ---- file systems that are too small ---------------------------------------------------------------------------


def on_tmpfs(work: Work) -> None:
    """``size`` file systems, chosen by dice; 0: all of them."""
    reason = no_mounts(work.folder)
    if reason is not None:
        work.note(f"small file systems left out, because {reason}")
        return
    options = [f"size={size},nr_inodes=4000" for size in (*range(STEP, LARGEST, STEP), *WIDE)]
    options += [f"size=16m,nr_inodes={number}" for number in INODES]
    if work.size:
        options = work.dice("tmpfs").sample(options, min(work.size, len(options)))
    for option in options:
        with tmpfs(work.folder, option) as folder:
            _fill(work, f"tmpfs {option}", folder)
        work.done()
        if work.enough:
            return


def _fill(work: Work, step: str, folder: Path) -> None:
    store = LocalStore(folder / "repo")
    ledger = Ledger(work, store, KEEP)
    for version in (1, 2):
        if version == 2:
            _remount(folder, ROOMY)
        for epoch in range(1, EPOCHS + 1):
            number = epoch + (version - 1) * EPOCHS
            full = not _save(work, f"{step}, epoch {number}", store, ledger, number, version, room=version == 2)
            work.count(faults=int(full))
    ledger.sweep(step)
    if sorted(ledger.done)[-1:] != [2 * EPOCHS]:
        work.blame("other", step, "there is room again, and nothing can be saved")


def _save(
    work: Work, step: str, store: LocalStore, ledger: Ledger, epoch: int, version: int, *, room: bool, look: bool = True
) -> bool:
    """Save, and look; whether it was saved. A full disk must be told as such, and only where there is no ``room``."""
    work.count(attempts=1)
    ledger.begun.add((epoch, version))
    try:
        repo = Repository(store, chunk_size=CHUNK, keep=KeepLast(KEEP))
        repo.save(epoch, content(epoch, version), {"version": version})
    except StoreFullError as error:
        ledger.refuse(type(error).__name__)
        if room:
            work.blame("other", step, f"there is room, and still: {error!r}")
    except CkptStoreError as error:
        ledger.refuse(type(error).__name__)
        work.blame("other", step, f"a full disk is told as {error!r}")
    except Exception as error:  # noqa: BLE001 (that is the question)
        work.blame("untyped", step, repr(error))
    else:
        ledger.commit(epoch, version)
    if look:
        ledger.look(step)
    return ledger.done.get(epoch) == version


def no_mounts(folder: Path) -> str | None:
    """Why no file system can be mounted here, or None."""
    if sys.platform != "linux":
        return "only Linux has tmpfs"
    try:
        with tmpfs(folder, "size=64k"):
            return None
    except (OSError, subprocess.CalledProcessError):
        return "mounting needs root"


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory, as small as its options say."""
    if shutil.which("mount") is None:
        raise OSError("no mount here")
    place = Path(tempfile.mkdtemp(prefix="tmpfs-", dir=folder))
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "ckptstore", place], check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True, capture_output=True)
        place.rmdir()


def _remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True, capture_output=True)
