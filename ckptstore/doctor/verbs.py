"""Checks of what a store owes: the verbs and who may use them, create-only puts, its clock, and reads after writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptstore import keys
from ckptstore.doctor.findings import Finding, what_failed
from ckptstore.doctor.patient import Patient
from ckptstore.errors import (
    AccessError,
    ObjectExistsError,
    ObjectNotFoundError,
    RepositoryNotFoundError,
    StoreError,
)
from ckptstore.pipeline import side_by_side
from ckptstore.stores import probe_conditional_put

_RACERS = 3
_RACES = 2
_ROUNDS = 3
_LATE_SECONDS = 3.0
"""How long something that a listing should show, or not show any more, is waited for."""

TICK = 0.02
"""Seconds by which a clock may lag behind itself: file systems stamp the time of the last tick."""
SKEW_WARNS = 10.0
SKEW_FAILS = 300.0
"""Seconds. S3 refuses requests beyond 15 minutes, and a clock that is 5 off is on its way there."""


def check_list(patient: Patient) -> Iterator[Finding]:
    """May we list?"""
    begun = time.perf_counter()
    try:
        count = sum(1 for _ in patient.store.list(keys.PROBES))
    except AccessError as error:
        yield _refused(patient, "list", error, "without listing, latest() cannot tell what is there")
        return
    except RepositoryNotFoundError as error:
        patient.nowhere = True
        yield Finding(
            "list", False, what_failed(error), "check the name of the bucket, or make it: ckptstore makes none"
        )
        return
    seconds = time.perf_counter() - begun
    old = f", with {count} probes that others left (gc removes them)" if count else ""
    yield Finding("list", True, f"allowed{old}", facts={"seconds": seconds, "probes": count})


_BODY = b"ckptstore doctor was here: delete me " + b"." * 100


def check_put(patient: Patient) -> Iterator[Finding]:
    """May we put?"""
    if patient.nowhere:  # and some servers would make the bucket for it
        yield Finding("put", False, "there is no such bucket")
        return
    try:
        patient.store.put(patient.key, _BODY)
    except AccessError as error:
        patient.may_put = False
        yield _refused(patient, "put", error, "nothing can be saved there; what is there can be read")
        return
    patient.may_put = True
    yield Finding("put", True, "allowed")


def check_get(patient: Patient) -> Iterator[Finding]:
    """May we get? Where nothing could be put, the answer for what is not there tells."""
    key = patient.key
    try:
        whole, part = patient.store.get(key, 0, 2 * len(_BODY)), patient.store.get(key, 5, 20)
    except RepositoryNotFoundError:
        yield Finding("get", False, "there is no such bucket")
    except ObjectNotFoundError as error:
        if patient.may_put:
            yield Finding("get", False, f"what was put cannot be found: {what_failed(error)}", _NOT_STRONG)
        else:
            yield Finding("get", True, "allowed: what is not there is said to be missing")
    except AccessError as error:
        yield _refused(patient, "get", error, "nothing can be restored from there")
    else:
        if (whole, part) == (_BODY, _BODY[5:20]):
            yield Finding("get", True, "allowed, also in ranges")
        else:
            said = f"{'a range of an object' if whole == _BODY else 'an object'} comes back with other bytes"
            yield Finding("get", False, said, "something between here and there edits it: use the store directly")


def check_delete(patient: Patient) -> Iterator[Finding]:
    """May we delete?"""
    if patient.nowhere:
        yield Finding("delete", False, "there is no such bucket")
        return
    try:
        patient.store.delete(patient.key)
    except AccessError as error:
        patient.may_delete = False
        yield _refused(patient, "delete", error, "nothing can be pruned, and leases and probes stay")
        return
    if patient.may_put:
        patient.may_delete = True
        yield Finding("delete", True, "allowed")
    else:
        yield Finding("delete", None, "could not be tried, because nothing could be put")


def check_conditional(patient: Patient) -> Iterator[Finding]:
    """Are create-only puts honoured, one after the other and in a race?"""
    if patient.may_put is not True:
        yield Finding("conditional puts", None, "could not be tried, because nothing could be put")
        return
    name, once = "conditional puts", probe_conditional_put(patient.store)
    unlink = "" if patient.local is None else " on this mount"
    if not once:
        patient.conditional = False
        yield _unconditional(patient, f"accepted and ignored{unlink}: a second create of a key was not refused")
        return
    winners = [_race(patient) for _ in range(_RACES)]
    facts = {"winners": winners, "racers": _RACERS}
    patient.conditional = max(winners) <= 1
    if not patient.conditional:
        said = f"honoured one after the other, but in a race {max(winners)} of {_RACERS} were told that they had won"
        yield _unconditional(patient, said, facts)
    elif patient.single_writer and patient.store.traits.create_only == "look":
        said = "made by a look and a rename, which two writers could both win"
        yield Finding(name, None, said, "keep the promise of --unsafe-single-writer, or use another place", facts)
    else:
        yield Finding(name, True, f"honoured, also by {_RACERS} who race", facts=facts)


def _unconditional(patient: Patient, said: str, facts: dict[str, object] | None = None) -> Finding:
    if patient.single_writer:
        advice = "keep the promise of --unsafe-single-writer: one process at a time"
        return Finding("conditional puts", None, said, advice, facts or {})
    advice = "use another server, or a newer version of it; with --unsafe-single-writer only where one process writes"
    return Finding("conditional puts", False, said, advice, facts or {})


def _race(patient: Patient) -> int:
    """How many of those who create one key at the same moment are told that they did."""
    key, start = keys.probe_key(), threading.Barrier(_RACERS)

    def create(number: int) -> bool:
        try:
            start.wait(5)
        except threading.BrokenBarrierError:
            pass  # too busy for a race: then it is a queue
        try:
            patient.store.put(key, f"{number} {key}".encode(), if_absent=True)
        except ObjectExistsError:
            return False
        return True

    try:
        return sum(side_by_side(_RACERS, create, range(_RACERS)))
    finally:
        _drop(patient, key)


@dataclass
class _Clock:
    """What several puts tell of the store's clock: bounds of how far it is ahead of this machine's, in seconds."""

    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)

    def add(self, before: float, modified: float, after: float) -> None:
        """One put: when it began, what the store stamped on it, and when it was over."""
        grain = 1.0 if modified == int(modified) else TICK  # most servers cut off fractions
        self.lows.append(modified - after)
        self.highs.append(modified + grain - before)

    @property
    def skew(self) -> float:
        """Seconds that the store is certainly ahead (below zero: behind); 0 where none can be proved."""
        low, high = min(self.lows), max(self.highs)
        return low if low > 0 else high if high < 0 else 0.0

    @property
    def spread(self) -> float:
        """Seconds by which its stamps certainly disagree with each other."""
        return max(0.0, max(self.lows) - min(self.highs))


def check_clock(patient: Patient) -> Iterator[Finding]:
    """Is the store's clock that of this machine, and is it one?"""
    if patient.may_put is not True:
        yield Finding("clock", None, "could not be looked at, because nothing could be put")
        return
    clock = _Clock()
    for _ in range(_ROUNDS if patient.may_delete else 1):
        key = keys.probe_key()
        try:
            before = time.time()
            patient.store.put(key, b"")
            after = time.time()
            clock.add(before, patient.store.info(key).modified, after)
        finally:
            _drop(patient, key)
    patient.ahead = clock.skew
    facts = {"skew_seconds": round(clock.skew, 3), "spread_seconds": round(clock.spread, 3)}
    if clock.spread > SKEW_WARNS:
        said = f"the stamps of the store differ by {clock.spread:.0f} s among themselves: it has several clocks"
        advice = "set the clocks of its servers (NTP): by them is judged whether a save is still alive"
        yield Finding("clock", None if clock.spread < SKEW_FAILS else False, said, advice, facts)
        return
    off = abs(clock.skew)
    said = f"the store is {off:.0f} s {'ahead of' if clock.skew > 0 else 'behind'} this machine"
    if off <= SKEW_WARNS:
        yield Finding("clock", True, "that of this machine, as far as can be seen" if off < 1 else said, facts=facts)
        return
    advice = (
        "set the clock of whichever is wrong (NTP). Saves and gc go by the store's clock alone and are safe, but S3 "
        "refuses requests that are 15 minutes off, and created times and dry runs of gc go by this machine's clock"
    )
    yield Finding("clock", None if off < SKEW_FAILS else False, said, advice, facts)


