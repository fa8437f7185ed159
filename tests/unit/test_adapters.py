"""The adapters of events, with the real libraries: what is scraped, collected and logged."""

from __future__ import annotations

import json
import logging
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import KeepLast, events
from ckptstore.adapters.logging import LogEvents, facts_of
from ckptstore.errors import ThrottledError

NOW = time.time()
URL = "memory://run"
WHERE: dict[str, Any] = {"url": URL, "run_id": "r"}
TIMES: dict[str, Any] = {"seconds": 2.0, "stall_seconds": 0.5}
BYTES: dict[str, Any] = {"bytes_state": 1000, "bytes_stored": 800, "bytes_sent": 300, "bytes_reused": 600}
COMMITTED = events.SaveCommitted(**WHERE, **TIMES, **BYTES, epoch=7, background=True, committed_at=NOW - 60, pruned=2)
WHY: dict[str, Any] = {"error": "AccessError", "failure": "permanent", "message": "no way in"}
FAILED = events.SaveFailed(**WHERE, **TIMES, **WHY, epoch=8, background=False)
RETRY = events.RetryEvent("put", "k", ThrottledError("slow down"), 2, 1.0, 0.5, URL)
ALL: list[Any] = [
    events.SaveStarted(**WHERE, epoch=7, background=True, bytes_state=1000),
    COMMITTED,
    FAILED,
    events.SaveSkipped(**WHERE, epoch=9),
    events.NewestFound(**WHERE, epoch=7, committed_at=NOW - 60),
    RETRY,
    RETRY,
    events.RestoreDone(**WHERE, epoch=7, nbytes=1000, seconds=1.0),
    events.DamageFound(**WHERE, epoch=6, key="attempts/x", reason="rotten"),
    events.VerifyDone(**WHERE, epochs=2, damaged=(6,), deep=True, seconds=1.0),
    events.PruneDone(**WHERE, epochs=(1, 2), thinned=(3,), bytes_freed=500, seconds=1.0),
    events.PruneDone(**WHERE, epochs=(), thinned=(), bytes_freed=0, seconds=1.0, error="StoreError"),
    events.GcDone(**WHERE, objects=3, bytes_freed=50, seconds=1.0),
    events.MirrorDone(**WHERE, to="memory://other", copied=2, bytes_sent=9, ok=True, seconds=1.0),
    events.TierCopied(**WHERE, to="memory://lower", epoch=7, committed_at=NOW - 60, bytes_sent=40, seconds=1.0),
    events.TierCopied(**WHERE, to="memory://lower", epoch=6, committed_at=NOW - 90, bytes_sent=2, seconds=1.0),
    events.TierFailed(
        **WHERE, to="memory://lower", error="StoreFullError", failure="space", message="no room", failures=1
    ),
]


def train(url: Path, on_event: Any, epochs: int = 3) -> str:
    """A short run; the repository's URL."""
    with ckptstore.open(url, on_event=on_event, keep=KeepLast(2)) as repo:
        for epoch in range(epochs):
            repo.save_async(epoch, {"model": {"w": np.full(5000, epoch, "f8")}}).result(60)
        repo.latest().load()  # type: ignore[union-attr]
    return repo.url


def test_every_event_is_among_the_examples() -> None:
    """An adapter that forgets a new event is noticed."""
    assert {type(event) for event in ALL} == {*events.Event.__subclasses__(), events.RetryEvent}


# ---- logging -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ALL, ids=lambda event: type(event).__name__)
def test_log_records_have_structured_fields(event: Any, caplog: pytest.LogCaptureFixture) -> None:
    """All attributes in one object that JSON can write, and a text for people."""
    with caplog.at_level(logging.DEBUG, "mine"):
        LogEvents("mine")(event)
    [record] = caplog.records
    facts = json.loads(json.dumps(record.ckptstore))  # type: ignore[attr-defined]
    assert facts["event"] == type(event).__name__
    assert facts["url"] == URL
    assert record.message.startswith(f"event={type(event).__name__} ")
    bad = isinstance(event, (events.SaveFailed, events.DamageFound, events.SaveSkipped)) or bool(
        getattr(event, "error", "")
    )
    quiet = isinstance(event, (events.SaveStarted, events.RetryEvent))
    assert (record.levelno >= logging.WARNING) == (bad and not quiet)


def test_log_fields_of_a_save_and_a_retry() -> None:
    """Also what is derived: the ratio, the class of the failure."""
    assert facts_of(COMMITTED)["ratio"] == 1.25
    assert facts_of(RETRY)["failure"] == "throttled"
    assert facts_of(RETRY)["error"] == "ThrottledError: slow down"


