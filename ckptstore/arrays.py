"""Arrays as bytes: reading ranges of what is to be saved, and buffers for what is loaded.

An :class:`ArraySource` gives any byte range of an array in C order without copying it where the memory allows, and by gathering
no more than that range where it does not. A :class:`Destination` is the way back: a buffer of exactly the stored bytes that is the
memory of the new (or existing) array itself wherever possible.

Elements are moved as bits and never pass through arithmetic, so NaN payloads and -0.0 stay what they are. torch is used when the
caller has imported it and never imported here. What is not kept: strides (arrays come back in C order), the device (the CPU),
``requires_grad``, and whether a tensor was a ``Parameter``. What is refused has a layout or an element type that other machines or
libraries could not read back exactly.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptstore import dtypes
from ckptstore.dtypes import dtype_size, plane_size
from ckptstore.errors import FormatError, InvalidArgumentError, InvalidRecordError

__all__ = ["ArraySource", "ArraySpec", "Destination", "dtype_size", "is_array", "mismatch", "plane_size", "source"]

KINDS = frozenset({"numpy", "torch", "bytes", "bytearray"})
MAX_BYTES = 2**63 - 1
MAX_DIMENSIONS = 64  # what NumPy can hold


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What an array is, apart from its bytes. Nonsense is a ``FormatError``, because specs are read from stores."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = self.shape
        if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
            raise FormatError(f"an array shape must be a tuple of at most {MAX_DIMENSIONS} sizes, not {str(shape)[:80]}")
        total = dtype_size(self.dtype) or 1
        for size in shape:
            if type(size) is not int or size < 0:
                raise FormatError(f"{str(shape)[:80]} is not an array shape")
            # Without the zeros, because array libraries multiply the other sizes of an empty array too.
            total *= size or 1
        if total > MAX_BYTES:
            raise FormatError(f"an array of shape {str(shape)[:80]} is larger than any memory")
        if self.kind not in KINDS:
            raise FormatError(f"unknown kind of array {str(self.kind)[:80]!r}: written by a newer version, or damaged")
        if self.kind in ("bytes", "bytearray") and (self.dtype != "uint8" or len(shape) != 1):
            raise FormatError(f"{self.kind} must be a row of uint8, not {self.dtype} of shape {shape}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_size(self.dtype)


class ArraySource(ABC):
    """One array of a state, read lazily. It holds on to the memory; :attr:`identity` tells aliases."""

    __slots__ = ("identity", "spec")

    spec: ArraySpec
    identity: tuple[object, ...]
    """Equal for two sources only if they are the same elements of the same memory, seen alike."""

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def item_size(self) -> int:
        """Width of the byte planes for the codec."""
        return plane_size(self.spec.dtype)

    @property
    def align(self) -> int:
        """Bytes of one element: borders of ranges must be multiples of it."""
        return dtype_size(self.spec.dtype) or 1

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``[start, stop)`` of the elements in C order: a view where memory is contiguous, else a copy of the range."""
        align = self.align
        if not 0 <= start <= stop <= self.nbytes or start % align or stop % align:
            raise InvalidArgumentError(f"bytes {start} to {stop} are no range of elements of {self.spec}")
        return self._read(start, stop) if start < stop else memoryview(b"")

    @abstractmethod
    def _read(self, start: int, stop: int) -> memoryview: ...


class _BytesSource(ArraySource):
    __slots__ = ("value",)

    def __init__(self, value: bytes | bytearray) -> None:
        self.value = value
        self.spec = ArraySpec(type(value).__name__, "uint8", (len(value),))
        self.identity = ("object", id(value))

    def _read(self, start: int, stop: int) -> memoryview:
        return memoryview(self.value)[start:stop]


