"""Short stretches without cyclic garbage collection.

Taking a state of 100,000 arrays apart makes so many objects that the collector looks through all of them again and
again, and finds nothing: that was half of the time of such a save.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


def _begin_process() -> None:
    """A forked child has none of its parent's other threads: their pauses would never end."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_process)


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector for a block that waits for nothing. Threads may overlap.

    What was set before the first pause comes back after the last: ``gc.disable()`` amid one does not last.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            _pauses = max(_pauses, 0)  # a fork amid the block has begun anew
            if _pauses == 0 and _was_enabled:
                gc.enable()
