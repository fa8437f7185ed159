"""Lives of a program from examples/: real processes that are ended by a real SIGKILL, and started again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 240


@dataclass(frozen=True)
class Life:
    """One process of a training run: what it told, and how it ended."""

    lines: list[str]
    code: int

    def numbers(self, word: str) -> list[int]:
        """The numbers behind a word at the beginning of a line."""
        return [int(line.split()[1]) for line in self.lines if line.split()[0] == word]

    @property
    def end(self) -> str:
        """The hash of the state that it ended with."""
        return self.lines[-1].removeprefix("end ")


def nth(number: int, word: str) -> Callable[[str], bool]:
    """True for the line with that number (from 1) of those that begin with the word."""
    left = [number]

    def doomed(line: str) -> bool:
        left[0] -= line.split()[0] == word
        return left[0] == 0

    return doomed


def live(
    program: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    doomed: Callable[[str], bool] = lambda line: False,
) -> Life:
    """Run an example to its end, or kill it right after the first line that is ``doomed``."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / program), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )
    lines = []
    assert process.stdout is not None
    with process:
        try:
            for line in process.stdout:
                lines.append(line.strip())
                if doomed(lines[-1]):
                    process.send_signal(signal.SIGKILL)
                    break
            process.stdout.read()
            process.wait(SECONDS)
        except BaseException:
            process.kill()
            raise
    return Life(lines, process.returncode)


def killed_twice(
    program: str, url: str, *arguments: str, seed: int, saves: int, environment: Mapping[str, str] | None = None
) -> list[Life]:
    """Kill a run in a save of its first half, the next one at a step after some more saves; the third one ends.

    Checks that each went on from a checkpoint that its predecessors had saved, and from the newest that can be known.
    """
    chance = random.Random(seed)
    first = live(
        program, url, *arguments, environment=environment, doomed=nth(chance.randrange(3, saves // 2 + 1), "saving")
    )
    second = live(program, url, *arguments, environment=environment, doomed=nth(chance.randrange(3, 5), "saving"))
    lives = [first, second, live(program, url, *arguments, environment=environment)]
    assert [life.code for life in lives] == [-signal.SIGKILL, -signal.SIGKILL, 0], lives
    possible = [0]
    for life in lives:
        (start,) = life.numbers("start")
        assert start in possible, (start, possible)
        # In the background: a save begins when the one before it is durable, and is told before it begins.
        possible = [start, *life.numbers("saving")][-3:]
    assert lives[1].numbers("start") != [0]
    return lives


def s3_environment(bucket: object) -> dict[str, str]:
    """What tells a program where the S3 test server is."""
    options = bucket.storage_options  # type: ignore[attr-defined]
    return {
        "AWS_ENDPOINT_URL": bucket.endpoint,  # type: ignore[attr-defined]
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
        "AWS_DEFAULT_REGION": "us-east-1",
    }
