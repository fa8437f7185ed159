"""Names: which files belong to which epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore import InvalidArgumentError
from ckptstore.manifest import check_record_name
from ckptstore.watching.layouts import BURN, LAYOUTS, find, layout_of, parse_pattern

KNOWN = {
    "model-7.mpk.gz": ("burn", 7, "model"),
    "optim-12.bin": ("burn", 12, "optimizer"),
    "checkpoint/scheduler-3.json": ("burn", 3, "scheduler"),
    "checkpoint/learning-agent-4.bpk": ("burn", 4, "learning-agent"),
    "checkpoint-500/model.safetensors": ("hf", 500, "model.safetensors"),
    "checkpoint-500/global_step5/mp_rank_00.pt": ("hf", 500, "global_step5/mp_rank_00.pt"),
    "step-100/.metadata": ("dcp", 100, "metadata"),
    "checkpoint/7/.metadata": ("dcp", 7, "metadata"),
    "step-100/__3_0.distcp": ("dcp", 100, "__3_0.distcp"),
    "checkpoint-500/pytorch_model_fsdp_0/.metadata": ("hf", 500, "pytorch_model_fsdp_0/_.metadata"),
    "step-100/.metadata.tmp": None,
    ".metadata": None,
    "epoch=3-step=500.ckpt": ("lightning", 500, "checkpoint"),
    "checkpoints/epoch=3-step=500-v1.ckpt": ("lightning", 500, "checkpoint"),
    "best-epoch=3-val_loss=0.31.ckpt": ("lightning", 3, "checkpoint"),
    "model_7.pt": ("numbered", 7, "model"),
    "7.pt": ("numbered", 7, "checkpoint"),
    "model_epoch_7.pth": ("numbered", 7, "model"),
    "ckpt-00012.pt": ("numbered", 12, "ckpt"),
    "step-100.safetensors": ("numbered", 100, "checkpoint"),
    "last.ckpt": None,
    "resnet50.pt": None,
    "model-00001-of-00002.safetensors": None,
    "model-7.mpk.tmp": None,
    "train.log": None,
    "model-99999999999999999999.mpk": None,
}


@pytest.mark.parametrize("path", KNOWN)
def test_names_of_known_trainers(tmp_path: Path, path: str) -> None:
    """Each is found, alone in a folder, as what it is; what is no checkpoint is not."""
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("x")
    layout, found = find(tmp_path, LAYOUTS)
    got = None if layout is None else (layout.name, found[0].epoch, next(iter(found[0].files)))
    assert got == KNOWN[path]
    if found:
        assert list(found[0].files.values()) == [path]


def test_epochs_of_a_folder(tmp_path: Path) -> None:
    """All files of an epoch together, ascending by number; scratch files, links to folders and hidden files are not."""
    for name in ("model-2.bpk", "optim-2.bpk", "model-10.bpk", "x.part/model-3.bpk", ".hidden-4.bpk", "config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoint").symlink_to(tmp_path)
    _, found = find(tmp_path, LAYOUTS)
    assert [(one.epoch, dict(one.files)) for one in found] == [
        (2, {"model": "model-2.bpk", "optimizer": "optim-2.bpk"}),
        (10, {"model": "model-10.bpk"}),
    ]
    assert find(tmp_path / "missing", LAYOUTS) == (None, [])


def test_what_comes_together() -> None:
    """burn's three, or the two of its reinforcement learning; nothing for names of one's own."""
    assert BURN.needs(["model"]) == {"model", "optimizer", "scheduler"}
    assert BURN.needs(["policy", "extra"]) == {"policy", "learning-agent"}
    assert BURN.needs(["embedding"]) == frozenset()


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("{record}-{epoch}.mpk", "model-7.mpk", (7, "model")),
        ("{record}-{epoch}.mpk", "model-7.mpkx", None),
        ("step_{epoch}/{record}", "step_7/a/b.bin", (7, "a/b.bin")),
        ("step_{epoch}/*.bin", "step_7/a.bin", (7, "checkpoint")),
        ("run*/{record}.{epoch}.d", "run1/m.7.d", (7, "m")),
        ("it[{epoch}].pkl", "it[7].pkl", (7, "checkpoint")),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, path: str, expected: tuple[int, str] | None) -> None:
    """Names of one's own, also in folders; everything but the fields is taken literally."""
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("x")
    _, found = find(tmp_path, layout_of(None, pattern))
    assert [(one.epoch, *one.files) for one in found] == ([expected] if expected else [])


@pytest.mark.parametrize(
    "pattern", ["model.pt", "{epoch}-{epoch}", "../{epoch}", "/x/{epoch}", "{epoch}/{record}/{record}"]
)
def test_patterns_that_make_no_sense(pattern: str) -> None:
    """Refused, with an example."""
    with pytest.raises(InvalidArgumentError, match="epoch"):
        parse_pattern(pattern)


def test_any_name_becomes_a_record_name(tmp_path: Path) -> None:
    """Odd names are stored too, each under a name of its own."""
    odd = ["a b.bin", "ä.bin", "..x", "-y", "a_b.bin"]
    (tmp_path / "checkpoint-1").mkdir()
    for name in odd:
        (tmp_path / "checkpoint-1" / name).write_text(name)
    _, found = find(tmp_path, LAYOUTS)
    assert len({check_record_name(name) for name in found[0].files}) == len(found[0].files) >= 4


def test_many_names_that_become_the_same(tmp_path: Path) -> None:
    """Each keeps a record of its own, and finding one takes no longer than finding the first."""
    (tmp_path / "checkpoint-1").mkdir()
    for number in range(3000):
        (tmp_path / "checkpoint-1" / f"{chr(0x4E00 + number) * 3}.json").touch()
    _, [found] = find(tmp_path, LAYOUTS)
    assert len(found.files) == len(set(found.files.values())) == 3000
    assert {"___.json", "___.json-2", "___.json-3000"} <= found.files.keys()


def test_layout_names() -> None:
    """Only known ones; not beside a pattern."""
    assert layout_of("burn", None) == (BURN,)
    for name, pattern in (("keras", None), ("burn", "{epoch}")):
        with pytest.raises(InvalidArgumentError):
            layout_of(name, pattern)
