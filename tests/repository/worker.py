"""What the processes of the race tests do: wait for the starting shot on stdin, act, report one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ckptstore
from tests.repository.helpers import CHUNK, assert_same, make_state, tiny_state


def save(repo: ckptstore.Repository, number: int, job: dict[str, Any]) -> object:
    make = tiny_state if job.get("tiny") else make_state
    repo.save(job["epoch"], make(number), replace=job.get("replace", False))
    return "saved"


def race(repo: ckptstore.Repository, number: int, job: dict[str, Any]) -> object:
    """Save all epochs, each after a delay, against the others. How many were ours."""
    won = 0
    for epoch in range(1, job["rounds"] + 1):
        time.sleep(job["delay"])
        try:
            repo.save(epoch, tiny_state(number))
            won += 1
        except ckptstore.EpochExistsError:
            pass
    return won


def prune(repo: ckptstore.Repository, number: int, job: dict[str, Any]) -> object:
    for _ in range(job["rounds"]):
        repo.prune(ckptstore.KeepLast(job["keep"]))
        repo.gc()
    return "pruned"


def look(repo: ckptstore.Repository, number: int, job: dict[str, Any]) -> object:
    for _ in range(job["rounds"]):
        checkpoint = repo.latest()
        assert checkpoint is not None
        assert checkpoint.epoch == max(repo.epochs())
        assert_same(checkpoint.load(), make_state(checkpoint.epoch))
    return "looked"


def main() -> None:
    job = json.loads(sys.argv[1])
    number = job["number"]
    repo = ckptstore.open(job["url"], storage_options=job.get("options"), create=False, chunk_size=CHUNK)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    try:
        outcome = {"save": save, "prune": prune, "look": look, "race": race}[job["act"]](repo, number, job)
    except ckptstore.CkptStoreError as error:
        outcome = type(error).__name__
    sys.stdout.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
