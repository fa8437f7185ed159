"""Campaign ``ranks``: SIGKILL of ranks that save one checkpoint together, on a folder and on S3.

Each life is a launch of two to five ranks that save epoch after epoch. At a random moment one of them is killed, two,
or all (as when the machine goes); now and then a second launch, of another size, saves the same epochs meanwhile. After
it every epoch that is visible must be that of one launch, whole and bit for bit; who was told "saved" must find its own
epoch, and who was told "failed" must not; and only the killed may be named as the reason.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import ckptstore
from ckptstore import CkptStoreError, EpochNotFoundError
from tests.ranks.helpers import whole
from tests.ranks.launches import Nursery, nursery, outcomes
from tests.repository.helpers import assert_no_debris, differences, open_repo
from tests.torture.work import Work

LANES = {"folder": 0.75, "s3": 0.25}
KEEP = 4
SWEEP_EVERY = 10
EPOCHS = 30  # of a launch that nobody stops
SECONDS = {"folder": 0.4, "s3": 1.0}  # in which the knife comes, after a rank has begun
TIMEOUT = 60.0

Kind = tuple[int, int]  # of a launch: ranks, and items in an array of each; what it saves is told by them


def run(work: Work) -> None:
    """Both lanes."""
    work.in_lanes(LANES, lane)


def lane(work: Work, kind: str, kills: int) -> None:
    """So many launches that are cut off, in one repository."""
    url, options = str(work.folder / kind), None
    if kind == "s3":
        bucket = work.s3()
        url, options = bucket.url(), bucket.storage_options
    with nursery(url, options, work.broken) as first, nursery(url, options, work.broken) as second:
        launches = Launches(work, kind, first, second)
        for number in range(kills):
            launches.life(number)
            work.done()
            if work.enough:
                return
            if number % SWEEP_EVERY == SWEEP_EVERY - 1:
                launches.sweep(f"{kind}/{number}")
        launches.sweep(f"{kind}/end")


class Launches:
    """The launches of a lane, and what was said in them."""

    def __init__(self, work: Work, kind: str, first: Nursery, second: Nursery) -> None:
        self._work = work
        self._lane = kind
        self._first = first
        self._second = second
        self._newest = 0
        self._kinds: set[Kind] = set()

    def life(self, number: int) -> None:
        """One launch until it is cut off, maybe beside another; then look."""
        dice = self._work.dice(self._lane, number)
        step = f"{self._lane}/{number}"
        ranks = dice.randint(2, 5)
        victims = self._victims(dice, ranks)
        begin = self._newest + 1
        others: dict[str, Any] = {"keep": KEEP, "timeout": TIMEOUT}
        kind = ranks, 2000 + dice.randrange(500)
        knife = Knife(dice, victims, begin + dice.randrange(3), SECONDS[self._lane])
        with ThreadPoolExecutor(1) as pool:
            rival = None
            if dice.random() < 0.2:
                other = dice.randint(2, 5), 3000 + dice.randrange(500)
                last = begin + 1
                facts = {"ranks": other[0], "items": other[1], "first": begin, "last": last, **others}
                rival = other, pool.submit(lambda: self._second.launch(**facts))
            facts = {"ranks": ranks, "items": kind[1], "first": begin, "last": begin + EPOCHS, **others}
            said = [(kind, self._first.launch(knife.hear, **facts), set(victims))]
            if rival is not None:
                said.append((rival[0], rival[1].result(), set()))
        self._kinds.update(one for one, _, _ in said)
        self._work.count(attempts=1, faults=len(knife.killed))
        self._work.note(f"{self._lane}: {'all' if len(victims) == ranks else len(victims)} of the ranks killed")
        if rival is not None:
            self._work.note(f"{self._lane}: two launches at once")
        self._compare(step, said)

    def _victims(self, dice: random.Random, ranks: int) -> list[int]:
        """The coordinator more often than others."""
        chance = dice.random()
        if chance < 0.15:
            return list(range(ranks))
        if chance < 0.4:
            return [0]
        return dice.sample(range(ranks), 1 if chance < 0.8 else min(2, ranks - 1))

    # ---- what was said, and what is there ------------------------------------------------------------------

    def _compare(self, step: str, said: list[tuple[Kind, list[dict[str, Any]], set[int]]]) -> None:
        """Every word of every rank, beside what there is."""
        there = self._look(step)
        if there is None:
            return
        told = {line["epoch"] for _, lines, _ in said for line in lines if "epoch" in line}
        for epoch in sorted(told):
            found = there.get(epoch)
            for kind, lines, victims in said:
                for rank, line in outcomes(lines, epoch).items():
                    self._word(f"{step}, epoch {epoch}, rank {rank} of {kind[0]}", line, kind, victims, found)
        self._newest = max([self._newest, *there])

    def _word(self, step: str, line: dict[str, Any], kind: Kind, victims: set[int], found: Kind | None) -> None:
        pruned = line["epoch"] + KEEP <= self._newest_there
        if line["event"] == "saved":
            self._work.count(committed=line["rank"] == 0)
            if found != kind and not (found is None and pruned):
                self._work.blame("lost", step, f"it was told that it is saved, and there is {found}")
            return
        self._work.count(refused=1)
        self._work.note(f"refused: {line['error']}")
        if found == kind and line["error"] not in ("OutcomeUnknownError", "EpochExistsError"):
            self._work.blame("phantom", step, f"it was told that it failed, and it is there: {line}")
        if not issubclass(getattr(ckptstore, line["error"], int), CkptStoreError):
            self._work.blame("untyped", step, str(line))
        if line["error"] == "RanksFailedError" and not set(map(int, line["ranks"])) <= victims:
            self._work.blame("other", step, f"killed were {sorted(victims)}, and it names {line['ranks']}")

    def _look(self, step: str) -> dict[int, Kind] | None:
        """Every epoch that is there, loaded and compared."""
        try:
            repo = open_repo(self._first.store)
            there = {epoch: kind for epoch in repo.epochs() if (kind := self._check(step, repo, epoch)) is not None}
            latest = repo.latest()
        except CkptStoreError as error:
            self._work.blame("other", step, f"the look failed: {error!r}")
            return None
        self._newest_there = max(there, default=0)
        if (latest.epoch if latest is not None else 0) != self._newest_there:
            self._work.blame("other", step, f"latest is {latest}, of {sorted(there)}")
        return there

    _newest_there = 0

    def _check(self, step: str, repo: ckptstore.Repository, epoch: int) -> Kind | None:
        try:
            state = repo.checkpoint(epoch).load()
        except CkptStoreError as error:
            if not (isinstance(error, EpochNotFoundError) and epoch not in repo.epochs()):
                self._work.blame("lost", step, f"epoch {epoch} is visible and does not load: {error!r}")
            return None
        kind = len(state), len(state["rank-0"]["w"]) if "rank-0" in state else 0
        wrong = list(differences(state, whole(epoch, kind[0], items=kind[1])))[:3]
        if wrong:
            self._work.blame("phantom", step, f"epoch {epoch} is no whole save of {kind[0]} ranks: {wrong}")
        elif kind not in self._kinds:
            self._work.blame("phantom", step, f"epoch {epoch} is of a launch that never was: {kind}")
        self._work.count(checked=1)
        return kind

    def sweep(self, step: str) -> None:
        """What the dead have left can be removed, and all epochs are as before."""
        try:
            open_repo(self._first.store).gc(grace=0)
            assert_no_debris(self._first.store)
        except (CkptStoreError, AssertionError) as error:
            self._work.blame("other", step, f"gc: {str(error)[:500]}")
        self._look(f"{step}, after gc")


class Knife:
    """Kills ranks a random moment after the first of them has begun an epoch."""

    def __init__(self, dice: random.Random, victims: Iterable[int], epoch: int, seconds: float) -> None:
        self._pids: dict[int, int] = {}
        self._victims = list(victims)
        self._epoch = epoch
        self._delays = [dice.uniform(0.0, seconds)] * len(self._victims)
        if dice.random() < 0.5:  # one after the other
            self._delays = [dice.uniform(0.0, seconds) for _ in self._victims]
        self._drawn = False
        self.killed: set[int] = set()

    def hear(self, line: dict[str, Any]) -> None:
        """What a rank has said."""
        if line["event"] == "ended" and line["code"] == -signal.SIGKILL:
            self.killed.add(line["rank"])
        if line["event"] != "begun":
            return
        self._pids[line["rank"]] = line["pid"]
        # Where a launch could not even save the epoch that was meant, it has ended before.
        if not self._drawn and line["epoch"] >= self._epoch and set(self._victims) <= self._pids.keys():
            self._drawn = True
            for rank, delay in zip(self._victims, self._delays, strict=True):
                timer = threading.Timer(delay, self._kill, (self._pids[rank],))
                timer.daemon = True
                timer.start()

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
