"""Which epochs to keep: policies, which look at facts about all epochs and do nothing themselves."""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ckptstore.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class EpochInfo:
    """What a policy may look at."""

    epoch: int
    metadata: Mapping[str, Any]
    saved: float = 0.0
    """When the store got it, in seconds since 1970, by the store's clock. A mirror keeps that of the original."""
    nbytes: int = 0
    """Bytes on the store that it needs, those that it shares with other epochs included."""


class Policy(ABC):
    """A choice of epochs to keep. ``a | b`` keeps what either keeps, ``a & b`` what both keep."""

    @abstractmethod
    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        """Epochs to keep, each with the reason. ``epochs`` is in ascending order."""

    def __or__(self, other: Policy) -> Policy:
        return _Union(self, other)

    def __and__(self, other: Policy) -> Policy:
        return _Intersection(self, other)


@dataclass(frozen=True)
class KeepLast(Policy):
    """Keep the ``n`` highest epochs (n ≥ 1). Order is by number, never by time."""

    n: int

    def __post_init__(self) -> None:
        _at_least_one("KeepLast", self.n)

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        return {info.epoch: f"one of the last {self.n}" for info in epochs[-self.n :]}


@dataclass(frozen=True)
class KeepEvery(Policy):
    """Keep epochs that are multiples of ``n`` (n ≥ 1)."""

    n: int

    def __post_init__(self) -> None:
        _at_least_one("KeepEvery", self.n)

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        return {info.epoch: f"a multiple of {self.n}" for info in epochs if info.epoch % self.n == 0}


@dataclass(frozen=True)
class KeepBest(Policy):
    """Keep the ``n`` epochs with the best ``metadata[metric]``.

    ``mode`` is "min" or "max". Epochs without the metric, or where it is NaN or no number, are never best.
    Among equals the later epoch is better. If no epoch has the metric, all are kept: it may be mistyped.
    """

    metric: str
    n: int = 1
    mode: str = "min"

    def __post_init__(self) -> None:
        _at_least_one("KeepBest", self.n)
        if self.mode not in ("min", "max"):
            raise InvalidArgumentError(f'KeepBest: mode must be "min" or "max", not {self.mode!r}')

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        sign = 1 if self.mode == "min" else -1
        scored = []
        for info in epochs:
            value = _number(info.metadata.get(self.metric))
            if value is not None:
                scored.append((sign * value, -info.epoch))
        reason = f"one of the best {self.n} by {self.metric}"
        if not scored:
            # A mistyped metric must not empty a repository.
            return {info.epoch: f"no epoch has the metric {self.metric!r}" for info in epochs}
        return {-negative: reason for _, negative in sorted(scored)[: self.n]}


@dataclass(frozen=True)
class KeepWithin(Policy):
    """Keep what was saved within ``hours`` before the newest save (not before now: a run may have paused)."""

    hours: float

    def __post_init__(self) -> None:
        _positive("KeepWithin: hours", self.hours)

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        since = max((info.saved for info in epochs), default=0.0) - self.hours * 3600
        reason = f"saved within {self.hours:g} hours before the newest"
        return {info.epoch: reason for info in epochs if info.saved >= since}


