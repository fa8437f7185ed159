"""Arrays as bytes: reading ranges of what is to be saved, and buffers for what is loaded.

An :class:`ArraySource` gives any byte range of an array in C order without copying it where the memory allows, and by
gathering no more than that range where it does not. A :class:`Destination` is the way back: a buffer of exactly the
stored bytes that is the memory of the new (or existing) array itself wherever possible.

Elements are moved as bits and never pass through arithmetic, so NaN payloads and -0.0 stay what they are. torch is
used when the caller has imported it and never imported here. What is not kept: strides (arrays come back in C order),
the device (tensors come back on the CPU), ``requires_grad``, and whether a tensor was a ``Parameter``. What is refused
has a layout or an element type that other machines or libraries could not read back exactly.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ckptstore import dtypes
from ckptstore.dtypes import dtype_size, plane_size
from ckptstore.errors import FormatError, InvalidArgumentError, InvalidRecordError
from ckptstore.refusals import numpy_refusal, torch_refusal

__all__ = [
    "ArraySource",
    "ArraySpec",
    "Destination",
    "NumpySource",
    "TorchSource",
    "dtype_size",
    "is_array",
    "mismatch",
    "plane_size",
    "source",
    "torch_bits",
    "torch_module",
]

KINDS = frozenset({"numpy", "torch", "bytes", "bytearray"})
MAX_BYTES = 2**63 - 1
MAX_DIMENSIONS = 64  # what NumPy can hold


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What an array is, apart from its bytes. Nonsense is a ``FormatError``, because specs are read from stores."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        shape = self.shape
        if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
            raise FormatError(f"an array shape needs at most {MAX_DIMENSIONS} sizes, not {str(shape)[:80]}")
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
        object.__setattr__(self, "nbytes", math.prod(shape) * dtype_size(self.dtype))


# States have many arrays of few shapes, and fewer objects are less work for the garbage collector.
_spec = lru_cache(maxsize=4096)(ArraySpec)


def torch_module() -> Any:
    """torch if the caller has imported it (all of it), else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "nn") else None


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
        """Bytes ``[start, stop)`` in C order: a view where memory is contiguous, else a copy of the range."""
        align = self.align
        if not 0 <= start <= stop <= self.nbytes or start % align or stop % align:
            raise InvalidArgumentError(f"bytes {start} to {stop} are no range of elements of {self.spec}")
        return self._read(start, stop) if start < stop else memoryview(b"")

    @abstractmethod
    def unchanged(self) -> bool:
        """Whether shape and element type are still those of :attr:`spec`."""

    @abstractmethod
    def _read(self, start: int, stop: int) -> memoryview: ...


class _BytesSource(ArraySource):
    __slots__ = ("value",)

    def __init__(self, value: bytes | bytearray) -> None:
        self.value = value
        self.spec = _spec(type(value).__name__, "uint8", (len(value),))
        self.identity = ("object", id(value))

    def unchanged(self) -> bool:
        return len(self.value) == self.spec.shape[0]

    def _read(self, start: int, stop: int) -> memoryview:
        return memoryview(self.value)[start:stop]


