"""Export: what was saved comes back bit for bit, other programs read it, and nothing half done has a name."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import formats
from ckptstore.export import Format
from ckptstore.formats.npz import NpzPlan
from ckptstore.formats.structure import array_names
from ckptstore.repository import Repository
from tests.formats.conftest import lightning_file, numpy_state, saved, torch_state, trainer_folder
from tests.unit.exact import same
from tests.unit.test_tree import ATOMS, containers

ALL: tuple[Format, ...] = ("safetensors", "npz", "files")
SUFFIX = {"safetensors": ".safetensors", "npz": ".npz", "files": ""}
ROOT = Path(__file__).parents[2]


def back(place: Path, form: Format, name: str = "model") -> Any:
    """A record of an export, read again."""
    [tree] = formats.read(place / f"{name}{SUFFIX[form]}").values()
    return tree


@pytest.mark.parametrize("form", ALL)
def test_every_kind_of_value_comes_back(repo: Repository, tmp_path: Path, form: Format) -> None:
    """P7: arrays of all kinds, ties, plain values, keys and nesting are the same after export and read."""
    state = saved(repo, numpy_state())
    report = repo.export(1, tmp_path / "out", form)
    found = back(tmp_path / "out", form)
    assert same(found, state)
    assert found["enc"]["w"] is found["enc"]["tied"]
    assert [one.path.name for one in report.files] == [f"model{SUFFIX[form]}"]
    assert sum(one.nbytes for one in report.files) == repo.checkpoint(1).bytes_state
    odd = {"safetensors": {"odd.0", "odd.1", "odd.2", "odd.3"}, "npz": {"bf16", "f8"}, "files": {"bf16", "f8"}}
    assert {name.removeprefix("model: ") for name in report.foreign_types} == odd[form]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".ckptstore")]


@pytest.mark.parametrize("form", ALL)
def test_every_kind_of_tensor_comes_back(repo: Repository, tmp_path: Path, form: Format) -> None:
    """Tensors are tensors again, tied ones the same tensor, module states with their own metadata."""
    torch = pytest.importorskip("torch")
    state = saved(repo, torch_state(torch))
    repo.export(1, tmp_path / "out", form)
    found = back(tmp_path / "out", form)
    assert same(found, state)
    assert found["tied"][0] is found["tied"][1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.recursive(ATOMS, containers, max_leaves=12), form=st.sampled_from(ALL))
def test_any_tree_comes_back(tmp_path: Path, state: object, form: Format) -> None:
    """Export, then read: any nesting of what can be stored has the same types, bits and order."""
    place = tmp_path / "out"
    shutil.rmtree(place, ignore_errors=True)
    with ckptstore.open(f"memory://{tmp_path.name}-{next(COUNT)}") as repo:
        kept = saved(repo, state)
        repo.export(1, place, form)
    assert same(back(place, form), kept)


COUNT = itertools.count()


@given(st.lists(st.text(max_size=6) | st.sampled_from(["a", "A", "a#2", "a.npy", "../a", "con", ""]), unique=True))
def test_names_are_unique(keys: list[str]) -> None:
    """Whatever the keys are, two arrays never have one name, also where case does not count."""
    skeleton = {"dict": [[key, {"array": number}] for number, key in enumerate(keys)]}
    names = array_names(skeleton, len(keys), fold=True, reserved=["b"])
    assert len({name.casefold() for name in names} - {"b"}) == len(keys)


def test_numpy_reads_npz(repo: Repository, tmp_path: Path) -> None:
    """Plain NumPy, without pickle, finds each array under its path; narrow floats as integers of their width."""
    state = numpy_state()
    saved(repo, state)
    repo.export(1, tmp_path / "out", "npz")
    with np.load(tmp_path / "out" / "model.npz", allow_pickle=False) as found:
        assert same(found["enc.w"], state["enc"]["w"])
        assert same(found["enc.step"], state["enc"]["step"])
        assert same(found["enc.t"], np.ascontiguousarray(state["enc"]["t"]))
        assert same(found["bf16"].view(ml_dtypes.bfloat16), state["bf16"])
        assert same(found["odd.1"], state["odd"][1])
        assert found["bytes"].tobytes() == state["bytes"]
        assert all(name in found.files and found[name] is not None for name in list(found))
    with zipfile.ZipFile(tmp_path / "out" / "model.npz") as archive:
        assert archive.testzip() is None
        assert not [name for name in archive.namelist() if name.startswith("/") or ".." in name.split("/")]


def test_npz_beyond_four_gib(tmp_path: Path) -> None:
    """Places and sizes above 2**32 are written so that ZIP readers find what lies behind them."""
    plan = NpzPlan([("big", np.dtype(np.uint8), (5 * 2**30,)), ("small", np.dtype("<i4"), (3,))])
    data = np.arange(3, dtype="<i4").tobytes()
    checksums = [0, zlib.crc32(plan.heads[1][1] + data)]
    with (tmp_path / "big.npz").open("wb") as file:
        for at, part in [*plan.heads, (plan.starts[1], data), *plan.finish(checksums)]:
            file.seek(at)
            file.write(part)
    with np.load(tmp_path / "big.npz") as found:
        assert found["small"].tolist() == [0, 1, 2]
    with zipfile.ZipFile(tmp_path / "big.npz") as archive:
        assert archive.getinfo("big.npy").file_size == 5 * 2**30 + 128


def test_others_read_safetensors(repo: Repository, tmp_path: Path) -> None:
    """The package of that name reads the file, and finds the format that Transformers asks for."""
    torch = pytest.importorskip("torch")
    reader = pytest.importorskip("safetensors.torch")
    opened = pytest.importorskip("safetensors").safe_open
    state = {"w": torch.randn(30, 20), "b": torch.randn(5).bfloat16(), "f": torch.randn(3).to(torch.float8_e5m2)}
    saved(repo, state)
    repo.export(1, tmp_path / "out")
    found = reader.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(same(found[name], state[name]) for name in state)
    with opened(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.metadata()["format"] == "pt"


def test_trainer_folder_comes_back(repo: Repository, tmp_path: Path) -> None:
    """Every file of a ``checkpoint-N`` folder lies where Trainer expects it, also shards; opaque ones byte for byte."""
    torch = pytest.importorskip("torch")
    for epoch, shards in ((1, False), (2, True)):
        source = trainer_folder(torch, tmp_path / f"checkpoint-{epoch}", shards=shards)
        first = formats.read(source)
        repo.save(epoch, first)
        target = tmp_path / "back" / source.name
        repo.export(epoch, target, "files")
        listed = [sorted(str(f.relative_to(top)) for f in top.rglob("*") if f.is_file()) for top in (source, target)]
        assert listed[0] == listed[1]
        for name in ("training_args.bin", "trainer_state.json", "config.json"):
            assert (source / name).read_bytes() == (target / name).read_bytes()
        assert same(dict(formats.read(target)), dict(first))
        assert torch.load(target / "optimizer.pt", weights_only=True)["param_groups"] == [{"lr": 1e-3, "params": [0]}]
        load = pytest.importorskip("safetensors.torch").load_file
        for file in source.glob("*.safetensors"):
            assert same(load(file), load(target / file.name))
    repo.export(2, tmp_path / "model alone", "files", ["model"])
    assert sorted(os.listdir(tmp_path / "model alone")) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


def test_lightning_file_comes_back(repo: Repository, tmp_path: Path) -> None:
    """The four records of a ``.ckpt`` become one again, with its keys in their order."""
    torch = pytest.importorskip("torch")
    whole = lightning_file(torch, tmp_path / "epoch=3.ckpt")
    repo.save(3, formats.read(tmp_path / "epoch=3.ckpt"))
    repo.export(3, tmp_path / "out", "files")
    found = torch.load(tmp_path / "out" / "epoch=3.ckpt", weights_only=True)
    assert same(found, whole)
    with pytest.raises(ckptstore.InvalidArgumentError, match="needs model"):
        repo.export(3, tmp_path / "part", "files", ["trainer", "optimizer"])
    repo.export(3, tmp_path / "model", "files", ["model"])
    assert back(tmp_path / "model", "files").keys() == {"net.weight"}


def test_files_come_back_under_their_names(repo: Repository, tmp_path: Path) -> None:
    """``files`` gives file records back as they were; the other formats refuse them and say what to do."""
    (tmp_path / "model-7.mpk").write_bytes(b"burn" * 50_000)
    with repo.begin(7) as txn:
        txn.write_file("model", tmp_path / "model-7.mpk")
        txn.write("extra", {"w": np.arange(3)})
    for form in ("safetensors", "npz"):
        with pytest.raises(ckptstore.InvalidArgumentError, match=r'model of epoch 7 is a file .* format="files"'):
            repo.export(7, tmp_path / "out", form)
    repo.export(7, tmp_path / "out", "files")
    assert (tmp_path / "out" / "model-7.mpk").read_bytes() == b"burn" * 50_000
    assert same(back(tmp_path / "out", "files", "extra"), {"w": np.arange(3)})
    repo.export(7, tmp_path / "rest", "npz", ["extra"])
    assert os.listdir(tmp_path / "rest") == ["extra.npz"]


# ---------------------------------------------------------------- what is refused, what breaks


@pytest.mark.parametrize("form", ALL)
def test_nothing_is_overwritten_unless_forced(repo: Repository, tmp_path: Path, form: Format) -> None:
    """What is there stays; ``force`` replaces an earlier export, but no folder that is none."""
    for epoch in (1, 2):
        repo.save(epoch, {"model": {"w": np.full(3, epoch)}, "a/b": np.arange(epoch)})
    repo.export(1, tmp_path / "out", form)
    with pytest.raises(ckptstore.AlreadyExistsError, match="exists"):
        repo.export(2, tmp_path / "out", form)
    assert back(tmp_path / "out", form)["w"].tolist() == [1, 1, 1]
    repo.export(2, tmp_path / "out", form, force=True)
    assert back(tmp_path / "out", form)["w"].tolist() == [2, 2, 2]
    place = tmp_path / "mine" / f"model{SUFFIX[form]}"
    place.mkdir(parents=True)
    (place / "precious").touch()
    with pytest.raises(ckptstore.AlreadyExistsError):
        repo.export(2, tmp_path / "mine", form, force=True)
    assert (place / "precious").exists()
    assert os.listdir(tmp_path / "mine") == [place.name]


def test_bad_arguments(repo: Repository, tmp_path: Path) -> None:
    """Each is refused by name, and nothing is written."""
    repo.save(1, {"model": np.arange(3), "MODEL": np.arange(3), "m": np.arange(2)})
    bad: Any
    for bad in ("pickle", "", None, 7):
        with pytest.raises(ckptstore.InvalidArgumentError, match="format must be"):
            repo.export(1, tmp_path / "out", bad)
    with pytest.raises(ckptstore.RecordNotFoundError, match="no record 'x'"):
        repo.export(1, tmp_path / "out", records=["x"])
    with pytest.raises(ckptstore.InvalidArgumentError, match="at least one"):
        repo.export(1, tmp_path / "out", records=[])
    with pytest.raises(ckptstore.InvalidArgumentError, match="two records"):
        repo.export(1, tmp_path / "out")
    with pytest.raises(ckptstore.EpochNotFoundError):
        repo.export(2, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ckptstore.InvalidArgumentError, match="no folder"):
        repo.export(1, tmp_path / "file", records=["m"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("new", [True, False])
def test_damage_leaves_nothing(repo: Repository, tmp_path: Path, form: Format, new: bool) -> None:
    """P3: a wrong byte on the store is an error that names the object and the epoch; no file appears."""
    repo.save(1, {"model": {"w": np.random.default_rng(1).random(50_000)}})
    chunk = max((tmp_path / "repo").glob("attempts/*/chunks/*"), key=lambda path: path.stat().st_size)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.chmod(0o600)
    chunk.write_bytes(data)
    if not new:
        (tmp_path / "out").mkdir()
    with pytest.raises(ckptstore.CorruptionError) as caught:
        repo.export(1, tmp_path / "out", form)
    assert caught.value.key is not None
    assert caught.value.epoch == 1
    assert (tmp_path / "out").exists() is not new
    assert sorted(os.listdir(tmp_path)) == (["repo"] if new else ["out", "repo"])
    assert new or os.listdir(tmp_path / "out") == []


def test_a_place_that_cannot_be_written(repo: Repository) -> None:
    """A typed error that names the place, and no traceback of the system's."""
    repo.save(1, {"model": np.arange(3)})
    with pytest.raises(ckptstore.AccessError, match="/proc/out could not be written"):
        repo.export(1, "/proc/out")


