"""The watcher, step by step: what is committed, what is not yet, and what becomes of files that change."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import ckptstore
from ckptstore import Finding, KeepLast, Repository, StoreError, TransientError
from ckptstore.files import FileSource
from ckptstore.watching import import_files, watch
from ckptstore.watching.origin import KEY, origin_of
from tests.watching.fake_burn import content, pack, whole_file

QUICK: dict[str, Any] = {"once": True, "quiet": 0.05, "interval": 0.01}
BURN = {"model": "model", "optimizer": "optim", "scheduler": "scheduler"}
NAMES = tuple(BURN.values())


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with ckptstore.open(tmp_path / "repo") as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


def write(folder: Path, epoch: int, life: int = 1, extension: str = "mpk.gz", names: Any = NAMES) -> None:
    """Files as burn writes them; later ones are newer, whatever the clock of the file system."""
    for name in names:
        path = folder / f"{name}-{epoch}.{extension}"
        path.write_bytes(whole_file(life, epoch, name, extension))
        write.clock += 10_000_000  # type: ignore[attr-defined]
        os.utime(path, ns=(write.clock, write.clock))  # type: ignore[attr-defined]


write.clock = time.time_ns() - 3600 * 10**9  # type: ignore[attr-defined]


def kinds(findings: list[Finding]) -> dict[int, str]:
    return {finding.epoch: finding.kind for finding in findings}


def life_of(repo: Repository, epoch: int, extension: str = "mpk.gz") -> set[int]:
    """The lives whose files the epoch holds; one, if it is no mixture."""
    there = repo.checkpoint(epoch).load()
    return {
        next(life for life in range(1, 9) if bytes(there[record]) == whole_file(life, epoch, name, extension))
        for record, name in BURN.items()
    }


def test_complete_and_whole(folder: Path, repo: Repository) -> None:
    """What lacks a file or is cut waits; the rest is committed, the oldest first, and known again unread."""
    for epoch in (1, 2, 3, 4):
        write(folder, epoch)
    (folder / "optim-2.mpk.gz").unlink()
    os.truncate(folder / "model-3.mpk.gz", 5000)
    told: list[Finding] = []
    found = watch(folder, repo, **QUICK, on_finding=told.append)
    assert kinds(found) == {1: "saved", 2: "waiting", 3: "torn", 4: "saved"}
    assert "optimizer" in found[1].reason
    assert "model-3.mpk.gz" in found[2].reason
    assert [finding.epoch for finding in told if finding.kind == "saved"] == [1, 4]
    assert repo.epochs() == [1, 4]
    assert life_of(repo, 4) == {1}
    for path in [*folder.glob("*-2.*"), *folder.glob("*-3.*")]:
        path.unlink()
    with patch.object(FileSource, "read", side_effect=AssertionError("read again")):
        assert kinds(watch(folder, repo, **QUICK)) == {1: "there", 4: "there"}
    assert repo.checkpoint(4).generation == 1


def test_a_watcher_that_is_new(folder: Path, tmp_path: Path, repo: Repository) -> None:
    """Files that were moved (other inodes, other times) are compared by digest: nothing is saved twice."""
    write(folder, 1)
    watch(folder, repo, **QUICK)
    other = tmp_path / "elsewhere"
    other.mkdir()
    write(other, 1)
    assert kinds(watch(other, repo, **QUICK)) == {1: "there"}
    write(other, 1, life=2)
    found = watch(other, repo, **QUICK)
    assert kinds(found) == {1: "conflict"}
    assert str(folder) in found[0].reason
    assert kinds(watch(other, repo, **QUICK, replace=True)) == {1: "replaced"}
    assert life_of(repo, 1) == {2}


def test_an_epoch_of_somebody_elses(folder: Path, repo: Repository) -> None:
    """What a program saved under that number is not replaced unasked."""
    repo.save(1, {"model": {"w": 1}})
    write(folder, 1)
    assert kinds(watch(folder, repo, **QUICK)) == {1: "conflict"}
    assert repo.checkpoint(1).load() == {"model": {"w": 1}}


def test_written_again_by_a_later_life(folder: Path, repo: Repository) -> None:
    """An epoch that is written again replaces the old one when all its files are new, and not before: no mixture."""
    for epoch in (1, 2):
        write(folder, epoch)
    watch(folder, repo, **QUICK)
    write(folder, 2, life=2, names=["model"])
    found = watch(folder, repo, **QUICK)
    assert kinds(found) == {1: "there", 2: "waiting"}
    assert life_of(repo, 2) == {1}
    write(folder, 2, life=2, names=["optim", "scheduler"])
    assert kinds(watch(folder, repo, **QUICK)) == {1: "there", 2: "replaced"}
    assert life_of(repo, 2) == {2}
    assert repo.checkpoint(2).generation == 2


def test_a_mixture_that_nobody_has_seen_before(folder: Path, repo: Repository) -> None:
    """A new life has rewritten epoch 1 and half of epoch 2: by the order of their times, 2 is no epoch yet."""
    write(folder, 2, life=1)
    write(folder, 1, life=2)
    write(folder, 2, life=2, names=["model"])
    assert kinds(watch(folder, repo, **QUICK)) == {1: "saved", 2: "waiting"}
    write(folder, 2, life=2)
    assert kinds(watch(folder, repo, **QUICK))[2] == "saved"


def test_a_life_that_was_cut_short(folder: Path, repo: Repository) -> None:
    """A new life died while it rewrote epoch 1: epoch 2 of the old one is as finished as it ever was."""
    for epoch in (1, 2):
        write(folder, epoch)
    write(folder, 1, life=2, names=["model"])
    assert kinds(watch(folder, repo, **QUICK))[2] == "saved"
    assert life_of(repo, 2) == {1}


def test_what_the_trainer_deletes_stays(folder: Path, repo: Repository) -> None:
    """File by file, as burn deletes: the epoch stays whole, and nothing is committed of what is left."""
    for epoch in (1, 2):
        write(folder, epoch)
    watch(folder, repo, **QUICK)
    for name in BURN.values():
        (folder / f"{name}-1.mpk.gz").unlink()
        assert kinds(watch(folder, repo, **QUICK)) in ({1: "there", 2: "there"}, {2: "there"})
    assert repo.epochs() == [1, 2]
    assert repo.checkpoint(1).generation == 1
    assert life_of(repo, 1) == {1}


def test_files_that_prove_nothing(folder: Path, repo: Repository) -> None:
    """bincode: a file is taken for whole when another epoch's is of the same size. One that was cut is not."""
    write(folder, 1, extension="bin")
    assert kinds(watch(folder, repo, **QUICK)) == {1: "waiting"}
    write(folder, 2, extension="bin")
    os.truncate(folder / "optim-2.bin", 149_000)
    assert kinds(watch(folder, repo, **QUICK)) == {1: "waiting", 2: "waiting"}
    write(folder, 2, extension="bin")
    assert kinds(watch(folder, repo, **QUICK)) == {1: "saved", 2: "saved"}  # 2 has the size of 1, which is there
    os.truncate(folder / "optim-2.bin", 149_000)
    write(folder, 3, extension="bin")
    os.truncate(folder / "optim-3.bin", 149_001)
    found = watch(folder, repo, **QUICK)
    assert kinds(found) == {1: "there", 2: "waiting", 3: "waiting"}
    assert life_of(repo, 2, "bin") == {1}
    assert kinds(watch(folder, repo, **QUICK, need=["model"], accept_unproven=True))[3] == "saved"


