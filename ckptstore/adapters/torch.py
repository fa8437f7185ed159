"""torch: all that the rest of a training depends on, in one object that saves and restores it.

    from ckptstore.adapters.torch import TrainingState

    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    state.restore(repo)  # the newest epoch that can be resumed from; None if there is none yet
    ...
    state.save(repo, state.step)

Each part is a record of its own. A model of a wrapper (DistributedDataParallel, ``torch.compile``) is saved under the
names that it has without, and tensors come back to the device and into the memory of what they are restored to.
How to: docs/torch.md.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ckptstore import Checkpoint, Repository, SaveHandle, on_preemption
from ckptstore.adapters.torch_loader import ResumableLoader
from ckptstore.adapters.torch_parts import (
    PROGRESS,
    RNG,
    GlobalRandom,
    Module,
    Restore,
    is_by_rank,
    is_spread,
    order,
    part_of,
    rank,
    whole,
)
from ckptstore.errors import CorruptionError, EpochNotFoundError, InvalidRecordError, RecordNotFoundError
from ckptstore.options import check_repository
from ckptstore.resuming import await_own

if TYPE_CHECKING:
    from ckptstore.adapters import torch_sharded

__all__ = ["ResumableLoader", "TrainingState"]

log = logging.getLogger("ckptstore")


class TrainingState:
    """All that the rest of a training depends on. Each keyword is a part, and a record of that name.

    Args:
        parts: models, optimizers, and whatever has ``state_dict`` and ``load_state_dict``: schedulers, scalers, data
            loaders; generators of torch, NumPy and Python. As many of each, under such names, as you like.
        extra: plain values and arrays of your own; ``.extra`` is that dict, and restored in place.
        rng: also the global generators of Python, NumPy, torch, and of the devices that the models are on.

    Attributes:
        step, epoch: counters of yours, saved and restored.
        unrestored: what the last ``restore(strict=False)`` has left out, a line for each record or path.

    Raises:
        InvalidArgumentError: a part that cannot be saved, or whose name is taken.
    """

    def __init__(self, *, extra: dict[str, Any] | None = None, rng: bool = True, **parts: Any) -> None:
        self.step = 0
        self.epoch = 0
        self.extra = {} if extra is None else extra
        self.unrestored: tuple[str, ...] = ()
        self._parts = {name: part_of(name, thing) for name, thing in parts.items()}
        if rng:  # last: whatever else is restored may draw from them
            models = [part.thing for part in self._parts.values() if isinstance(part, Module)]
            self._parts[RNG] = GlobalRandom(RNG, models)
        self._passed: set[int] = set()
        self._saved: int | SaveHandle | None = None  # what was saved last: its number, or the save in the background

    def records(self) -> dict[str, Any]:
        """What is saved: a state by record name. Tensors are those of the training, not copies.

        Raises:
            InvalidRecordError: tensors that are spread over several processes (DTensor, FSDP).
        """
        states = {name: whole(name, part.state()) for name, part in self._parts.items()}
        return {**states, PROGRESS: {**self._progress(), "parameters": order(self._parts), "rank": rank()}}

    def save(
        self, repo: Repository, epoch: int, metadata: Mapping[str, Any] | None = None, *, replace: bool = False
    ) -> Checkpoint | Any:
        """Save all of it as one checkpoint: ``repo.save``, whose arguments, result and errors these are.

        Epochs that ``restore`` has passed by (damaged, or without a part) are replaced when the run gets there again.

        With sharded parameters (FSDP2, DTensor) all ranks have to call it, and torch DCP saves: every rank its shards,
        and its own of what is no model and no optimizer. If ranks fail, they raise their own errors and the others
        RanksFailedError.
        """
        check_repository(repo)
        replace = replace or epoch in self._passed
        saved: Checkpoint | Any
        if is_spread(self._parts):
            from ckptstore.adapters import torch_sharded

            saved = torch_sharded.save(self._parts, self._progress(), repo, epoch, metadata, replace)
        else:
            saved = repo.save(epoch, self.records(), metadata, replace)
        self._saved = epoch if isinstance(saved, Checkpoint) else None
        return saved

    def save_async(
        self, repo: Repository, epoch: int, metadata: Mapping[str, Any] | None = None, *, replace: bool = False
    ) -> SaveHandle:
        """The same in the background: ``repo.save_async``. Go on training as soon as it returns.

        Raises:
            InvalidRecordError: sharded parameters: use ``save``, or ``dcp.async_save`` (docs/dcp.md).
        """
        check_repository(repo)
        self._saved = handle = repo.save_async(epoch, self.records(), metadata, replace or epoch in self._passed)
        return handle

    def restore(self, repo: Repository, epoch: int | None = None, *, strict: bool = True) -> Checkpoint | None:
        """Bring everything back, in place; None if nothing was saved yet, and nothing is changed.

        With sharded parameters all ranks have to call it. They may be more than those that saved, or fewer, or one.

        Args:
            epoch: which; by default the newest intact one that has all parts (of this run, if ``repo`` has a run_id).
            strict: False leaves parts, parameters and buffers that only one side has as they are (``unrestored``).
                Shapes, element types and the parameters of optimizers have to fit all the same.

        Raises:
            InvalidRecordError: what does not fit, each path of all parts; nothing was changed.
            RecordNotFoundError: there are epochs, and none has all parts.
            CorruptionError: no epoch is intact. If bytes turned out wrong amid the load, parts may be changed already.
            EpochNotFoundError, StoreError: as ``repo.checkpoint`` and ``repo.latest``.
        """
        check_repository(repo)
        await_own(repo)
        found, passed = self._choose(repo, epoch, strict)
        if found is None:
            return None
        try:
            self._load(repo, found, strict)
        except CorruptionError:
            found, passed = self._choose(repo, epoch, strict, deep=True) if epoch is None else (None, passed)
            if found is None:
                raise
            self._load(repo, found, strict)
        self._passed = passed
        self._saved = found.epoch
        return found

    @contextmanager
    def preemption(
        self, repo: Repository, grace: float = 30.0, signals: Sequence[int] = (signal.SIGTERM,)
    ) -> Iterator[Any]:
        """Save once more when the process is told to end: call what this gives at the end of each step.

            with state.preemption(repo, grace=30) as border:
                for batch in loader:
                    ...
                    border(state.step)

        When a signal has come, ``border(epoch)`` saves under that number, unless that is saved already, and passes the
        signal on: by default the process ends there. All of it within ``grace`` seconds: see ``on_preemption``.
        """
        check_repository(repo)
        with on_preemption(repo, grace=grace, signals=signals, last_save=True) as told:

            def border(epoch: int, metadata: Mapping[str, Any] | None = None) -> None:
                if self._is_due(told.due):
                    try:
                        self._last_save(repo, epoch, metadata)
                    except Exception:
                        log.exception("the last save, of epoch %d, failed", epoch)
                    finally:
                        told.end()

            yield border

    # ---- inside --------------------------------------------------------------------------------------------

    @property
    def _names(self) -> list[str]:
        return [*self._parts, PROGRESS]

    def _last_save(self, repo: Repository, epoch: int, metadata: Mapping[str, Any] | None) -> None:
        """Save, unless that epoch is saved already. What has failed before must not cost this save as well."""
        pending = self._saved
        if isinstance(pending, SaveHandle):
            try:
                saved = pending.result()
            except Exception as error:  # noqa: BLE001 (whatever it was: the save that follows is the last chance)
                log.error("the save of epoch %d failed, and its error ends here: %s", pending.epoch, error)  # noqa: TRY400
                saved = None
            self._saved = pending.epoch if saved is not None else None
        if epoch != self._saved:
            self.save(repo, epoch, metadata)

    def _progress(self) -> dict[str, Any]:
        kinds = {name: part.kind for name, part in self._parts.items() if part.kind is not None}
        return {"epoch": self.epoch, "step": self.step, "extra": self.extra, "kinds": kinds}

    def _is_due(self, here: bool) -> bool:
        """Sharded parameters are saved by all ranks, so they ask each other."""
        if not is_spread(self._parts):
            return here
        from ckptstore.adapters import torch_sharded

        return torch_sharded.any_rank(self._parts, here)

    def _choose(
        self, repo: Repository, epoch: int | None, strict: bool, deep: bool = False
    ) -> tuple[Checkpoint | None, set[int]]:
        """What to restore, and the newer epochs that are passed by. With sharded parameters rank 0 chooses for all."""
        chosen: list[Checkpoint] = []

        def choose() -> tuple[int | None, set[int]]:
            found = repo.checkpoint(epoch) if epoch is not None else self._newest(repo, strict, deep)
            if found is None:
                return None, set()
            chosen.append(found)
            return found.epoch, self._passed_by(repo, found) if epoch is None else set()

        if is_spread(self._parts):
            from ckptstore.adapters import torch_sharded

            number, passed = torch_sharded.together(choose)
        else:
            number, passed = choose()
        return (chosen[0] if chosen else None if number is None else repo.checkpoint(number)), passed

    def _newest(self, repo: Repository, strict: bool, deep: bool = False) -> Checkpoint | None:
        run = repo.run_id or None
        found = repo.latest(deep, run_id=run, need=self._names if strict else ())
        other = repo.latest(run_id=run) if found is None and strict else None
        if other is not None:
            raise RecordNotFoundError(
                f"no epoch in {repo.url} has all records of this state; the newest, {other.epoch}, lacks "
                f"{[n for n in self._names if n not in other.records]}: strict=False restores what there is",
                epoch=other.epoch,
            )
        return found

    def _passed_by(self, repo: Repository, found: Checkpoint) -> set[int]:
        """Newer epochs of the run that are damaged or lack a part: the run comes to them again."""
        passed = {skipped.epoch for skipped in found.skipped}
        for epoch in repo.epochs():
            if epoch > found.epoch and epoch not in passed:
                with suppress(EpochNotFoundError, CorruptionError):  # it went away meanwhile
                    newer = repo.checkpoint(epoch)
                    if newer.run_id == found.run_id and not newer.records.keys() >= set(self._names):
                        passed.add(epoch)
        return passed

    def _load(self, repo: Repository, checkpoint: Checkpoint, strict: bool) -> None:
        """Look at everything first, then load it, all in one go."""
        have = checkpoint.records
        aside = [f"{name}: missing in the checkpoint" for name in self._names if name not in have]
        aside += [f"{name}: only in the checkpoint" for name in have if name not in self._names]
        way = self._way(repo, checkpoint, aside)
        misfits = list(dict.fromkeys(way.misfits(strict=False)))
        aside += [line for line in way.misfits(strict=True) if line not in misfits]
        if misfits or (strict and aside):
            lines = "\n  ".join([*misfits, *(aside if strict else ())])
            what = f"epoch {checkpoint.epoch} does not fit into this state, and nothing was changed"
            raise InvalidRecordError(f"{what}:\n  {lines}", epoch=checkpoint.epoch)
        way.load()
        self.step, self.epoch = way.progress.get("step", self.step), way.progress.get("epoch", self.epoch)
        if "extra" in way.progress:
            self.extra.clear()
            self.extra.update(way.progress["extra"])
        way.apply()
        self.unrestored = tuple(aside)
        for line in aside:
            log.warning("restored without %s", line)

    def _way(self, repo: Repository, checkpoint: Checkpoint, aside: list[str]) -> Restore | torch_sharded.Restore:
        """How the checkpoint comes back, without parts that were of another class then: those go to ``aside``."""
        by_rank = is_by_rank(checkpoint)
        if is_spread(self._parts) and not by_rank:
            what = "was saved with whole tensors, and the optimizer's by number: restore it without sharding"
            raise InvalidRecordError(f"epoch {checkpoint.epoch} {what}", epoch=checkpoint.epoch)
        progress = checkpoint.load(PROGRESS) if PROGRESS in checkpoint.records else {}
        kinds = (progress["0"][0] if by_rank else progress).get("kinds", {})
        parts = {}
        for name, part in self._parts.items():
            if None not in (part.kind, kinds.get(name)) and kinds[name] != part.kind:
                aside.append(f"{name}: a {kinds[name]} in the checkpoint, a {part.kind} here")
            elif name in checkpoint.records:
                parts[name] = part
        if not by_rank:
            return Restore(parts, checkpoint, order(self._parts))
        from ckptstore.adapters import torch_sharded

        return torch_sharded.Restore(parts, repo, checkpoint.epoch)
