"""Ctrl-C while worker threads sleep between two attempts ends a save or load at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.kill

CODE = """
import random, sys, threading, time
import numpy as np
import ckptstore
from ckptstore.errors import TransientError
from ckptstore.stores import LimitStore, MemoryStore, RetryPolicy, RetryStore

class Down(MemoryStore):
    down = ()
    def _fail(self, verb, key):
        if verb in self.down and "/chunks/" in key or "list" in self.down and verb == "list":
            raise TransientError("the store is down")
    def put(self, key, data, *, if_absent=False):
        self._fail("put", key)
        super().put(key, data, if_absent=if_absent)
    def get(self, key, start=0, end=None):
        self._fail("get", key)
        return super().get(key, start, end)
    def list(self, prefix="", *, partial=False):
        self._fail("list", prefix)
        return super().list(prefix, partial=partial)

random.uniform = lambda low, high: high  # every wait is a day long
told = threading.Event()
def tell(event):
    assert event.wait > 1e4
    if not told.is_set():
        told.set()
        print("sleeps", flush=True)

inner = Down()
policy = RetryPolicy(attempts=100, deadline=1e7, base=1e5, cap=1e5)
store = RetryStore(LimitStore(inner, 4), policy, on_retry=tell)
repo = ckptstore.Repository(store, chunk_size=64 * 1024)
state = {"model": {"w": np.random.default_rng(0).random(100_000)}}
checkpoint = repo.save(1, state)
inner.down = (sys.argv[1],)
begun = time.monotonic()
try:
    {
        "put": lambda: repo.save(2, {"model": {"w": state["model"]["w"] + 1}}),
        "get": lambda: checkpoint.load(),
        "list": lambda: repo.latest(),
    }[sys.argv[1]]()
except KeyboardInterrupt:
    inner.down = ()
    print("stopped", [thread.name for thread in threading.enumerate() if "-io" in thread.name], flush=True)
    print(repo.latest().epoch, flush=True)
"""


@pytest.mark.parametrize("verb", ["put", "get", "list"])
def test_ctrl_c_ends_the_waits_of_worker_threads(verb: str) -> None:
    """A save, a load and a look that wait for a store that is down end within a second; no thread of them is left."""
    command = [sys.executable, "-c", textwrap.dedent(CODE), verb]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "sleeps\n"
        time.sleep(0.2)  # so that other threads sleep too
        begin = time.monotonic()
        child.send_signal(signal.SIGINT)
        stopped = child.stdout.readline()
        seconds = time.monotonic() - begin
        output, _ = child.communicate(timeout=60)
    assert (stopped, output) == ("stopped []\n", "1\n")
    assert seconds < 1
