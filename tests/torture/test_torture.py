"""The campaigns of ``make torture`` can fail: each deliberately broken order is found, and the real one is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.torture import between, damage, kills, race, ranks, space, stateful
from tests.torture.broken import ORDERS, broken_order
from tests.torture.campaigns import CAMPAIGNS, PROFILES
from tests.torture.work import Tally, Work

ROOT = Path(__file__).parents[2]
SEED = 20


def no_server() -> Bucket:
    raise AssertionError("these runs need no server")


def tally_of(run: Callable[[Work], None], name: str, size: int, folder: Path, broken: str | None = None) -> Tally:
    work = Work(Tally(name), size, SEED, folder, no_server, broken)
    with broken_order(broken):
        run(work)
    return work.tally


def race_on_a_folder(work: Work) -> None:
    race.rounds(work, "folder", str(work.folder / "repo"), None, work.size)


def kill_on_a_folder(work: Work) -> None:
    kills.lane(work, "folder", work.size)


def kill_ranks_on_a_folder(work: Work) -> None:
    ranks.lane(work, "folder", work.size)


def kill_between_folders(work: Work) -> None:
    between.lane(work, "folder", work.size)


@pytest.mark.parametrize("order", ["manifest-first", "prune-first", "lost-reply", "blind-sweep"])
def test_random_steps_find_it(order: str, tmp_path: Path) -> None:
    """RepositoryMachine finds each broken commit order within a thousand steps."""
    found = tally_of(stateful.run, "stateful", 1000, tmp_path, order)
    assert found.lost >= 1
    assert found.problems[0].startswith("lost at step memory/")


@pytest.mark.parametrize(
    ("order", "run", "name", "size"),
    [
        ("manifest-first", kill_on_a_folder, "kills", 40),
        ("plain-write", kill_on_a_folder, "kills", 100),
        ("manifest-first", kill_between_folders, "tiers", 40),
        ("manifest-first", kill_ranks_on_a_folder, "ranks", 10),
        ("overwrite", race_on_a_folder, "race", 3),
        ("unchecked", damage.run, "damage", 60),
        ("deaf", space.at_every_write, "enospc", 0),
    ],
)
@pytest.mark.kill
def test_campaigns_find_it(order: str, run: Callable[[Work], None], name: str, size: int, tmp_path: Path) -> None:
    """Kills, races, damages and full disks find what they are there to find."""
    assert tally_of(run, name, size, tmp_path, order).broken >= 1


@pytest.mark.kill
def test_the_real_order_passes(tmp_path: Path) -> None:
    """Nothing is lost by the real one, and what passed was really tried."""
    runs = {
        "stateful": (stateful.run, 300),
        "kills": (kill_on_a_folder, 8),
        "tiers": (kill_between_folders, 6),
        "ranks": (kill_ranks_on_a_folder, 4),
        "race": (race_on_a_folder, 1),
    }
    for name, (run, size) in {**runs, "damage": (damage.run, 30), "enospc": (space.at_every_write, 4)}.items():
        (tmp_path / name).mkdir()
        tally = tally_of(run, name, size, tmp_path / name)
        assert tally.problems == []
        assert tally.broken == 0
        assert tally.attempts >= size
        assert tally.faults > 0
        assert tally.checked > 0


def test_the_program(tmp_path: Path) -> None:
    """``--broken`` ends with exit code 1 and tells how to see it again; without it nothing is lost, and that is 0."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.torture", "--profile", "ci", "--scale", "0.1", "--seed", "7"]
    command += ["--only", "damage"]
    broken = subprocess.run(
        [*command, "--broken", "unchecked"], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert broken.returncode == 1, broken.stderr
    assert (
        "again: python -m tests.torture --profile ci --scale 0.1 --broken unchecked --seed 7 --only damage"
        in broken.stdout
    )
    assert re.fullmatch(r"lost: [1-9]\d*", broken.stdout.splitlines()[-1])
    good = subprocess.run([*command, "--json"], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert good.returncode == 0, good.stdout
    said = json.loads(good.stdout)
    assert (said["seed"], said["broken"]) == (7, 0)
    assert said["campaigns"][0]["lost"] == 0
    assert said["campaigns"][0]["faults"] > 90
    assert list(tmp_path.iterdir()) == []


def test_every_order_and_campaign_is_told() -> None:
    """The page tells of every campaign and every broken order; both profiles have a size for each campaign."""
    page = (ROOT / "docs" / "torture.md").read_text("utf-8")
    assert [name for name in (*CAMPAIGNS, *ORDERS) if f"`{name}`" not in page] == []
    assert [name for name, campaign in CAMPAIGNS.items() if set(campaign.sizes) != set(PROFILES)] == []