def test_a_run_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From a real run; what is below the level is not even put together."""
    with caplog.at_level(logging.INFO, "ckptstore.events"):
        train(tmp_path / "r", LogEvents())
    told = [record.ckptstore["event"] for record in caplog.records if record.name == "ckptstore.events"]  # type: ignore[attr-defined]
    assert told == ["SaveCommitted", "SaveCommitted", "PruneDone", "SaveCommitted", "NewestFound", "RestoreDone"]


# ---- Prometheus --------------------------------------------------------------------------------------------


def scraped(text: str) -> dict[str, float]:
    """Series → value."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {series: float(value) for series, value in (line.rsplit(" ", 1) for line in lines)}


def test_prometheus_counts_each_event() -> None:
    """What a scrape shows after one event of each kind."""
    client = pytest.importorskip("prometheus_client", reason="pip install 'ckptstore[prometheus]'")
    from ckptstore.adapters.prometheus import PrometheusEvents

    registry = client.CollectorRegistry()
    listener = PrometheusEvents(registry)
    for event in ALL:
        listener(event)
    values = scraped(client.generate_latest(registry).decode())
    expected = {
        'saves_total{outcome="committed",url="U"}': 1,
        'saves_total{outcome="failed",url="U"}': 1,
        'saves_total{outcome="skipped",url="U"}': 1,
        'save_failures_total{error="AccessError",failure="permanent",url="U"}': 1,
        'save_seconds_sum{url="U"}': 4.0,
        'save_seconds_count{url="U"}': 2,
        'save_seconds_bucket{le="3.0",url="U"}': 2,
        'save_stall_seconds_sum{url="U"}': 1.0,
        'state_bytes_total{url="U"}': 1000,
        'sent_bytes_total{url="U"}': 300,
        'reused_bytes_total{url="U"}': 600,
        'checkpoint_state_bytes{url="U"}': 1000,
        'checkpoint_stored_bytes{url="U"}': 800,
        'newest_epoch{url="U"}': 7,
        'newest_epoch_timestamp_seconds{url="U"}': NOW - 60,
        'retries_total{failure="throttled",url="U"}': 2,
        'restores_total{url="U"}': 1,
        'restored_bytes_total{url="U"}': 1000,
        'damage_found_total{url="U"}': 1,
        'pruned_epochs_total{url="U"}': 2,
        'prune_failures_total{url="U"}': 1,
        'freed_bytes_total{url="U"}': 550,
        'tier_copied_epochs_total{url="memory://lower"}': 2,
        'tier_sent_bytes_total{url="memory://lower"}': 42,
        'tier_failures_total{failure="space",url="memory://lower"}': 1,
        'newest_epoch{url="memory://lower"}': 7,
        'newest_epoch_timestamp_seconds{url="memory://lower"}': NOW - 60,
    }
    found = {series: values.get(f"ckptstore_{series.replace('U', URL)}") for series in expected}
    assert found == pytest.approx(expected)


def test_prometheus_names_and_labels() -> None:
    """By the conventions: base units, ``_total`` on counters alone, no label that grows with the epochs."""
    client = pytest.importorskip("prometheus_client", reason="pip install 'ckptstore[prometheus]'")
    from ckptstore.adapters.prometheus import PrometheusEvents

    registry = client.CollectorRegistry()
    listener = PrometheusEvents(registry)
    for epoch in range(100):
        listener(replace(COMMITTED, epoch=epoch))
        listener(replace(FAILED, epoch=epoch))
    families = list(registry.collect())
    assert all(family.documentation.endswith(".") for family in families)
    for family in families:
        assert re.fullmatch(r"ckptstore_[a-z_]+", family.name)
        names = {sample.name for sample in family.samples if not sample.name.endswith("_created")}
        assert family.type != "counter" or names <= {f"{family.name}_total"}
        assert {key for sample in family.samples for key in sample.labels} <= {
            "url",
            "outcome",
            "error",
            "failure",
            "le",
        }
    assert sum(len(family.samples) for family in families) < 100
    listener(replace(COMMITTED, committed_at=math.nan))
    assert scraped(client.generate_latest(registry).decode())[
        f'ckptstore_newest_epoch_timestamp_seconds{{url="{URL}"}}'
    ] == pytest.approx(NOW - 60)


def test_prometheus_of_a_real_run_as_a_textfile(tmp_path: Path) -> None:
    """As a batch job leaves it to the node exporter."""
    client = pytest.importorskip("prometheus_client", reason="pip install 'ckptstore[prometheus]'")
    from ckptstore.adapters.prometheus import PrometheusEvents

    registry = client.CollectorRegistry()
    url = train(tmp_path / "r", PrometheusEvents(registry))
    client.write_to_textfile(str(tmp_path / "ckptstore.prom"), registry)
    values = scraped((tmp_path / "ckptstore.prom").read_text("utf-8"))
    assert values[f'ckptstore_saves_total{{outcome="committed",url="{url}"}}'] == 3
    assert values[f'ckptstore_state_bytes_total{{url="{url}"}}'] == 120_000
    assert values[f'ckptstore_pruned_epochs_total{{url="{url}"}}'] == 1
    assert abs(values[f'ckptstore_newest_epoch_timestamp_seconds{{url="{url}"}}'] - time.time()) < 300
    stall = values[f'ckptstore_save_stall_seconds_sum{{url="{url}"}}']
    assert 0 < stall <= values[f'ckptstore_save_seconds_sum{{url="{url}"}}']


