"""Scrub: read what was checked longest ago, as much as there is time for, and remember how far it came.

Manifests and indexes are few and are always read; they say which chunks there are. Of those only what a run has time
for is read, in the order of their digests, from where they were checked longest ago (``checked.py``).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from ckptstore import checked
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import CorruptionError, StoreError
from ckptstore.manifest import ChunkRef, Manifest
from ckptstore.pipeline import Meter, Progress
from ckptstore.reader import Problem, Read, read_chunks
from ckptstore.sweep import store_time
from ckptstore.throttle import Throttle
from ckptstore.verify import EpochHealth

log = logging.getLogger("ckptstore")

_BATCH_BYTES = 256 * 1024 * 1024
_BATCH_CHUNKS = 2000
_SAVE_SECONDS = 10.0
_DIGEST = 32  # bytes of a packed chunk that are its digest; 16 of its attempt and two lengths follow


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What a scrub has read and found.

    ``epochs``: the health of each, as far as it is known: damage that this or an earlier run found and that is still
    there. ``chunks_read``, ``bytes_read``: of this run, as stored; ``chunks``, ``bytes_stored``: of all there are.
    ``complete``: nothing is left that was to be read. ``oldest_seconds``: so long ago was the oldest check of any
    chunk, by the store's clock; None: some were never read since they were put. ``recorded``: how far it came could be
    noted in the repository.
    """

    epochs: tuple[EpochHealth, ...]
    chunks_read: int
    bytes_read: int
    chunks: int
    bytes_stored: int
    complete: bool
    oldest_seconds: float | None
    recorded: bool

    @property
    def ok(self) -> bool:
        """Whether no damage is known."""
        return all(health.ok for health in self.epochs)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All damaged objects, each once."""
        found = {problem.key: problem for health in self.epochs for problem in health.problems}
        return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a run may read: bytes as stored, seconds; and how fast, in bytes a second. None: no limit."""

    max_bytes: int | None = None
    max_seconds: float | None = None
    limit: float | None = None


@dataclass
class _Seen:
    """What manifests and indexes say: all chunks, packed and sorted by digest, and what is wrong above them."""

    chunks: list[bytes]
    problems: dict[Committed, list[Problem]] = field(default_factory=dict)
    states: dict[Committed, int] = field(default_factory=dict)


