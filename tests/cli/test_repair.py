"""``repair``: what it shows, what it asks, what it puts back."""

from __future__ import annotations

import shutil
from pathlib import Path

import ckptstore
from tests.cli.conftest import Run, chunks_of, flip


def test_repair_from_a_mirror(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """Damage is found, shown by a dry run, mended from the copy, and gone afterwards."""
    copy = tmp_path / "copy"
    assert run("mirror", state_repo, copy).code == 0
    sound = run("repair", state_repo, "--yes")
    assert (sound.code, sound.err) == (0, "")
    assert "nothing to mend" in sound.out
    victim = chunks_of(state_repo, 3)[0]
    flip(victim)
    assert run("repair", state_repo, "--from", copy).code == 1  # there is nobody to ask
    before = victim.read_bytes()
    told = run("repair", state_repo, "--from", copy, "--dry-run", "--json")
    assert (told.code, told.json["ok"], told.json["dry_run"]) == (0, True, True)
    assert victim.read_bytes() == before
    shown = run("repair", state_repo, "--from", copy, "--dry-run")
    assert "mendable" in shown.out
    done = run("repair", state_repo, "--from", copy, "--yes", "--json")
    assert done.code == 0
    [mend] = {o["key"]: o for row in done.json["epochs"] for o in row["objects"]}.values()
    assert state_repo / mend["key"] == victim
    assert mend["ok"]
    assert str(copy) in mend["source"]
    assert run("verify", state_repo).code == 0


def test_repair_says_what_is_left(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """Without a copy the exit code is 4, and the records that are whole are named."""
    victim = chunks_of(state_repo, 3)[0]
    victim.unlink()
    result = run("repair", state_repo, "--yes")
    assert result.code == 4
    assert "no good copy found" in result.out
    rows = run("repair", state_repo, "--dry-run", "--json").json["epochs"]
    bad = [row for row in rows if row["state"] == "damaged"]
    assert bad
    assert all(row["lost"] for row in bad)
    with ckptstore.open(state_repo) as repo:
        for row in bad:
            for name in row["whole"]:
                repo.checkpoint(row["epoch"]).load(name)
    assert run("repair", state_repo, bad[0]["epoch"], "--dry-run").code == 4
    assert run("repair", state_repo, 99, "--dry-run").code == 3


def test_a_source_that_is_none(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """A mistyped source is an error, not an empty one; nor is the repository its own."""
    assert run("repair", state_repo, "--from", tmp_path / "nowhere", "--dry-run").code == 3
    assert run("repair", state_repo, "--from", state_repo, "--dry-run").code == 1
    shutil.rmtree(tmp_path / "nowhere", ignore_errors=True)


def test_repair_tells_what_the_source_has_more(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """An epoch whose manifest is gone is listed with the command that brings it, which does."""
    copy = tmp_path / "copy"
    assert run("mirror", state_repo, copy).code == 0
    (state_repo / "manifests" / "000000000002-000001.json").unlink()
    shown = run("repair", state_repo, "--from", copy, "--yes")
    assert shown.code == 0
    line = shown.out.rsplit("This brings them: ckptstore ", 1)[1]
    assert run("repair", state_repo, "--from", copy, "--dry-run", "--json").json["absent"] == {"2": copy.as_uri()}
    assert run(*line.split()).code == 0
    assert run("repair", state_repo, "--from", copy, "--dry-run", "--json").json["absent"] == {}
    with ckptstore.open(state_repo, create=False) as repo:
        assert repo.epochs() == [1, 2, 3]
