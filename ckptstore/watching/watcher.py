"""The watcher: look at a trainer's folder, find what is finished, commit it. One look after the other.

An epoch is finished when all of this holds (docs/any-trainer.md):

    still      two looks, ``quiet`` seconds apart at least, saw the same files; no earlier epoch is being written
    complete   its files are there: those that come together, and those that the epochs around it have
    one life   they were written by one life of the trainer: not half of them rewritten after a restart
    whole      each file's format proves it; where it cannot, a file of the same size has been proved by time
    unchanged  after all was read, the files are what they were

The trainer is not disturbed: files are opened for reading, nothing is locked, nothing is written beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CorruptionError, EpochNotFoundError, FormatError, InvalidRecordError, NotFoundError
from ckptstore.files import FileSource, Identity
from ckptstore.formats import ForeignCheckpoint
from ckptstore.formats.dcp import files_of
from ckptstore.pipeline import Progress
from ckptstore.repository import Repository
from ckptstore.watching.contents import SMALL, Content, examine, shards
from ckptstore.watching.layouts import DCP, EpochFiles, Layout
from ckptstore.watching.looks import Looks, Seen
from ckptstore.watching.origin import Origin, origin_of
from ckptstore.watching.trees import read_trees

Kind = Literal["saved", "replaced", "there", "due", "changing", "waiting", "torn", "refused", "conflict"]
Find = Callable[[], tuple[Layout | None, list[EpochFiles]]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of an epoch at a look.

    Attributes:
        kind: "saved" or "replaced": committed now. "there": the repository has it already. "due": would be committed
            (dry run). "changing": its files do, or not long ago. "waiting": something is missing, see ``reason``.
            "torn": a file is not whole. "refused": it cannot be read as arrays. "conflict": the repository has an
            epoch of that number from elsewhere.
        files: path of each record's file, below the folder.
        nbytes: of all files.
    """

    epoch: int
    kind: Kind
    reason: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What counts as finished. Times in seconds."""

    need: frozenset[str] = frozenset()
    quiet: float = 10.0
    replace: bool = False  # also what comes from elsewhere
    accept_unproven: bool = False
    dry_run: bool = False
    arrays: bool = False  # what is in the files, and not the files


class _NotYetError(Exception):
    """An epoch is not to be committed now."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind
        self.reason = reason


