"""The demo's language model: characters, an embedding, two hidden layers, Adam; NumPy and nothing else.

Given the same seed it computes the same bits in every process (with one BLAS thread): that is what lets
the demo compare a killed and resumed run with an undisturbed one bit by bit.
"""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Array = npt.NDArray[Any]
Params = dict[str, dict[str, Array]]

CONTEXT = 24
EMBED = 32


@dataclass(frozen=True)
class Shape:
    """The size of model and run. The defaults make a state of about 32 MiB."""

    seed: int = 0
    epochs: int = 8
    steps: int = 12
    batch: int = 256
    hidden: int = 1280
    rate: float = 2e-3


def corpus() -> str:
    """Real text that every Python has: its manual's topics, else the documentation in its modules."""
    try:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    except ImportError:
        import argparse
        import decimal
        import inspect
        import logging
        import threading

        text = "\n".join(inspect.getsource(module) for module in (argparse, decimal, inspect, logging, threading))
    return "".join(c if c in string.printable else " " for c in text)


class Model:
    """A window of characters → the next one."""

    def __init__(self, vocabulary: int, hidden: int, rng: np.random.Generator) -> None:
        sizes = [CONTEXT * EMBED, hidden, hidden, vocabulary]
        self.params: Params = {"embedding": {"weight": _normal(rng, (vocabulary, EMBED), 0.5)}}
        for number, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            scale = math.sqrt((2.0 if number < 2 else 0.1) / fan_in)
            layer = {"weight": _normal(rng, (fan_in, fan_out), scale), "bias": np.zeros(fan_out, np.float32)}
            self.params[f"layer{number}"] = layer

    def loss(self, windows: Array) -> tuple[float, Params]:
        """Mean cross-entropy in nats and its gradients. ``windows``: context and target, one row a sample."""
        inputs, targets = windows[:, :-1], windows[:, -1]
        rows = np.arange(len(targets))
        layers = [self.params[f"layer{number}"] for number in range(3)]
        acts = [self.params["embedding"]["weight"][inputs].reshape(len(rows), -1)]
        for number, layer in enumerate(layers):
            out = acts[-1] @ layer["weight"] + layer["bias"]
            acts.append(np.maximum(out, 0) if number < 2 else out)
        logits = acts.pop()
        logits -= logits.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(logits).sum(axis=1))
        loss = float(np.mean(log_sum - logits[rows, targets]))
        delta = np.exp(logits - log_sum[:, None])
        delta[rows, targets] -= 1
        delta /= len(rows)
        return loss, self._gradients(inputs, layers, acts, delta)

    def _gradients(self, inputs: Array, layers: list[dict[str, Array]], acts: list[Array], delta: Array) -> Params:
        grads: Params = {}
        for number in (2, 1, 0):
            grads[f"layer{number}"] = {"weight": acts[number].T @ delta, "bias": delta.sum(axis=0)}
            delta = delta @ layers[number]["weight"].T
            if number:
                delta *= acts[number] > 0
        embedding = np.zeros_like(self.params["embedding"]["weight"])
        np.add.at(embedding, inputs.reshape(-1), delta.reshape(-1, EMBED))
        grads["embedding"] = {"weight": embedding}
        return grads


class Adam:
    """Adam with bias correction. Its two moments are what makes a checkpoint three times the model."""

    def __init__(self, params: Params) -> None:
        self.step = 0
        self.first = _zeros(params)
        self.second = _zeros(params)

    def update(self, params: Params, grads: Params, rate: float) -> None:
        """One step, in place."""
        self.step += 1
        rate *= math.sqrt(1 - 0.99**self.step) / (1 - 0.9**self.step)
        for layer, named in params.items():
            for name, value in named.items():
                grad, first, second = grads[layer][name], self.first[layer][name], self.second[layer][name]
                first += np.float32(0.1) * (grad - first)
                second += np.float32(0.01) * (grad * grad - second)
                value -= np.float32(rate) * first / (np.sqrt(second) + np.float32(1e-8))


class Trainer:
    """Model, optimizer, schedule and the position in the data: all that a resume must bring back."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        text = corpus()
        symbols = sorted(set(text))
        code = {symbol: number for number, symbol in enumerate(symbols)}
        self._text = np.array([code[symbol] for symbol in text], np.int32)
        self._rng = np.random.default_rng(shape.seed)
        self._seen = 0
        self._model = Model(len(symbols), shape.hidden, self._rng)
        self._adam = Adam(self._model.params)
        self._tick = 0

    def state(self) -> dict[str, Any]:
        """The records of a checkpoint, by name."""
        adam = self._adam
        return {
            "model": self._model.params,
            "optimizer": {"step": adam.step, "first": adam.first, "second": adam.second},
            "lr_scheduler": {"step": self._tick, "rate": self.rate},
            "data": {"rng": self._rng.bit_generator.state, "seen": self._seen},
        }

    def load(self, records: dict[str, Any]) -> None:
        """Go on exactly where ``records`` left off."""
        adam = self._adam
        self._model.params = records["model"]
        adam.step, adam.first, adam.second = (records["optimizer"][name] for name in ("step", "first", "second"))
        self._tick = records["lr_scheduler"]["step"]
        self._rng.bit_generator.state = records["data"]["rng"]
        self._seen = records["data"]["seen"]

    @property
    def rate(self) -> float:
        """The learning rate now: warm-up, then half a cosine."""
        total = self.shape.epochs * self.shape.steps
        warm = max(1, total // 10)
        if self._tick < warm:
            return self.shape.rate * (self._tick + 1) / warm
        cosine = math.cos(math.pi * (self._tick - warm) / (total - warm + 1))
        return self.shape.rate * (0.02 + 0.98 * (1 + cosine) / 2)

    def train_epoch(self) -> float:
        """Some steps on random windows of the text; their mean loss."""
        losses = []
        for _ in range(self.shape.steps):
            starts = self._rng.integers(0, len(self._text) - CONTEXT, self.shape.batch)
            windows = self._text[starts[:, None] + np.arange(CONTEXT + 1)]
            loss, grads = self._model.loss(windows)
            self._adam.update(self._model.params, grads, self.rate)
            self._tick += 1
            self._seen += len(starts)
            losses.append(loss)
        return sum(losses) / len(losses)


def fingerprint(state: Any) -> str:
    """A digest of all of a state's bits, made without ckptstore: types, keys, values, array bytes."""
    digest = blake3()
    _feed(digest, state)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        digest.update(f"dict {len(value)}\n".encode())
        for key, item in value.items():
            digest.update(f"{key!r}\n".encode())
            _feed(digest, item)
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
    elif isinstance(value, float):
        digest.update(f"float {value.hex()}\n".encode())
    else:
        digest.update(f"{type(value).__name__} {value!r}\n".encode())


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> Array:
    values: Array = rng.standard_normal(shape, np.float32)
    values *= np.float32(scale)
    return values


def _zeros(params: Params) -> Params:
    return {layer: {name: np.zeros_like(value) for name, value in named.items()} for layer, named in params.items()}
