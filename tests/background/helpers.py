"""What the tests of background saves share: a gate in a store, and states."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import numpy as np

from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from ckptstore.testing import Fault, FaultStore

SECONDS = 60.0  # that no test waits for; a bound on what would hang


class Gate:
    """A store whose puts of some keys wait until the gate is opened. Leaving the context opens it."""

    def __init__(self, match: str = "chunks/", inner: Store | None = None) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.inner = MemoryStore() if inner is None else inner
        self.store = FaultStore(self.inner, [Fault("put", match, error=self._wait, times=None)])

    def _wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(SECONDS)

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.opened.set()


def small_state(seed: int = 0) -> dict[str, Any]:
    """Two records with arrays and plain values."""
    dice = np.random.default_rng(seed)
    return {"model": {"w": dice.standard_normal(100), "b": dice.standard_normal(3)}, "optim": {"step": seed}}
