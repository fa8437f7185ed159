"""Mirror: bring the epochs of one repository into another, each as a whole, only what is missing.

An epoch appears in the target when all of it is there: its manifest is put last. What the target has is decided by
identity (``Manifest.first``), never by number alone: an epoch of its own with the same number stays as it is.
The newest epoch goes first, because it is the one that will be missed most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptstore.catalog import Catalog, Committed
from ckptstore.checkpoint import metadata_of
from ckptstore.copying import CopyTransaction, SourceDamageError
from ckptstore.errors import CorruptionError, EpochExistsError, EpochNotFoundError, FencedError, TransactionError
from ckptstore.fence import Fence
from ckptstore.manifest import Manifest
from ckptstore.pipeline import Meter, Progress
from ckptstore.policies import EpochInfo, Policy
from ckptstore.throttle import Throttle
from ckptstore.transaction import Plan, Transaction

Outcome = Literal["copied", "there", "newer", "conflict", "damaged", "gone"]

_TRIES = 3


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
    """What a mirror did, epoch by epoch, ascending."""

    epochs: tuple[EpochCopy, ...]

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
    """A repository to copy to: its catalog, its id, and who is told of each transaction that is begun."""

    catalog: Catalog
    repository: str
    told: Callable[[Transaction], object] = lambda txn: None


def choose(
    source: Catalog, epochs: Iterable[int] | None, policy: Policy | None
) -> list[tuple[Committed, Manifest | CorruptionError]]:
    """The newest generation of the epochs to copy, the newest epoch first.

    Args:
        epochs: None for all.
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
    if policy is not None:
        infos = [
            EpochInfo(c.epoch, metadata_of(m), m.saved or times[c], m.bytes_needed)
            for c, m in found
            if isinstance(m, Manifest)
        ]
        kept = policy.keep(infos)
        found = [(c, m) for c, m in found if c.epoch in kept or isinstance(m, CorruptionError)]
    return found[::-1]


class Mirror:
    """Copies epochs from ``source`` to ``target``.

    Args:
        limit: bytes a second that are sent, on average; None for no limit.
        replace: also where the target has an epoch of its own under that number.
    """

    def __init__(
        self,
        source: Catalog,
        target: Place,
        *,
        limit: float | None = None,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._throttle = Throttle(limit)
        self._replace = replace
        self._progress = progress
        Meter(progress, 0)  # refuses what cannot be called

    def run(self, chosen: Sequence[tuple[Committed, Manifest | CorruptionError]]) -> MirrorReport:
        """Copy them one after the other, in this order. Damage is reported, not raised.

        Raises:
            StoreError: one of the stores failed. What was copied is there; call it again, and it goes on.
            TransactionError: another process cleaned up what this one was writing, time and again.
        """
        total = sum(m.bytes_state for _, m in chosen if isinstance(m, Manifest))
        done = 0
        copies = []
        for commit, manifest in chosen:
            if isinstance(manifest, CorruptionError):
                copies.append(EpochCopy(commit.epoch, "damaged", manifest.message, commit.key))
                continue
            copies.append(self._bring(manifest, _part(self._progress, done, manifest.bytes_state, total)))
            done += manifest.bytes_state
            Meter(self._progress, total).add(done)
        return MirrorReport(tuple(sorted(copies, key=lambda copy: copy.epoch)))

    def _bring(self, manifest: Manifest, meter: Meter) -> EpochCopy:
        """Copy one epoch, unless the target has it; look again where either of them changes meanwhile."""
        error: Exception | None = None
        for _ in range(_TRIES):
            commits = self._target.catalog.committed()
            there = self._there(manifest, commits)
            if there is not None:
                return there
            try:
                return self._copy(manifest, commits, meter)
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

    def _there(self, manifest: Manifest, commits: list[Committed]) -> EpochCopy | None:
        """What the target has under that number, if that is to stay."""
        epoch, catalog = manifest.epoch, self._target.catalog
        same = [commit for commit in commits if commit.epoch == epoch][-1:]
        for commit, has in catalog.manifests(same):
            generation = commit.generation
            if isinstance(has, CorruptionError):
                if self._replace:
                    return None
                why = f"{has.message}: whose it is cannot be told. Delete it there, or replace it"
                return EpochCopy(epoch, "conflict", why, commit.key, generation)
            if has.first.attempt == manifest.first.attempt:
                whole = not catalog.problems(has, deep=False)
                return EpochCopy(epoch, "there", generation=generation, bytes_state=has.bytes_state) if whole else None
            if has.first.repository == manifest.first.repository:
                if has.first.generation < manifest.first.generation:
                    return None
                if has.first.generation > manifest.first.generation and not self._replace:
                    why = f"generation {has.first.generation} is there, this is {manifest.first.generation}"
                    return EpochCopy(epoch, "newer", why, commit.key, generation)
            if not self._replace:
                why = "the target has an epoch of its own under that number"
                return EpochCopy(epoch, "conflict", why, commit.key, generation)
        return None

    def _copy(self, manifest: Manifest, commits: list[Committed], meter: Meter) -> EpochCopy:
        target = self._target.catalog
        plan = Plan(
            epoch=manifest.epoch,
            metadata=manifest.metadata,
            replace=True,  # what is there is older, damaged, or to be replaced: that was decided before
            chunk_size=0,
            codec="raw",
            repository=self._target.repository,
            fence=Fence(target, ""),  # it was committed by a writer that might; a copy takes no run over
        )
        arranged = _arranged(commits, manifest)
        txn = CopyTransaction(target, plan, arranged, self._source, manifest, self._throttle, meter)
        self._target.told(txn)
        with txn:
            txn.copy()
            made: Manifest = txn.commit()
        return EpochCopy(
            manifest.epoch,
            "copied",
            generation=made.generation,
            bytes_state=manifest.bytes_state,
            bytes_reused=txn.tally.bytes_reused,
            bytes_sent=txn.tally.bytes_sent,
        )


def _arranged(commits: list[Committed], manifest: Manifest) -> list[Committed]:
    """All commits, the one last that probably shares most with ``manifest``: the nearest epoch, better a lower one."""

    def likeness(commit: Committed) -> tuple[bool, int, int]:
        return commit.epoch < manifest.epoch, -abs(commit.epoch - manifest.epoch), commit.generation

    return sorted(commits, key=likeness)


def _part(progress: Progress | None, before: int, part: int, total: int) -> Meter:
    """A meter for one of several parts, which counts on from what was done before."""
    if progress is None:
        return Meter(None, part)
    tell = progress
    return Meter(lambda done, _: tell(before + min(done, part), total), part)
