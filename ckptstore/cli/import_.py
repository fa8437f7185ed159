"""``ckptstore import``: what a trainer has left becomes a repository."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ckptstore import Finding
from ckptstore.cli import _trainer
from ckptstore.cli._common import (
    Debug,
    DryRun,
    Json,
    Options,
    Unsafe,
    Url,
    checked_epoch,
    open_target,
    out,
    print_json,
    progress_bar,
    url_of,
)
from ckptstore.cli._format import clean, to_json
from ckptstore.cli._trainer import AcceptUnproven, Layout, Need, Pattern, ReplaceForeign
from ckptstore.options import check_choice
from ckptstore.watching import importing

_CONFLICT, _CORRUPT = 1, 4
_NOT_IMPORTED = _trainer.BAD | {"waiting", "changing"}
_Path = Annotated[
    Path, typer.Argument(metavar="PATH", show_default=False, help="A folder of checkpoints, or one file.")
]
_Epoch = Annotated[
    int | None,
    typer.Option("--epoch", metavar="N", show_default=False, help="Only this epoch; of a file: import it as this one."),
]
_As = Annotated[
    str, typer.Option("--as", metavar="KIND", help="What is stored: the files, or the arrays that are in them.")
]


def import_(
    path: _Path,
    url: Url,
    epoch: _Epoch = None,
    layout: Layout = None,
    pattern: Pattern = None,
    need: Need = None,
    replace: ReplaceForeign = False,
    accept_unproven: AcceptUnproven = False,
    as_: _As = "files",
    dry_run: DryRun = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Take over the checkpoints that a trainer has left in a folder, the oldest epoch first.

    By default each file is stored bit for bit, and [cyan]restore[/cyan] puts it back under its name. --as arrays stores
    what is in files of torch, safetensors and NumPy instead: then it can be loaded in parts and compared.

    Knows the names of burn (model-7.mpk.gz, ...), Hugging Face (checkpoint-7/), Lightning (epoch=3-step=7.ckpt), torch
    DCP (step-7/.metadata) and numbered files (model-7.pt, model-7.safetensors, ...). Epochs that are there already are
    skipped, files that are not whole are refused (exit code 4). For a folder that is still being written to there is
    [cyan]watch[/cyan].

    Example: [cyan]ckptstore import artifacts/ s3://runs/burn --dry-run[/cyan]
    """
    number = checked_epoch(epoch)

    def tell(finding: Finding) -> None:
        if not json:
            _trainer.tell(finding, json)

    with progress_bar("importing") as move:
        take = importing(
            path,
            epoch=number,
            layout=layout,
            pattern=pattern,
            need=_trainer.names(need),
            replace=replace,
            accept_unproven=accept_unproven,
            dry_run=dry_run,
            arrays=check_choice("--as", as_, ("files", "arrays")) == "arrays",
            on_finding=tell,
            progress=move,
        )
        with open_target(url, option, unsafe, dry_run) as repo:
            findings = take(repo)
            shown = url_of(repo, url)
        kinds = {finding.kind for finding in findings}
        if json:
            facts = {"url": shown, "dry_run": dry_run, "ok": not kinds & _NOT_IMPORTED}
            print_json(to_json({**facts, "epochs": [_trainer.as_json(finding) for finding in findings]}))
        else:
            out().print(Text(f"{clean(shown)}: {_trainer.counted(findings)}"))
    _exit(kinds)


def _exit(kinds: Collection[str]) -> None:
    if "torn" in kinds:
        raise typer.Exit(_CORRUPT)
    if _NOT_IMPORTED & set(kinds):
        raise typer.Exit(_CONFLICT)
