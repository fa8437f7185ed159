"""A run of Lightning that is killed twice ends bit for bit as one that nobody disturbed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.lives import KILLED, Nursery, nursery

pytestmark = [
    pytest.mark.kill,
    pytest.mark.skipif(
        importlib.util.find_spec("pytorch_lightning") is None, reason="needs pytorch-lightning: make test-adapters"
    ),
]


@pytest.fixture(scope="module")
def lives() -> Iterator[Nursery]:
    with nursery("tests.adapters.lightning_lives") as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(lives: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Any:
    code, found = lives.live("train", url=str(tmp_path_factory.mktemp("undisturbed")), options=None)
    assert code == 0, found
    return found


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_killed_twice_ends_bit_identical(
    place: str, lives: Nursery, undisturbed: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """P1: killed while the third epoch is being sent, and again right after a commit; weights, moments and the order of
    the data are those of the run that was never killed, and what the policy keeps is there."""
    url, options = str(tmp_path / "repository"), None
    if place == "s3":
        bucket = request.getfixturevalue("s3")
        url, options = bucket.url(), bucket.storage_options
    where = {"url": url, "options": options}
    assert lives.live("train", **where, kill=["/chunks/", 11]) == (KILLED, "")
    assert lives.live("train", **where, kill=["manifests/0", 2]) == (KILLED, "")
    code, found = lives.live("train", **where)
    assert code == 0, found
    digest, kept, whole = found
    assert digest == undisturbed[0]
    assert set(kept) >= set(undisturbed[1])  # and what the last life has resumed from
    assert whole


def test_two_ranks(lives: Nursery, tmp_path: Path) -> None:
    """With DDP, rank 0 is killed in the middle of a save; the run that goes on ends as the one that nobody disturbed,
    with the random numbers of each rank."""
    two = {"options": None, "strategy": "ddp_fork", "devices": 2, "epochs": 3}
    code, undisturbed = lives.live("train", url=str(tmp_path / "undisturbed"), **two)
    assert code == 0, undisturbed
    code, said = lives.live("train", url=str(tmp_path / "repository"), **two, kill=["/chunks/", 7])
    assert code == 1
    assert "SIGKILL" in said
    code, found = lives.live("train", url=str(tmp_path / "repository"), **two)
    assert code == 0, found
    assert (found[0], found[2]) == (undisturbed[0], True)
