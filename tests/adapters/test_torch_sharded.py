"""TrainingState whose tensors are sharded over real ranks (FSDP2, gloo): saved by all, restored by any number."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import keys
from tests.conftest import Bucket

pytest.importorskip("torch.distributed.fsdp", reason="needs torch: make test-adapters")
from tests.adapters.test_dcp import Ranks

torch: Any = importlib.import_module("torch")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks("state_ranks")
    yield made
    made.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def test_a_resumed_run_ends_as_the_undisturbed_one(ranks: Ranks, url: str, tmp_path: Path) -> None:
    """On as many ranks bit for bit: weights, moments, schedule, batches, and each rank's own random numbers."""
    file = str(tmp_path / "expected.pt")
    through = ranks.run(3, "undisturbed", url=url, expected=file, last=6)
    assert ckptstore.open(url).epochs() == [3, 6]
    for rank, found in enumerate(ranks.run(3, "resumed", url=url, expected=file, last=6, epoch=3, onto=f"{url}-2")):
        assert found["begun"] == [3, 3, 3]
        assert found["drawn"] == through[rank][3:]
        assert found["wrong"] == []
        assert found["heard"] == []
    assert through[0] != through[1]  # each has its own
    checkpoint = ckptstore.open(url).checkpoint(6)
    assert checkpoint.metadata == {"loss": 0.5}
    assert [*checkpoint.structure("rng")] == ["0", "1", "2"]
    assert not list((tmp_path / "run" / "leases").glob("*"))


@pytest.mark.parametrize("loading", [1, 2, 4])
def test_any_number_of_ranks_restores(ranks: Ranks, url: str, tmp_path: Path, loading: int) -> None:
    """Tensors bit for bit; who was not there takes schedule and position of rank 0, and keeps its own generators."""
    file = str(tmp_path / "expected.pt")
    through = ranks.run(3, "undisturbed", url=url, expected=file, last=6)
    for rank, found in enumerate(ranks.run(loading, "resumed", url=url, expected=file, last=6, epoch=6)):
        assert found["begun"] == [6, 6, 6]
        assert found["wrong"] == []
        keeps = [f"{name} was saved of 3 ranks: rank {rank} keeps its own" for name in ("own", "rng")]
        assert found["heard"] == (keeps if rank > 2 else [])
    assert len(through) == 3


@pytest.mark.s3
def test_the_same_on_s3(ranks: Ranks, s3: Bucket, tmp_path: Path) -> None:
    """2 ranks save, 3 restore."""
    job: dict[str, Any] = {"url": s3.url("state"), "expected": str(tmp_path / "expected.pt"), "last": 3}
    ranks.run(2, "undisturbed", **job, options=s3.storage_options)
    found = ranks.run(3, "resumed", **job, options=s3.storage_options)
    assert [one["wrong"] for one in found] == [[]] * 3


def test_one_process_restores_it_without_sharding(ranks: Ranks, url: str, tmp_path: Path) -> None:
    """For an evaluation, or to go on with one device: no group, no sharding."""
    file = str(tmp_path / "expected.pt")
    ranks.run(2, "undisturbed", url=url, expected=file, last=3)
    assert importlib.import_module("tests.adapters.state_ranks").alone(url, file, 3) == []


def test_a_rank_that_fails_fails_all_by_name(ranks: Ranks, url: str) -> None:
    """P1: its own error there, RanksFailedError with its name elsewhere; the epoch before stays; again works."""
    ranks.run(3, "failing", url=url, epoch=1, doomed=-1)
    for rank, found in enumerate(ranks.run(3, "failing", url=url, epoch=2, doomed=1)):
        if rank == 1:
            assert found["error"] == "AccessError"
        else:
            assert found["error"] == "RanksFailedError"
            assert "rank 1: has failed: AccessError: 403: this rank may not write" in found["message"]
    assert ckptstore.open(url).epochs() == [1]
    for found in ranks.run(3, "failing", url=url, epoch=1, doomed=-1):
        assert found["error"] == "EpochExistsError"
    assert ranks.run(3, "failing", url=url, epoch=2, doomed=-1) == [None] * 3


def test_damage_of_the_newest_steps_back_on_all_ranks(ranks: Ranks, url: str, tmp_path: Path) -> None:
    """P3: one flipped bit: all take the epoch before, and replace the damaged one when they get there again."""
    file = str(tmp_path / "expected.pt")
    ranks.run(2, "undisturbed", url=url, expected=file, last=6)
    repo = ckptstore.open(url)
    own = [key for key in chunks_of(repo, 6) if key not in chunks_of(repo, 3)]
    path = Path(url) / own[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for found in ranks.run(2, "resumed", url=url, expected=file, last=6):
        assert found["begun"] == [3, 3, 3]
        assert found["wrong"] == []
    assert ckptstore.open(url).checkpoint(6).generation == 2
    assert ckptstore.open(url).verify(deep=True).ok


def chunks_of(repo: ckptstore.Repository, epoch: int) -> list[str]:
    found = repo.checkpoint(epoch)
    return sorted({chunk.key for name in found.records for chunk in found._index(found._entry(name)).chunks})


def test_what_does_not_fit(ranks: Ranks, url: str, tmp_path: Path) -> None:
    """Told on all ranks before anything is changed; strict=False leaves it as it is, and says so."""
    ranks.run(2, "undisturbed", url=url, expected=str(tmp_path / "expected.pt"), last=3)
    for found in ranks.run(2, "misfits", url=url):
        assert found["strict"]["error"] == "InvalidRecordError"
        assert "more: missing in the checkpoint" in found["strict"]["message"]
        assert found["unrestored"] == ["more: missing in the checkpoint"]
        assert found["step"] == 3


@pytest.mark.kill
def test_one_rank_that_is_told_to_end_makes_all_save(ranks: Ranks, url: str) -> None:
    """SIGTERM of one: the last save is that of all ranks, at one border; then that one ends."""
    found = ranks.ended(3, "told_to_end", url=url, victim=1)
    assert [one.get("code") for one in found] == [None, -signal.SIGTERM, None]
    saved = ckptstore.open(url).epochs()
    assert saved in ([3], [4], [5])  # the border after the signal was heard of
    assert [one["returned"] for one in found if "returned" in one] == [saved, saved]
    assert not list((Path(url) / keys.LEASES).glob("*"))
