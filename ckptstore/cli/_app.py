"""The application: its commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from ckptstore.cli import _common
from ckptstore.cli._common import Debug, Timeout, say
from ckptstore.cli._process import streams, told_to_end
from ckptstore.cli.bench import bench
from ckptstore.cli.cp import cp
from ckptstore.cli.demo import demo
from ckptstore.cli.diff import diff
from ckptstore.cli.doctor import doctor
from ckptstore.cli.du import du
from ckptstore.cli.export import export
from ckptstore.cli.import_ import import_
from ckptstore.cli.ls import ls
from ckptstore.cli.mirror import mirror
from ckptstore.cli.pin import pin, rm, unpin
from ckptstore.cli.preflight import preflight
from ckptstore.cli.prune import gc, plan, prune
from ckptstore.cli.quarantine import quarantine
from ckptstore.cli.repair import repair
from ckptstore.cli.report import report
from ckptstore.cli.restore import restore
from ckptstore.cli.save import save
from ckptstore.cli.scrub import scrub
from ckptstore.cli.show import show
from ckptstore.cli.tiers import tiers
from ckptstore.cli.verify import verify
from ckptstore.cli.watch import watch
from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    CorruptionError,
    InvalidArgumentError,
    InvalidRecordError,
    NotFoundError,
    StoreError,
)

GOOD, USAGE, OTHER, NOT_FOUND, CORRUPT, UNAVAILABLE = range(6)
INTERRUPTED = 130
_PIPE_CLOSED = 141  # as a shell reports a program that SIGPIPE ended

_CODES: tuple[tuple[type[CkptStoreError], int], ...] = (
    (NotFoundError, NOT_FOUND),
    (CorruptionError, CORRUPT),
    (StoreError, UNAVAILABLE),
    (AlreadyExistsError, USAGE),
    (InvalidArgumentError, USAGE),
    (InvalidRecordError, USAGE),
)

# The library speaks to authors of Python; these are the same things on a command line.
_WORDS = (
    ('use format="files"', "use --format files"),
    (", or open it with create=True", " or create it with a first `ckptstore save`"),
    ("exists: choose another folder", "exists: choose another --to"),
    ("or pass force=True to overwrite it", "or overwrite it with --force"),
    ("pass replace=True", "use --replace"),
    ("pass unsafe_single_writer=True", "use --unsafe-single-writer"),
    ("put them into storage_options", "give them by environment or --option"),
    ("storage_options are", "--option is"),
    ("give credentials in storage_options", "give credentials by --option"),
    ("in storage_options", "given by --option"),
    ("or unsafe_single_writer=True", "or --unsafe-single-writer"),
    (', or open it with on_full="oldest"', ""),
)

# Typer carries its own copy of click in newer versions; this is the usage error of whichever it uses.
_ClickError: Any = typer.BadParameter.__mro__[2]


class _Failure(Exception):
    """Carries an error past typer, which would take a broken connection (EPIPE) for a closed stdout."""


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (_ClickError, typer.Exit, typer.Abort):
            raise
        except Exception as error:
            raise _Failure from error


app = typer.Typer(
    cls=_Group,
    help="Atomic, verified checkpoints on a folder, S3 or GCS.",
    epilog="Exit codes: 0 good, 1 usage, 2 other, 3 not found, 4 corrupt, 5 store down",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: tuple[Any, ...] = (
    *(ls, show, save, restore, rm, verify, plan, prune, gc, pin, unpin),
    *(scrub, repair, quarantine, mirror, cp, tiers, du, diff, export),
    *(import_, watch, report),
    *(preflight, doctor, bench, demo),
)
_WITHOUT_TIMEOUT = (bench, doctor, demo)  # they time stores themselves, or make their own


def _with_timeout(command: Any) -> Any:
    """The command with ``--timeout``: which ``_common`` has heard of before the command begins."""

    @functools.wraps(command)
    def call(*args: Any, timeout: str | None = None, **named: Any) -> Any:
        return command(*args, **named)

    hints = {**get_type_hints(command, include_extras=True), "timeout": Timeout}
    known = inspect.signature(command, eval_str=True)
    more = inspect.Parameter("timeout", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Timeout)
    call.__annotations__ = hints
    call.__signature__ = known.replace(parameters=[*known.parameters.values(), more])  # type: ignore[attr-defined]
    del call.__wrapped__  # or the hints of the command itself would be looked at
    return call


for _command in _COMMANDS:
    # Typer keeps the line breaks of a docstring; a terminal has its own width.
    _paragraphs = inspect.cleandoc(_command.__doc__ or "").split("\n\n")
    _help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)
    app.command(_command.__name__.rstrip("_"), help=_help)(
        _command if _command in _WITHOUT_TIMEOUT else _with_timeout(_command)
    )


def _show_version(value: bool) -> None:
    if value:
        import ckptstore

        typer.echo(f"ckptstore {ckptstore.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Debug = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(USAGE)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Errors are one line on stderr."""
    handler = _Warnings()
    log = logging.getLogger("ckptstore")
    with streams():
        log.addHandler(handler)
        try:
            with told_to_end() as came:
                code = _run(argv)
        finally:
            log.removeHandler(handler)
            _common.forget()
        return _flushed(128 + came[0] if came and code == INTERRUPTED else code)


def _flushed(code: int) -> int:
    """The exit code, once all that was printed is where it should be."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit does not fail on it again
        return _report(error)
    return code


def _run(argv: Sequence[str] | None) -> int:
    command = typer.main.get_command(app)
    try:
        result = command.main(args=None if argv is None else list(argv), prog_name="ckptstore", standalone_mode=False)
    except _ClickError as error:
        say("error", _usage(error), "bold red")
        return USAGE
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except _Failure as failure:
        return _report(failure.__cause__)
    if result == INTERRUPTED:
        say("error", "interrupted", "bold red")
    return result if isinstance(result, int) else GOOD


def _usage(error: Any) -> str:
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "ckptstore"
    return f"{error.format_message().rstrip('.')}: see {path} --help"


def _report(error: BaseException | None) -> int:
    """Say what failed; the exit code of its kind."""
    if _common.debug and error is not None:
        traceback.print_exception(error)
    if isinstance(error, BrokenPipeError) and not isinstance(error, CkptStoreError):
        return _PIPE_CLOSED
    say("error", message_of(error), "bold red")
    return exit_code(error)


def message_of(error: BaseException | None) -> str:
    """One line: what failed, where, what to do."""
    if isinstance(error, CkptStoreError):
        message = str(error)
        for python, shell in _WORDS:
            message = message.replace(python, shell)
        return message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if getattr(error, "speaks_for_itself", False):
        return str(error)
    return f"unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)"


def exit_code(error: BaseException | None) -> int:
    """The exit code for an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), OTHER)


class _Warnings(logging.Handler):
    """What the library logs, as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or _common.debug:
            style = "yellow" if record.levelno >= logging.WARNING else "dim"
            say(record.levelname.lower(), record.getMessage(), style)
