"""Ranks that do not fit together: told apart, and told by name."""

from __future__ import annotations

import pytest

from ckptstore import AccessError, EpochExistsError, ObjectNotFoundError, RanksFailedError, TransactionError
from ckptstore.testing import Fault, FaultStore
from tests.ranks.helpers import SECONDS, assert_saved, assert_whole, part_of, save_all, save_part, started, together
from tests.ranks.test_ranks import SHORT, named, part_save
from tests.repository.helpers import open_repo


def test_one_that_fails_when_it_hears_of_an_earlier_end_is_not_waited_for() -> None:
    """It fails before its own attempt is there, and meets what it missed: rank 0 hears at once, and so does a retry."""
    store = started(2, 1)
    with pytest.raises(RuntimeError), open_repo(store).begin(2, rank=0, world_size=2, group="g") as txn:
        txn.write("rank-0", part_of(2, 0))
        raise RuntimeError("boom")
    denied = FaultStore(store, [Fault("list", "manifests/", error=lambda: AccessError("403: not this rank"))])
    with pytest.raises(AccessError):
        save_part(open_repo(denied), 2, 1, 2, group="g")
    with pytest.raises(RanksFailedError, match="not this rank") as told:
        save_part(open_repo(store), 2, 0, 2, group="g", timeout=SECONDS / 2)
    named({0: told.value}, 1)
    assert_saved(save_all(store, 2, 2, group="g"), 2)
    assert_whole(store, {1: 2, 2: 2})


def test_replace_on_some_ranks_only() -> None:
    """Rank 0 may not replace, and is not coming: the others say what it may be."""
    store = started(2, 1)
    found = together({
        0: part_save(open_repo(store), 1, 0, 2, group="g"),
        1: part_save(open_repo(store), 1, 1, 2, group="g", replace=True, timeout=SHORT),
    })  # fmt: skip
    assert isinstance(found[0], EpochExistsError)
    (error,) = named({1: found[1]}, 0)
    assert "pass replace=True on all ranks or on none" in str(error)


def test_two_processes_that_are_rank_0() -> None:
    """The others cannot know whom to join; both say so when their time is up."""
    store = started(2, 1)
    found = together(dict.fromkeys((0, 1), part_save(open_repo(store), 2, 0, 2, group="g", timeout=1.0)))
    errors = [error for error in found.values() if isinstance(error, RanksFailedError)]
    assert len(errors) == 2
    assert any("several processes call themselves rank 0 of group 'g'" in str(error) for error in errors)


def test_a_part_that_a_sweeper_took_away() -> None:
    """Rank 0 says what has happened, not that some object is missing."""
    store = started(2, 1)
    gone = FaultStore(store, [Fault("get", "parts/", error=lambda: ObjectNotFoundError("no such part"))])
    found = save_all({0: gone, 1: store}, 2, 2)
    assert isinstance(found[0], TransactionError)
    assert "another process cleaned the attempt up. Save again" in str(found[0])
    named({1: found[1]}, 0)
