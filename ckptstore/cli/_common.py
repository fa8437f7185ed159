"""What all commands share: their common options, how they open a repository, how they print."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

import ckptstore
from ckptstore.cli._format import clean
from ckptstore.errors import InvalidArgumentError, RepositoryNotFoundError
from ckptstore.manifest import check_epoch
from ckptstore.policies import AnyPolicy
from ckptstore.stores import MemoryStore, RetryPolicy
from ckptstore.stores.opening import is_bucket
from ckptstore.stores.remote_backends import CONNECT_SECONDS, READ_SECONDS

WIDTH_OF_A_PIPE = 250  # nobody wants a table cut at 80 columns in a file
_OPTION = "--option KEY=VALUE"
_TEXT_OPTIONS = {"key", "secret", "token", "username", "password", "endpoint_url", "project"}

debug = False
"""Whether an error is to show its traceback. Set by ``--debug``, wherever on the line it stands."""


_timeout: float | None = None
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d)?")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_of(text: str, what: str = "") -> float:
    """Seconds: ``90``, ``90s``, ``30m``, ``2h``, ``7d``. InvalidArgumentError for anything else."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        named = f"{what} " if what else ""
        raise InvalidArgumentError(f"{named}{clean(text)!r} is no time: use e.g. 90s, 30m, 2h or 7d")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def _set_timeout(text: str | None) -> str | None:
    global _timeout  # one process runs one command
    if text is not None:
        _timeout = seconds_of(text, "--timeout")
        if not 0.1 <= _timeout <= 86_400:
            raise InvalidArgumentError(f"--timeout {clean(text)!r}: use 0.1s to 1d")
    return text


def _set_debug(value: bool) -> bool:
    global debug  # one process runs one command
    debug = debug or value
    if value:
        logging.getLogger("ckptstore").setLevel(logging.DEBUG)
    return value


def forget() -> None:
    """After a command: the next one in this process, and the program around it, log and wait as they did before."""
    global debug, _timeout
    debug, _timeout = False, None
    logging.getLogger("ckptstore").setLevel(logging.NOTSET)


Url = Annotated[
    str, typer.Argument(metavar="URL", show_default=False, help="A folder, s3://bucket/prefix or gs://bucket/prefix.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        show_default=False,
        help="A storage option for s3fs or gcsfs, e.g. endpoint_url=http://host:9000. May be repeated. Secrets "
        "are better off in the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
        "GOOGLE_APPLICATION_CREDENTIALS.",
    ),
]
Unsafe = Annotated[
    bool,
    typer.Option(
        "--unsafe-single-writer",
        help="Accept a server that ignores conditional puts: you promise that only one process writes at a time.",
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        metavar="TIME",
        callback=_set_timeout,
        show_default=False,
        help="Give up, with exit code 5, when a store has failed or been silent for so long, e.g. 5s. Default: 180s of "
        "retries.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Show the traceback of an error.")]


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


class _Nothing(MemoryStore):
    """As empty as what is not there."""


def open_repository(
    url: str,
    options: Sequence[str] | None,
    unsafe: bool,
    *,
    create: bool,
    run: str = "",
    keep: AnyPolicy | None = None,
) -> ckptstore.Repository:
    """The repository at ``url``; only a command that writes may create it."""
    # By default no name: a command that is run beside a trainer, in its environment, must not take its run over.
    more: dict[str, Any] = {"create": create, "unsafe_single_writer": unsafe, "run_id": run}
    return ckptstore.open(url, **access(url, options), keep=keep, **more)


def open_target(
    url: str,
    options: Sequence[str] | None,
    unsafe: bool,
    dry_run: bool,
    *,
    run: str = "",
    keep: AnyPolicy | None = None,
) -> ckptstore.Repository:
    """The repository that a command writes to, made if need be. For a dry run none is made: one as empty is given."""
    try:
        return open_repository(url, options, unsafe, create=not dry_run, run=run, keep=keep)
    except RepositoryNotFoundError:
        if not dry_run:
            raise
        return ckptstore.Repository(_Nothing(), run_id=run)


