"""Errors from the kernel itself: each system call of a local save × each errno × each occurrence, by strace.

A save runs in a process of its own, which is warm: what it opens and writes then is the save's. strace is attached to
it before each save and detached after it, so that its counting (by thread) starts with the save, and the process is
told what to do through a socket, whose calls are never touched. ::

    counts = run_matrix(folder)                      # every case
    counts = run_matrix(folder, limit=50, seed=1)    # a sample
    print(counts)                                    # Counts(cases=.., hit=.., saved=.., typed={..}, lost=0)

A case is *lost* (and raises ``AssertionError``, unless ``strict`` is False) when the save says that it was done and the
epoch does not load bit for bit, when an earlier epoch does not, when an error is none of ckptstore's, or when the next
save fails. ``python tests/mounts/strace.py [LIMIT [SEED]]`` prints the counts.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import ckptstore

CALLS = (
    *("open", "openat", "openat2", "creat", "read", "pread64", "preadv", "preadv2", "write", "pwrite64", "fsync"),
    *("close", "link", "linkat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir"),
    *("stat", "lstat", "fstat", "newfstatat", "statx", "readlink", "getdents64", "statfs", "lseek", "flock", "dup"),
    *("fdatasync", "sync_file_range", "fallocate", "ftruncate", "fchmod", "copy_file_range", "access"),
)
"""Calls that concern files. Those that a save does not make have no cases."""

ERRORS = ("ENOSPC", "EIO", "ESTALE", "EINTR", "EDQUOT")

KEEP = 2

WORKER = """
import json, socket, sys, traceback
sys.path[:0] = json.loads(sys.argv[2])
import ckptstore
from tests.mounts.strace import KEEP, state

control = socket.socket(fileno=int(sys.argv[1]))
retry = ckptstore.RetryPolicy(attempts=5, base=0.001, cap=0.004, deadline=20)
while line := control.recv(4096):
    root, epoch = json.loads(line)
    answer = ["saved", True, ""]
    try:
        with ckptstore.open(root, keep=ckptstore.KeepLast(KEEP), retry=retry) as repo:
            repo.save(epoch, state(epoch))
    except BaseException as error:
        typed = isinstance(error, ckptstore.CkptStoreError)
        answer = [type(error).__name__, typed, "" if typed else traceback.format_exc()[-2000:]]
    control.send(json.dumps(answer).encode())
"""


def missing() -> str | None:
    """Why this cannot be done here, or None."""
    if sys.platform != "linux" or shutil.which("strace") is None:
        return "strace is not installed"
    with tempfile.TemporaryDirectory() as folder, Saver(Path(folder)) as saver:
        try:
            with saver.traced("trace=close"):
                pass
        except OSError as error:
            return f"strace is not allowed here: {error}"
    return None


def state(epoch: int) -> dict[str, Any]:
    """What epoch ``epoch`` holds; a part of it never changes, so that chunks are reused."""
    rng = np.random.default_rng(epoch)
    return {
        "model": {"new": rng.integers(0, 256, 200_000, "u1"), "epoch": epoch},
        "optimizer": {"old": np.arange(100_000), "step": np.float32(epoch)},
    }


@dataclass
class Counts:
    """What came out: cases tried, of them those where a fault was met, saved all the same, or refused, by type."""

    cases: int = 0
    hit: int = 0
    saved: int = 0
    typed: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    problems: list[str] = field(default_factory=list)


class Saver:
    """A process that saves when it is told to."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "strace.log"
        self._control, other = socket.socketpair()
        self._control.settimeout(120)
        here = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(other.fileno()), json.dumps([here])],
            pass_fds=[other.fileno()],
            stderr=subprocess.DEVNULL,
        )
        other.close()

    def save(self, root: Path, epoch: int) -> tuple[str, bool]:
        """Type of the outcome, and whether it is one of ckptstore's."""
        self._control.send(json.dumps([str(root), epoch]).encode())
        answer = self._control.recv(65536)
        if not answer:
            raise OSError(f"the saving process ended with status {self._process.wait()}")
        name, typed, message = json.loads(answer)
        return (name, typed) if typed else (f"{name}: {message}", typed)

    @contextmanager
    def traced(self, *expressions: str) -> Iterator[None]:
        """strace watches the process, as its ``-e`` say; what it saw is in ``seen`` afterwards."""
        command = ["strace", "-f", "-o", str(self._log), "-p", str(self._process.pid)]
        for expression in expressions:
            command += ["-e", expression]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        try:
            said = tracer.stderr.readline()
            if "attached" not in said:
                raise OSError(said.strip() or "strace ended")
            yield
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.communicate(timeout=60)

    def seen(self) -> Counter[str]:
        """Calls of the last trace, most of one thread, and under "injected" how many of all failed on purpose."""
        counts: Counter[tuple[str, str]] = Counter()
        injected = 0
        for line in self._log.read_text(errors="replace").splitlines():
            if match := re.match(r"(\d+) +(\w+)\(", line):
                counts[match[2], match[1]] += 1
            injected += "(INJECTED" in line
        most: Counter[str] = Counter(injected=injected)
        for (call, _), number in counts.items():
            most[call] = max(most[call], number)
        return most

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


