"""What the tests of DCP start: one line of JSON a job on stdin; each rank of it is a forked process with gloo.

Importing torch takes longer than all that a job does, so it is done once. A job names a function here, which every rank
calls with its arguments; what it returns, or how it failed, goes back as one line of JSON for each rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch._dynamo  # (which DTensor imports late: so that the children need not)
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import ckptstore
from ckptstore.adapters.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.repository import Repository
from ckptstore.stores import open_store
from ckptstore.stores import remote as _remote  # noqa: F401 (so that the children need not import it)
from ckptstore.testing import Fault, FaultStore

CASES: dict[str, Callable[..., Any]] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that jobs may name."""
    CASES[function.__name__] = function
    return function


# ---- a model ------------------------------------------------------------------------------------------------------


class Net(nn.Module):  # type: ignore[misc]
    """Tied and frozen parameters, a shape that no number of ranks divides, fewer rows than ranks, 0-d, bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.thin = nn.Linear(6, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros((), dtype=torch.bfloat16))

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.tanh(block(self.frozen(x)))
        self.mean.mul_(0.5).add_(x.detach().mean().to(torch.bfloat16))
        return self.head(x * self.scale) + self.thin(x).sum()


def training(seed: int) -> tuple[Any, Any]:
    """An FSDP2 model and its Adam."""
    torch.manual_seed(seed)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def step(model: Any, optimizer: Any, number: int) -> None:
    tokens = torch.arange(number, number + 8) % 11
    loss = model(tokens).float().pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def whole(model: Any, optimizer: Any) -> Any:
    """All of it, on rank 0."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    one, two = get_state_dict(model, optimizer, options=full)
    return {"model": one, "optimizer": two}


@case
def train_and_save(url: str, epoch: int, expected: str, options: dict[str, Any] | None = None) -> None:
    """Some steps of FSDP2 with Adam, saved; what it should be goes to a file."""
    model, optimizer = training(seed=epoch)
    for number in range(2):
        step(model, optimizer, number)
    one, two = get_state_dict(model, optimizer)
    repo = ckptstore.open(url, storage_options=options)
    writer = CkptStoreWriter(repo, epoch, metadata={"ranks": dist.get_world_size()})
    dcp.save({"model": one, "optimizer": two, "epoch": epoch}, storage_writer=writer)
    full = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(full, expected)


@case
def load_and_compare(url: str, epochs: dict[str, str], options: dict[str, Any] | None = None) -> list[str]:
    """Each of the epochs into another model; what differs from its file on rank 0, and what a next step makes of it."""
    wrong = []
    for epoch, expected in epochs.items():
        model, optimizer = training(seed=99)
        one, two = get_state_dict(model, optimizer)
        state = {"model": one, "optimizer": two, "epoch": -1}
        memory = model.scale._local_tensor.data_ptr()
        reader = CkptStoreReader(ckptstore.open(url, storage_options=options))
        dcp.load(state, checkpoint_id=epoch, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=one, optim_state_dict=two)
        assert state["epoch"] == int(epoch)
        assert model.scale._local_tensor.data_ptr() == memory
        assert model.head.weight is model.embedding.weight
        full = whole(model, optimizer)
        if dist.get_rank() == 0:
            wrong += different(full, torch.load(expected, weights_only=False), f"epoch {epoch}")
        step(model, optimizer, 5)
    return wrong


def different(one: Any, two: Any, path: str = "") -> list[str]:
    """Paths at which two states are not the same, bit for bit and in their types; orders of dicts do not count."""
    if isinstance(one, DTensor):
        one = one.full_tensor()
    if isinstance(two, DTensor):
        two = two.full_tensor()
    if type(one) is not type(two) and not (isinstance(one, dict) and isinstance(two, dict)):
        return [f"{path}: {type(one).__name__} and {type(two).__name__}"]
    if isinstance(one, dict):
        if one.keys() != two.keys():
            return [f"{path}: keys {sorted(map(str, one.keys() ^ two.keys()))}"]
        return [line for key in one for line in different(one[key], two[key], f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(two):
            return [f"{path}: {len(one)} and {len(two)} items"]
        pairs = enumerate(zip(one, two, strict=True))
        return [line for number, (a, b) in pairs for line in different(a, b, f"{path}.{number}")]
    if isinstance(one, torch.Tensor):
        same = one.dtype == two.dtype and one.shape == two.shape
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, two)] if same else []
        return (
            []
            if same and torch.equal(*bits)
            else [f"{path}: {one.dtype} {list(one.shape)} and {two.dtype} {list(two.shape)}"]
        )
    if isinstance(one, np.ndarray):
        return [] if one.dtype == two.dtype and one.tobytes() == two.tobytes() else [f"{path}: arrays"]
    return [] if repr(one) == repr(two) else [f"{path}: {one!r} and {two!r}"]


