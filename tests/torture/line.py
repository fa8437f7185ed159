"""Campaign ``proxy``: saves through a proxy that misbehaves, before a real S3 server, with an outage in the middle.

Some 8 % of all requests are refused, reset (also after they were carried out), cut, or delayed; in the middle of the
campaign the server is away for a while. A save may succeed or end in an error of ours; what it said must be true.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import ckptstore
from ckptstore import CkptStoreError, KeepLast, Repository
from ckptstore.stores import open_store
from tests.proxy import Proxy
from tests.proxy_faults import misbehaving
from tests.torture.content import CHUNK, content, scribble
from tests.torture.ledger import Ledger
from tests.torture.work import Work

KEEP = 3
OUTAGE = 30.0  # seconds, of a campaign of full size
FULL = 200  # saves
LOOK_EVERY = 10
TRIES = 3  # of a save that fails, as a trainer would
TRANSPORTS = ("fsspec", "obstore")


def run(work: Work) -> None:
    """``size`` saves, by turns through each transport; the outage begins amid the save in the middle."""
    bucket = work.s3()
    outage = min(OUTAGE, OUTAGE * work.size / FULL)
    repositories = []
    with Proxy(bucket.endpoint) as proxy:
        options = {**bucket.storage_options, "endpoint_url": proxy.endpoint}
        for transport in TRANSPORTS:
            url = bucket.url()
            direct = open_store(url, storage_options=bucket.storage_options)
            repo = ckptstore.open(url, options, transport=transport, keep=KeepLast(KEEP), chunk_size=CHUNK)
            repositories.append((transport, repo, Ledger(work, direct, KEEP), direct))
        rules = misbehaving(work.seed)
        with proxy.play(*rules):
            for number in range(work.size):
                transport, repo, ledger, _ = repositories[number % len(repositories)]
                dice = work.dice(number)
                if number == work.size // 2:
                    _go_down(proxy, outage, dice)
                    work.count(faults=1)
                _save(work, repo, ledger, f"{transport}/{number}", 1 + number // len(repositories), dice)
                if number % LOOK_EVERY < len(repositories):
                    ledger.look(f"{transport}/{number}")
                work.done()
                if work.enough:
                    break
        work.count(faults=sum(rule.fired for rule in rules))
        for rule in rules:
            if rule.fired:
                work.note(rule.action.name, rule.fired)
        work.note(f"outage, seconds (amid save {work.size // 2})", round(outage))
        for transport, repo, ledger, direct in repositories:
            repo.close()
            ledger.sweep(f"{transport}/end")
            direct.close()
    if work.tally.faults < work.size / 10:
        work.blame("other", "end", f"{work.tally.faults} faults for {work.size} saves: this proves too little")


def _go_down(proxy: Proxy, seconds: float, dice: random.Random) -> None:
    """The server goes in a moment, when the save that begins now is under way, and comes back by itself."""
    threading.Timer(dice.uniform(0.0, 0.05), proxy.outage, (seconds,)).start()


def _save(work: Work, repo: Repository, ledger: Ledger, step: str, epoch: int, dice: random.Random) -> None:
    """Save an epoch as a trainer does: if it fails, try again."""
    for version in range(1, TRIES + 1):
        state: Any = content(epoch, version)
        ledger.begun.add((epoch, version))
        work.count(attempts=1)
        try:
            if dice.random() < 0.3:
                handle = repo.save_async(epoch, state, {"version": version})
                scribble(state)
                handle.result()
            else:
                repo.save(epoch, state, {"version": version})
        except CkptStoreError as error:
            ledger.refuse(type(error).__name__)
        except Exception as error:  # noqa: BLE001 (that is the question)
            work.blame("untyped", step, repr(error))
        else:
            ledger.commit(epoch, version)
            return
