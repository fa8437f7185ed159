"""Sharded arrays wherever arrays are walked: compared, exported, mirrored, copied, mended, counted, shown, thinned."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptstore
from ckptstore import CorruptionError, KeepLast, Repository, ShardedArray, TieredRepository, formats
from ckptstore.catalog import Catalog
from ckptstore.cli import main
from ckptstore.errors import TransientError
from ckptstore.export import FORMATS, Format
from ckptstore.stores import LocalStore, MemoryStore
from ckptstore.testing import Fault, FaultStore
from tests.repository.helpers import CHUNK, assert_same, open_repo
from tests.repository.test_sharded import bits, rows, sharded

AXES = {"rows": 0, "columns": 1, "bf16": 1}


def wholes(epoch: int = 1) -> dict[str, Any]:
    """What the arrays of the state are, in one piece."""
    grid = np.arange(300 * 200, dtype=np.float32).reshape(300, 200)
    grid[epoch, epoch] = -epoch
    return {"rows": grid, "columns": grid * 2, "bf16": bits((50, 60), ml_dtypes.bfloat16), "n": epoch}


def state(epoch: int = 1, parts: int = 4) -> dict[str, Any]:
    """The same in pieces; the tied one is the same as the one it is tied to."""
    found = wholes(epoch)
    cut = {name: sharded(found[name], rows(found[name].shape, parts, axis)) for name, axis in AXES.items()}
    return {**cut, "tied": cut["rows"], "n": epoch}


def expected(epoch: int = 1) -> dict[str, Any]:
    found = wholes(epoch)
    return {**{name: found[name] for name in ("rows", "columns", "bf16")}, "tied": found["rows"], "n": epoch}


def filled(store: Any, epochs: tuple[int, ...] = (1, 2), **options: Any) -> Repository:
    repo = open_repo(store, **options)
    for epoch in epochs:
        repo.save(epoch, {"model": state(epoch), "other": {"x": np.arange(epoch)}})
    return repo


@pytest.fixture
def place(fast_folder: Path) -> Path:
    """A repository on a disk."""
    with filled(LocalStore(fast_folder / "repo")):
        return fast_folder / "repo"


# ---- diff ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_diff_of_other_shardings(parts: int) -> None:
    """Elements are compared, whoever had them: the same ones are equal and a changed one is counted."""
    repo = open_repo(MemoryStore())
    repo.save(1, {"m": state(1)})
    repo.save(2, {"m": state(1, parts) if parts > 1 else expected(1)})
    other = state(1, parts)
    changed = wholes(1)["columns"]
    changed[7, 199] += 0.5
    changed[299, 0] = np.nan
    repo.save(3, {"m": other | {"columns": sharded(changed, rows(changed.shape, parts, 0))}})
    assert repo.diff(1, 2).equal
    found = repo.diff(1, 3)
    assert Counter(line.outcome for line in found.arrays) == {"equal": 3, "changed": 1}
    [line] = [line for line in found.arrays if line.outcome == "changed"]
    assert (line.path, line.elements, line.changed, line.largest, line.incomparable) == ("columns", 60_000, 2, 0.5, 1)
    assert repo.diff(3, 1).arrays[1].changed == 2


def test_diff_reads_what_the_digests_of_pieces_do_not_decide() -> None:
    """A piece that is the same among changed neighbours is not read."""
    store = MemoryStore()
    repo = filled(store)
    assert 0 < repo.diff(1, 2).bytes_read <= 4 * CHUNK
    first = sharded(bits((200, 64)), rows((200, 64), 2))  # of 25 KiB each: big enough for digests of their own
    repo.save(3, {"m": {"w": first}})
    repo.save(4, {"m": {"w": first, "x": bits((10,), seed=2)}})
    broken = FaultStore(store, [Fault("get", "/chunks/", error=TransientError("no"), times=None)])
    found = open_repo(broken).diff(3, 4)
    assert [line.outcome for line in found.arrays] == ["equal", "only in second"]


# ---- export -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_export(place: Path, tmp_path: Path, form: Format) -> None:
    """P7: exported, they are ordinary arrays, bit for bit."""
    with ckptstore.open(place) as repo:
        repo.export(2, tmp_path / "out", form, records=["model"])
    name = {"safetensors": "model.safetensors", "npz": "model.npz", "files": "model"}[form]
    [found] = formats.read(tmp_path / "out" / name).values()
    assert_same(found, expected(2))


# ---- copies and mending -------------------------------------------------------------------------------------


def chunk_of(store: Any, epoch: int) -> str:
    """A chunk of the sharded arrays."""
    catalog = Catalog(store)
    entry = catalog.manifest(catalog.committed(epoch)[-1]).record("model")
    assert entry is not None
    index = catalog.index(entry)
    assert (index.format, entry.boxes) == (2, index.boxes)
    number = next(span.chunk for array in index.arrays if array.boxes for span in array.spans)
    return index.chunks[number].key


def test_mirror_and_repair() -> None:
    """A mirror has them bit for bit, in pieces as they were; from it a damaged chunk and a lost index are mended."""
    one, two = MemoryStore(), MemoryStore()
    source, target = filled(one), open_repo(two)
    assert source.mirror(target).ok
    assert target.verify(deep=True).ok
    for epoch in (1, 2):
        assert_same(target.checkpoint(epoch).load("model"), expected(epoch))
    key = chunk_of(one, 2)
    data = bytearray(one.get(key))
    one.delete(key)
    data[-9] ^= 1
    one.put(key, bytes(data))
    catalog = Catalog(one)
    lost = catalog.manifest(catalog.committed(1)[-1]).record("model")
    assert lost is not None
    one.delete(lost.key)
    repo = open_repo(one)
    with pytest.raises(CorruptionError):
        repo.checkpoint(2).load("model")
    assert not repo.verify(deep=True).ok
    assert repo.repair(sources=[target]).ok
    assert repo.verify(deep=True).ok
    for epoch in (1, 2):
        assert_same(repo.checkpoint(epoch).load("model"), expected(epoch))


def test_copy_and_scrub(tmp_path: Path, place: Path) -> None:
    """A copied epoch loads into pieces, and a scrub reads its chunks."""
    with ckptstore.open(place) as repo, ckptstore.open(tmp_path / "copy") as copy:
        repo.copy(2, copy)
        piece = np.zeros((300, 30), np.float32)
        into = expected(2) | {"columns": ShardedArray((300, 200), "float32", [((0, 170), piece)]), "n": 0}
        copy.checkpoint(2).load("model", into=into)
        assert_same(piece, wholes(2)["columns"][:, 170:].copy())
        assert copy.scrub().ok


def test_a_damaged_chunk_is_told_and_nothing_unverified_arrives() -> None:
    """P3: a wrong byte in a chunk of a piece is an error that names it; what was there before it stays."""
    store = MemoryStore()
    repo = filled(store)
    key = chunk_of(store, 2)
    data = bytearray(store.get(key))
    store.delete(key)
    data[-9] ^= 1
    store.put(key, bytes(data))
    piece = np.full((300, 200), 5, np.float32)
    target = ShardedArray((300, 200), "float32", [((0, 0), piece)])
    with pytest.raises(CorruptionError) as caught:
        repo.checkpoint(2).load("model", into=expected(2) | {"rows": target, "tied": piece.copy()}, paths=["rows"])
    assert caught.value.key == key
    good = wholes(2)["rows"]
    assert np.all((piece == 5) | (piece == good))
    newest = repo.latest(deep=True)
    assert newest is not None
    assert newest.epoch == 1


def test_thinned_and_resumed() -> None:
    """Records go by policies of their own; an attempt that died is resumed with what it has sent."""
    store = MemoryStore()
    repo = filled(store, (1, 2, 3))
    repo.prune({"other": KeepLast(1), "model": KeepLast(3)})
    assert_same(repo.checkpoint(1).load(), {"model": expected(1)})
    failing = FaultStore(store, [Fault("put", "manifests/0", error=TransientError("no"), times=None)])
    with pytest.raises(ckptstore.CkptStoreError):
        open_repo(failing).save(4, {"model": state(9)})
    report = open_repo(store).save(4, {"model": state(9)}).report
    assert report is not None
    assert report.bytes_reused == report.bytes_state
    assert_same(repo.checkpoint(4).load("model"), expected(9))


def test_tiers(tmp_path: Path) -> None:
    """The lower tier gets them too, and gives them when the upper one has lost a chunk."""
    with ckptstore.open([tmp_path / "fast", tmp_path / "slow"], chunk_size=CHUNK) as repo:
        assert isinstance(repo, TieredRepository)
        repo.save(1, {"model": state()})
        assert repo.wait_for_tiers()
    with ckptstore.open([tmp_path / "fast", tmp_path / "slow"]) as repo:
        (tmp_path / "fast" / chunk_of(LocalStore(tmp_path / "fast"), 1)).unlink()
        piece = np.zeros((300, 50), np.float32)
        into = expected() | {"columns": ShardedArray((300, 200), "float32", [((0, 50), piece)]), "n": 0}
        loaded = repo.checkpoint(1).load("model", into=into)
        assert_same(piece, wholes()["columns"][:, 50:100].copy())
        assert_same(loaded["rows"], wholes()["rows"])


# ---- what people see ----------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_commands(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """show, verify, du, diff, report, export and cp tell of them what they tell of other arrays."""
    shown = json.loads(run(capsys, "show", place, "--arrays", "--json"))
    arrays = {array["paths"][0]: array for array in shown["records"][0]["array_list"]}
    assert arrays["rows"] | {"paths": ["rows", "tied"]} == {
        "paths": ["rows", "tied"], "kind": "numpy", "dtype": "float32", "shape": [300, 200], "bytes": 240_000,
        "pieces": 4,
    }  # fmt: skip
    assert "300 × 200 in 4 pieces" in run(capsys, "show", place, "--arrays")
    assert json.loads(run(capsys, "verify", place, "--json"))["ok"]
    with ckptstore.open(place) as repo:
        usage = repo.du()
        assert [epoch.bytes_state for epoch in usage.epochs] == [repo.checkpoint(epoch).bytes_state for epoch in (1, 2)]
        assert repo.checkpoint(1).bytes_state == 2 * 240_000 + 6_000 + 8
    found = json.loads(run(capsys, "report", place, "--json"))
    largest = found["arrays"]["largest"]
    assert {one["path"] for one in largest[:2]} == {"rows = tied", "columns"}
    assert largest[0]["nbytes"] == 240_000
    assert json.loads(run(capsys, "diff", place, 1, 1, "--json"))["equal"]
    run(capsys, "cp", place, tmp_path / "copy", 2)
    with ckptstore.open(tmp_path / "copy") as copy:
        assert_same(copy.checkpoint(2).load("model"), expected(2))
