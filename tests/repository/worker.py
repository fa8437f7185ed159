"""What the processes of the race tests do: wait for the starting shot on stdin, act, report one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import ckptstore
from tests.repository.helpers import CHUNK, make_state, tiny_state


def save(repo: ckptstore.Repository, number: int, job: dict[str, Any]) -> object:
    make = tiny_state if job.get("tiny") else make_state
    repo.save(job["epoch"], make(number), replace=job.get("replace", False))
    return "saved"


def prune(repo: ckptstore.Repository, number: int, job: dict[str, Any]) -> object:
    for _ in range(job["rounds"]):
        repo.prune(ckptstore.KeepLast(job["keep"]))
        repo.gc()
    return "pruned"


def main() -> None:
    job = json.loads(sys.argv[1])
    number = job["number"]
    repo = ckptstore.open(job["url"], storage_options=job.get("options"), create=False, chunk_size=CHUNK)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    try:
        outcome = {"save": save, "prune": prune}[job["act"]](repo, number, job)
    except ckptstore.CkptStoreError as error:
        outcome = type(error).__name__
    sys.stdout.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