class Scrub:
    """One run.

    Args:
        older_than: leave out what was checked less than so many seconds ago.
        verification: read what was not checked since the verification began that is recorded as open, else open one.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        catalog: Catalog,
        budget: Budget,
        *,
        older_than: float = 0.0,
        verification: bool = False,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._budget = budget
        self._older_than = older_than
        self._verification = verification
        self._progress = progress
        self._clock = clock
        self._throttle = Throttle(budget.limit)
        self._begun = self._saved = clock()
        self._bad: dict[str, str] = {}
        self._cleared: set[str] = set()
        self._chunks_read = self._bytes_read = 0
        self._advanced = False
        self._recorded = True
        Meter(progress, 0)  # refuses what cannot be called

    def run(self) -> ScrubReport:
        """Read as much as the budget allows. Damage is reported, not raised; StoreError: what was read is noted."""
        now = self._now()
        self._record = checked.load(self._store, now)
        cutoff = now - self._older_than
        if self._verification:
            cutoff = self._record.round or now
            self._record = msgspec.structs.replace(self._record, round=cutoff)
        seen = self._look()
        due = sum(_unpack(packed).stored_length for packed in seen.chunks)
        self._meter = Meter(self._progress, min(due, self._budget.max_bytes or due))
        try:
            self._look_again(seen)
            complete = self._go_round(seen, now, cutoff)
            if complete and self._verification:
                self._record = msgspec.structs.replace(self._record, round=0.0)
        finally:
            self._save(now, ended=True)
        return self._report(seen, now, complete)

    def _now(self) -> float:
        try:
            return store_time(self._store)
        except StoreError as error:  # it may be read only, or full
            log.debug("the store does not tell its time: %s", error)
            return time.time()

    def _look(self) -> _Seen:
        found: set[bytes] = set()
        seen = _Seen([])
        for commit, manifest in self._catalog.manifests(self._catalog.committed()):
            if isinstance(manifest, CorruptionError):
                seen.problems[commit] = [Problem(commit.key, manifest.message)]
                seen.states[commit] = 0
                continue
            seen.problems[commit] = []
            seen.states[commit] = manifest.bytes_state
            for chunks in self._indexes(manifest, seen.problems[commit]):
                found.update(map(_pack, chunks))
            if seen.problems[commit] and not self._catalog.exists(manifest):
                del seen.problems[commit], seen.states[commit]
        seen.chunks = sorted(found)
        return seen

    def _indexes(self, manifest: Manifest, problems: list[Problem]) -> Iterator[tuple[ChunkRef, ...]]:
        for entry in manifest.records:
            try:
                yield self._catalog.read_index(entry).chunks
            except CorruptionError as error:
                problems.append(Problem(entry.key, error.message))

    # ---- chunks --------------------------------------------------------------------------------------------

    def _look_again(self, seen: _Seen) -> None:
        """Read what was found damaged before: it may have been mended, or be needed no more."""
        known = {found.key for found in self._record.problems}
        if known:
            self._cleared |= known
            self._read([[chunk for chunk in map(_unpack, seen.chunks) if chunk.key in known]])

    def _go_round(self, seen: _Seen, now: float, cutoff: float) -> bool:
        """From stretch to stretch, the oldest first. Whether all was read that was to be read."""
        while True:
            start, stop, at = checked.oldest(self._record.stretches)
            if at >= cutoff:
                return True
            first, last = _find(seen.chunks, start), _find(seen.chunks, stop)
            for groups, upto in self._batches(seen.chunks, first, last, stop):
                done = self._read(groups)
                self._advanced |= done > 0
                if done < len(groups):
                    upto = groups[done][0].digest
                self._note(start, upto, now)
                start = upto
                if done < len(groups):
                    return False
            if start != stop:
                return False  # the budget of bytes is used up

    def _batches(
        self, chunks: list[bytes], first: int, last: int, stop: str
    ) -> Iterator[tuple[list[list[ChunkRef]], str]]:
        """Parts of a stretch, each with the digest at which the next one begins; as far as the budget of bytes goes."""
        groups: list[list[ChunkRef]] = []
        nbytes = count = 0
        for digest, packed in groupby(chunks[first:last], key=lambda packed: packed[:_DIGEST]):
            group = [_unpack(one) for one in packed]
            more = sum(chunk.stored_length for chunk in group)
            over = self._budget.max_bytes is not None and self._bytes_read + nbytes + more > self._budget.max_bytes
            if groups and (over or nbytes + more > _BATCH_BYTES or count >= _BATCH_CHUNKS):
                yield groups, digest.hex()
                groups, nbytes, count = [], 0, 0
                over = self._budget.max_bytes is not None and self._bytes_read + more > self._budget.max_bytes
            if over and self._advanced:  # but something is read in every run, or a small budget would never end
                return
            groups.append(group)
            nbytes, count = nbytes + more, count + len(group)
        yield groups, stop

    def _read(self, groups: list[list[ChunkRef]]) -> int:
        """Read and check; how many of the groups, before the time was up."""
        done = 0

        def feed() -> Iterator[ChunkRef]:
            nonlocal done
            for group in groups:
                if self._is_late() and (done or self._advanced):
                    return
                for chunk in group:
                    self._throttle.wait(chunk.stored_length)
                    self._chunks_read += 1
                    self._bytes_read += chunk.stored_length
                    yield chunk
                done += 1

        def check(chunk: ChunkRef, read: Read) -> None:
            read(None)
            self._cleared.add(chunk.key)
            self._meter.add(chunk.stored_length)

        def damaged(chunk: ChunkRef, error: CorruptionError) -> None:
            self._bad[chunk.key] = error.message
            self._meter.add(chunk.stored_length)

        read_chunks(self._store, feed(), check, damaged)
        return done

    def _is_late(self) -> bool:
        return self._budget.max_seconds is not None and self._clock() - self._begun >= self._budget.max_seconds

    # ---- the record ----------------------------------------------------------------------------------------

    def _note(self, start: str, stop: str, now: float) -> None:
        stretches = checked.mark(self._record.stretches, start, stop, now)
        self._record = msgspec.structs.replace(self._record, stretches=stretches)
        if self._clock() - self._saved >= _SAVE_SECONDS:
            self._save(now)

    def _save(self, now: float, *, ended: bool = False) -> None:
        """Add what this run knows to what is recorded. A store that refuses costs the record, not the check."""
        self._saved = self._clock()
        try:
            other = checked.load(self._store, now)
            others = {found.key: found for found in (*other.problems, *self._record.problems)}
            ours = {key: checked.Found(key, reason) for key, reason in self._bad.items()}
            problems = {**{k: found for k, found in others.items() if k not in self._cleared}, **ours}
            self._record = msgspec.structs.replace(
                self._record,
                stretches=checked.merged(self._record.stretches, other.stretches),
                problems=tuple(found for _, found in sorted(problems.items())),
            )
            checked.save(self._store, self._record)
        except StoreError as error:
            if self._recorded:
                log.warning("what was checked could not be noted: %s", error)
            self._recorded = False

    def _report(self, seen: _Seen, now: float, complete: bool) -> ScrubReport:
        known = {found.key: found.reason for found in self._record.problems} | self._bad
        if known:
            self._blame(seen, known)
        epochs = tuple(
            EpochHealth(commit.epoch, commit.generation, seen.states[commit], tuple(problems))
            for commit, problems in sorted(seen.problems.items())
        )
        _, _, at = checked.oldest(self._record.stretches)
        sizes = [_unpack(packed).stored_length for packed in seen.chunks]
        return ScrubReport(
            epochs,
            self._chunks_read,
            self._bytes_read,
            len(sizes),
            sum(sizes),
            complete,
            max(now - at, 0.0) if at else None,
            self._recorded,
        )

    def _blame(self, seen: _Seen, known: dict[str, str]) -> None:
        """Which epochs need what is damaged; those that were deleted meanwhile are left out."""
        for commit, manifest in self._catalog.manifests(self._catalog.committed()):
            if isinstance(manifest, CorruptionError) or commit not in seen.problems:
                continue
            needed = {c.key for chunks in self._indexes(manifest, []) for c in chunks if c.key in known}
            if needed:
                seen.problems[commit] += [Problem(key, known[key]) for key in sorted(needed)]
                self._catalog.mark_damaged(manifest)


def _pack(chunk: ChunkRef) -> bytes:
    lengths = chunk.raw_length.to_bytes(8, "big") + chunk.stored_length.to_bytes(8, "big")
    return bytes.fromhex(chunk.digest + chunk.attempt) + lengths


def _unpack(packed: bytes) -> ChunkRef:
    names, lengths = packed[:-16].hex(), packed[-16:]
    raw, stored = int.from_bytes(lengths[:8], "big"), int.from_bytes(lengths[8:], "big")
    return ChunkRef(names[2 * _DIGEST :], names[: 2 * _DIGEST], raw, stored)


def _find(chunks: list[bytes], bound: str) -> int:
    """Where the first chunk from this digest on is."""
    return len(chunks) if bound == checked.END else bisect_left(chunks, bytes.fromhex(bound))
