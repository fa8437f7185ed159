"""Preemption: a process that is told to end finishes the save in flight, or abandons it cleanly, in a bounded time.

The handler of the signal only wakes a thread and returns: the main thread may be in the middle of the very save that is
to be finished. When the saves in flight have ended, or the time is up, that thread sends the signal to the main
thread once more, and now the handler passes it on to whatever handled it before.

The thread is woken by ``signal.set_wakeup_fd`` as well, without the help of the main thread, which may be stuck: in a
system call on a mount that hangs, or in a collective. If it never comes back, and without us the signal would have
ended the process, the thread does that.

With ``last_save`` the thread first gives the training the time to come to a border between two steps and save there:
``due`` says so, and ``end`` ends the wait.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from ckptstore import patience
from ckptstore.errors import InvalidArgumentError
from ckptstore.options import check_flag
from ckptstore.repository import Repository

log = logging.getLogger("ckptstore")

GRACE = 30.0
MAX_GRACE = 24 * 3600.0
_POLL = 0.02
LAST_SECONDS = 5.0  # of the grace, at most a quarter, to abandon in what is not through
MOMENT_SECONDS = 1.0  # that the main thread has at least to end by itself

_handlers: weakref.WeakSet[Preemption] = weakref.WeakSet()


def on_preemption(
    *repos: Repository,
    grace: float = GRACE,
    signals: Sequence[int] = (signal.SIGTERM,),
    last_save: bool = False,
) -> Preemption:
    """When the process is told to end, let the saves in flight to ``repos`` end first. Then what was set before acts.

    A save that is in flight when the signal comes has ``grace`` seconds, less a quarter of them (at most five) in which
    it is abandoned if it is not through: the epochs before it are as they were, and the next save of its epoch, on any
    machine, sends only what is missing.
    Then the signal is passed on to the handler that was there before; by default it ends the process. More signals
    while that goes on change nothing: launchers forward the ones that their children got already.

    Args:
        repos: whose saves count; the main thread's, other threads' and those in the background.
        grace: seconds from the signal until it is passed on at the latest, 0 to a day. Keep it some seconds below what
            the scheduler grants before it kills.
        signals: which signals.
        last_save: the training goes on meanwhile and looks at ``due`` between two steps: then it saves once more, and
            says so by ``end``. What it has not saved when the time is up is abandoned, as above.

    Returns:
        A handle; as a context manager, or by ``close``, it puts the handlers back that were there before.

    Raises:
        InvalidArgumentError: an argument that makes no sense, or not called from the main thread.
    """
    if not repos or not all(isinstance(repo, Repository) for repo in repos):
        raise InvalidArgumentError("on_preemption needs one or more repositories")
    if type(grace) not in (int, float) or not 0 <= grace <= MAX_GRACE:
        raise InvalidArgumentError(f"grace must be 0 to {MAX_GRACE:.0f} seconds, not {grace!r}")
    if threading.current_thread() is not threading.main_thread():
        raise InvalidArgumentError("on_preemption must be called from the main thread: only that can handle signals")
    return Preemption(repos, float(grace), signals, check_flag("last_save", last_save))


class Preemption:
    """The handle of ``on_preemption``: as long as it is open, saves end before the process does."""

    def __init__(self, repos: Sequence[Repository], grace: float, signals: Sequence[int], last_save: bool) -> None:
        self._repos = repos
        self._grace = grace
        self._last_save = last_save
        self._through = threading.Event()  # not set: a last save is awaited
        self._through.set()
        self._requested = False
        self._closed = False
        self._due: int | None = None  # the signal that the handler is to pass on
        self._passed = threading.Event()
        self._ready = threading.Event()  # not set: the thread is at a signal, and more of them change nothing
        self._ready.set()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous: dict[int, Any] = {}
        try:
            for number in dict.fromkeys(signals):  # twice, and our own handler would be the one of before
                self._previous[int(number)] = signal.signal(number, self._on_signal)
            if not self._previous:
                raise ValueError("there are none")
        except (ValueError, OSError, TypeError) as error:
            self.close()
            os.close(self._read)
            raise InvalidArgumentError(f"signals {signals!r} cannot be handled: {error}") from error
        self._take_wakeup()
        _handlers.add(self)
        self._thread = threading.Thread(target=self._watch, name="ckptstore-preemption", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Preemption of {', '.join(repo.url for repo in self._repos)}>"

    @property
    def requested(self) -> bool:
        """Whether the process has been told to end."""
        return self._requested

    @property
    def due(self) -> bool:
        """Whether the process was told to end and waits for the last save (``last_save=True``)."""
        return not self._closed and not self._through.is_set()

    def end(self) -> None:
        """The last save is made, or under way in the background: pass the signal on as soon as nothing is in flight.

        By default that ends the process, right here. Returns when the handler that was there before has; at once if
        nothing is ``due``. A signal that comes from then on is a new one.
        """
        if self.due:
            self._through.set()
            while not self._closed and not self._ready.wait(patience.TICK_SECONDS):
                pass

    def close(self) -> None:
        """Put the handlers back that were there before, unless others have been set since. May be called twice.

        Raises:
            InvalidArgumentError: not called from the main thread.
        """
        if self._closed:
            return
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError("a Preemption must be closed in the main thread: only that can handle signals")
        self._closed = True  # from here on the handler passes everything on
        self._restore()
        self._through.set()
        os.close(self._write)  # ends the thread, which closes the other end
        self._passed.set()  # what is passed on from now on, the handlers of before get at once

    def __enter__(self) -> Preemption:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the main thread -----------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._closed:
            self._pass_on(number, frame)
        elif self._due == number:
            self._due = None
            self._passed.set()
            self._pass_on(number, frame)
        else:
            self._wake(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            time.sleep(MOMENT_SECONDS)  # it may reach another thread first
            raise SystemExit(128 + number)  # process 1 of a container is spared by the default

    def _wake(self, number: int) -> None:
        try:
            os.write(self._write, bytes([number]))
        except OSError:
            pass  # full of wake-up calls already

    def _take_wakeup(self) -> None:
        self._has_wakeup = False
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # somebody else's, asyncio's for one: then the handler alone has to wake us
            signal.set_wakeup_fd(before)
        else:
            self._has_wakeup = True

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        if getattr(self, "_has_wakeup", False):
            current = signal.set_wakeup_fd(-1)
            if current not in (self._write, -1):
                signal.set_wakeup_fd(current)

    def _in_child(self) -> None:
        """A forked child: the thread has stayed behind, and what is written to the pipe would reach the parent."""
        if not self._closed:
            self._closed = True
            self._restore()
            os.close(self._write)
            os.close(self._read)

    # ---- the thread ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while numbers := os.read(self._read, 4096):
                known = [number for number in numbers if number in self._previous]
                if known and not self._closed:
                    self._preempt(known[0])
        finally:
            os.close(self._read)

    def _preempt(self, number: int) -> None:
        end = time.monotonic() + self._grace
        last = end - min(self._grace / 4, LAST_SECONDS)
        self._passed.clear()
        self._ready.clear()
        if self._last_save:
            self._through.clear()
        self._requested = True
        log.warning("told to end by %s", signal.Signals(number).name)
        if not self._closed and not self._through.wait(last - time.monotonic()):
            log.warning("there was no time for a last save")
        self._through.set()
        self._finish_or_abandon(last, end)
        self._due = number
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)
        ends_us = not callable(self._previous[number]) and self._previous[number] != signal.SIG_IGN
        if not self._passed.wait(max(end - time.monotonic(), MOMENT_SECONDS) if ends_us else None):
            log.error("the main thread does not come back: ending the process")
            os._exit(128 + number)
        while select.select([self._read], [], [], 0)[0] and os.read(self._read, 4096):
            pass  # our own signal has written here too, and so have those of others meanwhile
        self._ready.set()

    def _finish_or_abandon(self, last: float, end: float) -> None:
        """Wait for what is in flight now; abandon what is not through in time, in what is left of it."""
        begun = [(repo, repo._flights.now()) for repo in self._repos]
        while (left := [repo for repo, flights in begun if flights & repo._flights.now()]) and time.monotonic() < last:
            time.sleep(_POLL)
        threads = [threading.Thread(target=_abandon, args=(repo,), daemon=True) for repo in left]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))


def _abandon(repo: Repository) -> None:
    log.warning("the save in flight to %s is abandoned: its time is up", repo.url)
    try:
        repo._flights.abandon()
    except Exception as error:  # noqa: BLE001 (whatever it is: the process is about to end)
        log.warning("abandoning it failed: %s", error)


def _after_fork_in_child() -> None:
    for preemption in list(_handlers):
        preemption._in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
