"""A real training state for the benchmarks: ``python -m benchmarks.make_state [tiny|small|full]``.

A causal transformer is really trained with AdamW on the text of Python's own documentation. Made-up numbers would
not do: how far a checkpoint shrinks depends on what training leaves in weights and moments. The state is
cached in ``benchmarks/.cache``, which is not part of the repository.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn

CACHE = Path(__file__).parent / ".cache"


@dataclass(frozen=True)
class Size:
    """A model and how long it is trained. Parameters and both moments are fp32: 12 bytes a parameter."""

    width: int
    layers: int
    context: int
    batch: int
    steps: int


SIZES = {
    "tiny": Size(width=128, layers=2, context=32, batch=4, steps=10),
    "small": Size(width=256, layers=3, context=64, batch=8, steps=20),
    "full": Size(width=512, layers=7, context=128, batch=8, steps=60),
}


class LanguageModel(nn.Module):  # type: ignore[misc]  # mypy does not look into torch
    """Predicts the next byte. The output weights are the embedding: one tensor under two names."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(size.context, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.context), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next byte at each place."""
        hidden = self.embed(tokens) + self.position
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def train(size: Size) -> dict[str, Any]:
    """Train from scratch and return all that a trainer would save."""
    torch.manual_seed(7)
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    model = LanguageModel(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 * size.steps)
    start = time.perf_counter()
    for step in range(size.steps):
        at = torch.randint(len(text) - size.context - 1, (size.batch, 1)) + torch.arange(size.context + 1)
        window = text[at]
        scores = model(window[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 10 == 9:
            elapsed = time.perf_counter() - start
            print(f"step {step + 1}/{size.steps}: loss {loss.item():.3f}, {elapsed:.0f} s", flush=True)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict()}


def cached(name: str) -> Path:
    """The file with the state of that size; trains it first where it is missing."""
    path = CACHE / f"state-{name}.pt"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        print(f"training the {name!r} state once", flush=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        torch.save(train(SIZES[name]), scratch)
        scratch.replace(path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", nargs="?", choices=SIZES, default="full")
    print(cached(parser.parse_args().size))
