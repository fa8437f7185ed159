"""The fresh process of one measurement: it does the work between two looks at clock, CPU and memory."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.samples import Job, Sample


class WrongBytesError(Exception):
    """A rival gave back other bytes than were saved: its times are worth nothing."""


@dataclass(frozen=True)
class Failure:
    """A measurement that ended with an error."""

    reason: str
    trace: str


@dataclass(frozen=True)
class Cost:
    """What some work took, and its result."""

    seconds: float
    cpu: float
    peak: int
    requests: int
    result: Any


class _Wire:
    """Counts the HTTP requests of s3fs's client, whoever uses it in this process."""

    def __init__(self) -> None:
        self.count = 0
        try:
            from aiobotocore.httpsession import AIOHTTPSession
        except ImportError:
            return
        send = AIOHTTPSession.send

        async def counted(session: Any, request: Any) -> Any:
            self.count += 1
            return await send(session, request)

        AIOHTTPSession.send = counted


_wire: _Wire | None = None


def run(pipe: Connection, job: Job) -> None:
    """The body of the process: one measurement, sent through ``pipe``."""
    from benchmarks.works import WORKS

    if job.place.remote:
        watch_wire()
    found: Sample | Failure | dict[str, Any]
    try:
        found = WORKS[job.work](job)
    except BaseException as error:  # noqa: BLE001 (whatever a rival raises is a finding)
        found = Failure(" ".join(f"{type(error).__name__}: {error}".split())[:300], traceback.format_exc())
    pipe.send(found)
    pipe.close()


def watch_wire() -> None:
    """Count requests from now on."""
    global _wire  # one process, one measurement
    _wire = _Wire()


def measured(work: Callable[[], Any]) -> Cost:
    """Do the work and measure it."""
    gc.collect()
    watch = _Peak()
    sent = _wire.count if _wire else 0
    cpu = cpu_seconds()
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    cpu = cpu_seconds() - cpu
    requests = (_wire.count if _wire else 0) - sent
    return Cost(seconds, cpu, watch.stop(), requests, result)


def cpu_seconds() -> float:
    """Of this process and of children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class _Peak:
    """The peak of resident memory above what there was at the start.

    Linux keeps it exactly, and lets us reset it; where that is refused, a thread looks every 2 ms.
    """

    def __init__(self) -> None:
        self._before = _status("VmRSS")
        self._seen = self._before
        self._thread: threading.Thread | None = None
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.002):
            self._seen = max(self._seen, _status("VmRSS"))

    def stop(self) -> int:
        """Bytes above the start."""
        if self._thread is None:
            return max(_status("VmHWM") - self._before, 0)
        self._stop.set()
        self._thread.join()
        return max(self._seen - self._before, 0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status: these benchmarks need Linux")


def drop_page_cache(folder: str) -> None:
    """Ask Linux to forget what it holds of these files, so that a restore reads from the disk."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)  # a page that is not on disk yet cannot be dropped
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
