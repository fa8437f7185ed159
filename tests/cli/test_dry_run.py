"""``--dry-run`` of the commands that replace, overwrite or prune: it writes nothing, and says what they do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

import ckptstore
from ckptstore.cli._app import app
from tests.cli.conftest import Run
from tests.watching.fake_burn import whole_file


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Nothing below the folder is made, deleted or changed, no scratch file and no marker."""
    before = _all(folder)
    yield
    assert _all(folder) == before


def _all(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {str(path): path.lstat() for path in folder.rglob("*")}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """Two epochs as burn leaves them."""
    folder = tmp_path / "artifacts"
    folder.mkdir()
    for epoch in (3, 4):
        for stem in ("model", "optim", "scheduler"):
            (folder / f"{stem}-{epoch}.bpk").write_bytes(whole_file(1, epoch, stem, "bpk"))
    return folder


@pytest.fixture
def other_repo(tmp_path: Path) -> Path:
    """A repository with another content under number 2."""
    place = tmp_path / "other_repo"
    with ckptstore.open(place) as repo:
        repo.save(2, {"own": {"n": 2}})
    return place


@pytest.fixture
def restored(file_repo: Path, tmp_path: Path, run: Run) -> Path:
    """A folder to which the files of an epoch were restored."""
    folder = tmp_path / "restored"
    assert run("restore", file_repo, "--to", folder).code == 0
    return folder


def test_cp(run: Run, state_repo: Path, other_repo: Path, tmp_path: Path) -> None:
    """A copy, one that replaces, and what is refused without a dry run is refused with it."""
    with untouched(tmp_path):
        line = ("cp", state_repo, other_repo, 2, "--replace", "--dry-run")
        shown = run(*line)
        assert shown.code == 0
        assert "would be copied" in shown.out
        assert "replaces what is there (generation 1)" in shown.out
        found = run(*line, "--json").json
        assert (found["dry_run"], found["outcome"], found["generation"]) == (True, "copied", 1)
        refused = run("cp", state_repo, other_repo, 2, "--dry-run")
        assert refused.code == 1
        assert "--replace" in refused.err
        new = run("cp", state_repo, tmp_path / "new", 2, "--dry-run", "--json").json
        assert (new["target"], new["reason"]) == (str(tmp_path / "new"), "")


def test_save(run: Run, file_repo: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """A new epoch, a new repository, one that is replaced, and one that would be refused."""
    with untouched(tmp_path):
        line = ("save", file_repo, f"model={files['model']}", "--dry-run", "--epoch")
        assert "would be saved" in run(*line, 9).out
        assert run(*line, 9, "--json").json["replaces"] is None
        refused = run(*line, 2)
        assert refused.code == 1
        assert "use --replace" in refused.err
        assert "would replace what is there under that number: model, optimizer" in run(*line, 2, "--replace").out
        found = run(*line, 2, "--replace", "--json").json
        assert found["dry_run"]
        assert (found["replaces"]["generation"], found["replaces"]["records"]) == (1, ["model", "optimizer"])
        new = run("save", tmp_path / "new", f"model={files['model']}", "--epoch", 1, "--dry-run", "--json").json
        assert (new["url"], new["replaces"]) == (str(tmp_path / "new"), None)


@pytest.mark.parametrize("command", [("restore",), ("export", "--format", "files")])
def test_restore_and_export(
    run: Run, file_repo: Path, restored: Path, command: tuple[str, ...], tmp_path: Path
) -> None:
    """Each file says whether one would be overwritten."""
    (restored / "optim.bin").unlink()
    with untouched(tmp_path):
        line = (command[0], file_repo, *command[1:], "--to", restored, "--dry-run")
        assert run(*line).code == 1
        shown = run(*line, "--force")
        assert shown.code == 0
        assert "1 would be overwritten" in shown.out
        found = run(*line, "--force", "--json").json
        assert found["dry_run"]
        over = {Path(row["path"]).name: row["overwrites"] for row in found["files"]}
        assert over == {"model.bin": True, "optim.bin": False}
        new = run(command[0], file_repo, *command[1:], "--to", tmp_path / "new" / "er", "--dry-run", "--json")
        assert new.code == 0
        assert not any(row["overwrites"] for row in new.json["files"])


def test_watch(run: Run, artifacts: Path, tmp_path: Path) -> None:
    """What is due, what it replaces, and what the policy takes when that is there; then a real run does just this."""
    place = tmp_path / "repo"
    with ckptstore.open(place) as repo:
        for epoch in (1, 2, 3):
            repo.save(epoch, {"model": {"n": epoch}})
        repo.pin(1, "the baseline")
    line = ("watch", artifacts, place, "--quiet", "0", "--interval", "0", "--keep", "KeepLast(1)", "--replace")
    with untouched(tmp_path):
        shown = run(*line, "--dry-run")
        assert shown.code == 0
        assert "epoch 4: due" in shown.out
        assert "it replaces what is there" in shown.out
        assert "then epochs 2, 3 (" in shown.out
        lines = [json.loads(text) for text in run(*line, "--dry-run", "--json").out.splitlines()]
        assert [(one["epoch"], one["kind"]) for one in lines[:-1] if one["kind"] != "changing"] == [
            (3, "due"),
            (4, "due"),
        ]
        assert sorted(lines[-1]["epochs"]) == ["2", "3"]
    assert run(*line, "--once").code == 0
    with ckptstore.open(place, create=False) as repo:
        assert repo.epochs() == [1, 4]


def test_watch_for_a_repository_that_is_to_be_made(run: Run, artifacts: Path, tmp_path: Path) -> None:
    """It is not made, and everything is due."""
    with untouched(tmp_path):
        line = ("watch", artifacts, tmp_path / "new", "--quiet", "0", "--interval", "0", "--dry-run")
        assert "epoch 3: due" in run(*line).out


@pytest.mark.parametrize(
    "line",
    [
        "watch {}/nowhere {}/new --once",
        "watch {}/nowhere {}/new --dry-run",
        "watch {}/artifacts {}/new --quiet nan",
        "watch {}/artifacts {}/new --layout frob",
        "watch {}/artifacts/model-3.bpk {}/new",
        "import {}/nowhere {}/new",
        "import {}/artifacts {}/new --layout frob",
        "import {}/artifacts {}/new --epoch 99",
        "import {}/artifacts {}/new --as pictures",
    ],
)
def test_what_is_refused_makes_no_repository(run: Run, artifacts: Path, tmp_path: Path, line: str) -> None:
    """A mistyped folder or option is found out before anything is made."""
    assert artifacts.exists()
    with untouched(tmp_path):
        assert run(*line.replace("{}", str(tmp_path)).split()).code in (1, 3)


def test_tiers(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """What would be copied and then pruned; a real run does just this."""
    bucket = tmp_path / "bucket"
    line = ("tiers", state_repo, bucket, "--keep", "KeepLast(1)", "--copy", "1min")
    new = run(*line, "--dry-run", "--json").json
    assert new["dry_run"]
    assert (new["tiers"][1]["waiting"], new["tiers"][1]["to_prune"]) == ([3], [])
    assert not bucket.exists()
    with ckptstore.open(state_repo) as here, ckptstore.open(bucket) as there:
        here.mirror(there, [1, 2])
    with untouched(tmp_path):
        found = run(*line, "--dry-run", "--json").json
        assert (found["tiers"][1]["waiting"], found["tiers"][1]["to_prune"]) == ([3], [1, 2])
        assert "would be copied: 3; would then be pruned: 1, 2" in run(*line, "--dry-run").out
    assert run(*line).code == 0
    with ckptstore.open(bucket, create=False) as repo:
        assert repo.epochs() == [3]


def test_every_command_that_overwrites_or_deletes_has_a_dry_run() -> None:
    """Whatever replaces, forces or prunes."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {name: {text for one in command.params for text in one.opts} for name, command in commands.items()}
    destructive = {name for name, known in options.items() if known & {"--replace", "--force"}}
    assert destructive >= {"save", "cp", "restore", "export", "rm", "watch", "import"}
    destructive |= {"prune", "gc", "repair", "mirror", "tiers"}
    assert {name for name in destructive if "--dry-run" not in options[name]} == set()
