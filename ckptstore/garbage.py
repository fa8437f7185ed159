"""Short stretches without cyclic garbage collection.

Taking a state of 100,000 arrays apart makes so many objects that the collector looks through all of them again and
again, and finds nothing: that was half of the time of such a save.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector for a block that waits for nothing. Threads may overlap; what was set before comes back."""
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
            if _pauses == 0 and _was_enabled:
                gc.enable()
