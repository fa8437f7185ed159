"""Usage: what each epoch takes on the store, what it shares with others, and what deleting would free.

Reads manifests, indexes and listings, and no chunk. Of each object little is remembered (twenty bytes of its name, its
size, who needs it), so that memory grows with the objects, and not with how often epochs refer to them.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import CorruptionError
from ckptstore.lease import EXPIRY, read_leases
from ckptstore.manifest import Manifest, RecordEntry, RecordIndex
from ckptstore.pipeline import Meter, Progress, side_by_side
from ckptstore.retention import PruneReport
from ckptstore.stores.base import ObjectInfo

_BATCH_CHUNKS = 20_000  # references to so many chunks are in memory at a time, and
_BATCH_INDEXES = 256  # the indexes of so many records
_BATCH_MANIFESTS = 256
_ONE_LISTING = 50_000  # with more objects than this they are listed in parts
_OTHERS = (keys.MARKER, keys.MANIFESTS, keys.LEASES, keys.CONDEMNED, keys.PROBES, keys.RESERVE)
_SHARED = -1
_ALL = "all"
_SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class EpochUsage:
    """What one committed epoch takes, in bytes.

    ``bytes_state``: arrays and files, before the codec. ``bytes_stored``: all objects that it needs; other epochs need
    ``bytes_shared`` of it as well, and deleting it alone would free the rest, ``bytes_alone``. ``damaged`` says why
    what it needs is not fully known, else it is empty.
    """

    epoch: int
    generation: int
    bytes_state: int = 0
    bytes_stored: int = 0
    bytes_shared: int = 0
    bytes_alone: int = 0
    damaged: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a repository takes, in bytes; each object is counted once.

    ``bytes_state``: of all epochs. ``bytes_stored``: objects that epochs need. ``bytes_debris``: those that nothing
    needs (``gc`` frees them). ``bytes_in_progress``: of saves under way. ``bytes_unknown``: what an epoch that cannot
    be read might need. ``bytes_other``: marker, leases, pins, the reserve. ``objects_missing``: needed, but not there
    or of another size (see ``verify``). ``bytes_freed``: by the prune that ``plan`` describes (None: no policy given).
    """

    epochs: tuple[EpochUsage, ...]
    bytes_state: int = 0
    bytes_stored: int = 0
    bytes_debris: int = 0
    bytes_in_progress: int = 0
    bytes_unknown: int = 0
    bytes_other: int = 0
    objects: int = 0
    objects_debris: int = 0
    objects_missing: int = 0
    bytes_freed: int = 0
    plan: PruneReport | None = None

    @property
    def bytes_total(self) -> int:
        """All that lies there and is ours."""
        return self.bytes_stored + self.bytes_debris + self.bytes_in_progress + self.bytes_unknown + self.bytes_other


def usage(
    catalog: Catalog,
    *,
    victims: Collection[Committed] = (),
    thinned: Mapping[Committed, Collection[str]] | None = None,
    progress: Progress | None = None,
) -> Usage:
    """Count. Damage is reported, not raised; a store that fails raises StoreError.

    Args:
        victims, thinned: the commits, and the records of other commits, that a prune would delete:
            ``bytes_freed`` says what that would free.
        progress: called with ``(epochs done, epochs in all)``.

    Raises:
        FormatError: a newer version wrote a manifest or an index.
    """
    return _Count(catalog, victims, thinned or {}, progress).run()


