"""Scale: what is asked of the store, and what is remembered, grows with the repository and no faster."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import scale
from ckptstore import KeepEvery, Repository
from ckptstore.stores import LocalStore, OpLog, TraceStore

WORK: dict[str, Callable[[Repository], object]] = {
    "epochs": lambda repo: repo.epochs(),
    "plan": lambda repo: repo.plan(KeepEvery(2)),
    "du": lambda repo: repo.du(),
    "gc, dry": lambda repo: repo.gc(dry_run=True),
    "gc": lambda repo: repo.gc(),
    "prune": lambda repo: repo.prune(KeepEvery(2)),
}


def counted(root: Path, epochs: int) -> dict[str, Counter[str]]:
    """Requests by verb, of each piece of work."""
    scale.Builder(root, epochs, 12).build()
    found = {}
    for name, work in WORK.items():
        log = OpLog()
        with Repository(TraceStore(LocalStore(root), log)) as repo:
            log.clear()
            work(repo)
        found[name] = Counter(event.verb for event in log.events)
    return found


def test_requests_grow_no_faster_than_the_repository(tmp_path: Path) -> None:
    """Four times the epochs: at most four times the requests, and a few for which size does not matter."""
    small, large = counted(tmp_path / "small", 61), counted(tmp_path / "large", 241)
    for name in WORK:
        for verb, count in large[name].items():
            assert count <= 4.4 * small[name][verb] + 8, (name, verb, small[name], large[name])
    assert large["epochs"].total() == 1
    assert large["plan"]["delete"] == large["gc, dry"]["delete"] == 0
    # An index of each record once for the plan and once more where its epoch goes, a manifest twice more at most.
    assert large["plan"]["get"] <= 241 * 7
    assert large["gc"]["delete"] >= 12 * 12


def test_what_is_remembered_grows_no_faster(tmp_path: Path) -> None:
    """Bytes of Python objects at the peak of a gc in which everything is needed: below 700 for each object."""
    peaks = []
    for epochs in (60, 240):
        root = tmp_path / str(epochs)
        scale.Builder(root, epochs, 40).build()
        with Repository(LocalStore(root)) as repo:
            repo.gc(dry_run=True)
            tracemalloc.start()
            repo.gc(dry_run=True)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / (180 * 42) < 700, peaks


def test_the_benchmark_measures_each_command(tmp_path: Path) -> None:
    """Small: each command succeeds in a repository that it has built, and the table goes into a document."""
    rows = scale.run([8, 24], 6, tmp_path, Console(file=io.StringIO()), ["ls", "gc", "prune"])
    assert [(row.command, row.epochs) for row in rows] == [(c, n) for n in (8, 24) for c in ("ls", "gc", "prune")]
    assert all(row.seconds > 0 and row.cpu > 0 and 20 < row.mib < 400 for row in rows)
    assert list(tmp_path.iterdir()) == []
    page = tmp_path / "page.md"
    page.write_text(f"before\n{scale.MARKS[0]}old\n{scale.MARKS[1]}\nafter\n")
    plain = json.loads(json.dumps([vars(row) for row in rows]))
    scale.write_docs({"command": "C", "machine": "M", "date": "D", "rows": plain}, page)
    text = page.read_text()
    assert text.startswith(f"before\n{scale.MARKS[0]}`C` on M, D; ")
    assert text.endswith(f"{scale.MARKS[1]}\nafter\n")
    assert "| `prune` |" in text
    assert "old" not in text


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    """Not a fast row."""
    with pytest.raises(RuntimeError, match="ckptstore ls ended with 3"):
        scale.measure("ls", ["ls"], tmp_path / "nothing")
