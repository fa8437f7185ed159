"""Open files among the records of ``save`` and ``save_async``: read where they lie, never copied into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore import InvalidRecordError, Repository, StoreFullError
from ckptstore.files import FileSource
from ckptstore.stores import MemoryStore
from tests.repository.helpers import open_repo


class Small(MemoryStore):
    """A store with room for so many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        if sum(info.size for info in self.list()) + memoryview(data).nbytes > self.room:
            raise StoreFullError("no room", key=key)
        super().put(key, data, if_absent=if_absent)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "optimizer.bin"
    path.write_bytes(np.random.default_rng(1).bytes(3_000_000))
    return path


@pytest.mark.parametrize("background", [True, False])
def test_states_and_files_in_one_epoch(big: Path, background: bool) -> None:
    """P2: one commit; the file is a file record under the name that it had, and takes no memory of the arena."""
    repo = open_repo(MemoryStore())
    with FileSource(big) as source:
        records = {"model": {"w": np.arange(10)}, "optimizer": source}
        if background:
            repo.save_async(1, records).result()
            assert repo._background.arena.nbytes < 1_000_000
        else:
            repo.save(1, records)
    ckpt = repo.checkpoint(1)
    assert {name: record.kind for name, record in ckpt.records.items()} == {"model": "state", "optimizer": "file"}
    assert (ckpt.file_name("optimizer"), ckpt.load("optimizer")) == ("optimizer.bin", big.read_bytes())
    assert ckpt.holds_file("optimizer", big)
    assert ckpt.bytes_state == 3_000_000 + 80


@pytest.mark.parametrize("background", [True, False])
def test_a_file_that_changes_fails_the_save(big: Path, background: bool) -> None:
    """P2: what changed between the opening and the end is not committed."""
    repo = open_repo(MemoryStore())
    with FileSource(big) as source:
        big.write_bytes(b"other")
        with pytest.raises(InvalidRecordError, match=r"(shorter|changed) while it was being saved"):
            repo.save_async(1, {"f": source}).result() if background else repo.save(1, {"f": source})
    assert repo.epochs() == []


def test_a_full_store_gets_room_and_a_second_try(big: Path) -> None:
    """A save of files is a save: it is measured, old epochs make room, and it is tried again."""
    store = Small(8_000_000)
    with Repository(store, on_full="oldest", codec="raw") as repo:
        for epoch in (1, 2, 3, 4):
            big.write_bytes(np.random.default_rng(epoch).bytes(3_000_000))
            with FileSource(big) as source:
                repo.save_async(epoch, {"f": source}).result()
        assert repo.epochs()[-1] == 4
        assert repo.checkpoint(4).load("f") == big.read_bytes()


def test_a_file_inside_a_state_is_refused(big: Path) -> None:
    """P7: a file is a record of its own, not a value."""
    with FileSource(big) as source, pytest.raises(InvalidRecordError, match="FileSource"):
        open_repo(MemoryStore()).save(1, {"model": {"f": source}})


def test_its_size_can_be_asked_for(big: Path) -> None:
    """``preflight`` counts files too."""
    with FileSource(big) as source:
        assert open_repo(MemoryStore()).preflight({"f": source}).bytes_state == 3_000_000
