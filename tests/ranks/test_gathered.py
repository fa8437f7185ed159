"""Parts that an engine gathers with collectives of its own: nobody polls, one commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptstore import (
    CorruptionError,
    EpochExistsError,
    InvalidArgumentError,
    KeepLast,
    Repository,
    TransactionError,
    keys,
)
from ckptstore.gathered import RankPart
from ckptstore.lease import read_leases
from ckptstore.stores import MemoryStore
from tests.ranks.helpers import part_of, whole
from tests.repository.helpers import assert_no_debris, assert_same, keys_of, open_repo

RANKS = 3


def write(repo: Repository, epoch: int, rank: int, ranks: int = RANKS, **how: Any) -> tuple[RankPart, bytes]:
    """What a rank does before the engine gathers."""
    part = repo.begin_part(epoch, rank=rank, world_size=ranks, **how)
    part.write(f"rank-{rank}", part_of(epoch, rank))
    return part, part.finish()


def save(repos: list[Repository], epoch: int, *, told: bool = True) -> Any:
    """A save as an engine makes it; ``told`` whether the ranks hear of the end."""
    written = [write(repo, epoch, rank) for rank, repo in enumerate(repos)]
    checkpoint = repos[0].commit_parts(epoch, [data for _, data in written], {"loss": 0.5})
    for part, _ in written if told else ():
        part.end()
    return checkpoint


@pytest.mark.parametrize("told", [True, False])
def test_gathered_parts_are_one_checkpoint(told: bool) -> None:
    """P2: all records, metadata, pruning; what does not change is not sent again; nothing is left, told or not."""
    store = MemoryStore()
    repos = [open_repo(store, keep=KeepLast(2)) for _ in range(RANKS)]
    manifest = None
    for epoch in (1, 2, 3):
        checkpoint = save(repos, epoch, told=told)
        manifest = checkpoint._manifest
        assert checkpoint.metadata == {"loss": 0.5}
        assert_same(checkpoint.load(), whole(epoch, RANKS))
        assert read_leases(store) == []
        assert_no_debris(store)
    assert open_repo(store).epochs() == [2, 3]
    assert manifest is not None
    assert manifest.bytes_reused == sum(part_of(3, rank)["frozen"].nbytes for rank in range(RANKS))


def test_an_engine_that_fails() -> None:
    """The parts are given up, the epoch before stays, and the next try sends nothing again."""
    store = MemoryStore()
    repos = [open_repo(store) for _ in range(RANKS)]
    save(repos, 1)
    for rank, repo in enumerate(repos):
        write(repo, 2, rank)[0].end(RuntimeError("the collective timed out"))
    assert open_repo(store).epochs() == [1]
    repos = [open_repo(store) for _ in range(RANKS)]
    written = [write(repo, 2, rank) for rank, repo in enumerate(repos)]
    assert sum(part.tally.chunks_sent for part, _ in written) == 0
    repos[0].commit_parts(2, [data for _, data in written])
    assert_same(open_repo(store).checkpoint(2).load(), whole(2, RANKS))
    open_repo(store).gc(grace=0)
    assert_no_debris(store)


@pytest.mark.parametrize("wrong", ["one missing", "one twice", "another epoch", "another world", "damaged", "none"])
def test_parts_that_do_not_belong_together(wrong: str) -> None:
    """P2, P3: refused, and nothing is committed; with the right ones it still can be."""
    store = MemoryStore()
    repos = [open_repo(store) for _ in range(RANKS)]
    parts = [write(repo, 1, rank)[1] for rank, repo in enumerate(repos)]
    changes: dict[str, Callable[[], list[bytes]]] = {
        "one missing": lambda: parts[:2],
        "one twice": lambda: [*parts[:2], parts[1]],
        "another epoch": lambda: [*parts[:2], write(repos[2], 2, 2)[1]],
        "another world": lambda: [*parts[:2], write(repos[2], 1, 2, ranks=4)[1]],
        "damaged": lambda: [*parts[:2], parts[2][:-9] + b"x" + parts[2][-8:]],
        "none": list,
    }
    with pytest.raises((InvalidArgumentError, TransactionError, CorruptionError)):
        repos[0].commit_parts(1, changes[wrong]())
    assert open_repo(store).epochs() == []
    repos[0].commit_parts(1, parts)
    assert_same(open_repo(store).checkpoint(1).load(), whole(1, RANKS))


def test_a_part_that_was_swept_is_not_committed() -> None:
    """P5: a rank was silent for too long and its part was collected: refused, by its flag or by what is missing."""
    store = MemoryStore()
    repos = [open_repo(store) for _ in range(RANKS)]
    parts = [write(repo, 1, rank)[1] for rank, repo in enumerate(repos)]
    open_repo(store).gc(grace=0)
    with pytest.raises(TransactionError):
        repos[0].commit_parts(1, parts)
    assert open_repo(store).epochs() == []


def test_an_epoch_that_exists() -> None:
    """Refused when the part begins; ``replace`` on part and commit makes it anew."""
    store = MemoryStore()
    repos = [open_repo(store) for _ in range(RANKS)]
    save(repos, 1)
    with pytest.raises(EpochExistsError):
        repos[1].begin_part(1, rank=1, world_size=RANKS)
    parts = [write(repo, 1, rank, replace=True)[1] for rank, repo in enumerate(repos)]
    assert repos[0].commit_parts(1, parts, replace=True)._manifest.generation == 2


def test_leaving_a_part_unfinished_gives_it_up() -> None:
    """As a context manager: by an exception, or without ``finish``."""
    store = MemoryStore()
    with pytest.raises(RuntimeError), open_repo(store).begin_part(1, rank=0, world_size=2) as part:
        part.write("x", {"x": 1})
        raise RuntimeError
    with open_repo(store).begin_part(1, rank=1, world_size=2) as part:
        part.write("y", {"y": 1})
    states = {sighting.lease.state for sighting in read_leases(store) if sighting.lease is not None}
    assert states == {"abandoned"}
    with pytest.raises(TransactionError):
        part.finish()
    assert [key for key in keys_of(store) if keys.parse_note_key(key)] == []


def test_nothing_is_written_after_finish(tmp_path: Path) -> None:
    """P2: the coordinator would not hear of it, and the checkpoint would be without."""
    repo = open_repo(MemoryStore())
    part = repo.begin_part(1, rank=0, world_size=1)
    part.write("x", {"x": 1})
    data = part.finish()
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(TransactionError, match="was finished: write before that"):
        part.write("y", {"y": 1})
    with pytest.raises(TransactionError, match="was finished: write before that"):
        part.write_file("z", tmp_path / "file")
    assert repo.commit_parts(1, [data]).load() == {"x": {"x": 1}}
    part.end()
