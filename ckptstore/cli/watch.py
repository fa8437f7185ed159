"""``ckptstore watch``: a trainer's own folder becomes safe, with no change to its code."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.text import Text

import ckptstore
from ckptstore import Finding, parse_policy
from ckptstore.cli import _trainer
from ckptstore.cli._common import Debug, Json, Options, Unsafe, Url, err, progress_bar, storage_options
from ckptstore.cli._format import clean
from ckptstore.cli._trainer import AcceptUnproven, Layout, Need, Pattern, ReplaceForeign

_Folder = Annotated[
    Path, typer.Argument(metavar="DIR", show_default=False, help="The folder that the trainer saves to.")
]
_Quiet = Annotated[
    float,
    typer.Option("--quiet", metavar="SECONDS", help="For so long the files of an epoch must not have changed."),
]
_Interval = Annotated[float, typer.Option("--interval", metavar="SECONDS", help="From one look to the next.")]
_Once = Annotated[bool, typer.Option("--once", help="Save what is finished, and end.")]
_Keep = Annotated[
    str | None,
    typer.Option(
        "--keep",
        metavar="POLICY",
        show_default=False,
        help="After each save, prune what this policy does not keep, e.g. 'KeepLast(5)'.",
    ),
]
_Run = Annotated[
    str,
    typer.Option(
        "--run", metavar="NAME", show_default=False, help="The name of the run: then of two watchers the newer saves."
    ),
]


def watch(
    folder: _Folder,
    url: Url,
    layout: Layout = None,
    pattern: Pattern = None,
    need: Need = None,
    quiet: _Quiet = 10.0,
    interval: _Interval = 2.0,
    once: _Once = False,
    keep: _Keep = None,
    run: _Run = "",
    replace: ReplaceForeign = False,
    accept_unproven: AcceptUnproven = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Follow the folder that a trainer saves to, and commit each epoch that it has finished.

    An epoch is finished when its files are all there, have not changed for some seconds, and are whole, as far as
    their format can prove it. The trainer is not disturbed; what it deletes stays in the repository. On SIGTERM or
    Ctrl-C what is finished is committed first. --json prints a line for each event.

    Example: [cyan]ckptstore watch artifacts/ s3://runs/burn --keep 'KeepLast(20)'[/cyan]
    """
    policy = None if keep is None else parse_policy(keep)
    opened = ckptstore.open(
        url, storage_options(option), keep=policy, create=True, unsafe_single_writer=unsafe, run_id=run
    )
    with opened as repo, progress_bar("saving") as move, _told_to_end() as stop:
        err().print(Text(f"watching {clean(str(folder))} for {clean(repo.url)}"), style="dim")
        findings = ckptstore.watch(
            folder,
            repo,
            layout=layout,
            pattern=pattern,
            need=_trainer.names(need),
            quiet=quiet,
            interval=interval,
            once=once,
            replace=replace,
            accept_unproven=accept_unproven,
            stop=stop,
            on_finding=lambda finding: _tell(finding, json),
            progress=move,
        )
    if not json:
        err().print(Text(f"ended: {_trainer.counted(findings) or 'nothing was there'}"), style="dim")


def _tell(finding: Finding, json: bool) -> None:
    if json or finding.kind != "changing":
        _trainer.tell(finding, json)
        sys.stdout.flush()  # for whoever reads along


@contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set; the second one ends at once."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before: list[tuple[int, Any]] = []
    try:
        before += [(number, signal.signal(number, handle)) for number in (signal.SIGTERM, signal.SIGINT)]
        yield stop
    finally:
        for number, handler in before:
            signal.signal(number, handler)
