"""The programs that are killed, and those that race. Started once, it forks a new process for each order.

An order is a line of JSON on standard input, see ``ACTS``. What the children do, they say on standard output, a line
each: ``pid N``, ``resumed E``, ``begin E V``, ``at PHASE``, ``done E V``, ``refused E V ERROR``, ``untyped ...``; the
last line of an order is ``ended``. Importing once and forking makes a thousand kills affordable.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import s3fs  # noqa: F401  (before the fork: importing it takes longer than a life)

from ckptstore import CkptStoreError, EpochExistsError, KeepLast, Repository, TieredRepository, keys
from ckptstore.replication import Lower
from ckptstore.stores import open_store
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from tests.torture.broken import broken_order
from tests.torture.content import CHUNK, content, scribble, what_differs

KEEP, KEEP_BELOW = 3, 8
PHASES = ("lease", "chunk", "index", "manifest", "look", "release", "prune", "sweep")
TIER_PHASES = ("lease", "chunk", "index", "manifest", "look", "release", "prune", "done")
Order = dict[str, Any]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words))[:3000].replace("\n", " | ") + "\n").encode())


class Announcing(Store):
    """Says when a phase of a save begins, and goes on: somebody may be waiting for it with a knife."""

    def __init__(self, inner: Store, phase: str) -> None:
        self._inner = inner
        self._phase = phase
        self._committed = False

    @property
    def inner(self) -> Store:
        return self._inner

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        content_key = keys.parse_content_key(key)
        if key.startswith(keys.MANIFESTS):
            self._at("manifest")
        elif key.startswith(keys.LEASES):
            self._committed = False
            self._at("lease")
        elif content_key is not None:
            self._at("index" if content_key[1] == "records" else "chunk")
        self._inner.put(key, data, if_absent=if_absent)
        self._committed = self._committed or key.startswith(keys.MANIFESTS)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._inner.get(key, start, end)

    def info(self, key: str) -> ObjectInfo:
        return self._inner.info(key)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        if self._committed and prefix.startswith(keys.MANIFESTS):
            self._at("look")
        return self._inner.list(prefix, partial=partial)

    def delete(self, key: str) -> None:
        if key.startswith(keys.LEASES):
            self._at("release")
        elif key.startswith(keys.MANIFESTS):
            self._at("prune")
        elif keys.parse_content_key(key) is not None:
            self._at("sweep")
        self._inner.delete(key)

    def close(self) -> None:
        self._inner.close()

    def _at(self, phase: str) -> None:
        if phase == self._phase:
            say("at", phase)


def train(order: Order) -> None:
    """Resume, check, and save epoch after epoch, keeping the last ones; now and then replace the newest."""
    store = Announcing(open_store(order["url"], storage_options=order["options"]), order["phase"])
    go_on(Repository(store, keep=KeepLast(KEEP), chunk_size=CHUNK), order)


def tiers(order: Order) -> None:
    """The same in two tiers. It is the second whose phases are told; "done": a save has ended, its copy begins."""
    url, options = order["below"]
    below = Announcing(open_store(url, storage_options=options), order["phase"])

    def opener(create: bool) -> Callable[[], Repository]:
        return lambda: Repository(below, keep=KeepLast(KEEP_BELOW), create=create, chunk_size=CHUNK)

    lower = Lower(url, opener(False), opener(True), KeepLast(KEEP_BELOW), None)
    first = open_store(order["url"])
    go_on(TieredRepository(first, lower=[lower], keep=KeepLast(KEEP), chunk_size=CHUNK), order)


def go_on(repo: Repository, order: Order) -> None:
    """Until somebody ends it."""
    latest = repo.latest()
    epoch = 0 if latest is None else latest.epoch
    if latest is not None:
        wrong = what_differs(latest.load(), epoch, latest.metadata["version"])
        if wrong or latest.skipped:
            say("wrong", epoch, latest.metadata["version"], wrong, latest.skipped)
    say("resumed", epoch)
    dice = random.Random(order["seed"])
    save = saver(repo, order["background"])
    version = order["version"]
    while True:
        replace = epoch > 0 and dice.random() < 0.15
        epoch += not replace
        version += 1
        save(epoch, version, replace)
        if order["phase"] == "done":
            say("at", "done")


def saver(repo: Repository, background: bool) -> Callable[[int, int, bool], None]:
    """A function that saves, and says what it knows."""
    pending: list[tuple[Any, int, int]] = []

    def known() -> None:
        for handle, epoch, version in pending:
            told(epoch, version, handle.result)
        pending.clear()

    def save(epoch: int, version: int, replace: bool) -> None:
        state = content(epoch, version)
        metadata = {"version": version}
        say("begin", epoch, version)
        if not background:
            told(epoch, version, lambda: repo.save(epoch, state, metadata, replace=replace))
            return
        try:
            handle = repo.save_async(epoch, state, metadata, replace=replace)
        except CkptStoreError as error:  # that of the save before; this one has not begun
            known()
            say("refused", epoch, version, type(error).__name__)
            return
        scribble(state)  # the trainer goes on
        known()
        pending.append((handle, epoch, version))
        if version % 3 == 0:  # at times nobody saves again for a while: then it runs to its end
            known()

    return save


def told(epoch: int, version: int, act: Callable[[], object]) -> None:
    try:
        act()
    except CkptStoreError as error:
        say("refused", epoch, version, type(error).__name__)
        if not isinstance(error, EpochExistsError):
            say("note", repr(error))
    else:
        say("done", epoch, version)


def race(order: Order) -> None:
    """Get ready, wait for the shot (a signal), save the epoch."""
    with open_store(order["url"], storage_options=order["options"]) as store:
        repo = Repository(store, create=False, chunk_size=CHUNK)
        epoch, version = order["epoch"], order["number"]
        state = content(epoch, version)
        say("ready", os.getpid())
        signal.alarm(300)  # whoever should shoot may be dead
        signal.sigwait({signal.SIGUSR1})
        signal.alarm(0)
        told(epoch, version, lambda: repo.save(epoch, state, {"version": version}))


ACTS = {"train": train, "tiers": tiers, "race": race}


def fork(order: Order) -> int:
    child = os.fork()
    if child:
        return child
    try:
        ACTS[order["act"]](order)
    except BaseException:  # noqa: BLE001  (told to the parent, whatever it is)
        say("untyped", traceback.format_exc()[-2500:])
    finally:
        os._exit(0)  # also when nobody listens any more


def main() -> None:
    logging.getLogger("ckptstore").addHandler(logging.NullHandler())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    with broken_order(sys.argv[1] if len(sys.argv) > 1 else None):
        for line in sys.stdin:
            order = json.loads(line)
            children = [fork({**order, "number": number}) for number in range(order.get("processes", 1))]
            say("pid", *children)
            for child in children:
                os.waitpid(child, 0)
            say("ended")


if __name__ == "__main__":
    main()