_NOT_STRONG = (
    "this store does not show what was just written, and ckptstore stands on that: use it directly, without a cache, "
    "mount or replica in between"
)


def check_listing(patient: Patient) -> Iterator[Finding]:
    """Is what was put, overwritten or deleted seen by the next request?"""
    if not (patient.may_put and patient.may_delete):
        yield Finding("reads after writes", None, "could not be tried, because something could not be put and deleted")
        return
    wrong: dict[str, list[float | None]] = {}
    for _ in range(_ROUNDS):
        _one_life(patient, wrong)
    if not wrong:
        yield Finding("reads after writes", True, "puts, overwrites and deletes are seen at once, listings included")
        return
    said = "; ".join(f"{what} ({_lateness(late)})" for what, late in wrong.items())
    yield Finding("reads after writes", False, said, _NOT_STRONG, {"stale": {k: len(v) for k, v in wrong.items()}})


def _one_life(patient: Patient, wrong: dict[str, list[float | None]]) -> None:
    store, key = patient.store, keys.probe_key()

    def listed(size: int | None) -> bool:
        found = {info.key: info.size for info in store.list(key)}
        return found.get(key) == size

    def read(body: bytes | None) -> bool:
        try:
            return store.get(key, 0, 8) == body
        except ObjectNotFoundError:
            return body is None

    try:
        store.put(key, b"1")
        _see(wrong, "a listing lacks what was just put", lambda: listed(1))
        _see(wrong, "what was just put cannot be read", lambda: read(b"1"))
        store.put(key, b"22")
        _see(wrong, "a listing shows what was before an overwrite", lambda: listed(2))
        _see(wrong, "a read gives what was before an overwrite", lambda: read(b"22"))
        store.delete(key)
        _see(wrong, "a listing shows what was just deleted", lambda: listed(None))
        _see(wrong, "what was just deleted can be read", lambda: read(None))
    finally:
        if key in store.pending:
            _drop(patient, key)


