"""Staging for dcp.async_save: a copy that nothing changes any more, in memory that is used again when nobody has it."""

from __future__ import annotations

import collections
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore

pytest.importorskip("torch.distributed.fsdp", reason="needs torch: make test-adapters")

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")
placed: Any = importlib.import_module("torch.distributed.tensor")
adapter: Any = importlib.import_module("ckptstore.adapters.dcp")
staging: Any = importlib.import_module("ckptstore.adapters.dcp_staging")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "meet"), 1), rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def address(state: Any) -> int:
    return int(state["w"].data_ptr())


def test_the_copy_has_all_and_shares_nothing(mesh: Any) -> None:
    """Values, dtypes, ties, containers and DTensors come back; no change of the original reaches the copy."""
    Pair = collections.namedtuple("Pair", "one two")
    w = torch.arange(12.0).view(3, 4)
    state = {
        "w": w, "tied": w, "transposed": w.t(), "row": w[1], "empty": torch.empty(0, 3), "flag": torch.tensor(True),
        "half": torch.arange(5, dtype=torch.bfloat16), "complex": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(3)), "plain": [1, "two", None, b"3", {"deep": [4.0]}],
        "pair": Pair(torch.zeros(2), (5, torch.ones(1))), "size": torch.Size([1, 2]),
        "sharded": placed.DTensor.from_local(torch.arange(6.0).view(2, 3), mesh, [placed.Shard(0)]),
    }  # fmt: skip
    ordered = collections.OrderedDict(inner=torch.ones(2))
    vars(ordered)["_metadata"] = {"version": 1}
    state["ordered"] = ordered
    expected = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    stager = staging.CkptStoreStager()
    copy = stager.stage(state)
    for tensor in expected:
        with torch.no_grad():
            local = state[tensor].to_local() if tensor == "sharded" else state[tensor]
            local.zero_()
    state["plain"][4]["deep"].append(5)
    state["pair"].one.fill_(9)
    ordered["inner"].fill_(9)
    for key, value in expected.items():
        assert (copy[key].dtype, copy[key].shape) == (value.dtype, value.shape), key
        mine, his = (x.to_local() if key == "sharded" else x for x in (copy[key], value))
        assert torch.equal(mine, his), key
    assert copy["tied"] is copy["w"]
    assert isinstance(copy["sharded"], placed.DTensor)
    assert copy["sharded"].placements == (placed.Shard(0),)
    assert copy["plain"] == [1, "two", None, b"3", {"deep": [4.0]}]
    assert type(copy["pair"]) is Pair
    assert copy["pair"].one.tolist() == [0, 0]
    assert type(copy["size"]) is torch.Size
    assert type(copy["ordered"]) is collections.OrderedDict
    assert vars(copy["ordered"])["_metadata"] == {"version": 1}
    assert copy["ordered"]["inner"].tolist() == [1, 1]


def test_memory_is_used_again_only_when_nobody_has_it() -> None:
    """While a copy is held another one takes memory of its own; then that serves again, for a smaller one as well."""
    stager = staging.CkptStoreStager()
    first = stager.stage({"w": torch.full((1000,), 1.0)})
    where = address(first)
    second = stager.stage({"w": torch.full((1000,), 2.0)})
    assert address(second) != where
    assert first["w"][0] == 1
    del second
    part = first["w"][10:20]
    del first
    third = stager.stage({"w": torch.full((1000,), 3.0)})
    assert address(third) != where  # a view still has it
    assert part.tolist() == [1] * 10
    kept = address(third)
    del third
    gc.collect()
    assert address(stager.stage({"w": torch.full((900,), 4.0)})) == kept


def test_other_tensors_go_through_dcp_itself() -> None:
    """A tensor of which only DCP knows how it is copied is copied all the same."""

    class Own(torch.Tensor):  # type: ignore[misc]
        pass

    state = {"w": torch.ones(3), "own": torch.arange(3.0).as_subclass(Own)}
    with pytest.raises(staging._OtherKindError):
        staging._collect(state, {})
    copy = staging.CkptStoreStager().stage(state)
    state["own"].fill_(7)
    state["w"].fill_(7)
    assert torch.equal(torch.as_tensor(copy["own"]), torch.arange(3.0))
    assert copy["w"].tolist() == [1, 1, 1]


def test_saves_that_overtake_each_other(mesh: Any, tmp_path: Path) -> None:
    """The state changes, and is staged again, while a save is held up: each epoch has what there was when it began."""
    repo = ckptstore.open(tmp_path / "run")
    stager = staging.CkptStoreStager()
    w = torch.zeros(2000)
    state = {"model": {"w": placed.DTensor.from_local(w, mesh, [placed.Shard(0)]), "b": torch.zeros(3)}}
    futures = []
    for epoch in (1, 2, 3):
        w.fill_(epoch)
        state["model"]["b"].fill_(epoch)
        writer = adapter.CkptStoreWriter(repo, epoch)
        futures.append(dcp.async_save(state, storage_writer=writer, async_stager=stager))
        w.fill_(-1)
        if epoch == 2:
            for future in futures:
                future.result()
    for future in futures:
        future.result()
    for epoch in (1, 2, 3):
        found = repo.checkpoint(epoch).load("model")
        assert (set(found["w"].tolist()), set(found["b"].tolist())) == ({epoch}, {epoch})
