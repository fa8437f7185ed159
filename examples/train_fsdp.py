"""Train with FSDP2 on several processes, and save with torch DCP: one atomic checkpoint of all ranks, on any URL.

    torchrun --nproc-per-node 2 examples/train_fsdp.py runs/fsdp                  # or s3://bucket/run
    torchrun --nproc-per-node 3 examples/train_fsdp.py runs/fsdp --steps 200      # goes on, on more ranks

Kill one of the processes, all of them, or the machine, and start it again: it goes on from the newest checkpoint as if
nothing had happened (on as many ranks, bit for bit). torchrun does so by itself with --max-restarts; with gloo that
needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. It runs on CPUs; with GPUs say "cpu:gloo,cuda:nccl" and move the model.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ckptstore
from ckptstore.adapters.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.adapters.dcp_staging import CkptStoreStager


class Training:
    """A small model, sharded over all ranks, its optimizer and its schedule: what DCP calls a Stateful."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Embedding(50, 64), *(self._block() for _ in range(3)), nn.Linear(64, 50))
        for block in self.model[1:4]:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 500)
        self.step = 0

    @staticmethod
    def _block() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))

    def state_dict(self) -> dict[str, Any]:
        """Tensors as DTensors, of which this rank has its shards."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]

    def train(self) -> float:
        """One step; data and dropout from its number and the rank alone."""
        self.step += 1
        torch.manual_seed(self.step * 1000 + dist.get_rank())
        tokens = (torch.randint(50, (8, 1)) + 3 * torch.arange(16)) % 50
        loss = nn.functional.cross_entropy(self.model(tokens[:, :-1].flatten()), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())


def main() -> None:
    """Train to the last step, from wherever earlier processes got."""
    parser = argparse.ArgumentParser(description="Train on several ranks, and go on after any end.")
    parser.add_argument("url", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    given = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    saving = dist.new_group(backend="gloo")  # saves go on beside the training, so they need a group of their own
    repo = ckptstore.open(given.url, keep=ckptstore.KeepLast(3))
    training = Training()
    if repo.epochs():
        state = training.state_dict()
        dcp.load(state, storage_reader=CkptStoreReader(repo))
        training.load_state_dict(state)
    print(
        f"rank {rank} of {dist.get_world_size()} starts after step {training.step}, process {os.getpid()}", flush=True
    )

    under_way: Future[Any] | None = None
    stager = CkptStoreStager()
    while training.step < given.steps:
        loss = training.train()
        if rank == 0:
            print(f"step {training.step} loss {loss:.4f}", flush=True)
        if training.step % given.every == 0:
            if under_way is not None:
                under_way.result()  # raises what the save before has met
            writer = CkptStoreWriter(repo, training.step, metadata={"loss": loss})
            under_way = dcp.async_save(
                training.state_dict(), storage_writer=writer, process_group=saving, async_stager=stager
            )
    if under_way is not None:
        under_way.result()

    whole, _ = get_state_dict(training.model, [], options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        digest = hashlib.sha256()
        for name, tensor in sorted(whole.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        print(f"end {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
