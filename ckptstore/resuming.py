"""Resume: the newest checkpoint that can be loaded, whatever has rotted in those after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TypeVar

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CorruptionError, EpochNotFoundError
from ckptstore.repository import Repository

log = logging.getLogger("ckptstore")

T = TypeVar("T")


def load_newest(
    repo: Repository, load: Callable[[Checkpoint], T], need: Collection[str] | None = None
) -> tuple[Checkpoint, T] | None:
    """``load`` the newest checkpoint; where that finds damage, the one before it, and so on.

    ``latest`` looks chunks up by name and size, and ``latest(deep=True)`` reads every byte once more than a load does.
    This reads the bytes once. A background save of this very repository that is in flight is waited for: its error, if
    it fails, stays with its handle.

    Args:
        load: called with a checkpoint; whatever it returns is returned. What it has loaded of a damaged one into a
            state of yours, the next one overwrites.
        need: names of records that it must have; by default those that the run saves, also where ``every`` leaves some
            out of the newest epochs.

    Returns:
        The checkpoint, and what ``load`` returned; None for an empty repository.

    Raises:
        CorruptionError: there are epochs, but none can be loaded.
        Exception: as of ``Repository.latest``, or of ``load``.
    """
    await_own(repo)
    tried: set[tuple[int, int]] = set()
    while (ckpt := _newest(repo, need)) is not None:
        try:
            return ckpt, load(ckpt)
        except (CorruptionError, EpochNotFoundError) as error:
            if (ckpt.epoch, ckpt.generation) in tried:
                raise
            tried.add((ckpt.epoch, ckpt.generation))  # from now on the repository knows of the damage
            log.warning("epoch %d cannot be loaded, trying the one before: %s", ckpt.epoch, error)
    return None


def await_own(repo: Repository) -> None:
    """Wait for the background save of this process that is in flight: what it saves is not there before it ends."""
    in_flight = repo._background.in_flight
    if in_flight is not None:
        in_flight.wait()


def _newest(repo: Repository, need: Collection[str] | None) -> Checkpoint | None:
    ckpt = repo.latest(need=need or ())
    if ckpt is None or need is not None or not ckpt.left_out:
        return ckpt
    return repo.latest(need=[*ckpt.records, *ckpt.left_out]) or ckpt
