"""A trainer that saves the way burn does, under ``ckptstore watch``, both killed at random: what it finished and what
lived long enough is there bit for bit, and nothing that it did not finish ever appears."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from tests.conftest import Count
from tests.watching.fake_burn import whole_file

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LIVES = int(os.environ.get("CKPTSTORE_WATCH_LIVES", "5"))
SEED = int(os.environ.get("CKPTSTORE_WATCH_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
QUIET, INTERVAL = 0.15, 0.03
SLACK = 2.5  # of a busy machine; the contract itself is quiet + 2 * interval + the time of the saves before
RECORDS = {"model": "model", "optimizer": "optim", "scheduler": "scheduler"}

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900)]


class Watchers:
    """Starts watchers as forks of one process."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "watch_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def _ask(self, *words: object) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(words) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def start(self, output: Path, *arguments: object) -> int:
        return self._ask(str(output), *map(str, arguments))

    def wait(self, pid: int) -> int:
        """The exit code, or minus the signal."""
        return self._ask("wait", pid)

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


@pytest.fixture
def watchers() -> Iterator[Watchers]:
    started = Watchers()
    try:
        yield started
    finally:
        started.close()


@dataclass
class Run:
    """One folder, one repository, and the lives that went by.

    Attributes:
        alive: from when to when a watcher was alive.
    """

    place: Path
    extension: str
    watchers: Watchers
    dice: random.Random
    life: int = 0
    kills: int = 0
    alive: list[tuple[float, float]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.place / "artifacts"

    @property
    def events(self) -> list[dict[str, Any]]:
        logs = self.place.glob("burn-*.log")
        return [json.loads(line) for log in logs for line in log.read_text().splitlines()]

    @contextmanager
    def watching(self, end: int) -> Iterator[None]:
        """A watcher beside the block, then ``end``: a signal."""
        log = self.place / "watch.log"
        log.touch()
        before = log.stat().st_size
        pid = self.watchers.start(log, *self.command())
        try:
            late = time.monotonic() + 60
            while log.stat().st_size == before and time.monotonic() < late:
                time.sleep(0.01)
            begun = time.monotonic()
            yield
            self.alive.append((begun, time.monotonic()))
        finally:
            os.kill(pid, end)
            code = self.watchers.wait(pid)
        assert code == (-9 if end == signal.SIGKILL else 0), log.read_text()[-2000:]

    def command(self) -> list[object]:
        return ["watch", self.folder, self.place / "repo", "--quiet", QUIET, "--interval", INTERVAL, "--json"]

    def settle(self) -> None:
        """What a watcher does that finds a folder at rest."""
        pid = self.watchers.start(self.place / "watch.log", *self.command(), "--once")
        assert self.watchers.wait(pid) == 0, (self.place / "watch.log").read_text()[-2000:]

    @contextmanager
    def training(self, **order: Any) -> Iterator[subprocess.Popen[bytes]]:
        self.life += 1
        # A log for each life: the limit that stands for a full disk is one for every file of the process.
        order |= {"folder": str(self.folder), "log": str(self.place / f"burn-{self.life}.log")}
        order |= {"life": self.life, "extension": self.extension}
        with (self.place / "burn.err").open("ab") as errors:
            trainer = subprocess.Popen([sys.executable, str(HERE / "fake_burn.py"), json.dumps(order)], stderr=errors)
        try:
            yield trainer
        finally:
            trainer.kill()
            trainer.wait()

    # ---- what must hold ----------------------------------------------------------------------------------------

    def check_nothing_unfinished(self) -> dict[int, int]:
        """Every epoch that there is is a finished one, all records of one life. Epoch → life."""
        found = {}
        repo_place = self.place / "repo"
        if not (repo_place / "ckptstore.json").exists():
            return {}
        with ckptstore.open(repo_place, create=False) as repo:
            for epoch in repo.epochs():
                there = repo.checkpoint(epoch).load()
                assert there.keys() == RECORDS.keys()
                lives = [
                    life
                    for life in range(1, self.life + 1)
                    if all(bytes(there[record]) == self.whole(life, epoch, name) for record, name in RECORDS.items())
                ]
                assert lives, f"epoch {epoch} was never finished by anybody"
                found[epoch] = lives[0]
        return found

    def whole(self, life: int, epoch: int, name: str) -> bytes:
        return whole_file(life, epoch, name, self.extension)

    def check_all_finished(self, there: dict[int, int]) -> int:
        """Every epoch that is finished, and still is there or lived long enough, is there. How many had to be."""
        owed = self._on_disk() | self._long_lived()
        for epoch, life in owed.items():
            assert there.get(epoch) == life, f"epoch {epoch} of life {life} was finished; there is {there.get(epoch)}"
        return len(owed)

    def _on_disk(self) -> dict[int, int]:
        found = {}
        for path in self.folder.glob(f"checkpoint/model-*.{self.extension}"):
            epoch = int(path.name.split("-")[1].split(".")[0])
            files = {name: path.with_name(path.name.replace("model", name)) for name in RECORDS.values()}
            for life in range(1, self.life + 1):
                if all(f.exists() and f.read_bytes() == self.whole(life, epoch, name) for name, f in files.items()):
                    found[epoch] = life
        return found

    def _long_lived(self) -> dict[int, int]:
        """Epochs that were whole for longer than the contract asks, with a watcher beside them, and written last so."""
        events = self.events
        found = {}
        for epoch in {event["epoch"] for event in events if event["what"] == "finish"}:
            mine = [event for event in events if event["epoch"] == epoch and event["what"] != "start"]
            life = max(event["life"] for event in mine if event["what"] == "begin")
            finished = {e["record"]: e["at"] for e in mine if e["what"] == "finish" and e["life"] == life}
            if finished.keys() != set(RECORDS.values()):
                continue
            begun = max(finished.values())
            gone = min((e["at"] for e in mine if e["what"] == "delete" and e["at"] > begun), default=None)
            long = QUIET + 2 * INTERVAL + SLACK
            if gone is not None and any(a <= gone - long and begun <= gone - long and gone <= b for a, b in self.alive):
                found[epoch] = life
        return found


@pytest.mark.slow
@pytest.mark.parametrize("extension", ["mpk.gz", "bin", "bpk"])
def test_killed_at_random(tmp_path: Path, watchers: Watchers, extension: str, count: Count) -> None:
    """P1, P2: SIGKILLs of trainer and watcher, full disks, restarts from older epochs. Seeded, see the message."""
    print("CKPTSTORE_WATCH_SEED", SEED)
    run = Run(tmp_path, extension, watchers, random.Random(f"{SEED}/{extension}"))
    dice = run.dice
    for _ in range(LIVES):
        order: dict[str, Any] = {"epochs": 60, "pause": dice.choice((0.02, 0.1, 0.1))}
        if dice.random() < 0.3:
            order["full"] = dice.randrange(1, 4)
        last = max((e["epoch"] for e in run.events if e["what"] == "finish"), default=0)
        if last > 3 and dice.random() < 0.3:
            order["start"] = last - dice.randrange(0, 3)
        with run.training(**order) as trainer:
            for _ in range(dice.randrange(1, 4)):
                with run.watching(dice.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))):
                    time.sleep(dice.uniform(0.05, 0.8))
                    if dice.random() < 0.3:
                        trainer.kill()
                        run.kills += 1
                        time.sleep(dice.uniform(0, 0.4))
        run.kills += trainer.returncode == -9
        run.check_nothing_unfinished()
    with run.training(epochs=5, pause=1.5, steady=True) as trainer, run.watching(signal.SIGTERM):
        assert trainer.wait(60) == 0  # its first epochs have lived long enough to be owed, though they are deleted
    run.settle()
    there = run.check_nothing_unfinished()
    owed = run.check_all_finished(there)
    assert there
    assert owed >= 3
    count(f"burn under watch, {extension}: lives", run.life)
    count(f"burn under watch, {extension}: epochs found whole", len(there))


def test_a_burn_run_to_its_end(tmp_path: Path, watchers: Watchers) -> None:
    """A run that nobody disturbs: what is there at its end is restored under the names burn expects."""
    run = Run(tmp_path, "mpk.gz", watchers, random.Random(1))
    with run.training(epochs=3) as trainer, run.watching(signal.SIGTERM):
        assert trainer.wait(60) == 0
    there = run.check_nothing_unfinished()  # SIGTERM has committed what was finished
    assert run.check_all_finished(there) >= 2
    output = tmp_path / "out.log"
    pid = watchers.start(output, "restore", tmp_path / "repo", "--to", tmp_path / "back", "--epoch", 3)
    assert watchers.wait(pid) == 0, output.read_text()
    names = sorted(path.name for path in (tmp_path / "back" / "checkpoint").iterdir())
    assert names == ["model-3.mpk.gz", "optim-3.mpk.gz", "scheduler-3.mpk.gz"]
    for name in names:
        restored = (tmp_path / "back" / "checkpoint" / name).read_bytes()
        assert restored == (run.folder / "checkpoint" / name).read_bytes()
