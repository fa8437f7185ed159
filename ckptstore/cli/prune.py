"""``ckptstore plan``, ``prune`` and ``gc``: what is kept, what goes, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptstore import GcReport, PruneReport, parse_policy
from ckptstore.cli._common import (
    Debug,
    DryRun,
    Json,
    Options,
    Unsafe,
    Url,
    Yes,
    ask,
    err,
    open_repository,
    out,
    print_json,
    seconds_of,
    split_pairs,
)
from ckptstore.cli._format import clean, size, to_json
from ckptstore.errors import InvalidArgumentError
from ckptstore.lease import EXPIRY
from ckptstore.policies import AnyPolicy

Keep = Annotated[
    str | None,
    typer.Option(
        "--keep",
        metavar="POLICY",
        show_default=False,
        help="e.g. 'KeepLast(5) | KeepBest(\"loss\", 3) | KeepDaily(7)'. Also KeepEvery(n), KeepWithin(hours), "
        "KeepHourly(n), KeepWeekly(n), KeepBytes(limit); | keeps what either keeps, & what both keep.",
    ),
]
Records = Annotated[
    list[str] | None,
    typer.Option(
        "--record",
        metavar="NAME=POLICY",
        show_default=False,
        help="In place of --keep a policy for each of some records, e.g. 'optimizer=KeepLast(1)'. May be repeated. An "
        "epoch goes when none of them is kept in it; else only the records go.",
    ),
]
Run = Annotated[
    str, typer.Option("--run", metavar="ID", help="The epochs of this run. Default: those of no named run.")
]
_Quick = Annotated[
    bool, typer.Option("--quick", help="Do not read the newest epoch in full before others go: names and sizes only.")
]
_Grace = Annotated[
    str | None,
    typer.Option(
        "--grace",
        metavar="TIME",
        show_default=False,
        help=f"Age from which an unfinished save counts as dead, e.g. 30m or 2h. Default: {EXPIRY / 60:.0f}m.",
    ),
]


def plan(
    url: Url,
    keep: Keep = None,
    record: Records = None,
    run: Run = "",
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Show for every epoch whether a policy keeps it, and why. Nothing is deleted.

    Example: [cyan]ckptstore plan s3://runs/llama --keep 'KeepLast(5) | KeepBest("loss", 3)'[/cyan]
    """
    policy = policy_of(keep, record)
    with open_repository(url, option, unsafe, create=False, run=run) as repo:
        _show(repo.url, repo.plan(policy), json)


def prune(
    url: Url,
    keep: Keep = None,
    record: Records = None,
    run: Run = "",
    quick: _Quick = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Delete the epochs that a policy does not keep.

    Never the newest intact epoch, a pinned one, or one whose manifest is damaged. The newest is read in full first.

    Example: [cyan]ckptstore prune s3://runs/llama --keep 'KeepLast(5)' --dry-run[/cyan]
    """
    policy = policy_of(keep, record)
    with open_repository(url, option, unsafe, create=False, run=run) as repo:
        if not dry_run and not yes:
            planned = repo.plan(policy)
            if planned.removed or planned.dropped:
                _show(repo.url, planned, json=False, to=err())
                ask(f"Delete {size(planned.bytes_freed)} of {repo.url}?", yes)
        _show(repo.url, repo.prune(policy, dry_run=dry_run, deep=not quick), json)


def gc(
    url: Url,
    grace: _Grace = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Delete what interrupted saves left and no checkpoint reaches.

    Safe beside running saves, as long as --grace is not shortened.

    Example: [cyan]ckptstore gc s3://runs/llama --dry-run[/cyan]
    """
    given = {} if grace is None else {"grace": seconds_of(grace, "--grace")}
    with open_repository(url, option, unsafe, create=False) as repo:
        if not dry_run and not yes:
            planned = repo.gc(dry_run=True, **given)
            if planned.removed:
                ask(f"Delete {len(planned.removed)} objects ({size(planned.bytes_freed)}) of {repo.url}?", yes)
        report = repo.gc(dry_run=dry_run, **given)
        if json:
            print_json(to_json(_objects(repo.url, report)))
            return
        console = out()
        verb = "would be deleted" if dry_run else "deleted"
        for removal in report.removed:
            console.print(Text(f"{clean(removal.key)}: {clean(removal.reason)}"))
        console.print(Text(f"{len(report.removed)} objects {verb}, {size(report.bytes_freed)}"))
        for key, why in report.spared.items():
            console.print(Text(f"left alone: {clean(key)}: {clean(why)}", "yellow"))


def policy_of(keep: str | None, records: list[str] | None) -> AnyPolicy:
    if (keep is None) == (not records):
        raise InvalidArgumentError("say what to keep: either --keep POLICY or --record NAME=POLICY, e.g. 'KeepLast(5)'")
    if keep is not None:
        return parse_policy(keep)
    pairs = split_pairs(records or (), "--record NAME=POLICY")
    return {name: parse_policy(text) for name, text in pairs.items()}


def _show(url: str, report: PruneReport, json: bool, to: Console | None = None) -> None:
    if json:
        epochs = [
            {"epoch": e, "kept": e in report.kept, "reason": why, "dropped": report.dropped.get(e, {})}
            for e, why in _all(report)
        ]
        print_json(to_json({**_objects(url, report), "epochs": epochs}))
        return
    console = to or out()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why", overflow="fold")
    goes = "goes" if report.dry_run else "gone"
    for epoch, why in _all(report):
        kept = epoch in report.kept
        table.add_row(str(epoch), Text("kept", "green") if kept else Text(goes, "red"), Text(clean(why)))
        for name, reason in report.dropped.get(epoch, {}).items():
            table.add_row("", Text(goes, "red"), Text(clean(f"its {name}: {reason}")))
    if report.kept or report.removed:
        console.print(table)
    verb = "would be deleted" if report.dry_run else "deleted"
    records = sum(map(len, report.dropped.values()))
    more = f" and {records} records of others" if records else ""
    freed = f"{len(report.removed)} epochs{more} {verb}, {size(report.bytes_freed)}"
    console.print(Text(f"{freed}; {len(report.kept)} kept"))
    if report.spared:
        console.print(Text(f"{len(report.spared)} objects were left alone: {next(iter(report.spared.values()))}"))


def _all(report: PruneReport) -> list[tuple[int, str]]:
    return sorted({**report.kept, **report.removed}.items())


def _objects(url: str, report: PruneReport | GcReport) -> dict[str, Any]:
    removed = report.objects if isinstance(report, PruneReport) else report.removed
    return {
        "url": url,
        "dry_run": report.dry_run,
        "bytes_freed": report.bytes_freed,
        "objects": [{"key": r.key, "reason": r.reason, "size": r.size} for r in removed],
        "spared": [{"key": key, "reason": why} for key, why in report.spared.items()],
    }
