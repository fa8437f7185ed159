"""Eight real processes save one checkpoint, and any one of them is really killed; on a folder and on S3."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptstore.stores import open_store
from ckptstore.stores.base import Store
from tests.conftest import Count
from tests.ranks.helpers import whole
from tests.repository.helpers import assert_no_debris, assert_same, open_repo

ROOT = Path(__file__).parents[2]
RANKS = 8
ITEMS = 30_000  # numbers in each of the two arrays of a rank
KILLS = int(os.environ.get("CKPTSTORE_RANK_KILLS", "6"))
SEED = int(os.environ.get("CKPTSTORE_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
S3 = pytest.param("s3", marks=pytest.mark.s3)

pytestmark = [pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Nursery:
    """Starts ranks, and hears what they say."""

    process: subprocess.Popen[str]
    url: str
    options: dict[str, Any] | None
    launches: int = 0
    said: list[dict[str, Any]] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return open_store(self.url, storage_options=self.options)

    def launch(self, on_line: Callable[[dict[str, Any]], None] = lambda line: None, **job: Any) -> list[dict[str, Any]]:
        """Run a job to its end; all that its ranks have said."""
        self.launches += 1
        facts = {"url": self.url, "options": self.options, "ranks": RANKS, "items": ITEMS, "timeout": 60.0}
        job = {**facts, "group": f"launch {self.launches}", **job}
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
def nursery(url: str, options: dict[str, Any] | None) -> Iterator[Nursery]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.nursery"],
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


@pytest.fixture(params=["folder", S3])
def place(request: pytest.FixtureRequest, fast_folder: Path) -> Iterator[Nursery]:
    if request.param == "s3":
        bucket = request.getfixturevalue("s3")
        url, options = bucket.url(), bucket.storage_options
    else:
        url, options = str(fast_folder / "repo"), None
    with nursery(url, options) as made:
        yield made


def outcomes(said: list[dict[str, Any]], epoch: int) -> dict[int, dict[str, Any]]:
    """What each rank was told of an epoch."""
    return {line["rank"]: line for line in said if line.get("epoch") == epoch and line["event"] in ("saved", "failed")}


def test_any_one_is_killed(place: Nursery, count: Count) -> None:
    """SIGKILL of one of eight at a random moment: whole or the old epoch, every survivor says so and names it."""
    dice = random.Random(SEED)
    kills = KILLS if place.options is None else max(1, KILLS // 6)
    place.launch(first=1, last=1)
    for number in range(kills):
        newest = place.epochs()[-1]
        victim = 0 if dice.random() < 0.3 else dice.randrange(RANKS)  # the coordinator more often than others
        seconds = dice.uniform(0.0, 0.5 if place.options is None else 1.0)

        def kill(line: dict[str, Any], victim: int = victim, seconds: float = seconds, newest: int = newest) -> None:
            if line["event"] == "begun" and line["rank"] == victim and line["epoch"] == newest + 1:
                timer = threading.Timer(seconds, os.kill, (line["pid"], signal.SIGKILL))
                timer.daemon = True
                timer.start()

        said = place.launch(kill, first=newest + 1, last=newest + 30)
        ended = {line["rank"]: line["code"] for line in said if line["event"] == "ended"}
        assert ended == {**dict.fromkeys(range(RANKS), 0), victim: -signal.SIGKILL}, (SEED, number)
        last = max(line["epoch"] for line in said if "epoch" in line)
        there = place.epochs()
        for epoch in range(newest + 1, last + 1):
            for rank, line in outcomes(said, epoch).items():
                assert (line["event"] == "saved") == (epoch in there), (SEED, number, epoch, rank, line)
                if line["event"] == "failed":
                    assert line["error"] == "RanksFailedError", (SEED, number, line)
                    assert list(line["ranks"]) == [str(victim)], (SEED, number, line)
        assert outcomes(said, last).keys() >= set(range(RANKS)) - {victim}
        place.check()
    assert place.launch(first=place.epochs()[-1] + 1, last=place.epochs()[-1] + 1)
    open_repo(place.store).gc(grace=0)
    assert_no_debris(place.store)
    count(f"kills of one of {RANKS} ranks", kills)


def test_late_failing_and_retried(place: Nursery) -> None:
    """One is late and waited for; one fails, all hear it and the second try, in the same group, has all of them."""
    said = place.launch(first=1, last=1, late={"5": 1.0})
    assert {line["event"] for line in outcomes(said, 1).values()} == {"saved"}
    said = place.launch(first=2, last=2, fail={"3": 1}, tries=2)
    failed = {line["rank"]: line for line in said if line["event"] == "failed"}
    assert 3 in failed
    for rank, line in failed.items():  # the others too, unless rank 3 was back before anybody knew that it had failed
        assert line["try_"] == 1, line
        assert line["error"] == ("RuntimeError" if rank == 3 else "RanksFailedError"), line
        assert rank == 3 or list(line["ranks"]) == ["3"], line
    assert {line["event"] for line in outcomes(said, 2).values()} == {"saved"}
    assert place.epochs() == [1, 2]
    place.check()


@pytest.mark.parametrize("place", ["folder"], indirect=True)
def test_one_that_never_comes(place: Nursery) -> None:
    """Seven of eight are there: their time runs out, all name the one; the next launch saves the epoch."""
    said = place.launch(first=1, last=1, who=[0, 1, 2, 3, 4, 5, 7], timeout=1.0)
    assert {(line["error"], *line["ranks"]) for line in outcomes(said, 1).values()} == {("RanksFailedError", "6")}
    assert place.epochs() == []
    place.launch(first=1, last=1)
    assert place.epochs() == [1]
    place.check()
