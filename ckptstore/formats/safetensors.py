"""safetensors: 8 bytes of length, a JSON header, then the bytes of all arrays without a gap.

Read and written here rather than by the package of that name, because that reads every array into a copy, has NumPy
types for neither bfloat16 nor float8, and writes only what is in memory as a whole. The header is checked as strictly
as there (and the tests hold both against each other): nothing in it is trusted before it adds up with the file's size.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ckptstore.arrays import ArraySpec
from ckptstore.dtypes import dtype_size
from ckptstore.errors import CorruptionError, FormatError, InvalidRecordError
from ckptstore.formats.mapped import MappedFile
from ckptstore.formats.pytorch import installed_torch, torch_for
from ckptstore.formats.structure import NAME, Held, described, rebuilt
from ckptstore.jsonsize import fits

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""What the format calls our element types. Its F4 and F6 pack several elements into a byte, which no NumPy can hold."""
_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
METADATA = "__metadata__"
MAX_HEADER = 100_000_000  # of the reference implementation
_MEMORY = 1 << 30  # what the header may become


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array in a file: its element type (our name), its shape, and the byte where it begins in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A checked file: its arrays, in the order of the header, and what its writer noted."""

    file: MappedFile
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def arrays(self, torch: Any) -> dict[str, Any]:
        """All arrays by name, as tensors where ``torch`` is given. None is read."""
        kind = "numpy" if torch is None else "torch"
        return {
            name: self.file.value(ArraySpec(kind, one.dtype, one.shape), one.start, torch)
            for name, one in self.tensors.items()
        }

    def record(self) -> Any:
        """The tree: that which was exported, if ckptstore wrote the file, else the arrays by name."""
        text = self.metadata.get(NAME)
        if text is None:
            return self.arrays(torch_of(self.metadata))
        path = self.file.path
        skeleton, held = described(text.encode("utf-8", "surrogatepass"), path)
        torch = torch_for(held)
        known = {one.name for one in held}
        if known != self.tensors.keys():
            odd = sorted(known ^ self.tensors.keys())[:3]
            _damaged(path, f"its arrays are not those that ckptstore wrote ({', '.join(odd)}): it was changed since")

        def value(one: Held) -> Any:
            tensor = self.tensors[one.name]
            if (tensor.dtype, tensor.shape) != stored_as(one.spec):
                _damaged(path, f"array {one.name!r} is not as ckptstore wrote it: it was changed since")
            return self.file.value(one.spec, tensor.start, torch)

        return rebuilt(skeleton, held, value, path)


def torch_of(metadata: Mapping[str, str]) -> Any:
    """torch, so that the arrays load as tensors where it is imported; None if another framework wrote them."""
    return installed_torch() if metadata.get("format", "pt") == "pt" else None


def open_safetensors(path: Path) -> SafetensorsFile:
    """Map a file and check its header.

    Raises:
        CorruptionError: cut, garbage, or a header that does not add up.
        FormatError: a type of element that nobody here can hold.
        NotFoundError, InvalidRecordError: as MappedFile.
    """
    file = MappedFile(path)
    header, start = _header(file)
    noted = header.pop(METADATA, {})
    if not _is_texts(noted):
        _damaged(path, "its metadata is no object of texts")
    tensors: dict[str, Tensor] = {}
    ends: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(path, name, entry)
        tensors[name] = Tensor(dtype, shape, start + begin)
        ends.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(ends):
        if begin != at:
            _damaged(path, f"array {name!r} begins at byte {begin} of the data and should at {at}")
        at = end
    if start + at != file.size:
        _damaged(path, f"it has {file.size} bytes and should have {start + at}: cut, or still being written")
    return SafetensorsFile(file, tensors, noted)


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    path = file.path
    if file.size < 8:
        _damaged(path, f"it has only {file.size} bytes")
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > MAX_HEADER or 8 + length > file.size:
        _damaged(path, f"its header would have {length} bytes: no safetensors file, or cut")
    raw = file.read(8, length)
    if not fits(raw, _MEMORY):
        _damaged(path, "its header has too many values")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _damaged(path, f"its header is no JSON ({error})", error)
    if type(header) is not dict:
        _damaged(path, "its header is no JSON object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """``(element type, shape, first byte, end)`` of one array, checked."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _damaged(path, f"the entry of {name[:80]!r} is malformed")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _damaged(path, f"shape or offsets of {name[:80]!r} are malformed")
    dtype = DTYPES.get(entry["dtype"]) if type(entry["dtype"]) is str else None
    if dtype is None:
        raise FormatError(
            f"{path}: {name[:80]!r} has elements of type {str(entry['dtype'])[:40]!r}, which cannot be read as "
            "an array here: store the file itself (`ckptstore save URL NAME=FILE`)",
            key=str(path),
        )
    try:
        spec = ArraySpec("numpy", dtype, tuple(shape))
    except FormatError as error:
        _damaged(path, f"the shape of {name[:80]!r} is impossible ({error})", error)
    if offsets[1] - offsets[0] != spec.nbytes:
        _damaged(path, f"{name[:80]!r} has {offsets[1] - offsets[0]} bytes and should have {spec.nbytes}")
    return dtype, spec.shape, offsets[0], offsets[1]


def _are_sizes(value: Any) -> bool:
    return type(value) is list and all(type(size) is int and size >= 0 for size in value)


def _is_texts(value: Any) -> bool:
    return type(value) is dict and all(type(text) is str for text in value.values())


def _damaged(path: Path, why: str, cause: Exception | None = None) -> NoReturn:
    message = f"{path} is damaged: {why}. Nothing was read: use another copy, or save the epoch again"
    raise CorruptionError(message, key=str(path)) from cause


# ---------------------------------------------------------------- writing


def stored_as(spec: ArraySpec) -> tuple[str, tuple[int, ...]]:
    """``(element type, shape)`` in the file: those of the array, or a row of bytes where the format lacks its type."""
    if spec.kind in ("numpy", "torch") and spec.dtype in _NAMES:
        return spec.dtype, spec.shape
    return "uint8", (spec.nbytes,)


def plan(held: Iterable[Held], metadata: Mapping[str, str], what: str) -> tuple[bytes, list[int], int]:
    """``(header, first byte of each array, size of the file)`` of a file to be written.

    The wide elements come first, as the reference implementation has them: so every array is aligned.

    Raises:
        InvalidRecordError: the header would be larger than readers take; ``what`` names the record.
    """
    arrays = [(number, one, *stored_as(one.spec)) for number, one in enumerate(held)]
    arrays.sort(key=lambda entry: -dtype_size(entry[2]))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    starts = [0] * len(arrays)
    at = 0
    for number, one, dtype, shape in arrays:
        end = at + math.prod(shape) * dtype_size(dtype)
        header[one.name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        starts[number], at = at, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise InvalidRecordError(
            f"{what} needs a safetensors header of {len(text)} bytes, more than readers take ({MAX_HEADER}): "
            'use format="files"'
        )
    first = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [first + start for start in starts], first + at
