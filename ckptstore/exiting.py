"""The exit of the interpreter: it waits for background saves, with a bound, and never loses one in silence.

When the interpreter exits, its thread pools refuse new work *before* ``atexit`` is called, so a save that is still in
flight could not go on by then. We therefore wait where the pools themselves are ended, right before them. A save that
is not through in its time, or has failed unheard, is named on stderr and makes the exit status 120, which Python itself
uses for errors while it cleans up.

If a save hangs, the process ends right there: the pool threads that it hangs in would be waited for without end.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 (its exit hook must be registered before ours: the last one runs first)
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, Protocol

from ckptstore.errors import CkptStoreError, OutcomeUnknownError

EXIT_STATUS = 120


class Save(Protocol):
    """What the exit needs to know of a background save."""

    epoch: int
    url: str
    exit_timeout: float

    @property
    def stage(self) -> str: ...
    @property
    def unheard(self) -> BaseException | None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Waiter(Protocol):
    """What is worth waiting for, and not lost if that was too short: it goes on in the next process."""

    def wait_at_exit(self) -> None:
        """Wait, with a bound, and say what is left."""


_waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
_open: dict[int, Save] = {}  # in flight, or failed and nobody has heard of it; by identity, oldest first
_lock = threading.Lock()
_begun = False


def remember(save: Save) -> bool:
    """The exit is to wait for it, or to say that it failed. False if the exit has begun: it is too late."""
    with _lock:
        if not _begun:
            _open[id(save)] = save
        return not _begun


def wait_for(waiter: Waiter) -> None:
    """The exit, after the saves, is to wait for it too, as long as somebody holds it."""
    _waiters.add(waiter)


def forget(save: Save) -> None:
    """It is done, or somebody has heard of its error."""
    with _lock:
        _open.pop(id(save), None)


def _forget_all() -> None:
    """A forked child has none of its parent's saves."""
    global _lock
    _lock = threading.Lock()
    _open.clear()
    _waiters.clear()


def _at_exit() -> None:
    """Wait for what is in flight; if something was lost, say so, and see that the exit status does too."""
    global _begun
    with _lock:
        _begun = True
        saves = list(_open.values())
    hanging = _wait_for(saves)
    for waiter in list(_waiters):
        with suppress(Exception, KeyboardInterrupt):  # the user's patience is up
            waiter.wait_at_exit()
    lost = [save for save in saves if save in hanging or save.unheard is not None]
    for save in lost:
        with suppress(Exception):  # closed, or a broken pipe: then the status alone has to tell
            sys.stderr.write(_last_words(save) + "\n")
    if hanging or (lost and _is_multiprocessing_child()):
        # A child of multiprocessing has cleaned up by now and leaves by os._exit anyway.
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(EXIT_STATUS)
    if lost:
        # Both: a handler may put its own in the place of one of them.
        sys.stdout, sys.stderr = _LastWord(sys.stdout), _LastWord(sys.stderr)
        others = sys.unraisablehook
        sys.unraisablehook = lambda error: None if isinstance(error.object, _LastWord) else others(error)


def _wait_for(saves: list[Save]) -> list[Save]:
    """Those that are still in flight when their time, or the user's patience, is up."""
    start = time.monotonic()
    try:
        for save in saves:
            save.wait(max(0.0, start + save.exit_timeout - time.monotonic()))
    except KeyboardInterrupt:
        pass
    return [save for save in saves if not save.done()]


def _last_words(save: Save) -> str:
    what = f"ckptstore: epoch {save.epoch} of {save.url}"
    error = save.unheard
    if isinstance(error, OutcomeUnknownError):
        return f"{what} may be lost: {error}"
    if error is not None:
        return f"{what} was lost: {type(error).__name__}: {error}"
    if save.stage == "committed":
        return f"{what} is saved, but what follows (pruning) had not ended when the interpreter had to exit"
    return f"{what} was lost: its background save ({save.stage}) had not ended when the interpreter had to exit"


def _is_multiprocessing_child() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


class _LastWord:
    """In place of stdout or stderr: it cannot be flushed at the very end, and so Python exits with status 120.

    Everything else of the exit takes its course, which it would not with ``os._exit``.
    """

    closed = False  # else nobody would try

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __repr__(self) -> str:
        return "<ckptstore.exiting>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        with suppress(Exception):
            self._stream.flush()
        if sys.is_finalizing():
            raise CkptStoreError("a background save was lost, see above")


def _register() -> None:
    # Private, but what concurrent.futures uses itself, in all versions from 3.9 on. Should it go away, atexit is too
    # late for a save in flight: it fails, and that is said.
    getattr(threading, "_register_atexit", atexit.register)(_at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_all)


_register()
