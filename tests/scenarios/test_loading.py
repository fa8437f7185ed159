"""Scenes of loading: damage seen by many readers, swapped objects, files that shrink, downloads cut off."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore import CorruptionError, keys
from ckptstore.stores.memory import MemoryStore
from tests.repository.helpers import assert_same, contents, make_state, manifests_of, open_repo, pour

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def child(code: str, *arguments: object, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **more},
    )


LOAD = """
import sys
import ckptstore
repo = ckptstore.open(sys.argv[1], create=False)
checkpoint = repo.checkpoint(1)
checkpoint.records
print("ready", flush=True)
sys.stdin.readline()
try:
    checkpoint.load()
except ckptstore.CorruptionError as error:
    print(error.key, error.epoch)
    sys.exit(7)
"""


def test_each_of_many_readers_names_the_object(fast_folder: Path) -> None:
    """86: four processes load one damaged epoch: each ends by itself, and names object and epoch."""
    with ckptstore.open(fast_folder / "r", chunk_size=64 * 1024) as repo:
        repo.save(1, make_state(1))
        victim = next(info for info in repo.store.list("attempts/") if "/chunks/" in info.key and info.size > 1000)
    data = bytearray((fast_folder / "r" / victim.key).read_bytes())
    data[500] ^= 4
    (fast_folder / "r" / victim.key).write_bytes(data)
    readers = [child(LOAD, fast_folder / "r") for _ in range(4)]
    for reader in readers:
        out, _ = reader.communicate("\n", timeout=60)
        assert (reader.returncode, out.splitlines()[-1]) == (7, f"{victim.key} 1")


def test_a_file_that_shrinks_is_an_error_and_no_signal(fast_folder: Path) -> None:
    """117: files that are cut when a process is about to read them end in an exception: nothing is mapped."""
    with ckptstore.open(fast_folder / "r", chunk_size=64 * 1024) as repo:
        repo.save(1, {"m": {"w": np.random.default_rng(1).integers(0, 256, 4_000_000, dtype=np.uint8)}})
        chunks = [fast_folder / "r" / info.key for info in repo.store.list("attempts/") if "/chunks/" in info.key]
    reader = child(LOAD, fast_folder / "r")
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    for path in chunks:
        os.truncate(path, path.stat().st_size // 2)
    out, err = reader.communicate("\n", timeout=60)
    assert reader.returncode == 7, err
    assert "/chunks/" in out


def test_no_file_of_a_store_is_mapped() -> None:
    """117: mmap gives the staging memory, which no file is behind, and maps what is imported from other trainers."""
    users = set()
    for path in sorted((ROOT / "ckptstore").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            attribute = node.attr if isinstance(node, ast.Attribute) else ""
            if "mmap" in names or attribute in ("memmap", "fromfile"):
                users.add(path.relative_to(ROOT / "ckptstore").as_posix())
    assert users <= {"staging.py", "formats/mapped.py"}


def test_objects_of_another_epoch_are_told_apart() -> None:
    """114: a manifest, index or chunk of another epoch, sound in itself, is damage where it does not belong."""
    store = MemoryStore()
    repo = open_repo(store)
    for epoch in (1, 2):
        repo.save(epoch, make_state(epoch))
    sound = contents(store)
    old, new = (next(m for m in manifests_of(store) if m.epoch == epoch) for epoch in (1, 2))
    swaps = [(new.key, old.key), (keys.MARKER, old.key)]
    swaps += [(mine.key, other.key) for mine in new.records for other in (*old.records, *new.records) if mine != other]
    chunks = [key for key in sound if f"{new.attempt}/chunks/" in key]
    swaps += [(key, other) for key in chunks for other in sound if "/chunks/" in other and other != key]
    assert len(swaps) > 12
    for key, other in swaps:
        store = MemoryStore()
        pour({**sound, key: sound[other]}, store)
        if key == keys.MARKER:
            assert_same(open_repo(store).checkpoint(2).load(), make_state(2))
            continue
        with pytest.raises(CorruptionError) as caught:
            open_repo(store).checkpoint(2).load()
        assert caught.value.key == key
        found = open_repo(store).latest(deep=True)
        assert found is not None
        assert_same(found.load(), make_state(1))


def test_two_hundred_random_bits() -> None:
    """114: a bit that flips anywhere in an epoch is told, or changes no loaded bit."""
    store = MemoryStore()
    repo = open_repo(store)
    repo.save(1, make_state(1))
    sound = contents(store)
    ours = sorted(key for key in sound if key != keys.MARKER)
    random = np.random.default_rng(114)
    told = 0
    for _ in range(200):
        key = ours[random.integers(len(ours))]
        data = bytearray(sound[key])
        data[random.integers(len(data))] ^= 1 << int(random.integers(8))
        store.put(key, bytes(data))
        try:
            assert_same(open_repo(store).checkpoint(1).load(), make_state(1))
        except CorruptionError as error:
            told += error.key == key and key in str(error)
        store.put(key, sound[key])
    assert told > 190


READ = """
import sys
import ckptstore
ckptstore.open(sys.argv[1], create=False).checkpoint(1).read_file("f", sys.argv[2])
"""


def test_a_download_that_is_killed_leaves_no_file_that_looks_whole(tmp_path: Path) -> None:
    """119: a file record is put into its place when all of it is verified: killed before, there is nothing."""
    source, target = tmp_path / "source", tmp_path / "out" / "file"
    source.write_bytes(np.random.default_rng(119).bytes(48 << 20))
    target.parent.mkdir()
    with ckptstore.open(tmp_path / "r", chunk_size=1 << 20) as repo, repo.begin(1) as txn:
        txn.write_file("f", source)
    killed = 0
    for _ in range(3):
        reader = child(READ, tmp_path / "r", target)
        while reader.poll() is None and not any(path.stat().st_size for path in target.parent.glob(".*.part")):
            time.sleep(0.001)
        reader.send_signal(signal.SIGKILL)
        reader.communicate(timeout=60)
        if target.exists():  # it was faster
            assert target.read_bytes() == source.read_bytes()
            target.unlink()
        else:
            killed += 1
    assert killed
    reader = child(READ, tmp_path / "r", target)
    assert reader.communicate(timeout=60)[1] == ""
    assert target.read_bytes() == source.read_bytes()


def test_loading_writes_nothing_anywhere(tmp_path: Path) -> None:
    """119: there is no cache: a load needs no place to write to, and what it reads is always what the store holds."""
    with ckptstore.open(tmp_path / "r") as repo:
        repo.save(1, {"m": {"w": np.ones(1000)}})
    nowhere = str(tmp_path / "nowhere")
    places = dict.fromkeys(("TMPDIR", "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), nowhere)
    before = sorted(tmp_path.rglob("*"))
    reader = child(LOAD, tmp_path / "r", **places)
    assert reader.communicate("\n", timeout=60)[1] == ""
    assert reader.returncode == 0
    assert sorted(tmp_path.rglob("*")) == before
