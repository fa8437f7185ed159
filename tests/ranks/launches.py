"""The other end of ``nursery.py``: launches ranks as real processes, and hears what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore.stores import open_store
from ckptstore.stores.base import Store
from tests.ranks.helpers import whole
from tests.repository.helpers import assert_same, open_repo

ROOT = Path(__file__).parents[2]
RANKS = 8
ITEMS = 30_000  # numbers in each of the two arrays of a rank


@dataclass
class Nursery:
    """Starts ranks, and hears what they say."""

    process: subprocess.Popen[str]
    url: str
    options: dict[str, Any] | None
    launches: int = 0
    name: str = field(default_factory=lambda: uuid.uuid4().hex)  # of its launches: no other nursery's are called so
    said: list[dict[str, Any]] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return open_store(self.url, storage_options=self.options)

    def launch(self, on_line: Callable[[dict[str, Any]], None] = lambda line: None, **job: Any) -> list[dict[str, Any]]:
        """Run a job to its end; all that its ranks have said."""
        self.launches += 1
        facts = {"url": self.url, "options": self.options, "ranks": RANKS, "items": ITEMS, "timeout": 60.0}
        job = {**facts, "group": f"launch {self.launches} of {self.name}", **job}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        said: list[dict[str, Any]] = []
        while True:
            line = json.loads(self.process.stdout.readline() or '{"event": "all ended", "rank": "the nursery died"}')
            assert line.get("rank") != "the nursery died"
            if line["event"] == "all ended":
                return said
            said.append(line)
            on_line(line)

    def epochs(self) -> list[int]:
        return open_repo(self.store).epochs()

    def check(self, ranks: int = RANKS) -> None:
        """All epochs that are there are whole."""
        repo = open_repo(self.store)
        for epoch in repo.epochs():
            assert_same(repo.checkpoint(epoch).load(), whole(epoch, ranks, items=ITEMS))


@contextmanager
def nursery(url: str, options: dict[str, Any] | None, broken: str | None = None) -> Iterator[Nursery]:
    """Ranks for one repository; with ``broken`` in a deliberately broken order (``tests/torture/broken.py``)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.nursery", *([broken] if broken else [])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Nursery(process, url, options)
    finally:
        process.kill()
        process.communicate()


def outcomes(said: list[dict[str, Any]], epoch: int) -> dict[int, dict[str, Any]]:
    """What each rank was told of an epoch."""
    return {line["rank"]: line for line in said if line.get("epoch") == epoch and line["event"] in ("saved", "failed")}
