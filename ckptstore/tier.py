"""Tier: one of several places of a repository, as it is asked for, and how it stands."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore import options
from ckptstore.catalog import Catalog
from ckptstore.errors import InvalidArgumentError
from ckptstore.policies import AnyPolicy
from ckptstore.roll import Entry, Roll
from ckptstore.stores import RetryPolicy


@dataclass(frozen=True)
class Tier:
    """A place in ``ckptstore.open([..])`` with options of its own.

    Attributes:
        url: as for ``ckptstore.open``.
        keep: what this tier keeps; by default a lower tier keeps everything.
        limit: bytes a second that are sent to it, on average. Not for the first.
        storage_options: as for ``ckptstore.open``.
        retry: as for ``ckptstore.open``.
        concurrency: as for ``ckptstore.open``.
        unsafe_single_writer: as for ``ckptstore.open``.
        transport: as for ``ckptstore.open``.
    """

    url: str | os.PathLike[str]
    keep: AnyPolicy | None = None
    limit: float | None = None
    storage_options: Mapping[str, Any] | None = None
    retry: RetryPolicy | None = None
    concurrency: int | None = None
    unsafe_single_writer: bool | None = None
    transport: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, (str, os.PathLike)):
            raise InvalidArgumentError("the url of a Tier is a text or a path")
        options.check_policy(self.keep)
        if self.limit is not None and (type(self.limit) not in (int, float) or not 0 < self.limit < float("inf")):
            raise InvalidArgumentError(f"a limit is a number of bytes a second above 0, not {self.limit!r}")


@dataclass(frozen=True, slots=True)
class TierStatus:
    """How one tier stands.

    Attributes:
        url: where it is.
        epochs: how many epochs it holds; None if it has never answered.
        newest: the newest of them; None if there is none.
        age: seconds since that one was saved, by the clock of the store that it was saved to first.
        waiting: epochs of the first tier that it is to get and has not, ascending.
        bytes_waiting: what these take; less is sent where chunks are there already.
        stuck: those of them that cannot be copied, each with the reason.
        failures: attempts to copy to it that failed in a row.
        error: what it answered last, if that was an error; else empty.
    """

    url: str
    epochs: int | None
    newest: int | None
    age: float | None
    waiting: tuple[int, ...]
    bytes_waiting: int
    stuck: dict[int, str]
    failures: int
    error: str


class Tiers:
    """The part of a repository that tells of its tiers; this one has itself alone."""

    _catalog: Catalog

    @property
    def members(self) -> tuple[Any, ...]:
        """The repository of each tier by itself, the first tier first."""
        return (self,)

    def tiers(self, look: bool = True) -> list[TierStatus]:
        """How each tier stands: its newest epoch and how old that is, what is still to come, the last error.

        Args:
            look: ask each tier now; one that does not answer is told by its ``error``. Without, only the first is
                asked, and of the others it is told what this process knows: for a trainer, which must not wait.

        Raises:
            StoreError: the first tier failed.
        """
        roll = Roll(self._catalog)
        roll.look()
        return [status(self._catalog.store.traits.url, roll, (), {}, 0, "")]

    def wait_for_tiers(self, timeout: float = options.EXIT_TIMEOUT) -> bool:
        """Wait until each tier has all that it wants of what is committed now. A failing tier is tried again at once.

        Args:
            timeout: seconds, at most.

        Returns:
            Whether all is there; ``tiers()`` tells what is not.
        """
        options.check_timeout("timeout", timeout)
        return True


def status(
    url: str, roll: Roll | None, waiting: Sequence[Entry], stuck: dict[int, str], failures: int, error: str
) -> TierStatus:
    """How the tier stands that ``roll`` tells of."""
    entries = roll.last if roll is not None else None
    newest = max(entries, default=None) if entries is not None else None
    age = None if newest is None or entries is None else max(0.0, time.time() - entries[newest].info.saved)
    return TierStatus(
        url=url,
        epochs=None if entries is None else len(entries),
        newest=newest,
        age=age,
        waiting=tuple(sorted(entry.epoch for entry in waiting)),
        bytes_waiting=sum(entry.info.nbytes for entry in waiting),
        stuck=stuck,
        failures=failures,
        error=error,
    )