class Watcher:
    """Commits what a trainer has finished. Not for use by several threads at once."""

    def __init__(
        self,
        folder: Path,
        repo: Repository,
        find: Find,
        rules: Rules,
        progress: Progress | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        self._folder = folder
        self._repo = repo
        self._find = find
        self._rules = rules
        self._progress = progress
        self._only = only
        self._looks = Looks(folder)
        self._layout: Layout | None = None
        self._now = 0.0
        self._there: set[int] | None = None
        self._origins: dict[int, Origin | None] = {}
        self._done: dict[int, dict[str, Identity]] = {}  # what has been compared with the repository in this life
        self._contents: dict[Identity, Content] = {}

    @property
    def epochs(self) -> Collection[int]:
        """Those of the last look."""
        return self._looks.epochs.keys()

    def looking(self, commit: bool = True) -> Iterator[Finding]:
        """Look once, and commit what is finished, the oldest first. What became of each epoch, as it goes.

        Args:
            commit: False to look only, and leave the store alone.

        Raises:
            OSError: the folder cannot be listed.
            StoreError: the store failed. What was committed before is; look again.
            CkptStoreError: of ``Repository.begin``.
        """
        self._layout, found = self._find()
        self._now = time.monotonic()  # of the look: what goes by while an epoch is committed proves nothing
        before = self._looks.epochs
        self._looks.look(found, self._now, {e for e in before if self._done.get(e) == before[e].identities})
        for epoch in list(self._looks.epochs) if commit else ():
            if self._only is None or epoch in self._only:
                yield self._judge(epoch)
        known = {one for seen in self._looks.epochs.values() for one in seen.identities.values()}
        self._contents = {identity: content for identity, content in self._contents.items() if identity in known}

    # ---- one epoch ---------------------------------------------------------------------------------------------

    def _judge(self, epoch: int) -> Finding:
        seen = self._looks.epochs[epoch]
        begun = time.perf_counter()
        try:
            kind = self._settle(epoch, seen)
            reason = ""
        except _NotYetError as no:
            kind, reason = no.kind, no.reason
        nbytes = sum(identity.size for identity in seen.identities.values())
        return Finding(epoch, kind, reason, seen.files.files, nbytes, time.perf_counter() - begun)

    def _settle(self, epoch: int, seen: Seen) -> Kind:
        origin = self._origin(epoch)
        if self._done.get(epoch) == seen.identities or (origin is not None and origin.identities == seen.identities):
            self._done[epoch] = dict(seen.identities)
            return "there"
        if origin is not None and dict(seen.identities).items() <= dict(origin.identities).items():
            return "there"  # the trainer is deleting it
        self._check_still(epoch)
        self._check_complete(epoch, seen)
        self._check_one_life(epoch, seen, origin)
        with ExitStack() as stack:
            sources = {name: stack.enter_context(self._open(seen, name)) for name in seen.identities}
            sizes = {name: self._check_whole(epoch, name, source, seen) for name, source in sources.items()}
            if self._is_there(epoch):
                if self._holds(epoch, sources):
                    self._done[epoch] = dict(seen.identities)
                    return "there"
                self._check_ours(epoch, origin)
            trees = self._trees(seen) if self._rules.arrays else None
            if self._rules.dry_run:
                raise _NotYetError("due", "it replaces what is there" if self._is_there(epoch) else "")
            return self._commit(epoch, seen, sources, sizes, trees)

    def _commit(
        self,
        epoch: int,
        seen: Seen,
        sources: Mapping[str, FileSource],
        sizes: Mapping[str, int],
        trees: tuple[dict[str, Any], list[ForeignCheckpoint]] | None,
    ) -> Kind:
        layout = self._layout.name if self._layout is not None else "file"
        paths = {name: seen.files.files[name] for name in seen.identities}
        origin = Origin(layout, str(self._folder), paths, dict(seen.identities), sizes)
        replace = self._is_there(epoch)
        total = sum(source.nbytes for source in sources.values())
        try:
            with self._repo.begin(
                epoch, origin.metadata(), replace=replace, progress=self._progress, total=total
            ) as txn:
                states, foreign = trees if trees is not None else ({}, [])
                for name, state in states.items():
                    txn.write(name, state)
                for name, source in sources.items() if trees is None else ():
                    txn.write_file(name, source)
                for source in sources.values():
                    source.check_unchanged()
                for tree in foreign:
                    tree.check_unchanged()
        except InvalidRecordError as error:
            self._looks.disturb(epoch, time.monotonic())
            raise _NotYetError("changing", error.message) from error
        finally:
            self._there = None  # also where the outcome is unknown: to be listed again
        self._origins[epoch], self._done[epoch] = origin, dict(seen.identities)
        return "replaced" if replace else "saved"

    def _trees(self, seen: Seen) -> tuple[dict[str, Any], list[ForeignCheckpoint]]:
        try:
            return read_trees(self._folder, self._layout, seen.files.files)
        except (CorruptionError, NotFoundError) as error:
            raise _NotYetError("torn", error.message) from error
        except (FormatError, InvalidRecordError) as error:
            raise _NotYetError("refused", error.message) from error

    # ---- what must hold ----------------------------------------------------------------------------------------

    def _check_complete(self, epoch: int, seen: Seen) -> None:
        for path, why in sorted(seen.unreadable.items()):
            raise _NotYetError("waiting", f"{path} cannot be read: {why}")
        records = seen.identities.keys()
        need = self._rules.need or (self._layout.needs(records) if self._layout is not None else frozenset())
        missing = need - records
        if not missing:
            missing = frozenset(seen.ever - records)
        if not missing and not self._rules.need and self._layout is not None and not self._layout.varies:
            missing = self._usual(epoch) - records
        if missing:
            names = ", ".join(sorted(missing))
            raise _NotYetError("waiting", f"missing: {names} (`need` says what an epoch must have)")

    def _usual(self, epoch: int) -> frozenset[str]:
        """What the epochs around it have: a record that is written last, or deleted first, must not be missed.

        A name that only one other epoch has is waited for until the trainer has gone on: it may be a stray.
        """
        numbers = self._looks.epochs.keys() | set(self._listed())
        before = sorted(number for number in numbers if number < epoch)[-2:]
        after = sorted(number for number in self._looks.epochs if number > epoch)[:1]
        names = [self._names(number) for number in before + after]
        usual = frozenset(name for found in names for name in found if sum(name in other for other in names) > 1)
        return usual | (names[len(before) - 1] if before and not self._looks.gone_on(epoch) else frozenset())

    def _names(self, epoch: int) -> frozenset[str]:
        seen, origin = self._looks.epochs.get(epoch), self._origin(epoch)
        return frozenset(seen.ever if seen is not None else ()) | frozenset(origin.paths if origin is not None else ())

    def _check_still(self, epoch: int) -> None:
        since = self._now - self._rules.quiet
        if self._looks.epochs[epoch].still > since:
            raise _NotYetError("changing", "")
        # While the optimizer of an earlier epoch is being written, this epoch's waits for its turn, and what lies
        # under its name may be that of an earlier life.
        busy = self._looks.being_written(epoch, since)
        if busy is not None:
            raise _NotYetError("changing", f"epoch {busy} is still being written")

    def _check_one_life(self, epoch: int, seen: Seen, origin: Origin | None) -> None:
        if self._looks.gone_on(epoch) or self._rules.accept_unproven:
            return
        mine = seen.identities
        mixed = self._looks.mixed(epoch)
        if origin is not None and origin.identities.keys() <= mine.keys():
            old = {name for name, identity in origin.identities.items() if mine[name] == identity}
            mixed = mixed or 0 < len(old) < len(origin.identities)
        if mixed:
            raise _NotYetError("waiting", "some of its files were written again and others not, so far")

    def _open(self, seen: Seen, name: str) -> FileSource:
        try:
            source = FileSource(self._folder / seen.files.files[name], detached=True)
        except (NotFoundError, InvalidRecordError) as error:
            self._looks.disturb(seen.files.epoch, time.monotonic())
            raise _NotYetError("changing", error.message) from error
        if source.identity != seen.identities[name]:
            source.__exit__()
            self._looks.disturb(seen.files.epoch, time.monotonic())
            raise _NotYetError("changing", "")
        return source

    def _check_whole(self, epoch: int, name: str, source: FileSource, seen: Seen) -> int:
        """That the file is whole; the bytes that it holds."""
        content = self._content(source)
        path = seen.files.files[name]
        if content.state == "torn":
            raise _NotYetError("torn", f"{path} is not whole: {content.why}")
        if path.endswith(".index.json"):
            here = path.rpartition("/")[0]
            paths = set(seen.files.files.values())
            lacking = sorted(s for s in shards(source) if (f"{here}/{s}" if here else s) not in paths)
            if lacking:
                raise _NotYetError("waiting", f"{lacking[0]}, of which {path} speaks, is not there")
        if self._layout is DCP and name == "metadata":
            self._check_dcp(path, seen)
        elif content.state == "unproven" and not self._is_plausible(epoch, name, content, seen):
            raise _NotYetError(
                "waiting",
                f"nothing proves that {path} is whole: its format does not say, and no other epoch's was of that size "
                "(`accept_unproven` takes it all the same)",
            )
        return content.size

    def _check_dcp(self, path: str, seen: Seen) -> None:
        """That the files are there of which the metadata of DCP speak, as long as they should be."""
        here = path.rpartition("/")[0]
        sizes = {seen.files.files[name]: identity.size for name, identity in seen.identities.items()}
        try:
            needed = files_of(self._folder / here)
        except CorruptionError as error:
            raise _NotYetError("torn", error.message) from error
        except (FormatError, InvalidRecordError, NotFoundError) as error:
            raise _NotYetError("refused", error.message) from error
        for file, size in sorted(needed.items()):
            found = sizes.get(f"{here}/{file}")
            if found is None:
                raise _NotYetError("waiting", f"{file}, of which {path} speaks, is not there")
            if found < size:
                raise _NotYetError("torn", f"{here}/{file} is not whole: it has {found} bytes and needs {size}")

    def _content(self, source: FileSource) -> Content:
        found = self._contents.get(source.identity)
        if found is None:
            found = self._contents[source.identity] = examine(source)
        return found

    def _is_plausible(self, epoch: int, name: str, content: Content, seen: Seen) -> bool:
        """Whether a file of a format that proves nothing can be taken for whole."""
        if self._rules.accept_unproven or content.size < SMALL:
            return True
        origins = [self._origin(number) for number in self._listed()[-20:]]
        if any(origin is not None and origin.sizes.get(name) == content.size for origin in origins):
            return True
        mine = seen.identities[name].mtime_ns
        for number, other in self._looks.epochs.items():
            identity = other.identities.get(name)
            if number > epoch and identity is not None and identity.mtime_ns >= mine:
                try:
                    with FileSource(self._folder / other.files.files[name], detached=True) as source:
                        if self._content(source).size == content.size:
                            return True
                except (NotFoundError, InvalidRecordError):
                    continue
        return False

    # ---- the repository ----------------------------------------------------------------------------------------

    def _listed(self) -> list[int]:
        if self._there is None:
            self._there = set(self._repo.epochs())
        return sorted(self._there)

    def _is_there(self, epoch: int) -> bool:
        self._listed()
        return self._there is not None and epoch in self._there

    def _origin(self, epoch: int) -> Origin | None:
        """What the repository's epoch remembers; None if there is none, or it remembers nothing."""
        if epoch not in self._origins:
            checkpoint = self._checkpoint(epoch) if self._is_there(epoch) else None
            self._origins[epoch] = origin_of(checkpoint.metadata) if checkpoint is not None else None
        return self._origins[epoch]

    def _checkpoint(self, epoch: int) -> Checkpoint | None:
        try:
            return self._repo.checkpoint(epoch)
        except (EpochNotFoundError, CorruptionError):
            return None

    def _holds(self, epoch: int, sources: Mapping[str, FileSource]) -> bool:
        """Whether the repository's epoch has just these bytes."""
        checkpoint = self._checkpoint(epoch)
        if checkpoint is None or checkpoint.records.keys() != sources.keys():
            return False
        try:
            return all(checkpoint.holds_file(name, source) for name, source in sources.items())
        except (CorruptionError, NotFoundError, InvalidRecordError):
            return False

    def _check_ours(self, epoch: int, origin: Origin | None) -> None:
        if self._rules.replace or self._checkpoint(epoch) is None:  # a damaged one is mended
            return
        if origin is None or origin.folder != str(self._folder):
            where = origin.folder if origin is not None else "no folder"
            raise _NotYetError("conflict", f"epoch {epoch} of the repository holds other bytes, and comes from {where}")
