"""Events as OpenTelemetry metrics: ``ckptstore.open(url, on_event=OpenTelemetryEvents())``.

``pip install 'ckptstore[opentelemetry]'``, and an SDK with an exporter of your choice. Units are UCUM (``s``, ``By``).
Attributes: the URL of the repository, the outcome of a save, ``error.type`` and the class of a failure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from opentelemetry import metrics

from ckptstore import __version__, events

URL, OUTCOME, FAILURE, ERROR = "ckptstore.url", "ckptstore.outcome", "ckptstore.failure", "error.type"
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of the buckets of histograms that are advised; a view of the SDK overrides them."""


class OpenTelemetryEvents:
    """A listener that records.

    Args:
        meter_provider: whose meter is used; by default the global one.
    """

    def __init__(self, meter_provider: metrics.MeterProvider | None = None) -> None:
        meter = metrics.get_meter("ckptstore", __version__, meter_provider)
        self._newest: dict[str, tuple[int, float]] = {}

        def counter(name: str, unit: str, about: str) -> Any:
            return meter.create_counter(f"ckptstore.{name}", unit, about).add

        def histogram(name: str, about: str) -> Any:
            bounds = {"explicit_bucket_boundaries_advisory": BUCKETS}
            return meter.create_histogram(f"ckptstore.{name}", "s", about, **bounds).record

        self._saves = counter("saves", "{save}", "Saves that have ended: committed, failed or skipped.")
        self._duration = histogram("save.duration", "From the call of a save to its end, pruning included.")
        self._stall = histogram("save.stall", "How long a save has held the trainer up.")
        self._state = counter("save.state", "By", "State in committed saves, before the codec.")
        self._sent = counter("save.sent", "By", "What committed saves sent to the store, after the codec.")
        self._reused = counter("save.reused", "By", "State that committed saves found on the store.")
        self._stored = counter("save.stored", "By", "What the checkpoints committed take on the store, reused or new.")
        self._retries = counter("retries", "{retry}", "Requests that are tried again.")
        self._restored = counter("restore.state", "By", "State that loads have given back.")
        self._restore = histogram("restore.duration", "How long loads took.")
        self._damage = counter("damage", "{finding}", "How often an epoch was found damaged.")
        self._pruned = counter("prune.epochs", "{epoch}", "Epochs that prunings removed.")
        self._prune_failures = counter("prune.failures", "{prune}", "Prunings that failed.")
        self._copied = counter("tier.epochs", "{epoch}", "Epochs that were copied to a lower tier.")
        self._copied_bytes = counter("tier.sent", "By", "What was sent to a lower tier.")
        self._copy_failures = counter("tier.failures", "{copy}", "Copies to a lower tier that failed.")
        self._freed = counter("freed", "By", "What prunings and gc removed from the store.")
        meter.create_observable_gauge(
            "ckptstore.newest.age", [self._ages], "s", "Age of the newest durable epoch that this process knows of."
        )
        meter.create_observable_gauge("ckptstore.newest.epoch", [self._epochs], "{epoch}", "Its number.")

    def __call__(self, event: events.AnyEvent) -> None:
        """Record one event."""
        handle: Any = getattr(self, f"_on_{type(event).__name__}", None)
        if handle is not None:
            handle(event, {URL: event.url})

    def _ages(self, _: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        """Asked for by each collection: it goes on growing while nothing is saved."""
        now = time.time()
        ages = {url: max(0.0, now - at) for url, (_, at) in self._known() if math.isfinite(at)}
        return [metrics.Observation(age, {URL: url}) for url, age in ages.items()]

    def _epochs(self, _: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        return [metrics.Observation(epoch, {URL: url}) for url, (epoch, _) in self._known()]

    def _known(self) -> list[tuple[str, tuple[int, float]]]:
        return list(self._newest.items())

    def _on_SaveCommitted(self, event: events.SaveCommitted, where: dict[str, str]) -> None:  # noqa: N802
        self._saves(1, {**where, OUTCOME: "committed"})
        self._duration(event.seconds, where)
        self._stall(event.stall_seconds, where)
        self._state(event.bytes_state, where)
        self._sent(event.bytes_sent, where)
        self._reused(event.bytes_reused, where)
        self._stored(event.bytes_stored, where)
        self._newest[event.url] = event.epoch, event.committed_at

    def _on_SaveFailed(self, event: events.SaveFailed, where: dict[str, str]) -> None:  # noqa: N802
        self._saves(1, {**where, OUTCOME: "failed", ERROR: event.error, FAILURE: event.failure})
        self._duration(event.seconds, {**where, ERROR: event.error})
        self._stall(event.stall_seconds, where)

    def _on_SaveSkipped(self, event: events.SaveSkipped, where: dict[str, str]) -> None:  # noqa: N802
        self._saves(1, {**where, OUTCOME: "skipped"})

    def _on_NewestFound(self, event: events.NewestFound, where: dict[str, str]) -> None:  # noqa: N802
        self._newest[event.url] = event.epoch, event.committed_at

    def _on_RetryEvent(self, event: events.RetryEvent, where: dict[str, str]) -> None:  # noqa: N802
        self._retries(1, {**where, FAILURE: event.failure})

    def _on_RestoreDone(self, event: events.RestoreDone, where: dict[str, str]) -> None:  # noqa: N802
        self._restored(event.nbytes, where)
        self._restore(event.seconds, where)

    def _on_DamageFound(self, event: events.DamageFound, where: dict[str, str]) -> None:  # noqa: N802
        self._damage(1, where)

    def _on_PruneDone(self, event: events.PruneDone, where: dict[str, str]) -> None:  # noqa: N802
        self._pruned(len(event.epochs), where)
        self._freed(event.bytes_freed, where)
        if event.error:
            self._prune_failures(1, {**where, ERROR: event.error})

    def _on_GcDone(self, event: events.GcDone, where: dict[str, str]) -> None:  # noqa: N802
        self._freed(event.bytes_freed, where)

    def _on_TierCopied(self, event: events.TierCopied, where: dict[str, str]) -> None:  # noqa: N802
        below = {URL: event.to}
        self._copied(1, below)
        self._copied_bytes(event.bytes_sent, below)
        if event.epoch >= self._newest.get(event.to, (0, 0.0))[0]:  # the newest is copied first, what it lacks after it
            self._newest[event.to] = event.epoch, event.committed_at

    def _on_TierFailed(self, event: events.TierFailed, where: dict[str, str]) -> None:  # noqa: N802
        self._copy_failures(1, {URL: event.to, ERROR: event.error, FAILURE: event.failure})
