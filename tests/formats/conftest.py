"""Helpers of the format tests: states of every kind of array, and files of other trainers by their own libraries."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.repository import Repository


@pytest.fixture
def repo(tmp_path: Path) -> Any:
    """An empty repository with small chunks, so that arrays have several."""
    with ckptstore.open(tmp_path / "repo", chunk_size=64 * 1024) as opened:
        yield opened


def numpy_state() -> dict[Any, Any]:
    """Everything that a record can hold and that some format has no place for."""
    import ml_dtypes

    rng = np.random.default_rng(7)
    shared = rng.standard_normal((300, 200)).astype(np.float32)
    return {
        "enc": {
            "w": shared,
            "tied": shared,
            "step": np.array(3.0),
            "none": np.empty((0, 3)),
            "t": shared[1:9:3, ::-2].T,
        },
        "bf16": rng.standard_normal(9).astype(ml_dtypes.bfloat16),
        "f8": rng.standard_normal(9).astype(ml_dtypes.float8_e4m3fn),
        "odd": [
            np.ones((2, 3), np.complex128),
            np.arange(3, dtype=">i4"),
            np.array(["a", "bcd"]),
            np.zeros(3, "M8[ns]"),
        ],
        "nan": np.frombuffer(np.array([0x7FC00001, 0xFF800001], "<u4").tobytes(), np.float32),
        "bytes": b"x" * 5000,
        "buffer": bytearray(b"y" * 5000),
        "plain": {"s": "text", "i": 2**70, "f": float("inf"), "n": None, "t": (1, [True, {2}]), "short": b"z"},
        1: np.arange(2),
        "1": np.arange(3),
        "a.b": np.arange(4),
        "a": {"b": np.arange(5), "B": np.arange(6)},
        "../up/x.npy": np.arange(7),
        "__metadata__": np.arange(8),
        "": np.arange(9),
    }


def torch_state(torch: Any) -> dict[str, Any]:
    """Tensors of each kind: views, ties, 0-d, empty, narrow floats."""
    base = torch.randn(64, 48)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    return {
        "model": model.state_dict(),
        "tied": [base, base],
        "views": (base.t(), base[::3, 1:], base.expand(2, 64, 48), base[0]),
        "bf16": base.bfloat16(),
        "f8": base.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "complex": torch.randn(3, dtype=torch.complex64),
        "bool": base > 0,
        "state": {0: {"exp_avg": base * 2, "step": torch.tensor(5.0)}},
        "groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1], "name": None}],
    }


def trainer_folder(torch: Any, place: Path, *, shards: bool) -> Path:
    """A ``checkpoint-N`` folder as a Hugging Face Trainer writes it."""
    save_file = pytest.importorskip("safetensors.torch").save_file

    place.mkdir(parents=True)
    weights = {"embed.weight": torch.randn(40, 30), "head.bias": torch.randn(7).bfloat16()}
    if shards:
        names = {key: f"model-{number:05}-of-00002.safetensors" for number, key in enumerate(weights, 1)}
        for key, name in names.items():
            save_file({key: weights[key]}, str(place / name), {"format": "pt"})
        index = {"metadata": {"total_size": 4814}, "weight_map": names}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(weights, str(place / "model.safetensors"), {"format": "pt"})
    moments = {0: {"exp_avg": torch.randn(40, 30), "step": torch.tensor(2.0)}}
    torch.save({"state": moments, "param_groups": [{"lr": 1e-3, "params": [0]}]}, place / "optimizer.pt")
    torch.save({"last_epoch": 2, "_last_lr": [1e-3]}, place / "scheduler.pt")
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save(states, place / "rng_state.pth")
    torch.save(Opaque(), place / "training_args.bin")
    (place / "trainer_state.json").write_text(json.dumps({"global_step": 5, "log_history": []}))
    (place / "config.json").write_text("{}")
    (place / "sub").mkdir()
    (place / "sub" / "empty").touch()
    return place


class Opaque:
    """An object that only its own code can rebuild, as the arguments of a Trainer are."""

    def __init__(self) -> None:
        self.lr = 1e-3


def lightning_file(torch: Any, path: Path) -> dict[str, Any]:
    """A ``.ckpt`` with the keys that Lightning gives it."""
    whole = {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {"net.weight": torch.randn(20, 30)},
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5), "dirpath": "/x"}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.randn(20, 30)}}, "param_groups": [{"lr": 1e-3}]}],
        "lr_schedulers": [{"last_epoch": 3}],
        "hyper_parameters": {"hidden": 30},
    }
    torch.save(whole, path)
    return whole


def saved(repo: Repository, state: object, epoch: int = 1, name: str = "model") -> Any:
    """The state as a load gives it, after it was saved."""
    repo.save(epoch, {name: state})
    return repo.checkpoint(epoch).load(name)
