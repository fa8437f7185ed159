"""What a life of a loop of Accelerate does; imported by the nursery alone."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch._dynamo  # which an Accelerator imports in each life otherwise

import ckptstore
from ckptstore import KeepLast
from examples import accelerate_training
from tests.adapters.lives import killer

warnings.simplefilter("ignore")


def train(url: str, options: dict[str, Any] | None, kill: list[Any] | None = None, **more: Any) -> Any:
    """One life of the example; its digest, the epochs that were kept, and whether they are whole."""
    watch = killer(*kill) if kill is not None else None
    with ckptstore.open(url, options, keep=KeepLast(2), on_request=watch) as repo:
        return [accelerate_training.train(repo, **more), repo.epochs(), repo.verify().ok]


def two_ranks(url: str, port: int, **more: Any) -> Any:
    """One life of two ranks, as a launcher would start them; the digest of rank 0, the epochs, the newest's records."""
    child = os.fork()
    rank = 1 if child == 0 else 0
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    code = 1
    try:
        with ckptstore.open(url) as repo:
            digest = accelerate_training.train(repo, **more)
            newest = repo.checkpoint(repo.epochs()[-1])
        torch.distributed.destroy_process_group()
        code = 0
    finally:
        if rank:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    return [digest, repo.epochs(), sorted(newest.records)]


def rank_zero_fails(port: int) -> Any:
    """Rank 0 cannot save; what both ranks have raised."""
    from accelerate import Accelerator

    from ckptstore.adapters.accelerate import AcceleratorStates
    from ckptstore.stores import MemoryStore

    read, write = os.pipe()
    child = os.fork()
    rank = 1 if child == 0 else 0
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    repo = ckptstore.Repository(MemoryStore())
    if not rank:
        repo.save(1, {"model": {"w": 1}})
    said = ""
    try:
        AcceleratorStates(Accelerator(cpu=True), repo, background=False).save_state(1)
    except ckptstore.CkptStoreError as error:
        said = f"{type(error).__name__}: {error}"
    if rank:
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as other:
        told = other.read()
    os.waitpid(child, 0)
    return [said, told]
