"""A training run of torch that can be killed at any moment and goes on, bit for bit, when it is started again.

    pip install 'ckptstore[torch]'
    python examples/torch_training.py runs/example               # or s3://bucket/run, gs://bucket/run
    python examples/torch_training.py runs/example --steps 200   # more of the same run

Press Ctrl-C, send SIGTERM or SIGKILL, pull the plug, and start it again. It draws random numbers wherever a real run
does (dropout, order of the data, augmentation), and scales gradients, warms the learning rate up and keeps an average
of the weights. The data is made up: a few spirals to tell apart.
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import numpy as np
import torch
from torch import nn

import ckptstore
from ckptstore.adapters.torch import ResumableLoader, TrainingState


class Spirals(torch.utils.data.Dataset):  # type: ignore[misc,unused-ignore]
    """Points on three spirals, each with a little noise that differs from epoch to epoch."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> Any:
        label, radius = index % 3, (index + 1) / len(self)
        angle = 4 * math.pi * (radius + label / 6) + random.gauss(0, 0.1)
        point = np.array([math.cos(angle), math.sin(angle)]) * radius + np.random.normal(0, 0.01, 2)
        return torch.tensor(point, dtype=torch.float32), label


def main() -> None:
    """Train to the last step, from wherever an earlier process got."""
    parser = argparse.ArgumentParser(description="Train, and go on after any end.")
    parser.add_argument("url", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--result", help="a file for the trained weights and the losses")
    given = parser.parse_args()

    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [10])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    loader = ResumableLoader(Spirals(), batch_size=40, seed=4, num_workers=given.workers)

    state = TrainingState(
        model=model, average=average, optimizer=optimizer, scheduler=scheduler, scaler=scaler, loader=loader
    )
    state.extra["losses"] = []

    repo = ckptstore.open(given.url, keep=ckptstore.KeepLast(3))
    restored = state.restore(repo)
    print(f"start {state.step}", "anew" if restored is None else f"from epoch {restored.epoch}", flush=True)
    with repo, state.preemption(repo, grace=20) as border:
        while state.step < given.steps:
            for points, labels in loader:
                loss = nn.functional.cross_entropy(model(points), labels)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                average.update_parameters(model)
                state.step += 1
                state.extra["losses"].append(loss.item())
                print(f"step {state.step} of epoch {state.epoch}: loss {loss.item():.4f}", flush=True)
                if state.step % given.every == 0 or state.step == given.steps:
                    state.save_async(repo, state.step, {"loss": loss.item()})
                border(state.step)
                if state.step >= given.steps:
                    break
            else:
                state.epoch += 1
    if given.result:
        torch.save(
            {"records": {**model.state_dict(), "rng": torch.get_rng_state()}, "extra": state.extra}, given.result
        )


if __name__ == "__main__":
    main()
