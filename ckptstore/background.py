"""Background saves: one at a time for each repository, and none that is lost in silence.

The trainer stands still while its state is copied into the arena (``staging``); a thread does the rest. What becomes of
it is told by a :class:`SaveHandle`. An error that nobody fetched from there is raised by the next save and by
``close``, and at the latest the interpreter says it when it exits.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal

from ckptstore import exiting, patience
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    BusyError,
    CkptStoreError,
    DeadlineError,
    InvalidArgumentError,
    TransactionError,
)
from ckptstore.options import WhenBusy, bytes_of
from ckptstore.staging import Arena, Staged
from ckptstore.transaction import Transaction
from ckptstore.tree import FlatState

log = logging.getLogger("ckptstore")

Moment = Literal["staged", "uploaded", "committed", "done"]
Stage = Literal["staging", "staged", "uploaded", "committed", "failed", "skipped"]
Told = Callable[[], None]
Flatten = Callable[[], dict[str, FlatState]]
Begin = Callable[[int, Told], Transaction]  # given the bytes of all arrays, and what to call after the commit
Attempt = Callable[[Begin], Checkpoint]
# Sees a save through: given the copied state and one attempt. An error in place of a checkpoint was forgiven.
Save = Callable[[dict[str, FlatState], Attempt], Checkpoint | Exception]

_MOMENTS = ("staged", "uploaded", "committed", "done")


class SaveHandle:
    """A save that goes on in the background; made by ``Repository.save_async``. Any thread may ask it.

    Attributes:
        epoch: the epoch that it saves.
        url: where to.
        exit_timeout: seconds that the exit of the interpreter waits for it.
        seconds: when each moment was reached, in seconds since ``save_async`` was called: "staged" (the state is
            copied: change it as you like), "uploaded" (all its bytes are on the store), "committed" (the checkpoint
            exists, durably) and "done" (pruning is through as well, nothing runs any more).
        forgiven: whether it has failed and the run goes on (``on_error="warn"``): ``exception()`` tells why.
    """

    def __init__(self, epoch: int, url: str, exit_timeout: float) -> None:
        self.epoch = epoch
        self.url = url
        self.seconds: dict[str, float] = {}
        self.exit_timeout = exit_timeout
        self.forgiven = False
        self._begun = time.monotonic()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._boxes: list[SimpleQueue[None]] = []  # of those who wait
        self._stage: Stage = "staging"
        self._go = threading.Event()
        self._started = False
        self._ended = False
        self._heard = False
        self._checkpoint: Checkpoint | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<SaveHandle of epoch {self.epoch}, {self.stage}, {self.url}>"

    @property
    def stage(self) -> Stage:
        """How far it is: "staged", "uploaded", "committed"; or "failed", or "skipped"."""
        return self._stage

    @property
    def skipped(self) -> bool:
        """Whether nothing was saved because an earlier save was still in flight (``when_busy="skip"``)."""
        return self._stage == "skipped"

    def done(self) -> bool:
        """Whether it has ended: done, failed or skipped."""
        return self._ended

    def wait(self, timeout: float | None = None, *, until: Moment = "done") -> bool:
        """Wait for a moment. Raises no error of the save: ask ``result`` or ``exception``.

        Returns:
            Whether the moment was reached. For "done": whether the save has ended, also by an error; for the others
            False as well when a failed save will never reach it.
        """
        if until not in _MOMENTS:
            raise InvalidArgumentError(f"until must be one of {_MOMENTS}, not {until!r}")
        if not self._ended and until not in self.seconds:
            if os.getpid() != self._pid:
                raise TransactionError(
                    f"the save of epoch {self.epoch} runs in process {self._pid}: ask there", epoch=self.epoch
                )
            self._wait(until, timeout)
        return self._ended if until == "done" else until in self.seconds

    def result(self, timeout: float | None = None) -> Checkpoint | Any:
        """Wait until it is done; the committed checkpoint, or None if it failed and was ``forgiven``.

        Raises:
            DeadlineError: not done after ``timeout`` seconds. It goes on; ask again.
            BusyError: it was skipped.
            Exception: what the save itself has raised, every time you ask.
        """
        error = self.exception(timeout)
        if error is not None and not self.forgiven:
            raise error
        return self._checkpoint

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until it is done; its error, or None. From then on it counts as heard, and is raised nowhere else.

        Raises:
            DeadlineError: not done after ``timeout`` seconds.
        """
        if not _wait_for(self, timeout):
            raise DeadlineError(
                f"the background save of epoch {self.epoch} to {self.url} is not done after {timeout:g} seconds "
                f"({self.stage}): it goes on, ask again",
                epoch=self.epoch,
            )
        self._hear()
        return self._error

    # ---- inside --------------------------------------------------------------------------------------------

    def _wait(self, until: Moment, timeout: float | None) -> None:
        """Without a lock: the save must not wait for one that an interrupted caller never gave back."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        box: SimpleQueue[None] = SimpleQueue()
        self._boxes.append(box)
        try:
            while not self._ended and until not in self.seconds and (left := end - time.monotonic()) > 0:
                with suppress(Empty):
                    box.get(timeout=min(left, patience.TICK_SECONDS))
        finally:
            self._boxes.remove(box)

    def _tell(self) -> None:
        for box in list(self._boxes):
            box.put(None)

    def _reach(self, moment: Moment) -> None:
        with self._lock:
            self.seconds[moment] = time.monotonic() - self._begun
            if moment != "done":
                self._stage = moment
            self._tell()

    def _start(self) -> bool:
        """For the thread: whether it may begin, once ``save_async`` returns. False if the start was taken back."""
        self._go.wait()
        with self._lock:
            self._started = True
            return not self._ended

    def _take_back(self, error: BaseException) -> None:
        """The start of the thread failed or was interrupted: end the save, unless it is running all the same."""
        with self._lock:
            running = self._started
            if not running:
                self._heard, self._error, self._stage, self._ended = True, error, "failed", True
        if not running:
            exiting.forget(self)

    def _skip(self, running: SaveHandle) -> SaveHandle:
        self._error, self._stage, self._heard, self._ended = _busy(self.epoch, running), "skipped", True, True
        return self

    def _finish(self, outcome: Checkpoint | Exception) -> None:
        with self._lock:
            if isinstance(outcome, Checkpoint):
                self._checkpoint = outcome
            else:  # the log has it, and the run goes on
                self._error, self._stage, self._heard = outcome, "failed", True
                self.forgiven = True
            self._ended = True
            self._reach_done()
        exiting.forget(self)

    def _fail(self, error: BaseException) -> None:
        with suppress(BaseException):  # a log handler that fails must not keep anybody waiting for the end
            _explain(error, self.epoch, self.url)
            log.error("%s: %s", type(error).__name__, error)
        with self._lock:
            self._error = error
            self._stage = "failed"
            self._ended = True
            self._reach_done()

    def _reach_done(self) -> None:
        self.seconds["done"] = time.monotonic() - self._begun
        self._tell()

    def _hear(self) -> None:
        self._heard = True
        exiting.forget(self)

    @property
    def unheard(self) -> BaseException | None:
        """The error, as long as nobody has heard of it."""
        return None if self._heard else self._error

    def _surface(self) -> None:
        """Raise the error if nobody has heard of it, once."""
        error = self.unheard
        if error is not None:
            self._hear()
            raise error


class Background:
    """The background saves of one repository: one at a time, through one arena."""

    def __init__(self, url: str, exit_timeout: float) -> None:
        self._url = url
        self._exit_timeout = exit_timeout
        self._begin_process()

    def _begin_process(self) -> None:
        self._pid = os.getpid()
        self._turn = threading.Condition()
        self._staging: tuple[SaveHandle, int] | None = None  # whose state is being copied, and by which thread
        self._current: SaveHandle | None = None
        self.arena = Arena()

    def _begin_process_after_fork(self) -> None:
        """In a forked child nothing is in flight: what its parent does is none of its business."""
        if os.getpid() != self._pid:
            self._begin_process()

    def save(self, epoch: int, flatten: Flatten, save: Save, when_busy: WhenBusy) -> SaveHandle:
        """Copy what ``flatten`` gives, and ``save`` the copy in the background."""
        handle = SaveHandle(epoch, self._url, self._exit_timeout)
        try:
            running = self._take_turn(handle, wait=when_busy == "wait")
            if running is not None:
                if when_busy == "skip":
                    return handle._skip(running)
                raise _busy(epoch, running)
            self.surface()
            staged = self.arena.stage(flatten())
            handle._reach("staged")
            self._launch(handle, staged, save)
        finally:  # by identity: an interrupt may come before it is known whether we have the turn
            with self._turn:
                if self._staging is not None and self._staging[0] is handle:
                    self._staging = None
                    self._turn.notify_all()
        return handle

    @property
    def in_flight(self) -> SaveHandle | None:
        """The save whose state is being copied, or that is being written; none in a forked child."""
        if os.getpid() != self._pid:
            return None
        staging, current = self._staging, self._current
        if staging is not None:
            return staging[0]
        return current if current is not None and not current.done() else None

    def settle(self) -> None:
        """Wait for the save in flight, and raise its error if nobody has heard of it."""
        self._begin_process_after_fork()
        if self._current is not None:
            _wait_for(self._current)
        self.surface()

    def close(self) -> None:
        """Wait for the save in flight, and give the arena back.

        Raises:
            DeadlineError: it was still in flight after the exit timeout. Nothing was given back; the exit of the
                interpreter will not wait for it again.
        """
        handle = self._current if os.getpid() == self._pid else None
        if handle is not None and not _wait_for(handle, self._exit_timeout):
            handle.exit_timeout = 0.0
            raise DeadlineError(
                f"the background save of epoch {handle.epoch} to {self._url} did not end within "
                f"{self._exit_timeout:g} seconds ({handle.stage}): the repository stays open",
                epoch=handle.epoch,
            )
        self.arena.release()

    def surface(self) -> None:
        """Raise the error of the last save if nobody has heard of it."""
        if self._current is not None and os.getpid() == self._pid:
            self._current._surface()

    def _take_turn(self, handle: SaveHandle, *, wait: bool) -> SaveHandle | None:
        """Take the turn when nothing is in flight; else (unless ``wait``) what is."""
        self._begin_process_after_fork()
        while True:
            with self._turn:
                if self._staging is None:
                    running = self._current
                    if running is None or running.done():
                        self._staging = handle, threading.get_ident()
                        return None
                else:
                    other, thread = self._staging
                    if not wait:
                        return other
                    if thread == threading.get_ident():  # a signal handler: it would wait for itself
                        raise _busy(handle.epoch, other)
                    self._turn.wait(patience.TICK_SECONDS)
                    continue
            if not wait:
                return running
            _wait_for(running)

    def _launch(self, handle: SaveHandle, staged: Staged, save: Save) -> None:
        thread = threading.Thread(target=_work, args=(handle, staged, save), name="ckptstore-save", daemon=True)
        try:
            if not exiting.remember(handle):
                raise TransactionError(
                    f"epoch {handle.epoch} was not saved: the interpreter is exiting, too late for a background save",
                    epoch=handle.epoch,
                )
            self._current = handle
            thread.start()
        except BaseException as error:
            handle._take_back(error)
            raise
        finally:
            handle._go.set()  # the last thing: from here on two threads want the interpreter lock


def _wait_for(handle: SaveHandle, timeout: float | None = None) -> bool:
    """``handle.wait``, but not on a thread that the save itself may be waiting for: a callback, a policy."""
    if not handle.done() and threading.current_thread().name.startswith("ckptstore-"):
        raise BusyError(
            f"the background save of epoch {handle.epoch} to {handle.url} is in flight: "
            "its own callbacks cannot wait for it",
            epoch=handle.epoch,
        )
    return handle.wait(timeout)


def _work(handle: SaveHandle, staged: Staged, save: Save) -> None:
    """What the thread does."""
    if not handle._start():
        return
    try:
        try:
            flats = staged.flats()
            outcome = save(flats, lambda begin: _attempt(handle, flats, begin))
        finally:
            staged.let_go()
    except BaseException as error:  # noqa: BLE001 (handed to whoever asks, whatever it is)
        handle._fail(error)
    else:
        handle._finish(outcome)


def _attempt(handle: SaveHandle, flats: dict[str, FlatState], begin: Begin) -> Checkpoint:
    with begin(bytes_of(flats), lambda: handle._reach("committed")) as txn:
        for name, flat in flats.items():
            txn.write_flat(name, flat)
        txn.settle()
        handle._reach("uploaded")
        checkpoint: Checkpoint = txn.commit()
    return checkpoint


def _busy(epoch: int, running: SaveHandle) -> BusyError:
    return BusyError(
        f"epoch {epoch} was not saved: the background save of epoch {running.epoch} to {running.url} is still in "
        'flight. Wait for it, or use when_busy="wait"',
        epoch=running.epoch,
    )


def _explain(error: BaseException, epoch: int, url: str) -> None:
    """Say in the error which save has failed, and let go of what its frames hold (chunks, views of the arena)."""
    text = f"the background save of epoch {epoch} to {url} failed"
    if isinstance(error, CkptStoreError):
        error.message = f"{text}: {error.message}"
        error.epoch = epoch if error.epoch is None else error.epoch
    elif hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
