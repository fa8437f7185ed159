"""``plan``, ``prune``, ``gc``, ``pin``, ``unpin`` and ``rm``: what they show, what they ask, and what they delete."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Run, chunks_of, flip


def epochs(place: Path) -> list[int]:
    with ckptstore.open(place, create=False) as repo:
        return repo.epochs()


def test_plan_and_prune(run: Run, state_repo: Path) -> None:
    """The plan gives a reason for each epoch; the dry run and the prune say the same; only the prune deletes."""
    shown = run("plan", state_repo, "--keep", "KeepLast(1) | KeepEvery(2)")
    assert shown.code == 0
    assert "a multiple of 2" in shown.out
    assert "1 epochs would be deleted" in shown.out
    plan = run("plan", state_repo, "--keep", "KeepLast(1)", "--json").json
    dry = run("prune", state_repo, "--keep", "KeepLast(1)", "--dry-run", "--json").json
    assert plan == dry
    assert [(e["epoch"], e["kept"]) for e in plan["epochs"]] == [(1, False), (2, False), (3, True)]
    assert epochs(state_repo) == [1, 2, 3]
    done = run("prune", state_repo, "--keep", "KeepLast(1)", "--yes", "--json").json
    assert {**done, "dry_run": True, "objects": 0} == {**plan, "objects": 0}
    assert done["bytes_freed"] > 0
    assert epochs(state_repo) == [3]


@pytest.mark.parametrize("command", [("prune", "--keep", "KeepLast(1)"), ("rm", "1"), ("gc", "--grace", "0")])
def test_nothing_is_deleted_unasked(run: Run, state_repo: Path, command: tuple[str, ...]) -> None:
    """Without a terminal and without ``--yes`` a command that deletes refuses, and says what to add."""
    with ckptstore.open(state_repo) as repo:
        txn = repo.begin(9)
        txn.write("m", {"w": 1})
        txn.abandon()
    files = sorted(path for path in state_repo.rglob("*") if path.is_file())
    name, *arguments = command
    result = run(name, state_repo, *arguments)
    assert result.code == 1
    assert "--yes" in result.err
    assert sorted(path for path in state_repo.rglob("*") if path.is_file()) == files
    assert run(name, state_repo, *arguments, "--yes").code == 0


def test_pin(run: Run, state_repo: Path) -> None:
    """A pinned epoch survives prune and rm; unpinned it goes."""
    assert run("pin", state_repo, 1, "--reason", "the paper").code == 0
    assert "pinned: the paper" in run("prune", state_repo, "--keep", "KeepLast(1)", "--yes").out
    assert epochs(state_repo) == [1, 3]
    refused = run("rm", state_repo, 1, 3, "--yes")
    assert (refused.code, epochs(state_repo)) == (1, [1, 3])
    assert "the paper" in refused.err
    assert run("unpin", state_repo, 1, "--json").json["was_pinned"] is True
    assert run("rm", state_repo, 1, "--yes", "--json").json["removed"] == [1]
    assert epochs(state_repo) == [3]
    assert run("pin", state_repo, 7, "--reason", "x").code == 3


def test_rm(run: Run, state_repo: Path) -> None:
    """All named epochs or none: one that is not there stops the command before it deletes."""
    assert run("rm", state_repo, 1, 8, "--yes").code == 3
    assert run("rm", state_repo, 1, 2, "--dry-run").out.endswith("would be deleted\n")
    assert epochs(state_repo) == [1, 2, 3]
    assert run("rm", state_repo, 1, 2, "--yes").code == 0
    assert epochs(state_repo) == [3]


def test_runs_are_apart(run: Run, tmp_path: Path) -> None:
    """``--run`` prunes what a named run has saved and nothing else."""
    for number, name in enumerate(("a", "b", "a", "b"), 1):
        with ckptstore.open(tmp_path / "r", run_id=name) as repo:
            repo.save(number, {"m": {"w": number}})
    assert run("prune", tmp_path / "r", "--keep", "KeepLast(1)", "--yes").code == 0
    assert epochs(tmp_path / "r") == [1, 2, 3, 4]
    assert run("prune", tmp_path / "r", "--keep", "KeepLast(1)", "--run", "a", "--yes").code == 0
    assert epochs(tmp_path / "r") == [2, 3, 4]


@pytest.mark.parametrize("text", ["KeepLast", "KeepLast(0)", "os.system('x')", ""])
def test_a_policy_that_is_none(run: Run, tmp_path: Path, text: str) -> None:
    """A policy that makes no sense is refused before a store is asked."""
    result = run("plan", tmp_path / "nowhere", "--keep", text)
    assert result.code == 1
    assert "KeepLast" in result.err


def test_records(run: Run, tmp_path: Path) -> None:
    """Policies by record drop records; the table and the JSON name them; without any policy nothing is done."""
    place = tmp_path / "r"
    with ckptstore.open(place) as repo:
        for epoch in (1, 2, 3):
            repo.save(epoch, {"model": {"w": epoch}, "optimizer": {"m": epoch}})
    line = ("--record", "model=KeepLast(2)", "--record", "optimizer=KeepLast(1)")
    assert "its optimizer: no policy keeps it" in run("plan", place, *line).out
    done = run("prune", place, *line, "--yes", "--json").json
    assert [(e["epoch"], e["kept"], e["dropped"]) for e in done["epochs"]] == [
        (1, False, {}),
        (2, True, {"optimizer": "no policy keeps it"}),
        (3, True, {}),
    ]
    assert "no policy keeps it" in run("show", place, 2).out
    for wrong in ((), ("--keep", "KeepLast(1)", *line), ("--record", "KeepLast(1)"), ("--record", "model=Keep")):
        assert run("prune", place, *wrong, "--yes").code == 1
    assert epochs(place) == [2, 3]


def test_quarantine(run: Run, state_repo: Path) -> None:
    """An epoch that is set aside is shown so, survives a prune, is passed by, and comes back when it is released."""
    assert run("quarantine", state_repo, 3).code == 1
    assert run("quarantine", state_repo, 3, "--reason", "x", "--release").code == 1
    assert run("quarantine", state_repo, 9, "--reason", "x").code == 3
    assert "is quarantined: it diverged" in run("quarantine", state_repo, 3, "--reason", "it diverged").out
    assert "QUARANTINED: it diverged" in run("ls", state_repo).out
    epochs = {e["epoch"]: e["quarantined"] for e in run("ls", state_repo, "--json").json["epochs"]}
    assert epochs == {1: None, 2: None, 3: "it diverged"}
    assert "quarantined: it diverged" in run("plan", state_repo, "--keep", "KeepLast(1)").out
    assert run("prune", state_repo, "--keep", "KeepLast(1)", "--yes").code == 0
    assert [e["epoch"] for e in run("ls", state_repo, "--json").json["epochs"]] == [2, 3]
    again = run("quarantine", state_repo, 3, "--release", "--json").json
    assert (again["quarantined"], again["was_quarantined"]) == (False, True)
    assert "was not quarantined" in run("quarantine", state_repo, 3, "--release").out


def test_pins_and_holds_are_shown(run: Run, state_repo: Path) -> None:
    """``ls`` and ``show`` say which epochs are pinned, held or set aside, and why, beside the metadata."""
    assert run("pin", state_repo, 1, "--reason", "the paper").code == 0
    assert run("quarantine", state_repo, 3, "--reason", "it diverged").code == 0
    with ckptstore.open(state_repo, create=False) as repo, repo.hold(2, reason="evaluation"):
        listed, epochs = run("ls", state_repo).out, run("ls", state_repo, "--json").json["epochs"]
        shown, held = run("show", state_repo, 2).out, run("show", state_repo, 2, "--json").json["held"]
    first, second, third = listed.splitlines()[1:]
    assert "PINNED: the paper; loss=nan" in first
    assert "held by a reader on" in second
    assert "evaluation" in second
    assert "QUARANTINED: it diverged" in third
    assert "loss=nan" in third
    assert [(e["pinned"], e["quarantined"]) for e in epochs] == [
        ("the paper", None),
        (None, None),
        (None, "it diverged"),
    ]
    assert epochs[1]["held"] == held
    assert "evaluation" in shown
    assert "the paper" in run("show", state_repo, 1).out
    assert run("show", state_repo, 3, "--json").json["quarantined"] == "it diverged"
    assert run("show", state_repo, 2, "--json").json["held"] is None


def test_verify_sets_aside(run: Run, state_repo: Path) -> None:
    """``verify --quarantine`` marks what is damaged."""
    flip(chunks_of(state_repo, 3)[0])
    assert run("verify", state_repo, "--quarantine").code == 4
    found = {e["epoch"]: e["quarantined"] for e in run("ls", state_repo, "--json").json["epochs"]}
    assert found[3].startswith("damaged: ")


def test_no_is_an_answer(run: Run, state_repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal: whoever says no is told that nothing was done, and only a yes deletes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("n\nperhaps\ny\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    refused = run("prune", state_repo, "--keep", "KeepLast(1)")
    assert refused.code == 1
    assert refused.err.endswith("error: you said no: nothing was done\n")
    assert epochs(state_repo) == [1, 2, 3]
    assert run("prune", state_repo, "--keep", "KeepLast(1)").code == 0
    assert epochs(state_repo) == [3]


def test_rm_names_what_is_not_there(run: Run, state_repo: Path) -> None:
    """One or several; and nothing is deleted."""
    assert "there is no epoch 8 in" in run("rm", state_repo, 1, 8, "--yes").err
    several = run("rm", state_repo, 1, 8, 9, "--yes")
    assert several.code == 3
    assert "there are no epochs 8, 9 in" in several.err
    assert len(run("ls", state_repo, "--json").json["epochs"]) == 3


def test_rm_asks_for_force(run: Run, tmp_path: Path) -> None:
    """By hand it can be deleted all the same."""
    with ckptstore.open(tmp_path / "r") as repo:
        repo.save(1, {"m": {"w": 1}})
        repo.save(2, {"m": {"w": 2}})
        with repo.hold(1, "eval"):
            refused = run("rm", tmp_path / "r", 1, "--yes")
            assert refused.code == 1
            assert "held by a reader" in refused.err
            assert "eval" in run("plan", tmp_path / "r", "--keep", "KeepLast(1)").out
            assert run("rm", tmp_path / "r", 1, "--force", "--yes").code == 0
        assert repo.epochs() == [2]
