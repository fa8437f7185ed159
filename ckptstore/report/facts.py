"""The facts of a report: what a repository holds, what is wrong with it, and what could go. Reads only.

The sums come from ``du``, the reasons from ``plan``; both read manifests, indexes and listings, and no chunk. Of each
epoch a row of numbers is kept, of its metadata the metrics, and of both no more than the caps below.
"""

from __future__ import annotations

import shlex
import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from ckptstore.catalog import Catalog, Committed, Skipped
from ckptstore.checkpoint import metadata_of
from ckptstore.errors import CkptStoreError, CorruptionError
from ckptstore.manifest import Manifest
from ckptstore.pipeline import Progress
from ckptstore.policies import AnyPolicy, KeepLast, PerRecord, Policy
from ckptstore.report.largest import Arrays, arrays_of
from ckptstore.repository import Repository
from ckptstore.stores.space import Space
from ckptstore.usage import Usage
from ckptstore.verify import VerifyReport

EXAMPLE = KeepLast(5)
"""What a report without a policy shows the effect of."""

MAX_METRICS = 64
MAX_RECORDS = 64
_BATCH = 256
_MAX_DEPTH = 3
_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One epoch (its newest generation). ``saved`` is the store's time, in seconds since 1970; sizes are in bytes.

    ``damaged`` says why its manifest cannot be read, else it is empty; then the numbers are 0.
    """

    epoch: int
    generation: int
    saved: float
    run: str = ""
    bytes_state: int = 0
    bytes_needed: int = 0
    bytes_sent: int = 0
    bytes_reused: int = 0
    records: int = 0
    left_out: tuple[str, ...] = ()
    damaged: str = ""


@dataclass(slots=True)
class Metric:
    """A number that metadata holds, by its dotted path: its values, and the numbers of the rows that have them."""

    name: str
    rows: array[int]
    values: array[float]


@dataclass(slots=True)
class RecordFacts:
    """A record in all epochs: for each row its bytes of state and on the store, or 0."""

    name: str
    state: array[int]
    stored: array[int]
    epochs: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a report shows. Times are seconds since 1970, sizes are bytes.

    Attributes:
        rows: the epochs, ascending.
        more_metrics, more_records: how many names there are beyond those that are shown.
        newest: the newest intact epoch (names and sizes looked at), None if there is none.
        skipped: newer epochs than that, and what is wrong with them.
        checked: what a check of all epochs found, None if there was none.
        usage: what takes how much; ``usage.plan`` is what a prune by ``policy`` would do.
        example: nobody gave that policy; it stands for any.
    """

    url: str
    repository: str
    made: float
    rows: tuple[Row, ...]
    metrics: tuple[Metric, ...]
    records: tuple[RecordFacts, ...]
    more_metrics: int
    more_records: int
    newest: int | None
    skipped: tuple[Skipped, ...]
    checked: VerifyReport | None
    usage: Usage
    policy: str
    example: bool
    run: str
    pins: Mapping[int, str]
    quarantined: Mapping[int, str]
    arrays: Arrays | None
    space: Space | None
    notes: tuple[str, ...] = ()

    @property
    def damaged(self) -> dict[int, str]:
        """Epochs of which something is known to be wrong, each with what."""
        found = {row.epoch: row.damaged for row in self.rows if row.damaged}
        found.update((row.epoch, row.damaged) for row in self.usage.epochs if row.damaged)
        for step in self.skipped:
            why = self.quarantined.get(step.epoch)
            if why is None or why.startswith(
                "damaged: "
            ):  # as verify and scrub set it aside; people have other reasons
                found.setdefault(step.epoch, step.reason)
        for health in self.checked.epochs if self.checked is not None else ():
            for problem in health.problems[:1]:
                more = f" (and {len(health.problems) - 1} more)" if len(health.problems) > 1 else ""
                about = problem.reason if problem.key in problem.reason else f"{problem.key} {problem.reason}"
                found[health.epoch] = about + more
        return dict(sorted(found.items()))


def _options(policy: AnyPolicy) -> str:
    """A policy as options of ``ckptstore prune``."""
    if isinstance(policy, Policy):
        return f"--keep {shlex.quote(str(policy))}"
    each = policy.policies if isinstance(policy, PerRecord) else policy
    return " ".join(f"--record {shlex.quote(f'{name}={one}')}" for name, one in each.items())


