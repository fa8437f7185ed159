"""Replication: a thread for each lower tier, which brings there what the first has committed and the tier wants.

What is still to come is never written down. It is what a listing of the one place shows and that of the other does not,
judged by identity (``Manifest.first``), so a process that is killed anywhere has nothing to forget: the next one looks,
and goes on. Each epoch arrives by ``mirror.py``, with a lease and a commit of its own there.

The newest epoch goes first. A tier that keeps up has one waiting anyway; one that does not would otherwise be later and
later with the only epoch that a resume asks for, while it is busy with some that its policy may never need.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ckptstore import pins
from ckptstore.catalog import Catalog, Committed
from ckptstore.copying import CopyTransaction
from ckptstore.errors import (
    EpochNotFoundError,
    FencedError,
    InvalidArgumentError,
    RepositoryNotFoundError,
    StoreError,
    StoreFullError,
)
from ckptstore.fence import Fence
from ckptstore.locks import ForkLock
from ckptstore.mirror import Mirror
from ckptstore.patience import GRACE_SECONDS, TICK_SECONDS, Patience, adopt
from ckptstore.pickling import Opener
from ckptstore.policies import PerRecord, Policy
from ckptstore.repository import Repository
from ckptstore.roll import Entry, Roll, lacking
from ckptstore.stores.opening import is_bucket
from ckptstore.telling import TierWatch

log = logging.getLogger("ckptstore")

FIRST_WAIT_SECONDS = 1.0  # between two attempts at a tier that fails; doubled each time
LONGEST_WAIT_SECONDS = 300.0


class _StoppedError(Exception):
    """The repository is being closed."""


@dataclass(frozen=True)
class Lower:
    """How a lower tier is opened, and what is wanted there.

    ``find`` opens it if it exists, ``make`` makes it otherwise. ``limit``: bytes a second; None: no limit.
    """

    url: str
    find: Callable[[], Repository]
    make: Callable[[], Repository]
    keep: Policy | PerRecord | None
    limit: float | None

    def with_options(self, storage_options: Mapping[str, Any]) -> Lower:
        """The same, with more or other storage options if it is a bucket."""
        if not is_bucket(self.url) or not isinstance(self.find, Opener) or not isinstance(self.make, Opener):
            return self
        find, make = (opener.with_options(storage_options) for opener in (self.find, self.make))
        return replace(self, find=find, make=make)


class Replicator:
    """Keeps one lower tier up to date, in a thread that is started when there is something to do. Thread-safe.

    Args:
        first: the repository of the first tier.
        roll: what that one holds.
        above: the lower tiers that are nearer than this one: a second source.
        overwrite: attempts that may replace what this tier has under their number.
        opened: by the id of its repository, the URL of each lower tier that is open.
    """

    def __init__(
        self,
        lower: Lower,
        first: Repository,
        roll: Roll,
        above: Sequence[Replicator],
        overwrite: set[str],
        opened: dict[str, str],
    ) -> None:
        self.keep = lower.keep
        self._lower = lower
        self._first = first
        self._roll = roll
        self._above = above
        self._overwrite = overwrite
        self._open_tiers = opened
        self._opening = ForkLock()
        self._member: Repository | None = None
        self._target: Roll | None = None
        self._begin_process()

    def _begin_process(self) -> None:
        self._pid = os.getpid()
        self._turn = threading.Condition()
        self._patience = Patience()
        self._thread: threading.Thread | None = None
        self._asked = self._done = 0  # looks that were asked for, and the last of them that found nothing to do
        self._hurry = self._stopped = self._dirty = False
        self._txn: CopyTransaction | None = None
        self._stuck: dict[tuple[int, str], tuple[str, Entry | None]] = {}
        self._proved: set[tuple[Committed, str]] = set()  # what is there with all its objects
        self._deleted: set[str] = set()
        self.opened = threading.Event()  # or has failed to open
        self.error: Exception | None = None
        self.failures = 0

    def _check_process(self) -> None:
        """In a forked child the thread has stayed behind: what its parent copies is none of its business."""
        if os.getpid() != self._pid:
            self._begin_process()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._lower.url if self._member is None else self._member.url

    # ---- what it is, and what it lacks ---------------------------------------------------------------------

    def repository(self, *, create: bool) -> Repository | None:
        """The repository of this tier. None if there is none, and not ``create``.

        Raises:
            InvalidArgumentError: it is the same place as another tier.
            StoreError: it does not answer.
        """
        with self._opening:
            if self._member is None:
                try:
                    repo = (self._lower.make if create else self._lower.find)()
                except RepositoryNotFoundError:
                    if create:
                        raise
                    return None
                other = self._open_tiers.setdefault(repo.id, self._lower.url)
                other = self._first.url if repo.id == self._first.id else other
                if repo.id == self._first.id or other != self._lower.url:
                    repo.close()
                    raise InvalidArgumentError(f"{self.url} and {other} are the same repository")
                self._target = Roll(repo._catalog)
                self._member = repo
            return self._member

    def look(self) -> Mapping[int, Entry]:
        """What it holds now, by epoch. StoreError if it does not answer."""
        repo = self.repository(create=False)
        return {} if repo is None or self._target is None else self._target.look()

    @property
    def roll(self) -> Roll | None:
        """What it holds, once it is open."""
        return self._target

    @property
    def known(self) -> Mapping[int, Entry] | None:
        """What it held when it was last looked at; None if it never was."""
        return self._target.last if self._target is not None else None

    def has(self, epoch: int) -> bool:
        """Whether it holds an epoch as far as this process knows. It is asked only where that would be a refusal."""
        if epoch not in (self.known or ()):
            return False
        with suppress(StoreError):
            return epoch in self.look()
        return True

    @property
    def catalog(self) -> Catalog | None:
        """Its catalog, once it is open."""
        return self._member._catalog if self._member is not None else None

    def waiting(self) -> list[Entry]:
        """Epochs of the first tier that are to come and have not: the newest first. Asks the first tier only."""
        return lacking(self._roll.look(), self.known or {}, self.keep, self._first.run_id)

    def awaited(self) -> list[Entry]:
        """As ``waiting``, and those that are there, but were not found to be whole by this process yet."""
        return lacking(self._roll.look(), self.known or {}, self.keep, self._first.run_id, self._doubted)

    def _doubted(self, entry: Entry) -> bool:
        return (entry.commit, entry.first.attempt) not in self._proved

    @property
    def stuck(self) -> dict[int, str]:
        """Epochs that cannot be copied as things are, each with the reason."""
        return {epoch: reason for (epoch, _), (reason, _) in list(self._stuck.items())}

    # ---- for the threads of others -------------------------------------------------------------------------

    def nudge(self, *, hurry: bool = False) -> int:
        """Something has changed: look, soon (``hurry``: now, also if it is failing). A number for ``wait``."""
        self._check_process()
        with self._turn:
            self._asked += 1
            self._hurry = self._hurry or hurry
            if self._thread is None and not self._stopped:
                thread = threading.Thread(target=self._work, name="ckptstore-tier", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # the very end of the interpreter: the next process goes on
                    log.warning("%s: no thread to copy with: %s", self.url, error)
            self._turn.notify_all()
            return self._asked

    @property
    def at_work(self) -> bool:
        """Whether this process copies to it."""
        return os.getpid() == self._pid and self._thread is not None and not self._stopped

    @property
    def busy(self) -> bool:
        """Whether it is just doing so, and well."""
        return self.at_work and self.error is None and self._done < self._asked

    def wait(self, asked: int, end: float, *, while_well: bool = False) -> bool:
        """Wait until that look has found nothing to do, or until ``end``, a time of ``time.monotonic``.

        Args:
            while_well: not for a tier that fails.
        """
        while (left := end - time.monotonic()) > 0:
            with self._turn:
                over = self._thread is None or self._stopped or (while_well and self.error is not None)
                if self._done >= asked or over:
                    break
                self._turn.wait(min(left, TICK_SECONDS))
        return self._done >= asked and not self._stuck

    def delete(self, epoch: int, attempts: set[str]) -> bool:
        """Delete an epoch here as well, also one that is just arriving. Whether it was there."""
        self._deleted |= attempts
        member = self.repository(create=False)
        with suppress(EpochNotFoundError):
            if member is not None:
                member.delete(epoch)
                return True
        return False

    def stop(self) -> None:
        """Begin nothing more. What is under way has a moment to end; what was sent of it is used by the next copy."""
        if os.getpid() != self._pid:
            return
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
        txn, thread = self._txn, self._thread
        if txn is not None:
            helper = threading.Thread(target=self._interrupt, args=(txn,), name="ckptstore-tier", daemon=True)
            helper.start()
            helper.join(GRACE_SECONDS)
        self._patience.end()
        if thread is not None and thread is not threading.current_thread():
            thread.join(GRACE_SECONDS)

    def close(self) -> None:
        """Close its repository."""
        if self._member is not None:
            self._member.close()

    # ---- the thread ----------------------------------------------------------------------------------------

    def _interrupt(self, txn: CopyTransaction) -> None:
        adopt(self._patience)
        try:
            txn.interrupt()
        except Exception as error:  # noqa: BLE001 (it is dead in any case, and found to be by its silence)
            log.info("%s: a copy was left behind: %s", self.url, error)

    def _work(self) -> None:
        adopt(self._patience)
        while True:
            with self._turn:
                while not self._stopped and self._done >= self._asked:
                    self._turn.wait()
                if self._stopped:
                    return
                asked = self._asked
            try:
                finished = self._step()
            except _StoppedError:
                return
            except Exception as error:  # noqa: BLE001 (whatever it is, also of a policy: it must not end the thread)
                if not self._failed(error):
                    return
                continue
            with self._turn:
                self.error, self.failures = None, 0
                if finished:
                    self._done = max(self._done, asked)
                self._turn.notify_all()

    def _failed(self, error: Exception) -> bool:
        """Say so, and wait for another attempt. Whether there is to be one."""
        if self._stopped:
            return False
        again = not isinstance(error, FencedError)
        seconds = min(FIRST_WAIT_SECONDS * 2 ** min(self.failures, 20), LONGEST_WAIT_SECONDS) * random.uniform(
            0.75, 1.0
        )
        with self._turn:
            self.error, self.failures = error, self.failures + 1
            self._hurry = False
            if not again:
                self._stopped = True
            self._turn.notify_all()
        self.opened.set()
        what = f"the next attempt in {seconds:.0f} s" if again else "no more is copied by this process"
        log.warning("copying to %s failed, %d in a row, %s: %s", self.url, self.failures, what, error)
        TierWatch(self._first._events, self.url).failed(error, self.failures)
        end = time.monotonic() + seconds
        while again and (left := end - time.monotonic()) > 0:
            with self._turn:
                if self._hurry or self._stopped:
                    break
                self._turn.wait(left)
        return again

    def _step(self) -> bool:
        """Look, and copy one epoch. Whether there is nothing more to do."""
        member = self.repository(create=True)
        assert member is not None and self._target is not None  # noqa: PT018
        first_look = self._target.last is None
        target = self._target.look()
        self.opened.set()
        todo = self._next(target)
        if todo is not None:
            found = self._copy(member, *todo)
            self._dirty = True
            target = self._target.look()
            self._proved |= {(e.commit, e.first.attempt) for e in target.values() if e.commit in found}
        if todo is None or self._dirty:
            self._share_pins(member, target)
            if self._dirty or first_look:
                self._prune(member)
            self._dirty = False
        return todo is None

    def _next(self, target: Mapping[int, Entry]) -> tuple[Catalog, Entry] | None:
        """The next epoch to copy, and where from."""
        places = [(self._first._catalog, self._roll.look())]
        places += [(above.catalog, above.known) for above in self._above if above.catalog and above.known]
        wanted = {(entry.epoch, entry.first.attempt) for _, entries in places for entry in entries.values()}
        for key, (_, met) in list(self._stuck.items()):
            if key not in wanted or target.get(key[0]) != met:  # gone, or somebody has cleared the way
                del self._stuck[key]
        for number, (catalog, entries) in enumerate(places):
            doubted = [self._doubted] if number == 0 else []  # what the first may let go of has to be sure
            for entry in lacking(entries, target, self.keep, self._first.run_id, *doubted):
                if (entry.epoch, entry.first.attempt) not in self._stuck:
                    return catalog, entry
        return None

    def _copy(self, member: Repository, source: Catalog, entry: Entry) -> set[Committed]:
        """Bring it there. What is there with all its objects now."""
        place = replace(self._first._place(member), told=self._begun, fence=self._fence(member))
        may_replace = entry.first.attempt in self._overwrite
        mirror = Mirror(source, place, limit=self._lower.limit, replace=may_replace)
        tell = TierWatch(self._first._events, self.url)
        try:
            copies = mirror.run(found := source.manifests([entry.commit])).epochs
        except StoreFullError:
            next(iter(member._reclaim.steps(entry.epoch)), 0)
            raise
        finally:
            self._txn = None
        for copy in copies:
            if copy.outcome in ("damaged", "conflict"):
                met = (self.known or {}).get(entry.epoch)
                self._stuck[entry.epoch, entry.first.attempt] = (copy.reason, met)
                log.warning("epoch %d cannot be copied to %s: %s", copy.epoch, self.url, copy.reason)
            if copy.outcome == "copied":
                tell.copied(found[0][1], copy.bytes_sent)
        if entry.first.attempt in self._deleted:
            with suppress(EpochNotFoundError):
                member.delete(entry.epoch)
        return {Committed(c.epoch, c.generation) for c in copies if c.outcome in ("copied", "there", "newer")}

    def _begun(self, txn: CopyTransaction) -> None:
        self._first._flights.add(txn)
        self._txn = txn
        if self._stopped:
            txn.interrupt()
            raise _StoppedError

    def _fence(self, member: Repository) -> Fence | None:
        """Once this process saves for a named run, it does so in all tiers, and is refused where a newer one does."""
        if not self._first.run_id or not self._first._has_saved:
            return None
        member._fence.enter()
        return member._fence

    def _share_pins(self, member: Repository, target: Mapping[int, Entry]) -> None:
        source = self._roll.last or {}

        def same(epoch: int) -> bool:
            ours, theirs = source.get(epoch), target.get(epoch)
            return ours is not None and theirs is not None and ours.first.attempt == theirs.first.attempt

        pins.share(self._first.store, member._catalog, same)

    def _prune(self, member: Repository) -> None:
        if self.keep is None:
            return
        member._resumed |= self._first._resumed
        try:
            member.prune(self.keep, deep=False)
        except Exception as error:  # noqa: BLE001 (also of a policy: what was copied is there)
            log.warning("pruning %s failed and will be tried again: %r", self.url, error)