@dataclass(frozen=True)
class _KeepOneEach(Policy):
    """Keep the highest epoch of each of the last ``n`` periods in which something was saved, by UTC."""

    n: int
    _name: ClassVar[str]
    _seconds: ClassVar[int]
    _begin: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _at_least_one(type(self).__name__, self.n)

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        highest: dict[int, int] = {}
        for info in epochs:
            highest[int((info.saved - self._begin) // self._seconds)] = info.epoch
        return {highest[period]: f"the last of its {self._name}" for period in sorted(highest)[-self.n :]}


@dataclass(frozen=True)
class KeepHourly(_KeepOneEach):
    """Keep the highest epoch of each of the last ``n`` hours (UTC) in which something was saved."""

    _name = "hour"
    _seconds = 3600


@dataclass(frozen=True)
class KeepDaily(_KeepOneEach):
    """Keep the highest epoch of each of the last ``n`` days (UTC) on which something was saved."""

    _name = "day"
    _seconds = 86400


@dataclass(frozen=True)
class KeepWeekly(_KeepOneEach):
    """Keep the highest epoch of each of the last ``n`` weeks (from Monday, UTC) in which something was saved."""

    _name = "week"
    _seconds = 7 * 86400
    _begin = 4 * 86400  # 1970 began on a Thursday


@dataclass(frozen=True)
class KeepBytes(Policy):
    """Keep the highest epochs that together need no more than ``limit`` bytes on the store, and one at least.

    What epochs share is counted for each of them, so they never take more than the limit, and may take less.
    """

    limit: int

    def __post_init__(self) -> None:
        _at_least_one("KeepBytes", self.limit)

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        kept: dict[int, str] = {}
        total = 0
        for info in reversed(epochs):
            total += info.nbytes
            if kept and total > self.limit:
                break
            kept[info.epoch] = f"one of the last that fit into {self.limit} bytes"
        return kept


@dataclass(frozen=True)
class _Union(Policy):
    first: Policy
    second: Policy

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        return {**self.second.keep(epochs), **self.first.keep(epochs)}

    def __str__(self) -> str:
        return f"({self.first} | {self.second})"


@dataclass(frozen=True)
class _Intersection(Policy):
    first: Policy
    second: Policy

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        second = self.second.keep(epochs)
        return {e: f"{why} and {second[e]}" for e, why in self.first.keep(epochs).items() if e in second}

    def __str__(self) -> str:
        return f"({self.first} & {self.second})"


@dataclass(frozen=True)
class PerRecord:
    """A policy for each of some records. An epoch goes when none of them is kept in it; else only the records go.

    Records that it does not name stay as long as their epoch does, and so do epochs that have none of those it names.
    """

    policies: Mapping[str, Policy]

    def choose(
        self, epochs: Sequence[EpochInfo], records: Mapping[int, Collection[str]]
    ) -> tuple[dict[int, str], dict[int, dict[str, str]]]:
        """Epochs to keep with the reason, and for each of them the records to drop, with the reason.

        Args:
            records: names of the records of each epoch.
        """
        found: dict[int, dict[str, str]] = {info.epoch: {} for info in epochs}
        for name, policy in self.policies.items():
            for epoch, why in policy.keep([info for info in epochs if name in records[info.epoch]]).items():
                found[epoch][name] = why
        kept: dict[int, str] = {}
        drops: dict[int, dict[str, str]] = {}
        for epoch, reasons in found.items():
            named = [name for name in self.policies if name in records[epoch]]
            if reasons or not named:
                kept[epoch] = "; ".join(f"{name}: {why}" for name, why in reasons.items()) or self._lacking()
                gone = {name: "no policy keeps it" for name in named if name not in reasons}
                if gone:
                    drops[epoch] = gone
        return kept, drops

    def _lacking(self) -> str:
        """Why an epoch is kept in which no policy has a say: a misspelt name shows here."""
        names = ", ".join(map(repr, self.policies))
        return f"it has no record {names}" if len(self.policies) == 1 else f"it has none of the records {names}"


AnyPolicy = Policy | PerRecord | Mapping[str, Policy]
"""What says what to keep: one policy, or one for each of some records."""


def parse_policy(text: str) -> Policy:
    """A policy from its own words: ``KeepLast(3) | KeepBest("loss", 2, mode="min") & KeepEvery(10)``.

    As in Python ``&`` binds stronger than ``|``, and parentheses group.

    Raises:
        InvalidArgumentError: it says something else.
    """
    try:
        return _built(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        known = ", ".join(sorted(_BY_NAME))
        why = error.msg if isinstance(error, SyntaxError) else error
        raise InvalidArgumentError(
            f"{text[:200]!r} is no policy ({why}): write e.g. 'KeepLast(3) | KeepBest(\"loss\")'; there are {known}"
        ) from None


def _built(node: ast.expr) -> Policy:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd)):
        left, right = _built(node.left), _built(node.right)
        return left | right if isinstance(node.op, ast.BitOr) else left & right
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("it must be made of policies, | and &")  # noqa: TRY004 (about a text, not about a type)
    kind = _BY_NAME.get(node.func.id)
    if kind is None:
        raise ValueError(f"there is no {node.func.id}")
    named = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in node.keywords}
    if len(named) < len(node.keywords):
        raise ValueError(f"{node.func.id} is told something twice")
    return kind(*map(ast.literal_eval, node.args), **named)


_BY_NAME: dict[str, Callable[..., Policy]] = {
    kind.__name__: kind
    for kind in (KeepLast, KeepBest, KeepEvery, KeepWithin, KeepHourly, KeepDaily, KeepWeekly, KeepBytes)
}


def _positive(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InvalidArgumentError(f"{what} must be more than 0, not {value!r}")


def _number(value: Any) -> Any:
    """``value`` if it can be compared as a metric: any real number, NumPy's too, but no bool and no NaN."""
    if isinstance(value, np.generic) and value.dtype.kind not in "bOSUMm":
        value = value.item() if value.dtype.kind in "iu" else float(value.astype(np.float64).real)
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if real and value == value else None


def _at_least_one(what: str, n: object) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InvalidArgumentError(f"{what}: n must be 1 or more, not {n!r}")