def test_a_record_that_is_written_last(folder: Path, repo: Repository) -> None:
    """What the epoch before had is waited for, also a name of one's own; a stray only until the trainer goes on."""
    write(folder, 1)
    (folder / "runtime-1.json").write_text("{}")
    write(folder, 2)
    found = watch(folder, repo, **QUICK)
    assert kinds(found) == {1: "saved", 2: "waiting"}
    assert "runtime" in found[1].reason
    write(folder, 3)
    assert kinds(watch(folder, repo, **QUICK)) == {1: "there", 2: "saved", 3: "saved"}
    for epoch in (4, 5):  # two that have it: no stray
        (folder / f"runtime-{epoch}.json").write_text("{}")
        write(folder, epoch)
    write(folder, 6)
    write(folder, 7)
    assert kinds(watch(folder, repo, **QUICK))[6] == "waiting"
    assert kinds(watch(folder, repo, **QUICK, need=["model"]))[6] == "saved"


def test_quiet_time(folder: Path, repo: Repository) -> None:
    """Nothing is committed that changed less than ``quiet`` seconds ago, however whole it looks."""
    write(folder, 1)
    stop = threading.Event()
    seen: list[tuple[float, Finding]] = []
    thread = threading.Thread(
        target=lambda: watch(
            folder, repo, quiet=0.4, interval=0.02, stop=stop, on_finding=lambda f: seen.append((time.monotonic(), f))
        )
    )
    thread.start()
    last = 0.0
    for life in range(2, 7):
        last = time.monotonic()
        write(folder, 1, life=life)
        time.sleep(0.1)
    stop.set()  # what is still within its quiet time is waited for
    thread.join(30)
    saved = [(when, finding) for when, finding in seen if finding.kind == "saved"]
    assert len(saved) == 1
    assert saved[0][0] - last >= 0.4
    assert life_of(repo, 1) == {6}


