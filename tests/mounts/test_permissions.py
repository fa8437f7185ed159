"""Who may read and write what: other users read what was saved, and an open that only reads writes nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckptstore

pytestmark = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="becoming another user needs root")

AUTHOR, COLLEAGUE, STRANGER, TEAM = 65501, 65502, 65503, 65510
PREAMBLE = f"""
import os, sys
import numpy as np
import ckptstore
from ckptstore.errors import AccessError

AUTHOR, COLLEAGUE, STRANGER, TEAM = {AUTHOR}, {COLLEAGUE}, {STRANGER}, {TEAM}
root = sys.argv[1]

def load():
    with ckptstore.open(root, create=False) as repo:
        latest = repo.latest()
        assert latest.load()["model"].sum() == 4950
        return latest.epoch

def save(epoch):
    with ckptstore.open(root) as repo:
        repo.save(epoch, {{"model": np.arange(100)}})

def refused(act, *arguments):
    try:
        act(*arguments)
    except AccessError as error:
        return error.errno
    raise SystemExit("it was not refused")

def become(user, group, umask=0o022):
    os.umask(umask)
    os.seteuid(0)
    os.setgroups([])
    os.setegid(group)
    os.seteuid(user)

# Python's own files may be out of reach for others: all that is imported late is imported now.
root, real = "memory://warm", root
save(1)
load()
root = real
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of the author that every user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="ckptstore-"))
    folder.chmod(0o755)
    os.chown(folder, AUTHOR, AUTHOR)
    yield folder
    shutil.rmtree(folder)


def run(root: Path, code: str) -> None:
    command = [sys.executable, "-c", PREAMBLE + code, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every path with its mode and time of change."""
    return {str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns) for path in [root, *root.rglob("*")]}


def test_colleagues_share_a_run(place: Path) -> None:
    """In a folder of a team what one saves the others load, and go on from; strangers only read."""
    root = place / "runs"
    root.mkdir()
    os.chown(root, AUTHOR, TEAM)
    root.chmod(0o2775)
    code = """
become(AUTHOR, TEAM, 0o002); save(1)
become(COLLEAGUE, TEAM, 0o002); assert load() == 1; save(2)
become(AUTHOR, TEAM, 0o002); assert load() == 2; save(3)
become(STRANGER, STRANGER); assert load() == 3; refused(save, 4)
"""
    run(root, code)
    for path in root.rglob("*"):
        assert (path.stat().st_gid, path.stat().st_mode & 0o7777) == (TEAM, 0o2775 if path.is_dir() else 0o664)


def test_a_private_run(place: Path) -> None:
    """What was saved under umask 077 is for its author alone: others hear that they may not, not that there is none."""
    code = """
become(AUTHOR, AUTHOR, 0o077); save(1)
become(COLLEAGUE, COLLEAGUE); assert refused(load) == 13
become(AUTHOR, AUTHOR); assert load() == 1
"""
    run(place / "run", code)
    assert {path.stat().st_mode & 0o077 for path in (place / "run").rglob("*")} == {0}


def test_the_umask_of_the_process_is_left_alone(place: Path) -> None:
    """While one thread saves, files that another makes have the modes that they always have."""
    code = """
import threading
modes, stop = set(), threading.Event()
def watch():
    number = 0
    while not stop.is_set():
        number += 1
        path = f"{root}-{number % 10}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
        modes.add(os.stat(path).st_mode & 0o777)
        os.unlink(path)
become(AUTHOR, AUTHOR, 0o027)
thread = threading.Thread(target=watch)
thread.start()
for epoch in range(5):
    save(epoch)
stop.set()
thread.join()
assert modes == {0o640}, modes
"""
    run(place / "run", code)


@pytest.mark.parametrize("mode", [0o555, 0o500])
def test_an_open_that_only_reads_writes_nothing(place: Path, mode: int) -> None:
    """A run in folders that may not be written loads; nothing is made or touched; a save is refused at once."""
    root = place / "run"
    with ckptstore.open(root) as repo:
        repo.save(1, {"model": np.arange(100)})
    for path in [root, *root.rglob("*")]:
        os.chown(path, AUTHOR, AUTHOR)
        path.chmod(mode if path.is_dir() else mode & 0o444)
    before = tree(root)
    code = "become(AUTHOR, AUTHOR); assert load() == 1; assert refused(save, 2) == 13; assert load() == 1\n"
    code += "become(STRANGER, STRANGER)\n"
    code += "assert load() == 1; assert refused(save, 2) == 13\n" if mode == 0o555 else "assert refused(load) == 13\n"
    run(root, code)
    assert tree(root) == before


def test_a_place_that_cannot_be_written_is_found_at_open(place: Path) -> None:
    """Not after an epoch of training: ``open`` makes the repository, and says when it cannot."""
    (place / "file").write_bytes(b"precious")
    code = """
become(STRANGER, STRANGER)
assert refused(ckptstore.open, root + "/run") == 13
assert refused(ckptstore.open, root + "/file") == 20
"""
    run(place, code)
    assert sorted(os.listdir(place)) == ["file"]
