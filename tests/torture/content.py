"""The states that torture saves: small, each told from every other by its bits, with chunks that epochs share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tests.repository.helpers import differences

CHUNK = 64 * 1024
State = dict[str, dict[str, Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def content(epoch: int, version: int) -> State:
    """Two records in five chunks.

    ``version`` tells apart the tries to save an epoch. The big array is the same in all of them, as in training that
    resumes: a try can adopt what a dead one has sent.
    """
    noise = np.random.default_rng([epoch, version])
    wide = np.random.default_rng(epoch).integers(0, 256, 2 * CHUNK + 8, dtype=np.uint8)
    model = {"frozen": _frozen().copy(), "w": wide, "b": noise.standard_normal(5).astype(np.float32)}
    return {"model": model, "optim": {"m": noise.standard_normal(600), "epoch": epoch, "version": version}}


def what_differs(state: object, epoch: int, version: int) -> str:
    """Where a loaded state is not that content, bit for bit; empty if it is."""
    return "; ".join(list(differences(state, content(epoch, version)))[:3])


def scribble(state: State) -> None:
    """Change every array and plain value, as a trainer does that goes on while its state is saved."""
    for record in state.values():
        for name, value in record.items():
            if isinstance(value, np.ndarray):
                value.fill(0)
            else:
                record[name] = -1


@lru_cache(maxsize=1)
def _frozen() -> Bytes:
    return np.random.default_rng(99).integers(0, 256, CHUNK, dtype=np.uint8)
