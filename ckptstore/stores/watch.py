"""WatchStore: a mount that hangs ends in DeadlineError, and the program goes on.

A read, write or fsync on a network mount whose server is away may never return, and nothing can end it from outside.
So each call runs on a thread that can be left behind when its time is over: the caller's own, where that is one of a
pipeline's (its owner then goes on without it), else a daemon thread of a small pool, for which the caller waits. The
hand-over costs a chunk its place in the core's cache. What is left behind

* **publishes nothing**: its patience has ended, and LocalStore asks before it gives an object its name. The caller's
  buffer may be in other use by then;
* **may still write into the room of a fetch**: whoever lent it must not use it again (``reader`` lets go of it);
* **is bounded**: while so many calls hang, others fail at once; while one hangs, others get a few seconds;
* **holds up no exit** of the interpreter, because the threads are daemons, and no forked child, which begins anew.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from ckptstore import patience
from ckptstore.errors import CkptStoreError, DeadlineError
from ckptstore.patience import GRACE_SECONDS, TICK_SECONDS, Expendable, Patience
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.space import Space

T = TypeVar("T")

SLOWEST = 256 * 1024.0
"""Bytes per second that a call may take besides its limit."""
WHOLE = 64 * 1024 * 1024
"""What a get of a whole object is reckoned as."""
LISTING_SECONDS = 3600.0
"""A listing may take longer than the limit as long as entries come; but no longer than this."""
QUICK_SECONDS = 10.0
"""The limit of further calls while one hangs: the rest of a save that is lost must not take as long again."""
MOST_HUNG = 8
"""While so many calls hang, others are not even begun: each keeps a thread, and a put its chunk (P6)."""
IDLE_SECONDS = 5.0
"""A thread without work ends after so many seconds."""


class _Job:
    """One call on its way."""

    __slots__ = (
        "_end",
        "_last",
        "_limit",
        "error",
        "key",
        "over",
        "patience",
        "reply",
        "result",
        "run",
        "touched",
        "verb",
    )

    def __init__(self, verb: str, key: str, run: Callable[[_Job], Any], limit: float) -> None:
        self.verb = verb
        self.key = key
        self._limit = limit
        self.run: Callable[[_Job], Any] | None = run
        self.patience = Patience()
        self.reply: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.result: Any = None
        self.error: BaseException | None = None
        self.over = False
        """Set when it returns after it was given up."""
        self.touched = time.monotonic()
        self._last = self.touched + max(limit, LISTING_SECONDS)
        self._end: dict[str, str] = {}

    @property
    def finished(self) -> bool:
        """Whether it has come to its end, and nobody had given it up before."""
        return self._end.get("by") == "return"

    @property
    def time_left(self) -> float:
        """Seconds until it has lasted too long."""
        return min(self.touched + self._limit, self._last) - time.monotonic()

    def end(self, by: str) -> bool:
        """Whether it ends by this, "return" or "abandoned": the first word counts, and may be said again.

        Without a lock, as all of this: a signal handler may call the store while its thread is right here.
        """
        return self._end.setdefault("by", by) == by

    def work(self) -> None:
        patience.adopt(self.patience)
        run, self.run = self.run, None  # what it holds is free as soon as it is done
        assert run is not None
        try:
            self.result = run(self)
        except BaseException as error:  # noqa: BLE001 (handed to the thread that waits, whatever it is)
            self.error = error

    def wake(self) -> None:
        self.reply.put(None)

    def outcome(self) -> Any:
        error, self.error = self.error, None
        result, self.result = self.result, None
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # or its frames, and the body of a put in them, would stay until the garbage collector runs


class _Pool:
    """Daemon threads that are used again."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.hung: set[_Job] = set()
        self._idle: list[queue.SimpleQueue[_Job | None]] = []

    def start(self, job: _Job) -> None:
        """Run it on a thread, or right here where the system gives no more threads."""
        try:
            box = self._idle.pop()
        except IndexError:
            box = queue.SimpleQueue()
            try:
                threading.Thread(target=self._serve, args=(box,), name="ckptstore-store", daemon=True).start()
            except RuntimeError:
                before = patience.current()
                job.work()
                patience.adopt(before)
                job.end("return")
                return
        box.put(job)

    def abandon(self, job: _Job) -> bool:
        """Nobody waits for it any more: it counts as hung. False if it has come to its end just now."""
        self.hung.add(job)  # first, so that its thread finds it there
        abandoned = job.end("abandoned")
        if job.over or not abandoned:
            self.hung.discard(job)
        return abandoned

    def returned(self, job: _Job) -> bool:
        """It has come to its end. False if it was given up before."""
        if job.end("return"):
            return True
        job.over = True  # first: others may be about to give it up once more
        self.hung.discard(job)
        return False

    def dismiss(self) -> None:
        """End the threads that have nothing to do."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().put(None)

    def _serve(self, box: queue.SimpleQueue[_Job | None]) -> None:
        while True:
            try:
                job = box.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                try:
                    self._idle.remove(box)
                except ValueError:
                    continue  # a job is on its way
                return
            if job is None:
                return
            job.work()
            self.returned(job)
            self._idle.append(box)  # before the answer, so that the next call finds this thread warm
            job.wake()
            del job


class WatchStore(Store):
    """Gives up a call of ``inner`` that has not returned after ``seconds`` and the time that its bytes may take."""

    def __init__(self, inner: Store, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self._pool = _Pool()

    @property
    def inner(self) -> Store:
        """The store that does the work."""
        return self._inner

    @property
    def hung(self) -> int:
        """How many calls were given up and have not returned yet."""
        return len(self._pool.hung)

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        nbytes = memoryview(data).nbytes
        self._call("put", key, lambda _: self._inner.put(key, data, if_absent=if_absent), nbytes)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        nbytes = WHOLE if end is None else end - start
        return self._call("get", key, lambda _: self._inner.get(key, start, end), nbytes)

    def fetch(self, key: str, start: int, end: int, room: memoryview) -> memoryview:
        return self._call("get", key, lambda _: self._inner.fetch(key, start, end, room), end - start)

    def info(self, key: str) -> ObjectInfo:
        return self._call("info", key, lambda _: self._inner.info(key))

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        def whole(job: _Job) -> tuple[ObjectInfo, ...]:
            found = []
            for info in self._inner.list(prefix, partial=partial):
                found.append(info)
                job.touched = time.monotonic()
            return tuple(found)

        return iter(self._call("list", prefix, whole))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda _: self._inner.delete(key))

    def space(self) -> Space | None:
        try:
            return self.watched("look for space", self._inner.space)
        except CkptStoreError:
            return None

    def close(self) -> None:
        if self._pool.pid == os.getpid():
            self._pool.dismiss()
        self.watched("close", self._inner.close)

    def watched(self, what: str, run: Callable[[], T]) -> T:
        """Run anything that touches the mount under the same watch. DeadlineError if it does not return."""
        return self._call(what, "", lambda _: run())

    def _call(self, verb: str, key: str, run: Callable[[_Job], T], nbytes: int = 0) -> T:
        mine = patience.current()
        mine.check(f"{verb} of {key!r}")
        if self._pool.pid != os.getpid():
            self._pool = _Pool()  # forked: the threads, and maybe the holder of the lock, stayed behind
        pool = self._pool
        limit = self._seconds + max(nbytes, 0) / SLOWEST
        if pool.hung:
            limit = min(limit, QUICK_SECONDS)
            if len(pool.hung) >= MOST_HUNG:
                raise self._hanging(verb, key, f"{len(pool.hung)} calls hang there already: it was not begun")
        job = _Job(verb, key, run, limit)
        thread = patience.expendable()
        if thread is not None and thread.given_up is None:
            self._run_here(thread, pool, job, mine)
        else:
            self._run_there(pool, job, mine)
        result: T = job.outcome()
        return result

    def _run_here(self, thread: Expendable, pool: _Pool, job: _Job, mine: Patience) -> None:
        """On this thread, whose owner asks now and then whether to go on without it."""

        def given_up() -> DeadlineError | None:
            over = job.time_left <= 0 or mine.ended_for > GRACE_SECONDS
            return self._give_up(pool, job) if over else None

        thread.given_up = given_up
        try:
            with mine.telling(job.patience.end):
                job.work()
        finally:
            thread.given_up = None
            patience.adopt(mine)
        if not pool.returned(job):
            thread.left = True
            raise self._overdue(job)

    def _run_there(self, pool: _Pool, job: _Job, mine: Patience) -> None:
        """On a thread of the pool, while this one waits."""
        pool.start(job)
        try:
            if not job.finished:
                with mine.telling(job.wake):
                    self._wait(job, mine)
        except BaseException:  # a Ctrl-C
            job.patience.end()
            _linger(job)
            pool.abandon(job)
            raise
        if not job.finished and (error := self._give_up(pool, job)) is not None:
            raise error

    def _give_up(self, pool: _Pool, job: _Job) -> DeadlineError | None:
        """Go on without it. None if it has come to its end just now."""
        if not pool.abandon(job):
            return None
        job.patience.end()
        return self._overdue(job)

    def _wait(self, job: _Job, mine: Patience) -> None:
        """Until it is finished, or its time or the patience of this thread is over."""
        while not job.finished:
            if mine.ended:
                job.patience.end()
                _linger(job)
                return
            left = job.time_left
            if left <= 0:
                return
            with suppress(queue.Empty):
                job.reply.get(timeout=min(left, TICK_SECONDS))

    def _overdue(self, job: _Job) -> DeadlineError:
        return self._hanging(job.verb, job.key, f"it has not returned after {time.monotonic() - job.touched:.0f} s")

    def _hanging(self, verb: str, key: str, why: str) -> DeadlineError:
        return DeadlineError(
            f"cannot {verb} {key!r} in {self._inner.traits.url}: the mount hangs, {why}; "
            "look at the server or network behind it, then try again",
            key=key or None,
        )


def _linger(job: _Job) -> None:
    """A call that is given up gets a moment to end by itself, so that nothing happens behind our back."""
    end = time.monotonic() + GRACE_SECONDS
    while not job.finished and (left := end - time.monotonic()) > 0:
        with suppress(queue.Empty):
            job.reply.get(timeout=left)
