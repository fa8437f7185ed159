"""The other end of ``victim.py``: starts it, gives it orders, reads what its children say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]


class Nursery:
    """A process that forks trainers and racers on order. Use it as a context manager.

    Args:
        log: a file for what they write to standard error.
    """

    def __init__(self, log: Path, broken: str | None) -> None:
        self._log = log
        self._command = [sys.executable, "-m", "tests.torture.victim", *([broken] if broken else [])]

    def __enter__(self) -> Nursery:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=log, env=environment, cwd=ROOT, text=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if kind is not None:
            self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def order(self, **order: Any) -> None:
        """Have children forked; their lines follow, the last one is ``ended``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def read(self) -> list[str]:
        """The words of the next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the victims have died:\n{self._log.read_text(errors='replace')[-3000:]}")
        return line.split()
