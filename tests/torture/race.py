"""Campaign ``race``: 16 processes save one epoch at the same shot, again and again; one wins, and its bits load."""

from __future__ import annotations

import os
import signal
from typing import Any

from ckptstore import CkptStoreError, Repository
from ckptstore.stores import open_store
from ckptstore.stores.base import Store
from tests.repository.helpers import assert_no_debris
from tests.torture.content import CHUNK, what_differs
from tests.torture.processes import Nursery
from tests.torture.work import Work

WRITERS = 16
S3_SHARE = 10  # one more round on S3 for so many on a folder
KEPT = 5  # epochs that are looked at again and again while others race


def run(work: Work) -> None:
    """``size`` rounds on a folder, and a tenth of that on S3."""
    rounds(work, "folder", str(work.folder / "repo"), None, work.size)
    if not work.enough:
        bucket = work.s3()
        rounds(work, "s3", bucket.url(), bucket.storage_options, max(1, work.size // S3_SHARE))


def rounds(work: Work, kind: str, url: str, options: dict[str, Any] | None, number: int) -> None:
    """So many epochs, each saved by all at once; afterwards all of them load, and nothing is left of the losers."""
    with (
        open_store(url, storage_options=options) as store,
        Nursery(work.folder / f"{kind}.log", work.broken) as nursery,
    ):
        repo = Repository(store, chunk_size=CHUNK)
        winners: dict[int, int] = {}
        for epoch in range(number):
            step = f"{kind}/{epoch}"
            nursery.order(act="race", url=url, options=options, epoch=epoch, processes=WRITERS)
            outcomes = _one_round(work, nursery, step)
            winners[epoch] = _judge(work, step, epoch, outcomes)
            _look(work, step, store, {e: v for e, v in winners.items() if e > epoch - KEPT})
            work.done()
            if work.enough:
                return
        _look(work, f"{kind}/end", store, winners)
        repo.gc(grace=0)
        try:
            assert_no_debris(store)
        except AssertionError as error:
            work.blame("other", f"{kind}/end", f"gc leaves debris: {str(error)[:500]}")


def _one_round(work: Work, nursery: Nursery, step: str) -> dict[int, str]:
    """Fire the shot when all are ready. What each has come to."""
    ready: list[int] = []
    outcomes: dict[int, str] = {}
    while (words := nursery.read())[0] != "ended":
        if words[0] == "ready":
            ready.append(int(words[1]))
            if len(ready) == WRITERS:
                for pid in ready:
                    os.kill(pid, signal.SIGUSR1)
        elif words[0] in ("done", "refused"):
            outcomes[int(words[2])] = words[0] if words[0] == "done" else words[3]
        elif words[0] == "untyped":
            work.blame("untyped", step, " ".join(words))
            _release(ready)
    return outcomes


def _release(ready: list[int]) -> None:
    """One of them has failed before the shot: do not keep the others waiting."""
    if len(ready) < WRITERS:
        for pid in ready:
            os.kill(pid, signal.SIGUSR1)


def _judge(work: Work, step: str, epoch: int, outcomes: dict[int, str]) -> int:
    """Exactly one winner, and for all others "exists". Returns the winner."""
    winners = [number for number, outcome in outcomes.items() if outcome == "done"]
    work.count(attempts=len(outcomes), committed=len(winners), refused=len(outcomes) - len(winners))
    work.count(faults=sum(outcome == "EpochExistsError" for outcome in outcomes.values()))
    if len(winners) != 1 or set(outcomes.values()) - {"done", "EpochExistsError"} or len(outcomes) != WRITERS:
        # All but one of several winners were told that their bits are safe, and they are not.
        work.blame("lost" if len(winners) > 1 else "other", step, f"epoch {epoch}: {outcomes}")
    return winners[0] if winners else -1


def _look(work: Work, step: str, store: Store, winners: dict[int, int]) -> None:
    """Every epoch has the bits of its winner."""
    repo = Repository(store, create=False, chunk_size=CHUNK)
    for epoch, version in winners.items():
        try:
            wrong = what_differs(repo.checkpoint(epoch).load(), epoch, version)
        except CkptStoreError as error:
            wrong = repr(error)
        work.count(checked=1)
        if wrong:
            work.blame("lost", step, f"epoch {epoch} of writer {version}: {wrong}")
