"""Folders of torch's DCP: read without unpickling anything, imported, and loadable afterwards."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import CkptStoreError, CorruptionError, InvalidRecordError, UnsafeFileError, formats
from ckptstore.cli import main
from ckptstore.formats.dcp import files_of

pytest.importorskip("torch.distributed.checkpoint", reason="needs torch")

torch: Any = importlib.import_module("torch")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")

STATE: dict[str, Any] = {
    "model": {
        "w": torch.arange(12.0).reshape(3, 4).t(),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "part": torch.arange(100)[10:20],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
    },
    "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 2}], "state": {"0": {"step": 1}}},
    "rng": [torch.ones(2), (np.arange(3), torch.zeros(1))],
    "epoch": 3,
}


def write(folder: Path, state: Any = STATE) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def check(found: Any) -> None:
    assert sorted(found) == ["model", "optimizer", "rng", "state_dict"]
    assert found["state_dict"] == {"epoch": 3}
    assert found["optimizer"] == STATE["optimizer"]
    for name, tensor in STATE["model"].items():
        assert found["model"][name].dtype == tensor.dtype
        assert torch.equal(found["model"][name], tensor), name
    assert torch.equal(found["rng"][0], STATE["rng"][0])
    assert np.array_equal(found["rng"][1][0], STATE["rng"][1][0])


def test_a_folder_is_read_as_it_was_saved(tmp_path: Path) -> None:
    """P7: dicts, lists, types, strides; and saved it is the same."""
    found = formats.read(write(tmp_path / "step-3"))
    assert found.kind == "dcp"
    check(dict(found))
    with ckptstore.open(tmp_path / "run") as repo:
        repo.save(3, dict(found))
        found.check_unchanged()
        check(repo.checkpoint(3).load())


def test_import_takes_all_epochs(tmp_path: Path) -> None:
    """By the command: the folder of all, one alone under a number, and the files themselves, which come back."""
    for step in (5, 10):
        write(tmp_path / "out" / f"step-{step}", {**STATE, "epoch": 3})
    shutil.copytree(tmp_path / "out" / "step-5", tmp_path / "out" / "step-15")
    (tmp_path / "out" / "step-15" / ".metadata").unlink()  # was killed before it was through
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "run"), "--as", "arrays"]) == 1
    repo = ckptstore.open(tmp_path / "run")
    assert repo.epochs() == [5, 10]
    check(repo.checkpoint(10).load())
    one = str(tmp_path / "out" / "step-5")
    assert main(["import", one, str(tmp_path / "run"), "--as", "arrays", "--epoch", "7"]) == 0
    check(ckptstore.open(tmp_path / "run").checkpoint(7).load())
    assert main(["import", one, str(tmp_path / "files")]) == 0
    assert main(["restore", str(tmp_path / "files"), "--to", str(tmp_path / "back")]) == 0
    back = next((tmp_path / "back").rglob(".metadata"))
    assert back.read_bytes() == (tmp_path / "out" / "step-5" / ".metadata").read_bytes()
    check(dict(formats.read(back.parent)))


# ---- what is not good ---------------------------------------------------------------------------------------------


class Attack:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


ATTACKS: dict[str, Callable[[Path], bytes]] = {
    "instead of the metadata": lambda mark: pickle.dumps(Attack(mark)),
    "in an old protocol": lambda mark: pickle.dumps({"x": Attack(mark)}, protocol=0),
    "by the name of a method": lambda mark: b"\x80\x04cbuiltins\nexec\n(X\x05\x00\x00\x00raisetR.",
    "by a class of torch": lambda mark: b"\x80\x04ctorch.hub\nload\n)R.",
    "with an extension": lambda mark: b"\x80\x04\x82\x01.",
    "with an object from elsewhere": lambda mark: b"\x80\x04X\x01\x00\x00\x00xQ.",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_code_is_run(tmp_path: Path, attack: str) -> None:
    """P8: refused by name, and nothing happens."""
    folder, mark = write(tmp_path / "step-3"), tmp_path / "mark"
    (folder / ".metadata").write_bytes(ATTACKS[attack](mark))
    for read in (formats.read, files_of):
        with pytest.raises(UnsafeFileError, match="nothing of it was run"):
            read(folder)
    found = ckptstore.import_files(tmp_path / "step-3", ckptstore.open(tmp_path / "run"), arrays=True)
    assert [one.kind for one in found] == ["refused"]
    assert not mark.exists()


def test_no_code_is_run_of_a_value(tmp_path: Path) -> None:
    """P8: values lie in the other files, each a pickle in the format of torch."""
    mark = tmp_path / "mark"
    folder = write(tmp_path / "step-3", {"x": Attack(mark), "w": torch.ones(3)})
    with pytest.raises(UnsafeFileError):
        formats.read(folder)
    assert not mark.exists()


def test_what_is_cut_or_garbled_is_told(tmp_path: Path) -> None:
    """P3: an error of ours, or what was saved; nothing else, and no endless work."""
    folder = write(tmp_path / "step-3")
    (data,) = folder.glob("*.distcp")
    whole = {path: path.read_bytes() for path in (folder / ".metadata", data)}
    data.write_bytes(whole[data][:-100])
    with pytest.raises(CorruptionError):
        formats.read(folder)
    found = ckptstore.import_files(folder, ckptstore.open(tmp_path / "run"), dry_run=True)
    assert [(one.kind, "is not whole" in one.reason) for one in found] == [("torn", True)]
    data.write_bytes(whole[data])
    dice = random.Random(5)
    for number in range(300):
        garbled = bytearray(whole[folder / ".metadata"])
        if number % 2:
            del garbled[dice.randrange(len(garbled)) :]
        for _ in range(dice.randrange(1, 4)):
            if garbled:
                garbled[dice.randrange(len(garbled))] = dice.randrange(256)
        (folder / ".metadata").write_bytes(garbled)
        with contextlib.suppress(CkptStoreError):
            formats.read(folder)
    (folder / ".metadata").write_bytes(b"\x80\x05]" + b"\x94r\xff\xff\xff\x7f" * 3 + b".")
    with pytest.raises(CorruptionError):
        formats.read(folder)


BOMB = b"\x80\x04)\x94" + b"".join(b"h" + bytes([n, 104, n]) + b"\x86\x94" for n in range(40)) + b"h\x28"
"""Tuples of one tuple twice, 40 levels: little memory, and a text of 2^40 characters."""


@pytest.mark.parametrize("what", ["a name", "a size"])
def test_a_text_without_end_is_not_made(tmp_path: Path, what: str) -> None:
    """P6: what is garbled may be small and have a text that no machine can hold."""
    folder = write(tmp_path / "step-3")
    asks = {"a name": b"h\x28\x93.", "a size": b"ctorch\nSize\nh\x28\x85\x81."}
    (folder / ".metadata").write_bytes(BOMB + asks[what])
    with pytest.raises(CorruptionError):
        formats.read(folder)


def edited(folder: Path, paths: dict[str, tuple[str | int, ...]]) -> Path:
    """With other paths in its metadata."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data.update(paths)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_lists_that_are_nearly_empty(tmp_path: Path) -> None:
    """P6: a few bytes cannot ask for lists of any length."""
    paths: dict[str, tuple[str | int, ...]] = {f"model.{name}": ("model", name, 999_999) for name in STATE["model"]}
    with pytest.raises(CorruptionError, match="more items than there can be"):
        formats.read(edited(write(tmp_path / "step-3"), paths))


@pytest.mark.parametrize(
    "path", [("model", "b"), ("model", "b", "x"), ("model", 1), ("optimizer",), ("rng", "x"), ("rng", 0, 0)]
)
def test_two_things_at_one_place(tmp_path: Path, path: tuple[str | int, ...]) -> None:
    """P7: neither is left out. One at the top of its name is in another record."""
    folder = edited(write(tmp_path / "step-3"), {"model.w": path})
    if len(path) == 1:
        assert torch.equal(formats.read(folder)["state_dict"]["optimizer"], STATE["model"]["w"])
        return
    with pytest.raises(InvalidRecordError, match="two things are there"):
        formats.read(folder)
