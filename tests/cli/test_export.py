"""``ckptstore export``: files, JSON, exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import ckptstore
from ckptstore import formats
from tests.cli.conftest import Run, chunks_of, flip
from tests.unit.exact import same


def test_export(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """A file for each record, by default of the newest epoch as safetensors; the JSON says what was written."""
    result = run("export", state_repo, "--to", tmp_path / "out")
    assert result.code == 0
    assert "exported epoch 3: 1 file, 234 KiB" in result.out
    with ckptstore.open(state_repo) as repo:
        for form, name in (("safetensors", "model.safetensors"), ("npz", "model.npz"), ("files", "model")):
            place = tmp_path / form
            result = run("export", state_repo, 2, "--to", place, "--format", form, "--record", "model", "--json")
            assert result.code == 0
            assert result.json["files"] == [{"records": ["model"], "path": str(place / name), "bytes": 240_000}]
            assert (result.json["epoch"], result.json["format"], result.json["foreign_types"]) == (2, form, [])
            assert same(formats.read(place / name)["model"], repo.checkpoint(2).load("model"))


def test_file_records(run: Run, file_repo: Path, tmp_path: Path) -> None:
    """Files come back under their names; as another format they are refused, which says what to do."""
    refused = run("export", file_repo, "--to", tmp_path / "out", "--format", "npz")
    assert refused.code == 1
    assert "--format files" in refused.err
    assert run("export", file_repo, 1, "--to", tmp_path / "out", "--format", "files").code == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["model.bin", "optim.bin"]
    assert (tmp_path / "out" / "model.bin").stat().st_size == 200_001


def test_errors(run: Run, state_repo: Path, tmp_path: Path) -> None:
    """Existing files 1, unknown epochs and records 3, damage 4; nothing is left behind."""
    out = tmp_path / "out"
    assert run("export", state_repo, 1, "--to", out).code == 0
    refused = run("export", state_repo, 2, "--to", out)
    assert refused.code == 1
    assert "or overwrite it with --force" in refused.err
    assert run("export", state_repo, 2, "--to", out, "--force").code == 0
    assert run("export", state_repo, 9, "--to", tmp_path / "x").code == 3
    assert run("export", state_repo, 1, "--to", tmp_path / "x", "--record", "optimizer").code == 3
    assert run("export", state_repo, 1, "--to", tmp_path / "x", "--format", "onnx").code == 1
    flip(chunks_of(state_repo, 1)[0])
    damaged = run("export", state_repo, 1, "--to", tmp_path / "x")
    assert damaged.code == 4
    assert "damaged" in damaged.err
    assert not (tmp_path / "x").exists()


def test_types_that_the_format_lacks(run: Run, tmp_path: Path) -> None:
    """Arrays that other programs see as raw bytes are named on stderr, once."""
    with ckptstore.open(tmp_path / "repo") as repo:
        repo.save(1, {"model": {"c": np.ones(3, np.complex128), "w": np.ones(3)}})
    result = run("export", tmp_path / "repo", "--to", tmp_path / "out")
    assert result.code == 0
    assert "safetensors lacks the element type of 1 arrays (model: c)" in result.err
