"""Accelerate: what ``accelerator.save_state`` writes, in a repository, and back into ``accelerator.load_state``.

    states = AcceleratorStates(accelerator, ckptstore.open("s3://runs/llama", keep=KeepLast(3)))
    ckpt = states.load_state()            # None: begin at the beginning
    states.save_state(step, {"loss": loss})

The files of Accelerate are the records of an epoch, bit for bit. See docs/transformers.md.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidArgumentError, TransactionError
from ckptstore.manifest import check_epoch
from ckptstore.opening import repository_of
from ckptstore.repository import Repository
from ckptstore.watching.steps import StepFolders, put_back, step_folder

__all__ = ["AcceleratorStates"]


class AcceleratorStates:
    """``save_state`` and ``load_state`` on a repository. Every rank makes one, and calls it as it does the Accelerator.

    Args:
        accelerator: with everything that it prepares, or that is registered for checkpointing.
        repo: where to: a repository that is opened on every rank and yours to close, or a URL.
        scratch: a folder of this machine with room for one state: Accelerate writes files. By default the system's.
        background: send them while training goes on. An error is raised by the next call, or by ``settle``.
        replace: a step that another run has saved is replaced. Those after the one that was loaded always are.
    """

    def __init__(
        self,
        accelerator: Any,
        repo: Repository | str | os.PathLike[str],
        *,
        scratch: str | os.PathLike[str] | None = None,
        background: bool = True,
        replace: bool = False,
    ) -> None:
        if accelerator.project_configuration.automatic_checkpoint_naming:
            raise InvalidArgumentError("with automatic_checkpoint_naming Accelerate chooses the folder: leave that out")
        self.repo = repository_of(repo)
        self._accelerator = accelerator
        self._scratch = scratch
        self._folders = StepFolders(self.repo, background=background, replace=replace)

    def save_state(self, step: int, metadata: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Save the state as epoch ``step``. All ranks call it; it returns when the files are written and being sent.

        Args:
            metadata: plain values such as metrics, by which policies choose.
            options: as of ``Accelerator.save_state``.

        Raises:
            EpochExistsError: another run has saved this step.
            InvalidArgumentError: a step that is no number of an epoch.
            TransactionError: on the other ranks, if it failed on rank 0.
            Exception: on rank 0, as of ``Repository.save``; in the background, that of the save before.
        """
        check_epoch(step)
        with self._folder() as root:
            place = step_folder(root, step)
            self._accelerator.save_state(str(place), **options)
            self._gather_random_states(place)
            self._on_main(lambda: self._folders.save(root, step, metadata or {}), "save")

    def load_state(self, step: int | None = None, **options: Any) -> Checkpoint | None:
        """Load the newest intact state, or that of a step, on all ranks.

        Args:
            options: as of ``Accelerator.load_state``.

        Returns:
            Its checkpoint, with the ``epoch`` and ``metadata`` that it was saved under; None if the repository is
            proven to be empty.

        Raises:
            EpochNotFoundError, CorruptionError, FormatError, StoreError: on rank 0, as of ``Repository``.
            TransactionError: on the other ranks, if it failed on rank 0.
        """
        with self._folder() as root:
            ckpt = self._on_main(lambda: self._folders.restore(root, step), "load")
            number = self._from_main(ckpt.epoch if ckpt is not None else None)
            if number is None:
                return None
            mine = ckpt if ckpt is not None else self.repo.checkpoint(number)
            with self._accelerator.local_main_process_first():  # another machine has nothing yet
                put_back(mine, root)
            self._accelerator.load_state(str(step_folder(root, number)), **options)
            return mine

    def settle(self) -> None:
        """Wait until what was saved is durable: at the end of training, on all ranks.

        Raises:
            TransactionError: on the other ranks, if it failed on rank 0.
            Exception: that of the save, if it failed.
        """
        self._on_main(self._folders.settle, "save")

    # ---- inside --------------------------------------------------------------------------------------------

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """A scratch folder under the same name for all ranks; those of one machine share it. Removed at the end."""
        made = self._on_main(lambda: tempfile.mkdtemp(prefix="ckptstore-", dir=self._scratch), "make a scratch folder")
        root = Path(self._from_main(made))
        root.mkdir(exist_ok=True)
        try:
            yield root
            self._accelerator.wait_for_everyone()
        finally:
            if self._accelerator.is_local_main_process:
                shutil.rmtree(root, ignore_errors=True)  # what is being sent is open, and stays readable

    def _gather_random_states(self, place: Path) -> None:
        """Rank 0 gets the files that other machines have written: the states of their random generators."""
        mine = place / f"random_states_{self._accelerator.process_index}.pkl"
        for name, data in gather_object([(mine.name, mine.read_bytes())]):
            if self._accelerator.is_main_process and not (place / name).exists():
                (place / name).write_bytes(data)

    def _on_main(self, act: Any, what: str) -> Any:
        """Do something on rank 0. If it fails, all ranks fail."""
        found, error = None, None
        if self._accelerator.is_main_process:
            try:
                found = act()
            except Exception as caught:  # noqa: BLE001 (raised again below, when the others know)
                error = caught
        said = self._from_main(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if said is not None:
            raise TransactionError(f"rank 0 could not {what}: {said}")
        return found

    def _from_main(self, value: Any) -> Any:
        return broadcast_object_list([value])[0]
