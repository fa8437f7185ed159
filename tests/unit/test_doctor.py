"""What the doctor reads out of lifecycle rules and measurements."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.chunks import CHUNK_SIZE
from ckptstore.doctor.speed import Cell, Settings, measure, recommend
from ckptstore.stores import MemoryStore
from ckptstore.stores.bucket import Keeping, Rules, _gcs_keeping, _gcs_rules, _s3_rules

MIB = 1024 * 1024


def s3(**more: Any) -> dict[str, Any]:
    return {"ID": "x", "Status": "Enabled", "Filter": {"Prefix": ""}, **more}


ABORT = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3}}
EXPIRE = {"Expiration": {"Days": 30}}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (s3(**ABORT), Rules(abort_days=3)),
        (s3(**ABORT, Filter={"Prefix": "run"}), Rules(abort_days=3)),
        (s3(**ABORT, Filter={"Prefix": "run/inner/"}), Rules()),  # only a part of us
        (s3(**ABORT, Status="Disabled"), Rules()),
        (s3(**EXPIRE), Rules(deleting=("rule 'x': after 30 days",))),
        (s3(**EXPIRE, Filter={"Prefix": "run/inner/"}), Rules(deleting=("rule 'x' for 'run/inner/': after 30 days",))),
        (s3(**EXPIRE, Filter={"Prefix": "other/"}), Rules()),
        (s3(**EXPIRE, Filter={"Tag": {"Key": "a", "Value": "b"}}), Rules()),
        (s3(**EXPIRE, Filter={"And": {"Prefix": "", "Tags": [{"Key": "a", "Value": "b"}]}}), Rules()),
        (s3(**EXPIRE, Filter={"And": {"Prefix": "other/", "ObjectSizeGreaterThan": 5}}), Rules()),
        (
            {"Status": "Enabled", "Prefix": "run/", **EXPIRE},
            Rules(deleting=("rule 'without a name' for 'run/': after 30 days",)),
        ),
        (s3(Expiration={"ExpiredObjectDeleteMarker": True}), Rules()),
        (s3(Transitions=[{"Days": 5, "StorageClass": "STANDARD_IA"}]), Rules()),
        (
            s3(Transitions=[{"Days": 5, "StorageClass": "GLACIER"}]),
            Rules(archiving=("rule 'x': to GLACIER after 5 days",)),
        ),
        (s3(NoncurrentVersionExpiration={"NoncurrentDays": 2}), Rules(old_days=2)),
    ],
)
def test_rules_of_s3(rule: dict[str, Any], expected: Rules) -> None:
    """A rule counts where it acts on objects without tags below the prefix."""
    assert _s3_rules([rule], "run/") == expected


@pytest.mark.parametrize(
    ("action", "condition", "expected"),
    [
        ({"type": "Delete"}, {"age": 30}, Rules(deleting=("a rule: after 30 days",))),
        ({"type": "Delete"}, {"age": 30, "isLive": False}, Rules(old_days=30)),
        ({"type": "Delete"}, {"daysSinceNoncurrentTime": 2}, Rules(old_days=2)),
        ({"type": "Delete"}, {"age": 30, "matchesPrefix": ["other/"]}, Rules()),
        (
            {"type": "Delete"},
            {"age": 30, "matchesPrefix": ["other/", "ru"]},
            Rules(deleting=("a rule: after 30 days",)),
        ),
        ({"type": "SetStorageClass", "storageClass": "ARCHIVE"}, {"age": 30}, Rules()),  # read at once all the same
        ({"type": "AbortIncompleteMultipartUpload"}, {"age": 7}, Rules(abort_days=7)),
    ],
)
def test_rules_of_gcs(action: dict[str, Any], condition: dict[str, Any], expected: Rules) -> None:
    """The same of Google Cloud Storage."""
    assert _gcs_rules([{"action": action, "condition": condition}], "run/") == expected


def test_what_a_bucket_of_gcs_keeps() -> None:
    """Versions, retention and soft delete, as the settings of a bucket tell them."""
    assert _gcs_keeping({}) == Keeping()
    assert _gcs_keeping({"versioning": {"enabled": True}}) == Keeping(versions=True)
    about = {
        "retentionPolicy": {"retentionPeriod": "86400"},
        "softDeletePolicy": {"retentionDurationSeconds": "604800"},
    }
    assert _gcs_keeping(about) == Keeping(locked_days=1.0, soft_days=7.0)


def store_like(latency: float, alone: float, most: float) -> list[Cell]:
    """What a store would be measured as: seconds of a request, bytes per second of one, and of all together."""
    cells = []
    for size in (64 * 1024, MIB, 8 * MIB):
        for width in (1, 4, 16):
            seconds = max(latency + size / alone, width * size / most)
            cells.append(Cell(size, width, width, seconds, seconds, width * size / seconds, width * size / seconds))
    return cells


@pytest.mark.parametrize(
    ("latency", "alone", "most", "default", "expected"),
    [
        (0.02, 80e6, 1e9, 16, Settings(None, None)),  # a bucket of the same region
        (0.0005, 1e9, 1e9, 4, Settings(None, None)),  # a disk
        (0.001, 100e6, 105e6, 16, Settings(None, None)),  # one is enough, but more do no harm
        (0.01, 100e6, 1.6e9, 4, Settings(16, None)),  # a mount that wants more at once
        (0.1, 0.2e6, 0.2e6, 16, Settings(None, 2 * MIB)),  # a slow line: small pieces
        (0.1, 0.02e6, 0.02e6, 16, Settings(None, MIB)),
    ],
)
def test_settings_follow_from_what_was_measured(
    latency: float, alone: float, most: float, default: int, expected: Settings
) -> None:
    """The defaults wherever they are as good; more requests, or smaller chunks, where that is better."""
    assert recommend(store_like(latency, alone, most), default) == expected
    assert CHUNK_SIZE == 32 * MIB


def test_measuring_is_bounded_and_leaves_nothing() -> None:
    """The numbers belong to what was sent; nothing is there afterwards."""
    store = MemoryStore()
    cells = measure(store, (1024, 2048), (1, 3))
    assert [(cell.size, cell.concurrency) for cell in cells] == [(1024, 1), (1024, 3), (2048, 1), (2048, 3)]
    assert all(cell.requests == cell.concurrency and cell.put_rate > 0 < cell.get_rate for cell in cells)
    assert list(store.list()) == []
