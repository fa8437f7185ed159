"""torch DCP on one rank: nobody has to be told anything, so that it is an ordinary save."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.stores import OpLog

pytest.importorskip("torch.distributed.checkpoint", reason="needs torch: make test-adapters")

torch: Any = importlib.import_module("torch")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")
adapter: Any = importlib.import_module("ckptstore.adapters.dcp")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((300, 7), value), "rows": [torch.ones(3), {"deep": torch.zeros(2)}, {}, 5]},
        "optimizer": {"param_groups": [{"lr": 0.1, "params": ["w"]}]},
        "step": 3,
    }


def save(repo: ckptstore.Repository, epoch: int, value: float, kind: Any = None) -> None:
    dcp.save(state(value), storage_writer=(kind or adapter.CkptStoreWriter)(repo, epoch), no_dist=True)


def test_it_takes_no_more_requests_than_a_save(tmp_path: Path) -> None:
    log = OpLog()
    with ckptstore.open(tmp_path / "run", on_request=log) as repo:
        repo.save(0, state(0.0))
        log.clear()
        save(repo, 1, 1.0)
        by_dcp = log.count()
        log.clear()
        repo.save(2, state(2.0))
        assert by_dcp == log.count()
        assert not list((tmp_path / "run" / "leases").glob("*"))


def test_lists_and_dicts_come_back_as_they_were(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "run") as repo:
        save(repo, 1, 1.0)
        found = repo.checkpoint(1).load()
        assert found["model"]["rows"][2:] == [{}, 5]
        assert found["model"]["rows"][1]["deep"].tolist() == [0, 0]
        assert found["optimizer"] == state(1.0)["optimizer"]
        assert found["state_dict"]["step"] == 3


def test_who_commits_the_epoch_meanwhile_stays(tmp_path: Path) -> None:
    class Late(adapter.CkptStoreWriter):  # type: ignore[misc]
        def finish(self, **arguments: Any) -> None:
            with ckptstore.open(tmp_path / "run") as other:
                other.save(1, {"model": {"w": "other"}})
            super().finish(**arguments)

    with ckptstore.open(tmp_path / "run") as repo:
        save(repo, 0, 0.0)
        with pytest.raises(dcp.CheckpointException) as failed:
            save(repo, 1, 1.0, Late)
        assert isinstance(failed.value.failures[0][0], ckptstore.EpochExistsError)
        assert repo.checkpoint(1).load("model") == {"w": "other"}
        save(repo, 2, 2.0)
        assert repo.epochs() == [0, 1, 2]


def test_a_writer_that_was_never_finished_leaves_no_epoch(tmp_path: Path) -> None:
    class Cut(adapter.CkptStoreWriter):  # type: ignore[misc]
        def finish(self, **arguments: Any) -> None:
            raise RuntimeError("cut off")

    with ckptstore.open(tmp_path / "run") as repo:
        for _ in range(2):
            with pytest.raises(dcp.CheckpointException):
                save(repo, 1, 1.0, Cut)
        assert repo.epochs() == []
        save(repo, 1, 1.0)
        assert repo.epochs() == [1]
        assert torch.equal(repo.checkpoint(1).load("model")["w"], torch.full((300, 7), 1.0))
