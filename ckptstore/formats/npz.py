"""npz: a ZIP of .npy files, as ``numpy.savez`` writes it and every NumPy reads it, without pickle.

Members that are not compressed are mapped where they lie; compressed ones are unpacked into a file without a name. The
checksum of every member is looked at, because nothing else in the format would show a wrong byte.
"""

from __future__ import annotations

import io
import math
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ckptstore.arrays import MAX_BYTES, ArraySpec
from ckptstore.dtypes import dtype_size, numpy_dtype
from ckptstore.errors import (
    CkptStoreError,
    CorruptionError,
    FormatError,
    InvalidRecordError,
    StoreFullError,
    UnsafeFileError,
)
from ckptstore.formats.mapped import MappedFile, open_regular
from ckptstore.formats.pytorch import torch_for
from ckptstore.formats.structure import NAME, Held, described, rebuilt

DESCRIPTION = f"__{NAME}__"
_SUFFIX = ".npy"
_BLOCK = 1 << 20
_LOCAL = struct.Struct("<4s22xHH")
_MAX_MEMBERS = 500_000
_MAX_DIRECTORY = 64 * 1024 * 1024
# Version 3 is for names of fields beyond Latin-1, which no record can hold.
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class ZippedFile(io.BufferedReader):
    """An open file to give to ``zipfile``, which would make objects of a table of contents however long it is."""

    def __init__(self, fd: int) -> None:
        super().__init__(io.FileIO(fd))

    def read(self, size: int | None = -1, /) -> bytes:
        """Some bytes. BadZipFile if they are more than the table of any archive has."""
        most = _MAX_DIRECTORY + 1
        found = super().read(most if size is None or size < 0 else min(size, most))
        if len(found) == most:
            raise zipfile.BadZipFile("its table of contents is too long to be one")
        return found


@dataclass(frozen=True, slots=True)
class Npy:
    """One array: the mapping that it lies in, its header's content, and the byte where its elements begin."""

    file: MappedFile
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int

    def array(self) -> np.ndarray[Any, Any]:
        """The array, not a copy."""
        return self.file.array(self.dtype, self.shape, self.start, fortran=self.fortran)


def read_npz(path: Path) -> Any:
    """The tree of a file: that which was exported, if ckptstore wrote it, else a dict of its arrays.

    Raises:
        CorruptionError: cut, garbage, or a member whose checksum or size is wrong.
        UnsafeFileError: an array of Python objects, which only pickle could read.
        NotFoundError, InvalidRecordError: as MappedFile.
        StoreFullError: no room to unpack what is compressed.
    """
    members = open_npz(path)
    description = members.pop(DESCRIPTION, None)
    if description is None:
        return {name: member.array() for name, member in members.items()}
    skeleton, held = described(description.array().tobytes(), path)
    if {one.name for one in held} != members.keys():
        _damaged(path, "its arrays are not those that ckptstore wrote: it was changed since")
    torch = torch_for(held)
    return rebuilt(skeleton, held, lambda one: npy_value(members[one.name], one, torch), path)


def npy_value(member: Npy, one: Held, torch: Any) -> Any:
    """An exported array as what it was. CorruptionError if it is not as it was written."""
    path = member.file.path
    dtype = stored_dtype(one.spec)
    shape = one.spec.shape
    if member.dtype != dtype or member.dtype.str != dtype.str or member.shape != shape or member.fortran:
        _damaged(path, f"array {one.name!r} is not as ckptstore wrote it: it was changed since")
    return member.file.value(one.spec, member.start, torch)


def open_npz(path: Path) -> dict[str, Npy]:
    """All members by name, checked but not read into memory."""
    file = MappedFile(path)
    found: dict[str, Npy] = {}
    with _reading(path), ZippedFile(open_regular(path)) as opened, zipfile.ZipFile(opened) as archive:
        if len(archive.infolist()) > _MAX_MEMBERS:
            _damaged(path, "it has too many members")
        for info in archive.infolist():
            name = info.filename
            if not name.endswith(_SUFFIX):
                _damaged(path, f"its member {name[:80]!r} is no array: it is no npz file")
            name = name.removesuffix(_SUFFIX)
            if name in found:
                _damaged(path, f"its member {name[:80]!r} is there twice")
            found[name] = _member(file, archive, info)
    return found


