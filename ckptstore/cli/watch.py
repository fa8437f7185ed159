"""``ckptstore watch``: a trainer's own folder becomes safe, with no change to its code."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.text import Text

from ckptstore import EpochInfo, Finding, PruneReport, Repository, parse_policy
from ckptstore.cli import _trainer
from ckptstore.cli._common import (
    Debug,
    DryRun,
    Json,
    Options,
    Unsafe,
    Url,
    err,
    open_target,
    out,
    print_json,
    progress_bar,
    seconds_of,
    url_of,
)
from ckptstore.cli._format import clean, size, to_json
from ckptstore.cli._trainer import AcceptUnproven, Layout, Need, Pattern, ReplaceForeign
from ckptstore.policies import Policy
from ckptstore.watching import following

_Folder = Annotated[
    Path, typer.Argument(metavar="DIR", show_default=False, help="The folder that the trainer saves to.")
]
_Quiet = Annotated[
    str,
    typer.Option("--quiet", metavar="TIME", help="For so long the files of an epoch must not have changed."),
]
_Interval = Annotated[str, typer.Option("--interval", metavar="TIME", help="From one look to the next, e.g. 2s or 1m.")]
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
    quiet: _Quiet = "10s",
    interval: _Interval = "2s",
    once: _Once = False,
    keep: _Keep = None,
    run: _Run = "",
    replace: ReplaceForeign = False,
    accept_unproven: AcceptUnproven = False,
    dry_run: DryRun = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Follow the folder that a trainer saves to, and commit each epoch that it has finished.

    An epoch is finished when its files are all there, have not changed for some seconds, and are whole, as far as
    their format can prove it. The trainer is not disturbed; what it deletes stays in the repository. On SIGTERM or
    Ctrl-C what is finished is committed first. --json prints a line for each event. --dry-run looks once, as --once
    does, and says what would be committed and what --keep would then prune.

    Example: [cyan]ckptstore watch artifacts/ s3://runs/burn --keep 'KeepLast(20)'[/cyan]
    """
    policy = None if keep is None else parse_policy(keep)
    with progress_bar("saving") as move, _told_to_end() as stop:
        follow = following(
            folder,
            layout=layout,
            pattern=pattern,
            need=_trainer.names(need),
            quiet=seconds_of(quiet, "--quiet"),
            interval=seconds_of(interval, "--interval"),
            once=once,
            replace=replace,
            accept_unproven=accept_unproven,
            dry_run=dry_run,
            stop=stop,
            on_finding=lambda finding: _tell(finding, json),
            progress=move,
        )
        with open_target(url, option, unsafe, dry_run, run=run, keep=policy) as repo:
            err().print(Text(f"watching {clean(str(folder))} for {clean(url_of(repo, url))}"), style="dim")
            findings = follow(repo)
            if dry_run and policy is not None:
                _tell_of_prune(_plan(repo, policy, findings), json)
    if not json:
        err().print(Text(f"ended: {_trainer.counted(findings) or 'nothing was there'}"), style="dim")


def _plan(repo: Repository, policy: Policy, findings: list[Finding]) -> PruneReport:
    """What the policy would take once that is saved which is due."""
    due = [EpochInfo(one.epoch, {}, time.time(), one.nbytes) for one in findings if one.kind == "due"]
    return repo.plan(policy, coming=due)


def _tell_of_prune(plan: PruneReport, json: bool) -> None:
    if json:
        facts = {"kind": "prune", "dry_run": True, "epochs": plan.removed, "bytes_freed": plan.bytes_freed}
        print_json(to_json(facts, line=True))
        return
    gone = f"epochs {', '.join(map(str, plan.removed))} ({size(plan.bytes_freed)})" if plan.removed else "nothing"
    out().print(Text(f"then {gone} would be pruned"))


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
