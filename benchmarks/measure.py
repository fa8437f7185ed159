"""Run one save or one restore in a fresh process and measure it: time, CPU, peak memory. For ``save_restore.py``."""

from __future__ import annotations

import gc
import os
import resource
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import blake3
import torch

from benchmarks.methods import LOCAL, REMOTE, Method, Place, flat_bytes, stored_bytes, tensors


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        extra: bytes of memory at the peak beyond what was there before and, after a restore, beyond the state itself.
        cpu: seconds of all threads of this process, not of a server.
        digest: of what was restored, to be compared with what was saved.
    """

    action: str
    method: str
    seconds: float
    cpu: float
    extra: int
    stored: int = 0
    digest: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run(pipe: Connection, action: str, name: str, place: Place, state_file: str) -> None:
    """The body of the fresh process: one measurement, sent through ``pipe``."""
    method = (REMOTE if place.remote else LOCAL)[name](place)
    pipe.send(_save(method, name, state_file) if action == "save" else _restore(method, name))
    pipe.close()


def _save(method: Method, name: str, state_file: str) -> Sample:
    state = load_state(state_file)
    method.prepare(state)
    seconds, cpu, extra, _ = _measured(lambda: method.save(state))
    stored = 0 if name == "memcpy" else stored_bytes(method.place)
    return Sample("save", name, seconds, cpu, extra, stored)


def _restore(method: Method, name: str) -> Sample:
    method.prepare(None)
    if not method.place.remote:
        drop_page_cache(method.place.path)
    seconds, cpu, extra, state = _measured(method.restore)
    pieces = state if isinstance(state, list) else [flat_bytes(tensor) for tensor in tensors(state)]
    digest = blake3.blake3()
    for piece in pieces:
        digest.update(piece.data)
    size = sum(piece.size for piece in pieces)
    return Sample("restore", name, seconds, cpu, max(extra - size, 0), 0, digest.hexdigest())


def _measured(work: Any) -> tuple[float, float, int, Any]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    before = _status("VmRSS")
    cpu = _cpu()
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    return seconds, _cpu() - cpu, max(_status("VmHWM") - before, 0), result


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark needs Linux")


def load_state(path: str) -> dict[str, Any]:
    """The training state."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def state_facts(path: str) -> tuple[int, int, str]:
    """Number of tensors of a state, their bytes, and the digest of all of them."""
    pieces = [flat_bytes(tensor) for tensor in tensors(load_state(path))]
    digest = blake3.blake3()
    for piece in pieces:
        digest.update(piece.data)
    return len(pieces), sum(piece.size for piece in pieces), digest.hexdigest()


def drop_page_cache(folder: str) -> None:
    """Ask Linux to forget what it holds of these files, so that a restore reads from the disk."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)  # a page that is not on disk yet cannot be dropped
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
