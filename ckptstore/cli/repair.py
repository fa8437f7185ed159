"""``ckptstore repair``: put back what is damaged or missing."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import ckptstore
from ckptstore import EpochRepair, Mend, RepairReport
from ckptstore.cli._common import (
    Debug,
    DryRun,
    Json,
    Options,
    Unsafe,
    Url,
    Yes,
    access,
    ask,
    checked_epoch,
    open_repository,
    out,
    print_json,
    progress_bar,
)
from ckptstore.cli._format import clean, short_key, to_json

_CORRUPT = 4

_Epoch = Annotated[
    int | None, typer.Argument(metavar="[EPOCH]", show_default=False, help="Only this one. Default: all.")
]
_From = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="URL",
        show_default=False,
        help="Where to look for good copies: a mirror or a plain copy. May be repeated.",
    ),
]
_FromOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--from-option", metavar="KEY=VALUE", show_default=False, help="As --option, for --from; --option is for URL."
    ),
]
_STYLES = {"mended": "bold green", "mendable": "green", "damaged": "bold red"}


def repair(
    url: Url,
    epoch: _Epoch = None,
    source: _From = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    option: Options = None,
    from_option: _FromOptions = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Read every byte, and put back what is damaged or missing from wherever a good copy lies.

    Looked for is the same content in other epochs, then in each --from. A copy is proved before it is put, and what
    was put is read back. It can be killed and called again: nothing gets worse. What cannot be mended is listed, with
    the records that can still be restored, and the exit code is 4. Epochs that a --from has and URL has not are listed
    too: they may have been pruned, or have lost their manifest, and [cyan]mirror[/cyan] brings them.

    Example: [cyan]ckptstore repair /nvme/run --from s3://runs/llama --dry-run[/cyan]
    """
    number = checked_epoch(epoch)
    with ExitStack() as opened:
        repo = opened.enter_context(open_repository(url, option, unsafe, create=False))
        others = [
            opened.enter_context(ckptstore.open(place, **access(place, from_option), create=False, run_id=""))
            for place in source or ()
        ]
        if not dry_run:
            ask(f"Write to {repo.url} whatever can be put back?", yes)
        with progress_bar("reading") as move:
            report = repo.repair(epoch=number, sources=others, dry_run=dry_run, progress=move)
        if json:
            print_json(to_json(_as_json(repo.url, report)))
        else:
            _print(repo.url, report)
            _print_absent(url, {other.url: place for other, place in zip(others, source or (), strict=True)}, report)
    if not report.ok:
        raise typer.Exit(_CORRUPT)


def _as_json(url: str, report: RepairReport) -> dict[str, Any]:
    return {
        "url": url,
        "ok": report.ok,
        "dry_run": report.dry_run,
        "marker": None if report.marker is None else _mend(report.marker),
        "absent": dict(report.absent),
        "epochs": [
            {
                "epoch": row.epoch,
                "generation": row.generation,
                "state": row.state,
                "whole": row.whole,
                "lost": row.lost,
                "objects": [_mend(mend) for mend in row.objects],
            }
            for row in report.epochs
        ],
    }


def _mend(mend: Mend) -> dict[str, Any]:
    return {"key": mend.key, "reason": mend.reason, "ok": mend.ok, "source": mend.source, "failed": mend.failed}


def _print(url: str, report: RepairReport) -> None:
    console = out()
    if not report.objects:
        console.print(Text(f"{clean(url)}: every byte was read, and there is nothing to mend."))
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("epoch", justify="right", no_wrap=True)
    for name in ("object", "what was wrong", "copy"):
        table.add_column(name, overflow="fold")
    for epoch, mend in _lines(report):
        reason = mend.reason.replace(mend.key, "").strip(" :")
        copy = Text(clean(mend.source)) if mend.ok else Text(clean(mend.failed or "no good copy found"), "red")
        table.add_row(epoch, Text(clean(short_key(mend.key))), Text(clean(reason)), copy)
    console.print(table)
    console.print()
    for row in report.epochs:
        if row.state != "intact":
            console.print(Text.assemble(f"epoch {row.epoch}: ", (row.state, _STYLES[row.state]), clean(_left(row))))


def _print_absent(url: str, given: dict[str, str], report: RepairReport) -> None:
    """What the sources have and this place has not: perhaps on purpose."""
    for place in dict.fromkeys(report.absent.values()):
        numbers = ",".join(str(epoch) for epoch, where in report.absent.items() if where == place)
        line = f"ckptstore mirror {shlex.quote(given.get(place, place))} {shlex.quote(url)} --epochs {numbers}"
        why = "pruned or deleted here, or their manifests are lost, which cannot be told apart"
        text = f"in {clean(place)} and not here: {numbers} ({why}). This brings them: {clean(line)}"
        out().print(Text(text, "yellow"), soft_wrap=True)


def _lines(report: RepairReport) -> list[tuple[str, Mend]]:
    """Each object once, with the epochs that need it."""
    epochs: dict[str, list[str]] = {}
    for row in report.epochs:
        for mend in row.objects:
            epochs.setdefault(mend.key, []).append(str(row.epoch))
    return [(",".join(epochs.get(mend.key, ["-"])), mend) for mend in report.objects]


def _left(row: EpochRepair) -> str:
    if row.state != "damaged":
        return ""
    if not row.whole:
        return ", and no record of it can be restored"
    return f"; can still be restored: {', '.join(row.whole)}; lost: {', '.join(row.lost)}"
