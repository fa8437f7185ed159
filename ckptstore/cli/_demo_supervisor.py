"""The demo's supervisor: starts the trainer, listens to it, and kills it in the middle of saves."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import ckptstore
from ckptstore.cli._demo_model import Shape

_SILENCE = 300.0  # seconds without a word from the trainer until it is taken for hung
_TRIES = 20  # kills for one save; each tries an earlier moment than the last one that came too late
# One thread for every BLAS there is: the order of additions, and so the last bit, must not depend on load.
_PINNED = ("OPENBLAS", "OMP", "MKL", "BLIS", "NUMEXPR")

Event = dict[str, Any]


class DemoFailedError(Exception):
    """Something that ckptstore promises did not hold, or the demo could not be carried out."""

    speaks_for_itself = True


@dataclass
class Kill:
    """One SIGKILL in the middle of a save, and what became of it."""

    epoch: int
    after: float  # seconds into the save
    done: float  # fraction of the state that the save had dealt with
    left_objects: int = 0
    left_bytes: int = 0
    resumed: int = -1
    retrained: float = 0.0  # seconds
    bytes_reused: int = 0
    bytes_sent: int = 0


@dataclass
class Log:
    """What a run did, told by the trainer itself."""

    losses: dict[int, float] = field(default_factory=dict)
    fingerprints: dict[int, str] = field(default_factory=dict)
    saves: dict[int, Event] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    too_late: int = 0
    missed: int = 0  # of the kills that are too late, those in a row
    seconds: float = 0.0


class Child:
    """A trainer process."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        threads = {f"{name}_NUM_THREADS": "1" for name in _PINNED} | {"VECLIB_MAXIMUM_THREADS": "1"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop; a pipe could fill up and block it)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptstore.cli._demo_trainer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **threads},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._rest = b""
        self._ready: list[Event] = []
        self.ended = False
        try:
            self._process.stdin.write(json.dumps(config).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; next() tells why

    def next(self, timeout: float) -> Event | None:
        """The next event; None when ``timeout`` seconds pass without one, or at the end."""
        until = time.monotonic() + timeout
        while not self._ready and not self.ended:
            readable, _, _ = select.select([self._out], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                return None
            data = os.read(self._out, 1 << 16)
            self.ended = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._ready += [json.loads(line) for line in lines]
        return self._ready.pop(0) if self._ready else None

    def kill(self) -> list[Event]:
        """SIGKILL it, wait until it is gone, and return what it had still said."""
        self._process.kill()
        self._process.wait()
        rest = []
        while not self.ended or self._ready:
            event = self.next(_SILENCE)
            if event is not None:
                rest.append(event)
        return rest

    def finish(self) -> None:
        """Wait for its end, which must be a good one."""
        if self._process.wait(_SILENCE) != 0:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise DemoFailedError(f"the trainer failed: {lines[-1]}")

    def stop(self) -> None:
        """End it, whatever it is doing. May be called at any time."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


class Supervisor:
    """Runs the trainer on one repository until its last epoch is saved, killing it on the way if told to.

    Args:
        url: the repository.
        options: keyword arguments of ``ckptstore.open``.
        notice: called with each event, to show what is going on.
    """

    def __init__(self, url: str, options: Mapping[str, Any], shape: Shape, notice: Callable[[Event], None]) -> None:
        self.url = url
        self._options = dict(options)
        self._shape = shape
        self._notice = notice

    def open(self) -> ckptstore.Repository:
        """The repository, seen with fresh eyes."""
        return ckptstore.open(self.url, **self._options, create=False)

    def run(self, *, kills: int = 0, rng: random.Random | None = None) -> Log:
        """Train to the end.

        Args:
            kills: how many SIGKILLs must hit the middle of a save.
            rng: chooses which saves, and the moments.
        """
        log = Log()
        rng = rng or random.Random()
        begun = time.perf_counter()
        for target in sorted(rng.sample(range(2, self._shape.epochs + 1), kills)):
            while not log.kills or log.kills[-1].epoch != target:
                self._session(log, target, rng)
        self._session(log, None, rng)
        log.seconds = time.perf_counter() - begun
        return log

    def _session(self, log: Log, target: int | None, rng: random.Random) -> None:
        """One trainer process, killed in the save of epoch ``target``, or left to get to the end."""
        child = Child({"url": self.url, "open": self._options, "shape": asdict(self._shape)})
        try:
            for event in self._events(child):
                self._take(log, event)
                if event["event"] == "save" and event["epoch"] == target:
                    self._kill(child, log, event["epoch"], rng)
                    return
            child.finish()
            if target is not None:
                raise DemoFailedError(f"the trainer ended before the save of epoch {target}")
        finally:
            child.stop()

    def _events(self, child: Child) -> Iterator[Event]:
        while True:
            event = child.next(_SILENCE)
            if event is None:
                if child.ended:
                    return
                raise DemoFailedError(f"the trainer said nothing for {_SILENCE:.0f} s")
            yield event

    def _kill(self, child: Child, log: Log, epoch: int, rng: random.Random) -> None:
        """Kill it at a random moment of the save that it has just begun: some share of the bytes and a bit later."""
        begun = time.monotonic()
        sooner = 0.5**log.missed
        share, later = rng.random() * sooner, rng.uniform(0.0, 0.02) * sooner
        done = self._wait(child, share, later)
        after = time.monotonic() - begun
        done = max([done, *map(_share, child.kill())])
        with self.open() as repo:
            if epoch in repo.epochs():  # the commit was faster: no kill in the middle of a save
                log.too_late += 1
                log.missed += 1
                if log.missed == _TRIES:
                    raise DemoFailedError(f"{_TRIES} kills came after the commit of epoch {epoch}: saves are too quick")
                repo.delete(epoch)  # to be trained and saved once more
                return
            log.missed = 0
            kill = Kill(epoch, after, done)
            log.kills.append(kill)
            self._inspect(repo, kill)
        self._notice({"event": "killed", "kill": kill})

    def _wait(self, child: Child, share: float, later: float) -> float:
        """Listen until ``share`` of a save is done and ``later`` seconds more. What share is done by then."""
        done, until = 0.0, time.monotonic() + _SILENCE
        reached = False
        while (left := until - time.monotonic()) > 0:
            event = child.next(left)
            if child.ended or (event is not None and event["event"] == "saved"):
                break
            done = max(done, _share(event))
            if done >= share and not reached:
                reached, until = True, time.monotonic() + later
        return done

    def _inspect(self, repo: ckptstore.Repository, kill: Kill) -> None:
        """Right after the kill: every epoch before it must be there, whole."""
        report = repo.verify()
        expected = list(range(1, kill.epoch))
        if not report.ok or [health.epoch for health in report.epochs] != expected:
            raise DemoFailedError(f"after a kill in the save of epoch {kill.epoch}: {report.problems or report.epochs}")
        debris = repo.gc(grace=0, dry_run=True).removed
        kill.left_objects = len(debris)
        kill.left_bytes = sum(removal.size for removal in debris)

    def _take(self, log: Log, event: Event) -> None:
        """Note what the trainer said. An epoch trained again must come out the same."""
        what, last = event["event"], log.kills[-1] if log.kills else None
        if what == "resumed" and last is not None and last.resumed < 0:
            last.resumed = event["epoch"]
            if last.resumed != last.epoch - 1:
                raise DemoFailedError(f"killed in the save of epoch {last.epoch}, it resumed from {last.resumed}")
        elif what == "save":
            epoch = event["epoch"]
            log.losses[epoch] = event["loss"]
            if log.fingerprints.setdefault(epoch, event["fingerprint"]) != event["fingerprint"]:
                raise DemoFailedError(f"epoch {epoch} came out different when it was trained again")
            if last is not None and last.epoch == epoch:
                last.retrained = event["seconds"]
        elif what == "saved":
            log.saves[event["epoch"]] = event
            if last is not None and last.epoch == event["epoch"]:
                last.bytes_reused, last.bytes_sent = event["bytes_reused"], event["bytes_sent"]
        self._notice(event)


def _share(event: Event | None) -> float:
    """What share of a save's bytes is done, as a progress event tells it; 0 for any other event."""
    if event is None or event["event"] != "progress":
        return 0.0
    return float(event["done"] / max(1, event["total"]))