def run_matrix(folder: Path, limit: int | None = None, seed: int = 0, *, strict: bool = True) -> Counts:
    """Save under each fault, and look what is there.

    Args:
        folder: an empty folder.
        limit: how many cases, drawn by ``seed``; by default all of them.
        strict: raise at the first case that is lost.
    """
    root, counts = folder / "run", Counts()
    with Saver(folder) as saver:
        for epoch in range(1, KEEP + 2):  # the last of them prunes
            assert saver.save(root, epoch) == ("saved", True)
        cases = _cases(saver, root, KEEP + 2)
        if limit is not None:
            cases = random.Random(seed).sample(cases, min(limit, len(cases)))
        epoch = KEEP + 2
        for call, error, occurrence in cases:
            counts.cases += 1
            epoch += 1
            problem = _case(saver, root, epoch, f"{call}:error={error}:when={occurrence}", counts)
            if problem:
                counts.lost += 1
                counts.problems.append(f"{call} {error} {occurrence}: {problem}")
                assert not strict, counts.problems[-1]
            if counts.cases % 100 == 0:
                with ckptstore.open(root) as repo:
                    repo.gc(grace=0)
    return counts


def _cases(saver: Saver, root: Path, epoch: int) -> list[tuple[str, str, int]]:
    known = ",".join(f"?{call}" for call in CALLS)
    with saver.traced(f"trace={known}"):
        outcome = saver.save(root, epoch)
    assert outcome == ("saved", True), outcome
    seen = saver.seen()
    return [
        (call, error, occurrence)
        for call in CALLS
        for error in ERRORS
        for occurrence in range(1, seen[call] + 1)
    ]  # fmt: skip


def _case(saver: Saver, root: Path, epoch: int, fault: str, counts: Counts) -> str | None:
    """One save under one fault, and what is wrong afterwards, if anything is."""
    with ckptstore.open(root, create=False) as repo:
        before = repo.epochs()
    with saver.traced(f"trace={fault.partition(':')[0]}", f"inject={fault}"):
        name, typed = saver.save(root, epoch)
    counts.hit += saver.seen()["injected"] > 0
    counts.saved += name == "saved"
    if name != "saved":
        counts.typed[name] += 1
    if not typed:
        return f"an error that is none of ours: {name}"
    with ckptstore.open(root, create=False) as repo:
        after = repo.epochs()
        if name == "saved" and epoch not in after:
            return "it said that it was saved, and it is not there"
        # A full disk may have made room by what the policy drops, left from a pruning that failed.
        lost = set(before[-(KEEP - 1) :] if epoch in after else before[-KEEP:]) - set(after)
        if lost:
            return f"epochs {lost} are gone ({name})"
        for number in after:
            if not _same(repo.checkpoint(number).load(), state(number)):
                return f"epoch {number} is another one ({name})"
    if name != "saved":
        again = saver.save(root, epoch) if epoch not in after else ("saved", True)
        if again != ("saved", True):
            return f"after {name} the next save failed: {again}"
    return None


def _same(loaded: dict[str, Any], expected: dict[str, Any]) -> bool:
    return loaded.keys() == expected.keys() and all(
        loaded[name].keys() == record.keys() and all(np.array_equal(loaded[name][key], record[key]) for key in record)
        for name, record in expected.items()
    )


def main() -> None:
    """Print the counts of the matrix, or of a sample."""
    limit, seed = (*(int(argument) for argument in sys.argv[1:]), None, 0)[:2]
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        counts = run_matrix(Path(folder), limit, seed or 0, strict=False)
    print(*counts.problems, sep="\n")
    print(f"cases: {counts.cases}, with a fault: {counts.hit}, saved all the same: {counts.saved}, ", end="")
    print(f"refused: {dict(counts.typed)}, lost: {counts.lost}")
    sys.exit(counts.lost > 0)


if __name__ == "__main__":
    main()