class _Ledger:
    """Who needs which object. Epochs are numbered in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.sizes = array("q")
        self.owners = array("i")  # the epoch that needs it, or _SHARED
        self._last = array("i")  # the epoch that has named it last
        self.stays = bytearray()  # whether a prune leaves something that needs it
        self.seen = bytearray()  # whether it is there

    def __len__(self) -> int:
        return len(self.sizes)

    def need(self, attempt: str, digest: str, size: int, epoch: int, *, stays: bool) -> int:
        """An epoch needs this object. Its size if that epoch names it for the first time, else 0."""
        number = self._numbers.setdefault(_name(attempt, digest), len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(size)
            self.owners.append(epoch)
            self._last.append(epoch)
            self.stays.append(stays)
            self.seen.append(False)
            return size
        self.stays[number] |= stays
        if self._last[number] == epoch:
            return 0
        self._last[number] = epoch
        self.owners[number] = _SHARED
        return self.sizes[number]

    def find(self, attempt: str, digest: str) -> int | None:
        """The number of an object that some epoch needs."""
        return self._numbers.get(_name(attempt, digest))


def _name(attempt: str, digest: str) -> bytes:
    return bytes.fromhex(attempt[:16] + digest[:24])  # 160 bits of chance tell objects apart


@dataclass(frozen=True, slots=True)
class _Record:
    """A record of the epoch in row ``row``, whose index is to be read."""

    row: int
    entry: RecordEntry
    attempts: tuple[str, ...]
    stays: bool


class _Count:
    """One count of one repository."""

    def __init__(
        self,
        catalog: Catalog,
        victims: Collection[Committed],
        thinned: Mapping[Committed, Collection[str]],
        progress: Progress | None,
    ) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._victims = victims
        self._thinned = thinned
        self._progress = progress
        self._ledger = _Ledger()
        self._rows: list[EpochUsage] = []
        self._stored: list[int] = []
        self._unsure: set[str] = set()  # attempts of which an object may be needed that is not in the ledger
        self._manifests: dict[str, int] = {}
        self._loose: dict[str, tuple[int, int]] = {}  # what no epoch needs: attempt → objects, bytes
        self._sums: Counter[str] = Counter()

    def run(self) -> Usage:
        commits = self._catalog.committed()
        meter = Meter(self._progress, len(commits))
        for start in range(0, len(commits), _BATCH_MANIFESTS):
            part = commits[start : start + _BATCH_MANIFESTS]
            self._count_epochs(self._catalog.manifests(part))
            meter.add(len(part))
        self._weigh_objects()
        self._judge_loose(commits)
        return self._report()

    # ---- what is needed ------------------------------------------------------------------------------------

    def _count_epochs(self, found: Iterable[tuple[Committed, Manifest | CorruptionError]]) -> None:
        waiting: list[_Record] = []
        chunks = 0
        for commit, manifest in found:
            row = len(self._rows)
            self._stored.append(0)
            if isinstance(manifest, CorruptionError):
                self._rows.append(EpochUsage(commit.epoch, commit.generation, damaged=manifest.message))
                self._unsure.add(_ALL)
                continue
            self._rows.append(EpochUsage(commit.epoch, commit.generation, manifest.bytes_state))
            goes = self._thinned.get(commit, ())
            for entry in manifest.records:
                stays = commit not in self._victims and entry.name not in goes
                waiting.append(_Record(row, entry, manifest.attempts, stays))
                chunks += entry.chunks
                if len(waiting) >= _BATCH_INDEXES or chunks > _BATCH_CHUNKS:
                    self._count_records(waiting)
                    waiting, chunks = [], 0
        self._count_records(waiting)

    def _count_records(self, waiting: list[_Record]) -> None:
        indexes = side_by_side(self._store.traits.concurrency, self._index, waiting)
        for record, index in zip(waiting, indexes, strict=True):
            self._need(record, record.entry.attempt, record.entry.digest, record.entry.stored_length)
            if isinstance(index, RecordIndex):
                for chunk in index.chunks:
                    self._need(record, chunk.attempt, chunk.digest, chunk.stored_length)
            else:
                self._rows[record.row] = replace(self._rows[record.row], damaged=index.message)
                self._unsure.update(record.attempts)

    def _index(self, record: _Record) -> RecordIndex | CorruptionError:
        try:
            return self._catalog.index(record.entry)
        except CorruptionError as error:
            return error

    def _need(self, record: _Record, attempt: str, digest: str, size: int) -> None:
        self._stored[record.row] += self._ledger.need(attempt, digest, size, record.row, stays=record.stays)

    # ---- what is there -------------------------------------------------------------------------------------

    def _weigh_objects(self) -> None:
        for info in self._listed():
            content = keys.parse_content_key(info.key)
            if content is None:
                self._weigh_other(info)
                continue
            attempt, _, digest = content
            number = self._ledger.find(attempt, digest)
            if number is not None:
                self._ledger.seen[number] = info.size == self._ledger.sizes[number]
            elif attempt in self._unsure or _ALL in self._unsure:
                self._sums["bytes_unknown"] += info.size
            else:
                self._note_loose(attempt, info.size)
        for info in self._store.list("", partial=True):
            self._note_loose(_SCRATCH, info.size)

    def _weigh_other(self, info: ObjectInfo) -> None:
        if keys.parse_manifest_key(info.key) is not None:
            self._manifests[info.key] = info.size
        elif keys.is_ours(info.key):
            self._sums["bytes_other"] += info.size

    def _note_loose(self, attempt: str, size: int) -> None:
        objects, nbytes = self._loose.get(attempt, (0, 0))
        self._loose[attempt] = objects + 1, nbytes + size

    def _listed(self) -> Iterator[ObjectInfo]:
        """Everything; in parts where it is much, because stores hand out a listing as a whole."""
        if len(self._ledger) <= _ONE_LISTING:
            yield from self._store.list()
            return
        for digit in "0123456789abcdef":
            yield from self._store.list(keys.ATTEMPTS + digit)
        for prefix in _OTHERS:
            yield from self._store.list(prefix)

    def _judge_loose(self, before: list[Committed]) -> None:
        """What was saved since we looked, or is being saved, is no debris. Leases first: see ``sweep.py``."""
        now = time.time()
        busy = {s.attempt for s in read_leases(self._store) if abs(now - s.modified) <= EXPIRY}
        for _, manifest in self._catalog.manifests(sorted(set(self._catalog.committed()) - set(before))):
            if isinstance(manifest, Manifest):
                busy.update(manifest.attempts)
        for attempt, (objects, nbytes) in self._loose.items():
            if attempt in busy:
                self._sums["bytes_in_progress"] += nbytes
            else:
                self._sums["bytes_debris"] += nbytes
                self._sums["objects_debris"] += objects

    # ---- the sums ------------------------------------------------------------------------------------------

    def _report(self) -> Usage:
        ledger = self._ledger
        alone = [0] * len(self._rows)
        stored = freed = 0
        for size, owner, stays, seen in zip(ledger.sizes, ledger.owners, ledger.stays, ledger.seen, strict=True):
            if owner != _SHARED:
                alone[owner] += size
            if seen:
                stored += size
                freed += 0 if stays else size
        rows = []
        for row, needs, own in zip(self._rows, self._stored, alone, strict=True):
            manifest = self._manifests.pop(keys.manifest_key(row.epoch, row.generation), 0)
            stored += manifest
            freed += manifest if Committed(row.epoch, row.generation) in self._victims else 0
            rows.append(
                replace(row, bytes_stored=needs + manifest, bytes_shared=needs - own, bytes_alone=own + manifest)
            )
        self._sums["bytes_other"] += sum(self._manifests.values())  # committed since we looked
        sums = self._sums
        return Usage(
            tuple(rows),
            bytes_state=sum(row.bytes_state for row in rows),
            bytes_stored=stored,
            bytes_freed=freed,
            objects=len(ledger),
            objects_missing=ledger.seen.count(0),
            bytes_debris=sums["bytes_debris"],
            bytes_in_progress=sums["bytes_in_progress"],
            bytes_unknown=sums["bytes_unknown"],
            bytes_other=sums["bytes_other"],
            objects_debris=sums["objects_debris"],
        )