def url_of(target: ckptstore.Repository, given: str) -> str:
    """Where the repository of ``open_target`` is, or would be made."""
    return given if isinstance(target.store, _Nothing) else target.url


def ask(question: str, yes: bool) -> None:
    """Go on only if the person at the terminal wants to; without a terminal only with ``--yes``."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgumentError(f"{question} There is nobody to ask: add --yes, or look first with --dry-run")
    if not typer.confirm(question, err=True):
        raise InvalidArgumentError("you said no: nothing was done")


def access(url: str, options: Sequence[str] | None) -> dict[str, Any]:
    """How the store at ``url`` is asked: its storage options, and for how long, as ``--timeout`` says."""
    given = storage_options(options)
    if _timeout is None:
        return {"storage_options": given}
    found = given or {}
    if url.startswith("s3://"):
        config = found.get("config_kwargs") or {}
        limits = {"connect_timeout": min(CONNECT_SECONDS, _timeout), "read_timeout": min(READ_SECONDS, _timeout)}
        found = {**found, "config_kwargs": {**limits, **config}} if isinstance(config, dict) else found
    elif is_bucket(url):
        found = {"requests_timeout": min(READ_SECONDS, _timeout), **found}
    retry = RetryPolicy(deadline=_timeout, hang=min(RetryPolicy().hang, _timeout))
    return {"storage_options": found or None, "retry": retry}


def storage_options(options: Sequence[str] | None) -> dict[str, Any] | None:
    """``KEY=VALUE`` options as a dict. Values are JSON where they can be, but a key of digits stays text."""
    pairs = split_pairs(options or (), _OPTION)
    return {k: v if k in _TEXT_OPTIONS else as_value(v) for k, v in pairs.items()} or None


def split_pairs(pairs: Sequence[str], what: str) -> dict[str, str]:
    """``KEY=VALUE`` texts as a dict; ``what`` is the form that a message asks for.

    Raises:
        InvalidArgumentError: one has no ``=``, or a key is there twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            shown = key if what == _OPTION else pair  # an option's value may be a secret
            raise InvalidArgumentError(f"{clean(shown)!r} is not of the form {what}")
        if key in found:
            raise InvalidArgumentError(f"{what}: {clean(key)!r} is there twice")
        found[key] = value
    return found


def as_value(text: str) -> Any:
    """JSON where ``text`` is JSON (a number, true, null, a list, ...), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def checked_epoch(epoch: int | None) -> int | None:
    """Refuse an impossible epoch before a store is asked."""
    return None if epoch is None else check_epoch(epoch)


def out() -> Console:
    """Stdout, for people."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_A_PIPE)


def err() -> Console:
    """Stderr, for people."""
    return Console(stderr=True, highlight=False)


def print_json(text: str) -> None:
    """Stdout, for programs."""
    sys.stdout.write(text + "\n")


def warn(message: str) -> None:
    """One line on stderr."""
    say("warning", message, "yellow")


def say(word: str, message: str, style: str) -> None:
    """``word: message`` on stderr in one line, however long; coloured on a terminal."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble((f"{word}:", style), " ", clean(message)))


@contextmanager
def progress_bar(what: str, *, counting: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A callback for the library that moves a bar on stderr, if that is a terminal.

    The library counts each epoch from zero; every new count is shown as a round of its own.

    Args:
        counting: things are counted, not bytes.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    sizes: tuple[ProgressColumn, ...] = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *((MofNCompleteColumn(),) if counting else sizes))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        last, rounds = 0, 1

        def move(done: int, total: int) -> None:
            nonlocal last, rounds
            if done < last:
                rounds += 1
                bar.reset(task, description=f"{what} ({rounds})")
            last = done
            bar.update(task, completed=done, total=total)

        yield move
