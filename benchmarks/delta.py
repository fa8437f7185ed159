"""Would it pay to store an epoch as the difference to an earlier one? ``python benchmarks/delta.py [steps]``.

The small transformer is really trained and compared with itself k steps earlier: young (full learning rate), late
(learning rate decayed to 1 %), and fine-tuned on another text. ``xor`` is the XOR of the bits, ``sub`` the difference
of the bits as integers, zigzag-coded; both go through the codec as the plain arrays do, and both can be undone exactly.
*best* takes the shortest of the three for each array, *reads* is what a restore reads then: base and difference, as a
multiple of the plain bytes. Speeds are CPU time of one thread, in MB of raw bytes a second. The 1000 steps of the
default take about ten minutes.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.codec import speed
from benchmarks.make_state import SIZES, LanguageModel
from ckptstore import codecs

Array = npt.NDArray[Any]
Part = list[Array]
Sizes = dict[str, dict[int, tuple[int, int]]]  # state -> k -> bytes of (plain, delta)

RATE, LATE_RATE = 1e-3, 1e-5
FP32, BF16 = ("weights", "exp_avg", "exp_avg_sq"), ("bf16 weights", "bf16 exp_avg", "bf16 exp_avg_sq")
STATES = {"whole state, fp32": FP32, "whole state, bf16": BF16, "bf16 weights alone": BF16[:1]}
WHOLE_EVERY, KEPT = 8, 3


# --- training ---------------------------------------------------------------------------------------------------


class Trainer:
    """A model in training, and its state as arrays of unsigned integers."""

    def __init__(self, model: LanguageModel, text: bytes, rate: float) -> None:
        self.model, self.size = model, SIZES["small"]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)

    def train(self, steps: int, last_rate: float | None = None) -> None:
        """So many steps, the learning rate falling geometrically to the last one where that is given."""
        group = self.optimizer.param_groups[0]
        factor = (last_rate / group["lr"]) ** (1 / steps) if last_rate else 1.0
        for _ in range(steps):
            group["lr"] *= factor
            starts = torch.randint(len(self.text) - self.size.context - 1, (self.size.batch, 1))
            window = self.text[starts + torch.arange(self.size.context + 1)]
            loss = nn.functional.cross_entropy(self.model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.loss = loss.item()

    def snapshot(self) -> dict[str, Part]:
        """A copy of all parts, also rounded to bfloat16."""
        weights = list(self.model.parameters())
        moments = [[self.optimizer.state[one][name] for one in weights] for name in FP32[1:]]
        parts: dict[str, Part] = {}
        for name, tensors in zip(FP32, [weights, *moments], strict=True):
            parts[name] = [one.detach().numpy().view(np.uint32).copy() for one in tensors]
            parts[f"bf16 {name}"] = [one.detach().bfloat16().view(torch.int16).numpy().view("u2") for one in tensors]
        return parts


def phases(span: int) -> Iterator[tuple[str, Trainer]]:
    """Trainers at the start of a phase; the caller trains them on for ``span`` steps."""
    torch.manual_seed(7)
    trainer = Trainer(LanguageModel(SIZES["small"]), "\n".join(topics.values()).encode(), RATE)
    trainer.train(max(10, span // 5))
    yield f"early, learning rate {RATE:g}", trainer
    trainer.train(max(10, span // 2), LATE_RATE)
    yield f"late, learning rate {LATE_RATE:g}", trainer
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    trainer = Trainer(trainer.model, b"".join(path.read_bytes() for path in sources), LATE_RATE)
    trainer.train(max(10, span // 10))
    yield f"fine-tuning on other text, new optimizer, learning rate {LATE_RATE:g}", trainer


# --- the ways to store a part -----------------------------------------------------------------------------------


def plain(base: Array, array: Array) -> Array:
    """As it is."""
    return array


def xor(base: Array, array: Array) -> Array:
    """Zero bits where nothing changed."""
    return np.bitwise_xor(base, array)


def sub(base: Array, array: Array) -> Array:
    """Near floats of one sign are near integers; zigzag keeps small negative differences small."""
    signed = (array - base).view(f"i{array.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * array.itemsize - 1))).view(array.dtype)


Way = Callable[[Array, Array], Array]


def encoded(way: Way, base: Part, part: Part) -> list[bytes]:
    """A frame for each array."""
    return [codecs.encode(way(*pair).data.cast("B"), pair[1].itemsize) for pair in zip(base, part, strict=True)]


def decoded(frames: list[bytes], part: Part) -> Part:
    """The arrays of the frames, of the shapes of ``part``."""
    pairs = zip(frames, part, strict=True)
    return [np.frombuffer(codecs.decode(f, None, a.nbytes, ""), a.dtype).reshape(a.shape) for f, a in pairs]


def restored(base: list[bytes], delta: list[bytes], part: Part) -> Part:
    """What a load of an XOR delta does after reading both."""
    pairs = zip(decoded(base, part), decoded(delta, part), strict=True)
    return [np.bitwise_xor(one, two) for one, two in pairs]


def compare(k: int, base: dict[str, Part], new: dict[str, Part], sizes: Sizes) -> None:
    """Print a line for each part and state, and keep the bytes of the states for the policies."""
    stored: dict[str, dict[str, int]] = {}
    for name, part in new.items():
        raw = sum(one.nbytes for one in part)
        frames = {way.__name__: encoded(way, base[name], part) for way in (plain, xor, sub)}
        whole = encoded(plain, base[name], base[name])
        if any(not np.array_equal(*pair) for pair in zip(restored(whole, frames["xor"], part), part, strict=True)):
            raise AssertionError(f"{name}: restored other bytes")
        one = {way: sum(map(len, those)) for way, those in frames.items()}
        # What a delta mode would write at best: for each array the shortest of the three.
        best = sum(min(map(len, three)) for three in zip(*frames.values(), strict=True))
        stored[name] = {"raw": raw, **one, "best": best, "base": sum(map(len, whole))}
        speeds = (
            speed(raw, encoded, plain, base[name], part),
            speed(raw, encoded, xor, base[name], part),
            speed(raw, decoded, frames["plain"], part),
            speed(raw, restored, whole, frames["xor"], part),
        )
        line(k, name, stored[name], "".join(f"{one:8.0f}" for one in speeds))
    for name, names in STATES.items():
        total = {key: sum(stored[part][key] for part in names) for key in stored[names[0]]}
        sizes.setdefault(name, {})[k] = total["plain"], total["best"]
        if len(names) > 1:
            line(k, name, total, "")


def line(k: int, name: str, size: dict[str, int], more: str) -> None:
    """Ratios, the best delta as a share of the plain bytes, and what a restore reads then."""
    ratios = "".join(f"{size['raw'] / size[way]:8.3f}" for way in ("plain", "xor", "sub"))
    reads = (size["base"] + size["best"]) / size["plain"]
    print(f"{k:5} {name:20}{ratios} {size['best'] / size['plain']:8.2f} {reads:6.2f}x{more}", flush=True)


# --- what a repository would hold -------------------------------------------------------------------------------


def policy(every: int, measured: dict[int, tuple[int, int]]) -> str:
    """Whole every 8th epoch, the others against it: bytes written, kept (bases count) and read by a restore.

    Averages over a cycle, as multiples of storing all whole; a run that keeps every epoch keeps what it wrote.
    Distances between two measured ones are interpolated; beyond the last one nothing grows any more, which
    flatters the delta.
    """
    known = [math.log(k) for k in measured]
    shares = [best / whole for whole, best in measured.values()]
    cost = [1.0] + [float(np.interp(math.log(every * i), known, shares)) for i in range(1, WHOLE_EVERY)]
    held = read = 0.0
    for newest in range(WHOLE_EVERY, 2 * WHOLE_EVERY):
        kept = set(range(newest - KEPT + 1, newest + 1))
        kept |= {epoch // WHOLE_EVERY * WHOLE_EVERY for epoch in kept}
        held += sum(cost[epoch % WHOLE_EVERY] for epoch in kept)
        read += cost[newest % WHOLE_EVERY] + (newest % WHOLE_EVERY > 0)
    written = sum(cost) / WHOLE_EVERY
    return f"{every:5} {written:9.2f} {held / WHOLE_EVERY / KEPT:9.2f} {read / WHOLE_EVERY:9.2f}"


def main() -> None:
    """Train, compare, and add up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("span", nargs="?", type=int, default=1000, help="steps of training (default 1000)")
    span = parser.parse_args().span
    torch.set_num_threads(1)
    for phase, trainer in phases(span):
        base, done = trainer.snapshot(), 0
        sizes: Sizes = {}
        print(f"\n{phase}; loss {trainer.loss:.2f}")
        print(f"{'k':>5} {'part':20}{'plain':>8}{'xor':>8}{'sub':>8} {'best/pl.':>8} {'reads':>7}", end="")
        print(f"{'encode':>8}{'xor':>8}{'decode':>8}{'xor':>8}   MB/s")
        for k in sorted({k for k in (1, 10, 100, 300, 1000) if k < span} | {span}):
            trainer.train(k - done)
            done = k
            compare(k, base, trainer.snapshot(), sizes)
        print(f"\nall whole = 1; keep last {KEPT}, whole every {WHOLE_EVERY}th")
        print(f"{'every':>5} {'written':>9} {'kept':>9} {'restored':>9}")
        for name, measured in sizes.items():
            print(name)
            for every in sorted({every for every in (1, 10, 100, 300, 1000) if every <= span}):
                print(policy(every, measured))


if __name__ == "__main__":
    main()
