"""``ckptstore bench``: it measures what it says, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ckptstore
from ckptstore.cli import _bench_works as works
from ckptstore.cli.bench import parse_size
from ckptstore.errors import InvalidArgumentError
from ckptstore.stores import open_store
from tests.cli.conftest import Run

if TYPE_CHECKING:
    from tests.conftest import Bucket

SIZE = ("--size", "2MiB", "--rounds", "2")
TIMED = ("raw_put", "raw_get", "save", "restore", "second_save")


def check(found: Any) -> None:
    """What a result must hold, wherever it was measured."""
    assert found["rounds"] == 2
    assert 0.99 * 2**21 < found["bytes_state"] <= 2**21
    for work in TIMED:
        assert len(found[work]["seconds_all"]) == 2
        assert min(found[work]["seconds_all"]) > 0
    assert found["bytes_state"] / 1.5 < found["save"]["bytes_stored"] < found["bytes_state"]
    assert found["second_save"]["bytes_changed"] < 0.011 * found["bytes_state"]
    assert found["second_save"]["bytes_sent"] < found["second_save"]["bytes_changed"] + 4096
    assert found["save"]["requests"] > found["save"]["chunks"] >= 2
    assert set(found["small_request_seconds"]) == {"put", "get", "info", "list", "delete"}
    assert found["codec_bytes_per_second"] > 1e6
    for limit in found["limits"].values():
        assert limit[limit["by"]] == max(limit[part] for part in ("store", "codec", "latency"))


def test_bench_measures_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    """Every work is timed in every round; the folder holds afterwards what it held before."""
    place = tmp_path / "store"
    with ckptstore.open(place) as repo:
        repo.save(1, {"model": {"w": np.arange(10)}})
    before = sorted(place.rglob("*"))
    result = run("bench", place, *SIZE, "--json")
    assert result.code == 0
    check(result.json)
    assert sorted(place.rglob("*")) == before


def test_bench_removes_the_folders_that_it_made(run: Run, tmp_path: Path) -> None:
    """A folder that was not there is not there afterwards."""
    assert run("bench", tmp_path / "a" / "b", *SIZE, "--json").code == 0
    assert list(tmp_path.iterdir()) == []


def test_bench_on_s3(run: Run, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on S3: other objects below the URL stay, its own go."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    url = s3.url()
    with open_store(url, storage_options=s3.storage_options) as store:
        store.put("bench-mine", b"mine")
        result = run("bench", url, *SIZE, "--json", "--option", f"endpoint_url={s3.endpoint}")
        assert result.code == 0
        check(result.json)
        assert [info.key for info in store.list()] == ["bench-mine"]


def test_bench_says_in_words_what_limits(run: Run) -> None:
    """The table has a row for each work, in human units, and a sentence each for save and restore."""
    result = run("bench", "memory://bench-words", "--size", "1MiB", "--rounds", "1")
    assert result.code == 0
    for row in ("the bytes alone, put", "save", "restore, in place", "second save, 1 % changed", "One small request"):
        assert row in result.out
    assert "MiB/s" in result.out or "GiB/s" in result.out
    assert "A save of " in result.out
    assert " is limited by " in result.out


def test_bench_cleans_up_after_an_error(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails in the middle is an error with its exit code, and nothing stays."""

    def fail(*_: object) -> Iterator[None]:
        raise ckptstore.StoreFullError("the disk is full")

    monkeypatch.setattr(works, "_stall", fail)
    result = run("bench", tmp_path / "full", *SIZE)
    assert (result.code, result.out) == (5, "")
    assert "the disk is full" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.kill
def test_bench_cleans_up_after_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a save ends it with 130 and removes what it wrote."""
    place = tmp_path / "store"
    line = [sys.executable, "-m", "ckptstore.cli", "bench", str(place), "--size", "64MiB", "--rounds", "50"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and not list(place.glob("bench-*/repo*/attempts/*/chunks/*")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said.strip().splitlines()[-1] == "error: interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64MiB", 2**26), ("2GB", 2 * 10**9), ("1.5 gib", 3 * 2**29), ("1048576", 2**20)]
)
def test_sizes(text: str, nbytes: int) -> None:
    """Sizes are read as people write them."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "4x", "100", "0MiB", "-1GiB", "1 TB"])
def test_sizes_that_make_no_sense(text: str, run: Run, tmp_path: Path) -> None:
    """Anything else is refused before the store is touched."""
    with pytest.raises(InvalidArgumentError, match="--size"):
        parse_size(text)
    result = run("bench", tmp_path / "x", "--size", text)
    assert result.code == 1
    assert list(tmp_path.iterdir()) == []
