"""Reading what other programs wrote: all of it, nothing executed, nothing trusted, and not into memory."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import (
    CkptStoreError,
    CorruptionError,
    FormatError,
    InvalidRecordError,
    NotFoundError,
    UnsafeFileError,
    formats,
)
from ckptstore.formats import pytorch
from ckptstore.repository import Repository
from tests.formats.conftest import lightning_file, numpy_state, saved, torch_state, trainer_folder
from tests.unit.exact import same

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- what their own libraries wrote


def test_torch_file(repo: Repository, tmp_path: Path) -> None:
    """``torch.save``, of both formats: the state as it was, views and ties included, and it can be saved."""
    torch = pytest.importorskip("torch")
    state = torch_state(torch)
    for zipped in (True, False):
        if not zipped:
            del state["f8"]  # which the older format cannot give back, by torch itself
        path = tmp_path / f"run{zipped}.pt"
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        found = formats.read(path)
        assert found.kind == "torch"
        assert same(found[path.stem], state)
        assert saved(repo, found[path.stem], int(zipped)).keys() == state.keys()
        found.check_unchanged()


def test_safetensors_file(tmp_path: Path) -> None:
    """Every type that the package can write, also 0-d and empty; as tensors, or as NumPy if that wrote it."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    kinds = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2"
    kinds += " uint16 uint32 uint64 float8_e4m3fnuz float8_e5m2fnuz"
    state = {kind: torch.arange(7).to(getattr(torch, kind)) for kind in kinds.split()}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "é/漢\n": torch.ones(1)}
    save_file(state, str(tmp_path / "a b.safetensors"), {"format": "pt", "note": "x"})
    found = formats.read(tmp_path / "a b.safetensors")
    assert found.metadata == {"a_b": {"format": "pt", "note": "x"}}
    assert found["a_b"].keys() == state.keys()
    assert all(same(found["a_b"][name], state[name]) for name in state)
    pytest.importorskip("safetensors.numpy").save_file(
        {"x": np.arange(3)}, str(tmp_path / "n.safetensors"), {"format": "np"}
    )
    assert same(formats.read(tmp_path / "n.safetensors")["n"], {"x": np.arange(3)})


def test_npz_file(tmp_path: Path) -> None:
    """``savez`` and ``savez_compressed``: all types and orders, and what can be changed without changing the file."""
    state = {
        "w": np.random.default_rng(1).random((30, 20)), "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "text": np.array(["a", "bcd"]), "big": np.arange(3, dtype=">i4"), "scalar": np.array(3.5),
        "empty": np.empty((0, 3)), "when": np.array(["2026-01-01"], "M8[D]"), "z": np.ones(2, "c16"),
    }  # fmt: skip
    for save, name in ((np.savez, "plain"), (np.savez_compressed, "packed")):
        save(tmp_path / f"{name}.npz", **state)  # type: ignore[arg-type]
        [tree] = formats.read(tmp_path / f"{name}.npz").values()
        assert same(dict(sorted(tree.items())), dict(sorted(state.items())))
        before = (tmp_path / f"{name}.npz").read_bytes()
        tree["w"] += 1
        assert (tmp_path / f"{name}.npz").read_bytes() == before


def test_trainer_folder(repo: Repository, tmp_path: Path) -> None:
    """Model, optimizer, scheduler and random states are records; the rest is kept byte for byte, never understood."""
    torch = pytest.importorskip("torch")
    for shards in (False, True):
        place = trainer_folder(torch, tmp_path / f"checkpoint-{shards:d}", shards=shards)
        found = formats.read(place)
        assert found.kind == "huggingface"
        assert set(found) == {"model", "optimizer", "scheduler", "rng_state", "files"}
        assert set(found["model"]) == {"embed.weight", "head.bias"}
        assert found["rng_state"]["numpy"][0] == "MT19937"
        kept = {"training_args.bin", "trainer_state.json", "config.json", "sub/empty"}
        assert set(found["files"]["files"]) == kept | ({"model.safetensors.index.json"} if shards else set())
        for name in kept:
            assert found["files"]["files"][name].tobytes() == (place / name).read_bytes()
        repo.save(int(shards), found)
        found.check_unchanged()


def test_lightning_file(repo: Repository, tmp_path: Path) -> None:
    """The parts of a ``.ckpt`` are records of their own, whatever the file is called."""
    torch = pytest.importorskip("torch")
    for name in ("last.ckpt", "last.pt"):
        whole = lightning_file(torch, tmp_path / name)
        found = formats.read(tmp_path / name)
        assert found.kind == "lightning"
        assert same(found["model"], whole["state_dict"])
        assert same(found["optimizer"], whole["optimizer_states"])
        assert same(found["lr_scheduler"], whole["lr_schedulers"])
        assert (found["trainer"]["epoch"], found["trainer"]["global_step"]) == (3, 120)
        repo.save(len(name), found)


