"""Removing: what a repository deletes when it is asked to. How, and why that is safe, is in ``sweep.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ckptstore import options, pins, quarantine, retention
from ckptstore.catalog import Catalog
from ckptstore.checkpoint import Checkpoint, metadata_of
from ckptstore.errors import EpochNotFoundError, InvalidArgumentError
from ckptstore.events import Emitter, GcDone, PruneDone
from ckptstore.failures import Failures
from ckptstore.fence import Fence
from ckptstore.foundation import Foundation
from ckptstore.hold import held, holds
from ckptstore.lease import EXPIRY
from ckptstore.manifest import Manifest, check_epoch
from ckptstore.policies import AnyPolicy, EpochInfo, PerRecord, Policy
from ckptstore.reader import Problem
from ckptstore.retention import GcReport, PruneReport
from ckptstore.sweep import delete_commits


class Removing:
    """The part of a repository that deletes, and that keeps from it: pins, quarantine, holds."""

    _catalog: Catalog
    _events: Emitter
    _failures: Failures
    _fence: Fence
    _foundation: Foundation
    _keep: Policy | PerRecord | None
    _resumed: set[int]
    latest: Callable[..., Checkpoint | None]
    checkpoint: Callable[[int], Checkpoint]

    @property
    def keep(self) -> Policy | PerRecord | None:
        """What is kept after each save (``keep`` of ``open``); None where nothing is ever pruned by itself."""
        return self._keep

    def delete(self, epoch: int) -> None:
        """Delete an epoch, whatever it is: also the newest, also a damaged one.

        Raises:
            EpochNotFoundError: there is none.
        """
        number = check_epoch(epoch)
        commits = self._catalog.committed(number)
        if not commits:
            self._foundation.require()
            raise EpochNotFoundError(f"there is no epoch {number} in {self._catalog.store.traits.url}", epoch=number)
        # A manifest of a newer version hides what it needs: that must stop the delete before it begins.
        self._catalog.manifests(self._catalog.committed())
        delete_commits(self._catalog, commits, "its epoch was deleted")
        pins.remove(self._catalog.store, number)
        quarantine.remove(self._catalog.store, number)
        self._failures.forget(number)

    def prune(self, policy: AnyPolicy | None = None, dry_run: bool = False, deep: bool = True) -> PruneReport:
        """Delete the epochs of this run that ``policy`` (default: the ``keep`` of ``open``) does not keep.

        Never deletes the newest intact epoch, pinned, quarantined and held ones, nor those that this process loaded
        before its first save: the run resumed from them (P5). A run with a name (``run_id``) counts and deletes only
        what it has saved under that name; without one, only epochs that no named run has saved.

        Args:
            policy: one policy, or one for each of some records: ``{"model": KeepLast(9), "optimizer": KeepLast(1)}``.
                Then an epoch goes when none of these records is kept in it; else only the records go.
            deep: read the newest epoch in full, to be sure that it is intact before others go. (The pruning that
                follows a save reads only what the new epoch took over from earlier ones, each chunk once a process.)
            dry_run: delete nothing; the report says what would be deleted, and what that would free.
        """
        return self._prune(policy, dry_run=dry_run, deep=deep, weigh=dry_run)

    def plan(
        self, policy: AnyPolicy | None = None, deep: bool = False, coming: Sequence[EpochInfo] = ()
    ) -> PruneReport:
        """What ``prune`` with this policy would do: ``kept`` and ``removed`` hold a reason for every epoch.

        Args:
            deep: as for ``prune``.
            coming: epochs that are not there yet (or are to be replaced), and that the policy is to count as well. For
                one policy, not one for each record.
        """
        return self._prune(policy, dry_run=True, deep=deep, weigh=True, coming=coming)

    def pin(self, epoch: int, reason: str) -> None:
        """No prune takes this epoch any more, whatever the policy, and no full disk (``delete`` does).

        Args:
            reason: for whoever finds it. Pinning again replaces it.

        Raises:
            EpochNotFoundError: there is no such epoch.
        """
        number, text = check_epoch(epoch), pins.check_reason(reason)
        self._foundation.require()
        pins.put(self._catalog, number, text)

    def unpin(self, epoch: int) -> bool:
        """Take the pin away; False if there was none."""
        number = check_epoch(epoch)
        self._foundation.require()
        return pins.remove(self._catalog.store, number)

    def pins(self) -> dict[int, str]:
        """The pinned epochs, ascending, each with its reason."""
        self._foundation.require()
        return pins.pinned(self._catalog.store)

    def quarantine(self, epoch: int, reason: str) -> None:
        """Set an epoch aside: ``latest()`` passes it by, no save builds on it, no prune takes it.

        It stays as it is, and ``checkpoint(epoch)`` gives it. A save that replaces it is not set aside.

        Args:
            reason: for whoever finds it. Doing it again replaces it.

        Raises:
            EpochNotFoundError: there is no such epoch.
        """
        number, text = check_epoch(epoch), pins.check_reason(reason, "a quarantine")
        self._foundation.require()
        if not set_aside(self._catalog, number, text):
            raise EpochNotFoundError(f"there is no epoch {number} in {self._catalog.store.traits.url}", epoch=number)

    def release(self, epoch: int) -> bool:
        """Take an epoch out of quarantine; False if it was not set aside."""
        number = check_epoch(epoch)
        self._foundation.require()
        return quarantine.remove(self._catalog.store, number)

    def quarantined(self) -> dict[int, str]:
        """The epochs that are set aside, ascending, each with its reason."""
        self._foundation.require()
        return self._catalog.quarantined()

    @contextmanager
    def hold(self, epoch: int | None = None, reason: str = "") -> Iterator[Checkpoint]:
        """Read an epoch for longer: while the block runs, no prune takes it, and what it needs is not deleted.

        For evaluation jobs, exports and the like, beside a trainer that prunes. It costs a put now, one a minute, and
        a delete at the end. If this process dies, others may prune the epoch after 15 minutes. ``delete`` and a save
        that replaces the epoch are not stopped; what the checkpoint needs stays readable all the same.

        Args:
            epoch: which; None for the newest intact one.
            reason: for whoever asks why it was not pruned.

        Raises:
            EpochNotFoundError: there is no such epoch, or none at all.
            CorruptionError: its manifest is damaged.
            StoreError: the lease could not be put.
        """
        number, text = None if epoch is None else check_epoch(epoch), pins.check_reason(reason, "a hold", empty=True)
        for _ in range(3):  # it may be replaced or pruned between the look and the lease
            found = self.latest() if number is None else self.checkpoint(number)
            if found is None:
                break
            with held(found._catalog, found._manifest, text) as there:
                if there:
                    yield found
                    return
        what = f"epoch {number}" if number is not None else "epoch that stays while it is looked at"
        raise EpochNotFoundError(f"there is no {what} in {self._catalog.store.traits.url}", epoch=number)

    def holds(self) -> dict[int, str]:
        """The epochs that readers hold now, ascending, each with who does. The local clock tells who is dead."""
        self._foundation.require()
        found = {commit.epoch: why for commit, why in holds(self._catalog, writes=False).items()}
        return dict(sorted(found.items()))

    def _set_aside(self, damaged: Mapping[int, Problem]) -> None:
        """Quarantine epochs because of damage, those that are not yet: here, for a copy elsewhere may be good."""
        aside = self._catalog.quarantined() if damaged else {}
        for epoch in sorted(damaged.keys() - aside.keys()):
            problem = damaged[epoch]
            why = problem.reason if problem.key in problem.reason else f"{problem.key} {problem.reason}"
            set_aside(self._catalog, epoch, f"damaged: {why}"[: pins.MAX_REASON])

    def _prune(
        self,
        policy: AnyPolicy | None = None,
        *,
        dry_run: bool = False,
        deep: bool = True,
        weigh: bool = False,
        at_need: bool = False,
        coming: Sequence[EpochInfo] = (),
    ) -> PruneReport:
        """As ``prune`` and ``plan``.

        Args:
            at_need: a full disk asks for it, and takes what would otherwise be waited for.
        """
        chosen = options.check_policy(policy) if policy is not None else self._keep
        if chosen is None:
            raise InvalidArgumentError(
                "prune needs a policy, e.g. repo.prune(KeepLast(3)) or ckptstore.open(.., keep=..)"
            )
        self._foundation.require()
        protected = self._protected(at_need=at_need)
        begun = time.perf_counter()
        try:
            report = retention.prune(
                self._catalog,
                chosen,
                run=self._fence.run,
                protected=protected,
                metadata=metadata_of,
                deep=deep,
                dry_run=dry_run,
                weigh=weigh,
                coming=coming,
            )
        except Exception as error:
            if not dry_run:
                self._tell_of_prune((), (), 0, begun, type(error).__name__)
            raise
        if not dry_run and (report.removed or report.dropped):
            self._tell_of_prune(tuple(report.removed), tuple(report.dropped), report.bytes_freed, begun)
        return report

    def _tell_of_prune(
        self, epochs: tuple[int, ...], thinned: tuple[int, ...], freed: int, begun: float, error: str = ""
    ) -> None:
        seconds = time.perf_counter() - begun
        self._events.tell(PruneDone, epochs=epochs, thinned=thinned, bytes_freed=freed, seconds=seconds, error=error)

    def _protected(self, *, at_need: bool) -> dict[int, str]:
        """Epochs that no policy may take, each with the reason."""
        return dict.fromkeys(self._resumed, "the run resumed from it")

    def gc(self, grace: float = EXPIRY, dry_run: bool = False) -> GcReport:
        """Remove debris: what interrupted saves and deletes left and no checkpoint reaches.

        Args:
            grace: seconds after its last sign of life until an unfinished save counts as dead.
        """
        self._foundation.require()
        begun = time.perf_counter()
        report = retention.gc(self._catalog, grace=grace, dry_run=dry_run)
        if not dry_run:
            facts = {"objects": len(report.removed), "bytes_freed": report.bytes_freed}
            self._events.tell(GcDone, seconds=time.perf_counter() - begun, **facts)
        return report


def set_aside(catalog: Catalog, epoch: int, reason: str) -> bool:
    """Put the marks of a quarantine. False if there is no such epoch, or it was deleted meanwhile."""
    for commit, manifest in catalog.manifests(catalog.committed(epoch)):
        attempt = manifest.attempt if isinstance(manifest, Manifest) else ""
        quarantine.put(catalog.store, epoch, commit.generation, attempt, reason)
    if catalog.committed(epoch):
        return True
    quarantine.remove(catalog.store, epoch)
    return False
