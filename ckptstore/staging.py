"""Staging: a copy of a state in memory of our own, so that it can be saved while the original goes on changing.

The memory (the *arena*) is one buffer that is allocated once and used again for each save; it grows with the state.
Where tensors come from a CUDA device it is pinned, so that the devices write into it themselves.

What counts here is how long the trainer stands still. An array in C order is copied by one ``memmove`` between two
addresses, because views and checks in Python would take longer than the bytes of a small array. Up to 8 MiB the lock
of the interpreter is kept meanwhile: who lets go of it for each of 100,000 arrays waits 100,000 times for a busy
thread to give it back. Several copying threads were measured and are no faster: one core fills the memory bus.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptstore import garbage
from ckptstore.arrays import ArraySource, ArraySpec, NumpySource, TorchSource, torch_bits, torch_module
from ckptstore.errors import InvalidRecordError
from ckptstore.refusals import torch_refusal
from ckptstore.shards import FlatArray, ShardedSource, parts_of
from ckptstore.tree import FlatState

log = logging.getLogger("ckptstore")

ALIGN = 64
ROUND = 64 * 1024
GROW = 8  # by an eighth at least, so that a state that grows a little each time is not a new allocation each time
KEEP_LOCK = 8 * 1024 * 1024
PORTABLE = 1  # pinned for all devices, not just for the current one

_move = ctypes.memmove  # lets go of the interpreter lock
_move_locked = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class Staged:
    """States whose arrays are copied. The arena must not be used again before they are let go."""

    def __init__(self, flats: Mapping[str, FlatState], places: Mapping[tuple[object, ...], int], memory: Any) -> None:
        self._flats = flats
        self._places = places
        self.memory = memoryview(memory)

    def flats(self) -> dict[str, FlatState]:
        """The states, with all arrays in the arena. Lets go of the originals; to be called once."""
        places, found = self._places, {}

        def move(array: ArraySource) -> ArraySource:
            return StagedSource(array.spec, self, places[array.identity])

        with garbage.paused():
            for name, flat in self._flats.items():
                if flat.is_file:  # it stays where it is
                    found[name] = flat
                    continue
                arrays: list[FlatArray] = [
                    array.elsewhere(move) if isinstance(array, ShardedSource) else move(array) for array in flat.arrays
                ]
                found[name] = FlatState(flat.skeleton, arrays, part=flat.part)
        self._flats, self._places = {}, {}
        return found

    def let_go(self) -> None:
        """They are saved, or never will be: whoever still has one of the arrays (an error does) has no memory."""
        self.memory = memoryview(b"")


class StagedSource(ArraySource):
    """An array in the arena. Nobody changes it while its save is in flight."""

    __slots__ = ("_staged", "_start")

    def __init__(self, spec: ArraySpec, staged: Staged, start: int) -> None:
        self.spec = spec
        self.identity = ("staged", start)
        self._staged = staged
        self._start = start

    def unchanged(self) -> bool:
        return True

    def _read(self, start: int, stop: int) -> memoryview:
        return self._staged.memory[self._start + start : self._start + stop]


class Arena:
    """The memory that states are staged in. For one state at a time."""

    def __init__(self) -> None:
        self._buffer: np.ndarray[Any, Any] | None = None
        self._pinned = False

    @property
    def address(self) -> int:
        """Where the memory is; 0 if there is none. The same from save to save unless the state grows."""
        return 0 if self._buffer is None else int(self._buffer.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def release(self) -> None:
        """Give the memory back (once the last array in it is gone)."""
        self._buffer = None
        self._pinned = False

    def stage(self, flats: Mapping[str, FlatState]) -> Staged:
        """Copy all arrays; when this returns, nothing refers to the memory of the originals for its content.

        The same memory in several records is copied once. If it is interrupted, the arena can be used again.
        """
        with garbage.paused():
            places, sources, nbytes = _lay_out(flats)
        buffer = self._reserve(nbytes)
        copier = _Copier(buffer)
        devices = copier.plain(sources)
        if devices:
            self._pin(buffer, devices)
            copier.through_torch(devices)
        return Staged(flats, places, buffer)

    def _reserve(self, nbytes: int) -> np.ndarray[Any, Any]:
        if self._buffer is None or self._buffer.nbytes < nbytes:
            wanted = max(nbytes, self.nbytes + self.nbytes // GROW, 1)
            self.release()  # first: old and new together would be twice the state
            self._buffer = np.empty(-(-wanted // ROUND) * ROUND, np.uint8)
        return self._buffer

    def _pin(self, buffer: np.ndarray[Any, Any], sources: list[tuple[TorchSource, int]]) -> None:
        """Register the memory with CUDA. Not by torch's own pinned memory: that is rounded up to a power of two."""
        if self._pinned or all(source.tensor.device.type != "cuda" for source, _ in sources):
            return
        self._pinned = True  # also if it fails: once is enough
        torch = torch_module()
        address = int(buffer.ctypes.data)
        try:
            code = int(torch.cuda.cudart().cudaHostRegister(address, buffer.nbytes, PORTABLE))
        except RuntimeError as error:
            log.warning("the staging memory could not be pinned, copies from CUDA devices are slower: %s", error)
            return
        if code:
            log.warning("the staging memory could not be pinned (CUDA error %d): copies are slower", code)
            return
        # Runs before the memory is freed. Not at exit: then the driver may be gone, and frees it by itself.
        weakref.finalize(buffer, torch.cuda.cudart().cudaHostUnregister, address).atexit = False


