"""Gathered: a save of several ranks whose engine has collectives of its own, so that nobody polls.

Each rank begins a part, writes and finishes it; the engine brings the bytes of ``finish`` to one process, which commits
them (``commit_parts``), and tells all how it went. On the store it is as ``ranks.py`` says, but for parts and outcome.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptstore import options
from ckptstore.background import Background
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidArgumentError, TransactionError
from ckptstore.events import Emitter
from ckptstore.files import FileSource
from ckptstore.launch import rank_of
from ckptstore.manifest import RankOf, check_epoch
from ckptstore.meeting import check_part
from ckptstore.parts import Part, decode_part, place_of
from ckptstore.pipeline import Meter
from ckptstore.ranks import PartsTransaction, RankTransaction
from ckptstore.rescue import Rescue
from ckptstore.telling import SaveWatch
from ckptstore.transaction import Transaction
from ckptstore.writer import Tally


class RankPart:
    """The part of one rank, for an engine that has collectives of its own; made by ``Repository.begin_part``.

    Write the records of this rank, hand the bytes of ``finish`` to the coordinator, which gives those of all ranks to
    ``Repository.commit_parts``, and call ``end`` when that is through. As a context manager it is given up by an
    exception, and where the block ends without ``finish``.
    """

    def __init__(self, transaction: RankTransaction) -> None:
        self._transaction = transaction
        transaction._polls = False
        self._finished = False

    @property
    def epoch(self) -> int:
        """The epoch that it is a part of."""
        return self._transaction.epoch

    @property
    def tally(self) -> Tally:
        """Bytes of the state, bytes reused and bytes sent so far, by this rank."""
        return self._transaction.tally

    def write(self, name: str, state: object) -> None:
        """Write a record, or this rank's pieces of it. Errors as of ``Transaction.write``."""
        self._check_unfinished()
        self._transaction.write(name, state)

    def write_file(self, name: str, path: str | os.PathLike[str] | FileSource) -> None:
        """Write a record from a file. Errors as of ``Transaction.write_file``."""
        self._check_unfinished()
        self._transaction.write_file(name, path)

    def _check_unfinished(self) -> None:
        if self._finished:  # the coordinator would never hear of it
            raise TransactionError(f"the part of epoch {self.epoch} was finished: write before that", epoch=self.epoch)

    def finish(self) -> bytes:
        """Wait until all that was written is on the store. What the coordinator needs to know of it: some bytes.

        Raises:
            StoreError: the store failed; the part can only be given up.
            InvalidRecordError: its indexes are too large.
        """
        self._transaction._check_can_end()
        data = self._transaction.finish()
        self._finished = True
        return data

    def end(self, error: BaseException | None = None) -> None:
        """The coordinator has committed; or with ``error``, it has not, and this part is given up.

        Where it is not called the coordinator does what is needed; a part that nobody holds any more ends by itself.
        """
        if error is None and self._finished:
            self._transaction.committed()
            self._transaction.ended = True
        else:
            why = error or TransactionError(f"the part of epoch {self.epoch} was not finished", epoch=self.epoch)
            self._transaction._give_up(why)

    def __enter__(self) -> RankPart:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None or not self._finished:
            self.end(error or TransactionError(f"the part of epoch {self.epoch} was not finished", epoch=self.epoch))


def parts_of(epoch: int, parts: Sequence[bytes]) -> list[tuple[Part, str]]:
    """The parts that were gathered, checked: all ranks of one launch, each once.

    Raises:
        InvalidArgumentError: they are not.
        CorruptionError, FormatError: the bytes are not those that a rank gave.
    """
    found = [(decode_part(bytes(data), place_of(data)), place_of(data)) for data in parts]
    if not found:
        raise InvalidArgumentError("there are no parts: give what finish() gave on each rank", epoch=epoch)
    first = found[0][0]
    for part, where in found:
        check_part(part, epoch, RankOf(first.group, 0, first.world_size), where)
    ranks = sorted(part.rank for part, _ in found)
    if ranks != list(range(first.world_size)):
        raise InvalidArgumentError(
            f"there must be one part of each of {first.world_size} ranks, not those of {ranks[:20]}", epoch=epoch
        )
    return found


class Gathered:
    """The part of a repository that saves what an engine has gathered."""

    _background: Background
    _events: Emitter
    _rescue: Rescue
    _begin: Callable[..., Transaction]

    def begin_part(
        self, epoch: int, *, rank: int, world_size: int, group: str = "gathered", replace: bool = False
    ) -> RankPart:
        """Begin the part of one rank, rank 0 as well. Asks no other rank, and waits for none.

        Args:
            group: a name that the parts have in common; the engine sees to it that launches do not mix.

        Raises:
            EpochExistsError, InvalidArgumentError, StoreError: before anything was written.
        """
        number, who = check_epoch(epoch), rank_of(rank, world_size, group) or RankOf(group, 0, 1)
        watch = SaveWatch(self._events, number, 0, time.perf_counter())
        made = self._begin(number, {}, replace, Meter(None, 0), watch, rank=who, kind=RankTransaction)
        assert isinstance(made, RankTransaction)
        return RankPart(made)

    def commit_parts(
        self,
        epoch: int,
        parts: Sequence[bytes],
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> Checkpoint:
        """Commit the parts of all ranks as one checkpoint, and prune; on one process.

        Args:
            parts: what ``RankPart.finish`` gave, of each rank one.

        Raises:
            InvalidArgumentError: a part is missing, there twice, or of another save.
            InvalidRecordError: records of several ranks do not fit together.
            EpochExistsError, FencedError, OutcomeUnknownError, StoreError: as of ``save``.
            TransactionError: a rank was silent for too long, and what it wrote was cleaned up. Save again.
        """
        number, skeleton = check_epoch(epoch), options.check_metadata(metadata)
        options.check_flag("replace", replace)
        found = parts_of(number, parts)
        who = RankOf(found[0][0].group, 0, found[0][0].world_size)
        watch = SaveWatch(self._events, number, 0, time.perf_counter())

        def begin() -> Transaction:
            return self._begin(number, skeleton, replace, Meter(None, 0), watch, rank=who, kind=PartsTransaction)

        txn = self._rescue.begin(begin, watch.failed)
        assert isinstance(txn, PartsTransaction)
        with txn:
            txn.join(found)
            checkpoint: Checkpoint = txn.commit()
        return checkpoint
