"""Real processes, really killed: SIGKILL at random moments of 64 MiB saves, on a folder and on an object store."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.lease import read_leases
from ckptstore.stores import LocalStore, open_store
from ckptstore.stores.base import Store
from tests.conftest import Count
from tests.repository.helpers import assert_no_debris, keys_of, open_repo, reached
from tests.repository.trainer import is_content

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("CKPTSTORE_KILLS", "100"))
SEED = int(os.environ.get("CKPTSTORE_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)

pytestmark = [pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass
class Killer:
    """Starts trainers, kills them in the middle of saves, and looks at what they leave."""

    nursery: subprocess.Popen[str]
    store: Store
    job: dict[str, Any]
    dice: random.Random
    seconds: float = 0.3  # how long a save takes, as observed
    moments: Counter[str] = field(default_factory=Counter)
    there: dict[str, int] = field(default_factory=dict)  # key → size of the chunks that dead attempts left
    killed: int | None = None  # the epoch to be saved again
    adopted: int = 0
    sent: int = 0

    def read(self) -> list[str]:
        assert self.nursery.stdout is not None
        words = self.nursery.stdout.readline().split(" ")
        assert words[0].strip() not in ("wrong", "failed", ""), " ".join(words)
        return [word.strip() for word in words]

    def round(self) -> bool:
        """One life of a trainer. Returns whether it was killed inside a save."""
        assert self.nursery.stdin is not None
        self.nursery.stdin.write(json.dumps(self.job) + "\n")
        self.nursery.stdin.flush()
        victim = 1 if self.dice.random() < 0.2 else 2  # the save that is cut off: sometimes the one that resumes
        pid = begun = saves = 0
        started = 0.0
        while True:
            words = self.read()
            if words[0] == "pid":
                pid = int(words[1])
            elif words[0] == "begin":
                begun, started, saves = int(words[1]), time.monotonic(), saves + 1
                if saves == victim:
                    break
            elif words[0] == "done":
                self.seconds += 0.2 * (time.monotonic() - started - self.seconds)
                self.check_resumed_save(int(words[1]), int(words[3]))
        time.sleep(self.dice.uniform(0, 1.1 * self.seconds))
        while pid == 0:
            pid = int(self.read()[1])
        os.kill(pid, signal.SIGKILL)
        done = False
        while (words := self.read())[0] != "ended":
            if words[0] == "begin":  # it was faster than the dice: then this save is the one that is cut off
                begun, done = int(words[1]), False
            if words[0] == "done":
                done = True
                self.check_resumed_save(int(words[1]), int(words[3]))
        self.look(begun, done)
        return not done

    def look(self, epoch: int, done: bool) -> None:
        """After a kill: which epochs there are, and what the killed save has left."""
        epochs = open_repo(self.store).epochs()
        newest = epochs[-1] if epochs else 0
        assert newest in ((epoch,) if done else (epoch - 1, epoch)), (epochs, epoch, done)
        assert len(epochs) <= 10  # each kill between commit and prune leaves one more, until a prune gets through
        if newest == epoch:
            if not done:
                self.moments["after the manifest"] += 1
            return
        attempts = [s.attempt for s in read_leases(self.store) if s.lease is not None and s.lease.epoch == epoch]
        chunks = [info for attempt in attempts for info in self.store.list(keys.chunks_prefix(attempt))]
        self.there = {info.key: info.size for info in chunks}
        self.killed = epoch
        self.moments["amid the chunks" if chunks else "before the first chunk"] += 1

    def check_resumed_save(self, epoch: int, bytes_sent: int) -> None:
        """The killed epoch was saved again: all that was there is adopted, and only what was missing was sent."""
        if epoch != self.killed:
            return
        catalog = Catalog(self.store)
        manifest = catalog.manifest(Committed(epoch, 1))
        indexes = [catalog.index(entry) for entry in manifest.records]
        chunks = {chunk.key: chunk for index in indexes for chunk in index.chunks}
        # By content: a put that was under way when its sender was killed may land after the next one has looked, and
        # then two dead attempts hold the same chunk.
        known = {keys.parse_content_key(key)[2] for key in self.there}  # type: ignore[index]
        assert known <= {chunk.digest for chunk in chunks.values()}, "a chunk that was there is not used"
        own = [chunk for chunk in chunks.values() if chunk.attempt == manifest.attempt]
        indexes_sent = sum(entry.stored_length for entry in manifest.records)
        assert bytes_sent == sum(chunk.stored_length for chunk in own) + indexes_sent
        assert not known & {chunk.digest for chunk in own}, "a chunk that was there is sent again"
        self.adopted += sum(self.there.values())
        self.sent += bytes_sent
        self.there, self.killed = {}, None

    def check_all(self) -> None:
        """Every committed epoch loads bit for bit."""
        repo = open_repo(self.store)
        for epoch in repo.epochs():
            assert is_content(epoch, repo.checkpoint(epoch).load())


@contextmanager
def killer(store: Store, url: str, options: dict[str, Any] | None) -> Iterator[Killer]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.repository.trainer"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=ROOT, text=True) as nursery:
        try:
            yield Killer(nursery, store, {"url": url, "options": options}, random.Random(SEED))
        finally:
            nursery.kill()


def kill_often(store: Store, url: str, options: dict[str, Any] | None, kills: int) -> Killer:
    with killer(store, url, options) as run:
        inside = rounds = 0
        while inside < kills:
            inside += run.round()
            rounds += 1
            assert rounds < 3 * kills + 20, "the kills keep missing the saves"
            if rounds % 10 == 0:
                run.check_all()
        run.check_all()
    repo = open_repo(store)
    assert repo.verify().ok
    for _ in range(20):  # a put that was under way when its sender was killed may land after a gc has looked
        repo.gc(grace=0)
        if {*keys_of(store)} == reached(store):
            break
        time.sleep(0.5)
    assert_no_debris(store)
    run.check_all()
    return run


def report(run: Killer, where: str, count: Count) -> None:
    print(f"seed {SEED}")
    for moment, n in run.moments.items():
        count(f"SIGKILLs on {where}, {moment}", n)
    count(f"MiB adopted from killed saves on {where}", run.adopted >> 20)
    count(f"MiB sent to save the killed epochs on {where}", run.sent >> 20)


def test_kill_on_a_folder(tmp_path: Path, count: Count) -> None:
    """P1: 100 SIGKILLs on a folder: every committed epoch loads bit for bit, only what is missing is sent again."""
    print(f"seed {SEED} (set CKPTSTORE_KILL_SEED to repeat)")
    url = str(tmp_path / "repo")
    report(kill_often(LocalStore(url), url, None, KILLS), "a folder", count)


@pytest.mark.s3
def test_kill_on_s3(s3: Any, count: Count) -> None:
    """P1: the same on an object store."""
    print(f"seed {SEED} (set CKPTSTORE_KILL_SEED to repeat)")
    url = s3.url()
    with open_store(url, storage_options=s3.storage_options) as store:
        report(kill_often(store, url, s3.storage_options, KILLS), "S3", count)