def test_sharded_torch_files(tmp_path: Path) -> None:
    """``pytorch_model.bin.index.json``: the arrays of all shards, in the order of the index."""
    torch = pytest.importorskip("torch")
    torch.save({"b": torch.ones(2)}, tmp_path / "one.bin")
    torch.save({"a": torch.zeros(3)}, tmp_path / "two.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "two.bin", "b": "one.bin"}}))
    assert same(formats.read(index)["pytorch_model"], {"a": torch.zeros(3), "b": torch.ones(2)})
    torch.save({"a": torch.zeros(3), "c": torch.zeros(3)}, tmp_path / "two.bin")
    with pytest.raises(CorruptionError, match=r"two\.bin.*\(c\)"):
        formats.read(index)
    os.remove(tmp_path / "two.bin")
    with pytest.raises(NotFoundError, match=r"two\.bin"):
        formats.read(index)
    for names in ({"a": "../two.bin"}, {"a": 7}, {}, ["a"]):
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(CorruptionError, match="index"):
            formats.read(index)


def test_detect(repo: Repository, tmp_path: Path) -> None:
    """By name, and by the first bytes where the name says nothing."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors.torch").save_file({"a": torch.ones(1)}, str(tmp_path / "s"))
    torch.save({"a": 1}, tmp_path / "t")
    torch.save({"a": 1}, tmp_path / "old", _use_new_zipfile_serialization=False)
    np.savez(tmp_path / "z.npz", a=np.ones(2))
    os.rename(tmp_path / "z.npz", tmp_path / "z")
    repo.save(1, {"r": [1]})
    repo.export(1, tmp_path / "e", "files")
    folder = trainer_folder(torch, tmp_path / "checkpoint-1", shards=False)
    known = {"s": "safetensors", "t": "torch", "old": "torch", "z": "npz", "e/r": "files", folder.name: "huggingface"}
    assert {name: formats.detect(tmp_path / name) for name in known} == known
    assert {name: formats.read(tmp_path / name).kind for name in known} == known
    (tmp_path / "text").write_text("hello")
    for name in ("text", "e"):
        with pytest.raises(FormatError, match="no checkpoint that is known"):
            formats.detect(tmp_path / name)
    with pytest.raises(NotFoundError, match="does not exist"):
        formats.detect(tmp_path / "nothing.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(InvalidRecordError, match="not a regular file"):
        formats.detect(tmp_path / "pipe.pt")


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    """``check_unchanged`` refuses what was rewritten, replaced or deleted after it was read."""
    for change in (lambda p: os.utime(p, ns=(1, 1)), os.remove, lambda p: p.write_bytes(p.read_bytes())):
        np.savez(tmp_path / "a.npz", a=np.ones(2))
        found = formats.read(tmp_path / "a.npz")
        found.check_unchanged()
        change(tmp_path / "a.npz")
        with pytest.raises(InvalidRecordError, match="changed or vanished"):
            found.check_unchanged()


# ---------------------------------------------------------------- nothing is executed


class Bomb:
    """Leaves a mark if anybody unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def hostile(torch: Any, path: Path, mark: Path) -> dict[str, Callable[[], object]]:
    """Ways to write a file that does something when it is unpickled."""
    bomb = Bomb(mark)
    objects = np.array([bomb], object)
    return {
        "torch": lambda: torch.save({"w": torch.ones(2), "x": bomb}, path),
        "torch, older": lambda: torch.save([bomb], path, _use_new_zipfile_serialization=False),
        "pickle 2": lambda: path.write_bytes(pickle.dumps(bomb, 2)),
        "pickle 5": lambda: path.write_bytes(pickle.dumps({"model": bomb}, 5)),
        "lightning": lambda: torch.save({"state_dict": {}, "pytorch-lightning_version": "2", "hyper": bomb}, path),
        "numpy objects": lambda: torch.save(objects, path),
    }


@pytest.mark.parametrize("way", ["torch", "torch, older", "pickle 2", "pickle 5", "lightning", "numpy objects"])
def test_nothing_is_run(tmp_path: Path, way: str) -> None:
    """P8: a hostile pickle is an error that names the file and what is in it, and was not run."""
    torch = pytest.importorskip("torch")
    path, mark = tmp_path / "evil.ckpt", tmp_path / "mark"
    hostile(torch, path, mark)[way]()
    with pytest.raises(UnsafeFileError, match=r"evil\.ckpt holds .*nothing of it was run.*ckptstore save") as caught:
        formats.read(path)
    assert caught.value.key == str(path)
    assert not mark.exists()
    # The bomb is one: so it would have been noticed.
    torch.load(path, weights_only=False) if "pickle" not in way else pickle.loads(path.read_bytes())
    assert mark.exists()


def test_a_hostile_optimizer_stays_a_file(repo: Repository, tmp_path: Path) -> None:
    """In a Trainer's folder what nobody can read safely is kept byte for byte, and not run."""
    torch = pytest.importorskip("torch")
    place = trainer_folder(torch, tmp_path / "checkpoint-1", shards=False)
    torch.save(Bomb(tmp_path / "mark"), place / "optimizer.pt")
    found = formats.read(place)
    repo.save(1, found)
    assert "optimizer" not in found
    repo.export(1, tmp_path / "out", "files")
    assert (tmp_path / "out" / "optimizer.pt").read_bytes() == (place / "optimizer.pt").read_bytes()
    assert not (tmp_path / "mark").exists()


def test_npz_with_objects_is_refused(tmp_path: Path) -> None:
    """Arrays of Python objects need a pickle: refused, not run."""
    np.savez(tmp_path / "evil.npz", allow_pickle=True, a=np.array([Bomb(tmp_path / "mark")], object))
    with pytest.raises(UnsafeFileError, match=r"evil\.npz.*nothing of it was run"):
        formats.read(tmp_path / "evil.npz")
    assert not (tmp_path / "mark").exists()


def test_a_program_is_refused(tmp_path: Path) -> None:
    """A module saved whole holds code of its own; the error names its class."""
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(UnsafeFileError, match=r"torch\.nn\.modules\.linear\.Linear"):
        formats.read(tmp_path / "module.pt")


@pytest.mark.parametrize("version", ["2.4.1", "2.5.1+cu121", "2.9.1"])
def test_a_torch_that_can_be_tricked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Before 2.10 ``weights_only`` could be made to run code: such a torch reads nothing here."""
    torch = pytest.importorskip("torch")
    torch.save({"a": 1}, tmp_path / "a.pt")
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(FormatError, match=r"a\.pt was not read.*Upgrade torch to 2\.10"):
        formats.read(tmp_path / "a.pt")


def test_without_torch(repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is not installed its files say what to install; safetensors come as NumPy, narrow floats too."""
    torch = pytest.importorskip("torch")
    saved(repo, {"b": torch.ones(3).bfloat16()})
    repo.export(1, tmp_path / "out")
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04")
    monkeypatch.setattr(pytorch, "installed_torch", lambda: None)
    with pytest.raises(FormatError, match=r"pip install 'ckptstore\[torch\]'"):
        formats.read(tmp_path / "a.pt")
    [tree] = formats.read(tmp_path / "out" / "model.safetensors").values()
    assert str(tree["b"].dtype) == "bfloat16"


# ---------------------------------------------------------------- nothing is trusted


def safetensors_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


BAD_SAFETENSORS = {
    "empty": b"",
    "short": b"\0" * 7,
    "no header": safetensors_bytes(b""),
    "huge header": safetensors_bytes({}, length=2**63),
    "header of 4 GiB": safetensors_bytes({}, length=2**32),
    "no JSON": safetensors_bytes(b"{'a'}"),
    "no UTF-8": safetensors_bytes(b'{"\xff": 1}'),
    "list": safetensors_bytes([]),
    "deep": safetensors_bytes(b"[" * 100_000 + b"]" * 100_000),
    "twice": safetensors_bytes(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'),
    "metadata": safetensors_bytes({"__metadata__": {"a": 1}}),
    "no entry": safetensors_bytes({"a": 7}),
    "more keys": safetensors_bytes({"a": entry(more=1)}, bytes(8)),
    "cut": safetensors_bytes({"a": entry()}, bytes(7)),
    "longer": safetensors_bytes({"a": entry()}, bytes(9)),
    "lying size": safetensors_bytes({"a": entry(shape=[3])}, bytes(8)),
    "huge shape": safetensors_bytes({"a": entry(shape=[2**62, 2**62])}, bytes(8)),
    "negative": safetensors_bytes({"a": entry(shape=[-2])}, bytes(8)),
    "bool": safetensors_bytes({"a": entry(shape=[True, 2])}, bytes(8)),
    "backwards": safetensors_bytes({"a": entry(offsets=[8, 0])}, bytes(8)),
    "outside": safetensors_bytes({"a": entry(offsets=[2**40, 2**40 + 8])}, bytes(8)),
    "gap": safetensors_bytes({"a": entry(offsets=[1, 9])}, bytes(9)),
    "overlap": safetensors_bytes({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
    "many dimensions": safetensors_bytes({"a": entry("U8", [1] * 65, [0, 1])}, bytes(1)),
}


@pytest.mark.parametrize("what", BAD_SAFETENSORS)
def test_bad_safetensors(tmp_path: Path, what: str) -> None:
    """Each lie is found before anything is read: an error that names the file, in little memory."""
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD_SAFETENSORS[what])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match=rf"^{re.escape(str(path))} is damaged: .*use another copy"):
            formats.read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


def test_types_that_cannot_be_held(tmp_path: Path) -> None:
    """Elements of four bits and of types to come are no damage: the error says what to do with such a file."""
    for dtype in ("F4", "F6_E2M3", "X9"):
        (tmp_path / "new.safetensors").write_bytes(safetensors_bytes({"a": entry(dtype)}, bytes(8)))
        with pytest.raises(FormatError, match=rf"'{dtype}'.*ckptstore save"):
            formats.read(tmp_path / "new.safetensors")


NPY = b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }"
BAD_NPZ: dict[str, Callable[[zipfile.ZipFile], object]] = {
    "other member": lambda z: z.writestr("a.txt", b"x"),
    "no header": lambda z: z.writestr("a.npy", b""),
    "garbage": lambda z: z.writestr("a.npy", b"x" * 300),
    "lying shape": lambda z: z.writestr("a.npy", (NPY % b"2**60,").ljust(79) + b"\n" + bytes(8)),
    "huge shape": lambda z: z.writestr("a.npy", (NPY % b"9999999999999,").ljust(79) + b"\n" + bytes(8)),
    "negative": lambda z: z.writestr("a.npy", (NPY % b"-2,").ljust(79) + b"\n" + bytes(8)),
    "code": lambda z: z.writestr("a.npy", (NPY % b"exit(3),").ljust(79) + b"\n" + bytes(8)),
    "version": lambda z: z.writestr(
        "a.npy", (NPY % b"2,").ljust(79).replace(b"\x01\x00", b"\x09\x00", 1) + b"\n" + bytes(8)
    ),
}


@pytest.mark.parametrize("what", BAD_NPZ)
@pytest.mark.parametrize("packed", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_bad_npz(tmp_path: Path, what: str, packed: int) -> None:
    """Members that are no arrays, or not of the size that they say."""
    path = tmp_path / "bad.npz"
    with zipfile.ZipFile(path, "w", packed) as archive:
        BAD_NPZ[what](archive)
    with pytest.raises(CorruptionError, match=r"bad\.npz is damaged"):
        formats.read(path)


def _originals(folder: Path) -> dict[str, bytes]:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch.save(torch_state(torch), folder / "a.pt")
    torch.save({"w": torch.ones(3, 4), "n": [1, None]}, folder / "b.pt", _use_new_zipfile_serialization=False)
    save_file({"a": torch.ones(5, 3), "b": torch.ones(4).bfloat16()}, str(folder / "c.safetensors"), {"format": "pt"})
    np.savez(folder / "d.npz", a=np.ones((3, 4)), b=np.arange(5))
    np.savez_compressed(folder / "e.npz", a=np.ones((3, 4)), b=np.arange(5))
    with ckptstore.open(f"memory://fuzz-{random.random()}") as repo:
        saved(repo, numpy_state())
        for form in ("safetensors", "npz", "files"):
            repo.export(1, folder / form, form)
    names = ["a.pt", "b.pt", "c.safetensors", "d.npz", "e.npz"]
    names += ["safetensors/model.safetensors", "npz/model.npz", "files/model/skeleton.json", "files/model/bf16.npy"]
    return {name: (folder / name).read_bytes() for name in names}


def touch(value: Any) -> None:
    """Look at every element."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            touch(item)
    elif isinstance(value, np.ndarray):
        value.copy()
    elif hasattr(value, "untyped_storage"):
        value.clone()


HOW = ["flip", "set", "cut", "end", "insert", "lie"]
MUTATION = st.tuples(
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(HOW),
    st.binary(min_size=1, max_size=8),
)


def mutate(data: bytes, where: float, head: bool, how: str, what: bytes) -> bytes:
    """One change, half of them near the beginning."""
    at = int(where * (min(len(data), 3000) if head else len(data) - 1))
    new = bytearray(data)
    if how == "flip":
        new[at : at + 1] = bytes([new[min(at, len(new) - 1)] ^ (1 << what[0] % 8)])
    elif how == "set":
        new[at : at + len(what)] = what
    elif how == "cut":
        del new[at : at + what[0]]
    elif how == "end":
        del new[at:]
    elif how == "insert":
        new[at:at] = what
    else:
        new[at : at + 8] = [b"\xff" * 8, b"\xff" * 7 + b"\x7f", bytes(8), b"99999999"][what[0] % 4]
    return bytes(new)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(which=st.integers(0, 8), mutations=st.lists(MUTATION, min_size=1, max_size=3))
def test_fuzz(
    tmp_path_factory: pytest.TempPathFactory, which: int, mutations: list[tuple[float, bool, str, bytes]]
) -> None:
    """Any damage of any file ends with a tree that can be used, or with an error of ours that names the file."""
    if not FUZZ:
        folder = tmp_path_factory.mktemp("fuzz")
        FUZZ.update({"folder": folder, "files": _originals(folder)})
    folder, files = FUZZ["folder"], FUZZ["files"]
    name = list(files)[which]
    data = files[name]
    for mutation in mutations:
        data = mutate(data or b"\0", *mutation)
    (folder / name).write_bytes(data)
    target = folder / name if "files/" not in name else folder / "files" / "model"
    message = str(target)
    try:
        touch(dict(formats.read(target)))
    except CkptStoreError as error:
        message = str(error)
    finally:
        (folder / name).write_bytes(files[name])
    assert str(target) in message


FUZZ: dict[str, Any] = {}


@given(st.integers(0, 2**32))
def test_what_we_take_the_package_takes(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """A mutated file that is read here is read by the safetensors package too, with the same arrays."""
    load = pytest.importorskip("safetensors.numpy").load
    rng = random.Random(seed)
    header = {"a": entry("F32", [2, 1], [0, 8]), "b": entry("U8", [3], [8, 11]), "__metadata__": {"format": "np"}}
    text = bytearray(json.dumps(header).encode())
    for _ in range(rng.choice([0, 1, 1, 2])):
        at = rng.randrange(len(text))
        text[at : at + rng.choice([0, 1])] = rng.choice([b"0", b"1", b"8", b"-", b" ", b'"', b"]", b","])
    data = safetensors_bytes(bytes(text), bytes(range(11)))
    path = tmp_path_factory.getbasetemp() / "differential.safetensors"
    path.write_bytes(data)
    try:
        [found] = formats.read(path).values()
    except CkptStoreError:
        return
    ours = {name: np.asarray(array).tobytes() for name, array in found.items()}
    assert ours == {name: array.tobytes() for name, array in load(data).items()}


# ---------------------------------------------------------------- not into memory

_PEAK = """
import re, sys, threading, ckptstore
from ckptstore import formats
def anonymous(): return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
done, peaks = threading.Event(), []
def watch():
    while not done.wait(0.005): peaks.append(anonymous())
with ckptstore.open(sys.argv[2], codec="raw") as repo:
    if sys.argv[1].endswith(".pt"): import torch
    formats.read(sys.argv[3])
    before = anonymous()
    thread = threading.Thread(target=watch); thread.start()
    repo.save(1, formats.read(sys.argv[1]))
    done.set(); thread.join()
    print(max(peaks) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/status is Linux's")
def test_memory_is_bounded(tmp_path: Path) -> None:
    """P6: files of 300 MB go into a repository through a window; pages of the file can be dropped at any time."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    data = {f"w{n}": torch.full((100, 2**20), n, dtype=torch.uint8) for n in range(3)}
    torch.save({"a": torch.ones(2)}, tmp_path / "small.pt")
    writers: dict[str, Callable[[Path], object]] = {
        "x.pt": lambda path: torch.save(data, path),
        "x.safetensors": lambda path: save_file(data, str(path)),
        "x.npz": lambda path: np.savez(path, **{name: one.numpy() for name, one in data.items()}),
    }
    for name, write in writers.items():
        write(tmp_path / name)
        words = [
            sys.executable,
            "-c",
            _PEAK,
            str(tmp_path / name),
            str(tmp_path / f"repo{name}"),
            str(tmp_path / "small.pt"),
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        peak = int(subprocess.run(words, capture_output=True, check=True, env=env, text=True).stdout)
        assert peak < 200, name
        os.remove(tmp_path / name)
