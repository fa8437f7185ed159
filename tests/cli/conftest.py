"""Fixtures of the command-line tests: a runner in this process, and a small repository of each kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.cli import main


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout as strict JSON."""
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``ckptstore`` with the given arguments."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Two files as a trainer would write them."""
    folder = tmp_path / "trainer"
    folder.mkdir()
    content = np.random.default_rng(1).standard_normal(50_000).astype(np.float32).tobytes()
    found = {"model": folder / "model.bin", "optimizer": folder / "optim.bin"}
    found["model"].write_bytes(content)
    found["optimizer"].write_bytes(content[::-1] * 2)
    return found


@pytest.fixture
def file_repo(tmp_path: Path, files: dict[str, Path]) -> Path:
    """A repository with the files as epochs 1 and 2."""
    place = tmp_path / "file_repo"
    with ckptstore.open(place) as repo:
        for epoch in (1, 2):
            with repo.begin(epoch, metadata={"loss": 1 / epoch}) as txn:
                for name, path in files.items():
                    path.write_bytes(path.read_bytes() + bytes([epoch]))
                    txn.write_file(name, path)
    return place


@pytest.fixture
def state_repo(tmp_path: Path) -> Path:
    """A repository with states as epochs 1, 2 and 3, each of chunks of its own."""
    place = tmp_path / "state_repo"
    rng = np.random.default_rng(2)
    with ckptstore.open(place) as repo:
        for epoch in (1, 2, 3):
            weights = rng.standard_normal((300, 200)).astype(np.float32)
            repo.save(epoch, {"model": {"enc": {"w": weights}, "n": epoch}}, {"loss": float("nan"), "by": (1, b"x")})
    return place


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def chunks_of(place: Path, epoch: int) -> list[Path]:
    """The files of the chunks that an epoch alone sent."""
    with ckptstore.open(place, create=False) as repo:
        manifest = json.loads(repo.store.get(f"manifests/{epoch:012d}-000001.json"))
    return sorted((place / "attempts" / manifest["attempt"] / "chunks").iterdir())
