"""Events as Prometheus metrics: ``ckptstore.open(url, on_event=PrometheusEvents())``.

``pip install 'ckptstore[prometheus]'``. Names and units follow the conventions of Prometheus; the only labels are the
URL of the repository, the outcome of a save, and classes of errors and failures. Make one for each registry.
"""

from __future__ import annotations

import math
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from ckptstore import events

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of the buckets of all histograms."""


class PrometheusEvents:
    """A listener that counts.

    Args:
        registry: where the metrics are registered; by default that of ``prometheus_client`` itself.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"ckptstore_{name}", about, ("url", *labels), registry=registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"ckptstore_{name}", about, ("url",), registry=registry, multiprocess_mode="mostrecent")

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(f"ckptstore_{name}", about, ("url",), registry=registry, buckets=BUCKETS)

        self._below: dict[str, int] = {}  # the newest epoch in each lower tier
        self._saves = counter("saves_total", "Saves that have ended: committed, failed or skipped.", "outcome")
        self._failures = counter("save_failures_total", "Saves that failed, by class of the error.", "error", "failure")
        self._seconds = histogram("save_seconds", "From the call of a save to its end, pruning included.")
        self._stall = histogram("save_stall_seconds", "How long a save has held the trainer up.")
        self._state = counter("state_bytes_total", "Bytes of state in committed saves, before the codec.")
        self._sent = counter("sent_bytes_total", "Bytes that committed saves sent to the store, after the codec.")
        self._reused = counter("reused_bytes_total", "Bytes of state that committed saves found on the store.")
        self._newest = gauge("newest_epoch", "Number of the newest durable epoch that this process knows of.")
        self._newest_at = gauge("newest_epoch_timestamp_seconds", "When that was committed, in seconds since 1970.")
        self._size = gauge("checkpoint_state_bytes", "Bytes of state of the last committed checkpoint.")
        self._stored = gauge("checkpoint_stored_bytes", "Bytes that the last committed checkpoint takes in all.")
        self._retries = counter("retries_total", "Requests that are tried again, by class of the failure.", "failure")
        self._restores = counter("restores_total", "Loads of records that succeeded.")
        self._restored = counter("restored_bytes_total", "Bytes of state that loads have given back.")
        self._restore_seconds = histogram("restore_seconds", "How long loads took.")
        self._damage = counter("damage_found_total", "How often an epoch was found damaged.")
        self._pruned = counter("pruned_epochs_total", "Epochs that prunings removed.")
        self._prune_failures = counter("prune_failures_total", "Prunings that failed.")
        self._copied = counter("tier_copied_epochs_total", "Epochs that were copied to the lower tier at url.")
        self._copied_bytes = counter("tier_sent_bytes_total", "Bytes that were sent to the lower tier at url.")
        self._copy_failures = counter("tier_failures_total", "Copies to the lower tier at url that failed.", "failure")
        self._freed = counter("freed_bytes_total", "Stored bytes that prunings and gc removed.")

    def __call__(self, event: events.AnyEvent) -> None:
        """Count one event."""
        handle: Any = getattr(self, f"_on_{type(event).__name__}", None)
        if handle is not None:
            handle(event, event.url)

    def _on_SaveStarted(self, event: events.SaveStarted, url: str) -> None:  # noqa: N802 (the event's name)
        self._saves.labels(url, "failed")  # a series that begins at 0 shows its first increase

    def _on_SaveCommitted(self, event: events.SaveCommitted, url: str) -> None:  # noqa: N802
        self._saves.labels(url, "committed").inc()
        self._seconds.labels(url).observe(event.seconds)
        self._stall.labels(url).observe(event.stall_seconds)
        self._state.labels(url).inc(event.bytes_state)
        self._sent.labels(url).inc(event.bytes_sent)
        self._reused.labels(url).inc(event.bytes_reused)
        self._size.labels(url).set(event.bytes_state)
        self._stored.labels(url).set(event.bytes_stored)
        self._know(event.epoch, event.committed_at, url)

    def _on_SaveFailed(self, event: events.SaveFailed, url: str) -> None:  # noqa: N802
        self._saves.labels(url, "failed").inc()
        self._failures.labels(url, event.error, event.failure).inc()
        self._seconds.labels(url).observe(event.seconds)
        self._stall.labels(url).observe(event.stall_seconds)

    def _on_SaveSkipped(self, event: events.SaveSkipped, url: str) -> None:  # noqa: N802
        self._saves.labels(url, "skipped").inc()

    def _on_NewestFound(self, event: events.NewestFound, url: str) -> None:  # noqa: N802
        self._know(event.epoch, event.committed_at, url)

    def _on_RetryEvent(self, event: events.RetryEvent, url: str) -> None:  # noqa: N802
        self._retries.labels(url, event.failure).inc()

    def _on_RestoreDone(self, event: events.RestoreDone, url: str) -> None:  # noqa: N802
        self._restores.labels(url).inc()
        self._restored.labels(url).inc(event.nbytes)
        self._restore_seconds.labels(url).observe(event.seconds)

    def _on_DamageFound(self, event: events.DamageFound, url: str) -> None:  # noqa: N802
        self._damage.labels(url).inc()

    def _on_PruneDone(self, event: events.PruneDone, url: str) -> None:  # noqa: N802
        self._pruned.labels(url).inc(len(event.epochs))
        self._freed.labels(url).inc(event.bytes_freed)
        self._prune_failures.labels(url).inc(1 if event.error else 0)

    def _on_GcDone(self, event: events.GcDone, url: str) -> None:  # noqa: N802
        self._freed.labels(url).inc(event.bytes_freed)

    def _on_TierCopied(self, event: events.TierCopied, url: str) -> None:  # noqa: N802
        self._copied.labels(event.to).inc()
        self._copied_bytes.labels(event.to).inc(event.bytes_sent)
        if event.epoch >= self._below.get(event.to, 0):  # the newest is copied first, what it lacks after it
            self._below[event.to] = event.epoch
            self._know(event.epoch, event.committed_at, event.to)

    def _on_TierFailed(self, event: events.TierFailed, url: str) -> None:  # noqa: N802
        self._copy_failures.labels(event.to, event.failure).inc()

    def _know(self, epoch: int, committed_at: float, url: str) -> None:
        self._newest.labels(url).set(epoch)
        if math.isfinite(committed_at):
            self._newest_at.labels(url).set(committed_at)
