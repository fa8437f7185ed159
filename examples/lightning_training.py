"""A run of Lightning that can be killed at any time and started again: it ends as if nothing had happened.

    python examples/lightning_training.py runs/lightning

Kill it, start it again, and compare the last line.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptstore
from ckptstore import KeepBest, KeepLast
from ckptstore.adapters.lightning import CkptStoreCheckpoint


class Model(pl.LightningModule):
    """A small net with dropout, and an optimizer and a scheduler with state."""

    def __init__(self, width: int = 32, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        hidden = [nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]
        self.net = nn.Sequential(*hidden, nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)]


def data(seed: int, shuffle: bool) -> DataLoader[Any]:
    """Numbers that are always the same, in an order that the global random generator chooses."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(96, 8, generator=numbers)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=shuffle)


def train(repo: ckptstore.Repository, epochs: int = 6, **options: Any) -> str:
    """Train from the newest checkpoint on, if there is one, to the end. Returns a digest of all that was learnt."""
    pl.seed_everything(1, verbose=False)
    model = Model()
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[CkptStoreCheckpoint(repo, monitor="val_loss")],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, data(0, shuffle=True), data(1, shuffle=False), ckpt_path="latest")
    ckpt = repo.checkpoint(repo.epochs()[-1])
    return digest_of({name: ckpt.load(name) for name in ("model", "optimizer")})


def digest_of(state: Any) -> str:
    """Of all that is in it, bit for bit."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.numpy().tobytes()).hexdigest()
    if isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return hashlib.sha256(repr([(key, digest_of(value)) for key, value in items]).encode()).hexdigest()
    return repr(state)


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"
    with ckptstore.open(url, keep=KeepLast(3) | KeepBest("val_loss", 1)) as repo:
        print(train(repo))
        print("kept:", repo.epochs())