def test_a_file_that_changes_while_it_is_read(folder: Path, repo: Repository) -> None:
    """In the very middle of the save: nothing is committed; the next look finds what it has become."""
    write(folder, 1)
    real = FileSource.check_unchanged
    done: list[FileSource] = []

    def meddle(source: FileSource) -> None:
        if not done:
            done.append(source)
            write(folder, 1, life=2)
        real(source)

    with patch.object(FileSource, "check_unchanged", meddle):
        found = watch(folder, repo, **QUICK)
    assert done
    assert kinds(found) in ({1: "saved"}, {1: "changing"})
    watch(folder, repo, **QUICK)
    assert life_of(repo, 1) == {2}
    assert repo.checkpoint(1).generation == 1


def test_a_file_that_is_deleted_while_it_is_read(folder: Path, repo: Repository) -> None:
    """It was finished, it is open, it is saved."""
    write(folder, 1)
    real = FileSource.check_unchanged

    def meddle(source: FileSource) -> None:
        source.path.unlink(missing_ok=True)
        real(source)

    with patch.object(FileSource, "check_unchanged", meddle):
        assert kinds(watch(folder, repo, **QUICK)) == {1: "saved"}
    assert life_of(repo, 1) == {1}


class Down:
    """The repository's ``begin``, which fails so many times."""

    def __init__(self, repo: Repository, times: int) -> None:
        self.real: Callable[..., Any] = repo.begin
        self.times = times

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise TransientError("the store is down")
        return self.real(*args, **options)


