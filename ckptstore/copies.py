"""Copies: checkpoints that lie in several places, of which each gives what it has whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed, Skipped
from ckptstore.errors import CorruptionError, NotFoundError, ObjectNotFoundError, StoreError, TransientError
from ckptstore.locks import ForkLock
from ckptstore.manifest import ChunkRef, Manifest, RecordIndex
from ckptstore.patience import indispensable
from ckptstore.pipeline import Progress
from ckptstore.reader import Problem
from ckptstore.stores.base import Store

log = logging.getLogger("ckptstore")

Place = tuple[Catalog, Manifest]
Find = Callable[[], list[Place]]
_LOOKS = 20


class Copies:
    """The other copies of one checkpoint, looked for when something is missing in the first. Thread-safe.

    Args:
        url: where the first copy lies.
        find: gives the others, the nearest first.
    """

    def __init__(self, url: str, epoch: int, find: Find) -> None:
        self._url = url
        self._epoch = epoch
        self._find = find
        self._lock = ForkLock()
        self._places: list[Place] | None = None
        self._refs: dict[int, dict[str, ChunkRef]] = {}  # by place: digest → where it lies there
        self._told: set[str] = set()

    def index(self, name: str, error: Exception) -> RecordIndex | None:
        """The index of a record, from the nearest place that has it."""
        for catalog, manifest in self._others():
            entry = manifest.record(name)
            if entry is None:
                continue
            try:
                index = catalog.index(entry)
            except (CorruptionError, StoreError) as second:
                log.info("the index of %r in %s is no help either: %s", name, catalog.store.traits.url, second)
                continue
            self._tell(catalog.store, error)
            return index
        return None

    def places(self, chunk: ChunkRef, error: Exception) -> Iterator[tuple[Store, ChunkRef]]:
        """Where else the content of a chunk lies, the nearest first."""
        for number, (catalog, _) in enumerate(self._others()):
            found = self._chunks(number).get(chunk.digest)
            if found is not None:
                self._tell(catalog.store, error)
                yield catalog.store, found

    def _others(self) -> list[Place]:
        with indispensable(), self._lock:
            if self._places is None:
                try:
                    self._places = self._find()
                except (StoreError, NotFoundError) as error:
                    log.warning("epoch %d: its other copies could not be looked for: %s", self._epoch, error)
                    self._places = []
            return self._places

    def _chunks(self, number: int) -> dict[str, ChunkRef]:
        catalog, manifest = self._others()[number]
        with indispensable(), self._lock:
            if number not in self._refs:
                found: dict[str, ChunkRef] = {}
                for entry in manifest.records:
                    try:
                        found.update((chunk.digest, chunk) for chunk in catalog.index(entry).chunks)
                    except (CorruptionError, StoreError) as error:
                        log.info("an index of epoch %d in %s: %s", self._epoch, catalog.store.traits.url, error)
                self._refs[number] = found
            return self._refs[number]

    def _tell(self, store: Store, error: Exception) -> None:
        """Once for each place: somebody should mend the first copy."""
        url = store.traits.url
        if url not in self._told:
            self._told.add(url)
            log.warning("epoch %d in %s is not whole (%s): reading from %s", self._epoch, self._url, error, url)


class Together:
    """Several repositories, read as one.

    Args:
        catalogs: gives theirs, the nearest first, each when it is its turn.
    """

    def __init__(self, catalogs: Callable[[], Iterator[Catalog]]) -> None:
        self._catalogs = catalogs

    def newest_intact(
        self, *, deep: bool, run: str | None, need: Collection[str], progress: Progress | None
    ) -> tuple[Place | None, list[Skipped]]:
        """The newest checkpoint of which every object is good in at least one place, and what was stepped over.

        Raises:
            FormatError, TransientError: as ``Catalog.newest_intact``.
            StoreError: a place does not answer.
        """
        look = _Look(deep, run, need, progress)
        found = look.newest(self._catalogs())
        for _ in range(_LOOKS - 1):
            if not look.vanished:
                break
            look = _Look(deep, run, need, progress)
            found = look.newest(self._catalogs())
        if look.vanished and found is None:
            raise TransientError("checkpoints are removed or replaced as fast as they are looked at: try again")
        return found, look.skipped

    def nearest(self, epoch: int) -> Place | None:
        """The checkpoint of one epoch, in the nearest place that can read its manifest. CorruptionError if none can."""
        problem: CorruptionError | None = None
        for _ in range(3):  # a generation may be replaced between the listing and the read
            for catalog in self._catalogs():
                for commit, manifest in catalog.manifests(catalog.committed(epoch)[-1:]):
                    if isinstance(manifest, Manifest):
                        return catalog, manifest
                    log.warning("%s in %s: %s", commit.key, catalog.store.traits.url, manifest)
                    problem = manifest
        if problem is not None:
            raise problem
        return None

    def others(self, place: Place) -> list[Place]:
        """The same checkpoint in the other places that can be asked."""
        catalog, manifest = place
        found: list[Place] = []
        catalogs = self._catalogs()
        while True:
            try:
                other = next(catalogs)
                if other is not catalog:
                    found += _same(other, manifest)[:1]
            except StopIteration:
                return found
            except StoreError as error:  # the generator has ended with it
                log.warning("epoch %d: its other copies could not be looked for: %s", manifest.epoch, error)

    def fullest(self, place: Place) -> Place:
        """A copy that has records which were dropped from this one, or this one."""
        if place[1].left_out:
            for other in self.others(place):
                if {r.name for r in other[1].records} > {r.name for r in place[1].records}:
                    return other
        return place


def _same(catalog: Catalog, manifest: Manifest) -> list[Place]:
    """Copies of a checkpoint in one place, the newest generation first."""
    found = catalog.manifests(reversed(catalog.committed(manifest.epoch)))
    return [
        (catalog, there)
        for _, there in found
        if isinstance(there, Manifest) and there.first.attempt == manifest.first.attempt
    ]


class _Look:
    """One look from the newest epoch down. ``vanished``: a checkpoint was deleted meanwhile."""

    def __init__(self, deep: bool, run: str | None, need: Collection[str], progress: Progress | None) -> None:
        self._deep, self._run, self._need, self._progress = deep, run, need, progress
        self.skipped: list[Skipped] = []
        self.vanished = False

    def newest(self, catalogs: Iterator[Catalog]) -> Place | None:
        """The nearest place of the newest checkpoint that is whole."""
        places: dict[int, list[tuple[Catalog, Committed]]] = {}
        for catalog in catalogs:
            for commit in reversed(catalog.committed()):
                places.setdefault(commit.epoch, []).append((catalog, commit))
        for epoch in sorted(places, reverse=True):
            found = self._whole(places[epoch])
            if found is not None:
                return found
        return None

    def _whole(self, places: Sequence[tuple[Catalog, Committed]]) -> Place | None:
        looked: list[tuple[Place, list[Problem]]] = []
        wrong: list[Skipped] = []
        for catalog, commit in places:
            try:
                manifest = catalog.manifest(commit)
            except ObjectNotFoundError:
                self.vanished = True
                continue
            except CorruptionError as error:
                wrong.append(Skipped(commit.epoch, commit.generation, commit.key, error.message))
                continue
            if (self._run is not None and manifest.run != self._run) or not all(map(manifest.record, self._need)):
                continue
            aside = catalog.set_aside(commit, manifest)
            if aside is not None:
                wrong.append(Skipped(commit.epoch, commit.generation, commit.key, f"it is quarantined: {aside}"))
                continue
            problems = catalog.problems(manifest, deep=self._deep, progress=self._progress)
            if problems and not catalog.exists(manifest):
                self.vanished = True
                continue
            looked.append(((catalog, manifest), problems))
            same = [one for one in looked if one[0][1].first.attempt == manifest.first.attempt]
            if not problems or whole_together(same):
                for step in wrong:
                    log.warning("%s; another tier has what is missing there", step)
                return next(place for place, found in same if not _in_an_index(found))
            wrong.append(_skipped((catalog, manifest), problems))
        self.skipped += wrong
        return None


def whole_together(places: Sequence[tuple[Place, list[Problem]]]) -> bool:
    """Whether every object of a checkpoint is good in at least one of its places, going by what is wrong in each.

    A place whose index is damaged does not count: nobody can say there which chunk is where.
    """
    lacking: set[str] | None = None
    names: set[str] = set()
    for (_, manifest), problems in places:
        if not names:
            names = {record.name for record in manifest.records}
        parsed = [keys.parse_content_key(problem.key) for problem in problems]
        if not all(found is not None and found[1] == "chunks" for found in parsed):
            continue
        if not names <= {record.name for record in manifest.records}:
            continue
        digests = {found[2] for found in parsed if found is not None}
        lacking = digests if lacking is None else lacking & digests
    return lacking == set()


def _in_an_index(problems: Sequence[Problem]) -> bool:
    return any("/records/" in problem.key for problem in problems)


def _skipped(place: Place, problems: Sequence[Problem]) -> Skipped:
    (catalog, manifest), first = place, problems[0]
    reason = first.reason if first.key in first.reason else f"{first.key} {first.reason}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Skipped(manifest.epoch, manifest.generation, first.key, f"{reason}{more}, in {catalog.store.traits.url}")