# ---- OpenTelemetry -----------------------------------------------------------------------------------------


class Collected:
    """An SDK that keeps metrics in memory."""

    def __init__(self) -> None:
        pytest.importorskip("opentelemetry.sdk.metrics", reason="pip install opentelemetry-sdk")
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        from ckptstore.adapters.opentelemetry import OpenTelemetryEvents

        self.reader: Any = InMemoryMetricReader()
        self.provider: Any = MeterProvider([self.reader])
        self.listener = OpenTelemetryEvents(self.provider)

    def metrics(self) -> dict[str, Any]:
        """Name → metric, of one collection."""
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        assert [(scope.scope.name, scope.scope.version) for scope in scopes] == [("ckptstore", ckptstore.__version__)]
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def sums(self) -> dict[tuple[str, str], float]:
        """``(name, attributes but the URL)`` → value, or sum of a histogram."""
        found: dict[tuple[str, str], float] = {}
        for name, metric in self.metrics().items():
            for point in metric.data.data_points:
                attributes = {key: value for key, value in point.attributes.items() if key != "ckptstore.url"}
                text = ",".join(f"{key}={value}" for key, value in sorted(attributes.items()))
                found[name, text] = point.sum if hasattr(point, "sum") else point.value
        return found


def test_opentelemetry_records_each_event() -> None:
    """What a collection gives after one event of each kind."""
    collected = Collected()
    for event in ALL:
        collected.listener(event)
    expected = {
        ("ckptstore.saves", "ckptstore.outcome=committed"): 1,
        ("ckptstore.saves", "ckptstore.failure=permanent,ckptstore.outcome=failed,error.type=AccessError"): 1,
        ("ckptstore.saves", "ckptstore.outcome=skipped"): 1,
        ("ckptstore.save.duration", ""): 2.0,
        ("ckptstore.save.duration", "error.type=AccessError"): 2.0,
        ("ckptstore.save.stall", ""): 1.0,
        ("ckptstore.save.state", ""): 1000,
        ("ckptstore.save.sent", ""): 300,
        ("ckptstore.save.reused", ""): 600,
        ("ckptstore.save.stored", ""): 800,
        ("ckptstore.newest.epoch", ""): 7,
        ("ckptstore.retries", "ckptstore.failure=throttled"): 2,
        ("ckptstore.restore.state", ""): 1000,
        ("ckptstore.restore.duration", ""): 1.0,
        ("ckptstore.damage", ""): 1,
        ("ckptstore.prune.epochs", ""): 2,
        ("ckptstore.prune.failures", "error.type=StoreError"): 1,
        ("ckptstore.freed", ""): 550,
        ("ckptstore.tier.epochs", ""): 2,
        ("ckptstore.tier.sent", ""): 42,
        ("ckptstore.tier.failures", "ckptstore.failure=space,error.type=StoreFullError"): 1,
    }
    sums = collected.sums()
    age = sums.pop(("ckptstore.newest.age", ""))
    assert 60 <= age < 3600
    assert sums == pytest.approx(expected)


def test_opentelemetry_units_and_the_growing_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCUM units; the age is that of the moment of the collection, though nothing happens in between."""
    collected = Collected()
    monkeypatch.setattr(time, "time", lambda: NOW)
    for epoch in range(100):
        collected.listener(replace(COMMITTED, epoch=epoch))
    found = collected.metrics()
    assert {metric.unit for metric in found.values()} <= {"s", "By", "{save}", "{epoch}"}
    assert all(len(metric.data.data_points) == 1 for metric in found.values())
    first = collected.sums()["ckptstore.newest.age", ""]
    monkeypatch.setattr(time, "time", lambda: NOW + 1000)
    assert first == pytest.approx(60)
    assert collected.sums()["ckptstore.newest.age", ""] == pytest.approx(1060)


def test_opentelemetry_of_a_real_run(tmp_path: Path) -> None:
    """From saves to a collection."""
    collected = Collected()
    train(tmp_path / "r", collected.listener)
    sums = collected.sums()
    assert sums["ckptstore.saves", "ckptstore.outcome=committed"] == 3
    assert sums["ckptstore.save.state", ""] == 120_000
    assert sums["ckptstore.prune.epochs", ""] == 1
    assert 0 <= sums["ckptstore.newest.age", ""] < 300
    assert 0 < sums["ckptstore.save.stall", ""] <= sums["ckptstore.save.duration", ""]


def test_the_adapter_for_logging_needs_nothing_and_shadows_nothing() -> None:
    """``logging`` stays the module of the standard library."""
    program = "import ckptstore.adapters.logging as ours, logging, sys; print(ours.logging is logging)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("True", "")
