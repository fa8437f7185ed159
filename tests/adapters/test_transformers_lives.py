"""A Hugging Face Trainer that is killed twice ends bit for bit as one that nobody disturbed."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.lives import KILLED, Nursery, nursery

pytestmark = [
    pytest.mark.kill,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers: make test-adapters"
    ),
]


@pytest.fixture(scope="module")
def lives() -> Iterator[Nursery]:
    with nursery("tests.adapters.transformers_lives") as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(lives: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, found = lives.live("train", url=str(folder / "repository"), options=None, output=str(folder / "out"))
    assert code == 0, found
    return found


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_killed_twice_ends_bit_identical(
    place: str, lives: Nursery, undisturbed: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """P1: killed while the files of a step in the middle of an epoch are being sent, and again right after a commit.
    The last life is on another machine: its output folder is empty."""
    url, options = str(tmp_path / "repository"), None
    if place == "s3":
        bucket = request.getfixturevalue("s3")
        url, options = bucket.url(), bucket.storage_options
    where = {"url": url, "options": options}
    assert lives.live("train", **where, output=str(tmp_path / "out"), kill=["/chunks/", 12]) == (KILLED, "")
    assert lives.live("train", **where, output=str(tmp_path / "out"), kill=["manifests/0", 2]) == (KILLED, "")
    code, found = lives.live("train", **where, output=str(tmp_path / "elsewhere"))
    assert code == 0, found
    digest, kept, whole = found
    assert digest == undisturbed[0]
    assert set(kept) >= set(undisturbed[1])  # and what the last life has resumed from
    assert whole


def test_two_ranks(lives: Nursery, tmp_path: Path) -> None:
    """The files of all ranks are in one epoch, and each rank finds its own again: random numbers go on as they were."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    facts = {"port": port, "save_steps": 3, "eval_strategy": "no", "lr_scheduler_type": "constant"}
    found = {}
    for life, (place, epochs) in enumerate([("whole", 2), ("parts", 1), ("parts", 2)]):
        where = {"url": str(tmp_path / place), "output": str(tmp_path / f"out {life}")}
        code, found[life] = lives.live("two_ranks", **where, **facts, epochs=epochs)
        assert code == 0, found[life]
    digest, epochs_there, records = found[2]
    assert epochs_there == [3, 5, 6, 9, 10]
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(records)
    assert digest == found[0][0]
