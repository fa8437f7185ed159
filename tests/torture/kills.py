"""Campaign ``kills``: SIGKILL of real saving processes, on a folder and on S3, in the foreground and the background.

Some kills come at a random moment of a save (or of the resuming before it); the others wait until a phase of it
begins, and then a moment longer, so that the short phases are hit as well. After each kill a fresh repository looks at
what is there: every epoch that was reported as committed and is not pruned, and every epoch that is visible, must load
bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from ckptstore import CkptStoreError, Repository, keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.lease import read_leases
from ckptstore.stores import open_store
from ckptstore.stores.base import Store
from tests.torture.ledger import Ledger
from tests.torture.processes import Nursery
from tests.torture.victim import KEEP, PHASES
from tests.torture.work import Work

LANES = {"folder": 0.35, "folder, background": 0.35, "s3": 0.15, "s3, background": 0.15}
SWEEP_EVERY = 20
LINGER = {"folder": 0.002, "s3": 0.008}  # seconds within which a knife comes down after a phase has begun


def run(work: Work) -> None:
    """All lanes."""
    work.in_lanes(LANES, lane)


def lane(work: Work, where: str, kills: int) -> None:
    """So many kills that hit a save, in one repository."""
    kind, _, background = where.partition(", ")
    name = where.replace(", ", "-")
    if kind == "s3":
        bucket = work.s3()
        url, options = bucket.url(), bucket.storage_options
    else:
        url, options = str(work.folder / name), None
    with (
        open_store(url, storage_options=options) as store,
        Nursery(work.folder / f"{name}.log", work.broken) as nursery,
    ):
        order = {"act": "train", "url": url, "options": options, "background": bool(background)}
        killer = Killer(work, where, nursery, store, order)
        hits = lives = 0
        while hits < kills and lives < 3 * kills + 20 and not work.enough:
            hit = killer.life(lives)
            lives += 1
            hits += hit
            work.done(hit)
            if lives % SWEEP_EVERY == 0:
                killer.ledger.sweep(f"{where}/{lives}")
        if hits < kills and not work.enough:
            work.blame("other", f"{where}/{lives}", f"only {hits} of {lives} kills hit a save: this proves too little")
        killer.ledger.sweep(f"{where}/{lives}")


@dataclass
class Killer:
    """Starts a trainer, kills it, and looks; for one repository.

    Attributes:
        ledger: what was begun and reported.
        open: what was begun and not yet reported, and when, oldest first.
        seconds: how long a save takes, as observed.
    """

    work: Work
    lane: str
    nursery: Nursery
    store: Store
    order: dict[str, Any]
    phases: tuple[str, ...] = PHASES
    seconds: float = 0.05
    open: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.work, self.store, KEEP)

    def life(self, number: int) -> bool:
        """One life of a trainer. Returns whether it was cut off inside a save."""
        dice = self.work.dice(self.lane, number)
        phase = dice.choice(self.phases) if dice.random() < 0.6 else ""
        victim = dice.choice((0, 1, 1, 2, 2, 3))  # the save that is cut off; 0: before the first
        step = f"{self.lane}/{number}"
        self.open.clear()
        self.nursery.order(phase=phase, seed=dice.random(), version=1000 * (number + 1), **self.order)
        pid, over = self._wait(step, phase, victim)
        if not over:
            self._stab(dice, pid, phase, victim)
            while self._hear(step) != "ended":
                pass
        inside = bool(self.open)
        self.work.count(attempts=1, faults=int(inside))
        self.look(step)
        return inside

    def _wait(self, step: str, phase: str, victim: int) -> tuple[int, bool]:
        """Until it is time for the knife. The pid, and whether it is too late: the trainer has ended by itself."""
        pid = saves = 0
        while True:
            words = self._hear(step, full=True)
            if words[0] == "pid":
                pid = int(words[1])
                if victim == 0:
                    return pid, False
            elif words[0] == "ended":
                return pid, True
            elif words[0] == "begin":
                saves += 1
                if saves >= victim and (not phase or saves >= victim + 8):  # some phases are rare
                    break
            elif words[0] == "at" and saves >= victim:
                break
        while not pid:
            words = self._hear(step, full=True)
            pid = int(words[1]) if words[0] == "pid" else 0
        return pid, False

    def _stab(self, dice: random.Random, pid: int, phase: str, victim: int) -> None:
        kind = self.lane.partition(",")[0]
        if victim == 0:
            time.sleep(dice.uniform(0, 3 * self.seconds))
        elif phase:
            time.sleep(dice.uniform(0, LINGER[kind]))
        else:
            time.sleep(dice.uniform(0, 1.1 * self.seconds))
        os.kill(pid, signal.SIGKILL)

    def _hear(self, step: str, full: bool = False) -> Any:
        """Read a line and remember what it tells."""
        words = self.nursery.read()
        if words[0] == "begin":
            pair = int(words[1]), int(words[2])
            self.ledger.begun.add(pair)
            self.open[pair] = time.monotonic()
        elif words[0] in ("done", "refused"):
            pair = int(words[1]), int(words[2])
            took = time.monotonic() - self.open.pop(pair, time.monotonic())
            self.seconds += 0.2 * (min(took, 2.0) - self.seconds)
            if words[0] == "done":
                self.ledger.commit(*pair)
            else:
                self.ledger.refuse(words[3])
        elif words[0] == "wrong":
            self.work.blame("lost", step, "the trainer resumed from a wrong state: " + " ".join(words))
        elif words[0] == "untyped":
            self.work.blame("untyped", step, " ".join(words))
        return words if full else words[0]

    # ---- what is left --------------------------------------------------------------------------------------

    def look(self, step: str) -> None:
        """Compare what is visible with what was reported, and find out where the kill has hit."""
        seen = self.ledger.look(step)
        if seen is None:
            return
        try:
            moment = self._moment(*seen)
        except CkptStoreError as error:  # no news, where every epoch loads
            moment = f"killed, and {type(error).__name__} when looking where"
        self.work.note(f"{self.lane}: {moment}")

    def _moment(self, repo: Repository, epochs: set[int]) -> str:
        """Where the kill has hit, by what it left."""
        if not self.open:
            return "killed between saves"
        epoch, version = next(iter(self.open))
        leases = {s.attempt for s in read_leases(self.store) if s.lease is not None and s.lease.epoch == epoch}
        if epoch in epochs and repo.checkpoint(epoch).metadata["version"] == version:
            generation = repo.checkpoint(epoch).generation
            if Catalog(self.store).manifest(Committed(epoch, generation)).attempt in leases:
                return "killed after the manifest, before the lease was removed"
            return "killed while tidying up and pruning"
        found = [info.key for attempt in leases for info in self.store.list(keys.attempt_prefix(attempt))]
        if any("/records/" in key for key in found):
            return "killed between the indexes and the manifest"
        return "killed amid the chunks" if found else "killed before the first chunk"
