"""Eight real processes save one checkpoint, and any one of them is really killed; on a folder and on S3."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Count
from tests.ranks.helpers import whole
from tests.ranks.launches import RANKS, Nursery, nursery, outcomes
from tests.repository.helpers import assert_no_debris, assert_same, open_repo

KILLS = int(os.environ.get("CKPTSTORE_RANK_KILLS", "6"))
SEED = int(os.environ.get("CKPTSTORE_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
S3 = pytest.param("s3", marks=pytest.mark.s3)

pytestmark = [pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(params=["folder", S3])
def place(request: pytest.FixtureRequest, fast_folder: Path) -> Iterator[Nursery]:
    if request.param == "s3":
        bucket = request.getfixturevalue("s3")
        url, options = bucket.url(), bucket.storage_options
    else:
        url, options = str(fast_folder / "repo"), None
    with nursery(url, options) as made:
        yield made


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


def test_two_launches_of_one_size_at_once(place: Nursery) -> None:
    """One of them saves the epoch; all ranks of the other hear that it exists, and nothing else."""
    with nursery(place.url, place.options) as second, ThreadPoolExecutor(1) as pool:
        for epoch in range(1, 4):
            rival = pool.submit(second.launch, ranks=2, items=3000, first=epoch, last=epoch)
            said = [outcomes(place.launch(ranks=2, items=2000, first=epoch, last=epoch), epoch)]
            said.append(outcomes(rival.result(), epoch))
            words = sorted(tuple(line.get("error", line["event"]) for line in one.values()) for one in said)
            assert words == [("EpochExistsError",) * 2, ("saved",) * 2]
            won = {line["event"] for line in said[0].values()} == {"saved"}
            state = open_repo(place.store).checkpoint(epoch).load()
            assert_same(state, whole(epoch, 2, items=2000 if won else 3000))
