"""A trainer's folders ``checkpoint-N``, when the trainer itself says that one is finished: into a repository, and back.

What ``watch`` has to find out by looking is known here, so files are read as soon as they are written. Epochs look as
if ``watch`` had saved them, and ``ckptstore restore`` puts them back as well.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ckptstore.background import SaveHandle
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import AlreadyExistsError, FormatError, InvalidRecordError, NotFoundError
from ckptstore.files import FileSource
from ckptstore.manifest import check_epoch
from ckptstore.placing import aside, folder, place_folder, refuse_impossible, sync_folder, writing
from ckptstore.repository import Repository
from ckptstore.resuming import load_newest
from ckptstore.watching.layouts import HUGGING_FACE, find
from ckptstore.watching.origin import Origin, origin_of

log = logging.getLogger("ckptstore")


def step_folder(root: str | os.PathLike[str], step: int) -> Path:
    """Where the trainer has a step."""
    return Path(os.path.abspath(root)) / f"checkpoint-{step}"


class StepFolders:
    """Saves such folders, one at a time, and restores them. Not for use by several threads at once.

    Args:
        background: read and send them while the trainer goes on. It may delete them meanwhile, but not change them.
        replace: an epoch that another run has saved is replaced. Those after the one that was restored always are: the
            run does them again.
    """

    def __init__(self, repo: Repository, *, background: bool = True, replace: bool = False) -> None:
        self.repo = repo
        self.committed: dict[int, Path] = {}
        """Folders of the steps that are durable, as far as this process has saved them."""
        self._background = background
        self._replace = replace
        self._saved: set[int] = set()  # steps of this run
        self._redone: set[int] = set()
        self._step = 0  # that this run has come to: the steps of one run never go back
        self._pending: tuple[SaveHandle, Path, ExitStack] | None = None

    def save(self, root: str | os.PathLike[str], step: int, metadata: Mapping[str, Any]) -> None:
        """Save ``root/checkpoint-N``, every file as a record. In the background, an error comes with the next call.

        Raises:
            NotFoundError: there is no such folder.
            InvalidRecordError: a file changed while it was read. Nothing was committed.
            EpochExistsError: another run has saved this step.
            InvalidArgumentError: a step that is no number of an epoch.
            Exception: as of ``Repository.save``, or that of the save before.
        """
        check_epoch(step)
        self.settle()
        place = step_folder(root, step)
        files = {found.epoch: found.files for found in find(place.parent, (HUGGING_FACE,))[1]}.get(step)
        if files is None:
            raise NotFoundError(f"{place} does not exist: nothing to save")
        if step < self._step:  # another run, in this process: what the one before has saved is not its own
            self._saved, self._redone = set(), set()
        self._step = step
        self.committed.pop(step, None)  # it is not, what is in the folder now
        replace = self._replace or step in self._saved or step in self._redone
        with ExitStack() as opened:
            sources = {
                name: opened.enter_context(FileSource(place.parent / path, detached=True))
                for name, path in files.items()
            }
            identities = {name: source.identity for name, source in sources.items()}
            sizes = {name: source.nbytes for name, source in sources.items()}
            origin = Origin(HUGGING_FACE.name, str(place.parent), files, identities, sizes)
            facts = {**metadata, **origin.metadata()}
            if self._background:
                handle = self.repo.save_async(step, sources, facts, replace)
                self._pending = handle, place, opened.pop_all()
            elif self.repo.save(step, sources, facts, replace) is not None:
                self._done(step, place)

    def settle(self) -> None:
        """Wait until what was saved is durable.

        Raises:
            Exception: that of the save, if it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            handle, place, opened = pending
            with opened:
                if handle.result() is not None:
                    self._done(handle.epoch, place)

    def _done(self, step: int, place: Path) -> None:
        self.committed[step] = place
        self._saved.add(step)

    def restore(self, root: str | os.PathLike[str], step: int | None = None) -> Checkpoint | None:
        """Put a step back where the trainer expects it: the newest intact one, or this one. None if there is none.

        Raises:
            EpochNotFoundError: there is no such step.
            CorruptionError: it is damaged, or all of them are.
            FormatError: it is no trainer's folder.
            AccessError, StoreFullError: ``root`` cannot be written.
        """
        self.settle()
        if step is not None:
            ckpt = self.repo.checkpoint(step)
            put_back(ckpt, root)
        else:
            found = load_newest(self.repo, lambda newest: put_back(newest, root))
            if found is None:
                return None
            ckpt = found[0]
            self._redone = {epoch for epoch in self.repo.epochs() if epoch > ckpt.epoch}
            self._step = ckpt.epoch
        return ckpt


def put_back(ckpt: Checkpoint, root: str | os.PathLike[str]) -> Path:
    """Write the folder of a checkpoint, every file verified. What is there with the same bytes stays.

    A folder that is new appears in one step; in one that is there, files with other bytes are replaced. Others in it
    stay, and are named in the log.

    Raises:
        CorruptionError: a byte on the store is wrong or missing: nothing was put into its place.
        FormatError: it is no trainer's folder.
        InvalidArgumentError: it names a file as no file can be named.
        AccessError, StoreFullError: ``root`` cannot be written.
    """
    target = step_folder(root, ckpt.epoch)
    origin = origin_of(ckpt.metadata)
    paths = origin.paths if origin is not None else {}
    inside = all(path.startswith(f"{target.name}/") for path in paths.values())
    if not paths or not inside or len(set(paths.values())) < len(paths):
        raise FormatError(
            f"epoch {ckpt.epoch} of {ckpt.url} is no trainer's folder {target.name}: it has {sorted(ckpt.records)}",
            epoch=ckpt.epoch,
        )
    for path in paths.values():
        refuse_impossible(target.parent / path)
    _tell_of_others(target, paths.values())
    lacking = {name: path for name, path in paths.items() if not _is_there(ckpt, name, target.parent / path)}
    if not lacking:
        return target
    with writing(target), folder(target.parent), aside(target.parent) as scratch:
        for name, path in lacking.items():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            ckpt.read_file(name, scratch / path)
        _place(scratch, target, lacking.values(), new=len(lacking) == len(paths))
    return target


def _place(scratch: Path, target: Path, paths: Collection[str], *, new: bool) -> None:
    if new:
        with suppress(AlreadyExistsError):
            place_folder(scratch / target.name, target)
            sync_folder(target.parent)
            return
    for path in paths:
        place = target.parent / path
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch / path, place)
        sync_folder(place.parent)


def _tell_of_others(target: Path, paths: Collection[str]) -> None:
    """Files of somebody else stay where they are, but a trainer may take those of another run for its own."""
    own = {target.parent / path for path in paths}
    names = [Path(top, name) for top, _, found in os.walk(target) for name in found]
    others = sorted(path.relative_to(target).as_posix() for path in names if path not in own)
    if others:
        log.warning("files in %s that are not of this checkpoint, and may be of another run: %s", target, others)


def _is_there(ckpt: Checkpoint, name: str, path: Path) -> bool:
    try:
        return ckpt.holds_file(name, path)
    except (NotFoundError, InvalidRecordError):
        return False
