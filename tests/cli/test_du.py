"""``ckptstore du``: table, JSON, policies."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run


def test_du(run: Run, file_repo: Path) -> None:
    """The sums add up to what the folder holds; a line for each epoch."""
    result = run("du", file_repo, "--json")
    assert result.code == 0
    on_disk = sum(path.stat().st_size for path in file_repo.rglob("*") if path.is_file())
    assert result.json["bytes_total"] == on_disk
    assert [row["epoch"] for row in result.json["epochs"]] == [1, 2]
    assert "bytes_freed" not in result.json
    table = run("du", file_repo)
    assert table.code == 0
    for word in ("shared", "alone", "total", "each counted once"):
        assert word in table.out


def test_du_with_a_policy(run: Run, state_repo: Path) -> None:
    """What a prune would free, and which epochs would go."""
    result = run("du", state_repo, "--keep", "KeepLast(1)", "--json")
    assert [row["kept"] for row in result.json["epochs"]] == [False, False, True]
    assert result.json["bytes_freed"] == sum(row["bytes_alone"] for row in result.json["epochs"][:2])
    assert "2 epochs" in run("du", state_repo, "--keep", "KeepLast(1)").out
    assert run("du", state_repo, "--keep", "KeepAll()").code == 1
    assert run("du", state_repo.parent / "nowhere").code == 3
