"""A training loop of Accelerate that can be killed at any time and started again: it ends as if nothing had happened.

    python examples/accelerate_training.py runs/accelerate

Kill it, start it again, and compare the last line.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptstore
from ckptstore import KeepLast
from ckptstore.adapters.accelerate import AcceleratorStates


def train(repo: ckptstore.Repository, epochs: int = 6) -> str:
    """Train from the newest state on, if there is one, to the end. Returns a digest of all that was learnt."""
    set_seed(1)
    # The order of the data then depends on the epoch alone, with any number of ranks: Accelerate saves no other.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    net, loader, optimizer, scheduler = accelerator.prepare(net, loader, optimizer, scheduler)

    states = AcceleratorStates(accelerator, repo)
    ckpt = states.load_state()
    for epoch in range(0 if ckpt is None else ckpt.epoch, epochs):
        loader.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.item()
        states.save_state(epoch + 1, {"loss": total / len(loader)})
    states.settle()

    moments = optimizer.state_dict()["state"].values()
    digest = hashlib.sha256()
    for value in [*net.state_dict().values(), *(value for state in moments for value in state.values())]:
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate"
    with ckptstore.open(url, keep=KeepLast(3)) as repo:
        print(train(repo))
        print("kept:", repo.epochs())
