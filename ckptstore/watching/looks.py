"""What has been seen of a folder: which files have stopped changing, and for how long."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ckptstore.files import Identity
from ckptstore.watching.layouts import EpochFiles


@dataclass(slots=True)
class Seen:
    """One epoch, as of the last look.

    Attributes:
        identities: of each record's file.
        still: since when (by the caller's clock, in seconds) all of it has looked as it does now.
        written: when each record was last seen to have changed; a record that goes does not change the others.
        ever: names of all records that have been seen of it.
        unreadable: paths of what is there and no file that can be read, with the reason.
    """

    files: EpochFiles
    identities: dict[str, Identity]
    still: float
    written: dict[str, float]
    ever: set[str] = field(default_factory=set)
    unreadable: dict[str, str] = field(default_factory=dict)


class Looks:
    """The memory of a folder, look by look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.epochs: dict[int, Seen] = {}
        """What there was at the last look, by epoch, ascending."""

    def look(self, found: Iterable[EpochFiles], now: float, settled: Collection[int] = ()) -> None:
        """Look again. An epoch whose files are not what they were begins to be still anew.

        Args:
            settled: epochs of which nothing is expected any more: looking at them may be cheap.
        """
        epochs: dict[int, Seen] = {}
        for files in found:
            identities: dict[str, Identity] = {}
            unreadable: dict[str, str] = {}
            for record, path in files.files.items():
                identity = self._identity(path, cheaply=files.epoch in settled)
                if isinstance(identity, Identity):
                    identities[record] = identity
                elif identity is not None:
                    unreadable[path] = identity
            if not identities and not unreadable:
                continue
            epochs[files.epoch] = _seen(files, identities, self.epochs.get(files.epoch), now)
            epochs[files.epoch].unreadable = unreadable
        self.epochs = epochs

    def disturb(self, epoch: int, now: float) -> None:
        """It was found to be other than at the last look: it has not been still."""
        self.epochs[epoch].still = now

    def being_written(self, epoch: int, since: float) -> int | None:
        """An earlier epoch of which a record that this one has as well has changed after ``since``."""
        mine = self.epochs[epoch].identities
        for number, seen in self.epochs.items():
            if number < epoch and any(name in mine and when > since for name, when in seen.written.items()):
                return number
        return None

    def mixed(self, epoch: int) -> bool:
        """Whether a new life of the trainer has written an earlier epoch again and some files of this one, not yet all.

        Then a file of this epoch is older than the same record of the earlier one, and another was written after that.
        """
        mine = {name: one.mtime_ns for name, one in self.epochs[epoch].identities.items()}
        newest = max(mine.values())
        for number, other in self.epochs.items():
            theirs = {name: one.mtime_ns for name, one in other.identities.items()}
            stale = [when for name, when in mine.items() if theirs.get(name, when) > when] if number < epoch else []
            if stale and any(min(stale) < when < newest for when in theirs.values()):
                return True
        return False

    def gone_on(self, epoch: int) -> bool:
        """Whether the trainer has begun a later epoch after all that there is of this one."""
        newest = max((one.mtime_ns for one in self.epochs[epoch].identities.values()), default=0)
        later = (seen.identities for number, seen in self.epochs.items() if number > epoch)
        return any(one.mtime_ns > newest for identities in later for one in identities.values())

    def _identity(self, path: str, cheaply: bool) -> Identity | str | None:
        """Why it cannot be read; None if it has just been deleted.

        Asked for by opening it: a network mount answers ``stat`` from a cache, for up to a minute.
        """
        place = self._folder / path
        try:
            if cheaply:
                return Identity.of(os.stat(place))
            fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if isinstance(error, (FileNotFoundError, NotADirectoryError)):
                return "it links to what is not there" if os.path.islink(place) else None
            return error.strerror
        try:
            found = os.fstat(fd)
            return Identity.of(found) if stat.S_ISREG(found.st_mode) else "it is no regular file"
        finally:
            os.close(fd)


def _seen(files: EpochFiles, identities: dict[str, Identity], before: Seen | None, now: float) -> Seen:
    if before is None:
        return Seen(files, identities, now, dict.fromkeys(identities, now), set(identities))
    same = before.identities == identities and before.files == files
    written = {
        name: before.written[name] if before.identities.get(name) == identity else now
        for name, identity in identities.items()
    }
    return Seen(files, identities, before.still if same else now, written, before.ever | set(identities))
