"""SIGKILL of processes with a background save in flight, at many moments."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore.stores import LocalStore
from tests.background.trainer import ITEMS
from tests.conftest import Count
from tests.repository.helpers import assert_no_debris, assert_same, make_state, open_repo

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("CKPTSTORE_BACKGROUND_KILLS", "15"))
SEED = int(os.environ.get("CKPTSTORE_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)


@pytest.mark.kill
@pytest.mark.slow
def test_kill(tmp_path: Path, count: Count) -> None:
    """P1: whatever was said to be committed is there bit for bit, and the epoch that was cut off can be saved again."""
    print(f"seed {SEED} (set CKPTSTORE_KILL_SEED to repeat)")
    dice = random.Random(SEED)
    folder = tmp_path / "repo"
    inside = 0
    for _ in range(KILLS):
        begun, committed = one_life(folder, dice.uniform(0, 0.06))
        repo = open_repo(LocalStore(str(folder)))
        epochs = repo.epochs()
        newest = epochs[-1] if epochs else 0
        assert epochs == list(range(1, newest + 1))
        assert committed <= newest <= begun
        inside += newest < begun
        for epoch in epochs[-3:]:
            assert_same(repo.checkpoint(epoch).load(), make_state(epoch, items=ITEMS))
    repo = open_repo(LocalStore(str(folder)))
    assert repo.verify().ok
    repo.gc(grace=0)
    assert_no_debris(repo.store)
    count("SIGKILLs amid a background save", inside)


def one_life(folder: Path, delay: float) -> tuple[int, int]:
    """Run a trainer for a while after its second save has begun. The last epochs begun, and known as committed."""
    command = [sys.executable, "-m", "tests.background.trainer", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        while len(said) < 3:
            said.append(process.stdout.readline())
            assert said[-1], "the trainer failed"
        time.sleep(delay)
        process.kill()
        said += process.stdout.readlines()
    epochs = dict.fromkeys(("begun", "committed"), 0)
    for line in said:
        if line.endswith("\n"):
            word, number = line.split()
            epochs[word] = int(number)
    return epochs["begun"], epochs["committed"]
