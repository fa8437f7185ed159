"""StepFolders: a trainer's own folders, saved when it says that they are finished, and put back."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptstore import (
    AccessError,
    CorruptionError,
    EpochExistsError,
    EpochNotFoundError,
    FormatError,
    InvalidArgumentError,
    InvalidRecordError,
    NotFoundError,
    Repository,
)
from ckptstore.files import FileSource
from ckptstore.stores import MemoryStore
from ckptstore.watching.steps import StepFolders, put_back, step_folder

FILES = {
    "model.safetensors": b"m" * 70_000,
    "trainer_state.json": b"{}",
    "global_step/zero/rank 0.pt": b"",
    "rng.pth": b"r",
}


def write_step(root: Path, step: int) -> dict[str, bytes]:
    """A folder as a trainer leaves it; its files by path."""
    files = {path: data + str(step).encode() for path, data in FILES.items()}
    for path, data in files.items():
        place = step_folder(root, step) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return files


def files_of(place: Path) -> dict[str, bytes]:
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


class Slow(MemoryStore):
    """A store that waits with chunks until it may go, and may refuse them."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.arrived = threading.Event(), threading.Event()
        self.go.set()
        self.broken = False

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        if "/chunks/" in key:
            self.arrived.set()
            assert self.go.wait(60)
            if self.broken:
                raise AccessError("refused", key=key)
        super().put(key, data, if_absent=if_absent)


def rot(store: MemoryStore, epoch: int) -> None:
    catalog = Repository(store)._catalog
    for info in store.list(f"attempts/{catalog.manifest(catalog.committed(epoch)[-1]).attempt}/chunks/"):
        data = bytearray(store.get(info.key))
        data[-1] ^= 1
        store.delete(info.key)
        store.put(info.key, bytes(data))


@pytest.mark.parametrize("background", [True, False])
def test_there_and_back(tmp_path: Path, background: bool) -> None:
    """P7: every file, in its place, bit for bit, with what was said about it; the newest unless one is named."""
    store = MemoryStore()
    folders = StepFolders(Repository(store), background=background)
    files = {}
    for step in (10, 20):
        files[step] = write_step(tmp_path / "out", step)
        folders.save(tmp_path / "out", step, {"eval_loss": 1 / step})
    folders.settle()
    assert folders.committed == {step: step_folder(tmp_path / "out", step) for step in (10, 20)}
    again = StepFolders(Repository(store))
    ckpt = again.restore(tmp_path / "new")
    assert ckpt is not None
    assert (ckpt.epoch, ckpt.metadata["eval_loss"]) == (20, 1 / 20)
    again.restore(tmp_path / "new", 10)
    assert {step: files_of(step_folder(tmp_path / "new", step)) for step in (10, 20)} == files
    assert sorted(os.listdir(tmp_path / "new")) == ["checkpoint-10", "checkpoint-20"], "nothing else is left"


def test_nothing_there(tmp_path: Path) -> None:
    """P4: an empty repository restores nothing and makes nothing; a step that is not there is an error."""
    folders = StepFolders(Repository(MemoryStore()))
    assert folders.restore(tmp_path / "out") is None
    assert not (tmp_path / "out").exists()
    with pytest.raises(EpochNotFoundError):
        folders.restore(tmp_path / "out", 3)
    with pytest.raises(NotFoundError, match="checkpoint-3"):
        folders.save(tmp_path / "out", 3, {})


def test_the_trainer_may_delete_what_is_being_sent(tmp_path: Path) -> None:
    """A trainer rotates its folders while the last one is on its way: what was opened is saved whole."""
    store = Slow()
    folders = StepFolders(Repository(store))
    files = write_step(tmp_path, 1)
    store.go.clear()
    folders.save(tmp_path, 1, {})
    assert store.arrived.wait(60)
    shutil.rmtree(step_folder(tmp_path, 1))
    assert folders.committed == {}
    store.go.set()
    folders.settle()
    assert list(folders.committed) == [1]
    folders.restore(tmp_path)
    assert files_of(step_folder(tmp_path, 1)) == files


def test_a_file_that_changes_is_not_saved(tmp_path: Path) -> None:
    """P2: what is written to while it is read is a mixture: nothing is committed, and the files are closed."""
    store = Slow()
    repo = Repository(store)
    folders = StepFolders(repo)
    write_step(tmp_path, 1)
    store.go.clear()
    folders.save(tmp_path, 1, {})
    assert store.arrived.wait(60)
    (step_folder(tmp_path, 1) / "rng.pth").write_bytes(b"other")
    store.go.set()
    with pytest.raises(InvalidRecordError, match="changed while"):
        folders.settle()
    assert repo.epochs() == []
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    write_step(tmp_path, 1)
    folders.save(tmp_path, 1, {})
    folders.settle()
    assert repo.epochs() == [1]
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_failed_save_is_heard_of_by_the_next(tmp_path: Path) -> None:
    """P4: an error in the background is raised by the next call, once; the step is not among those that are durable."""
    store = Slow()
    folders = StepFolders(Repository(store))
    store.broken = True
    write_step(tmp_path, 1)
    write_step(tmp_path, 2)
    folders.save(tmp_path, 1, {})
    with pytest.raises(AccessError):
        folders.save(tmp_path, 2, {})
    assert folders.committed == {}
    store.broken = False
    folders.save(tmp_path, 2, {})
    folders.settle()
    assert list(folders.committed) == [2]


def test_forgiven_is_not_durable(tmp_path: Path) -> None:
    """With ``on_error="warn"`` training goes on, but a step that failed is not taken for saved."""
    store = Slow()
    for background in (True, False):
        folders = StepFolders(Repository(store, on_error="warn"), background=background)
        store.broken = True
        write_step(tmp_path, 1)
        folders.save(tmp_path, 1, {})
        folders.settle()
        assert folders.committed == {}