def _lay_out(
    flats: Mapping[str, FlatState],
) -> tuple[dict[tuple[object, ...], int], list[tuple[ArraySource, int]], int]:
    """The place of each array by identity, what is to be copied where, and the bytes in all."""
    places: dict[tuple[object, ...], int] = {}
    sources: list[tuple[ArraySource, int]] = []
    end = 0
    for flat in flats.values():
        for array in () if flat.is_file else flat.arrays:
            for source in parts_of(array):
                nbytes = source.nbytes
                if places.setdefault(source.identity, end) == end and nbytes:
                    sources.append((source, end))
                    end += -(-nbytes // ALIGN) * ALIGN
    return places, sources, end


class _Copier:
    """Copies arrays to their places in one buffer."""

    def __init__(self, buffer: np.ndarray[Any, Any]) -> None:
        self._buffer = buffer

    def plain(self, sources: list[tuple[ArraySource, int]]) -> list[tuple[TorchSource, int]]:
        """Copy what NumPy or the memory itself gives; returns the tensors that only torch can copy."""
        base = int(self._buffer.ctypes.data)
        rest: list[tuple[TorchSource, int]] = []
        for source, start in sources:
            nbytes = source.nbytes
            if isinstance(source, TorchSource):
                # Its memory may have been taken away meanwhile (resize_(0)): torch would say so, memmove would not.
                if not source.address or source.tensor.data_ptr() != source.address:
                    rest.append((source, start))
                    continue
            elif not source.unchanged():
                raise _changed()
            elif not isinstance(source, NumpySource):
                self._buffer[start : start + nbytes] = np.frombuffer(source.read(0, nbytes), np.uint8)
                continue
            elif not source.address:
                array = source.array
                self._buffer[start : start + nbytes].view(array.dtype).reshape(array.shape)[...] = array
                continue
            (_move_locked if nbytes <= KEEP_LOCK else _move)(base + start, source.address, nbytes)
        return rest

    def through_torch(self, sources: list[tuple[TorchSource, int]]) -> None:
        """Copy tensors that are on a device or not in C order. CUDA devices copy side by side, then we wait once."""
        torch = torch_module()
        memory = torch.from_numpy(self._buffer)
        waiting = set()
        try:
            for source, start in sources:
                if not source.unchanged() or torch_refusal(torch, source.tensor):  # copy_ would not look
                    raise _changed()
                bits = torch_bits(torch, source.tensor.detach())
                there = memory[start : start + source.nbytes].view(bits.dtype).view(bits.shape)
                cuda = bits.device.type == "cuda"
                if cuda:
                    waiting.add(bits.device)
                there.copy_(bits, non_blocking=cuda)
        finally:  # also when interrupted: the devices must not write into memory that is in other use
            for device in waiting:
                torch.cuda.synchronize(device)


def _changed() -> InvalidRecordError:
    return InvalidRecordError("an array changed its shape or lost its memory while the state was copied: save it again")
