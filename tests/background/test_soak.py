"""Many background saves in one process: neither threads nor memory grow."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import ckptstore
from ckptstore import KeepLast
from tests.conftest import Count
from tests.repository.helpers import CHUNK, assert_same, make_state

SAVES = 200
ITEMS = 250_000  # 5 MB a state


def resident() -> int:
    """Bytes of this process that are in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured by /proc")
def test_soak(fast_folder: Path, count: Count) -> None:
    """P6: 200 background saves with pruning: one staging memory, no thread more, no memory that adds up."""
    before = threading.enumerate()
    with ckptstore.open(fast_folder / "repo", keep=KeepLast(2), chunk_size=CHUNK * 16) as repo:
        arena = repo._background.arena
        states = [make_state(seed, items=ITEMS) for seed in range(4)]
        seen: set[tuple[int, int]] = set()
        threads: list[int] = []
        watched: list[int] = []
        memory: list[int] = []
        for epoch in range(SAVES):
            handle = repo.save_async(epoch, states[epoch % 4])
            seen.add((arena.address, arena.nbytes))
            if epoch % 10 == 9:
                handle.result()
                for thread in threading.enumerate():
                    if thread.name == "ckptstore-save":
                        thread.join(60)
                names = [thread.name for thread in threading.enumerate() if thread not in before]
                watched.append(names.count("ckptstore-store"))  # kept for the next call, as many as there were at once
                threads.append(len(names) - watched[-1])
                memory.append(resident())
        assert len(seen) == 1, "the staging memory was not used again"
        assert len(set(threads)) == 1, threads
        assert max(watched) <= repo.store.traits.concurrency, watched
        settled = max(memory[:5])
        assert max(memory[5:]) - settled < 16 << 20, memory
        assert repo.epochs() == [SAVES - 2, SAVES - 1]
        latest = repo.latest(deep=True)
        assert latest is not None
        assert_same(latest.load(), states[(SAVES - 1) % 4])
    count("background saves in one process", SAVES)