class NumpySource(ArraySource):
    """A NumPy array. ``address`` is 0 unless it is in C order."""

    __slots__ = ("address", "array")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        name = dtypes.numpy_name(array.dtype)
        if name is None:
            raise InvalidRecordError(numpy_refusal(array.dtype))
        self.array = array
        self.spec = _spec("numpy", name, array.shape)
        self.address = 0
        if array.nbytes:
            steps = None if array.flags.c_contiguous else _steps(array.shape, array.strides)
            address = array.__array_interface__["data"][0]
            self.identity = ("numpy", name, array.shape, steps, address)
            if steps is None:
                self.address = address
        else:
            # Empty arrays have no memory of their own, so only the very same object is an alias.
            self.identity = ("object", id(array))

    def unchanged(self) -> bool:
        return self.array.shape == self.spec.shape and dtypes.numpy_name(self.array.dtype) == self.spec.dtype

    def _read(self, start: int, stop: int) -> memoryview:
        array = self.array
        if array.flags.c_contiguous:
            return _raw_bytes(array)[start:stop]
        size = array.itemsize
        part = np.empty((stop - start) // size, array.dtype)
        _gather(array, start // size, stop // size, part)
        return _raw_bytes(part)


class TorchSource(ArraySource):
    """A tensor. ``address`` is 0 unless it lies in memory of the host in C order, with the bits that it stands for."""

    __slots__ = ("address", "tensor", "torch")

    def __init__(self, torch: Any, tensor: Any) -> None:
        reason = torch_refusal(torch, tensor)
        if reason is not None:
            raise InvalidRecordError(reason)
        self.torch = torch
        self.tensor = tensor
        shape = tuple(tensor.shape)
        spec = self.spec = _spec("torch", dtypes.torch_name(tensor.dtype) or "", shape)
        self.address = 0
        if spec.nbytes:
            steps = None if tensor.is_contiguous() else _steps(shape, tensor.stride())
            # A lazily conjugated or negated view is the same memory but not the same values.
            lazy = _is_lazy(tensor)
            address = tensor.data_ptr()
            self.identity = ("torch", spec.dtype, shape, steps, tensor.device, address, lazy and tensor.is_conj(), lazy)
            if steps is None and not lazy and tensor.is_cpu:
                self.address = address
        else:
            self.identity = ("object", id(tensor))

    def unchanged(self) -> bool:
        same_type = dtypes.torch_name(self.tensor.dtype) == self.spec.dtype
        return same_type and tuple(self.tensor.shape) == self.spec.shape

    def _read(self, start: int, stop: int) -> memoryview:
        tensor = self.tensor.detach()
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not _is_lazy(tensor):
            return _torch_bytes(self.torch, tensor)[start:stop]
        size = tensor.element_size()
        tensor = torch_bits(self.torch, tensor)
        part = _torch_empty(self.torch, ((stop - start) // size,), tensor.dtype)
        _gather(tensor, start // size, stop // size, part)
        return _torch_bytes(self.torch, part)


def source(value: object) -> ArraySource:
    """The source for an array, tensor, ``bytes`` or ``bytearray``, or ``InvalidRecordError`` with the reason."""
    if type(value) is bytes or type(value) is bytearray:
        return _BytesSource(value)
    if type(value) is np.ndarray:
        return NumpySource(value)
    torch = torch_module()
    if torch is not None and isinstance(value, torch.Tensor):
        return TorchSource(torch, value)
    if isinstance(value, np.ndarray):
        raise InvalidRecordError(f"{type(value).__name__} is a subclass of numpy.ndarray: store numpy.asarray() of it")
    raise InvalidRecordError(f"{type(value).__name__} is not an array")


def is_array(value: object) -> bool:
    """Whether a value is a NumPy array or a torch tensor of any kind."""
    torch = torch_module()
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


class Destination:
    """Memory for one array that is being loaded: fill :attr:`buffer`, then take the value from :meth:`finish`."""

    __slots__ = ("_finish", "buffer", "spec")

    def __init__(self, spec: ArraySpec, buffer: memoryview, finish: Callable[[], object]) -> None:
        self.spec = spec
        self.buffer = buffer
        """Writable bytes of the elements in C order, exactly ``spec.nbytes`` of them."""
        self._finish = finish

    def finish(self) -> object:
        """The value, once the buffer is full: a new array, or the existing target."""
        return self._finish()

    @classmethod
    def allocate(cls, spec: ArraySpec) -> Destination:
        """A new array (torch as NumPy where torch is not imported), or ``bytes`` by one copy at the end."""
        torch = torch_module()
        if spec.kind in ("bytes", "bytearray"):
            data = bytearray(spec.nbytes)
            return cls(spec, memoryview(data), (lambda: bytes(data)) if spec.kind == "bytes" else (lambda: data))
        if spec.kind == "torch" and torch is not None:
            tensor = _torch_empty(torch, spec.shape, dtypes.torch_dtype(torch, spec.dtype))
            return cls(spec, _torch_bytes(torch, tensor), lambda: tensor)
        array: np.ndarray[Any, Any] = np.ndarray(spec.shape, dtypes.numpy_dtype(spec.dtype))
        return cls(spec, _raw_bytes(array), lambda: array)

    @classmethod
    def into_existing(cls, spec: ArraySpec, target: object) -> Destination:
        """An existing array or tensor of the same shape and element type.

        Its memory is the buffer if it is in C order on the CPU, otherwise a staging copy is. ``InvalidArgumentError``
        if the target does not fit or cannot be written.
        """
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
        torch = torch_module()
        tensor = target.detach()
        same_order = dtypes.torch_name(tensor.dtype) == spec.dtype
        if same_order and tensor.device.type == "cpu" and tensor.is_contiguous() and not _is_lazy(tensor):
            return cls(spec, _torch_bytes(torch, tensor), lambda: target)
        staged = _torch_empty(torch, tensor.shape, tensor.dtype)
        buffer = _torch_bytes(torch, staged)

        def finish() -> object:
            if not same_order and spec.nbytes:
                np.frombuffer(buffer, dtypes.numpy_dtype(spec.dtype)).byteswap(inplace=True)
            with torch.no_grad():
                if _is_lazy(tensor):
                    tensor.copy_(staged)
                else:
                    torch_bits(torch, tensor).copy_(torch_bits(torch, staged))
            return target

        return cls(spec, buffer, finish)


def mismatch(spec: ArraySpec, target: object) -> str | None:
    """Why an array cannot be loaded into an existing target, or None if it can."""
    if spec.kind in ("bytes", "bytearray"):
        return f"the checkpoint holds {spec.kind}"
    if isinstance(target, np.ndarray):
        reason, name = _numpy_target(target)
        strides = target.strides
    else:
        torch = torch_module()
        if torch is None or not isinstance(target, torch.Tensor):
            return "it is not an array"
        tensor: Any = target
        reason, name = torch_refusal(torch, tensor), dtypes.torch_name(tensor.dtype)
        strides = () if reason else tensor.stride()
    if reason is not None or name is None:
        return reason
    shape = tuple(target.shape)
    if shape != spec.shape or not dtypes.same_values(name, spec.dtype):
        return f"{spec.dtype} {list(spec.shape)} in the checkpoint, {name} {list(shape)} here"
    if 0 not in shape and any(step == 0 and size > 1 for step, size in zip(strides, shape, strict=True)):
        return "several of its elements share the same memory (an expanded view)"
    return None


def _numpy_target(target: np.ndarray[Any, Any]) -> tuple[str | None, str | None]:
    name = dtypes.numpy_name(target.dtype)
    if type(target) is not np.ndarray:
        return f"{type(target).__name__} is a subclass of numpy.ndarray: pass numpy.asarray() of it", name
    if name is None:
        return numpy_refusal(target.dtype), name
    return (None if target.flags.writeable else "it is read-only"), name


def _steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    # The stride of a dimension of size 1 is arbitrary.
    return tuple([step if size > 1 else 0 for size, step in zip(shape, strides, strict=True)])


def _raw_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    if not array.nbytes:
        return memoryview(bytearray())
    return array.reshape(-1).view(np.uint8).data


def _torch_bytes(torch: Any, tensor: Any) -> memoryview:
    if not tensor.numel():
        return memoryview(bytearray())
    raw: np.ndarray[Any, Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw.data


def _torch_empty(torch: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    # Always on the CPU, whatever the default device is. torch warns when it makes complex32, but not of a view.
    half = dtype == torch.complex32
    made = torch.empty(shape, dtype=torch.int32 if half else dtype, device="cpu")
    return made.view(dtype) if half else made


def torch_bits(torch: Any, tensor: Any) -> Any:
    """The same elements as integers, which every torch can copy bit for bit; lazy views must be computed instead."""
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    return tensor if plain is None or _is_lazy(tensor) else tensor.view(plain)


def _is_lazy(tensor: Any) -> bool:
    return bool(tensor.is_conj() or tensor.is_neg())


def _gather(array: Any, start: int, stop: int, out: Any) -> None:
    """Copy elements ``[start, stop)`` in C order into the row ``out``: whole rows at once, cut rows by recursion."""
    if array.ndim <= 1:
        out[...] = array.reshape(-1)[start:stop]
        return
    row = math.prod(array.shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        _gather(array[last], start - last * row, stop - last * row, out)
        return
    head, tail = first * row - start, last * row - start
    if head:
        _gather(array[first - 1], row - head, row, out[:head])
    if first < last:
        block = array[first:last]
        out[head:tail].reshape(block.shape)[...] = block
    if tail < stop - start:
        _gather(array[last], 0, stop - last * row, out[tail:])
