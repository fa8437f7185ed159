"""Leases: an attempt is alive, and what it builds on must not be swept from under it.

A writer puts its lease, *then* looks at the flags of what it wants to build on; a sweeper raises its flag, *then*
lists the leases. On a store with strong reads at least one of the two always sees the other.
All ages are differences between two times stamped by the store itself.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from ckptstore import keys
from ckptstore.errors import (
    CkptStoreError,
    CorruptionError,
    DeadlineError,
    ObjectNotFoundError,
    StoreError,
    TransactionError,
)
from ckptstore.manifest import MAX_LEASE, Lease, RankOf, decode_lease, encode_signed
from ckptstore.patience import GRACE_SECONDS, Patience, adopt
from ckptstore.stores.base import Store

HEARTBEAT = 60.0  # seconds between renewals
EXPIRY = 900.0  # a lease this old is dead
JOIN_SECONDS = GRACE_SECONDS + 2.0  # so long the end of a save waits for a renewal that is under way
SILENCE = 3 * HEARTBEAT  # a lease that was not renewed for so long is probably nobody's
READING = "reading"  # the state of a reader's lease
LAPSE = EXPIRY - 2 * HEARTBEAT  # a gap between renewals after which the lease may have been taken for dead

log = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class Sighting:
    """A lease as a sweeper or another writer sees it; ``lease`` is None when it cannot be read."""

    attempt: str
    modified: float
    lease: Lease | None


def read_leases(
    store: Store, attempts: str = "", wanted: Callable[[str, float], bool] = lambda attempt, modified: True
) -> list[Sighting]:
    """All leases now on the store. One that goes away meanwhile is left out: its owner has finished.

    Args:
        attempts: only those of attempts that begin so.
        wanted: which to read, by attempt and time of the last put.
    """
    sightings = []
    for info in list(store.list(keys.LEASES + attempts)):
        attempt = keys.parse_lease_key(info.key)
        if attempt is None or not wanted(attempt, info.modified):
            continue
        lease: Lease | None = None
        try:
            lease = decode_lease(store.get(info.key, 0, MAX_LEASE + 1), info.key)
        except ObjectNotFoundError:
            continue
        except CkptStoreError as error:
            if isinstance(error, StoreError):
                raise
            log.warning("%s", error)
        sightings.append(Sighting(attempt, info.modified, lease))
    return sightings


def is_condemned(store: Store, attempt: str) -> bool:
    """Whether a sweeper has flagged the attempt."""
    try:
        store.info(keys.condemned_key(attempt))
    except ObjectNotFoundError:
        return False
    return True


def seems_dead(sighting: Sighting, now: float) -> bool:
    """Whether an attempt has probably ended, so that its chunks are worth adopting.

    A wrong guess costs nothing but a few unused bytes: adopting only *refers* to chunks, and the
    lease of the adopter keeps them from being swept.
    """
    lease = sighting.lease
    if lease is None or lease.state == READING:  # a reader has no chunks, and is not hurried
        return False
    return lease.state == "abandoned" or now - sighting.modified > SILENCE or process_is_gone(lease)


class Mark(Protocol):
    """What tells a process from any other."""

    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def started(self) -> str: ...


def process_is_gone(lease: Mark) -> bool:
    """Whether the process that put the lease ran on this machine, and runs no more. False where nobody can tell."""
    here, _, _ = identity(os.getpid()).rpartition("/")
    there, _, _ = lease.started.rpartition("/")
    return bool(here) and lease.host == socket.gethostname() and here == there and identity(lease.pid) != lease.started


class HeldLease:
    """The lease of one attempt of ours, renewed by a thread of its own until it is released."""

    def __init__(self, store: Store, attempt: str, epoch: int, rank: RankOf | None = None) -> None:
        self._store = store
        self._key = keys.lease_key(attempt)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._patience = Patience()
        self._released = False
        self._thread: threading.Thread | None = None
        self.lapsed = False
        self.may_go = False
        """Whether others may take it away, once the attempt is through."""
        self.begun = 0.0  # the store's time of the first put
        self.renewed = 0.0  # … and of the last
        self._put_at = 0.0
        self.lease = Lease(
            attempt=attempt,
            epoch=epoch,
            base=None,
            uses=(),
            host=socket.gethostname(),
            pid=os.getpid(),
            started=identity(os.getpid()),
            state="active",
            beat=0,
            rank=rank,
        )

    def claim(self, base: str | None, uses: tuple[str, ...]) -> float:
        """Put the lease, naming what the attempt may refer to. Returns the store's time."""
        with self._lock:
            self.lease = msgspec.structs.replace(self.lease, base=base, uses=uses)
            before = self.renewed
            if self._put() - before > LAPSE and before:
                self.lapsed = True
            return self.renewed

    def start(self) -> None:
        """Start the heartbeat."""
        thread = threading.Thread(target=self._beat, name="ckptstore-lease", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # too many threads, or the interpreter is exiting: the commit renews it then
            log.warning("the lease of this save is not renewed while it runs: %s", error)

    def renew_if_due(self) -> bool:
        """Renew the lease unless that was done less than a heartbeat ago, by a clock that also counts sleep.

        Returns:
            Whether it was due: the heartbeat should have done it, so this process stood still, or its store did.
        """
        due = clock() - self._put_at >= HEARTBEAT
        if due:
            self.renew()
        return due

    def renew(self) -> None:
        """Renew the lease; sets ``lapsed`` if it may have been taken for dead in between.

        Raises:
            TransactionError: the lease is gone: a sweeper has ended this attempt.
        """
        with self._locked(LAPSE):
            try:
                before = self._store.info(self._key).modified
            except ObjectNotFoundError as error:
                raise self.gone() from error
            if self._put() - before > LAPSE:
                self.lapsed = True

    def stop_when_gone(self, owner: object) -> None:
        """Let the heartbeat end when nobody holds ``owner`` any more: a lease that is renewed for nobody never dies."""
        weakref.finalize(owner, self._stop.set).atexit = False

    def release(self) -> None:
        """Stop the heartbeat and remove the lease."""
        self.stop()
        with self._locked(JOIN_SECONDS):
            self._released = True
            self._store.delete(self._key)

    def now(self) -> float:
        """The store's time, as the last put and a local clock tell."""
        return self.renewed + clock() - self._put_at

    def abandon(self, reason: str = "") -> None:
        """Stop the heartbeat and say that the attempt has ended, so that the next one can adopt it. Any thread may."""
        self.stop()
        with self._locked(JOIN_SECONDS):
            if not self._released:
                self.lease = msgspec.structs.replace(self.lease, state="abandoned", reason=reason)
                self._put()

    def stop(self) -> None:
        self._stop.set()
        self._patience.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)  # a store that never returns must not keep us here

    @contextmanager
    def _locked(self, seconds: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=seconds):
            raise DeadlineError(f"the renewal of {self._key} hangs: the store does not answer", key=self._key)
        try:
            yield
        finally:
            self._lock.release()

    def _put(self) -> float:
        self.lease = msgspec.structs.replace(self.lease, beat=self.lease.beat + 1)
        before = clock()
        self._store.put(self._key, encode_signed(self.lease))
        self._put_at = before
        try:
            self.renewed = self._store.info(self._key).modified
        except ObjectNotFoundError as error:
            raise self.gone() from error
        self.begun = self.begun or self.renewed
        return self.renewed

    def gone(self) -> TransactionError:
        """The error of an attempt whose lease was taken away."""
        return TransactionError(
            f"the lease of this save ({self._key}) is gone: another process cleaned the attempt up. Save again",
            key=self._key,
            epoch=self.lease.epoch,
        )

    def _beat(self) -> None:
        adopt(self._patience)
        while not self._stop.wait(HEARTBEAT):
            try:
                self.renew()
            except TransactionError as error:
                if not self.may_go:
                    log.warning("%s", error)
                return  # the commit will find out for itself
            except (CorruptionError, StoreError) as error:
                log.warning("could not renew %s, will try again: %s", self._key, error)


def clock() -> float:
    """Seconds, by a clock that also counts sleep."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def identity(pid: int) -> str:
    """Machine boot, pid namespace and start time of a process; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if status[0] in "ZX":  # killed, and nobody has asked for its exit code yet
            return f"gone/{pid}"
        start = status[19]
    except FileNotFoundError:
        return f"gone/{pid}" if os.path.exists("/proc/self/stat") else ""
    except OSError:
        return ""
    return f"{boot}:{namespace}/{start}"
