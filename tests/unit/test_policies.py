"""Policies: which epochs they keep, alone and together, and how they are written."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import (
    EpochInfo,
    InvalidArgumentError,
    KeepBest,
    KeepBytes,
    KeepDaily,
    KeepEvery,
    KeepHourly,
    KeepLast,
    KeepWeekly,
    KeepWithin,
    Policy,
    parse_policy,
)

HOUR = 3600.0
DAY = 24 * HOUR
MONDAY = 1_767_571_200.0  # 2026-01-05 00:00 UTC


def saved(*times: float) -> list[EpochInfo]:
    return [EpochInfo(number, {}, time) for number, time in enumerate(times, 1)]


@pytest.mark.parametrize(
    ("policy", "times", "kept"),
    [
        (KeepHourly(2), (0, 10, HOUR - 1, HOUR, 5 * HOUR, 5 * HOUR + 7), [4, 6]),
        (KeepHourly(9), (0, 10, HOUR - 1, HOUR, 5 * HOUR, 5 * HOUR + 7), [3, 4, 6]),
        (KeepDaily(1), (MONDAY - 1, MONDAY, MONDAY + DAY - 1), [3]),
        (KeepDaily(2), (MONDAY - 1, MONDAY, MONDAY + DAY - 1), [1, 3]),
        (KeepWeekly(2), (MONDAY - 7 * DAY, MONDAY - 1, MONDAY, MONDAY + 6.9 * DAY), [2, 4]),
        (KeepWithin(1), (0, 10, 20, HOUR + 10), [2, 3, 4]),
        (KeepWithin(0.001), (5, 5, 5), [1, 2, 3]),
    ],
)
def test_time(policy: Policy, times: tuple[float, ...], kept: list[int]) -> None:
    """Periods are those of UTC, empty ones do not count, and ``KeepWithin`` counts back from the newest save."""
    assert sorted(policy.keep(saved(*times))) == kept


def test_bytes() -> None:
    """The highest epochs that fit together are kept, without gaps, and one in any case."""
    infos = [EpochInfo(number, {}, 0.0, nbytes) for number, nbytes in enumerate((1, 50, 30, 20), 1)]
    assert [sorted(KeepBytes(limit).keep(infos)) for limit in (1, 20, 49, 50, 99, 100, 101)] == [
        [4], [4], [4], [3, 4], [3, 4], [2, 3, 4], [1, 2, 3, 4],
    ]  # fmt: skip


@pytest.mark.parametrize("policy", [KeepWithin(1), KeepHourly(1), KeepDaily(1), KeepWeekly(1), KeepBytes(1)])
def test_of_nothing_nothing_is_kept(policy: Policy) -> None:
    """An empty repository is no special case."""
    assert policy.keep([]) == {}


@pytest.mark.parametrize("wrong", [0, -1, "1", None, True, math.nan, math.inf])
@pytest.mark.parametrize("kind", [KeepWithin, KeepHourly, KeepDaily, KeepWeekly, KeepBytes, KeepLast, KeepEvery])
def test_nonsense_is_refused(kind: Any, wrong: object) -> None:
    """A policy that could not mean anything is refused when it is made, not when it would delete."""
    with pytest.raises(InvalidArgumentError, match=kind.__name__):
        kind(wrong)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("KeepLast(3)", KeepLast(3)),
        (" KeepBest('loss', 2, mode='max')\n", KeepBest("loss", 2, "max")),
        ("KeepLast(n=1)|KeepEvery(10)&KeepDaily(7)", KeepLast(1) | KeepEvery(10) & KeepDaily(7)),
        ("(KeepLast(1) | KeepEvery(10)) & KeepBytes(1_000)", (KeepLast(1) | KeepEvery(10)) & KeepBytes(1000)),
        ("KeepWithin(1.5)", KeepWithin(1.5)),
    ],
)
def test_text(text: str, policy: Policy) -> None:
    """A policy can be written on a command line as it is in Python."""
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    "text",
    [
        "", "KeepLast", "KeepLast()", "KeepLast(0)", "KeepLast(3", "KeepLast(3) + KeepLast(4)", "Keep(3)", "3",
        "KeepLast(__import__('os'))", "KeepLast(n=3, n=4)", "KeepLast(**{'n': 3})", "KeepLast(*[3])",
        "__import__('os').system('true')", "(" * 5000, "KeepLast(3);", "[KeepLast(3)]", "KeepLast(3) if 1 else 2",
    ],
)  # fmt: skip
def test_text_that_is_no_policy(text: str) -> None:
    """Anything else is refused, and nothing in it is run."""
    with pytest.raises(InvalidArgumentError):
        parse_policy(text)


@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    """Whatever is typed ends in a policy or in one typed error."""
    try:
        assert isinstance(parse_policy(text), Policy)
    except InvalidArgumentError:
        pass


@pytest.mark.parametrize(
    "policy",
    [
        KeepLast(3),
        KeepLast(3) | KeepBest("loss", 2),
        (KeepLast(3) | KeepEvery(10)) & KeepBest("a'b", 1, "max"),
        KeepLast(1) | KeepEvery(10) & KeepLast(7),
    ],
)
def test_a_policy_is_written_as_it_is_read(policy: Policy) -> None:
    """What a policy says of itself is what a command line takes for it."""
    assert parse_policy(str(policy)) == policy
