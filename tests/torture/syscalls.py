"""Campaign ``syscalls``: each system call of a local save, failing with each errno at each occurrence, by strace."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tests.mounts import strace
from tests.torture.work import Work

_BREAK = """
from contextlib import ExitStack
from tests.torture.broken import ORDERS
broken = ExitStack()
ORDERS[{name!r}](broken)
"""


def run(work: Work) -> None:
    """``size`` cases, chosen by dice; 0: all of them."""
    reason = strace.missing()
    if reason is not None:
        work.note(f"left out, because {reason}")
        return
    same, case = strace._same, strace._case

    def counted(loaded: dict[str, Any], expected: dict[str, Any]) -> bool:
        work.count(checked=1)
        return same(loaded, expected)

    def told(*arguments: Any) -> str | None:
        try:
            return case(*arguments)
        finally:
            work.done()

    with (
        patch.object(strace, "WORKER", _worker(work.broken)),
        patch.object(strace, "_same", counted),
        patch.object(strace, "_case", told),
    ):
        counts = strace.run_matrix(work.folder, work.size or None, work.seed, strict=False)
    work.count(attempts=counts.cases, faults=counts.hit, committed=counts.saved, refused=sum(counts.typed.values()))
    for name, number in counts.typed.items():
        work.note(f"refused: {name.partition(':')[0]}", number)
    for problem in counts.problems:
        work.blame("untyped" if "none of ours" in problem else "lost", problem.partition(":")[0], problem)


def _worker(broken: str | None) -> str:
    """The program that saves, broken as is asked for."""
    head, load, tail = strace.WORKER.partition("import ckptstore\n")
    return head + load + (_BREAK.format(name=broken) if broken else "") + tail
