"""Processes of ``jax.distributed`` (with gloo) save one checkpoint together, each its shards."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore

pytest.importorskip("jax.numpy", reason="needs jax: make test-adapters")
pytestmark = pytest.mark.usefixtures("entry_points")

jax: Any = importlib.import_module("jax")
adapter: Any = importlib.import_module("ckptstore.adapters.jax")
child: Any = importlib.import_module("tests.adapters.jax_process")
servers: Any = importlib.import_module("servers")

jax.config.update("jax_num_cpu_devices", 8)  # no test has run yet, so no backend has been made

ROOT = Path(__file__).parents[2]
SECONDS = 240
COUNT = 2


def told(url: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What each process said at its end."""
    port = servers.unused_endpoint().rpartition(":")[2]
    command = [sys.executable, str(Path(child.__file__))]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(COUNT), port, url, json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(COUNT)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * COUNT
    finally:
        for process in processes:
            process.kill()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_processes_save_their_shards_and_read_what_they_need(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """P2, P7: one commit of all processes; each restores its shards of any layout, and reads no more than these."""
    options: dict[str, Any] = {}
    url = str(tmp_path / "run")
    if place == "s3":
        bucket = request.getfixturevalue("s3")
        url, options = bucket.url(), bucket.storage_options
    whole = child.VALUES.nbytes
    for life in told(url, options):
        assert life["same"] == dict.fromkeys(life["same"], True)
        # Half of the matrix, and all that is small; whole chunks are read.
        assert whole // 2 <= life["read"] < whole * 0.6
        assert life["sent"] < whole // 100  # nothing has changed since epoch 1

    # One process with all devices takes up what several have saved; and without JAX it is whole arrays.
    with ckptstore.open(url, storage_options=options or None, create=False) as repository:
        assert repository.epochs() == [1, 2]
        assert repository.verify().ok
        checkpoint = repository.checkpoint(1)
        tree = child.pytree()
        found = adapter.restore(checkpoint, {"state": tree})["state"]
        assert child.check(found, tree) == dict.fromkeys(child.check(found, tree), True)
        assert checkpoint.bytes_state < whole * 1.1  # replicas are stored once
        plain = checkpoint.load("state")
        assert np.array_equal(plain["w"], child.VALUES)
        assert plain["count"] == {"weak_type": 7}


def test_a_single_process_has_no_ranks() -> None:
    """The same line of code saves with one process."""
    assert adapter.ranks() == {}
