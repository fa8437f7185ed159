"""Fence: of all the writers that a run has had, only the newest commits.

A run that has a name (``run_id``) claims the next *writer number* before its first save. Its predecessor may have been
given up too early: it hangs, it is paused, its network is cut, and one day it goes on. Whoever finds a higher number
of the same run than its own is such a zombie, and its commit is refused.

Why none gets through: a successor puts its claim, *then* lists the manifests; a zombie puts its manifest, *then* lists
the claims (``commit.py``). On a store with strong reads at least one of the two always sees the other. If the zombie
sees the claim, it withdraws; if it does not, its manifest was there before the successor looked, and is an epoch of the
run like any other. To be seen for no extra request by whoever begins a save, claims lie beside the manifests.

Claims are never changed, and the highest of a run is never removed, so a number is never given twice.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import CorruptionError, FencedError, ObjectExistsError, ObjectNotFoundError, TransactionError
from ckptstore.lease import HEARTBEAT, identity
from ckptstore.locks import ForkLock
from ckptstore.manifest import MAX_CLAIM, WriterClaim, decode_claim, digest_of, encode_signed
from ckptstore.stores.base import ObjectInfo, Store

_RACERS = 1000  # more than will ever claim in the same moment

_session = (0, "")


def new_session() -> str:
    """What tells the writers of this process from those of any other, forked children that open their own included."""
    global _session
    if _session[0] != os.getpid():
        _session = os.getpid(), uuid.uuid4().hex
    return _session[1]


class Fence:
    """The writer number of a run in one repository. Without a name there is no number, and nobody is refused.

    All repositories that one process opens for a run share its number, and so do children that got theirs from it, by
    fork or in a pickle: what they have in common is the session.
    """

    def __init__(self, catalog: Catalog, run: str, session: str | None = None) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._digest = digest_of(run.encode())[:32]
        self.run = run
        self.session = session or new_session()
        self.number = 0
        """0 until it is claimed."""
        self._lock = ForkLock()

    def enter(self) -> list[Committed]:
        """Before a save: all commits, oldest first. One listing; a claim before the first save costs two requests more.

        Raises:
            FencedError: the run has a newer writer.
        """
        if not self.run:
            return self._catalog.committed()
        with self._lock:
            commits, claims = self._catalog.survey(self._digest)
            if self.number == 0:
                self.number = self._claim(max(claims, default=0))
                commits, claims = self._catalog.survey(self._digest)  # the claim first: see above
            self._check(claims)
            return commits

    def prove(self) -> None:
        """Prove that this is still the newest writer of its run. One listing. FencedError otherwise."""
        if self.run:
            self._check(self._claims())

    def prove_at(self, committed: float) -> None:
        """As ``prove``, after a commit that the store has stamped with the time ``committed``.

        One that was there for a minute when the next writer claimed was seen by it, and may be what it resumed from:
        then it is too late to withdraw it, and there is no need.
        """
        if self.run:
            self._check({number: time for number, time in self._claims().items() if time - committed < HEARTBEAT})

    def _claims(self) -> dict[int, float]:
        infos = self._store.list(keys.writer_prefix(self._digest))
        return {number: info.modified for _, number, info in _parsed(infos)}

    def _check(self, claims: Iterable[int]) -> None:
        newest = max(claims, default=0)
        if newest > self.number:
            raise FencedError(
                f"run {self.run!r} in {self._store.traits.url} has a newer writer (number {newest}, this one is "
                f"{self.number}): another process has taken it over, and this one must not save any more. To take it "
                "back, open the repository again",
                key=keys.writer_key(self._digest, newest),
            )

    def _claim(self, highest: int) -> int:
        """The number above ``highest``, or the highest itself if it is of this session."""
        for number in range(highest, highest + _RACERS):
            if number and self._is_ours(number):
                return number
            claim = WriterClaim(
                run=self.run,
                number=number + 1,
                session=self.session,
                host=socket.gethostname(),
                pid=os.getpid(),
                started=identity(os.getpid()),
            )
            try:
                self._store.put(keys.writer_key(self._digest, number + 1), encode_signed(claim), if_absent=True)
            except ObjectExistsError:
                continue  # another was faster: the next number
            return number + 1
        raise TransactionError(f"run {self.run!r}: numbers are claimed as fast as they are looked at: try again")

    def _is_ours(self, number: int) -> bool:
        key = keys.writer_key(self._digest, number)
        try:
            return decode_claim(self._store.get(key, 0, MAX_CLAIM + 1), key).session == self.session
        except (ObjectNotFoundError, CorruptionError):
            return False


def superseded(store: Store) -> list[ObjectInfo]:
    """Claims that a higher number of the same run has outdone. They refuse nobody any more: the highest does."""
    highest: dict[str, int] = {}
    found = list(_parsed(store.list(keys.WRITERS)))
    for digest, number, _ in found:
        highest[digest] = max(number, highest.get(digest, 0))
    return [info for digest, number, info in sorted(found) if number < highest[digest]]


def _parsed(infos: Iterable[ObjectInfo]) -> Iterable[tuple[str, int, ObjectInfo]]:
    for info in infos:
        parsed = keys.parse_writer_key(info.key)
        if parsed is not None:
            yield *parsed, info
