"""Lives of a training run: real processes that end by a real SIGKILL in the middle of a save, and are started again.

Frameworks take seconds to import. So one process, the *nursery*, imports them once, and every life is a fork of it: a
later life has nothing of an earlier one but what that has saved.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptstore.stores.trace import StoreEvent

ROOT = Path(__file__).parents[2]
LIFE_SECONDS = 200
KILLED = -signal.SIGKILL


def killer(where: str, count: int) -> Callable[[StoreEvent], None]:
    """For ``on_request``: ends this process right after the ``count``-th put of a key that contains ``where``."""
    left, lock = [count], threading.Lock()

    def watch(event: StoreEvent) -> None:
        if event.verb == "put" and where in event.key:
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    return watch


class Nursery:
    """Runs functions of a module, ``module.function(**arguments)``, each in a fork of a process that imported it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def live(self, function: str, **arguments: Any) -> tuple[int, Any]:
        """``(exit code, what it returned)`` of one life; the code is negative for a signal, as of ``subprocess``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the nursery has died: see its output"
        code, value = json.loads(answer)
        return code, value


@contextmanager
def nursery(module: str, environment: Mapping[str, str] | None = None) -> Iterator[Nursery]:
    """A nursery for ``module``. What lives print goes to the output of the test."""
    ours = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.adapters.lives", module],
        cwd=ROOT,
        env={**os.environ, **ours, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Nursery(process)
        finally:
            process.kill()


def main(name: str) -> None:
    """The nursery: one life after the other, as the lines of the input say."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a framework prints is no answer
    module = importlib.import_module(name)
    assert threading.active_count() == 1, f"threads would stay behind in a fork: {threading.enumerate()}"
    for line in sys.stdin:
        function, arguments = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _live(module, function, arguments, write)
        os.close(write)
        with os.fdopen(read) as results:
            value = results.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers.write(json.dumps([code, json.loads(value) if value and code == 0 else value]) + "\n")
        answers.flush()


def _live(module: Any, function: str, arguments: dict[str, Any], write: int) -> None:
    signal.alarm(LIFE_SECONDS)
    code = 1
    try:
        with os.fdopen(write, "w") as result:
            try:
                result.write(json.dumps(getattr(module, function)(**arguments)))
                code = 0
            except BaseException:
                traceback.print_exc()
                result.write(traceback.format_exc()[-2000:])
                raise
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
