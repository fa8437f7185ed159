"""Repair: put back what is damaged or missing, from wherever a good copy lies.

Objects are never changed once they are written, and a repair does not change them either: under the key of a chunk or
index belongs one content and no other, because the key holds its digest and an attempt that nobody else writes to. So
whoever puts it there puts the same, whether a reader, a save that refers to it or a second repair comes in between. A
put is all or nothing: a repair that is killed leaves the damage or the right bytes. While it works it holds a lease
that names the attempts of the checkpoint, put *before* it looks whether that is still committed; so a sweep spares
what is being put back, or the repair sees that it is not wanted any more (``sweep.py``).

The key of a manifest can be used again, after a delete, for another content. So no manifest is ever overwritten: what
its copy says is committed as the next generation of the epoch, as a replacement is, and the damaged one goes when that
is durable. In the same way an epoch comes back as a whole where nothing else helps.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeGuard

from ckptstore import keys, quarantine
from ckptstore.catalog import Catalog, Committed
from ckptstore.claim import Claim
from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    CorruptionError,
    EpochExistsError,
    EpochNotFoundError,
    ObjectExistsError,
    TransactionError,
)
from ckptstore.indexes import decode_index
from ckptstore.lease import HeldLease
from ckptstore.manifest import ChunkRef, Manifest, RecordEntry
from ckptstore.pipeline import Meter, Progress
from ckptstore.reader import Problem, damaged_chunks, fetch_chunk, missing_chunks, read_chunk, read_index
from ckptstore.remake import Remake
from ckptstore.spares import Spares
from ckptstore.sweep import delete_commits

log = logging.getLogger("ckptstore")

_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR)  # of this one object, and of no other

State = Literal["intact", "mended", "mendable", "damaged"]
Stands = Callable[[], bool]
Twin = tuple[Catalog, Manifest]


@dataclass(frozen=True, slots=True)
class Mend:
    """What became of one damaged or missing object.

    ``reason`` is what was wrong with it. ``source`` is where the good copy comes from, empty where none was found;
    ``failed`` is why that did not help, else empty.
    """

    key: str
    reason: str
    source: str = ""
    failed: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is good again (in a dry run: would be)."""
        return bool(self.source) and not self.failed


@dataclass(frozen=True, slots=True)
class EpochRepair:
    """What became of one committed epoch.

    ``state``: "intact", nothing was wrong; "mended", all of it is good again; "mendable", it would be (dry run);
    "damaged": something could not be mended. ``whole``: the records that can be restored now (in a dry run: then),
    ``lost``: those that cannot. ``objects``: what was wrong, one by one.
    """

    epoch: int
    generation: int
    state: State
    whole: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    objects: tuple[Mend, ...] = ()


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What ``Repository.repair`` found and did, epoch by epoch, ascending."""

    epochs: tuple[EpochRepair, ...]
    dry_run: bool = False
    marker: Mend | None = None
    """What became of ``ckptstore.json``; None if nothing was wrong with it."""
    absent: Mapping[int, str] = field(default_factory=dict)
    """Epochs of this repository that are not here, but in a source: its URL. No damage: a policy may have pruned them
    here, or somebody deleted them. But one whose manifest was lost shows nowhere else. A mirror brings them."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong any more (in a dry run: would be)."""
        return not self.of("damaged") and (self.marker is None or self.marker.ok)

    def of(self, state: State) -> list[int]:
        """The numbers of the epochs in that state."""
        return [row.epoch for row in self.epochs if row.state == state]

    @property
    def objects(self) -> tuple[Mend, ...]:
        """All that was wrong, each object once."""
        found = {mend.key: mend for row in self.epochs for mend in row.objects}
        return (*((self.marker,) if self.marker is not None else ()), *found.values())


