"""``ckptstore export``: a checkpoint as files that other programs read."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ckptstore import ExportReport
from ckptstore.cli._common import (
    Debug,
    DryRun,
    Json,
    Options,
    Unsafe,
    Url,
    checked_epoch,
    open_repository,
    out,
    print_json,
    progress_bar,
    warn,
)
from ckptstore.cli._format import clean, size, to_json
from ckptstore.cli.show import pick
from ckptstore.manifest import check_record_name


class _Format(str, Enum):
    safetensors = "safetensors"
    npz = "npz"
    files = "files"


_Epoch = Annotated[int | None, typer.Argument(metavar="EPOCH", show_default=False, help="Default: the newest intact.")]
_To = Annotated[Path, typer.Option("--to", metavar="DIR", show_default=False, help="The folder, made if need be.")]
_As = Annotated[
    _Format,
    typer.Option(
        "--format",
        help="safetensors or npz: a file for each record. files: file records under the names they had, a Trainer's "
        "folder as it was, other records as folders of .npy files.",
    ),
]
_Records = Annotated[
    list[str] | None,
    typer.Option("--record", metavar="NAME", show_default=False, help="Only this record. May be repeated."),
]
_Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]


def export(
    url: Url,
    to: _To,
    epoch: _Epoch = None,
    form: _As = _Format.safetensors,
    record: _Records = None,
    force: _Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint as files that other programs read: safetensors, npz, or the files that it came from.

    Every byte is verified, a few chunks at a time are in memory, and nothing appears under its name before all of it is
    whole. Existing files are refused, not overwritten.

    Example: [cyan]ckptstore export s3://runs/llama 40 --to out/ --format safetensors --record model[/cyan]
    """
    number = checked_epoch(epoch)
    names = [check_record_name(name) for name in record] if record else None
    begun = time.perf_counter()
    with open_repository(url, option, unsafe, create=False) as repo:
        number = pick(repo, number).epoch
        with progress_bar("exporting") as move:
            report = repo.export(number, to, form.value, names, force, move, dry_run=dry_run)
        seconds = time.perf_counter() - begun
        if json:
            print_json(to_json(_as_json(repo.url, report, seconds)))
        else:
            _print(report, seconds)


def _as_json(url: str, report: ExportReport, seconds: float) -> dict[str, Any]:
    files: list[dict[str, Any]] = [
        {"records": list(one.records), "path": str(one.path), "bytes": one.nbytes} for one in report.files
    ]
    for row, one in zip(files, report.files, strict=True) if report.dry_run else ():
        row["overwrites"] = one.overwrites
    return {
        "url": url,
        "epoch": report.epoch,
        "format": report.format,
        "dry_run": report.dry_run,
        "files": files,
        "bytes": sum(one.nbytes for one in report.files),
        "foreign_types": list(report.foreign_types),
        "seconds": round(seconds, 3),
    }


def _print(report: ExportReport, seconds: float) -> None:
    for one in report.files:
        mark = "  would be overwritten" if report.dry_run and one.overwrites else ""
        out().print(Text(f"{clean(str(one.path))}  {size(one.nbytes)}{mark}"))
    count = f"{len(report.files)} file{'' if len(report.files) == 1 else 's'}"
    total = size(sum(one.nbytes for one in report.files))
    if report.dry_run:
        over = sum(one.overwrites for one in report.files)
        out().print(Text(f"epoch {report.epoch} would be exported: {count}, {total}; {over} would be overwritten"))
    else:
        out().print(Text(f"exported epoch {report.epoch}: {count}, {total}, in {seconds:.1f} s"))
    if report.foreign_types:
        shown = ", ".join(report.foreign_types[:5]) + (", ..." if len(report.foreign_types) > 5 else "")
        warn(
            f"{report.format} lacks the element type of {len(report.foreign_types)} arrays ({shown}): other programs "
            "see their raw bytes, ckptstore.formats.read gives them back as they were"
        )