_EXPORT = """
import itertools, sys, ckptstore
with ckptstore.open(sys.argv[1], create=False) as repo:
    print("ready", flush=True)
    for number in itertools.count():
        repo.export(1, f"{sys.argv[2]}/{number}", sys.argv[3])
"""


@pytest.mark.kill
@pytest.mark.parametrize("form", ALL)
def test_killed_at_any_moment(repo: Repository, tmp_path: Path, form: Format) -> None:
    """SIGKILL at random, while one export follows the other: whatever has its name is whole, and none is in the way."""
    rng = np.random.default_rng(3)
    state = saved(repo, {f"layer{n}": rng.integers(0, 9, (300, 300)) for n in range(12)})
    for round_ in range(2):
        place = tmp_path / f"out{round_}"
        words = [sys.executable, "-c", _EXPORT, str(tmp_path / "repo"), str(place), form]
        with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(random.uniform(0.05, 0.5))
            child.send_signal(signal.SIGKILL)
        found = [one for one in place.glob("*") if not one.name.startswith(".ckptstore-")]
        assert all(same(back(one, form), state) for one in found)
        repo.export(1, place / str(len(found)), form)


MALFORMED: dict[str, dict[str, Any]] = {
    "no metadata": {"kind": "safetensors", "file": "m"},
    "metadata that is none": {"kind": "safetensors", "file": "m", "metadata": 5},
    "no metadata of shards": {"kind": "safetensors-sharded", "weight_map": {"w": "s"}},
    "metadata of shards that is none": {"kind": "safetensors-sharded", "weight_map": {"w": "s"}, "metadata": {"s": 5}},
    "shards that are none": {"kind": "torch-sharded", "weight_map": {"w": 5}},
    "no file": {"kind": "torch", "weight_map": {"w": "a"}},
    "no keys": {"kind": "lightning", "file": "m"},
    "keys that are none": {"kind": "lightning", "file": "m", "keys": [["a"]]},
    "an unknown kind": {"kind": ["torch"], "file": "m"},
}


