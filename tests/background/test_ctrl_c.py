"""Ctrl-C while worker threads sleep between two attempts ends a save or load at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ckptstore.patience import GRACE_SECONDS

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
    """A save, a load and a look that wait for a store that is down end at once; no thread of them is left."""
    command = [sys.executable, "-c", textwrap.dedent(CODE), verb]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "sleeps\n"
        time.sleep(0.2)  # so that other threads sleep too
        begin = time.monotonic()
        child.send_signal(signal.SIGINT)
        stopped = child.stdout.readline()
        seconds = time.monotonic() - begin
        output = child.stdout.read()  # communicate() would miss what came along with the line before
    assert (stopped, output) == ("stopped []\n", "1\n")
    assert seconds < 5  # the waits would take far longer


LOST = """
import os, signal, sys, threading, time
import numpy as np
import ckptstore
from ckptstore.stores import LimitStore, MemoryStore, RetryStore, WatchStore

# A signal that reaches the process but wakes nobody, as when it comes right before the thread goes to sleep on a lock:
# here a thread of our own gets it, because the main thread blocks it in the kernel. Python notes it for the main one.
def lose_it():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    time.sleep(1)
    begun.append(time.monotonic())
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

class Stuck(MemoryStore):
    hang = False
    def put(self, key, data, *, if_absent=False):
        if self.hang and "/chunks/" in key:
            threading.Event().wait()
        super().put(key, data, if_absent=if_absent)

begun = []
inner = Stuck()
store = WatchStore(inner, 1e6)
repo = ckptstore.Repository(RetryStore(LimitStore(store, 1)))
state = {"model": {"w": np.arange(100_000)}}
repo.save(1, state)
inner.hang = True
stuck = threading.Event()
limit = LimitStore(inner, 1)

def queue():
    holder = threading.Thread(target=lambda: limit.put("a/chunks/1", b""), daemon=True)
    holder.start()
    while not limit._slots._inside:
        time.sleep(0.01)
    limit.put("b", b"")

acts = {
    "save": lambda: repo.save(2, {"model": {"w": np.arange(100_000) + 1}}),
    "result": lambda: repo.save_async(2, {"model": {"w": np.arange(100_000) + 1}}).result(),
    "call": lambda: store.put("a/chunks/1", b""),
    "slot": queue,
    "retry": lambda: ckptstore.patience.current().sleep(60),
}
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
threading.Thread(target=lose_it, daemon=True).start()
try:
    acts[sys.argv[1]]()
except KeyboardInterrupt:
    print(time.monotonic() - begun[0], flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("where", ["save", "result", "call", "slot", "retry"])
def test_an_interrupt_that_wakes_nobody_is_seen(where: str) -> None:
    """A Ctrl-C right before the caller's thread goes to sleep does not wake it; it is seen in a moment all the same."""
    command = [sys.executable, "-c", textwrap.dedent(LOST), where]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # The grace for what is under way, and a tick.
    assert float(done.stdout) < GRACE_SECONDS + 4, done.stderr
