"""Keras 3 (on JAX or torch): a callback that saves each epoch of ``fit`` to any URL, and resumes.

``model.fit(..., callbacks=[SaveAndResume("s3://bucket/run")])`` is all. A run that is killed and started again goes on
with the epoch after the newest intact checkpoint, bit for bit: with the variables of model and optimizer (iterations,
learning rate and the seeds of dropout among them), and with the random states of Python, NumPy and torch, by which
data are shuffled.

Variables are stored under their paths, as arrays of the backend, those of JAX by their shards. A run goes on with the
backend that it began with: seeds are of another type in the other one, which is refused by name.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from ckptstore import opening
from ckptstore.background import SaveHandle
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidArgumentError
from ckptstore.inplace import refuse
from ckptstore.repository import Repository
from ckptstore.resuming import load_newest

__all__ = ["SaveAndResume", "restore", "to_state"]


def to_state(model: Any) -> dict[str, Any]:
    """The records of a compiled model, to be given to ``save`` or ``save_async``: model, optimizer and random.

    Raises:
        InvalidArgumentError: the model has no variables yet, or the backend is neither JAX nor torch.
    """
    state: dict[str, Any] = {name: _values(found) for name, found in _variables(model).items()}
    if keras.backend.backend() == "jax":
        from ckptstore.adapters.jax import to_state as to_host

        state = to_host(state)
    return {**state, "random": _random_state()}


def restore(ckpt: Checkpoint, model: Any) -> None:
    """Bring a compiled model, and the random states, to what they were when the checkpoint was saved.

    Raises:
        InvalidRecordError: the checkpoint has other variables; the message lists the paths. Nothing is changed.
        InvalidArgumentError: as ``to_state``.
        RecordNotFoundError, CorruptionError, EpochNotFoundError: as ``Checkpoint.load``.
    """
    variables = _variables(model)
    state = {name: _values(found) for name, found in variables.items()}
    saved = ckpt.load("random")
    if keras.backend.backend() == "jax":
        from ckptstore.adapters.jax import restore as to_devices

        loaded = to_devices(ckpt, like=state)
        for name, found in variables.items():
            for variable, value in zip(found, loaded[name].values(), strict=True):
                variable.assign(value)
    else:
        refuse([line for name, into in state.items() for line in ckpt.mismatches(name, into)])
        ckpt.load(into=state, strict=False)  # in place; not strict: other records are left out
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    if "torch" in saved and "torch" in sys.modules:
        sys.modules["torch"].set_rng_state(saved["torch"])


class SaveAndResume(keras.callbacks.Callback):  # type: ignore[misc]  # type checkers do not look into Keras
    """Saves model, optimizer and random states after each epoch of ``fit``, and resumes from the newest intact epoch.

    What other callbacks have counted (``EarlyStopping``, ``ReduceLROnPlateau``), and the history of the epochs before,
    is not among it.

    Args:
        target: a repository, or the URL of one to be opened for the time of ``fit``.
        every: epochs between two saves; the last one is always saved. Their logs become the metadata.
        background: False to let training wait until an epoch is durable; True to go on after one copy in memory.
        resume: False to begin anew, in a repository that has none of the epochs.
        options: of ``ckptstore.open``, with a URL: ``keep``, ``storage_options``, ...

    Raises:
        InvalidArgumentError: arguments that make no sense.
    """

    def __init__(
        self,
        target: Repository | str | os.PathLike[str],
        *,
        every: int = 1,
        background: bool = True,
        resume: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if type(every) is not int or every < 1:
            raise InvalidArgumentError(f"every must be a number of epochs from 1 on, not {every!r}")
        if options and isinstance(target, Repository):
            raise InvalidArgumentError(f"{sorted(options)} are options of a URL: give them to ckptstore.open instead")
        self._target, self._options = target, options
        self._every, self._background, self._resume = every, background, resume
        self._repository: Repository | None = None
        self._pending: SaveHandle | None = None
        self._redone: set[int] = set()
        self._unsaved: tuple[int, dict[str, float]] | None = None  # the epoch that has ended last, and its logs

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest intact epoch, if there is one, and let ``fit`` go on after it."""
        repository = self._target
        if not isinstance(repository, Repository):
            repository = opening.open(repository, **self._options)
        self._repository = repository
        self.model._initial_epoch, self._redone, self._unsaved = None, set(), None
        found = load_newest(repository, lambda ckpt: restore(ckpt, self.model)) if self._resume else None
        if found is not None:
            ckpt = found[0]
            self._redone = {epoch for epoch in repository.epochs() if epoch > ckpt.epoch}
            self.model._initial_epoch = ckpt.epoch + 1  # as keras.callbacks.BackupAndRestore does

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save it."""
        last = epoch + 1 == self.params["epochs"] or self.model.stop_training
        self._unsaved = epoch, {name: float(value) for name, value in (logs or {}).items()}
        if (epoch + 1) % self._every == 0 or last:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Save the last epoch, if a callback after this one has ended ``fit``. Wait; errors are raised here."""
        self.model._initial_epoch = None
        try:
            self._save()
            pending, self._pending = self._pending, None
            if pending is not None:
                pending.result()
        finally:
            if self._repository is not None and self._repository is not self._target:
                self._repository.close()
            self._repository = None

    def _save(self) -> None:
        unsaved, self._unsaved = self._unsaved, None
        if self._repository is None or unsaved is None:
            return
        epoch, metadata = unsaved
        save = self._repository.save_async if self._background else self._repository.save
        saved = save(epoch, to_state(self.model), metadata, replace=epoch in self._redone)
        self._pending = saved if isinstance(saved, SaveHandle) else None


def _variables(model: Any) -> dict[str, list[Any]]:
    """The variables of a model and of its optimizer, which is built if it is not."""
    if keras.backend.backend() not in ("jax", "torch"):
        raise InvalidArgumentError(
            f"Keras has the backend {keras.backend.backend()}: set KERAS_BACKEND to jax or torch"
        )
    if not model.built:
        raise InvalidArgumentError("the model has no variables yet: give it an Input, or call build()")
    if model.optimizer is None:
        return {"model": model.variables}
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return {"model": model.variables, "optimizer": model.optimizer.variables}


def _values(variables: Iterable[Any]) -> dict[str, Any]:
    """Arrays of the backend by path, in the order of the variables; a path that is there already gets a number."""
    found: dict[str, Any] = {}
    for variable in variables:
        path, number = variable.path, 1
        while path in found:
            number += 1
            path = f"{variable.path}#{number}"
        found[path] = variable.value
    return found


def _random_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state()}
    if "torch" in sys.modules:  # also on JAX: a DataLoader may feed it
        state["torch"] = sys.modules["torch"].get_rng_state()
    return state
