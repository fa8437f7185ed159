"""Repositories for pages: a real run that is small, and everything that may be wrong with one.

``python -m tests.report_pages FOLDER`` makes the page of the documentation there, and its pictures.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ckptstore

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
