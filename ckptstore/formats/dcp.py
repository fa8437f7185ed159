"""Folders that torch.distributed.checkpoint (DCP) wrote: ``.metadata`` and ``__0_0.distcp``, ``__1_0.distcp``, ...

``.metadata`` is a pickle. It is not unpickled: the few of its instructions that make data are carried out here, classes
are only noted by name, and only those that such a file has. The tensors are ranges of the other files, each as
``torch.save`` wrote it: torch reads what they are (``weights_only``), and their bytes stay in the mapping.
"""

from __future__ import annotations

import io
import pickletools
import reprlib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ckptstore.errors import CkptStoreError, CorruptionError, FormatError, UnsafeFileError
from ckptstore.formats.flatnames import places_of, tree_of
from ckptstore.formats.layout import is_inside
from ckptstore.formats.mapped import MappedFile
from ckptstore.formats.pytorch import load_part, loading_torch
from ckptstore.shards import ShardedArray

METADATA = ".metadata"
SUFFIX = ".distcp"
MAX_METADATA = 1 << 30
_MAX_PATH = 200
_MAX_LIST = 1_000_000
_MODULES = {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"}
_CLASSES = {
    "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "TensorProperties", "_MEM_FORMAT_ENCODING", "_StorageInfo",
}  # fmt: skip
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


def is_dcp_folder(path: Path) -> bool:
    """Whether a folder looks like what DCP writes."""
    return (path / METADATA).is_file() and any(path.glob(f"__*_*{SUFFIX}"))


def files_of(path: Path) -> dict[str, int]:
    """The files that the ``.metadata`` of a folder speaks of, and how many bytes each must have at least.

    Raises:
        CorruptionError, UnsafeFileError, FormatError, NotFoundError: as ``read_dcp``.
    """
    found: dict[str, int] = {}
    for items in _Index(path / METADATA).items.values():
        for item in items:
            found[item.file] = max(found.get(item.file, 0), item.start + item.length)
    return found


def read_dcp(path: Path, note: Callable[[Path], object]) -> dict[str, Any]:
    """The records: dicts at the top of the state dict, and ``state_dict`` with the rest.

    Tensors that were in pieces are in pieces here too.

    Raises:
        CorruptionError: something is cut, or does not add up.
        UnsafeFileError: there is a pickle of objects; nothing of it was run.
        FormatError: no torch is there to read it, or it is of a kind that is not known.
        NotFoundError, InvalidRecordError: a file is missing or cannot be read, or two things lie at one place.
    """
    torch = loading_torch(path)
    note(path / METADATA)
    index = _Index(path / METADATA)
    files: dict[str, MappedFile] = {}
    for name in sorted({item.file for items in index.items.values() for item in items}):
        note(path / name)
        files[name] = MappedFile(path / name)
    leaves = {}
    for fqn, shape in index.shapes.items():
        items = index.items.get(fqn, [])
        if shape is None:
            if len(items) != 1:
                _damaged(index.path, f"{fqn} is there {len(items)} times")
            leaves[fqn] = load_part(files[items[0].file].path, _view(files[items[0].file], items[0]))
        else:
            leaves[fqn] = _tensor(fqn, shape, items, files, torch)
    places = places_of({fqn: index.paths.get(fqn, (fqn,)) for fqn in leaves})
    return tree_of((places[fqn], leaf) for fqn, leaf in leaves.items())


# ---- tensors -----------------------------------------------------------------------------------------------------


def _tensor(fqn: str, shape: tuple[int, ...], items: list[_Item], files: Mapping[str, MappedFile], torch: Any) -> Any:
    """A tensor, whole if it is in one piece."""
    pieces = [(item.offset or (0,) * len(shape), _mapped(files[item.file], item, torch)) for item in items]
    if len(pieces) == 1 and tuple(pieces[0][1].shape) == shape:
        return pieces[0][1]
    if not pieces:
        raise CorruptionError(f"{fqn} has no data: the checkpoint is not whole")
    return ShardedArray(shape, pieces[0][1].dtype, pieces)


def _mapped(file: MappedFile, item: _Item, torch: Any) -> Any:
    """A tensor over the bytes of the file. What torch reads of it is its form only."""
    form = load_part(file.path, _view(file, item), form_only=True)
    if not isinstance(form, torch.Tensor) or form.layout is not torch.strided:
        raise FormatError(f"{file.path} holds a {type(form).__name__}, not a plain tensor, at byte {item.start}")
    nbytes = form.untyped_storage().nbytes()
    if not nbytes:
        return torch.empty(form.shape, dtype=form.dtype)
    start = item.start + _payload(file, item, nbytes)
    raw = torch.from_numpy(file.array(np.dtype(np.uint8), (nbytes,), start))
    return raw.view(form.dtype).as_strided(form.size(), form.stride(), form.storage_offset())


def _payload(file: MappedFile, item: _Item, nbytes: int) -> int:
    """Where the bytes of the one storage of an item begin, in the item."""
    try:
        with zipfile.ZipFile(_view(file, item)) as archive:
            by_name = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            order = archive.read(by_name["byteorder"].filename) if "byteorder" in by_name else b"little"
            entry = by_name["data/0"]
        if order != b"little":
            raise FormatError(f"{file.path} was written on a machine of the other byte order")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != nbytes:
            _damaged(file.path, f"the data at byte {item.start} have another size than its tensor")
        header = file.read(item.start + entry.header_offset, 30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            _damaged(file.path, f"there is no data at byte {item.start}")
    except CkptStoreError:
        raise
    except (KeyError, zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        _damaged(file.path, f"what lies at byte {item.start} is not of torch.save ({error})")
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = entry.header_offset + 30 + lengths
    if start + nbytes > item.length:
        _damaged(file.path, f"the data at byte {item.start} go beyond their end")
    return int(start)


def _view(file: MappedFile, item: _Item) -> io.BufferedReader:
    return io.BufferedReader(_Range(file, item.start, item.length))


class _Range(io.RawIOBase):
    """A range of a mapped file, as a file."""

    def __init__(self, file: MappedFile, start: int, length: int) -> None:
        super().__init__()
        if start < 0 or length < 0 or start + length > file.size:
            _damaged(file.path, f"it has {file.size} bytes and should have at least {start + length}")
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        length = max(0, min(len(buffer), self._length - self._at))
        buffer[:length] = self._file.read(self._start + self._at, length)
        self._at += length
        return length


# ---- the metadata ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Item:
    """Where a piece of a tensor, or a value, lies: ``offset`` of its first element, and a range of a file."""

    offset: tuple[int, ...] | None
    file: str
    start: int
    length: int


class _Index:
    """What ``.metadata`` says, checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...] | None] = {}
        """By name: the shape of a tensor, or None."""
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.items: dict[str, list[_Item]] = {}
        file = MappedFile(path)
        if file.size > MAX_METADATA:
            _damaged(path, "it is larger than any metadata")
        try:
            self._take(_Machine(path).run(file.read(0, file.size)))
        except CkptStoreError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptionError(
                f"{path} is damaged: it is no metadata of DCP ({type(error).__name__}: {error})", key=str(path)
            ) from error

    def _take(self, metadata: Any) -> None:
        for fqn, one in metadata.facts["state_dict_metadata"].items():
            self.shapes[_text(fqn)] = _ints(one.facts["size"]) if one.name == "TensorStorageMetadata" else None
        for fqn, path in (metadata.facts.get("planner_data") or {}).items():
            if type(path) is not tuple or not 0 < len(path) <= _MAX_PATH or not all(map(_is_step, path)):
                raise ValueError("a path makes no sense")
            self.paths[_text(fqn)] = path
        self._check_lists()
        for index, info in metadata.facts["storage_data"].items():
            fqn, offset = _text(index.facts["fqn"]), index.facts.get("offset")
            if fqn not in self.shapes or not is_inside(info.facts["relative_path"]):
                raise ValueError(f"{str(fqn)[:80]} makes no sense")
            if info.facts.get("transform_descriptors"):
                raise FormatError(f"{self.path}: data that went through transforms of DCP cannot be read here")
            where = _ints((info.facts["offset"], info.facts["length"]))
            item = _Item(None if offset is None else _ints(offset), info.facts["relative_path"], *where)
            self.items.setdefault(fqn, []).append(item)

    def _check_lists(self) -> None:
        """ValueError if the lists together are much longer than what is in them: each position takes memory."""
        lengths: dict[tuple[str | int, ...], int] = {}
        for path in self.paths.values():
            for depth, key in enumerate(path):
                if type(key) is int:
                    lengths[path[:depth]] = max(key + 1, lengths.get(path[:depth], 0))
        if sum(lengths.values()) > _MAX_LIST + len(self.paths):
            raise ValueError("its lists have more items than there can be")


def _is_step(key: Any) -> bool:
    return type(key) is str or (type(key) is int and 0 <= key < _MAX_LIST)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("a name is no text")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{reprlib.repr(values)[:80]} are no sizes")  # the text of all of it may have no end
    return values


@dataclass(eq=False)
class _Object:
    """An object of one of the known classes: what a pickle says of it."""

    name: str
    args: tuple[Any, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


class _Machine:
    """Carries out what makes data in a pickle, and nothing else: no class is looked up, nothing is called."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """What the pickle describes."""
        for opcode, arg, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self._stack.pop()
            if name in _PUSHES:
                self._stack.append(arg)
            elif name in _MAKES:
                self._stack.append(_MAKES[name]())
            elif name not in ("PROTO", "FRAME"):
                step = getattr(self, "_do_" + name.lower().removeprefix("long_").removeprefix("bin"), None)
                if step is None:
                    self._refuse(f"an instruction ({name}) that no metadata of DCP has")
                step(arg)
        raise ValueError("it ends in the middle")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsafeFileError(
            f"{self._path} holds {what}: nothing of it was run. Where you trust it, load it with torch's own DCP, and "
            "save what it holds",
            key=str(self._path),
        )

    def _since_mark(self) -> list[Any]:
        at = self._marks.pop()
        found = self._stack[at:]
        del self._stack[at:]
        return found

    def _do_mark(self, arg: Any) -> None:
        self._marks.append(len(self._stack))

    def _do_memoize(self, arg: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _do_put(self, arg: int) -> None:
        self._memo[arg] = self._stack[-1]

    def _do_get(self, arg: int) -> None:
        self._stack.append(self._memo[arg])

    def _do_tuple(self, arg: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _do_tuple1(self, arg: Any) -> None:
        self._stack[-1:] = [tuple(self._stack[-1:])]

    def _do_tuple2(self, arg: Any) -> None:
        self._stack[-2:] = [tuple(self._stack[-2:])]

    def _do_tuple3(self, arg: Any) -> None:
        self._stack[-3:] = [tuple(self._stack[-3:])]

    def _do_append(self, arg: Any) -> None:
        item = self._stack.pop()
        self._list().append(item)

    def _do_appends(self, arg: Any) -> None:
        items = self._since_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        if type(self._stack[-1]) is not list:
            raise TypeError("no list")
        return self._stack[-1]

    def _do_setitem(self, arg: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _do_setitems(self, arg: Any) -> None:
        self._set(self._since_mark())

    def _set(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(pairs) % 2 or not all(type(key) in (str, _Object) for key in pairs[::2]):
            raise TypeError("no dictionary of texts")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def _do_global(self, arg: str) -> None:
        self._name(*arg.split(" ", 1))

    def _do_stack_global(self, arg: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError("a class has no name")
        known = (
            (module in _MODULES and name in _CLASSES)
            or (module == "torch" and name.isidentifier())  # Size, and element types: only a text here
            or (module, name) == ("torch.serialization", "_get_layout")
            or (module in ("pathlib", "pathlib._local") and name in _PATHS)
        )
        if not known:
            self._refuse(f"objects of {module[:80]}.{name[:80]}")
        self._stack.append(_Object(name))

    def _do_newobj(self, arg: Any) -> None:
        args, made = self._stack.pop(), self._stack.pop()
        if type(made) is not _Object or made.args or made.facts or type(args) is not tuple:
            raise TypeError("no class")
        self._stack.append(_ints(*args) if made.name == "Size" else _Object(made.name, args))

    _do_reduce = _do_newobj

    def _do_build(self, arg: Any) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is not _Object:
            raise TypeError("no object")
        if type(state) is dict:  # that of TensorProperties is a tuple, and of no use here
            target.facts = state


_PUSHES = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_MAKES: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip


def _damaged(path: Path, why: str) -> NoReturn:
    raise CorruptionError(f"{path} is damaged: {why}. Use another copy, or save the epoch again", key=str(path))
