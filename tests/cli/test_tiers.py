"""``ckptstore tiers``: table, JSON, exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run


def test_tiers(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """What is waiting is told, looking changes nothing, ``--copy`` brings it, and then nothing waits."""
    bucket = tmp_path / "bucket"
    result = run("tiers", state_repo, bucket, "--json")
    assert result.code == 0
    first, second = result.json["tiers"]
    assert (first["newest"], first["waiting"]) == (3, [])
    assert (second["epochs"], second["newest"], second["age"], second["waiting"]) == (None, None, None, [1, 2, 3])
    assert second["bytes_waiting"] > 0
    assert not bucket.exists()
    assert run("tiers", state_repo, bucket, "--max-age", "1h").code == 1
    copied = run("tiers", state_repo, bucket, "--keep", "KeepLast(2)", "--copy", "1min", "--json")
    assert copied.code == 0
    assert (copied.json["tiers"][1]["epochs"], copied.json["tiers"][1]["waiting"]) == (2, [])
    table = run("tiers", state_repo, bucket, "--max-age", "1h")
    assert table.code == 0
    for word in ("tier", "newest", "age", "waiting"):
        assert word in table.out
    assert run("tiers", state_repo, bucket, "--max-age", "0").code == 1
    assert run("tiers", state_repo, bucket, "--json", "--max-age", "0").json["too_old"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("tiers", 1),
        ("tiers {}", 1),
        ("tiers {} {}", 1),
        ("tiers {} {}-no --max-age soon", 1),
        ("tiers {}-no {}-none", 3),
    ],
)
def test_what_makes_no_sense(run: Run, state_repo: Path, line: str, code: int) -> None:
    """One line that says what to do."""
    result = run(*line.replace("{}", str(state_repo)).split())
    assert result.code == code
    assert result.err.startswith("error: ")


def test_a_tier_that_does_not_answer(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """Told in its row, with the exit code of a store that is not available."""
    thesis = tmp_path / "thesis"
    thesis.write_text("no folder")
    result = run("tiers", state_repo, thesis, "--json")
    assert result.code == 5
    assert result.json["tiers"][1]["error"]
    assert result.json["tiers"][0]["newest"] == 3
