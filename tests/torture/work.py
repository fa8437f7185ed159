"""What all campaigns share: the counters, and the work that a campaign is given."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tests.conftest import Bucket

Blame = Literal["lost", "phantom", "untyped", "other"]
ENOUGH = 10  # broken promises after which a campaign ends: the first ones tell the story


@dataclass
class Tally:
    """What a campaign counts. The last four must be 0 at the end.

    Attributes:
        attempts: what the campaign is counted in: kills, steps, saves, rounds, cases.
        faults: faults that really happened: a kill that hit, an error that was raised, a byte that was changed.
        committed: saves that reported success.
        refused: saves that ended in an error of ours.
        checked: epochs that were loaded and compared bit for bit.
        lost: epochs that were reported as committed and do not load bit for bit.
        phantom: epochs that are visible and not whole, or that nobody saved.
        untyped: exceptions from outside our error tree that reached the caller.
        other: promises broken in another way: two winners of a race, debris that gc leaves, a wrong ``latest``.
        notes: more counts, by name, for the lines under the table.
        problems: what was broken, and at which step.
    """

    campaign: str
    attempts: int = 0
    faults: int = 0
    committed: int = 0
    refused: int = 0
    checked: int = 0
    lost: int = 0
    phantom: int = 0
    untyped: int = 0
    other: int = 0
    seconds: float = 0.0
    notes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def broken(self) -> int:
        """Broken promises of all kinds."""
        return self.lost + self.phantom + self.untyped + self.other

    def as_json(self) -> dict[str, Any]:
        """All of it, for ``--json``."""
        return asdict(self)


class Work:
    """A campaign's orders, and where it reports to. Several threads of a campaign may use it at once.

    Args:
        size: how much to do, in what the campaign counts; 0: all there is.
        seed: all dice are thrown with it.
        folder: an empty folder for the campaign alone, on a real disk.
        s3: gives a bucket on a real S3 server, which is started by the first call.
        broken: the name of the deliberately broken order that is in force (``broken.py``), or None.
        tell: called with the number of steps that are done.
    """

    def __init__(
        self,
        tally: Tally,
        size: int,
        seed: int,
        folder: Path,
        s3: Callable[[], Bucket],
        broken: str | None = None,
        tell: Callable[[int], object] = lambda done: None,
    ) -> None:
        self.tally = tally
        self.size = size
        self.seed = seed
        self.folder = folder
        self.s3 = s3
        self.broken = broken
        self._tell = tell
        self._lock = threading.Lock()
        self._done = 0

    def dice(self, *name: object) -> random.Random:
        """Dice for one step: the same in every run with this seed, whatever the steps before it did."""
        return random.Random(":".join(map(str, (self.seed, self.tally.campaign, *name))))

    def count(self, **numbers: int) -> None:
        """Add to counters of the tally."""
        with self._lock:
            for name, number in numbers.items():
                setattr(self.tally, name, getattr(self.tally, name) + number)

    def note(self, what: str, number: int = 1) -> None:
        """Add to a count that is shown under the table."""
        with self._lock:
            self.tally.notes[what] += number

    def blame(self, kind: Blame, step: object, what: str) -> None:
        """A promise is broken."""
        self.count(**{kind: 1})
        with self._lock:
            self.tally.problems.append(f"{kind} at step {step} of {self.tally.campaign}, seed {self.seed}: {what}")

    def in_lanes(self, shares: Mapping[str, float], lane: Callable[[Work, str, int], None]) -> None:
        """Share the work out, two lanes at a time: a machine with two cores is busy, and the victims do not starve."""
        self.s3()  # here and not in a lane: the server dies with the thread that started it
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(lane, self, name, max(1, round(part * self.size))) for name, part in shares.items()]
        for job in jobs:
            job.result()

    def done(self, steps: int = 1) -> None:
        """So many more steps are done."""
        with self._lock:
            self._done += steps
            now = self._done
        self._tell(now)

    @property
    def enough(self) -> bool:
        """Whether so much is broken that going on tells no more: the first proof, if that is what is looked for."""
        return self.tally.broken >= (1 if self.broken else ENOUGH)
