"""What the tests with real processes start: one line of JSON a job on stdin, and each rank of it is a forked process.

Importing takes longer than saving, so it is done once. Ranks say what they do, one line of JSON each, on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import ckptstore
from ckptstore.stores import remote  # noqa: F401 (so that the children need not import it)
from tests.ranks.helpers import part_of
from tests.repository.helpers import CHUNK
from tests.torture.broken import broken_order


def say(**facts: Any) -> None:
    os.write(1, (json.dumps(facts) + "\n").encode())  # in one piece


def told(error: BaseException) -> dict[str, Any]:
    ranks = getattr(error, "ranks", {})
    return {"error": type(error).__name__, "message": str(error)[:400], "ranks": {str(r): w for r, w in ranks.items()}}


def live(job: dict[str, Any], rank: int) -> None:
    """Save the epochs, as one rank. One that fails ends it, unless it is to try again."""
    keep = ckptstore.KeepLast(job["keep"]) if "keep" in job else None
    repo = ckptstore.open(job["url"], storage_options=job.get("options"), chunk_size=CHUNK, retry=None, keep=keep)
    ranks, tries = job["ranks"], job.get("tries", 1)
    time.sleep(job.get("late", {}).get(str(rank), 0.0))
    for epoch in range(job["first"], job["last"] + 1):
        for number in range(1, tries + 1):
            try:
                with repo.begin(epoch, rank=rank, world_size=ranks, group=job["group"], timeout=job["timeout"]) as txn:
                    say(rank=rank, pid=os.getpid(), epoch=epoch, event="begun")
                    txn.write(f"rank-{rank}", part_of(epoch, rank, items=job["items"]))
                    if job.get("fail", {}).get(str(rank), 0) >= number:
                        raise RuntimeError("this rank fails")
            except Exception as error:  # noqa: BLE001 (told, whatever it is)
                say(rank=rank, epoch=epoch, event="failed", try_=number, **told(error))
                if number == tries:
                    return
            else:
                say(rank=rank, epoch=epoch, event="saved")
                break


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        children: dict[int, int] = {}
        gate, opener = os.pipe()  # what is older than a process, of its own launch or not, it leaves alone
        for rank in job.get("who", range(job["ranks"])):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.close(opener)
                    os.read(gate, 1)
                    live(job, rank)
                    status = 0
                finally:
                    os._exit(status)
            children[pid] = rank
        os.close(opener)
        os.close(gate)
        while children:
            pid, status = os.wait()
            say(event="ended", rank=children.pop(pid), code=os.waitstatus_to_exitcode(status))
        say(event="all ended")


if __name__ == "__main__":
    with broken_order(sys.argv[1] if sys.argv[1:] else None):
        main()
