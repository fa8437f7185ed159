"""``ckptstore diff``: tables, JSON, exit codes."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run, chunks_of, flip


def test_diff(run: Run, state_repo: Path) -> None:
    """What changed and how far, in a table and as JSON; the exit code is 0 unless one asks for it."""
    result = run("diff", state_repo, 1, 2, "--json")
    assert result.code == 0
    [array] = result.json["arrays"]
    assert (array["path"], array["outcome"], array["elements"]) == ("enc.w", "changed", 60_000)
    assert array["first"] == {"kind": "numpy", "dtype": "float32", "shape": [300, 200]}
    assert array["largest"] > 0
    assert [(v["path"], v["first"], v["second"]) for v in result.json["values"]] == [("n", "1", "2")]
    table = run("diff", state_repo, 1, 2)
    assert "60000 changed, by at most" in table.out
    assert run("diff", state_repo, 1, 2, "--exit-code").code == 1


def test_diff_of_equals(run: Run, state_repo: Path) -> None:
    """An epoch is equal to itself; ``--all`` lists its arrays."""
    same = run("diff", state_repo, 3, 3, "--exit-code", "--all")
    assert same.code == 0
    assert "are equal, every bit" in same.out
    assert "enc.w" in same.out
    assert "enc.w" not in run("diff", state_repo, 3, 3).out


def test_diff_errors(run: Run, state_repo: Path) -> None:
    """No such epoch or record is 3, damage is 4."""
    assert run("diff", state_repo, 1, 9).code == 3
    assert run("diff", state_repo, 1, 2, "--record", "optimizer").code == 3
    flip(chunks_of(state_repo, 2)[0])
    damaged = run("diff", state_repo, 1, 2)
    assert damaged.code == 4
    assert "damaged" in damaged.err


def test_diff_of_files(run: Run, file_repo: Path) -> None:
    """Files are compared by length and bytes."""
    result = run("diff", file_repo, 1, 2, "--record", "model")
    assert result.code == 0
    assert "(file)" in result.out
    assert "shape [200001] → [200002]" in result.out