class _NumpySource(ArraySource):
    __slots__ = ("array",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        name = dtypes.numpy_name(array.dtype)
        if name is None:
            raise InvalidRecordError(_numpy_refusal(array.dtype))
        self.array = array
        self.spec = ArraySpec("numpy", name, array.shape)
        # Empty arrays have no memory of their own, so only the very same object is an alias.
        place: tuple[object, ...] = ("object", id(array))
        if array.size and array.itemsize:
            place = (array.__array_interface__["data"][0], _steps(array.shape, array.strides))
        self.identity = ("numpy", name, array.shape, *place)

    def _read(self, start: int, stop: int) -> memoryview:
        array = self.array
        if array.flags.c_contiguous:
            return _raw_bytes(array)[start:stop]
        size = array.itemsize
        part = np.empty((stop - start) // size, array.dtype)
        # ml_dtypes have casts of their own; plain integers of the same width are only ever copied.
        bits = np.dtype(f"V{size}") if array.dtype.isbuiltin != 1 else array.dtype
        _gather(array.view(bits), start // size, stop // size, part.view(bits))
        return _raw_bytes(part)


class _TorchSource(ArraySource):
    __slots__ = ("tensor", "torch")

    def __init__(self, torch: Any, tensor: Any) -> None:
        reason = _torch_refusal(torch, tensor)
        if reason is not None:
            raise InvalidRecordError(reason)
        self.torch = torch
        self.tensor = tensor
        name = dtypes.torch_name(tensor.dtype)
        assert name is not None
        shape = tuple(tensor.shape)
        self.spec = ArraySpec("torch", name, shape)
        place: tuple[object, ...] = ("object", id(tensor))
        if tensor.numel():
            # A lazily conjugated or negated view is the same memory but not the same values.
            lazy = (tensor.is_conj(), tensor.is_neg())
            place = (str(tensor.device), tensor.data_ptr(), _steps(shape, tensor.stride()), lazy)
        self.identity = ("torch", name, shape, *place)

    def _read(self, start: int, stop: int) -> memoryview:
        tensor = self.tensor.detach()
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not _is_lazy(tensor):
            return _torch_bytes(self.torch, tensor)[start:stop]
        size = tensor.element_size()
        tensor = _torch_bits(self.torch, tensor)
        part = self.torch.empty((stop - start) // size, dtype=tensor.dtype, device="cpu")
        _gather(tensor, start // size, stop // size, part)
        return _torch_bytes(self.torch, part)


def source(value: object) -> ArraySource:
    """The source for an array, tensor, ``bytes`` or ``bytearray``. ``InvalidRecordError`` says why a value is refused."""
    if isinstance(value, (bytes, bytearray)):
        return _BytesSource(value)
    if type(value) is np.ndarray:
        return _NumpySource(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _TorchSource(torch, value)
    raise InvalidRecordError(f"{type(value).__name__} is not an array that can be stored")


def is_array(value: object) -> bool:
    """Whether a value is a NumPy array or a torch tensor of any kind."""
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


class Destination:
    """Memory for one array that is being loaded: fill :attr:`buffer`, then take the value from :meth:`finish`."""

    __slots__ = ("_finish", "buffer", "spec")

    def __init__(self, spec: ArraySpec, buffer: memoryview, finish: Callable[[], object]) -> None:
        self.spec = spec
        self.buffer = buffer
        """Writable bytes of the elements in C order, exactly ``spec.nbytes`` of them."""
        self._finish = finish

    @classmethod
    def allocate(cls, spec: ArraySpec) -> Destination:
        """A new array: torch as torch where torch is imported and as NumPy elsewhere, ``bytes`` by one copy at the end."""
        torch = sys.modules.get("torch")
        if spec.kind in ("bytes", "bytearray"):
            data = bytearray(spec.nbytes)
            return cls(spec, memoryview(data), (lambda: bytes(data)) if spec.kind == "bytes" else (lambda: data))
        if spec.kind == "torch" and torch is not None:
            tensor = torch.empty(spec.shape, dtype=dtypes.torch_dtype(torch, spec.dtype), device="cpu")
            return cls(spec, _torch_bytes(torch, tensor), lambda: tensor)
        array: np.ndarray[Any, Any] = np.ndarray(spec.shape, dtypes.numpy_dtype(spec.dtype))
        return cls(spec, _raw_bytes(array), lambda: array)

    @classmethod
    def into_existing(cls, spec: ArraySpec, target: object) -> Destination:
        """An existing array or tensor of the same shape and element type; its memory is the buffer if it is in C order on the
        CPU, otherwise a staging copy is. ``InvalidArgumentError`` if the target does not fit or cannot be written."""
        reason = mismatch(spec, target)
        if reason is not None:
            raise InvalidArgumentError(f"cannot load into this {type(target).__name__}: {reason}")
        if isinstance(target, np.ndarray):
            return cls._into_numpy(spec, target)
        return cls._into_torch(spec, target)

    @classmethod
    def _into_numpy(cls, spec: ArraySpec, target: np.ndarray[Any, Any]) -> Destination:
        if target.flags.c_contiguous and dtypes.numpy_name(target.dtype) == spec.dtype:
            return cls(spec, _raw_bytes(target), lambda: target)
        staged: np.ndarray[Any, Any] = np.ndarray(spec.shape, dtypes.numpy_dtype(spec.dtype))

        def finish() -> np.ndarray[Any, Any]:
            target[...] = staged
            return target

        return cls(spec, _raw_bytes(staged), finish)

    @classmethod
    def _into_torch(cls, spec: ArraySpec, target: Any) -> Destination:
        torch = sys.modules["torch"]
        tensor = target.detach()
        same_order = dtypes.torch_name(tensor.dtype) == spec.dtype
        if same_order and tensor.device.type == "cpu" and tensor.is_contiguous() and not _is_lazy(tensor):
            return cls(spec, _torch_bytes(torch, tensor), lambda: target)
        staged: np.ndarray[Any, Any] = np.ndarray(spec.shape, dtypes.numpy_dtype(spec.dtype))

        def finish() -> object:
            own = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            native = staged if same_order else staged.byteswap()
            _torch_bytes(torch, own)[:] = _raw_bytes(native)
            with torch.no_grad():
                _torch_bits(torch, tensor).copy_(own if _is_lazy(tensor) else _torch_bits(torch, own))
            return target

        return cls(spec, _raw_bytes(staged), finish)
