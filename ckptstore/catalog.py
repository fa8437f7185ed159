"""What the repository holds: committed epochs, their manifests and indexes, and whether they are intact."""

from __future__ import annotations

import logging
import math
import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptstore import keys
from ckptstore.errors import CorruptionError, EpochNotFoundError, ObjectNotFoundError, TransientError
from ckptstore.locks import ForkLock
from ckptstore.manifest import (
    MAX_MANIFEST,
    MAX_MARKER,
    Manifest,
    Marker,
    RecordEntry,
    RecordIndex,
    decode_manifest,
    decode_marker,
)
from ckptstore.pipeline import Meter, Progress, side_by_side
from ckptstore.quarantine import reason_of
from ckptstore.reader import Problem, damaged_chunks, missing_chunks, read_index, sure
from ckptstore.stores.base import ObjectInfo, Store

log = logging.getLogger("ckptstore")

_CACHED_INDEXES = 16
_LOOKS = 20
_BATCH = 64  # checkpoints whose indexes are read side by side, and
_BATCH_CHUNKS = 20_000  # the references to chunks that are in memory at a time


@dataclass(frozen=True, slots=True, order=True)
class Committed:
    """A committed checkpoint, as one listing shows it. Whether it is set aside only a listing of all tells."""

    epoch: int
    generation: int
    quarantined: bool = field(default=False, compare=False)

    @property
    def key(self) -> str:
        return keys.manifest_key(self.epoch, self.generation)


@dataclass(frozen=True, slots=True)
class Skipped:
    """An epoch that ``latest()`` stepped over: which object was wrong, and why."""

    epoch: int
    generation: int
    key: str
    reason: str

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {self.reason}"


