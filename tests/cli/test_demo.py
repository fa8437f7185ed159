"""The demo on a small model: it really trains, kills, flips and prunes, and leaves nothing behind."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.cli import _demo_checks as checks
from ckptstore.cli import _demo_model as model
from ckptstore.cli._demo_supervisor import DemoFailedError, Supervisor
from tests.cli.conftest import Run

SMALL = ("--epochs", 4, "--steps", 1, "--hidden", 256, "--kills", 1)


@pytest.mark.kill
@pytest.mark.slow
def test_the_demo_holds_and_cleans_up(run: Run, tmp_path: Path) -> None:
    """A killed, damaged and pruned run ends bit-identical to the undisturbed one; ``--json`` tells all of it."""
    result = run("demo", "--url", tmp_path / "here", *SMALL, "--json", "--seed", 3)
    assert result.code == 0, result.err
    report = result.json
    assert report["ok"] is True
    assert report["lost"] == []
    assert [kill["resumed"] for kill in report["killed"]["kills"]] == [report["killed"]["kills"][0]["epoch"] - 1]
    assert report["flipped"]["stepped_back_to"] == 3
    assert report["pruned"]["kept"] == [3, 4]
    assert not (tmp_path / "here").exists()


class Late(random.Random):
    """Lets half a second pass after the share of a save that it chose."""

    def uniform(self, a: float, b: float) -> float:
        return 0.5


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("epochs", [2, 3])
def test_kills_that_come_too_late_are_tried_again(tmp_path: Path, epochs: int) -> None:
    """However often a save is quicker than its kill: it is had again until one hits, and the run ends the same."""
    shape = model.Shape(seed=1, epochs=epochs, steps=1, batch=64, hidden=64)
    options = {"storage_options": None, "unsafe_single_writer": False}
    calm = Supervisor(f"{tmp_path}/calm", options, shape, lambda _: None).run()
    log = Supervisor(f"{tmp_path}/killed", options, shape, lambda _: None).run(kills=epochs - 1, rng=Late())
    assert log.too_late >= epochs - 1
    assert [kill.epoch for kill in log.kills] == list(range(2, epochs + 1))
    assert log.fingerprints == calm.fingerprints


@pytest.mark.slow
def test_the_story_fits_eighty_columns_and_keep_keeps(run: Run, tmp_path: Path) -> None:
    """The story is told in short lines; ``--keep`` leaves a repository that verifies."""
    result = run("demo", "--url", tmp_path, "--keep", "--epochs", 3, "--steps", 1, "--hidden", 64, "--kills", 0)
    assert result.code == 0, result.err
    assert "Lost: nothing." in result.out
    assert max(len(line) for line in result.out.splitlines() if str(tmp_path) not in line) <= 80
    [place] = tmp_path.iterdir()
    assert run("verify", place / "killed").code == 0
    assert ckptstore.open(place / "killed").epochs() == [2, 3]


@pytest.mark.parametrize("arguments", [["--url", "memory://x"], ["--kills", 8], ["--url", "ftp://x"]])
def test_the_demo_refuses_what_it_cannot_do(run: Run, arguments: list[Any]) -> None:
    """A store that dies with its process, or more kills than saves, is refused before anything runs."""
    assert run("demo", *arguments).code == 1


def test_a_promise_that_does_not_hold_is_a_failure(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that fails makes the demo say so, exit non-zero and still clean up."""

    def broken(*_: object, **__: object) -> None:
        raise DemoFailedError("epoch 3 differs")

    monkeypatch.setattr(checks, "compare", broken)
    line = ("--epochs", 3, "--steps", 1, "--hidden", 16, "--kills", 0, "--json")
    result = run("demo", "--url", tmp_path / "here", *line)
    assert result.code == 2
    assert "the demo does not hold: epoch 3 differs" in result.err
    assert (result.json["ok"], result.json["failed"]) == (False, "epoch 3 differs")
    assert not (tmp_path / "here").exists()


def test_the_model_learns_and_resumes_exactly() -> None:
    """The loss falls; a trainer loaded from a state goes on to the same bits as the one it came from."""
    shape = model.Shape(seed=1, epochs=6, steps=3, batch=64, hidden=64)
    trainer, resumed = model.Trainer(shape), model.Trainer(replace(shape, seed=2))
    first = trainer.train_epoch()
    resumed.load(deepcopy(trainer.state()))
    losses = [trainer.train_epoch() for _ in range(4)]
    assert [resumed.train_epoch() for _ in range(4)] == losses
    assert model.fingerprint(resumed.state()) == model.fingerprint(trainer.state())
    assert losses[-1] < first


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (np.zeros(1), -np.zeros(1)),
        (np.ones(1, np.float32), np.ones(1, np.float64)),
        (0.0, -0.0),
        (1, True),
        ({"a": 1}, {"b": 1}),
    ],
)
def test_the_comparison_sees_every_bit(one: Any, two: Any) -> None:
    """What is equal in Python but not in bits is a difference; so it is for the fingerprint."""
    with pytest.raises(DemoFailedError):
        checks._same({"x": one}, {"x": two}, "state", checks.Compared())
    assert model.fingerprint(one) != model.fingerprint(two)
