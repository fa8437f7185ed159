"""Hugging Face Trainer: its ``checkpoint-N`` folders in a repository, and back to where it expects them.

    callback = CkptStoreCallback(ckptstore.open("s3://runs/llama", keep=KeepLast(3) | KeepBest("eval_loss")))
    trainer = Trainer(model, args, callbacks=[callback], ...)
    trainer.train(resume_from_checkpoint=callback.restore(args))

An epoch of the repository is a global step; its records are the files of the folder, bit for bit. See
docs/transformers.md.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from transformers import TrainerCallback

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptStoreError, CorruptionError, EpochNotFoundError
from ckptstore.opening import repository_of
from ckptstore.policies import EpochInfo, Policy
from ckptstore.repository import Repository
from ckptstore.watching.steps import StepFolders, put_back, step_folder

__all__ = ["CkptStoreCallback"]

log = logging.getLogger("ckptstore")

KEY = "transformers"
"""What the metadata holds beside the metrics: ``{"epoch": .., "global_step": .., "best_global_step": ..}``."""


class CkptStoreCallback(TrainerCallback):  # type: ignore[misc]
    """Saves each folder that the Trainer has finished, with the metrics of its step.

    What stays in the repository, its policy says. Where it has none, ``save_total_limit`` does: the newest, and the
    best, and an old one goes when the new one is durable. The Trainer's own folders are its own.

    Args:
        repo: where to: a repository that is yours to close, or a URL.
        background: send the files while training goes on. An error is raised by the next save, or when training ends.
        replace: a step that another run has saved is replaced. Those after the one that was restored always are.
        remove_local: remove a folder of the Trainer once its epoch is durable, but for that of the best model.
    """

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str],
        *,
        background: bool = True,
        replace: bool = False,
        remove_local: bool = False,
    ) -> None:
        self.repo = repository_of(repo)
        self._folders = StepFolders(self.repo, background=background, replace=replace)
        self._remove_local = remove_local

    def restore(self, args: Any, step: int | None = None) -> str | None:
        """For ``resume_from_checkpoint``: put the newest intact checkpoint back into ``output_dir``.

        So too the folder of the best model, if that is another one: ``load_best_model_at_end`` looks for it.

        Args:
            args: the ``TrainingArguments``, or the output folder alone.
            step: this one, and not the newest.

        Returns:
            The folder ``checkpoint-N``; None if the repository is proven to be empty: begin at the beginning.

        Raises:
            EpochNotFoundError: there is no such step.
            CorruptionError: it is damaged, or all of them are.
            FormatError: the repository holds no folders of a Trainer's.
            AccessError, StoreFullError: the output folder cannot be written.
            StoreError: the store did not answer. Never taken for "no checkpoint".
        """
        first = getattr(args, "main_process_first", None)  # the other ranks of a machine find it there
        output = getattr(args, "output_dir", args)
        with first(desc="restoring a checkpoint") if first is not None else nullcontext():
            ckpt = self._folders.restore(output, step)
            if ckpt is None:
                return None
            best = _facts_of(ckpt).get("best_global_step")
            if isinstance(best, int) and best != ckpt.epoch and getattr(args, "load_best_model_at_end", True):
                self._restore_best(output, best)
        return str(step_folder(output, ckpt.epoch))

    def _restore_best(self, output: Any, step: int) -> None:
        try:
            put_back(self.repo.checkpoint(step), output)
        except (EpochNotFoundError, CorruptionError) as error:
            log.warning("the best model so far, of step %d, is lost (KeepBest would have kept it): %s", step, error)

    # ---- what the Trainer calls ----------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The best model is where we have restored it, whatever folder it was saved to."""
        best = _best_step(state)
        if best is not None and step_folder(args.output_dir, best).is_dir():
            state.best_model_checkpoint = os.path.join(args.output_dir, f"checkpoint-{best}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the folder that the Trainer has just finished, once every rank has written its part."""
        _wait_for_everyone()
        if not state.is_world_process_zero:
            return
        best = _best_step(state)
        facts = {"epoch": state.epoch, "global_step": state.global_step, "best_global_step": best}
        self._folders.save(args.output_dir, state.global_step, {**_metrics(state), KEY: facts})
        self._tidy_up(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """When ``train`` returns, all that was saved is durable."""
        if state.is_world_process_zero:
            self._folders.settle()
            self._tidy_up(args, state)
        _wait_for_everyone()

    def _tidy_up(self, args: Any, state: Any) -> None:
        """Remove what may go: in the repository by ``save_total_limit``, on this disk if it is asked for."""
        best = _best_step(state)
        limit = args.save_total_limit
        if self.repo.keep is None and limit is not None and limit > 0 and self._folders.committed:
            try:
                self.repo.prune(_TotalLimit(limit, best), deep=False)
            except CkptStoreError as error:
                log.warning("deleting old checkpoints failed and will be tried again: %s", error)
        if self._remove_local:
            for step, place in self._folders.committed.items():
                if step != best:
                    shutil.rmtree(place, ignore_errors=True)


class _TotalLimit(Policy):
    """The Trainer's own rule: so many in all; the newest and the best in any case."""

    def __init__(self, limit: int, best: int | None) -> None:
        self._limit = limit
        self._best = best

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        numbers = [info.epoch for info in epochs]
        first = [number for number in dict.fromkeys([*numbers[-1:], self._best]) if number in numbers]
        others = [number for number in reversed(numbers) if number not in first]
        kept = first + others[: max(self._limit - len(first), 0)]
        return dict.fromkeys(kept, "save_total_limit keeps it")


def _metrics(state: Any) -> dict[str, float]:
    """All numbers that were logged at this step."""
    logged = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    found = {name: value for entry in logged for name, value in entry.items() if name not in ("step", "epoch")}
    return {name: value for name, value in found.items() if type(value) in (int, float)}


def _best_step(state: Any) -> int | None:
    """The step of the best model; older Trainers know only its folder."""
    step = getattr(state, "best_global_step", None)
    if step is None and state.best_model_checkpoint:
        number = os.path.basename(os.path.normpath(state.best_model_checkpoint)).rpartition("-")[2]
        step = int(number) if number.isdecimal() else None
    return step or None


def _facts_of(ckpt: Checkpoint) -> dict[str, Any]:
    facts = ckpt.metadata.get(KEY)
    return facts if isinstance(facts, dict) else {}


def _wait_for_everyone() -> None:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