class Catalog:
    """Reads what is committed. Manifests are never cached: a key may be used again after a delete.

    Several threads may use it: a background save does, beside whatever the trainer asks.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = ForkLock()
        self._indexes: OrderedDict[tuple[str, str], RecordIndex] = OrderedDict()
        self._damaged: set[tuple[str, str]] = set()
        self._trusted: set[str] = set()  # chunks that this process has read and found good
        self._last: Manifest | None = None
        self.outcomes: list[str] = []
        """Keys of what this process, as a coordinator of ranks, has left for them to read."""
        self.settled = False
        """Whether the last attempt of this process has committed, so that it left no dead one behind."""

    def marker(self) -> Marker | None:
        """The marker; made up from a manifest if it alone is lost. None if there is no repository."""
        try:
            return sure(lambda: decode_marker(self.store.get(keys.MARKER, 0, MAX_MARKER + 1)))
        except ObjectNotFoundError:
            problem: CorruptionError | None = None
        except CorruptionError as error:
            problem = error
        for _, manifest in self.manifests(reversed(self.committed())):
            if isinstance(manifest, Manifest):
                log.warning("%s is lost or damaged; the manifests say which repository this is", keys.MARKER)
                return Marker(repository=manifest.repository, created=manifest.created, writer=manifest.writer)
        if problem is not None:
            raise problem
        return None

    def committed(self, epoch: int | None = None) -> list[Committed]:
        """All commits (of one epoch), oldest first. One listing; no manifest is read."""
        return sorted(self.commit_times(epoch))

    def survey(self, run: str) -> tuple[list[Committed], dict[int, float]]:
        """All commits, oldest first, and the writer numbers that a run has claimed, with their times. One listing.

        Args:
            run: as in the keys of claims.
        """
        infos = list(self.store.list(keys.MANIFESTS))
        claims: dict[int, float] = {}
        for info in infos:
            claim = keys.parse_writer_key(info.key)
            if claim is not None and claim[0] == run:
                claims[claim[1]] = info.modified
        return sorted(_commits(infos)), claims

    def commit_times(self, epoch: int | None = None) -> dict[Committed, float]:
        """All commits (of one epoch), and when each was put, by the store's clock. One listing."""
        return _commits(self.store.list(keys.MANIFESTS if epoch is None else keys.epoch_prefix(epoch)))

    def has_committed(self, manifest: Manifest, indexes: Iterable[tuple[RecordEntry, RecordIndex]]) -> None:
        """This process has just committed it: the next save need not read it again to build on it."""
        for entry, index in indexes:
            self._keep(entry, index)
        self._last = manifest
        self.settled = True

    def base(self, commits: list[Committed], *, without: int, indexes: bool = True) -> Manifest | None:
        """The newest of ``commits`` that a save of epoch ``without`` can build on: what it needs to know is legible.

        Whether it is still there is for the caller to find out; without ``indexes``, whether they are legible as well.

        Raises:
            FormatError: a newer version wrote a manifest; saving beside it would hide it.
        """
        for commit in reversed(commits):
            if commit.epoch == without or commit.quarantined:
                continue
            last = self._last
            try:
                manifest = last if last is not None and last.key == commit.key else self.manifest(commit)
                if (manifest.key, manifest.attempt) not in self._damaged:
                    for entry in manifest.records if indexes else ():
                        self.index(entry)
                    return manifest
            except (ObjectNotFoundError, CorruptionError):
                continue
        return None

    def manifest(self, commit: Committed) -> Manifest:
        """The verified manifest of a commit.

        Raises:
            ObjectNotFoundError: it was deleted meanwhile.
            CorruptionError, FormatError: as ``decode_manifest``.
        """
        return sure(lambda: decode_manifest(self.store.get(commit.key, 0, MAX_MANIFEST + 1), commit.key))

    def index(self, entry: RecordEntry) -> RecordIndex:
        """The verified index of a record. Named by content, so it can be cached."""
        cached = self._indexes.get((entry.key, entry.name))
        return cached if cached is not None else self.read_index(entry)

    def read_index(self, entry: RecordEntry) -> RecordIndex:
        """As ``index``, but never from the cache: what the store holds now."""
        index = read_index(self.store, entry)
        self._keep(entry, index)
        return index

    def _keep(self, entry: RecordEntry, index: RecordIndex) -> None:
        with self._lock:
            self._indexes[entry.key, entry.name] = index
            self._indexes.move_to_end((entry.key, entry.name))
            while len(self._indexes) > _CACHED_INDEXES:
                self._indexes.popitem(last=False)

    def exists(self, manifest: Manifest, *, if_damaged: bool = True) -> bool:
        """Whether exactly this checkpoint is still committed; ``if_damaged`` where its manifest tells no more."""
        try:
            return self.manifest(Committed(manifest.epoch, manifest.generation)).attempt == manifest.attempt
        except ObjectNotFoundError:
            return False
        except CorruptionError:
            return if_damaged

    def set_aside(self, commit: Committed, manifest: Manifest | None) -> str | None:
        """Why a checkpoint is quarantined; None if it is not. No request, unless a listing has shown a mark of it."""
        if not commit.quarantined:
            return None
        attempt = manifest.attempt if manifest is not None else ""
        return reason_of(self.store, commit.epoch, commit.generation, attempt)

    def quarantined(self) -> dict[int, str]:
        """All epochs that are set aside, ascending, each with the reason. One listing and two small reads for each."""
        marked = [commit for commit in self.committed() if commit.quarantined]
        found = {}
        for commit, manifest in self.manifests(marked):
            reason = self.set_aside(commit, manifest if isinstance(manifest, Manifest) else None)
            if reason is not None:
                found[commit.epoch] = reason
        return found

    @contextmanager
    def reading(self, manifest: Manifest) -> Iterator[None]:
        """Tell damage of a checkpoint from a delete that happened meanwhile, and remember damage."""
        try:
            yield
        except CorruptionError as error:
            if not self.exists(manifest):
                message = f"epoch {manifest.epoch} was deleted while it was being read"
                raise EpochNotFoundError(message, epoch=manifest.epoch) from error
            self.mark_damaged(manifest)
            error.epoch = manifest.epoch
            raise

    def problems(
        self,
        manifest: Manifest,
        *,
        deep: bool,
        progress: Progress | None = None,
        sample: float = 1.0,
        good: set[str] | None = None,
    ) -> list[Problem]:
        """What is wrong with a checkpoint: nothing, if it is intact.

        Shallow: manifest and indexes are read, chunks are looked up by name and size. Deep: every byte is read.
        A shallow look cannot see what an earlier deep one or a load found, so a checkpoint that is marked as
        damaged is always read in full.

        Args:
            sample: a share of the chunks, chosen by chance, that a deep look reads; all, if it has found damage before.
            good: keys of chunks that were read just now and found good: they are not read again, and more are added.
        """
        known = (manifest.key, manifest.attempt) in self._damaged
        good = set() if good is None else good
        deep, sample = deep or known, 1.0 if known else sample
        problems: list[Problem] = []
        indexes: list[RecordIndex] = []
        for entry in manifest.records:
            try:
                indexes.append(self.read_index(entry))
            except CorruptionError as error:
                problems.append(Problem(entry.key, error.message))
        chunks = {chunk.key: chunk for index in indexes for chunk in index.chunks}
        problems += missing_chunks(self.store, chunks.values())
        if deep:
            gone = {problem.key for problem in problems}
            there = [chunk for key, chunk in chunks.items() if key not in gone and key not in good]
            if sample < 1:
                there = random.sample(there, math.ceil(len(there) * sample))
            meter = Meter(progress, sum(chunk.raw_length for chunk in there))
            damaged = damaged_chunks(self.store, there, meter)
            good.update({chunk.key for chunk in there} - {problem.key for problem in damaged})
            problems += damaged
        if problems:
            self.mark_damaged(manifest)
        elif deep and sample == 1:
            self._damaged.discard((manifest.key, manifest.attempt))
        return problems

    def mark_damaged(self, manifest: Manifest) -> None:
        """Remember that a checkpoint is damaged, so that no later save builds on it unseen."""
        self._damaged.add((manifest.key, manifest.attempt))

    def check_reused(self, manifest: Manifest) -> bool:
        """Whether the chunks that a new checkpoint took over from earlier ones are good; each is read once a process.

        What it wrote itself was hashed while it was sent. Damage marks the checkpoint.
        """
        chunks = {chunk.key: chunk for entry in manifest.records for chunk in self.index(entry).chunks}
        unread = [c for key, c in chunks.items() if c.attempt != manifest.attempt and key not in self._trusted]
        if damaged_chunks(self.store, unread, Meter(None, 0)):
            self.mark_damaged(manifest)
            return False
        self._trusted.update(chunks)
        return True

    def newest_intact(
        self,
        *,
        deep: bool = False,
        run: str | None = None,
        need: Collection[str] = (),
        progress: Progress | None = None,
    ) -> tuple[Manifest | None, list[Skipped]]:
        """The newest intact checkpoint (of one run, if ``run`` is not None), and what was stepped over.

        Those that lack a record of ``need`` are passed by.

        Looks again when a checkpoint went away meanwhile: if it was replaced, its epoch is still there and
        neither an older one nor "none" would be the truth.

        Raises:
            FormatError: a newer version wrote a manifest; stepping over it would hide good epochs.
            TransientError: checkpoints are replaced as fast as they are looked at.
        """
        for _ in range(_LOOKS - 1):
            manifest, skipped, vanished = self._look_for_newest(deep, run, need, progress)
            if not vanished:
                return manifest, skipped
        manifest, skipped, vanished = self._look_for_newest(deep, run, need, progress)
        if vanished and manifest is None:
            raise TransientError("checkpoints are removed or replaced as fast as they are looked at: try again")
        return manifest, skipped

    def _look_for_newest(
        self, deep: bool, run: str | None, need: Collection[str], progress: Progress | None
    ) -> tuple[Manifest | None, list[Skipped], bool]:
        """One look from the newest down. The last item: a newer one than the result was deleted meanwhile."""
        skipped: list[Skipped] = []
        vanished = False
        for commit in reversed(self.committed()):
            try:
                manifest = self.manifest(commit)
            except ObjectNotFoundError:
                vanished = True
                continue
            except CorruptionError as error:
                skipped.append(Skipped(commit.epoch, commit.generation, commit.key, error.message))
                continue
            if (run is not None and manifest.run != run) or not all(map(manifest.record, need)):
                continue
            aside = self.set_aside(commit, manifest)
            if aside is not None:
                skipped.append(Skipped(commit.epoch, commit.generation, commit.key, f"it is quarantined: {aside}"))
                continue
            found = self.problems(manifest, deep=deep, progress=progress)
            if not found:
                return manifest, skipped, vanished
            if not self.exists(manifest):
                vanished = True
                continue
            first = found[0]
            reason = first.reason if first.key in first.reason else f"{first.key} {first.reason}"
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            skipped.append(Skipped(commit.epoch, commit.generation, first.key, reason + more))
        return None, skipped, vanished

    def manifests(self, commits: Iterable[Committed]) -> list[tuple[Committed, Manifest | CorruptionError]]:
        """Many manifests, read side by side; those deleted meanwhile are left out."""

        def read(commit: Committed) -> tuple[Committed, Manifest | CorruptionError] | None:
            try:
                return commit, self.manifest(commit)
            except ObjectNotFoundError:
                return None
            except CorruptionError as error:
                return commit, error

        return [pair for pair in side_by_side(self.store.traits.concurrency, read, commits) if pair is not None]

    def spent_attempts(self, epoch: int) -> frozenset[str] | None:
        """Attempts that a commit of ``epoch`` refers to; None if a manifest of it cannot be read.

        Nobody adopts those: an epoch that is saved again is often one that is damaged, by chunks of just these.
        """
        found: set[str] = set()
        for _, manifest in self.manifests(self.committed(epoch)):
            if isinstance(manifest, CorruptionError):
                return None
            found.update(manifest.attempts, (manifest.attempt,))
        return frozenset(found)

    def needs_of(self, manifests: Iterable[Manifest]) -> Iterator[tuple[Manifest, dict[str, int] | CorruptionError]]:
        """What each of many checkpoints needs: content key → size; or why an index of it cannot be read.

        Read side by side, and no more at a time than fit into some tens of MB.
        """
        waiting: list[Manifest] = []
        chunks = 0
        for manifest in manifests:
            waiting.append(manifest)
            chunks += sum(entry.chunks for entry in manifest.records)
            if len(waiting) >= _BATCH or chunks > _BATCH_CHUNKS:
                yield from zip(waiting, side_by_side(self.store.traits.concurrency, self._needs, waiting), strict=True)
                waiting, chunks = [], 0
        yield from zip(waiting, side_by_side(self.store.traits.concurrency, self._needs, waiting), strict=True)

    def _needs(self, manifest: Manifest) -> dict[str, int] | CorruptionError:
        needs = {entry.key: entry.stored_length for entry in manifest.records}
        try:
            for entry in manifest.records:
                needs.update((chunk.key, chunk.stored_length) for chunk in self.index(entry).chunks)
        except CorruptionError as error:
            return error
        return needs

    def contents(self, *, many: bool) -> Iterator[ObjectInfo]:
        """All below ``attempts/``, listed; in parts where there is much, because a store lists as a whole."""
        for prefix in [keys.ATTEMPTS + digit for digit in "0123456789abcdef"] if many else [keys.ATTEMPTS]:
            yield from self.store.list(prefix)

    def reach(self, manifest: Manifest) -> set[str]:
        """Keys of all objects that a checkpoint needs, its manifest aside. CorruptionError if an index is damaged."""
        reached = {entry.key for entry in manifest.records}
        for entry in manifest.records:
            reached.update(chunk.key for chunk in self.index(entry).chunks)
        return reached


def _commits(infos: Iterable[ObjectInfo]) -> dict[Committed, float]:
    """The commits in a listing, and when each was put."""
    times: dict[tuple[int, int], float] = {}
    aside: set[tuple[int, int]] = set()
    for info in infos:
        pair, mark = keys.parse_manifest_key(info.key), keys.parse_quarantine_key(info.key)
        if pair is not None:
            times[pair] = info.modified
        elif mark is not None:
            aside.add(mark)
    return {Committed(*pair, quarantined=pair in aside): time for pair, time in times.items()}
