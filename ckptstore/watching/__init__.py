"""Files of any trainer: ``watch`` follows its folder, commits what it finishes, ``import_files`` takes what is there.

``layouts`` knows names, ``contents`` whether a file is whole, ``looks`` what has been seen when, ``watcher`` decides.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from ckptstore.errors import (
    AccessError,
    CkptStoreError,
    FencedError,
    FormatError,
    InvalidArgumentError,
    NotFoundError,
)
from ckptstore.formats.dcp import is_dcp_folder
from ckptstore.pipeline import Progress
from ckptstore.repository import Repository
from ckptstore.watching.layouts import DCP, find, layout_of, of_file, of_folder
from ckptstore.watching.watcher import Finding, Kind, Rules, Watcher

log = logging.getLogger("ckptstore")

__all__ = ["Finding", "Kind", "import_files", "watch"]

QUIET = 10.0
INTERVAL = 2.0
MOMENT = 0.01  # between two looks at least
MAX_WAIT = 60.0  # seconds between two tries while the store fails


def watch(
    folder: str | os.PathLike[str],
    repo: Repository,
    *,
    layout: str | None = None,
    pattern: str | None = None,
    need: Collection[str] = (),
    quiet: float = QUIET,
    interval: float = INTERVAL,
    once: bool = False,
    replace: bool = False,
    accept_unproven: bool = False,
    dry_run: bool = False,
    stop: threading.Event | None = None,
    on_finding: Callable[[Finding], object] | None = None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Follow the folder that a trainer saves to, and commit each epoch that it has finished. See docs/any-trainer.md.

    Returns when ``stop`` is set, after what is finished by then has been committed. The trainer is not disturbed, and
    whatever it deletes or overwrites, the repository keeps (an epoch that is written again, whole and with other
    contents, replaces the one of that number). A store that fails is tried again, for as long as it takes.

    Args:
        folder: the trainer's own; it need not exist yet.
        repo: the repository to commit to.
        layout: "burn", "dcp", "hf", "lightning" or "numbered"; by default what the names in the folder look like.
        pattern: or names of your own, e.g. ``"{record}-{epoch}.mpk"`` or ``"step_{epoch}/{record}"``.
        need: names of records without which no epoch is complete; by default those that come together in this layout,
            and those that other epochs have.
        quiet: seconds for which the files of an epoch must not have changed.
        interval: seconds from one look to the next.
        once: return when nothing of what was there at the beginning is changing any more.
        replace: replace also epochs of that number that come from elsewhere.
        accept_unproven: take files whose format cannot prove that they are whole for whole when they are still.
        dry_run: commit nothing, and return as with ``once``: what would be committed is of kind "due".
        stop: set it, from another thread or a signal handler, to end.
        on_finding: called with a ``Finding`` whenever one is news.
        progress: called with ``(bytes done, bytes in all)``, from worker threads.

    Returns:
        The last finding of each epoch that was there at the end.

    Raises:
        InvalidArgumentError: an argument that makes no sense.
        FencedError: the run has a newer writer: another watcher, or the trainer itself.
        FormatError: the repository is of a newer version.
        NotFoundError: with ``once``, there is no such folder.
        CkptStoreError: only at the end: nothing could be committed, and why.
    """
    follow = following(
        folder,
        layout=layout,
        pattern=pattern,
        need=need,
        quiet=quiet,
        interval=interval,
        once=once,
        replace=replace,
        accept_unproven=accept_unproven,
        dry_run=dry_run,
        stop=stop,
        on_finding=on_finding,
        progress=progress,
    )
    return follow(repo)


def following(
    folder: str | os.PathLike[str],
    *,
    layout: str | None,
    pattern: str | None,
    need: Collection[str],
    quiet: float,
    interval: float,
    once: bool,
    replace: bool,
    accept_unproven: bool,
    dry_run: bool,
    stop: threading.Event | None,
    on_finding: Callable[[Finding], object] | None,
    progress: Progress | None,
) -> Callable[[Repository], list[Finding]]:
    """What ``watch`` does with a repository. What it refuses is refused here, before one is opened, or made."""
    place, once = Path(os.path.abspath(folder)), once or dry_run
    if place.exists() and not place.is_dir():
        raise InvalidArgumentError(f"{place} is no folder: watch the one that the trainer saves to")
    if once and not place.exists():
        raise NotFoundError(f"{place} does not exist: nothing to save")
    for name, seconds in (("quiet", quiet), ("interval", interval)):
        if type(seconds) not in (int, float) or not 0 <= seconds <= 24 * 3600:
            raise InvalidArgumentError(f"{name} must be 0 to 86400 seconds, not {seconds!r}")
    rules = _rules(need, quiet=float(quiet), replace=replace, accept_unproven=accept_unproven, dry_run=dry_run)
    look = partial(find, place, layout_of(layout, pattern))

    def follow(repo: Repository) -> list[Finding]:
        watcher = Watcher(place, repo, look, rules, progress)
        end = stop or threading.Event()
        return _Following(watcher, on_finding or _ignore).run(float(interval), rules.quiet, once, end)

    return follow


