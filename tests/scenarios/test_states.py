"""Scenes of state that is hard to keep: ties, names, types, what is missing, what cannot be stored."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import InvalidArgumentError, InvalidRecordError, RecordNotFoundError
from ckptstore.stores.local import LocalStore
from ckptstore.stores.memory import MemoryStore
from tests.repository.helpers import assert_same, open_repo

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


def test_views_cost_their_own_elements() -> None:
    """95: slices, strides, transposes and expanded rows of 40 MB store what they show, and come back by value."""
    x = torch.arange(10_000_000, dtype=torch.float32)
    y = np.arange(10_000_000, dtype=np.float32)
    state = {
        "head": x[:10],
        "every": x[::1_000_000],
        "t": x[:600].view(20, 30).t(),
        "row": x[5:6].expand(1000),
        "numpy": y[::-1_000_000],
        "box": y[:8000].reshape(20, 400)[3:9, 10:90:7],
    }
    report = open_repo(MemoryStore()).save(1, {"m": state}).report
    assert report is not None
    assert report.bytes_sent < 100_000
    store = MemoryStore()
    open_repo(store).save(1, {"m": state})
    assert_same(open_repo(store).checkpoint(1).load("m"), state)


def test_ties_across_records() -> None:
    """96: the same memory in two records is stored once; within one it comes back tied, across records by value."""
    w = torch.rand(50_000)
    store = MemoryStore()
    report = open_repo(store).save(1, {"model": {"a": w, "b": w, "c": w[:5]}, "ema": {"w": w}}).report
    assert report is not None
    assert report.bytes_sent < 1.1 * 200_000
    loaded = open_repo(store).checkpoint(1).load()
    model, ema = loaded["model"], loaded["ema"]
    assert model["a"].data_ptr() == model["b"].data_ptr()
    assert torch.equal(model["c"], w[:5])
    assert torch.equal(ema["w"], w)
    model["a"].fill_(-1)
    assert torch.equal(model["b"], model["a"])
    assert torch.equal(ema["w"], w), "records are loaded into memory of their own"


def test_keys_keep_their_types_round_after_round() -> None:
    """98: integer keys stay integers, "1" and 1 are two keys, order and classes stay, save after load."""
    state: dict[str, Any] = {
        "optimizer": {0: {"step": 1}, 1: {"step": 2}},
        "milestones": Counter({25: 1, 5: 2}),
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "default": defaultdict(list, {3: [1]}),
        "mixed": {"1": "text", 1: "int", None: "none", 2.5: "float"},
    }
    store = MemoryStore()
    repo = open_repo(store)
    value: Any = {"s": state}
    for epoch in range(3):
        repo.save(epoch, value)
        value = repo.checkpoint(epoch).load()
        assert_same(value, {"s": state})
    assert len({entry.digest for m in manifests(repo) for entry in m.records}) == 1, "equal states give equal bytes"


def manifests(repo: ckptstore.Repository) -> list[Any]:
    from tests.repository.helpers import manifests_of

    return manifests_of(repo.store)


NAMES = ["test/test", "../../evil", "/abs", "a//b", "C:\\x", ".", "..", "~user", "a\0b", "con", "x" * 500]


def test_names_are_no_paths(tmp_path: Path) -> None:
    """101: names of parameters are data; nothing is made beside the repository, and each comes back."""
    state = {name: np.full(3, number) for number, name in enumerate(NAMES)}
    root = tmp_path / "a" / "b" / "repository"
    with open_repo(LocalStore(root)) as repo:
        repo.save(1, {"m": state}, dict.fromkeys(NAMES, 1))
        assert_same(repo.checkpoint(1).load("m"), state)
        for name in ("../evil", "/abs", "a//b", ".", "~user", "C:\\x"):
            with pytest.raises(InvalidRecordError):
                repo.save(2, {name: state})
        assert repo.epochs() == [1]
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == ["b"]
    assert os.listdir(tmp_path / "a" / "b") == ["repository"]


def test_layouts_and_classes() -> None:
    """104: values are right whatever the layout; contiguous plain tensors come back; other kinds are named at save."""
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(torch.rand(3))
    store = MemoryStore()
    open_repo(store).save(1, {"m": {"image": image, "t": image[0, 0].t(), "p": parameter}})
    loaded = open_repo(store).checkpoint(1).load("m")
    assert torch.equal(loaded["image"], image)
    assert loaded["image"].is_contiguous()
    assert torch.equal(loaded["t"], image[0, 0].t())
    assert type(loaded["p"]) is torch.Tensor
    assert not loaded["p"].requires_grad
    others = {"coo": torch.eye(3).to_sparse(), "meta": torch.empty(3, device="meta")}
    with pytest.raises(InvalidRecordError) as caught:
        open_repo(store).save(2, {"m": {"deep": others}})
    assert "m.deep.coo" in str(caught.value)
    assert "m.deep.meta" in str(caught.value)


def test_all_that_cannot_be_stored_is_named_before_anything_is_written(tmp_path: Path) -> None:
    """106: code, weak references, generators and files are named by their paths, in all records at once."""
    module = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    with open(tmp_path / "log", "w") as file:
        states: dict[str, Any] = {
            "scheduler": {"_scale_fn_ref": weakref.WeakMethod(sgd.step), "anneal": sgd.step, "last_epoch": 3},
            "callbacks": {"f": lambda: 0, "nested": [1, {"g": iter([])}], "file": file},
            "model": module.state_dict(),
        }
        store = MemoryStore()
        repo = open_repo(store)
        before = sorted(info.key for info in store.list())
        for save in (repo.save, repo.save_async):
            with pytest.raises(InvalidRecordError) as caught:
                save(1, states)
            for path in (
                "scheduler._scale_fn_ref", "scheduler.anneal", "callbacks.f", "callbacks.nested.1.g", "callbacks.file",
            ):  # fmt: skip
                assert path in str(caught.value)
            assert "last_epoch" not in str(caught.value)
        assert sorted(info.key for info in store.list()) == before
        states["scheduler"] = {"last_epoch": 3}  # what the message asks for
        del states["callbacks"]
        repo.save(1, states)
        assert repo.checkpoint(1).load("scheduler") == {"last_epoch": 3}


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR", "LambdaLR", "CosineAnnealingLR"])
def test_schedulers(name: str) -> None:
    """106: the states of real schedulers are stored exactly, or what is code in them is named."""
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    kinds = torch.optim.lr_scheduler
    made: dict[str, Any] = {
        "CyclicLR": lambda: kinds.CyclicLR(sgd, 0.1, 0.5),
        "OneCycleLR": lambda: kinds.OneCycleLR(sgd, 0.5, total_steps=9),
        "LambdaLR": lambda: kinds.LambdaLR(sgd, [lambda step: 0.5**step]),
        "CosineAnnealingLR": lambda: kinds.CosineAnnealingLR(sgd, 10),
    }
    scheduler = made[name]()
    for _ in range(3):
        sgd.step()
        scheduler.step()
    state = scheduler.state_dict()
    store = MemoryStore()
    open_repo(store).save(1, {"s": state})
    loaded = open_repo(store).checkpoint(1).load("s")
    assert_same(loaded, state)
    scheduler.load_state_dict(loaded)
    sgd.step()
    scheduler.step()


class Runs:
    """Its pickle would leave a trace."""

    trace = ""

    def __reduce__(self) -> Any:
        return open, (self.trace, "w")


def test_random_states_need_no_pickle(tmp_path: Path) -> None:
    """107: the random states of NumPy and Python and NumPy scalars are plain data; an object array is refused."""
    state = {
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "scalar": np.float64(0.1),
        "date": np.datetime64("2026-12-02T15:00"),
    }
    store = MemoryStore()
    open_repo(store).save(1, {"rng": state})
    loaded = open_repo(store).checkpoint(1).load("rng")
    assert_same(loaded, state)
    np.random.set_state(loaded["numpy"])
    random.setstate(loaded["python"])
    with pytest.raises(InvalidRecordError, match=r"rng\.o"):
        open_repo(store).save(2, {"rng": {"o": np.array(None, dtype=object)}})
    Runs.trace = str(tmp_path / "ran")
    import pickle

    payload = pickle.dumps(Runs())
    for info in list(store.list("attempts/")):
        damaged = MemoryStore()
        for other in store.list():
            damaged.put(other.key, payload if other.key == info.key else store.get(other.key))
        with pytest.raises(ckptstore.CorruptionError):
            open_repo(damaged).checkpoint(1).load()
    assert os.listdir(tmp_path) == []


def test_what_does_not_fit_is_listed_and_nothing_is_touched() -> None:
    """109: keys that are missing, one too many, of another shape or type: all named, the target as it was."""
    store = MemoryStore()
    open_repo(store).save(1, {"m": {"a": np.ones(3), "b": np.ones(3), "c": np.ones(3), "d": np.ones(3), "lazy": 1}})
    target = {"a": np.zeros(3), "b": np.zeros(4), "c": np.zeros(3, "f4"), "d": np.zeros(3), "extra": np.zeros(3)}
    with pytest.raises(InvalidRecordError) as caught:
        open_repo(store).checkpoint(1).load("m", into=target)
    for path in ("m.b", "m.c", "m.lazy", "m.extra"):
        assert path in str(caught.value)
    assert "m.a" not in str(caught.value)
    assert not any(array.any() for array in target.values())
    assert set(open_repo(store).checkpoint(1).load("m")) == {"a", "b", "c", "d", "lazy"}


def test_nothing_is_cast() -> None:
    """110: bf16 weights, fp32 moments, steps in fp32 and int64, plain and NumPy scalars: the same after 3 rounds."""
    state: dict[str, Any] = {
        "model": {"w": torch.rand(40).bfloat16()},
        "optim": {
            0: {"step": torch.tensor(3.0), "exp_avg": torch.rand(40)},
            1: {"step": torch.tensor(3), "n": np.int32(7), "x": np.float64(0.1)},
        },
        "plain": {"i": 3, "f": 3.0, "b": True},
    }
    store = MemoryStore()
    repo = open_repo(store)
    value: Any = state
    for epoch in range(3):
        repo.save(epoch, value)
        value = repo.checkpoint(epoch).load()
        assert_same(value, state)
    with pytest.raises(InvalidRecordError, match="model"):
        repo.checkpoint(2).load("model", into={"w": torch.zeros(40)})


def test_records_that_are_not_there() -> None:
    """111: what a resume needs and a checkpoint lacks is named, with what there is, before any of it is touched."""
    scaler = {"scale": 65536.0, "_growth_tracker": 0, "x": None}
    store = MemoryStore()
    open_repo(store).save(1, {"model": {"w": np.ones(3)}, "optim": {"m": np.ones(3)}})
    target: dict[str, Any] = {"model": {"w": np.zeros(3)}, "optim": {"m": np.zeros(3)}, "scaler": dict(scaler)}
    checkpoint = open_repo(store).checkpoint(1)
    with pytest.raises(RecordNotFoundError, match=r"'scaler'.*'model', 'optim'"):
        checkpoint.load(into=target)
    with pytest.raises(RecordNotFoundError, match=r"'scaler'.*'model', 'optim'"):
        checkpoint.load("scaler")
    with pytest.raises(InvalidArgumentError, match=r"lacks \['optim'\]"):
        checkpoint.load(into={"model": target["model"]})
    assert not target["model"]["w"].any()
    assert not target["optim"]["m"].any()
    open_repo(store).save(2, {"scaler": scaler, "ema": {"n": 3}})
    assert_same(open_repo(store).checkpoint(2).load("scaler"), scaler)


RELAUNCH = """
import sys
import ckptstore
repo = ckptstore.open(sys.argv[1])
ckpt = repo.latest()
repo.save(ckpt.epoch + 1, ckpt.load())
"""


def test_relaunches_do_not_grow(tmp_path: Path) -> None:
    """112: five fresh processes load and save: sizes and keys of each record stay, and the manifest tells both."""
    state: dict[str, Any] = {
        "model": {f"layer.{i}": np.full(500, i, np.float32) for i in range(4)},
        "optim": {i: {"exp_avg": np.full(500, -i, np.float32), "step": i} for i in range(4)},
    }
    with ckptstore.open(tmp_path / "repository") as repo:
        repo.save(0, state)
        for _ in range(5):
            command = [sys.executable, "-c", RELAUNCH, str(tmp_path / "repository")]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
        assert repo.epochs() == [0, 1, 2, 3, 4, 5]
        sizes = {
            tuple((name, r.arrays, r.bytes_state) for name, r in repo.checkpoint(epoch).records.items())
            for epoch in repo.epochs()
        }
        assert sizes == {(("model", 4, 8000), ("optim", 4, 8000))}
        assert_same(repo.checkpoint(5).load(), state)
        other = {"model": state["model"], "optim": {i + 4: value for i, value in state["optim"].items()}}
        with pytest.raises(InvalidRecordError, match="only in the checkpoint"):
            repo.checkpoint(5).load(into=other)