@pytest.mark.parametrize("what", sorted(MALFORMED))
def test_a_record_of_files_that_makes_no_sense(repo: Repository, tmp_path: Path, what: str) -> None:
    """P8: it comes from a store: what does not add up is said, and nothing appears."""
    facts = {"version": 1, "layout": "huggingface", "records": {"model": MALFORMED[what]}}
    repo.save(1, {"model": {"w": np.ones(3)}, "files": {"ckptstore": facts, "files": {}}})
    with pytest.raises(ckptstore.FormatError, match="malformed"):
        repo.export(1, tmp_path / "out", "files")
    assert not (tmp_path / "out").exists()


def test_a_name_that_no_file_can_have(repo: Repository, tmp_path: Path) -> None:
    """P8: a name from a store that the system cannot encode."""
    facts = {"version": 1, "layout": "huggingface", "records": {}}
    repo.save(1, {"files": {"ckptstore": facts, "files": {"\ud800": np.zeros(3, np.uint8)}}})
    with pytest.raises(ckptstore.InvalidArgumentError, match="no name"):
        repo.export(1, tmp_path / "out", "files")
    assert not (tmp_path / "out").exists()


_PEAK = """
import re, sys, ckptstore
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
with ckptstore.open(sys.argv[1], create=False) as repo:
    repo.checkpoint(1)
    before = peak()
    repo.export(1, sys.argv[2], sys.argv[3])
    print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/status is Linux's")
def test_memory_is_bounded(tmp_path: Path) -> None:
    """P6: an export of half a GiB takes a window of chunks, in every format."""
    one = np.random.default_rng(1).integers(0, 255, 64 * 2**20, dtype=np.uint8)
    with ckptstore.open(tmp_path / "repo", codec="raw") as repo:
        repo.save(1, {"model": {str(n): np.concatenate([one[n:], one[:n]]) for n in range(8)}})
    del one
    for form in ALL:
        words = [sys.executable, "-c", _PEAK, str(tmp_path / "repo"), str(tmp_path / form), form]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        peak = int(subprocess.run(words, capture_output=True, check=True, env=env, text=True).stdout)
        shutil.rmtree(tmp_path / form)
        assert peak < 200, form
