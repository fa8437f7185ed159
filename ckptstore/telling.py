"""Telling: the events of one save (``events.py``), and how old the newest durable epoch is."""

from __future__ import annotations

import time
from datetime import datetime

from ckptstore.errors import CorruptionError
from ckptstore.events import Emitter, SaveCommitted, SaveFailed, SaveStarted, TierCopied, TierFailed, failure_of
from ckptstore.manifest import Manifest
from ckptstore.writer import Tally


class SaveWatch:
    """Tells that a save has begun and, once, how it has ended.

    Args:
        begun: when the trainer called, as ``time.perf_counter`` says it.
        held: seconds that the trainer was held, where the save goes on in the background; None: to its end.
    """

    __slots__ = ("_begun", "_emitter", "_ended", "_epoch", "_held")

    def __init__(self, emitter: Emitter, epoch: int, nbytes: int, begun: float, held: float | None = None) -> None:
        self._emitter = emitter
        self._epoch = epoch
        self._begun = begun
        self._held = held
        self._ended = False
        emitter.tell(SaveStarted, epoch=epoch, background=held is not None, bytes_state=nbytes)

    def committed(self, manifest: Manifest, tally: Tally, pruned: int) -> None:
        """Its epoch is durable, and what follows has been done."""
        self._end(
            SaveCommitted,
            committed_at=timestamp(manifest.created),
            bytes_state=tally.bytes_state,
            bytes_stored=sum(record.bytes_stored for record in manifest.records),
            bytes_sent=tally.bytes_sent,
            bytes_reused=tally.bytes_reused,
            pruned=pruned,
        )

    def failed(self, error: BaseException) -> None:
        """It has ended without its epoch, unless that was committed before."""
        self._end(SaveFailed, error=type(error).__name__, failure=failure_of(error), message=str(error))

    def _end(self, kind: type[SaveCommitted] | type[SaveFailed], **facts: object) -> None:
        if self._ended:
            return
        self._ended = True
        seconds = time.perf_counter() - self._begun
        held, background = (seconds, False) if self._held is None else (self._held, True)
        self._emitter.tell(kind, epoch=self._epoch, background=background, seconds=seconds, stall_seconds=held, **facts)


class TierWatch:
    """Tells how one copy to the lower tier at ``to`` has ended. It begins now."""

    def __init__(self, emitter: Emitter, to: str) -> None:
        self._emitter = emitter
        self._to = to
        self._begun = time.perf_counter()

    def copied(self, manifest: Manifest | CorruptionError, bytes_sent: int) -> None:
        """It is durable there."""
        assert isinstance(manifest, Manifest)  # what is damaged is never copied
        facts = {"epoch": manifest.epoch, "committed_at": timestamp(manifest.created), "bytes_sent": bytes_sent}
        self._emitter.tell(TierCopied, to=self._to, seconds=time.perf_counter() - self._begun, **facts)

    def failed(self, error: Exception, failures: int) -> None:
        """For the time being, for the ``failures``-th time in a row."""
        facts = {"error": type(error).__name__, "failure": failure_of(error), "message": str(error)}
        self._emitter.tell(TierFailed, to=self._to, failures=failures, **facts)


def timestamp(created: str) -> float:
    """Seconds since 1970 of a time as manifests tell it; NaN where it tells none."""
    try:
        return datetime.fromisoformat(created).timestamp()
    except ValueError:
        return float("nan")