def _see(wrong: dict[str, list[float | None]], otherwise: str, look: Callable[[], bool]) -> None:
    """Note under ``otherwise`` how late ``look`` comes true (None: not within the time that is waited)."""
    begun = time.monotonic()
    if look():
        return
    late: float | None = None
    # Seen late once is enough to know: the other rounds only count.
    while otherwise not in wrong and time.monotonic() - begun < _LATE_SECONDS:
        time.sleep(0.1)
        if look():
            late = time.monotonic() - begun
            break
    wrong.setdefault(otherwise, []).append(late)


def _lateness(late: list[float | None]) -> str:
    seen = f"seen after {late[0]:.1f} s" if late[0] is not None else f"not seen within {_LATE_SECONDS:.0f} s"
    return f"{len(late)} of {_ROUNDS} times, {seen}"


def _drop(patient: Patient, key: str) -> None:
    """Delete a probe now if that is allowed; what stays is told at the end."""
    try:
        patient.store.delete(key)
    except AccessError:
        patient.may_delete = False


def _refused(patient: Patient, verb: str, error: StoreError, meaning: str) -> Finding:
    if patient.bucket is not None:
        advice = f"allow {patient.bucket.rights[verb]} to these credentials: {meaning}"
    else:
        advice = f"give this user the right to, or mount it for writing: {meaning}"
    return Finding(verb, False, what_failed(error), advice)


def advice_for(error: BaseException) -> str:
    """What to do about an error that no check expected."""
    failure = getattr(error, "failure", "")
    return _ADVICE.get(failure, "") if isinstance(error, StoreError) else ""


_ADVICE = {
    "space": "free some space there, for example by `ckptstore prune`, or raise the quota",
    "transient": "look at the server and the network in between; docs/retries.md has all limits of time",
    "throttled": "the store asks for fewer requests: look again when others use it less",
    "auth-refresh": "renew the credentials",
    "permanent": "check URL, credentials and permissions",
}