# ---- states of all kinds -------------------------------------------------------------------------------------------


def zoo(fill: bool) -> dict[str, Any]:
    """Whatever can be in a state dict, over whatever meshes this number of ranks allows."""
    generator = torch.Generator().manual_seed(7)

    def t(*shape: int, dtype: Any = torch.float32) -> Any:
        made = (torch.randn(shape, generator=generator) * 50).to(dtype)
        return made if fill else torch.zeros(shape, dtype=dtype)

    ranks = dist.get_world_size()
    line = init_device_mesh("cpu", (ranks,))
    plane = init_device_mesh("cpu", (2, ranks // 2) if ranks % 2 == 0 else (1, ranks))
    tied = t(5, 3)
    model = {
        "rows": distribute_tensor(t(10, 6), line, [Shard(0)]),
        "columns": distribute_tensor(t(7, 9), line, [Shard(1)]),
        "few": distribute_tensor(t(2, 3), line, [Shard(0)]),
        "none": distribute_tensor(t(0, 4), line, [Shard(0)]),
        "hybrid": distribute_tensor(t(9, 5), plane, [Replicate(), Shard(0)]),
        "both": distribute_tensor(t(6, 10), plane, [Shard(1), Shard(0)]),
        "same": distribute_tensor(t(6, 10), plane, [Shard(0), Shard(0)]),
        "everywhere": distribute_tensor(t(4, 4), line, [Replicate()]),
        "bfloat16": distribute_tensor(t(13, dtype=torch.bfloat16), line, [Shard(0)]),
        "float8": t(6, dtype=torch.float8_e4m3fn),
        "complex": distribute_tensor(t(5, dtype=torch.complex64), line, [Shard(0)]),
        "bool": t(9, dtype=torch.bool),
        "scalar": t(),
        "strided": t(4, 6).t(),
        "empty": t(0),
        "one": tied,
        "two": tied,
    }
    value: dict[str, Any] = {
        "int": 2**70, "float": float("nan"), "text": "é", "none": None, "bytes": b"\x00" * 2000, "list": [1, [2, "3"]],
        "tuple": (1, torch.arange(3), {"x": np.float32(2)}), "array": np.arange(12).reshape(3, 4), "set": {1, 2},
        "arrays": [np.ones(3), np.zeros(2)], "size": torch.Size([1, 2]), "a.b": 1, "": 2, "x/y[*]": np.arange(3),
    }  # fmt: skip
    if not fill:
        value = dict.fromkeys(value, 0)
    group = {"lr": 0.1 if fill else 0, "params": ["a", "b"] if fill else 0, "betas": (0.9, 0.99) if fill else 0}
    return {
        "model": model,
        "optimizer": {"state": {"0": {"m": t(3)}, "1": {}}, "param_groups": [{**group}, {"w": t(2), **group}]},
        "value": value,
        "not a record!": {"x": t(2)},
        "state_dict": {"x": t(2), "n": 5 if fill else 0},
        "tensors": [t(3), [t(2), {"d": distribute_tensor(t(7), line, [Shard(0)])}], 5 if fill else 0],
        "epoch": 3 if fill else 0,
        "alone": t(3),
    }


@case
def save_zoo(url: str, epoch: int, dump: str) -> None:
    state = zoo(True)
    dcp.save(state, storage_writer=CkptStoreWriter(url, epoch))
    full = gathered(state)
    if dist.get_rank() == 0:
        torch.save(full, dump)


def gathered(state: Any) -> Any:
    """The same without DTensors."""
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, list):
        return [gathered(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


@case
def save_by_dcp(folder: str) -> None:
    """As DCP does it by itself."""
    state = zoo(True)
    for name in ("set", "size", "tuple"):  # which torch does not read without running code
        del state["value"][name]
    dcp.save(state, checkpoint_id=folder)


@case
def load_imported(url: str) -> list[str]:
    state, full = zoo(False), zoo(True)
    for one in (state, full):
        del one["value"]["set"], one["value"]["size"], one["value"]["tuple"]
    dcp.load(state, storage_reader=CkptStoreReader(url))
    return different(state, full)


@case
def load_zoo(url: str, epoch: int) -> list[str]:
    state = zoo(False)
    dcp.load(state, storage_reader=CkptStoreReader(url, epoch))
    return different(state, zoo(True))


@case
def save_gap(url: str) -> None:
    """DCP does not say that there is an empty dict."""
    state = {"groups": [{}, {"lr": 1, "x": [{}, {"y": 2}]}]}
    dcp.save(state, storage_writer=CkptStoreWriter(url, 1))


# ---- everything else ---------------------------------------------------------------------------------------------


def sharded(fill: float = 1.0, rows: int = 8, group: Any = None) -> Any:
    """A row of blocks, one for each rank, that differ."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if group is None else group
    return distribute_tensor(torch.arange(rows * 1000.0).reshape(rows, 1000) * fill, mesh, [Shard(0)])


def simple(fill: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": sharded(fill), "r": torch.full((1000,), float(fill))}, "step": int(fill)}


def told(error: BaseException) -> dict[str, Any]:
    """An error, as JSON: those of other ranks in it too."""
    found: dict[str, Any] = {"error": type(error).__name__, "message": str(error)[:2000]}
    if isinstance(error, dcp.CheckpointException):
        found["failures"] = {str(rank): told(one) for rank, (one, _) in error.failures.items()}
    for name in ("key", "epoch"):
        if getattr(error, name, None) is not None:
            found[name] = getattr(error, name)
    return found


def attempt(action: Callable[[], Any]) -> Any:
    """What an action fails with."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001 (CheckpointException is one)
        return told(error)
    return None


def faulty(url: str, faults: list[Fault]) -> Repository:
    return Repository(FaultStore(open_store(url), faults), chunk_size=65536)


@case
def failing_save(url: str, epoch: int, doomed: int, how: str) -> Any:
    """One rank fails amid its save, is killed, or stands still; how it ends for each."""
    errors: dict[str, Callable[[], BaseException | None]] = {
        "fails": lambda: ckptstore.AccessError("403: this rank may not write"),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "slow": lambda: time.sleep(5),
    }
    mine = dist.get_rank() == doomed
    repo = faulty(url, [Fault("put", "chunks/", error=errors[how])] if mine else [])
    state = simple(epoch)
    state["model"]["mine"] = {f"rank-{dist.get_rank()}": torch.full((5000,), float(dist.get_rank()))}
    begun = time.monotonic()
    found = attempt(lambda: dcp.save(state, storage_writer=CkptStoreWriter(repo, epoch)))
    return found and {**found, "seconds": time.monotonic() - begun}


@case
def save_simple(url: str, epoch: int) -> Any:
    return attempt(lambda: dcp.save(simple(epoch), storage_writer=CkptStoreWriter(url, epoch)))


@case
def save_replicas(url: str) -> None:
    """Bits at random, the same on all ranks but for the shards."""
    bits = torch.randint(-(2**31), 2**31, (250_000,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "model": {"w": sharded(), "r": distribute_tensor(bits[:125_000], mesh, [Replicate()]), "p": bits[125_000:]}
    }
    state["model"]["small"] = torch.ones(1000)
    dcp.save(state, storage_writer=CkptStoreWriter(url, 1))


@case
def load_simple(url: str, epoch: int | None = None) -> Any:
    state = simple(0)
    found = attempt(lambda: dcp.load(state, storage_reader=CkptStoreReader(url, epoch)))
    return found or different(state, simple(state["step"]))


@case
def refusals(url: str) -> dict[str, Any]:
    """What cannot be saved or loaded, each by what it ends with; epoch 1 is there."""
    rank = dist.get_rank()

    def save(state: Any, epoch: Any = 2, **how: Any) -> Any:
        planner = how.pop("planner", None)
        call = {"use_collectives": how.pop("use_collectives", True), "checkpoint_id": how.pop("checkpoint_id", None)}
        return attempt(
            lambda: dcp.save(state, storage_writer=CkptStoreWriter(url, epoch, **how), planner=planner, **call)
        )

    def load(state: Any, epoch: int | None = 1, at: str = url, **how: Any) -> Any:
        return attempt(lambda: dcp.load(state, storage_reader=CkptStoreReader(at, epoch), **how))

    code = {"model": {"w": sharded(), "hooks": {"here": print}}} if rank == 1 else {"model": {"w": sharded()}}
    partial = DefaultLoadPlanner(allow_partial_load=True)
    small = {"model": {"w": sharded(rows=9)}}
    return {
        "code": save(code),
        "sparse": save({"model": {"w": torch.eye(3).to_sparse()}}),
        "in a tuple": save({"model": {"t": (sharded(),)}}),
        "exists": save(simple(), 1),
        "no epoch": save(simple(), None),
        "id": save(simple(), 2, checkpoint_id="step-2" if rank == 0 else "2"),
        "epochs": save(simple(), 2 + rank),
        "alone": save(simple(), 2, use_collectives=False),
        "nothing": save({}, 2),
        "missing": load({"model": {"w": sharded(), "new": torch.zeros(2)}}),
        "partial": load({"model": {"w": sharded(), "new": torch.zeros(2)}}, planner=partial),
        "shape": load(small),
        "no such epoch": load(simple(), 7),
        "nowhere": load(simple(), None, at=url + "-empty"),
        "load id": load(simple(), None, checkpoint_id="newest"),
        "array": load({"model": {"w": sharded()}, "arrays": {"n": torch.zeros(3)}}, 5),
        "value": load({"model": {"w": 3}}),
        "ambiguous": load({"a.b": 0}, 6),
    }  # fmt: skip


@case
def ways(url: str) -> list[str]:
    """Ways to save and load that must work; what is wrong with them."""
    wrong: list[str] = []
    rank, repo = dist.get_rank(), ckptstore.open(url)

    def check(what: str, epoch: int, want: Any) -> None:
        state = simple(0)
        dcp.load(state, storage_reader=CkptStoreReader(repo, epoch))
        wrong.extend(different(state, want, what))

    dcp.save(simple(1), checkpoint_id=1, storage_writer=CkptStoreWriter(repo))
    dcp.save(simple(2), storage_writer=CkptStoreWriter(repo, 1, replace=True))
    check("replace", 1, simple(2))
    writer = CkptStoreWriter(repo)
    for epoch in (2, 3):  # one writer, several epochs
        dcp.save(simple(epoch), checkpoint_id=str(epoch), storage_writer=writer)
        check("one writer", epoch, simple(epoch))
    for epoch in (4, 5, 6, 7):  # plans are kept: 6 has something more on one rank, 7 is like it
        state = simple(epoch)
        if epoch > 5 and rank == 1:
            state["more"] = {"x": torch.full((3,), float(epoch))}
        dcp.save(
            state, storage_writer=CkptStoreWriter(repo, epoch), planner=DefaultSavePlanner(enable_plan_caching=True)
        )
        check("cached plan", epoch, simple(epoch))
    if repo.checkpoint(7).load("more")["x"].tolist() != [7, 7, 7]:
        wrong.append("cached plan: more")
    for epoch, kind in ((8, torch.float64), (9, torch.bfloat16)):
        state = {"model": {"w": sharded().to(kind), "r": torch.zeros(1000, dtype=kind)}, "step": 0}
        dcp.load(state, storage_reader=CkptStoreReader(repo, 7))
        wrong += different(state["model"]["w"], sharded(7).to(kind), f"as {kind} {epoch}")
    both = torch.zeros(1500)
    state = {"model": {"r": both[:1000], "w": sharded(0)}, "other": both[500:]}
    dcp.load(state, storage_reader=CkptStoreReader(repo, 7), planner=DefaultLoadPlanner(allow_partial_load=True))
    wrong += [] if both.tolist() == [7] * 1000 + [0] * 500 else ["memory in common"]
    tied = torch.zeros(1000)
    dcp.save({"model": {"a": torch.ones(1000), "b": torch.ones(1000)}}, storage_writer=CkptStoreWriter(repo, 10))
    dcp.load({"model": {"a": tied, "b": tied.view(1000)}}, storage_reader=CkptStoreReader(repo, 10))
    wrong += [] if tied.tolist() == [1] * 1000 else ["tied"]
    found = _load_state_dict_from_keys({"model.r", "step"}, storage_reader=CkptStoreReader(repo, 7))
    wrong += different(found, {"model": {"r": torch.full((1000,), 7.0)}, "step": 7}, "by keys")
    state, flat = {"w": sharded(4), "n": (1, 2)}, {"w": sharded(0), "n": None}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=CkptStoreWriter(repo, 11), planner=planner)
    reader = CkptStoreReader(repo)
    dcp.load(
        flat, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    )
    wrong += [*different(flat, state, "flat"), *([] if reader.checkpoint.epoch == 11 else ["newest"])]
    dcp.save(simple(12), storage_writer=CkptStoreWriter(repo, 12), planner=Other())
    check("another planner", 12, simple(12))
    dcp.save(simple(13), storage_writer=CkptStoreWriter(repo, 13), planner=Half())
    state = simple(0)
    dcp.load(state, storage_reader=CkptStoreReader(repo, 13))
    wrong += [] if state["step"] == 26 else [f"transformed: {state['step']}"]
    many = {f"layer.{n}": {"m": torch.full((2,), float(n)), "step": n} for n in range(100)}
    dcp.save(many, storage_writer=CkptStoreWriter(repo, 14))
    wrong += [] if list(repo.checkpoint(14).records) == ["state_dict"] else ["many records"]
    zeros = {f"layer.{n}": {"m": torch.zeros(2), "step": 0} for n in range(100)}
    dcp.load(zeros, storage_reader=CkptStoreReader(repo, 14))
    return wrong + different(zeros, many, "many")


class Half(DefaultSavePlanner):  # type: ignore[misc]
    """Changes what is saved."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object * 2 if isinstance(object, int) else object)


class Other(SavePlanner):  # type: ignore[misc]
    """A planner of somebody's own, which gives nothing but what the interface asks for."""

    def __init__(self) -> None:
        self.inner = DefaultSavePlanner()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        return self.inner.create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        return self.inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        return self.inner.finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        return self.inner.resolve_data(write_item)


@case
def two_at_once(url: str, epoch: int) -> Any:
    """Two halves of the ranks save the same epoch; how it ends for this one."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    halves = [dist.new_group(list(range(first, ranks, 2))) for first in range(2)]
    state = {"model": {"half": torch.full((1000,), float(rank % 2)), f"of-{rank}": torch.ones(3)}}
    dist.barrier()
    action = lambda: dcp.save(  # noqa: E731
        state, storage_writer=CkptStoreWriter(url, epoch), process_group=halves[rank % 2]
    )
    found = attempt(action)
    dist.barrier()
    return found


@case
def in_background(url: str, process: bool) -> list[str]:
    """Two in a row; the state goes on changing meanwhile."""
    repo, wrong = ckptstore.open(url), []
    kind = dcp.state_dict_saver.AsyncCheckpointerType
    how = {"async_checkpointer_type": kind.PROCESS if process else kind.THREAD}
    for epoch in (1, 2):
        state = simple(epoch)
        future = dcp.async_save(state, storage_writer=CkptStoreWriter(repo, epoch, metadata={"n": epoch}), **how)
        state["model"]["r"].fill_(-1)
        state["model"]["w"].to_local().fill_(-1)
        future.result()
        found = simple(0)
        reader = CkptStoreReader(repo, epoch)
        dcp.load(found, storage_reader=reader)
        wrong += different(found, simple(epoch), f"epoch {epoch}")
        assert reader.checkpoint.metadata == {"n": epoch}
    failed = attempt(lambda: dcp.async_save(simple(2), storage_writer=CkptStoreWriter(repo, 2), **how).result())
    if "EpochExistsError" not in str(failed):
        wrong.append(f"exists: {failed}")
    return wrong


@case
def alone(url: str) -> list[str]:
    """Without any process group."""
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": {"w": torch.arange(5.0)}, "lr": 0.5}
        dcp.save(state, storage_writer=CkptStoreWriter(url, 1), no_dist=True)
        found = {"model": {"w": torch.zeros(5)}, "lr": 0}
        dcp.load(found, storage_reader=CkptStoreReader(url), no_dist=True)
        wrong += different(found, state)
    return wrong


@case
def load_others(url: str) -> list[str]:
    """What was saved with no DCP goes into an FSDP2 model."""
    model, optimizer = training(seed=3)
    one, two = get_state_dict(model, optimizer)
    state = {"model": one, "optimizer": two}
    dcp.load(state, storage_reader=CkptStoreReader(url))
    set_state_dict(model, optimizer, model_state_dict=one, optim_state_dict=two)
    full = whole(model, optimizer)
    return different(full, ckptstore.open(url).checkpoint(1).load()) if dist.get_rank() == 0 else []


# ---- the processes -----------------------------------------------------------------------------------------------


@contextmanager
def process_group(job: dict[str, Any], rank: int) -> Iterator[None]:
    if not job.get("group", True):
        yield
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["ranks"]), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.get("timeout", 60)))
    yield
    dist.destroy_process_group()


def live(job: dict[str, Any], rank: int, out: int) -> None:
    try:
        with process_group(job, rank):
            said = {"rank": rank, "returned": CASES[job["case"]](**job["arguments"])}
    except BaseException as error:  # noqa: BLE001 (told, whatever it is)
        said = {"rank": rank, **told(error), "trace": traceback.format_exc()}
    os.write(out, (json.dumps(said) + "\n").encode())


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        said: list[dict[str, Any]] = []
        reader, writer = os.pipe()
        children = {}
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                try:
                    live(job, rank, writer)
                finally:
                    os._exit(0)
            children[pid] = rank
        os.close(writer)
        with os.fdopen(reader) as lines:
            said += map(json.loads, lines)
        for pid, rank in children.items():
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code:
                said.append({"rank": rank, "code": code})
        print(json.dumps(sorted(said, key=lambda one: one["rank"])), flush=True)


if __name__ == "__main__":
    main()