def import_files(
    path: str | os.PathLike[str],
    repo: Repository,
    *,
    epoch: int | None = None,
    layout: str | None = None,
    pattern: str | None = None,
    need: Collection[str] = (),
    replace: bool = False,
    accept_unproven: bool = False,
    dry_run: bool = False,
    arrays: bool = False,
    on_finding: Callable[[Finding], object] | None = None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Take over what a trainer has left: a file, or all epochs of a folder, the oldest first. What is there is skipped.

    For folders that nobody writes to; ``watch`` is for the others. Files that are not whole are left out (kind "torn"),
    and the others go on.

    Args:
        path: a folder, or one file.
        epoch: only this one; of a file: the number to import it as, by default that in its name.
        layout: as for ``watch``.
        pattern: as for ``watch``.
        need: as for ``watch``.
        replace: as for ``watch``.
        accept_unproven: as for ``watch``.
        on_finding: as for ``watch``.
        progress: as for ``watch``.
        dry_run: only say what would be done: kind "due".
        arrays: store what is in the files (torch, safetensors, npz, as ``formats.read`` reads them) and not the files:
            then it can be loaded in parts and compared, but not be put back bit for bit.

    Returns:
        What became of each epoch.

    Raises:
        NotFoundError: no such file or folder, no epoch in it, or not this one.
        InvalidArgumentError, FormatError, FencedError: as for ``watch``.
        StoreError: the store failed, or the folder cannot be listed. What was committed before is.
    """
    take = importing(
        path,
        epoch=epoch,
        layout=layout,
        pattern=pattern,
        need=need,
        replace=replace,
        accept_unproven=accept_unproven,
        dry_run=dry_run,
        arrays=arrays,
        on_finding=on_finding,
        progress=progress,
    )
    return take(repo)


def importing(
    path: str | os.PathLike[str],
    *,
    epoch: int | None,
    layout: str | None,
    pattern: str | None,
    need: Collection[str],
    replace: bool,
    accept_unproven: bool,
    dry_run: bool,
    arrays: bool,
    on_finding: Callable[[Finding], object] | None,
    progress: Progress | None,
) -> Callable[[Repository], list[Finding]]:
    """What ``import_files`` does with a repository. What it refuses is refused here, before one is opened, or made."""
    place = Path(os.path.abspath(path))
    if not place.exists():
        raise NotFoundError(f"{place} does not exist: nothing to import")
    dcp = is_dcp_folder(place)
    folder = place if place.is_dir() and not dcp else place.parent
    rules = _rules(need, quiet=0.0, replace=replace, accept_unproven=accept_unproven, dry_run=dry_run, arrays=arrays)
    layouts = layout_of(layout, pattern)
    find_all = partial(find, folder, layouts) if folder is place else lambda: (None, [of_file(place, epoch, layouts)])
    try:
        found = (DCP, [of_folder(place, epoch)]) if dcp else find_all()
    except OSError as error:
        raise AccessError(f"{error.filename} cannot be listed: {error.strerror}", errno=error.errno) from error
    chosen = {files.epoch for files in found[1] if epoch is None or files.epoch == epoch}
    if not chosen:
        what = f"epoch {epoch}" if epoch is not None else "checkpoint under a name of a known layout"
        raise NotFoundError(f"{place} holds no {what}", epoch=epoch)
    tell = on_finding or _ignore

    def take(repo: Repository) -> list[Finding]:
        findings = []
        for finding in Watcher(folder, repo, lambda: found, rules, progress, only=chosen).looking():
            findings.append(finding)
            tell(finding)
        return findings

    return take


class _Following:
    """Looks again and again, tells what is news, and bears with a store that fails."""

    def __init__(self, watcher: Watcher, tell: Callable[[Finding], object]) -> None:
        self._watcher = watcher
        self._tell = tell
        self._last: dict[int, Finding] = {}
        self._error: CkptStoreError | None = None
        self._failures = 0
        self._again = 0.0

    def run(self, interval: float, quiet: float, once: bool, stop: threading.Event) -> list[Finding]:
        """Until ``stop``, and then as long as what has just been written may still turn out to be finished."""
        end: float | None = None
        while True:
            begun = time.monotonic()
            first = end is None and (once or stop.is_set())
            if first:
                end = begun + quiet + 2 * interval
            changing = self._look(begun, force=first, ending=end is not None)
            if end is None:
                stop.wait(max(interval, MOMENT))
            elif self._error is not None:
                raise self._error
            elif changing and begun < end:
                time.sleep(max(interval, MOMENT))
            else:
                return list(self._last.values())

    def _look(self, begun: float, force: bool, ending: bool) -> bool:
        """One look; whether something may be finished soon.

        The folder is also looked at while the store is left alone.
        """
        alone = begun < self._again and not force
        changing = False
        try:
            for finding in self._watcher.looking(commit=not alone):
                changing = changing or finding.kind == "changing"
                self._news(finding)
        except (FencedError, FormatError, InvalidArgumentError):
            raise
        except CkptStoreError as error:
            self._fail(error)
        except OSError as error:
            problem = f"{error.filename} cannot be listed: {error.strerror}"
            if ending:
                raise AccessError(problem, errno=error.errno) from error
            log.warning("%s. It is looked at again", problem)
        else:
            if not alone:
                self._error, self._failures = None, 0
        self._last = {epoch: last for epoch, last in self._last.items() if epoch in self._watcher.epochs}
        return changing

    def _fail(self, error: CkptStoreError) -> None:
        self._error = error
        self._failures += 1
        wait = min(MAX_WAIT, 2.0 ** min(self._failures, 10))
        self._again = time.monotonic() + wait
        log.warning("nothing can be committed, which is tried again in %.0f seconds: %s", wait, error)

    def _news(self, finding: Finding) -> None:
        before = self._last.get(finding.epoch)
        if finding.kind == "there" and before is not None and before.kind in ("saved", "replaced"):
            return
        self._last[finding.epoch] = finding
        if before is None or (before.kind, before.reason) != (finding.kind, finding.reason):
            self._tell(finding)


def _rules(need: Collection[str], **others: object) -> Rules:
    if isinstance(need, str):
        raise InvalidArgumentError(f"need must be a list of record names, not {need!r}")
    return Rules(need=frozenset(need), **others)  # type: ignore[arg-type]


def _ignore(finding: Finding) -> None:
    pass
