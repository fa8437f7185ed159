"""How values are shown."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from ckptstore.cli._format import ago, brief, clean, plain, ratio, short_key, size, sparkline


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (33_000_000, "31.5 MiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**50, "1.00 PiB"),
    ],
)
def test_sizes_are_binary_with_three_digits(nbytes: int, shown: str) -> None:
    """Sizes are shown in KiB, MiB, ... with three digits."""
    assert size(nbytes) == shown


@pytest.mark.parametrize(
    ("created", "shown"),
    [
        ("2030-01-01T11:59:30+00:00", "30 s ago"),
        ("2030-01-01T11:57:00+00:00", "3 min ago"),
        ("2029-12-31T12:00:00+00:00", "24 h ago"),
        ("2029-12-22T12:00:00+00:00", "10 days ago"),
        ("2031-01-01T00:00:00+00:00", "2031-01-01T00:00:00+00:00"),
        ("yesterday\n", "yesterday\\n"),
    ],
)
def test_times_are_distances(created: str, shown: str) -> None:
    """A time is shown as its distance from now; one in the future or of another form as it is."""
    assert ago(created, datetime(2030, 1, 1, 12, tzinfo=timezone.utc)) == shown


def test_text_from_a_store_is_escaped() -> None:
    """What could move the cursor is shown escaped, other letters are left alone."""
    assert clean("ä\x1b[2J\n") == "ä\\x1b[2J\\n"
    assert brief({"loss": 0.123456, "x\r": "y" * 60}) == "loss=0.1235, x\\r=" + "y" * 39 + "…"


def test_json_is_strict() -> None:
    """Whatever JSON has no word for becomes text."""
    assert plain({1: (float("inf"), b"x", None), "b": {"c": 2**70}}) == {"1": ["inf", "b'x'", None], "b": {"c": 2**70}}


def test_small_things() -> None:
    """Ratios without meaning are a dash, curves span all bars, digests are cut to eight digits."""
    assert (ratio(0, 5), ratio(5, 0), ratio(12, 10)) == ("-", "-", "1.20")
    assert (sparkline([]), sparkline([1.0]), sparkline([3.0, 1.0, 2.0])) == ("", "▁", "█▁▅")
    assert (sparkline([-1e308, 1e308]), sparkline([0.0, 5e-324])) == ("▁█", "▁█")
    assert short_key("attempts/" + "a" * 32 + "/chunks/" + "b" * 64) == "attempts/aaaaaaaa…/chunks/bbbbbbbb…"
