"""Files of ``torch.save``: read by torch itself, with ``weights_only``, so that no pickle is ever executed.

``weights_only`` is as good as the torch that does it: CVE-2025-32434 (before 2.6) and CVE-2026-24747 (before 2.10) let
a crafted file run code all the same. So an older torch is refused, rather than trusted.

The arrays stay in the file (``mmap=True``) and come into memory when they are touched.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ckptstore.arrays import torch_module
from ckptstore.errors import CorruptionError, FormatError, UnsafeFileError
from ckptstore.formats.mapped import open_regular
from ckptstore.formats.structure import Held

OLDEST = (2, 10)
_GLOBAL = re.compile(r"(?:GLOBAL |but got <class ')([\w.]+)")
_loading = threading.Lock()


def installed_torch() -> Any:
    """torch, imported if need be, or None if it is not installed."""
    if torch_module() is None and importlib.util.find_spec("torch") is not None:
        import torch  # noqa: F401 (found among the modules below)
    return torch_module()


def torch_for(held: Iterable[Held]) -> Any:
    """torch, if one of the arrays was a tensor and torch is installed; else None."""
    return installed_torch() if any(one.spec.kind == "torch" for one in held) else None


def loading_torch(path: Path) -> Any:
    """A torch that can read ``path`` safely. FormatError says what to install."""
    torch = installed_torch()
    if torch is None:
        raise FormatError(f"{path} can only be read with PyTorch: pip install 'ckptstore[torch]'", key=str(path))
    found = tuple(int(part) for part in re.findall(r"\d+", str(torch.__version__))[:2])
    if found < OLDEST:
        raise FormatError(
            f"{path} was not read: torch {torch.__version__} can be made to run code by such a file, whoever wrote it "
            f"(CVE-2025-32434, CVE-2026-24747). Upgrade torch to {OLDEST[0]}.{OLDEST[1]} or later",
            key=str(path),
        )
    return torch


def read_torch(path: Path) -> Any:
    """What was given to ``torch.save``: its arrays as tensors on the CPU, mapped where the file allows.

    Raises:
        UnsafeFileError: it holds objects that only code could rebuild; none of it was run.
        CorruptionError: cut, garbage, or not of torch.
        FormatError: no torch is installed that can read it safely.
        NotFoundError, InvalidRecordError: no such file, or none that can be read.
    """
    fd = open_regular(path)
    try:
        zipped = os.pread(fd, 4, 0) == b"PK\x03\x04"
    finally:
        os.close(fd)
    torch = loading_torch(path)
    # The older format has no arrays to map: torch reads it into memory.
    with _safe_numpy(torch), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipped)
        except Exception as error:  # a damaged file makes it raise anything
            raise _explained(path, error) from error


def load_part(path: Path, part: BinaryIO, *, form_only: bool = False) -> Any:
    """What ``torch.save`` wrote into a part of a file. Errors as of ``read_torch``.

    Args:
        form_only: tensors come with memory that holds nothing: only what they are is read.
    """
    torch = loading_torch(path)
    how = torch.serialization.skip_data() if form_only else nullcontext()
    with _safe_numpy(torch), warnings.catch_warnings(), how:
        warnings.simplefilter("ignore")
        try:
            return torch.load(part, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file makes it raise anything
            raise _explained(path, error) from error


def write_torch(path: Path, tree: Any, torch: Any) -> None:
    """``torch.save``. Nothing in the tree needs code to be read again: it came out of a store."""
    torch.save(tree, str(path))


@contextmanager
def _safe_numpy(torch: Any) -> Iterator[None]:
    """NumPy arrays of numbers are data too; Trainer keeps NumPy's random state as one.

    Nothing else: ``dtype`` takes no code, ``_reconstruct`` makes an empty array of a class that the unpickler allows.
    """
    multiarray = getattr(np, "_core", None) or sys.modules["numpy.core"]
    reconstruct = multiarray.multiarray._reconstruct
    dtypes = [type(np.dtype(kind)) for kind in "?bhilqBHILQefdFD"]
    both = [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    with _loading, torch.serialization.safe_globals([*both, np.ndarray, np.dtype, *dict.fromkeys(dtypes)]):
        yield


def _explained(path: Path, error: Exception) -> Exception:
    text = str(error)
    what = ""
    if isinstance(error, pickle.UnpicklingError):
        named = ", ".join(dict.fromkeys(_GLOBAL.findall(text)))
        with path.open("rb") as file:
            plain = file.read(1) == b"\x80" and "Unsupported operand" in text
        what = f"objects of {named}" if named else "a pickle that is not torch's" if plain else ""
    elif "TorchScript" in text:
        what = "a TorchScript program"
    if what:
        return UnsafeFileError(
            f"{path} holds {what}, which only their own code could rebuild: nothing of it was run. Where you trust the "
            "file, load it in your program and save what it holds (`repo.save(epoch, {...})`), or store the file "
            "itself (`ckptstore save URL NAME=FILE`)",
            key=str(path),
        )
    lines = [line for line in text.split("WeightsUnpickler error:")[-1].splitlines() if line.strip()]
    first = lines[0].strip()[:200] if lines else ""
    return CorruptionError(
        f"{path} is damaged or no file of torch.save ({type(error).__name__}: {first}). "
        "It was cut, or is still being written: use another copy, or save the epoch again",
        key=str(path),
    )
