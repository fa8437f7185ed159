"""Mirror: bring the epochs of one repository into another, each as a whole, only what is missing.

An epoch appears in the target when all of it is there: its manifest is put last. What the target has is decided by
identity (``Manifest.first``), never by number alone: an epoch of its own with the same number stays as it is.
The newest epoch goes first, because it is the one that will be missed most.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptstore import keys, pins
from ckptstore.catalog import Catalog, Committed
from ckptstore.checkpoint import metadata_of
from ckptstore.copying import CopyTransaction, SourceDamageError
from ckptstore.errors import (
    CorruptionError,
    EpochExistsError,
    EpochNotFoundError,
    FencedError,
    StoreError,
    TransactionError,
)
from ckptstore.fence import Fence
from ckptstore.hold import held
from ckptstore.manifest import Manifest
from ckptstore.pipeline import Meter, Progress, side_by_side
from ckptstore.policies import EpochInfo, Policy
from ckptstore.reader import read_index
from ckptstore.stores.base import Store
from ckptstore.throttle import Throttle
from ckptstore.transaction import Plan

log = logging.getLogger("ckptstore")

Outcome = Literal["copied", "there", "newer", "conflict", "damaged", "gone"]

_TRIES = 3
_NEAR = 3  # so many epochs on each side are worth a look when the nearest cannot be read
_KEPT_NAMES = 200_000


@dataclass(frozen=True, slots=True)
class EpochCopy:
    """What became of one epoch of the source.

    ``outcome``: "copied"; "there" already; the target has a "newer" content of the same epoch; "conflict": the target
    has an epoch of its own under that number; "damaged": the source is, so nothing was copied; "gone": it was deleted
    meanwhile. ``generation`` is that in the target (0 where it has none). Bytes of state before the codec; of it found
    in the target; sent to it, after the codec.
    """

    epoch: int
    outcome: Outcome
    reason: str = ""
    key: str = ""
    generation: int = 0
    bytes_state: int = 0
    bytes_reused: int = 0
    bytes_sent: int = 0


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """What a mirror did, epoch by epoch, ascending. With ``dry_run`` what it would do: "copied" are those to copy."""

    epochs: tuple[EpochCopy, ...]
    dry_run: bool = False
    pins: Mapping[int, str] = field(default_factory=dict)
    """Epochs that were pinned in the target because they are in the source, each with the reason."""

    @property
    def ok(self) -> bool:
        """Whether all that was asked for is in the target now (or there is no such epoch any more)."""
        return not (self.of("damaged") or self.of("conflict"))

    def of(self, outcome: Outcome) -> list[int]:
        """The numbers of the epochs with that outcome."""
        return [copy.epoch for copy in self.epochs if copy.outcome == outcome]

    @property
    def bytes_sent(self) -> int:
        """Bytes that were put into the target."""
        return sum(copy.bytes_sent for copy in self.epochs)


@dataclass(frozen=True, slots=True)
class Place:
    """A repository to copy to: its catalog, its id, and who is told of each transaction that is begun.

    ``fence``: of the run on whose behalf it is copied; by default nobody's, so that a copy takes no run over.
    """

    catalog: Catalog
    repository: str
    told: Callable[[CopyTransaction], object] = lambda txn: None
    fence: Fence | None = None


def choose(
    source: Catalog, epochs: Iterable[int] | None, policy: Policy | None
) -> list[tuple[Committed, Manifest | CorruptionError]]:
    """The newest generation of the epochs to copy, the newest epoch first.

    Args:
        epochs: None for all but those that are quarantined: the target would take them for good ones.
        policy: of those, only what it keeps. An epoch that cannot be read is always among them, to be reported.

    Raises:
        EpochNotFoundError: one of ``epochs`` is not there.
        FormatError: a newer version wrote one of them.
    """
    times = source.commit_times()
    newest = {commit.epoch: commit for commit in sorted(times)}
    if epochs is not None:
        wanted = sorted(set(epochs))
        for epoch in wanted:
            if epoch not in newest:
                raise EpochNotFoundError(f"there is no epoch {epoch} in {source.store.traits.url}", epoch=epoch)
        newest = {epoch: newest[epoch] for epoch in wanted}
    found = source.manifests(newest[epoch] for epoch in sorted(newest))
    if epochs is None:
        found = [(c, m) for c, m in found if isinstance(m, CorruptionError) or source.set_aside(c, m) is None]
    if policy is not None:
        infos = [
            EpochInfo(c.epoch, metadata_of(m), m.saved or times[c], m.bytes_needed)
            for c, m in found
            if isinstance(m, Manifest)
        ]
        kept = policy.keep(infos)
        found = [(c, m) for c, m in found if c.epoch in kept or isinstance(m, CorruptionError)]
    return found[::-1]


def with_pins(source: Catalog, target: Catalog, run: Callable[[], MirrorReport], *, dry_run: bool) -> MirrorReport:
    """Run a mirror, and take the pins of the source along: first of what is there already, for it may be pruned."""
    coming: set[int] = set()

    def attempt(catalog: Catalog, epoch: int) -> str | None:
        found = [m for _, m in catalog.manifests(catalog.committed(epoch)[-1:]) if isinstance(m, Manifest)]
        return found[0].first.attempt if found else None

    def same(epoch: int) -> bool:
        ours = attempt(source, epoch)
        return epoch in coming or (ours is not None and ours == attempt(target, epoch))

    shared = pins.share(source.store, target, same, dry_run=dry_run)
    report = run()
    if report.of("copied"):
        coming.update(report.of("copied") if dry_run else ())
        shared.update(pins.share(source.store, target, same, dry_run=dry_run))
    return replace(report, pins=shared)


class Mirror:
    """Copies epochs from ``source`` to ``target``.

    Args:
        limit: bytes a second that are sent, on average; None for no limit.
        replace: also where the target has an epoch of its own under that number.
        hold: each epoch in the source while it is copied, if the source can be written: a prune there spares it.
    """

    def __init__(
        self,
        source: Catalog,
        target: Place,
        *,
        limit: float | None = None,
        replace: bool = False,
        hold: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._throttle = Throttle(limit)
        self._replace = replace
        self._hold = hold
        self._progress = progress
        self._commits: dict[int, list[Committed]] = {}  # of the target, by epoch, ascending
        self._listings = _Listings(target.catalog.store)
        Meter(progress, 0)  # refuses what cannot be called

    def run(self, chosen: Sequence[tuple[Committed, Manifest | CorruptionError]]) -> MirrorReport:
        """Copy them one after the other, in this order. Damage is reported, not raised.

        Raises:
            StoreError: one of the stores failed. What was copied is there; call it again, and it goes on.
            TransactionError: another process cleaned up what this one was writing, time and again.
        """
        there = self._look([m for _, m in chosen if isinstance(m, Manifest)])
        total = sum(m.bytes_state for _, m in chosen if isinstance(m, Manifest))
        done = 0
        copies = []
        for commit, manifest in chosen:
            if isinstance(manifest, CorruptionError):
                copies.append(EpochCopy(commit.epoch, "damaged", manifest.message, commit.key))
                continue
            meter = _part(self._progress, done, manifest.bytes_state, total)
            copies.append(there.get(commit.epoch) or self._bring(manifest, meter))
            done += manifest.bytes_state
            Meter(self._progress, total).add(done)
        return MirrorReport(tuple(sorted(copies, key=lambda copy: copy.epoch)))

    def plan(self, chosen: Sequence[tuple[Committed, Manifest | CorruptionError]]) -> MirrorReport:
        """What ``run`` would do, as far as manifests tell: damage of chunks is found when they are read."""
        there = self._look([m for _, m in chosen if isinstance(m, Manifest)])
        copies = [
            EpochCopy(commit.epoch, "damaged", manifest.message, commit.key)
            if isinstance(manifest, CorruptionError)
            else there.get(commit.epoch) or self._to_copy(manifest)
            for commit, manifest in chosen
        ]
        return MirrorReport(tuple(sorted(copies, key=lambda copy: copy.epoch)), dry_run=True)

    def _to_copy(self, manifest: Manifest) -> EpochCopy:
        commits = self._commits.get(manifest.epoch, [])
        old = commits[-1].generation if commits else 0
        reason = f"it replaces what is there (generation {old})" if commits else ""
        return EpochCopy(manifest.epoch, "copied", reason, generation=old, bytes_state=manifest.bytes_state)

    def _look(self, manifests: list[Manifest]) -> dict[int, EpochCopy]:
        """List the target, and judge what it has."""
        self._commits = {}
        for commit in self._target.catalog.committed():
            self._commits.setdefault(commit.epoch, []).append(commit)
        return self._all_there(manifests)

    def _all_there(self, manifests: list[Manifest]) -> dict[int, EpochCopy]:
        """What the target has and keeps, all epochs side by side: a mirror that has little to do should be quick."""
        catalog = self._target.catalog
        ours = {manifest.epoch: manifest for manifest in manifests}
        found = catalog.manifests(self._commits[epoch][-1] for epoch in ours if epoch in self._commits)
        judged = side_by_side(
            catalog.store.traits.concurrency, lambda pair: self._judge(ours[pair[0].epoch], *pair), found
        )
        return {copy.epoch: copy for copy in judged if copy is not None}

    def _bring(self, manifest: Manifest, meter: Meter) -> EpochCopy:
        """Copy one epoch, unless the target has it; look again where either of them changes meanwhile."""
        error: Exception | None = None
        catalog, epoch = self._target.catalog, manifest.epoch
        for _ in range(_TRIES):
            self._commits[epoch] = catalog.committed(epoch)
            for commit, has in catalog.manifests(self._commits[epoch][-1:]):
                there = self._judge(manifest, commit, has)
                if there is not None:
                    return there
            try:
                return self._copy(manifest, meter)
            except (EpochExistsError, TransactionError) as raised:
                if isinstance(raised, FencedError):
                    raise
                error = raised  # another was faster, or took this one for dead
            except SourceDamageError as raised:
                changed = self._look_again(manifest, raised)
                if isinstance(changed, EpochCopy):
                    return changed
                manifest, error = changed, raised
        assert error is not None
        raise error

    def _look_again(self, manifest: Manifest, error: SourceDamageError) -> Manifest | EpochCopy:
        """Was it damage, or was the epoch replaced (then by what) or deleted while it was read?"""
        if self._source.exists(manifest):
            return EpochCopy(manifest.epoch, "damaged", error.message, error.key or manifest.key)
        for commit in self._source.committed(manifest.epoch)[-1:]:
            for _, newer in self._source.manifests([commit]):
                if isinstance(newer, CorruptionError):
                    return EpochCopy(manifest.epoch, "damaged", newer.message, commit.key)
                return newer
        return EpochCopy(manifest.epoch, "gone", "it was deleted while it was copied")

    def _judge(self, manifest: Manifest, commit: Committed, has: Manifest | CorruptionError) -> EpochCopy | None:
        """What becomes of an epoch that the target has a content of; None: it is to be copied."""
        epoch, generation = manifest.epoch, commit.generation
        ours, theirs = manifest.first, None if isinstance(has, CorruptionError) else has.first
        if not isinstance(has, CorruptionError) and has.first.attempt == ours.attempt:
            if self._listings.whole(has):
                return EpochCopy(epoch, "there", generation=generation, bytes_state=has.bytes_state)
            more = {record.name for record in has.records} - {record.name for record in manifest.records}
            if not more or self._replace:
                return None
            why = f"it is damaged there, and has records that the source has dropped ({', '.join(sorted(more))})"
            return EpochCopy(epoch, "conflict", why, commit.key, generation)
        if self._replace:
            return None
        if isinstance(has, CorruptionError):
            why = f"{has.message}: whose it is cannot be told. Delete it there, or replace it"
            return EpochCopy(epoch, "conflict", why, commit.key, generation)
        assert theirs is not None
        if theirs.repository == ours.repository and theirs.generation != ours.generation:
            if theirs.generation < ours.generation:
                return None
            why = f"generation {theirs.generation} is there, this is {ours.generation}"
            return EpochCopy(epoch, "newer", why, commit.key, generation)
        why = "the target has an epoch of its own under that number"
        return EpochCopy(epoch, "conflict", why, commit.key, generation)

    def _copy(self, manifest: Manifest, meter: Meter) -> EpochCopy:
        target = self._target.catalog
        plan = Plan(
            epoch=manifest.epoch,
            metadata=manifest.metadata,
            replace=True,  # what is there is older, damaged, or to be replaced: that was decided before
            chunk_size=0,
            codec="raw",
            repository=self._target.repository,
            fence=self._target.fence or Fence(target, ""),  # it was committed by a writer that might
        )
        commits = [*self._near(manifest.epoch), *self._commits[manifest.epoch]]
        txn = CopyTransaction(target, plan, commits, self._source, manifest, self._throttle, meter)
        self._target.told(txn)
        with self._held(manifest), txn:
            txn.copy()
            made: Manifest = txn.commit()
        self._commits[manifest.epoch] = [Committed(made.epoch, made.generation)]
        return EpochCopy(
            manifest.epoch,
            "copied",
            generation=made.generation,
            bytes_state=manifest.bytes_state,
            bytes_reused=txn.tally.bytes_reused,
            bytes_sent=txn.tally.bytes_sent,
        )

    @contextmanager
    def _held(self, manifest: Manifest) -> Iterator[None]:
        """Hold it in the source. Where that cannot be: a prune may take it meanwhile, which the copy finds out."""
        where = self._target.catalog.store.traits.url
        with ExitStack() as stack:
            if self._hold:
                try:
                    stack.enter_context(held(self._source, manifest, f"copied to {where}"))
                except StoreError as error:
                    log.info("epoch %d is copied without a hold on it: %s", manifest.epoch, error)
            yield

    def _near(self, epoch: int) -> list[Committed]:
        """Commits of the target that probably share most with an epoch, the best last: lower and nearer ones."""
        others = sorted(other for other, commits in self._commits.items() if commits and other != epoch)
        at = bisect(others, epoch)
        best = [*others[max(at - _NEAR, 0) : at][::-1], *others[at : at + _NEAR]]
        return [commit for other in reversed(best) for commit in self._commits[other]]


class _Listings:
    """Which objects of the target are there, by name and size. Those of attempts that many epochs need are kept."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, dict[str, int]] = OrderedDict()

    def whole(self, manifest: Manifest) -> bool:
        """Whether nothing of a checkpoint is missing: its indexes are good, its chunks there with the right size."""
        try:
            indexes = [read_index(self._store, entry) for entry in manifest.records]
        except CorruptionError:
            return False
        chunks = [chunk for index in indexes for chunk in index.chunks]
        return all(self._of(chunk.attempt).get(chunk.digest) == chunk.stored_length for chunk in chunks)

    def _of(self, attempt: str) -> dict[str, int]:
        with self._lock:
            kept = self._kept.get(attempt)
            if kept is not None:
                self._kept.move_to_end(attempt)
                return kept
        listed = {info.key.rpartition("/")[2]: info.size for info in self._store.list(keys.chunks_prefix(attempt))}
        with self._lock:
            self._kept[attempt] = listed
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT_NAMES:
                self._kept.popitem(last=False)
        return listed


def _part(progress: Progress | None, before: int, part: int, total: int) -> Meter:
    """A meter for one of several parts, which counts on from what was done before."""
    if progress is None:
        return Meter(None, part)
    tell = progress
    return Meter(lambda done, _: tell(before + min(done, part), total), part)