def test_a_store_that_is_down(
    folder: Path, repo: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again for as long as it takes, and watching goes on; only at the end it is an error."""
    write(folder, 1)
    monkeypatch.setattr("ckptstore.watching.MAX_WAIT", 0.05)
    stop, saved = threading.Event(), []

    def hear(finding: Finding) -> None:
        saved.append(finding.kind)
        if finding.kind == "saved":
            stop.set()

    with caplog.at_level(logging.WARNING, "ckptstore"), patch.object(repo, "begin", Down(repo, 3)):
        watch(folder, repo, quiet=0.02, interval=0.01, stop=stop, on_finding=hear)
    assert saved[-1] == "saved"
    assert caplog.text.count("the store is down") == 3
    write(folder, 2)
    with patch.object(repo, "begin", Down(repo, 100)), pytest.raises(StoreError, match="down"):
        watch(folder, repo, **QUICK)
    assert repo.epochs() == [1]


def test_a_second_watcher(folder: Path, tmp_path: Path) -> None:
    """Of two watchers of one run the newer one saves; the older one ends instead of fighting."""
    quick = ["--once", "--quiet", "0.05", "--interval", "0.01", "--run", "burn"]
    other = [sys.executable, "-m", "ckptstore.cli", "watch", str(folder), str(tmp_path / "repo"), *quick]
    with ckptstore.open(tmp_path / "repo", run_id="burn") as old:
        write(folder, 1)
        assert kinds(watch(folder, old, **QUICK)) == {1: "saved"}
        write(folder, 2)
        assert "epoch 2: saved" in subprocess.run(other, capture_output=True, text=True, check=True).stdout
        write(folder, 3)
        with pytest.raises(ckptstore.FencedError):
            watch(folder, old, **QUICK)
        assert old.epochs() == [1, 2]


def test_the_trainer_is_not_disturbed(folder: Path, repo: Repository) -> None:
    """Nothing is written to its folder, nothing is opened for writing, and nobody waits for a pipe."""
    write(folder, 1)
    os.mkfifo(folder / "model-2.mpk.gz")
    before = {path.name: path.stat() for path in folder.iterdir()}
    real, modes = os.open, []

    def watched(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).startswith(str(folder)):
            modes.append(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        return real(path, flags, *rest, **more)

    with patch.object(os, "open", watched):
        watch(folder, repo, **QUICK)
    after = {path.name: path.stat() for path in folder.iterdir()}
    assert modes
    assert not any(modes)
    assert {n: (s.st_mtime_ns, s.st_ctime_ns, s.st_size) for n, s in after.items()} == {
        n: (s.st_mtime_ns, s.st_ctime_ns, s.st_size) for n, s in before.items()
    }


def test_hugging_face_tree(folder: Path, repo: Repository) -> None:
    """A tree is complete with its last file and the shards that its index names, and comes back as a tree."""
    tree = folder / "checkpoint-500"
    (tree / "global_step500").mkdir(parents=True)
    (tree / "model.safetensors.index.json").write_text('{"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}')
    header = b'{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'
    safetensors = len(header).to_bytes(8, "little") + header + b"abc"
    (tree / "m1.safetensors").write_bytes(safetensors)
    (tree / "global_step500" / "optim.json").write_text("{}")
    found = watch(folder, repo, **QUICK)
    assert kinds(found) == {500: "waiting"}
    assert "trainer_state.json" in found[0].reason
    (tree / "trainer_state.json").write_text("{}")
    found = watch(folder, repo, **QUICK)
    assert "m2.safetensors" in found[0].reason
    (tree / "m2.safetensors").write_bytes(safetensors)
    assert kinds(watch(folder, repo, **QUICK)) == {500: "saved"}
    assert repo.checkpoint(500).load("global_step500/optim.json") == b"{}"


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to a folder": lambda path: path.symlink_to("/tmp"),
    "a pipe": os.mkfifo,
    "a socket": _socket,
}


@pytest.mark.parametrize("what", sorted(UNREADABLE))
@pytest.mark.parametrize("name", ["checkpoint-5/optimizer.pt", "model-5.pt"])
def test_an_epoch_of_which_something_cannot_be_read(folder: Path, repo: Repository, name: str, what: str) -> None:
    """P2: it is not committed without it, it is not passed over in silence, and the others go on."""
    if name.startswith("checkpoint"):
        for epoch in (5, 6):
            (folder / f"checkpoint-{epoch}").mkdir()
            (folder / f"checkpoint-{epoch}" / "trainer_state.json").write_text("{}")
    else:
        (folder / "extra-6.pt").write_bytes(b"x")
    UNREADABLE[what](folder / name)
    found = import_files(folder, repo)
    assert kinds(found) == {5: "waiting", 6: "saved"}
    assert f"{name} cannot be read" in found[0].reason
    assert kinds(watch(folder, repo, **QUICK)) == {5: "waiting", 6: "there"}
    (folder / name).unlink()
    if name.startswith("checkpoint"):
        (folder / name).write_bytes(b"\x80\x02N.")
        assert kinds(watch(folder, repo, **QUICK)) == {5: "saved", 6: "there"}
        assert repo.checkpoint(5).records.keys() == {"trainer_state.json", "optimizer.pt"}


def test_a_tree_comes_whole_whatever_its_names(folder: Path, repo: Repository) -> None:
    """P2: names with line breaks or beyond UTF-8; and what lies deeper than is looked is not left out in silence."""
    tree = folder / "checkpoint-5"
    tree.mkdir()
    names = ["trainer_state.json", "new\nline.json", "\udcff.json", "Ü \u202e.json"]
    for name in names:
        (tree / name).write_text("{}")
    [found] = import_files(folder, repo)
    assert found.kind == "saved"
    assert sorted(found.files.values()) == sorted(f"checkpoint-5/{name}" for name in names)
    deep = folder / "checkpoint-6" / Path(*"abcdefghi")
    deep.mkdir(parents=True)
    (folder / "checkpoint-6" / "trainer_state.json").write_text("{}")
    (deep / "optimizer.pt").write_bytes(b"x")
    assert kinds(import_files(folder, repo)) == {5: "there", 6: "waiting"}


def test_import(folder: Path, repo: Repository) -> None:
    """All epochs of a folder, what is there already is skipped; a dry run says it all and saves nothing."""
    for epoch in (3, 1):
        write(folder, epoch)
    assert kinds(import_files(folder, repo, dry_run=True)) == {1: "due", 3: "due"}
    assert repo.epochs() == []
    assert kinds(import_files(folder, repo, epoch=3)) == {3: "saved"}
    assert list(kinds(import_files(folder, repo)).items()) == [(1, "saved"), (3, "there")]
    with pytest.raises(ckptstore.NotFoundError):
        import_files(folder, repo, epoch=2)
    with pytest.raises(ckptstore.NotFoundError):
        import_files(folder / "nowhere", repo)


def test_import_one_file(folder: Path, repo: Repository) -> None:
    """Under the number in its name, or the one that is given."""
    path = folder / "weights.mpk"
    path.write_bytes(pack(content(1, 1, "model", "bin")))
    with pytest.raises(ckptstore.InvalidArgumentError, match="which epoch"):
        import_files(path, repo)
    assert kinds(import_files(path, repo, epoch=4)) == {4: "saved"}
    assert repo.checkpoint(4).load("weights") == path.read_bytes()
    numbered = path.rename(folder / "model-9.mpk")
    assert kinds(import_files(numbered, repo)) == {9: "saved"}
    assert repo.checkpoint(9).load("model") == numbered.read_bytes()


def test_import_as_arrays(folder: Path, repo: Repository) -> None:
    """What is in the files; a format that cannot be read so is refused, and the others go on."""
    import numpy as np

    for epoch in (1, 2):
        np.savez(folder / f"model-{epoch}.npz", w=np.arange(4.0) * epoch)
    (folder / "model-3.pkl").write_bytes(b"\x80\x05N.")
    found = import_files(folder, repo, arrays=True)
    assert kinds(found) == {1: "saved", 2: "saved", 3: "refused"}
    assert np.asarray(repo.checkpoint(2).load("model")["w"]).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert kinds(import_files(folder, repo, arrays=True))[2] == "there"


def test_retention_of_the_watcher(folder: Path, tmp_path: Path) -> None:
    """What its policy pruned is not saved again in this life."""
    with ckptstore.open(tmp_path / "kept", keep=KeepLast(1)) as repo:
        for epoch in (1, 2):
            write(folder, epoch)
        watch(folder, repo, **QUICK)
        assert repo.epochs() == [2]


_ENDLESS = {"path": "a", "content": float("inf"), "size": 1, "mtime_ns": 1, "inode": 1}


@pytest.mark.parametrize(
    "value",
    [
        *(None, 7, {}, {"files": {"a": {}}}, {"layout": "x", "folder": "y", "files": []}),
        {"layout": "x", "folder": "y", "files": {"model": _ENDLESS}},
    ],
)
def test_an_origin_that_makes_no_sense(value: object) -> None:
    """P8: it comes from a store: nothing that is not as it should be is believed."""
    assert origin_of({KEY: value}) is None


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a//b", "a\0b", "."])
def test_an_origin_that_leads_elsewhere(path: str) -> None:
    """P8: no path that leads out of the folder to restore into."""
    file = {"path": path, "content": 1, "size": 1, "mtime_ns": 1, "inode": 1}
    assert origin_of({KEY: {"layout": "burn", "folder": "/x", "files": {"model": file}}}) is None


@pytest.mark.parametrize(
    "wrong", [{"quiet": -1}, {"interval": "2"}, {"layout": "keras"}, {"pattern": "x"}, {"need": "model"}]
)
def test_arguments_that_make_no_sense(folder: Path, repo: Repository, wrong: dict[str, Any]) -> None:
    """Refused before anything is looked at."""
    with pytest.raises(ckptstore.InvalidArgumentError):
        watch(folder, repo, **{**QUICK, **wrong})


def test_no_folder(tmp_path: Path, repo: Repository) -> None:
    """A file is refused, a folder that is not there only with ``once``: the trainer may make it yet."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ckptstore.InvalidArgumentError):
        watch(tmp_path / "file", repo, **QUICK)
    with pytest.raises(ckptstore.NotFoundError):
        watch(tmp_path / "none", repo, **QUICK)
    stop = threading.Event()
    stop.set()
    assert watch(tmp_path / "none", repo, quiet=0, interval=0, stop=stop) == []