def _member(file: MappedFile, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Npy:
    if info.compress_type != zipfile.ZIP_STORED:
        unpacked = _unpacked(file.path, archive, info)
        return open_npy(unpacked, 0, unpacked.size, f"{file.path}: {info.filename}")
    with archive.open(info) as member:  # reads to the end, so that the checksum is compared
        while member.read(_BLOCK):
            pass
    signature, name, extra = _LOCAL.unpack(file.read(info.header_offset, _LOCAL.size))
    start = info.header_offset + _LOCAL.size + name + extra
    if signature != b"PK\x03\x04" or start + info.file_size > file.size:
        _damaged(file.path, f"its member {info.filename[:80]!r} is not where it should be")
    return open_npy(file, start, info.file_size, f"{file.path}: {info.filename}")


def _unpacked(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> MappedFile:
    """A compressed member, in a file that vanishes with its last user."""
    with _making_room(path), tempfile.NamedTemporaryFile(prefix="ckptstore-") as aside:
        with _reading(path), archive.open(info) as member:
            left = info.file_size
            while block := member.read(_BLOCK):
                left -= len(block)
                if left < 0:
                    _damaged(path, f"its member {info.filename[:80]!r} is longer than it says")
                with _making_room(path):
                    aside.write(block)
        aside.flush()
        return MappedFile(Path(aside.name), named=path)


@contextmanager
def _making_room(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, CkptStoreError):
            raise
        text = f"{path} could not be unpacked into a scratch file: {error.strerror}. Make room, or set TMPDIR"
        raise StoreFullError(text, errno=error.errno) from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What the standard library says of a bad archive, as an error that names it."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, IndexError, UnicodeDecodeError) as error:
        _damaged(path, f"it is no whole ZIP file ({error}): cut, or still being written", error)
    except CkptStoreError:
        raise
    except (NotImplementedError, RuntimeError, ValueError, LookupError, OverflowError, OSError) as error:
        _damaged(path, f"a member cannot be read ({error})", error)


def open_npy(file: MappedFile, start: int, length: int, what: str) -> Npy:
    """The .npy file that lies in ``length`` bytes of a mapping.

    Raises:
        CorruptionError: its header is malformed, or its size is not that of the array.
        UnsafeFileError: it holds Python objects.
    """
    head = io.BytesIO(file.read(start, min(length, 128 * 1024)))
    try:
        read = _HEADERS[np.lib.format.read_magic(head)]
        shape, fortran, dtype = read(head)
        ok = all(type(size) is int and size >= 0 for size in shape)
    except Exception as error:  # noqa: BLE001 (NumPy parses with eval's safe half, which raises whatever it likes)
        _damaged(file.path, f"{what} has a malformed header ({error})", error)
    if dtype.hasobject:
        raise UnsafeFileError(
            f"{what} holds Python objects, which only a pickle can: nothing of it was run. "
            "Convert it to numbers or text where you trust it, or store the file itself "
            "(`ckptstore save URL NAME=FILE`)",
            key=str(file.path),
        )
    nbytes = math.prod(shape) * dtype.itemsize if ok else -1
    if nbytes != length - head.tell() or nbytes > MAX_BYTES:
        _damaged(file.path, f"{what} has {length} bytes, which is not the size of its array")
    return Npy(file, dtype, tuple(shape), bool(fortran), start + head.tell())


def _damaged(path: Path, why: str, cause: Exception | None = None) -> NoReturn:
    message = f"{path} is damaged: {why}. Nothing was read: use another copy, or save the epoch again"
    raise CorruptionError(message, key=str(path)) from cause


# ---------------------------------------------------------------- writing


def stored_dtype(spec: ArraySpec) -> np.dtype[Any]:
    """The type in the file: that of the array, or unsigned integers of its width where plain NumPy lacks it."""
    try:
        dtype = numpy_dtype(spec.dtype)
        if dtype.isbuiltin != 2:
            return dtype
    except FormatError:  # torch has it, ml_dtypes here does not
        pass
    return np.dtype(f"<u{dtype_size(spec.dtype)}")


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The bytes before the elements of an array in C order: a multiple of 64 of them."""
    out = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, facts)
    return out.getvalue()


def fit_name(path: str) -> str:
    """A member's name that ZIP and NumPy give back as it is."""
    name = path.replace("\0", "_")
    if name.startswith("/") or ".." in name.split("/"):
        name = f"_{name}".replace("/../", "/_/")
    return f"{name}_" if name.endswith(_SUFFIX) else name


_Entry = tuple[str, int, int]  # name, first byte of the member, its length


class NpzPlan:
    """Where everything goes in an npz file whose members are written in any order.

    ``starts`` is the first byte of each array's elements, ``heads`` the .npy headers with their places, ``size`` the
    length of the file up to the directory. ``finish`` gives the rest, once the checksums are known.
    """

    _ZIP64 = struct.Struct("<HHQQ")
    _ALIGN = 64

    def __init__(self, arrays: list[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> None:
        self.starts: list[int] = []
        self.heads: list[tuple[int, bytes]] = []
        self.members: list[_Entry] = []
        self._local: list[int] = []
        at = 0
        for name, dtype, shape in arrays:
            head = npy_header(dtype, shape)
            encoded = (name + _SUFFIX).encode()
            if len(encoded) > 0xFFFF:
                raise InvalidRecordError(f"the name {name[:80]!r} is too long for an npz file")
            start = at + 30 + len(encoded) + self._ZIP64.size
            start += self._padding(start)
            length = len(head) + math.prod(shape) * dtype.itemsize
            self._local.append(at)
            self.members.append((name + _SUFFIX, start, length))
            self.heads.append((start, head))
            self.starts.append(start + len(head))
            at = start + length
        self.size = at

    def _padding(self, start: int) -> int:
        gap = -start % self._ALIGN
        return gap + self._ALIGN if 0 < gap < 4 else gap  # an extra field has four bytes at least

    def finish(self, checksums: list[int]) -> Iterator[tuple[int, bytes]]:
        """``(place, bytes)`` of the local headers and the directory. CRC-32 of each member, in order."""
        at = self.size
        for (name, start, length), local, crc in zip(self.members, self._local, checksums, strict=True):
            encoded = name.encode()
            sizes = self._ZIP64.pack(1, 16, length, length)
            gap = start - local - 30 - len(encoded) - len(sizes)
            extra = sizes + (struct.pack("<HH", 0x4B43, gap - 4) + bytes(gap - 4) if gap else b"")
            common = struct.pack("<HHHHHIII", 45, 0x800, 0, 0, 0x21, crc, 0xFFFFFFFF, 0xFFFFFFFF)
            yield local, b"PK\x03\x04" + common + struct.pack("<HH", len(encoded), len(extra)) + encoded + extra
            wide = struct.pack("<HHQQQ", 1, 24, length, length, local)
            tail = struct.pack("<HHHHHII", len(encoded), len(wide), 0, 0, 0, 0o600 << 16, 0xFFFFFFFF)
            entry = b"PK\x01\x02" + struct.pack("<H", 45 | 3 << 8) + common + tail + encoded + wide
            yield at, entry
            at += len(entry)
        count, length = len(self.members), at - self.size
        end = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, self.size)
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
        end += struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        yield at, end