def collect(
    repo: Repository,
    policy: AnyPolicy | None = None,
    *,
    policy_text: str = "",
    check: float | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Look at a repository. Nothing is written; damage is a fact, not an error.

    Args:
        policy: what a prune would keep; by default an example (``EXAMPLE``), and the report says that it is one.
        policy_text: the policy as options of ``ckptstore prune``, in the words of whoever gave it.
        check: look at every epoch, not only at the newest: 0 compares names and sizes, a share up to 1 reads so much of
            the chunks.
        progress: called with ``(epochs done, epochs in all)`` while usage is counted.

    Raises:
        RepositoryNotFoundError: there is none (any more).
        FormatError: a newer version wrote some of it.
        StoreError: the store failed.
    """
    chosen = EXAMPLE if policy is None else policy
    usage = repo.du(chosen, progress)
    catalog = Catalog(repo.store)
    gathered = _Gathered()
    times = catalog.commit_times()
    newest_of = {commit.epoch: commit for commit in sorted(times)}
    commits = list(newest_of.values())
    for start in range(0, len(commits), _BATCH):
        for commit, found in catalog.manifests(commits[start : start + _BATCH]):
            gathered.add(commit, found, times[commit])
    newest, skipped = catalog.newest_intact()
    notes: list[str] = []
    arrays = None
    if newest is not None:
        try:
            arrays = arrays_of(catalog, newest)
        except CkptStoreError as error:  # it went away meanwhile, or its arrays are described in a way we cannot read
            notes.append(f"the arrays of epoch {newest.epoch} cannot be listed: {error}")
    checked = None if check is None else repo.verify(deep=check > 0, sample=check or 1.0)
    return Facts(
        url=repo.url,
        repository=repo.id,
        made=time.time(),
        rows=tuple(gathered.rows),
        metrics=tuple(gathered.metrics.values()),
        records=tuple(gathered.records.values()),
        more_metrics=len(gathered.more_metrics),
        more_records=len(gathered.more_records),
        newest=None if newest is None else newest.epoch,
        skipped=tuple(skipped),
        checked=checked,
        usage=usage,
        policy=policy_text or _options(chosen),
        example=policy is None,
        run=repo.run_id,
        pins=repo.pins(),
        quarantined=repo.quarantined(),
        arrays=arrays,
        space=repo.store.space(),
        notes=tuple(notes),
    )


@dataclass
class _Gathered:
    """What the manifests say, row by row."""

    rows: list[Row] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    records: dict[str, RecordFacts] = field(default_factory=dict)
    more_metrics: set[str] = field(default_factory=set)
    more_records: set[str] = field(default_factory=set)

    def add(self, commit: Committed, found: Manifest | CorruptionError, modified: float) -> None:
        number = len(self.rows)
        if isinstance(found, CorruptionError):
            self.rows.append(Row(commit.epoch, commit.generation, modified, damaged=found.message))
        else:
            self.rows.append(_row(commit, found, modified))
            self._note_records(found, number)
            self._note_metrics(found, number)
        for record in self.records.values():
            if len(record.state) == number:
                record.state.append(0)
                record.stored.append(0)

    def _note_records(self, manifest: Manifest, number: int) -> None:
        for entry in manifest.records:
            record = self.records.get(entry.name)
            if record is None:
                if len(self.records) >= MAX_RECORDS:
                    _count(self.more_records, entry.name)
                    continue
                empty = bytes(8 * number)
                record = self.records[entry.name] = RecordFacts(entry.name, array("q", empty), array("q", empty))
            record.state.append(_fitting(entry.bytes_state))
            record.stored.append(_fitting(entry.bytes_stored + entry.stored_length))
            record.epochs += 1

    def _note_metrics(self, manifest: Manifest, number: int) -> None:
        for name, value in numbers_in(metadata_or_nothing(manifest)).items():
            metric = self.metrics.get(name)
            if metric is None:
                if len(self.metrics) >= MAX_METRICS:
                    _count(self.more_metrics, name)
                    continue
                metric = self.metrics[name] = Metric(name, array("q"), array("d"))
            metric.rows.append(number)
            metric.values.append(value)


def _row(commit: Committed, found: Manifest, modified: float) -> Row:
    return Row(
        commit.epoch,
        commit.generation,
        found.saved if found.saved > 0 else modified,
        found.run,
        _fitting(found.bytes_state),
        _fitting(found.bytes_needed),
        _fitting(found.bytes_sent),
        _fitting(found.bytes_reused),
        records=len(found.records),
        left_out=tuple(islice(found.left_out, MAX_RECORDS)),
    )


def _count(names: set[str], name: str) -> None:
    if len(names) < 10_000:  # or hostile metadata, with new names in each epoch, would fill the memory
        names.add(name[:_MAX_NAME])


def _fitting(nbytes: int) -> int:
    return max(0, min(nbytes, 2**63 - 1))


def metadata_or_nothing(manifest: Manifest) -> Mapping[str, Any]:
    """The metadata; nothing where it cannot be decoded, which is no damage of the state."""
    with suppress(CkptStoreError, ValueError, TypeError):
        return metadata_of(manifest)
    return {}


def numbers_in(metadata: Mapping[str, Any]) -> dict[str, float]:
    """The real numbers in metadata, by dotted path, at most ``MAX_METRICS``; also NaN and infinite ones, no bools."""
    found: dict[str, float] = {}

    def walk(value: Any, path: str, depth: int) -> None:
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            for key, inner in value.items():
                if len(found) < MAX_METRICS:
                    walk(inner, f"{path}.{key}" if path else str(key), depth + 1)
        elif isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.complexfloating)):
            with suppress(OverflowError, ValueError, TypeError):  # an int beyond all floats
                found[path[:_MAX_NAME]] = float(value)

    walk(metadata, "", 0)
    return found
