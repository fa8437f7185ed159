"""An operator's night, command by command: a full disk, a rotten chunk, a lost key of the bucket, and nothing is lost.

docs/operators-night.md tells it; here each step is run against a real full file system and a real S3 server, and what
is left is compared with digests that the trainer took without ckptstore.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.cli._demo_model import fingerprint
from ckptstore.stores import open_store
from tests.cli.conftest import Run, chunks_of, flip
from tests.cli.story_trainer import EPOCHS
from tests.stores.test_local import mount

__all__ = ["mount"]

ROOT = Path(__file__).parents[2]
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
POLICIES = {"model": "KeepLast(20)", "optimizer": "KeepLast(2)"}
RECORDS = [word for pair in POLICIES.items() for word in ("--record", "=".join(pair))]


def train(url: Path, witness: Path, *policies: str) -> int:
    line = [sys.executable, "-m", "tests.cli.story_trainer", str(url), str(witness), *policies]
    done = subprocess.run(line, cwd=ROOT, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 5), done.stderr
    return done.returncode


def told(witness: Path) -> dict[int, dict[str, str]]:
    """What the trainer says that it has saved, by epoch."""
    return {line["epoch"]: line for line in map(json.loads, witness.read_text().splitlines())}


def assert_nothing_lost(url: str | Path, witness: Path) -> None:
    """Every epoch that was saved is there: its model bit for bit, and all of it where no policy has dropped records."""
    wanted = told(witness)
    with ckptstore.open(url, create=False) as repo:
        assert repo.epochs() == sorted(wanted)
        for epoch, line in wanted.items():
            checkpoint = repo.checkpoint(epoch)
            assert fingerprint(checkpoint.load("model")) == line["model"]
            if not checkpoint.left_out:
                assert fingerprint(checkpoint.load()) == line["state"]


def epochs(run: Run, url: object) -> list[dict[str, Any]]:
    found = run("ls", url, "--json")
    assert found.code == 0
    listed: list[dict[str, Any]] = found.json["epochs"]
    return listed


def test_an_operators_night(
    run: Run, mount: Callable[[str], Path], s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty epochs of a real run come through a full disk, a rotten chunk and a lost key; every step is a command."""
    options = s3.storage_options
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fast, bucket, witness = mount("size=24m") / "run", s3.url(), tmp_path / "witness"

    # The disk is full in the middle of the run: the trainer has stopped, and what it had saved is whole.
    assert train(fast, witness) == 5
    stopped = max(told(witness))
    assert 3 < stopped < EPOCHS
    assert [row["epoch"] for row in epochs(run, fast)] == list(range(1, stopped + 1))
    assert run("verify", fast).code == 0
    assert run("preflight", fast, "--bytes", 4 << 20).code != 0
    assert run("du", fast, "--json").json["bytes_total"] > 12 << 20

    # All of it goes to the bucket first. Then old optimizers can go from the disk; what goes is shown before.
    assert run("mirror", fast, bucket).code == 0
    assert_nothing_lost(bucket, witness)
    planned = run("plan", fast, *RECORDS, "--json").json
    assert all(row["kept"] for row in planned["epochs"])
    assert [row["epoch"] for row in planned["epochs"] if row["dropped"]] == list(range(1, stopped - 1))
    assert run("prune", fast, *RECORDS).code == 1  # nobody has said yes
    pruned = run("prune", fast, *RECORDS, "--yes", "--json").json
    assert pruned["bytes_freed"] == planned["bytes_freed"] > 0
    assert_nothing_lost(fast, witness)

    # Now there is room, and the run goes on with these policies to its end.
    assert run("preflight", fast, "--bytes", 4 << 20).code == 0
    assert train(fast, witness, json.dumps(POLICIES)) == 0
    assert sorted(told(witness)) == list(range(1, EPOCHS + 1))
    assert run("mirror", fast, bucket).code == 0
    for place in (fast, bucket):
        assert_nothing_lost(place, witness)

    # A chunk of the newest epoch rots on the disk. It is found, passed by, and comes back from the bucket.
    flip(max(chunks_of(fast, EPOCHS), key=lambda path: path.stat().st_size))
    damaged = run("verify", fast, "--json")
    assert damaged.code == 4
    assert [row["epoch"] for row in damaged.json["epochs"] if not row["ok"]] == [EPOCHS]
    assert run("repair", fast, "--dry-run").code == 4  # not by itself
    assert run("repair", fast, "--from", bucket, "--dry-run").code == 0
    assert run("verify", fast).code == 4
    assert run("repair", fast, "--from", bucket, "--yes").code == 0
    assert run("verify", fast).code == 0

    # Somebody deletes a key of the bucket by hand. The disk has it.
    store = open_store(bucket, storage_options=options)
    with ckptstore.open(bucket, create=False) as repo:
        attempt = repo.checkpoint(EPOCHS)._manifest.attempt
    lost = next(info.key for info in store.list(f"attempts/{attempt}/chunks/"))
    store.delete(lost)
    store.close()
    assert run("verify", bucket).code == 4
    assert lost in run("repair", bucket, "--from", fast, "--yes", "--json").out
    assert run("verify", bucket).code == 0

    # Space in the bucket: old optimizers go there as well. An epoch of which all is needed is pinned before.
    assert run("pin", bucket, 2, "--reason", "the one in the paper").code == 0
    assert run("prune", bucket, *RECORDS, "--yes").code == 0
    whole = [row["epoch"] for row in epochs(run, bucket) if not row["left_out"]]
    assert whole == [2, EPOCHS - 1, EPOCHS]
    assert run("gc", bucket, "--yes").code == 0

    # What was all of this for: both places have all epochs, and any program can have the weights.
    for place in (fast, bucket):
        assert_nothing_lost(place, witness)
    assert run("diff", bucket, 1, EPOCHS, "--record", "model").code in (0, 1)
    assert run("export", bucket, EPOCHS, "--to", tmp_path / "out", "--format", "npz", "--record", "model").code == 0
    assert run("report", bucket, "-o", tmp_path / "report.html").code == 0
    with ckptstore.open(bucket, create=False) as repo:
        weights = repo.checkpoint(EPOCHS).load("model")["embedding"]["weight"]
    with np.load(tmp_path / "out" / "model.npz") as exported:
        assert any(np.array_equal(exported[name], weights) for name in exported.files)
