"""Caring: what a repository offers to whoever looks after it, beside saving, loading and removing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from ckptstore import keys, options
from ckptstore.catalog import Catalog
from ckptstore.diff import Diff, diff
from ckptstore.errors import (
    CorruptionError,
    EpochExistsError,
    EpochNotFoundError,
    InvalidArgumentError,
    ObjectNotFoundError,
    RepositoryNotFoundError,
)
from ckptstore.events import DamageFound, Emitter, MirrorDone, VerifyDone
from ckptstore.export import ExportReport, Format, export
from ckptstore.failures import Failures
from ckptstore.flights import Flights
from ckptstore.foundation import Foundation
from ckptstore.manifest import Manifest, check_epoch, check_record_name
from ckptstore.mirror import EpochCopy, Mirror, MirrorReport, Place, choose, with_pins
from ckptstore.pipeline import Progress
from ckptstore.policies import AnyPolicy, Policy
from ckptstore.reader import Problem
from ckptstore.repair import Mend, Repair, RepairReport
from ckptstore.retention import PruneReport
from ckptstore.scrub import Budget, Scrub, ScrubReport
from ckptstore.stores import MemoryStore, open_store
from ckptstore.sweep import seen_from
from ckptstore.usage import Usage, usage
from ckptstore.verify import VerifyReport, verify


class Caring:
    """The part of a repository that checks, copies, counts, compares, exports and mends."""

    _catalog: Catalog
    _events: Emitter
    _failures: Failures
    _flights: Flights
    _foundation: Foundation
    _prune: Callable[..., PruneReport]
    _set_aside: Callable[[Mapping[int, Problem]], None]

    def newest_age(self) -> float | None:
        """Seconds since the newest durable epoch that this process knows of was committed; None if it knows none.

        Asks the store nothing: what this process has saved, and what ``latest()`` has found. By the clocks of the
        machine that saved it and of this one.
        """
        return self._failures.age()

    def verify(
        self,
        epoch: int | None = None,
        deep: bool = True,
        progress: Progress | None = None,
        sample: float = 1.0,
        *,
        quarantine: bool = False,
        resume: bool = False,
    ) -> VerifyReport:
        """Check one epoch or all: with ``deep`` every byte, else names and sizes. Damage is reported, not raised.

        Args:
            sample: the share of each epoch's chunks that ``deep`` reads, more than 0 and at most 1, chosen anew each
                time: who looks at a twentieth every day finds what rots in time, at a twentieth of the cost.
            quarantine: set aside what is damaged.
            resume: go on where a verification of all epochs ended that was begun so and did not come to its end.
        """
        number, share = None if epoch is None else check_epoch(epoch), options.check_sample(sample)
        if not self._catalog.committed(number):
            self._foundation.require()
        begun = time.perf_counter()
        if options.check_flag("resume", resume):
            if number is not None or not deep or share < 1:
                raise InvalidArgumentError("resume is for a deep verification of all epochs, without a sample")
            found = Scrub(self._catalog, Budget(), verification=True, progress=progress).run()
            report = VerifyReport(found.epochs, True)
        else:
            report = verify(self._catalog, number, deep=deep, progress=progress, sample=share)
        damaged = [health for health in report.epochs if not health.ok]
        for health in damaged:
            first = health.problems[0]
            self._events.tell(DamageFound, epoch=health.epoch, key=first.key, reason=first.reason)
        facts = {"epochs": len(report.epochs), "damaged": tuple(health.epoch for health in damaged), "deep": deep}
        self._events.tell(VerifyDone, seconds=time.perf_counter() - begun, **facts)
        if options.check_flag("quarantine", quarantine):
            self._set_aside({health.epoch: health.problems[0] for health in damaged})
        return report

    def scrub(
        self,
        *,
        max_bytes: int | None = None,
        max_seconds: float | None = None,
        older_than: float = 0.0,
        limit: float | None = None,
        quarantine: bool = False,
        progress: Progress | None = None,
    ) -> ScrubReport:
        """Read and check what was checked longest ago; for a timer that calls it again and again.

        How far it came is noted in the repository, so that it goes on there, also after a kill. All manifests and
        indexes are read each time. Several at once do no harm.

        Args:
            max_bytes: read no more of chunks than this, as stored; one chunk in any case.
            max_seconds: begin with no chunk after this; one in any case.
            older_than: leave out what was checked less than so many seconds ago.
            limit: bytes a second that are read, on average.
            quarantine: set aside epochs that are damaged.
            progress: called with ``(bytes done, bytes in all)``, from worker threads.

        Returns:
            What was read, and all damage that is known: that of earlier runs is looked at again each time.

        Raises:
            InvalidArgumentError: a limit that makes no sense.
            StoreError: the store failed. What was checked by then is noted, if that can be.
        """
        budget = Budget(
            None if max_bytes is None else int(options.check_amount("max_bytes", max_bytes)),
            None if max_seconds is None else options.check_amount("max_seconds", max_seconds),
            limit,
        )
        age = options.check_amount("older_than", older_than)
        options.check_flag("quarantine", quarantine)
        self._foundation.require()
        report = Scrub(self._catalog, budget, older_than=age, progress=progress).run()
        if quarantine:
            self._set_aside({health.epoch: health.problems[0] for health in report.epochs if not health.ok})
        return report

    def mirror(
        self,
        to: Caring,
        epochs: Iterable[int] | None = None,
        keep: Policy | None = None,
        limit: float | None = None,
        progress: Progress | None = None,
        *,
        dry_run: bool = False,
    ) -> MirrorReport:
        """Copy the epochs that another repository lacks, the newest first, each as a whole or not at all.

        Every byte is checked before it is sent. What is there already is not sent again, nor what a mirror that was
        killed has sent. Epochs of the target's own stay as they are, also under the same number, and nothing is
        deleted but what a newer content of the same epoch replaces. Epochs that are pinned here, and are there, are
        pinned there too; nothing is unpinned. It can be called again after any failure, and by several at once.

        Args:
            to: the repository to copy to, on any store.
            epochs: only these; None for all that are not quarantined.
            keep: of those only what this policy keeps, e.g. ``KeepLast(3)``.
            limit: bytes a second that are sent, on average.
            progress: called with ``(bytes done, bytes in all)``, from worker threads.
            dry_run: copy nothing; the report says what would be copied.

        Returns:
            What became of each epoch: damaged ones of the source and conflicts are reported, not raised.

        Raises:
            EpochNotFoundError: one of ``epochs`` is not there.
            StoreError: one of the stores failed. What was copied is there.
        """
        policy = options.check_policy(keep)
        if policy is not None and not isinstance(policy, Policy):
            raise InvalidArgumentError("a mirror copies whole epochs: keep must be one policy, not one for each record")
        numbers = None if epochs is None else [check_epoch(epoch) for epoch in epochs]
        if options.check_flag("dry_run", dry_run):
            look = Mirror(self._catalog, self._place_to_look_at(to))
            chosen = choose(self._catalog, numbers, policy)
            return with_pins(self._catalog, to._catalog, lambda: look.plan(chosen), dry_run=True)
        begun = time.perf_counter()
        mirror = Mirror(self._catalog, self._place(to), limit=limit, hold=True, progress=progress)
        chosen = choose(self._catalog, numbers, policy)
        report = with_pins(self._catalog, to._catalog, lambda: mirror.run(chosen), dry_run=False)
        facts = {"copied": len(report.of("copied")), "bytes_sent": report.bytes_sent, "ok": report.ok}
        where, seconds = to._catalog.store.traits.url, time.perf_counter() - begun
        self._events.tell(MirrorDone, to=where, seconds=seconds, **facts)
        return report

    def copy(
        self,
        epoch: int,
        to: Caring,
        replace: bool = False,
        limit: float | None = None,
        progress: Progress | None = None,
        *,
        dry_run: bool = False,
    ) -> EpochCopy:
        """Copy one epoch to another repository, as ``mirror`` does. Nothing happens if it is there.

        Args:
            replace: also if the target has an epoch of its own under that number.
            dry_run: copy nothing; "copied" means that it would be, and ``reason`` says what it would replace.

        Raises:
            EpochNotFoundError: there is none.
            EpochExistsError: the target has another content under that number.
            CorruptionError: it is damaged; nothing was copied.
            StoreError: one of the stores failed.
        """
        number = check_epoch(epoch)
        replace = options.check_flag("replace", replace)
        place = self._place_to_look_at(to) if options.check_flag("dry_run", dry_run) else self._place(to)
        mirror = Mirror(self._catalog, place, limit=limit, replace=replace, hold=True, progress=progress)
        [done] = (mirror.plan if dry_run else mirror.run)(choose(self._catalog, [number], None)).epochs
        if done.outcome == "damaged":
            raise CorruptionError(done.reason, key=done.key, epoch=number)
        if done.outcome == "gone":
            raise EpochNotFoundError(f"epoch {number}: {done.reason}", epoch=number)
        if done.outcome in ("conflict", "newer"):
            raise EpochExistsError(
                f"epoch {number} was not copied: {done.reason}. To replace it, pass replace=True",
                key=done.key,
                epoch=number,
            )
        return done

    def du(self, policy: AnyPolicy | None = None, progress: Progress | None = None) -> Usage:
        """What each epoch takes on the store, what it shares with others, and what deleting would free.

        Manifests, indexes and listings are read, and no chunk. Damage is reported, not raised.

        Args:
            policy: also tell what a prune by it would free (``bytes_freed``) and which epochs would go (``plan``).
            progress: called with ``(epochs done, epochs in all)``.

        Raises:
            StoreError: the store failed.
        """
        self._foundation.require()
        if policy is None:
            return usage(self._catalog, progress=progress)
        plan = self._prune(policy, dry_run=True, deep=False)
        commits = self._catalog.committed()
        newest = {commit.epoch: commit for commit in commits}
        counted = usage(
            self._catalog,
            victims={commit for commit in commits if commit.epoch in plan.removed},
            thinned={newest[epoch]: names for epoch, names in plan.dropped.items() if epoch in newest},
            progress=progress,
        )
        return replace(counted, plan=plan)

    def diff(self, first: int, second: int, record: str | None = None, progress: Progress | None = None) -> Diff:
        """How two epochs differ: arrays, files, plain values, metadata.

        Chunks with equal digests are not read; of the others a few at a time are in memory.

        Args:
            record: compare only this one.
            progress: called with ``(bytes done, bytes in all)``, from worker threads.

        Raises:
            EpochNotFoundError, RecordNotFoundError: there is no such epoch, or neither has that record.
            CorruptionError: what had to be read is damaged.
            StoreError: the store failed.
        """
        one, two = (self._newest(check_epoch(epoch)) for epoch in (first, second))
        return diff(self._catalog, one, two, None if record is None else check_record_name(record), progress)

    def repair(
        self,
        *,
        epoch: int | None = None,
        sources: Iterable[Caring | str | os.PathLike[str]] = (),
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> RepairReport:
        """Find what is damaged or missing, as a deep ``verify`` does, and put it back from wherever a good copy lies.

        Looked for is the same content in other attempts of this repository, then in the sources. What is put back was
        proved before and is read back after. It can be killed and called again at any time: nothing gets worse.

        Args:
            epoch: only this one; None for all.
            sources: mirrors, plain copies or any other repositories: as opened, or their URLs.
            dry_run: change nothing; the report says what would be mended.
            progress: called with ``(bytes done, bytes in all)`` of each epoch, from worker threads.

        Returns:
            What became of each epoch and object: what cannot be mended is reported, not raised, with the records that
            can still be restored.

        Raises:
            EpochNotFoundError: there is no such epoch.
            RepositoryNotFoundError: one of the sources is none.
            InvalidArgumentError: a source is this repository.
            StoreError: a store failed. What was mended stays so; call it again.
        """
        number, dry_run = None if epoch is None else check_epoch(epoch), options.check_flag("dry_run", dry_run)
        self._foundation.require(restore=not dry_run)
        if not dry_run:
            self._foundation.prepare_to_write()
        with ExitStack() as opened:
            others = [self._source(source, opened) for source in sources]
            mend = Repair(self._catalog, self._foundation.id, others, dry_run=dry_run, progress=progress)
            reason = self._foundation.mend_marker(dry_run)
            marker = None if reason is None else Mend(keys.MARKER, reason, "the manifests")
            return RepairReport(mend.run(number), dry_run, marker, {} if number is not None else mend.absent())

    def _source(self, source: Caring | str | os.PathLike[str], opened: ExitStack) -> Catalog:
        catalog = source._catalog if isinstance(source, Caring) else Catalog(opened.enter_context(open_store(source)))
        url = catalog.store.traits.url
        if source is self or (url == self._catalog.store.traits.url and url != MemoryStore().traits.url):
            raise InvalidArgumentError("a source of a repair is another place than what is repaired")
        if catalog.marker() is None:
            raise RepositoryNotFoundError(f"there is no repository at {url}: check the URL of the source")
        return catalog

    def export(
        self,
        epoch: int,
        to: str | os.PathLike[str],
        format: Format = "safetensors",
        records: Sequence[str] | None = None,
        force: bool = False,
        progress: Progress | None = None,
        *,
        dry_run: bool = False,
    ) -> ExportReport:
        """Write a checkpoint as files that other programs read; ``formats.read`` gives them back bit for bit.

        Every byte is verified. Memory is a window of chunks. A name appears when all of the export is whole: an export
        that is killed leaves nothing that looks like one, and a ``to`` that is new appears in one step.

        Args:
            to: a folder, made if need be.
            format: "safetensors" or "npz": a file for each record. "files": file records under the names that they had,
                what ``formats.read`` took from a Trainer's folder or a Lightning file as it was, other records as
                folders of .npy files.
            records: only these; None for all.
            force: overwrite files that exist.
            dry_run: write nothing, read no chunk; the report says what would be written, and over what.
            progress: called with ``(bytes done, bytes in all)``, from worker threads.

        Raises:
            EpochNotFoundError, RecordNotFoundError: there is no such epoch or record.
            AlreadyExistsError: a file is there already. Nothing was written.
            InvalidArgumentError: two records would go to one place, or a file record cannot become that format.
            InvalidRecordError: a safetensors header would be larger than readers take.
            FormatError: torch is needed and not installed.
            CorruptionError: a byte on the store is wrong or missing. Nothing was written.
            StoreFullError, AccessError: ``to`` cannot be written.
        """
        names = None if records is None else [check_record_name(name) for name in _listed(records)]
        force = options.check_flag("force", force)
        dry_run, manifest = options.check_flag("dry_run", dry_run), self._newest(check_epoch(epoch))
        return export(self._catalog, manifest, Path(to), format, names, force, progress, dry_run)

    def _newest(self, epoch: int) -> Manifest:
        for _ in range(3):  # it may be replaced between the listing and the read
            for commit in self._catalog.committed(epoch)[-1:]:
                with suppress(ObjectNotFoundError):
                    return self._catalog.manifest(commit)
        self._foundation.require()
        raise EpochNotFoundError(f"there is no epoch {epoch} in {self._catalog.store.traits.url}", epoch=epoch)

    def _refuse_itself(self, to: Caring, *, dry_run: bool = False) -> None:
        """A copy of a repository onto itself would find all there, and look like a second one.

        A place may have several names: what is put under the one is looked for under the other. A dry run, which puts
        nothing, goes by the names.
        """
        here, there = self._catalog.store, to._catalog.store
        same = to is self
        if not same and to._foundation.id == self._foundation.id:  # so have plain copies
            same = dry_run and here.traits.url == there.traits.url != MemoryStore().traits.url
            same = same or (not dry_run and seen_from(there, here))
        if same:
            raise InvalidArgumentError("source and target are the same place: name another to copy to")

    def _place_to_look_at(self, to: Caring) -> Place:
        self._refuse_itself(to, dry_run=True)
        return Place(to._catalog, "")

    def _place(self, to: Caring) -> Place:
        self._foundation.require()
        to._foundation.require(restore=True)
        to._foundation.prepare_to_write()
        self._refuse_itself(to)
        return Place(to._catalog, to._foundation.id, to._flights.add)


def _listed(names: Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
