"""``ckptstore tiers``: table, JSON, exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.conftest import Bucket


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
    late = run("tiers", state_repo, bucket, "--max-age", "0")
    assert late.code == 1
    assert f"{bucket}: its newest epoch is" in late.err
    assert "--max-age is 0" in late.err
    assert run("tiers", state_repo, bucket, "--json", "--max-age", "0").json["too_old"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("tiers", 1),
        ("tiers {}", 1),
        ("tiers {} {}", 1),
        ("tiers {} {}-no --max-age soon", 1),
        ("tiers {}-no {}-none", 3),
        ("tiers {}-no {}", 3),
    ],
)
def test_what_makes_no_sense(run: Run, state_repo: Path, line: str, code: int) -> None:
    """One line that says what to do."""
    result = run(*line.replace("{}", str(state_repo)).split())
    assert result.code == code
    assert result.err.startswith("error: ")
    assert not state_repo.with_name(f"{state_repo.name}-no").exists()  # looking makes no tier


def test_a_tier_that_does_not_answer(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """Told in its row, with the exit code of a store that is not available."""
    thesis = tmp_path / "thesis"
    thesis.write_text("no folder")
    result = run("tiers", state_repo, thesis, "--json")
    assert result.code == 5
    assert result.json["tiers"][1]["error"]
    assert result.json["tiers"][0]["newest"] == 3


def test_options_are_for_the_buckets(
    run: Run, state_repo: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder before a bucket: ``--option`` is for the bucket, and a folder that is not there is not made."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
    bucket = f"s3://{s3.name}/{tmp_path.name}-tiers"
    options = ("--option", f"endpoint_url={s3.endpoint}")
    assert run("tiers", state_repo, bucket, "--copy", "1min", *options).code == 0
    result = run("tiers", tmp_path / "typo", bucket, *options)
    assert result.code == 3
    assert not (tmp_path / "typo").exists()
