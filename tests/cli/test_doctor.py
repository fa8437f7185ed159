"""``ckptstore doctor``: its table, its JSON and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.conftest import Bucket


def test_a_good_place(run: Run, tmp_path: Path) -> None:
    """A mark and what was found for each check; exit code 0; nothing is made."""
    result = run("doctor", tmp_path / "new", "--no-speed")
    assert result.code == 0, result.out
    lines = result.out.splitlines()
    assert lines[0] == f"file://{tmp_path}/new"
    assert lines[1].split() == ["check", "found", "what", "to", "do"]
    assert [line.split()[:2] for line in lines[2:6]] == [["✔", name] for name in ("list", "put", "get", "delete")]
    assert "none yet: the first save makes it" in result.out
    assert lines[-1].startswith("nothing failed")
    assert result.err == ""
    assert list(tmp_path.iterdir()) == []


def test_json(run: Run, state_repo: Path) -> None:
    """The same for programs, with the numbers."""
    answer = run("doctor", state_repo, "--json")
    assert answer.code == 0
    assert answer.json["ok"] is True
    found = {finding["name"]: finding for finding in answer.json["findings"]}
    assert found["repository"]["facts"]["epochs"] == 3
    assert set(found["settings"]["facts"]) == {"concurrency", "chunk_size"}
    assert found["throughput"]["facts"]["put_bytes_per_second"] > 0
    assert {finding["ok"] for finding in found.values()} <= {True, None}


def test_a_place_that_fails(run: Run, state_repo: Path) -> None:
    """Exit code 1; the table says what failed and what to do, the JSON the same."""
    (state_repo / "ckptstore.json").write_bytes(b"\0" * 9)
    for path in (state_repo / "manifests").iterdir():
        path.write_bytes(b"\0" * 9)
    result = run("doctor", state_repo, "--no-speed")
    assert result.code == 1
    assert "✗  repository" in result.out
    assert result.out.splitlines()[-1].startswith("1 failed: repository")
    assert run("doctor", state_repo, "--no-speed", "--json").json["ok"] is False


@pytest.mark.parametrize("line", ["doctor", "doctor ftp://x/y", "doctor memory://x --option key=1", "doctor s3://"])
def test_lines_that_make_no_sense(run: Run, line: str) -> None:
    """Exit code 1 and one line on stderr, as for every command."""
    result = run(*line.split())
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1


def test_a_promise_of_a_single_writer(run: Run, s3_no_conditions: Bucket) -> None:
    """A server without conditional puts fails, unless one promises to be alone."""
    bucket = s3_no_conditions
    options = [f"{name}={bucket.storage_options[name]}" for name in ("key", "secret", "endpoint_url")]
    line = ["doctor", bucket.url(), "--no-speed", *(word for option in options for word in ("--option", option))]
    assert run(*line).code == 1
    promised = run(*line, "--unsafe-single-writer")
    assert promised.code == 0
    assert "!  conditional puts" in promised.out
    assert bucket.storage_options["secret"] not in promised.out
