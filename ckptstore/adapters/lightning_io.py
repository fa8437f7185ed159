"""Lightning's ``CheckpointIO`` on a repository. Its names for files are names that a step was saved under."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckptstore.adapters.torch_loader import next_epoch
from ckptstore.background import SaveHandle
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    CkptStoreError,
    CorruptionError,
    EpochNotFoundError,
    InvalidArgumentError,
    InvalidRecordError,
)
from ckptstore.formats import lightning
from ckptstore.opening import repository_of
from ckptstore.options import flatten_all
from ckptstore.policies import EpochInfo, Policy
from ckptstore.repository import Repository
from ckptstore.resuming import load_newest

# The packages `lightning` and `pytorch-lightning` are the same code under two names, and do not mix.
_TWIN = "lightning" in sys.modules or importlib.util.find_spec("pytorch_lightning") is None
pl: Any = importlib.import_module("lightning.pytorch" if _TWIN else "pytorch_lightning")
fabric: Any = importlib.import_module("lightning.fabric" if _TWIN else "lightning_fabric")
rank_zero_info: Any = pl.utilities.rank_zero_info
TorchCheckpointIO: Any = fabric.plugins.TorchCheckpointIO

log = logging.getLogger("ckptstore")

LATEST = "latest"  # as ``ckpt_path``: the newest intact checkpoint; where there is none, it begins at the beginning
KEY = "lightning"  # in the metadata, beside the metrics: ``{"epoch": .., "global_step": .., "paths": [..]}``
_HANDED_OVER = ".temp.ckpt"  # by launchers that fork: a file, in which rank 0 gives the weights to its parent
_ADVICE = (
    "Nothing was written. Leave out what is no data: `self.save_hyperparameters(ignore=[...])`; make the rest plain: "
    "str(path), vars(namespace), OmegaConf.to_container(config); return plain values and tensors from state_dict() and "
    "on_save_checkpoint()"
)


class _Nothing(dict[str, Any]):
    """What Lightning takes for "nothing was loaded": it asks for the version, then whether it is true."""

    def __bool__(self) -> bool:
        return False


class CkptStoreIO(fabric.plugins.CheckpointIO):  # type: ignore[misc]
    """Saves to a repository whatever Lightning saves: ``Trainer(plugins=[CkptStoreIO(repo)])``.

    Lightning's dict is stored as ``ckptstore import`` would store its file: records ``model``, ``optimizer``,
    ``lr_scheduler``, ``trainer`` (the rest) and ``files`` (how to put them together). Nothing of it is pickled.

    A path is a name that a step was saved under; ``load_checkpoint`` also takes a step's number and "latest".

    Args:
        repo: where to: a repository that is yours to close, or a URL.
        background: save while training goes on. Errors are raised by the next save, or at the end of ``fit``.
        replace: a step that an earlier life of the run has saved is replaced. What ``latest`` stepped over always is.
    """

    def __init__(
        self, repo: Repository | str | os.PathLike[str], *, background: bool = True, replace: bool = False
    ) -> None:
        self.repo = repository_of(repo)
        self.background = background
        self.replace = replace
        self.resumed: tuple[int, int] | None = None
        """Epoch and generation of what was loaded last."""
        self.fitting = True
        """Whether "latest" is for training: of nothing at all, nothing can be tested."""
        self._paths: dict[int, list[str]] = {}  # names of steps, as far as they are known here
        self._saved: set[int] = set()  # by this process
        self._redone: set[int] = set()  # steps after the one that was resumed from
        self._step = 0  # that this run has come to: the steps of one run never go back
        self._removals: list[str] = []
        self._gone: set[int] = set()  # steps that have lost all their names
        self._pending: SaveHandle | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save Lightning's dict under its global step.

        Args:
            storage_options: ``{"metadata": {...}}`` for plain values such as metrics, by which policies choose;
                ``{"check": True}`` only finds out whether it could be stored.

        Raises:
            InvalidRecordError: something cannot be stored exactly; its path is named, and nothing was written.
            EpochExistsError, StoreError: as of ``Repository.save``; those of a background save come with the next call.
        """
        if os.path.basename(path) == _HANDED_OVER:
            TorchCheckpointIO().save_checkpoint(checkpoint, path)
            return
        metadata, check = _options(storage_options)
        step = _step_of(checkpoint)
        records = lightning.split(checkpoint, f"step={step}.ckpt")
        try:
            if check:
                flatten_all(records)
                return
            self.settle()
            names = [name for name in self._paths.get(step, []) if name != str(path)] + [str(path)]
            own = {"epoch": checkpoint.get("epoch"), "global_step": step, "paths": names}
            metadata = {**_monitored(checkpoint), **metadata, KEY: own}
            if step < self._step:  # another run, in this process: what the one before has saved is not its own
                self._saved, self._redone = set(), set()
            self._step = step
            replace = self.replace or step in self._saved or step in self._redone
            if self.background:
                self._pending = self.repo.save_async(step, records, metadata, replace)
            else:
                self.repo.save(step, records, metadata, replace)
        except InvalidRecordError as error:
            raise InvalidRecordError(f"{error.message}\n{_ADVICE}", epoch=step) from error
        self._forget(str(path), find=False)  # where a file would have been overwritten
        self._paths[step] = names
        self._saved.add(step)
        self._gone.discard(step)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The dict that was saved. Nothing is unpickled, so ``weights_only`` makes no difference.

        Args:
            path: "latest", the number of a step, or a name that one was saved under. A file that torch wrote is left
                to Lightning.
            map_location: a device for the tensors; None leaves them on the CPU.

        Raises:
            EpochNotFoundError: nothing was saved under that name; "latest" of nothing, for other things than training.
            CorruptionError: it is damaged ("latest" steps back instead), or may be what nothing else has the name of.
            FormatError: it was not saved by Lightning.
        """
        self.settle()
        if str(path) == LATEST:
            found = self._newest()
            if found is None and not self.fitting:
                raise EpochNotFoundError(f"{self.repo.url} holds no checkpoint yet")
            if found is None:
                rank_zero_info(f"{self.repo.url} holds no checkpoint yet: training begins at the beginning")
                return _Nothing({"pytorch-lightning_version": pl.__version__})
            ckpt, records = found
            self._redone = {epoch for epoch in self.repo.epochs() if epoch > ckpt.epoch}
            self._step = ckpt.epoch
        else:
            named = self._find(str(path))
            if named is None:
                return dict(TorchCheckpointIO().load_checkpoint(path, map_location, weights_only))
            ckpt, records = named, named.load()
        self.resumed = ckpt.epoch, ckpt.generation
        whole = lightning.join(records)
        loop = whole.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        for state in loop.get("combined_loader", ()):
            next_epoch(state)  # behind the last batch Lightning begins an epoch
        return whole if map_location is None else _moved(whole, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        """Forget a name; a step without names is deleted once what was saved after it is durable.

        A repository with a policy (``keep=``) decides alone, and nothing happens here.
        """
        if self._is_file(str(path)):
            TorchCheckpointIO().remove_checkpoint(path)
        elif self.repo.keep is None:
            self._removals.append(str(path))

    def teardown(self) -> None:
        """At the end of ``fit``: wait for the save in flight. Its error is raised, or logged where another one is."""
        failing = sys.exc_info()[1] is not None
        try:
            self.settle()
        except Exception:
            if not failing:
                raise
            log.exception("the last checkpoint was not saved")

    def settle(self) -> None:
        """Wait until what was saved is durable, then delete what Lightning has removed.

        Raises:
            Exception: that of the save, if it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        removals, self._removals = self._removals, []
        try:
            for path in removals:
                self._forget(path)
            if self._gone:
                self._gone -= self.repo.prune(_AllBut(frozenset(self._gone)), deep=False).removed.keys()
        except CkptStoreError as error:
            log.warning("deleting checkpoints failed and will be tried again: %s", error)

    def _forget(self, path: str, *, find: bool = True) -> None:
        step = next((step for step, names in self._paths.items() if path in names), None)
        if step is None and find and (ckpt := self._find(path)) is not None:  # of an earlier life of the run
            taken = {name for names in self._paths.values() for name in names}
            step, self._paths[ckpt.epoch] = ckpt.epoch, [name for name in _names_of(ckpt) if name not in taken]
        if step is not None and path in self._paths[step]:
            self._paths[step].remove(path)
            if not self._paths[step]:
                self._gone.add(step)

    def _newest(self) -> tuple[Checkpoint, dict[str, Any]] | None:
        """The newest; for training one that can be resumed from, if there is one."""
        found = load_newest(self.repo, lambda ckpt: ckpt.load())
        if found is None or not self.fitting or "optimizer" in found[0].records:
            return found
        whole = load_newest(self.repo, lambda ckpt: ckpt.load(), need=["optimizer"])
        if whole is not None:
            log.warning("epoch %d holds weights alone: going on after epoch %d", found[0].epoch, whole[0].epoch)
        return whole or found

    def _find(self, path: str) -> Checkpoint | None:
        """The checkpoint of a step, or the newest that was saved under a name; None if it is a file of Lightning's."""
        if path.isdecimal():
            return self.repo.checkpoint(int(path))
        if self._is_file(path):
            return None
        hint = re.search(r"step=(\d+)", os.path.basename(path))
        epochs = sorted(self.repo.epochs(), key=lambda epoch: (hint is not None and epoch == int(hint[1]), epoch))
        damaged: list[CorruptionError] = []
        for epoch in reversed(epochs):
            try:
                ckpt = self.repo.checkpoint(epoch)
            except (CorruptionError, EpochNotFoundError) as error:
                damaged += [error] if isinstance(error, CorruptionError) else []
                continue
            names = _names_of(ckpt)
            if path in names or path in map(os.path.basename, names):
                for newer in damaged:
                    log.warning("%s may be a newer epoch than %d, which is taken: %s", path, epoch, newer)
                return ckpt
        if damaged:  # it may be the one: not proven to be missing
            raise damaged[0]
        raise EpochNotFoundError(
            f"no epoch of {self.repo.url} was saved as {path!r}: pass ckpt_path={LATEST!r} or the number of a step"
        )

    def _is_file(self, path: str) -> bool:
        """Whether it is a file that somebody else has written: under a name of ours there is none."""
        return not any(path in names for names in self._paths.values()) and os.path.isfile(path)


