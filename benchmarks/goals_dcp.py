"""The goals of torch DCP with our writer and reader, beside DCP's own, computed from the samples of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.claims import OURS, SHOWN, Claim, beside, faster, ratio, size, unmeasured
from benchmarks.samples import Run

STATES = ("adam on 1 rank", "adam on 4 ranks")
RAW = "ckptstore, codec raw"
OF_FOLDER = "FileSystemWriter + fsync"
OF_S3 = "FsspecWriter"
CONNECTOR = "s3torchconnector"
WORDS = {"save": "save", "restore": "load", "stall": "stall of dcp.async_save"}


def folder(run: Run) -> Iterator[Claim]:
    """Goal 1: never slower on a folder; what compression takes of it is shown beside it."""
    for state in STATES:
        for work in ("save", "restore"):
            yield from _against(run, 1, work, "folder", state, OF_FOLDER)
            for mib, ours, theirs in beside(run, RAW, OF_FOLDER, work=work, where="folder", state=state):
                yield _shown(ratio(1, f"the same without compression, {size(mib)}", ours, theirs, 1))


def s3(run: Run) -> Iterator[Claim]:
    """Goal 2: at least three times as fast on S3 as what comes with torch; Amazon's connector is shown beside it."""
    for state in STATES:
        for work in ("save", "restore"):
            what = f"{WORDS[work]} on S3 beside {OF_S3}, {state}"
            found = list(beside(run, OURS, OF_S3, work=work, where="s3", state=state))
            for mib, ours, theirs in found:
                yield faster(2, f"{what}, {size(mib)}", ours, theirs, 3)
            if not found:
                yield unmeasured(run, 2, what, "≥ 3", work, OURS, OF_S3)
            for mib, ours, theirs in beside(run, OURS, CONNECTOR, work=work, where="s3", state=state):
                yield _shown(faster(2, f"the same beside {CONNECTOR}, {size(mib)}", ours, theirs, 1))


def stall(run: Run) -> Iterator[Claim]:
    """Goal 3: training stands still no longer than with DCP's own writer."""
    for state in STATES:
        for where, rival in (("folder", OF_FOLDER), ("s3", OF_S3)):
            yield from _against(run, 3, "stall", where, state, rival)


def _shown(claim: Claim) -> Claim:
    """The same number, of which nothing was promised."""
    return replace(claim, target="", verdict=SHOWN)


def _against(run: Run, goal: int, work: str, where: str, state: str, rival: str) -> Iterator[Claim]:
    what = f"{WORDS[work]} / that with {rival}, {'S3' if where == 's3' else where}, {state}"
    found = list(beside(run, OURS, rival, work=work, where=where, state=state))
    for mib, ours, theirs in found:
        yield ratio(goal, f"{what}, {size(mib)}", ours, theirs, 1)
    if not found:
        yield unmeasured(run, goal, what, "≤ 1", work, OURS, rival)


GOALS: dict[int, Callable[[Run], Iterator[Claim]]] = {1: folder, 2: s3, 3: stall}
