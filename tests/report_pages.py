"""Repositories for pages: a real run that is small, and everything that may be wrong with one."""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from pathlib import Path

import msgspec
import numpy as np

import ckptstore
from ckptstore import keys
from ckptstore.manifest import decode_manifest, encode_manifest
from ckptstore.options import check_metadata

EPOCHS = 20


def a_run(place: Path, epochs: int = EPOCHS, *, lost: int | None = 7, seed: int = 5) -> None:
    """Fits a line by gradient descent: a model whose embedding is frozen, Adam's moments, and metrics."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2000, 48)).astype(np.float32)
    target = x @ rng.standard_normal((48, 24)).astype(np.float32) + 0.3 * rng.standard_normal((2000, 24)).astype("f4")
    frozen = rng.standard_normal((400, 64)).astype(np.float32)
    w = np.zeros((48, 24), np.float32)
    first, second = np.zeros_like(w), np.zeros_like(w)
    with ckptstore.open(place, every={"optimizer": 2}) as repo:
        for epoch in range(1, epochs + 1):
            error = x @ w - target
            gradient = 2 * x.T @ error / len(x)
            first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
            w = w - 0.08 * first / (np.sqrt(second) + 1e-8)
            loss = float(np.mean(error[:1600] ** 2))
            metadata = {
                "loss": float("nan") if epoch == lost else loss,
                "val": {"loss": float(np.mean(error[1600:] ** 2)), "accuracy": 1 / (1 + loss)},
                "lr": 0.08 * 0.97**epoch,
                "tokens": 40_960 * epoch,
                "host": "node-3",
            }
            model = {"embedding.weight": frozen, "head": {"weight": w, "bias": w[0]}}
            optimizer = {"exp_avg": first, "exp_avg_sq": second, "step": epoch}
            repo.save(epoch, {"model": model, "optimizer": optimizer, "scheduler": {"last": epoch}}, metadata)


def spread(place: Path, seconds: float = 1830.0) -> None:
    """Give the manifests of a folder times as of a run that saves every half an hour, and pauses once."""
    paths = sorted((place / "manifests").glob("*.json"))
    now = time.time()
    for back, path in enumerate(reversed(paths)):
        pause = 9 * 3600 if back >= len(paths) // 2 else 0
        at = now - 720 - back * seconds - pause - 200 * (back % 3)
        os.utime(path, (at, at))


def damage(place: Path) -> None:
    """The newest epoch loses a chunk of its own, epoch 5 its manifest, and a save is killed on the way."""
    with ckptstore.open(place, create=False) as repo:
        newest = repo.epochs()[-1]
        attempt = json.loads(repo.store.get(keys.manifest_key(newest, 1)))["attempt"]
        next(iter((place / "attempts" / attempt / "chunks").iterdir())).unlink()
        repo.pin(3, "baseline of the paper")
        repo.pin(newest - 4, "evaluated on Tuesday; ask Ana before it goes")
    cut = place / keys.manifest_key(5, 1)
    cut.write_bytes(cut.read_bytes()[:-40])
    dead = place / "attempts" / uuid.uuid4().hex / "chunks"
    dead.mkdir(parents=True)
    (dead / ("ab" * 32)).write_bytes(bytes(70_000))


def multiply(place: Path, epochs: int, metrics: int = 3) -> None:
    """Commit the newest epoch again and again, with metrics that move: many epochs, hardly any bytes."""
    with ckptstore.open(place, create=False) as repo:
        newest = repo.epochs()[-1]
        path = place / keys.manifest_key(newest, 1)
        manifest = decode_manifest(path.read_bytes(), keys.manifest_key(newest, 1))
    now = time.time()
    for back in range(epochs):
        epoch = newest + epochs - back
        values = {f"metric-{i}": (1 + i) / epoch + math.sin(epoch / 50) / 90 for i in range(metrics)}
        copy = msgspec.structs.replace(manifest, epoch=epoch, metadata=check_metadata(values))
        target = place / copy.key
        target.write_bytes(encode_manifest(copy))
        os.utime(target, (now - 60 * back, now - 60 * back))
