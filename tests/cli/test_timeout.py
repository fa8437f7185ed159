"""``--timeout``: a wrong or hung endpoint ends a command soon, with the exit code of a store that is not available."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore.cli import _common
from ckptstore.cli._common import access, seconds_of
from ckptstore.errors import InvalidArgumentError
from tests.cli.conftest import Run

_MUCH = 60.0  # far below the 180 s of retries, far above what a busy machine takes


@pytest.mark.parametrize("kind", ["refused", "silent"])
def test_an_endpoint_that_is_wrong(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there, or somebody who never answers: one line, exit code 5, soon."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if kind == "refused":
            server.close()
        line = ["ls", "s3://bucket/run", "--option", f"endpoint_url=http://127.0.0.1:{port}", "--timeout", "1s"]
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "ckptstore.cli", *line], capture_output=True, text=True, timeout=_MUCH, check=False
        )
        assert time.monotonic() - begun < _MUCH
    assert done.returncode == 5, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_what_the_stores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries and single requests are bounded, as each kind of store has it; what somebody asked for stays."""
    assert access("s3://b/p", None) == {"storage_options": None}
    monkeypatch.setattr(_common, "_timeout", 5.0)
    s3 = access("s3://b/p", ['config_kwargs={"read_timeout": 2}'])
    assert s3["storage_options"] == {"config_kwargs": {"connect_timeout": 5.0, "read_timeout": 2}}
    assert (s3["retry"].deadline, s3["retry"].hang) == (5.0, 5.0)
    assert access("gs://b/p", None)["storage_options"] == {"requests_timeout": 5.0}
    assert access("/nvme/run", None)["storage_options"] is None
    monkeypatch.setattr(_common, "_timeout", 3600.0)
    long = access("s3://b/p", None)
    assert long["storage_options"]["config_kwargs"] == {"connect_timeout": 10, "read_timeout": 60}
    assert (long["retry"].deadline, long["retry"].hang) == (3600.0, 120.0)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "2d"])
def test_what_is_no_timeout(run: Run, tmp_path: Path, text: str) -> None:
    """Refused before anything is asked; and it is forgotten after the command."""
    refused = run("ls", tmp_path / "none", "--timeout", text)
    assert refused.code == 1
    assert "--timeout" in refused.err
    assert run("ls", tmp_path / "none", "--timeout", "5").code == 3
    assert _common._timeout is None


def test_one_format_for_times() -> None:
    """A plain number is seconds."""
    assert [seconds_of(text) for text in ("90", "90s", "1.5m", "30min", "2h", "7d")] == [
        *(90.0, 90.0, 90.0, 1800.0, 7200.0, 604_800.0)
    ]
    with pytest.raises(InvalidArgumentError, match=r"use e\.g\. 90s"):
        seconds_of("7 weeks")
