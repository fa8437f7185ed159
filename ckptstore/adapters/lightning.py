"""Lightning: checkpoints of a ``Trainer`` in a repository, in the background, kept by its policies (docs/lightning.md).

    callback = CkptStoreCheckpoint(ckptstore.open("s3://runs/llama", keep=KeepLast(3) | KeepBest("val_loss")))
    Trainer(callbacks=[callback]).fit(model, ckpt_path="latest")

An epoch of the repository is a global step of the Trainer.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch

from ckptstore.adapters.lightning_io import CkptStoreIO, TorchCheckpointIO, fabric, pl
from ckptstore.errors import (
    CkptStoreError,
    CorruptionError,
    EpochNotFoundError,
    InvalidArgumentError,
    TransactionError,
)
from ckptstore.policies import EpochInfo, KeepBest
from ckptstore.repository import Repository

__all__ = ["CkptStoreCheckpoint", "CkptStoreIO"]

log = logging.getLogger("ckptstore")


class CkptStoreCheckpoint(pl.callbacks.Checkpoint):  # type: ignore[misc]
    """What ``ModelCheckpoint`` is for files, on a repository: brings its ``CkptStoreIO`` along.

    Saves all that Lightning saves, and the states of the random generators of each rank, so that a run that goes on is
    the run that was cut off. All metrics are metadata of the epoch: the repository's policy keeps what it likes best.
    What cannot be stored is refused when training starts.

    Args:
        repo: where to: a repository that is yours to close, or a URL.
        monitor, mode: what ``ckpt_path="best"`` means, e.g. "val_loss", "min".
        every_n_epochs: save at the end of each so many epochs; 1 if nothing else is given, 0 for never.
        every_n_train_steps: save after each so many steps.
        train_time_interval: save when so much time has passed since the last time.
        save_weights_only: no optimizer, no callbacks: such an epoch cannot be resumed from.
        save_on_exception: save when training ends by an exception.
        background, replace: as of ``CkptStoreIO``.
    """

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str],
        *,
        monitor: str | None = None,
        mode: str = "min",
        every_n_epochs: int | None = None,
        every_n_train_steps: int = 0,
        train_time_interval: timedelta | None = None,
        save_weights_only: bool = False,
        save_on_exception: bool = False,
        background: bool = True,
        replace: bool = False,
    ) -> None:
        super().__init__()
        self._best = None if monitor is None else KeepBest(monitor, 1, mode)
        self._io = CkptStoreIO(repo, background=background, replace=replace)
        otherwise = every_n_train_steps or train_time_interval is not None
        self._every_n_epochs = (0 if otherwise else 1) if every_n_epochs is None else every_n_epochs
        self._every_n_train_steps = every_n_train_steps
        self._interval = train_time_interval
        self._save_weights_only = save_weights_only
        self._save_on_exception = save_on_exception
        self._last_time = time.monotonic()
        self._last_step = -1  # that was saved
        self._seen_step = -1  # that the batch before has come to
        self._random: list[Any] | None = None

    @property
    def best_model_path(self) -> str:
        """What ``ckpt_path="best"`` loads: the number of the step with the best ``monitor``; "" if there is none."""
        if self._best is None:
            return ""
        self._io.settle()
        repo, infos = self._io.repo, []
        for epoch in repo.epochs():
            try:
                infos.append(EpochInfo(epoch, repo.checkpoint(epoch).metadata))
            except (CorruptionError, EpochNotFoundError) as error:
                log.warning("the best is sought without epoch %d: %s", epoch, error)
        values = {info.epoch: info.metadata.get(self._best.metric) for info in infos}
        scored = [info for info in infos if isinstance(value := values[info.epoch], (int, float)) and value == value]
        return "".join(str(epoch) for epoch in self._best.keep(scored))

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Set by launchers that fork, to what another process has found out: the repository knows it anyway."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the place of Lightning's own files, unless a ``CkptStoreIO`` is there."""
        there = trainer.strategy.checkpoint_io
        if isinstance(there, CkptStoreIO):
            if there.repo.id != self._io.repo.id:
                raise InvalidArgumentError(f"the plugin saves to {there.repo.url}, the callback to {self._io.repo.url}")
            self._io = there
        elif type(there) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = self._io
        else:
            raise InvalidArgumentError(f"the plugin {type(there).__name__} saves elsewhere: leave it out")
        self._io.fitting = stage == "fit"
        self._random = None  # of what was loaded to be tested

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse now what could not be saved later; then go on with the random numbers where they were."""
        if not trainer.fast_dev_run:
            self._save(trainer, check=True)
        if trainer.strategy.broadcast(self._io.resumed) != self._io.resumed:
            raise TransactionError(f"rank {trainer.global_rank} has loaded another checkpoint than rank 0: start again")
        self._last_time = time.monotonic()
        self._last_step = self._seen_step = trainer.global_step  # what was resumed from is saved
        states, self._random = self._random, None
        if states is not None and len(states) == trainer.world_size:
            mine = states[trainer.global_rank]
            if not torch.cuda.is_available() or len(mine.get("torch.cuda", ())) != torch.cuda.device_count():
                mine = {name: state for name, state in mine.items() if name != "torch.cuda"}
            kind, words, *rest = mine["numpy"]
            fabric.utilities.seed._set_rng_states({**mine, "numpy": (kind, words.numpy().astype("uint32"), *rest)})
            loop = trainer.fit_loop
            if getattr(loop, "is_resuming", False) and not loop.restarting:
                iter(loop._data_fetcher)  # an epoch begins, and Lightning has drawn its seed from other random numbers
        elif states is not None:
            log.warning("saved by %d ranks, now there are %d: new random numbers", len(states), trainer.world_size)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After so many steps, or so much time; never amid an accumulation: gradients are in no checkpoint."""
        step = trainer.global_step
        if step == self._seen_step:
            return
        self._seen_step = step
        due = self._every_n_train_steps > 0 and step % self._every_n_train_steps == 0
        if self._interval is not None:
            late = time.monotonic() - self._last_time >= self._interval.total_seconds()
            due = trainer.strategy.broadcast(late) or due  # clocks of ranks differ
        if due:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After so many epochs; what was saved at this step already is replaced: now the epoch is over."""
        if self._every_n_epochs > 0 and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """When ``fit`` returns, all ranks see what was saved."""
        self._io.settle()
        trainer.strategy.barrier("ckptstore")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save what there is, if it is asked for and saving is not what failed."""
        unsaved = trainer.global_step != self._last_step
        if self._save_on_exception and unsaved and not isinstance(exception, CkptStoreError):
            self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The states of the random generators, of each rank."""
        states = [fabric.utilities.seed._collect_rng_states()]
        kind, words, *rest = states[0]["numpy"]  # as a tensor: of an exported file that is what torch reads everywhere
        states[0]["numpy"] = (kind, torch.from_numpy(words.astype("int64")), *rest)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            mine, states = states[0], [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(states, mine)
        return {"random": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until training starts."""
        self._random = state_dict["random"]

    def _save(self, trainer: Any, *, check: bool = False) -> None:
        if trainer.fast_dev_run or trainer.sanity_checking:
            return
        found = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        options = {"metadata": {name: float(value) for name, value in found.items()}, "check": check}
        path = f"epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path, self._save_weights_only, storage_options=options)
        if not check:
            self._last_step, self._last_time = trainer.global_step, time.monotonic()