@dataclass
class _Found:
    """What is wrong with a checkpoint, and the copies of indexes that are needed to see the rest."""

    entries: dict[str, RecordEntry] = field(default_factory=dict)
    chunks: dict[str, ChunkRef] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    indexes: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    records: dict[str, set[str]] = field(default_factory=dict)  # record → keys that it needs


class Repair:
    """One repair of one repository.

    Args:
        repository: its id.
        others: where else to look for good copies, in this order.
        dry_run: only find out what could be mended. The copies are read and proved all the same.
    """

    def __init__(
        self,
        catalog: Catalog,
        repository: str,
        others: Sequence[Catalog],
        *,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._catalog = catalog
        self._repository = repository
        self._others = tuple(others)
        self._store = catalog.store
        self._dry_run = dry_run
        self._progress = progress
        self._spares = Spares(catalog, others)
        self._remake = Remake(catalog, repository, self._spares)
        self._good: set[str] = set()
        self._done: dict[str, Mend] = {}
        Meter(progress, 0)  # refuses what cannot be called

    def run(self, epoch: int | None = None) -> tuple[EpochRepair, ...]:
        """Mend one epoch, or all, the newest first.

        Raises:
            EpochNotFoundError: there is no such epoch.
            StoreError: a store failed. What was mended stays so, the rest is as it was; call it again.
        """
        commits = self._catalog.committed(epoch)
        if epoch is not None and not commits:
            elsewhere = self.absent(epoch).get(epoch)
            rest = "" if elsewhere is None else f"; {elsewhere} has it, and a mirror from there brings it"
            raise EpochNotFoundError(f"there is no epoch {epoch} in {self._store.traits.url}{rest}", epoch=epoch)
        rows: list[EpochRepair] = []
        whole: set[int] = set()  # epochs of which a newer generation is whole
        for commit in reversed(commits):
            for _, manifest in self._catalog.manifests([commit]):
                row = self._mend_commit(commit, manifest, commit.epoch in whole)
                if row is not None:
                    rows.append(row)
                    whole.update([commit.epoch] if row.state != "damaged" else [])
        return tuple(sorted(rows, key=lambda row: (row.epoch, row.generation)))

    def absent(self, epoch: int | None = None) -> dict[int, str]:
        """Epochs (or this one) that a source holds of this repository, and this place does not: the source's URL.

        Of this repository are those that were committed here first, or where those that are here were. What is set
        aside in the source does not count.
        """
        if not self._others:
            return {}
        here = self._catalog.committed()
        known = {commit.epoch for commit in here}
        origins = {self._repository} | {m.first.repository for _, m in self._catalog.manifests(here) if _reads(m)}
        found: dict[int, str] = {}
        for other in self._others:
            there = {c.epoch: c for c in other.committed(epoch) if c.epoch not in known and c.epoch not in found}
            for commit, manifest in other.manifests(there.values()):
                if (
                    _reads(manifest)
                    and manifest.first.repository in origins
                    and other.set_aside(commit, manifest) is None
                ):
                    found[commit.epoch] = other.store.traits.url
        return dict(sorted(found.items()))

    def _mend_commit(
        self, commit: Committed, manifest: Manifest | CorruptionError, outdated: bool
    ) -> EpochRepair | None:
        if isinstance(manifest, CorruptionError):
            return self._mend_manifest(commit, manifest, outdated)
        if outdated:
            return None  # left by a replace that was interrupted: for gc, not for us
        row = self._mend(manifest)
        if row is None or row.state != "damaged":
            return row
        return self._bring_back(row, lambda: self._catalog.exists(manifest), self._remake.like(manifest))

    # ---- chunks and indexes --------------------------------------------------------------------------------

    def _mend(self, manifest: Manifest, *, if_damaged: bool = False) -> EpochRepair | None:
        """Mend the objects of a checkpoint in their places. None: it was deleted meanwhile."""
        found = self._look(manifest)
        if found.problems:
            self._catalog.mark_damaged(manifest)
            if not self._catalog.exists(manifest, if_damaged=if_damaged):
                return None
        if found.problems.keys() - self._done.keys():
            try:
                with self._held(manifest, if_damaged):
                    for key in sorted(found.problems.keys() - self._done.keys()):
                        self._mend_object(key, found)
            except TransactionError as error:
                log.info("epoch %d is left alone: %s", manifest.epoch, error)
                return None
        mends = [self._done[key] for key in sorted(found.problems)]
        bad = {mend.key for mend in mends if not mend.ok}
        lost = tuple(name for name, needed in found.records.items() if needed & bad)
        if mends and not bad and not self._dry_run and not if_damaged:
            self._catalog.problems(manifest, deep=True, good=self._good)  # takes the mark away
        state: State = "damaged" if bad else "intact" if not mends else "mendable" if self._dry_run else "mended"
        return EpochRepair(
            manifest.epoch,
            manifest.generation,
            state,
            tuple(name for name in found.records if name not in lost),
            lost,
            tuple(mends),
        )

    def _look(self, manifest: Manifest) -> _Found:
        """Read all of it, as a deep verify does; beyond a damaged index with the help of its copy."""
        found = _Found()
        for entry in manifest.records:
            found.entries[entry.key] = entry
            needed = found.records[entry.name] = {entry.key}
            try:
                index = read_index(self._store, entry)
            except CorruptionError as error:
                found.problems[entry.key] = error.message
                self._spares.learn([entry.digest])
                spare = self._spares.index(manifest, entry)
                if spare is None:
                    continue
                found.indexes[entry.key] = spare
                index = decode_index(spare[0], entry)
            found.chunks.update((chunk.key, chunk) for chunk in index.chunks)
            needed.update(chunk.key for chunk in index.chunks)
        gone = missing_chunks(self._store, found.chunks.values())
        skip = {*self._good, *self._done, *(problem.key for problem in gone)}
        there = [chunk for key, chunk in found.chunks.items() if key not in skip]
        rotten = damaged_chunks(self._store, there, Meter(self._progress, sum(chunk.raw_length for chunk in there)))
        self._good.update({chunk.key for chunk in there} - {problem.key for problem in rotten})
        found.problems.update((problem.key, _reason(problem)) for problem in (*gone, *rotten))
        shared = self._done.keys() & (found.chunks.keys() | found.entries.keys())  # seen to in another epoch
        found.problems.update((key, self._done[key].reason) for key in shared)
        self._spares.learn([found.chunks[key].digest for key in found.problems if key in found.chunks])
        return found

    @contextmanager
    def _held(self, manifest: Manifest, if_damaged: bool) -> Iterator[None]:
        """While something is put back: a lease that names the attempts of the checkpoint."""
        if self._dry_run:
            yield
            return
        lease = HeldLease(self._store, keys.new_attempt(), manifest.epoch)
        try:
            Claim(self._catalog, lease).take_all_of(manifest, if_damaged=if_damaged)
            lease.start()
            yield
        finally:
            try:
                lease.release()
            except CkptStoreError as error:
                log.warning("the lease of a repair is left to expire: %s", error)

    def _mend_object(self, key: str, found: _Found) -> None:
        entry, chunk = found.entries.get(key), found.chunks.get(key)
        spare = found.indexes.get(key) if chunk is None else self._spares.frame(chunk)
        mend = Mend(key, found.problems[key], spare[1] if spare is not None else "")
        if spare is not None and not self._dry_run:
            try:
                self._put(key, spare[0])
                if chunk is not None:
                    read_chunk(self._store, chunk, fetch_chunk(self._store, chunk))
                elif entry is not None:
                    read_index(self._store, entry)
            except CorruptionError as error:
                mend = replace(mend, failed=f"what was put there reads back wrong: {error.message}")
            except AccessError as error:
                if error.errno not in _IN_THE_WAY:
                    raise
                mend = replace(mend, failed=error.message)
        if mend.ok and not self._dry_run:
            self._good.add(key)
        self._done[key] = mend

    def _put(self, key: str, data: bytes) -> None:
        """Create it if it is missing; else replace it, because what is there is wrong."""
        with suppress(ObjectExistsError):
            self._store.put(key, data, if_absent=True)
            return
        self._store.put(key, data)

    # ---- manifests, and epochs as a whole ------------------------------------------------------------------

    def _mend_manifest(self, commit: Committed, error: CorruptionError, outdated: bool) -> EpochRepair | None:
        if outdated:
            if not self._dry_run:
                delete_commits(self._catalog, [commit], "a newer generation of its epoch is whole")
            mend = Mend(commit.key, error.message, "a newer generation of the epoch is whole: this one goes")
            return EpochRepair(commit.epoch, commit.generation, self._mended, objects=(mend,))
        damage = Mend(commit.key, error.message)
        lost = EpochRepair(commit.epoch, commit.generation, "damaged", objects=(damage,))
        left = self._remake.left(commit)
        if left is None:
            return None  # it has been replaced or deleted since

        def stands() -> bool:
            return self._remake.left(commit) == left

        copied = self._remake.same_manifest(commit)
        if copied is None:
            return self._bring_back(lost, stands, self._remake.same_content(commit))
        row = self._mend(copied.manifest, if_damaged=True)
        if row is None:
            return None
        row = replace(row, objects=(replace(damage, source=copied.source), *row.objects))
        if row.lost:
            failed = replace(damage, source=copied.source, failed="objects that it needs cannot be mended")
            row = replace(row, objects=(failed, *row.objects[1:]))
            return self._bring_back(row, stands, self._remake.same_content(commit))
        row = replace(row, state=self._mended)
        return row if self._dry_run else self._settled(row, lost, partial(self._remake.again, copied))

    def _bring_back(self, row: EpochRepair, stands: Stands, twins: Iterable[Twin]) -> EpochRepair | None:
        """Where objects could not be put back one by one: the epoch as a whole, from a copy that has all of it.

        Args:
            stands: whether it is still what it was before the copies were looked for.
        """
        commit = Committed(row.epoch, row.generation)
        for other, twin in twins:
            source = f"{other.store.traits.url}/{twin.key}"
            objects = tuple(mend if mend.ok else replace(mend, source=source, failed="") for mend in row.objects)
            names = tuple(entry.name for entry in twin.records)
            mended = replace(row, state=self._mended, whole=names, lost=(), objects=objects)
            if self._dry_run:
                after: EpochRepair | None = row if other.problems(twin, deep=True) else mended
            else:
                after = self._settled(mended, row, partial(self._remake.copy, commit, stands, other, twin))
            if after is not row:
                return after
        return row

    def _settled(self, mended: EpochRepair, otherwise: EpochRepair, act: Callable[[], Manifest]) -> EpochRepair | None:
        """``mended``, if the new generation is committed; None if the epoch is another's now."""
        aside = quarantine.reason_of(self._store, mended.epoch, mended.generation, "")
        if aside is not None:  # of any attempt: which one it will be is not known yet
            quarantine.put(self._store, mended.epoch, mended.generation + 1, "", aside)
        try:
            made = act()
        except (EpochExistsError, TransactionError) as error:
            log.info("epoch %d is left alone: %s", mended.epoch, error)
            return None
        except CorruptionError as error:
            log.warning("epoch %d could not be brought back: %s", mended.epoch, error)
            return otherwise
        return replace(mended, generation=made.generation)

    @property
    def _mended(self) -> State:
        return "mendable" if self._dry_run else "mended"


def _reads(manifest: Manifest | CorruptionError) -> TypeGuard[Manifest]:
    return isinstance(manifest, Manifest)


def _reason(problem: Problem) -> str:
    return problem.reason if problem.key in problem.reason else f"{problem.key} {problem.reason}"
