"""What a command may expect of its process: streams that take every text, and an end that lets it clean up."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def streams() -> Iterator[None]:
    """Where a stream was closed by whoever started us, there is an empty one; where it is not UTF-8, signs that it
    lacks are escaped: what was done must not end in an error because it cannot be told."""
    before = sys.stdin, sys.stdout, sys.stderr
    opened: list[IO[str]] = []
    if None in before:
        _fill_low_descriptors()
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            opened.append(open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 (closed below)
            setattr(sys, name, opened[-1])
    errors = [(one, one.errors) for one in (sys.stdout, sys.stderr) if isinstance(one, io.TextIOWrapper)]
    try:
        for stream, strictness in errors:
            if strictness in ("strict", "surrogateescape"):  # the latter is what the locale C makes it
                stream.reconfigure(errors="backslashreplace")
        yield
    finally:
        for stream, strictness in errors:
            with suppress(OSError, ValueError):  # a pipe without a reader
                stream.reconfigure(errors=strictness)
        sys.stdin, sys.stdout, sys.stderr = before
        for one in opened:
            one.close()


def _fill_low_descriptors() -> None:
    """Or the next file that is opened, an object perhaps, gets the number that C code writes its complaints to."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


@contextmanager
def told_to_end() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: with everything that it has to tidy up. Yields those that came.

    More of them change nothing: ``timeout`` sends each twice.
    """
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            raise KeyboardInterrupt

    before: list[tuple[int, Any]] = []
    try:
        if threading.current_thread() is threading.main_thread():
            # Not what nohup, or a program around us, has set.
            ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            before += [(number, signal.signal(number, handle)) for number in ours]
        yield came
    finally:
        for number, handler in before:
            signal.signal(number, handler)