def test_damage_is_stepped_over_and_done_again(tmp_path: Path) -> None:
    """P3: the newest has rotted; the one before is restored, and the steps that are done again replace it."""
    store = MemoryStore()
    folders = StepFolders(Repository(store))
    for step in (1, 2):
        write_step(tmp_path / "out", step)
        folders.save(tmp_path / "out", step, {})
    folders.settle()
    rot(store, 2)
    repo = Repository(store)
    folders = StepFolders(repo)
    ckpt = folders.restore(tmp_path / "new")
    assert ckpt is not None
    assert ckpt.epoch == 1
    assert os.listdir(tmp_path / "new") == ["checkpoint-1"]
    files = write_step(tmp_path / "new", 2)
    folders.save(tmp_path / "new", 2, {})
    folders.settle()
    assert repo.verify().ok
    folders.restore(tmp_path / "third", 2)
    assert files_of(step_folder(tmp_path / "third", 2)) == files
    for step in (1, 2):
        rot(store, step)
    with pytest.raises(CorruptionError):
        StepFolders(Repository(store)).restore(tmp_path / "fourth")
    assert not (tmp_path / "fourth").exists()


def test_epochs_of_others_are_not_replaced(tmp_path: Path) -> None:
    """P5: a step that another run has saved is an error, unless ``replace`` says so; one's own is replaced."""
    store = MemoryStore()
    write_step(tmp_path, 1)
    own = StepFolders(Repository(store), background=False)
    for _ in range(2):
        own.save(tmp_path, 1, {})
    with pytest.raises(EpochExistsError):
        StepFolders(Repository(store), background=False).save(tmp_path, 1, {})
    StepFolders(Repository(store), background=False, replace=True).save(tmp_path, 1, {})
    assert Repository(store).checkpoint(1).generation == 3


def test_what_is_there_is_used_or_mended(tmp_path: Path) -> None:
    """A folder that a killed trainer has left half written is made whole; files of others in it stay."""
    store = MemoryStore()
    folders = StepFolders(Repository(store))
    files = write_step(tmp_path, 1)
    folders.save(tmp_path, 1, {})
    folders.settle()
    place = step_folder(tmp_path, 1)
    inode = (place / "model.safetensors").stat().st_ino
    folders.restore(tmp_path)
    (place / "rng.pth").write_bytes(b"cut")
    (place / "trainer_state.json").unlink()
    (place / "notes.txt").write_bytes(b"mine")
    folders.restore(tmp_path)
    assert files_of(place) == {**files, "notes.txt": b"mine"}
    assert (place / "model.safetensors").stat().st_ino == inode, "what was right is not written again"


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    """An epoch of states, or of somebody else's files, is not mistaken for one. Nor is a path that leads elsewhere."""
    repo = Repository(MemoryStore())
    repo.save(1, {"model": {"w": 1}})
    (tmp_path / "a").write_bytes(b"a")
    with FileSource(tmp_path / "a") as source:
        for step, path in ((2, "checkpoint-7/a"), (3, "checkpoint-3/../../a")):
            file = {"path": path, "content": 1, "size": 1, "mtime_ns": 0, "inode": 0}
            origin = {"layout": "hf", "folder": "/x", "files": {"a": file}}
            repo.save(step, {"a": source}, {"ckptstore.files": origin})
        file = {"path": "checkpoint-4/a", "content": 1, "size": 1, "mtime_ns": 0, "inode": 0}
        twice = {"layout": "hf", "folder": "/x", "files": {"a": file, "b": file}}
        repo.save(4, {"a": source, "b": source}, {"ckptstore.files": twice})
        odd = {"layout": "hf", "folder": "/x", "files": {"a": {**file, "path": "checkpoint-5/\ud800"}}}
        repo.save(5, {"a": source}, {"ckptstore.files": odd})
    with pytest.raises(InvalidArgumentError, match="no name that a file can have"):
        put_back(repo.checkpoint(5), tmp_path / "out")
    for step in (1, 2, 3, 4):
        with pytest.raises(FormatError, match="no trainer's folder"):
            put_back(repo.checkpoint(step), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_second_run_of_one_process_is_another_run(tmp_path: Path) -> None:
    """P5: it begins at an earlier step: what the first has saved stays, and its folder is not durable."""
    folders = StepFolders(Repository(MemoryStore()), background=False)
    for step in (2, 4, 4):  # the same step once more is the same run
        write_step(tmp_path, step)
        folders.save(tmp_path, step, {})
    assert folders.repo.checkpoint(4).generation == 2
    assert set(folders.committed) == {2, 4}
    with pytest.raises(EpochExistsError):
        folders.save(tmp_path, 2, {})
    assert set(folders.committed) == {4}
    assert folders.repo.checkpoint(2).generation == 1


def test_files_of_another_run_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P2: a trainer may read what lies beside the files of a checkpoint, and mix two runs."""
    folders = StepFolders(Repository(MemoryStore()), background=False)
    write_step(tmp_path, 1)
    folders.save(tmp_path, 1, {})
    folders.restore(tmp_path)
    assert caplog.text == ""
    (step_folder(tmp_path, 1) / "optimizer.pt").write_bytes(b"other")
    folders.restore(tmp_path)
    assert "['optimizer.pt']" in caplog.text


@pytest.mark.parametrize("step", [-1, "2", 1.5, None, True])
def test_steps_that_are_none(tmp_path: Path, step: Any) -> None:
    """Said as what it is."""
    with pytest.raises(InvalidArgumentError):
        StepFolders(Repository(MemoryStore())).save(tmp_path, step, {})
