"""A training run that may be killed at any moment: the child process of ``test_training.py``.

    python trainer.py URL OPTIONS(json) DTYPE RESULT

It resumes from what it finds at the URL, tells every step and every request on its standard output, and at the
end writes its final state to RESULT with ``torch.save``: a witness that does not go through ckptstore.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import nn

import ckptstore

STEPS, EVERY = 24, 3
WIDTH, CONTEXT, BATCH = 64, 32, 4


class Model(nn.Module):  # type: ignore[misc]  # mypy does not look into torch
    """A causal transformer over bytes, with dropout; the output weights are the embedding."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)
        self.mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, dtype=dtype)

    def forward(self, tokens: Any) -> Any:
        hidden = self.embed(tokens) + self.position
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden) / math.sqrt(WIDTH)


class Run:
    """Everything that the rest of the training depends on, and how to save and restore it."""

    def __init__(self, dtype: str) -> None:
        torch.manual_seed(1)
        self.text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
        self.model = Model(getattr(torch, dtype))
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-3)
        warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=5)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warmup, decay], [5])
        self.sampler = np.random.default_rng(2)
        self.done = 0
        self.position = 0
        self.losses: list[float] = []

    def step(self) -> None:
        """One optimizer step on the next stretch of text; dropout and sampling draw random numbers."""
        self.position += int(self.sampler.integers(50, 100))
        at = self.position + torch.arange(BATCH)[:, None] * 997 + torch.arange(CONTEXT + 1)
        window = self.text[at % len(self.text)]
        loss = nn.functional.cross_entropy(self.model(window[:, :-1]).float().flatten(0, 1), window[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.done += 1
        self.losses.append(loss.item())

    def state(self) -> dict[str, Any]:
        """The records of a checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.scheduler.state_dict(),
            "rng": {"torch": torch.get_rng_state(), "sampler": self.sampler.bit_generator.state},
            "progress": {"done": self.done, "position": self.position, "losses": self.losses},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on as if nothing had happened."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["lr_scheduler"])
        torch.set_rng_state(state["rng"]["torch"])
        self.sampler.bit_generator.state = state["rng"]["sampler"]
        self.done, self.position = state["progress"]["done"], state["progress"]["position"]
        self.losses = state["progress"]["losses"]


def deterministic() -> None:
    """The same numbers from the same state, in every process."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


def tell(line: str) -> None:
    """One line in one write, from whatever thread."""
    os.write(1, f"{line}\n".encode())


def main(url: str, options: str, dtype: str, result: str) -> None:
    """Train to the end from whatever is there."""
    deterministic()
    run = Run(dtype)
    with ckptstore.open(
        url, storage_options=json.loads(options) or None, on_request=lambda event: tell(f"request {event.verb}")
    ) as repository:
        checkpoint = repository.latest(deep=True)
        if checkpoint is not None:
            run.restore(checkpoint.load())
        tell(f"start {run.done}")
        while run.done < STEPS:
            run.step()
            tell(f"step {run.done}")
            if run.done % EVERY == 0:
                tell(f"saving {run.done}")
                repository.save(run.done, run.state())
    scratch = Path(result).with_suffix(".tmp")
    torch.save(run.state(), scratch)
    scratch.replace(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
