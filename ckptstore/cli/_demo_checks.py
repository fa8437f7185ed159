"""What the demo does to the stored checkpoints, and how it judges what it gets back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ckptstore
from ckptstore.catalog import Catalog, Committed
from ckptstore.cli._demo_model import fingerprint
from ckptstore.cli._demo_supervisor import DemoFailedError, Supervisor
from ckptstore.manifest import ChunkRef

_FILE = "file://"


@dataclass
class Compared:
    """Two states, found equal."""

    arrays: int = 0
    nbytes: int = 0


@dataclass
class Flipped:
    """One bit, and what was noticed of it."""

    epoch: int
    key: str
    byte: int
    bit: int
    stepped_back_to: int = -1
    reason: str = ""


@dataclass
class Pruned:
    """What was left at the end."""

    kept: list[int]
    removed: list[int]
    objects: int
    bytes_freed: int
    bytes_left: int


def require(holds: object, what: str) -> None:
    """A promise. DemoFailedError if it does not hold."""
    if not holds:
        raise DemoFailedError(what)


def compare(run: Supervisor, other: Supervisor, epoch: int, expected: str) -> Compared:
    """Load the newest state of two repositories; compare them bit by bit, and with what the trainer had in memory."""
    with run.open() as repo, other.open() as reference:
        ours, theirs = repo.latest(), reference.latest()
        assert ours is not None
        assert theirs is not None
        require(ours.epoch == theirs.epoch == epoch, f"epoch {epoch} is not the newest in both repositories")
        state, wanted = ours.load(), theirs.load()
    compared = Compared()
    _same(state, wanted, "state", compared)
    require(fingerprint(state) == expected, f"epoch {epoch} as loaded is not what the trainer had in memory")
    return compared


def _same(one: Any, two: Any, path: str, compared: Compared) -> None:
    require(type(one) is type(two), f"{path} differs: {type(one).__name__} and {type(two).__name__}")
    if isinstance(one, dict):
        require(list(one) == list(two), f"{path} differs: other keys")
        for key in one:
            _same(one[key], two[key], f"{path}.{key}", compared)
    elif isinstance(one, np.ndarray):
        require((one.dtype, one.shape) == (two.dtype, two.shape), f"{path} differs in type or shape")
        require(one.tobytes() == two.tobytes(), f"{path} differs")  # bits: == would not tell -0.0 from 0.0
        compared.arrays += 1
        compared.nbytes += one.nbytes
    elif isinstance(one, float):
        require(one.hex() == two.hex(), f"{path} differs: {one!r} and {two!r}")
    else:
        require(one == two, f"{path} differs: {one!r} and {two!r}")


def flip(run: Supervisor, rng: random.Random) -> Flipped:
    """Flip one bit in a chunk that only the newest epoch needs: on disk for a folder, else by get and put."""
    with run.open() as repo:
        newest, before = repo.epochs()[-1], repo.epochs()[-2]
        theirs = {chunk.key for chunk in _chunks(repo, before)}
        own = sorted((c for c in _chunks(repo, newest) if c.key not in theirs), key=lambda chunk: chunk.key)
        chunk = rng.choice([c for c in own if c.stored_length >= max(o.stored_length for o in own) // 2])
        byte = rng.randrange(chunk.stored_length // 2, chunk.stored_length)
        done = Flipped(newest, chunk.key, byte, rng.randrange(8))
        if repo.url.startswith(_FILE):
            with (folder_of(repo.url) / chunk.key).open("r+b") as file:
                file.seek(done.byte)
                value = file.read(1)[0]
                file.seek(done.byte)
                file.write(bytes([value ^ 1 << done.bit]))
        else:
            data = bytearray(repo.store.get(chunk.key))
            data[done.byte] ^= 1 << done.bit
            repo.store.put(chunk.key, data)
    return done


def folder_of(url: str) -> Path:
    """The folder of a ``Repository.url`` that is one."""
    return Path(url.removeprefix(_FILE))


def _chunks(repo: ckptstore.Repository, epoch: int) -> list[ChunkRef]:
    catalog = Catalog(repo.store)
    manifest = catalog.manifest(Committed(epoch, repo.checkpoint(epoch).generation))
    return [chunk for entry in manifest.records for chunk in catalog.index(entry).chunks]


def check_notices(run: Supervisor, flipped: Flipped) -> None:
    """A load must refuse the flipped bit, and ``latest(deep=True)`` step over it; both must name the object."""
    with run.open() as repo:
        try:
            repo.checkpoint(flipped.epoch).load()
        except ckptstore.CorruptionError as error:
            require(error.key == flipped.key, f"the load blames {error.key}, not {flipped.key}")
        else:
            raise DemoFailedError(f"epoch {flipped.epoch} was loaded although {flipped.key} is damaged")
    with run.open() as repo:
        ckpt = repo.latest(deep=True)
        assert ckpt is not None
        require(ckpt.epoch == flipped.epoch - 1, f"latest(deep=True) answered epoch {ckpt.epoch}")
        [skipped] = ckpt.skipped
        require((skipped.epoch, skipped.key) == (flipped.epoch, flipped.key), f"latest(deep=True) blames {skipped.key}")
        flipped.stepped_back_to = ckpt.epoch
        flipped.reason = skipped.reason


def prune(run: Supervisor, keep: int) -> Pruned:
    """Prune, collect garbage, and look: exactly the last epochs, all their bytes good, nothing else left."""
    with run.open() as repo:
        before = repo.epochs()
        report = repo.prune(ckptstore.KeepLast(keep))
        collected = repo.gc(grace=0)
    with run.open() as repo:
        kept = repo.epochs()
        require(kept == before[-keep:], f"pruned to {kept}, not {before[-keep:]}")
        verified = repo.verify()
        require(verified.ok, f"after the prune: {verified.problems}")
        debris = repo.gc(grace=0, dry_run=True)
        require(not debris.removed and not debris.spared, f"gc left debris: {debris.removed} {debris.spared}")
        left = sum(info.size for info in repo.store.list())
    objects = len(report.objects) + len(collected.removed)
    return Pruned(kept, sorted(report.removed), objects, report.bytes_freed + collected.bytes_freed, left)