class _AllBut(Policy):
    """Keeps all epochs but some. What a policy may not take, a prune does not take: pins, the newest, and so on."""

    def __init__(self, gone: frozenset[int]) -> None:
        self._gone = gone

    def keep(self, epochs: Sequence[EpochInfo]) -> dict[int, str]:
        return {info.epoch: "Lightning keeps it" for info in epochs if info.epoch not in self._gone}


def _options(storage_options: Any) -> tuple[dict[str, Any], bool]:
    given = {} if storage_options is None else storage_options
    if not isinstance(given, Mapping) or not given.keys() <= {"metadata", "check"}:
        raise InvalidArgumentError('storage_options must be {"metadata": {...}}: options of the store are for open()')
    return dict(given.get("metadata", {})), bool(given.get("check", False))


def _step_of(checkpoint: Mapping[str, Any]) -> int:
    step = checkpoint.get("global_step")
    if type(step) is not int:
        raise InvalidRecordError("no checkpoint of a Trainer: it has no global_step, under which it could be saved")
    return step


def _monitored(checkpoint: Mapping[str, Any]) -> dict[str, float]:
    """What each ``ModelCheckpoint`` monitors, by which policies can choose then."""
    states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
    scores = {state.get("monitor"): state.get("current_score") for state in states}
    return {name: float(score) for name, score in scores.items() if isinstance(name, str) and score is not None}


def _names_of(ckpt: Checkpoint) -> list[str]:
    own = ckpt.metadata.get(KEY)
    names = own.get("paths") if isinstance(own, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _moved(value: Any, device: Any) -> Any:
    """All tensors of a state on a device; dicts and lists are changed in place."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        value[key] = _moved(item, device)
    return value
