"""Work in stages over bounded threads with bounded bytes in flight (P6).

zstd, BLAKE3, NumPy copies and sockets all release the GIL, so plain threads overlap hashing, coding and I/O.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ckptstore.errors import InvalidArgumentError
from ckptstore.patience import TICK_SECONDS, Patience, current
from ckptstore.pool import Pool

WINDOW = 128 * 1024 * 1024
KEPT = WINDOW // 2
_SMALLEST_ROOM = 64 * 1024

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], None]


def cores() -> int:
    """Cores that this process may use (a container's limit, not the machine's size)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


Stage = tuple[Pool, Callable[[Any], Any]]


class Meter:
    """Counts bytes done, from any thread, and tells a progress callback ``(done, total)``."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        if progress is not None and not callable(progress):
            raise InvalidArgumentError(f"progress must be called with (bytes done, total), and {progress!r} cannot be")
        self._progress = progress
        self.total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self.total)


class Rooms:
    """Memory that is used again: the first touch of a page costs more than what is written into it. Thread-safe."""

    def __init__(self, keep: int = KEPT) -> None:
        """At most ``keep`` bytes are held for later."""
        self._lock = threading.Lock()
        self._keep = keep
        self._free: dict[int, list[memoryview]] = {}
        self._held = 0

    def take(self, nbytes: int) -> memoryview:
        """Writable room of at least ``nbytes`` bytes, with any content."""
        # Sizes in steps of a sixteenth, so that chunks of about one size share rooms.
        step = max(1 << max(nbytes - 1, 0).bit_length() >> 4, _SMALLEST_ROOM)
        size = max(-(-nbytes // step), 1) * step
        with self._lock:
            if self._free.get(size):
                self._held -= size
                return self._free[size].pop()
        return np.empty(size, np.uint8).data  # pages that nobody touches take no memory

    def give(self, room: memoryview) -> None:
        """Give back what ``take`` gave."""
        with self._lock:
            if self._held + len(room) > self._keep:
                self._free.clear()  # sizes come in runs: what is left of another one would only add up
                self._held = 0
            if len(room) <= self._keep:
                self._free.setdefault(len(room), []).append(room)
                self._held += len(room)


def side_by_side(threads: int, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The result of ``work`` for each item. An error or an interrupt ends the waits of all."""
    with Pipeline(threads, cpu=1) as pipeline, current().telling(pipeline.give_up):
        jobs = [pipeline.submit(0, (pipeline.io, partial(_given, work, item))) for item in items]
        pipeline.finish()
        return [job.result() for job in jobs]


def _given(work: Callable[[T], R], item: T, _: None) -> R:
    return work(item)


class _Step:
    """One stage of a job, on a thread of a pool. It ends once: with what it says, or when it is left behind."""

    def __init__(self, run: Callable[[], Any], end: Callable[[BaseException | None, Any], None]) -> None:
        self._run = run
        self._end = end
        self._ended: dict[str, object] = {}

    def __call__(self) -> None:
        result, error = None, None
        try:
            result = self._run()
        except BaseException as raised:  # noqa: BLE001 (handed to the thread that waits, whatever it is)
            error = raised
        self._say(error, result)
        del error  # it would hold this frame, and that the error

    def fail(self, error: Exception) -> None:
        self._say(error, None)

    def _say(self, error: BaseException | None, result: Any) -> None:
        word = object()
        if self._ended.setdefault("by", word) is word:
            self._end(error, result)


class Pipeline:
    """Runs jobs of several stages; ``cpu`` and ``io`` are the two pools a stage can name.

    The first error stops the intake and is raised by the next ``submit`` or by ``finish``. Leaving the
    context waits until no job runs any more, so that nothing writes after the caller went on.

    The caller's thread may be interrupted anywhere, also while it holds a lock of Python's own making (a condition, as
    in ``concurrent.futures.wait``), which it then never gives back. So it shares none with the jobs, only queues.
    """

    def __init__(self, io: int, *, cpu: int | None = None, window: int = WINDOW) -> None:
        self._patience = Patience()
        self.cpu = Pool(cpu or cores(), "ckptstore-cpu", self._patience)
        self.io = Pool(io, "ckptstore-io", self._patience)
        self._window = window
        self._in_flight = 0
        self._looked = 0.0
        self._jobs: dict[Future[Any], int] = {}
        self._ended: SimpleQueue[tuple[Future[Any], BaseException | None]] = SimpleQueue()
        self._staged: SimpleQueue[None] = SimpleQueue()  # an entry for each first stage that has ended
        self._waiting = 0  # first stages whose entry has not been taken
        self._stop = threading.Event()

    def submit(self, nbytes: int, *stages: Stage) -> Future[Any]:
        """Run ``stages`` one after the other, each given the result of the one before (the first: None).

        Blocks while more than the window's bytes are in flight. One job larger than the window runs alone.
        """
        while self._in_flight and self._in_flight + nbytes > self._window:
            self._reap()
        done: Future[Any] = Future()
        self._jobs[done] = nbytes
        self._in_flight += nbytes
        self._waiting += 1
        self._start(done, stages, None, first=True)
        return done

    def finish(self) -> None:
        """Wait for all jobs; raise the first error."""
        while self._jobs:
            self._reap()

    def _reap(self) -> None:
        """Wait until a job has ended; raise its error."""
        job, error = self._take(self._ended)
        self._in_flight -= self._jobs.pop(job)
        if error is not None:
            try:
                raise error
            finally:
                del error  # it would hold this frame, and that the error

    def wait_for_first_stages(self) -> None:
        """Wait until the first stage of every job has ended, well or not."""
        while self._waiting:
            self._take(self._staged)
            self._waiting -= 1

    def _take(self, box: SimpleQueue[T]) -> T:
        """The next entry, waited for in pieces; meanwhile threads that hang are left behind."""
        while True:
            if time.monotonic() - self._looked >= TICK_SECONDS:
                self.cpu.leave_behind()  # it looks up what the store has
                self.io.leave_behind()
                self._looked = time.monotonic()
            with suppress(Empty):
                return box.get(timeout=TICK_SECONDS)

    def _start(self, done: Future[Any], stages: tuple[Stage, ...], value: Any, *, first: bool = False) -> None:
        pool, stage = stages[0]

        def run() -> Any:
            if self._stop.is_set():
                raise CancelledError
            return stage(value)

        def end(error: BaseException | None, result: Any) -> None:
            if error is not None:
                done.set_exception(error)
                self._ended.put((done, error))
            elif stages[1:]:
                self._start(done, stages[1:], result)
            else:
                done.set_result(result)
                self._ended.put((done, None))
            if first:
                self._staged.put(None)

        pool.submit(_Step(run, end))

    def give_up(self) -> None:
        """Begin nothing any more, and end all waits for another attempt."""
        self._stop.set()
        self._patience.end()

    def close(self) -> None:
        """Stop the intake and wait until no job runs any more. Those that wait for another attempt give up."""
        self.give_up()
        # cpu first: its running jobs may still hand on to io, and the stop flag ends them there.
        self.cpu.close()
        self.io.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
