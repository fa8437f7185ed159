"""``ckptstore cp``: one epoch from one repository into another."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.text import Text

from ckptstore.cli._common import (
    Debug,
    DryRun,
    Json,
    Options,
    Unsafe,
    open_repository,
    open_target,
    out,
    print_json,
    progress_bar,
    url_of,
)
from ckptstore.cli._copies import Limit, Source, Target, ToOptions, as_json, rate
from ckptstore.cli._format import clean, size, to_json
from ckptstore.manifest import check_epoch

_Epoch = Annotated[int, typer.Argument(metavar="EPOCH", show_default=False, help="The epoch to copy.")]
_Replace = Annotated[
    bool,
    typer.Option(
        "--replace", help="Also if DST has another content under that number. It stays until the copy is complete."
    ),
]


def cp(
    source: Source,
    target: Target,
    epoch: _Epoch,
    replace: _Replace = False,
    limit: Limit = None,
    dry_run: DryRun = False,
    json: Json = False,
    option: Options = None,
    to_option: ToOptions = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Copy one epoch from SRC to DST, as [cyan]mirror[/cyan] does: checked, and as a whole or not at all.

    Nothing happens if DST has it. If it has another content under that number, nothing happens either and the exit code
    is 1, unless you say [cyan]--replace[/cyan].

    Example: [cyan]ckptstore cp s3://runs/llama ./best 41[/cyan]
    """
    number, bytes_a_second = check_epoch(epoch), rate(limit)
    begun = time.perf_counter()
    with open_repository(source, option, False, create=False) as here:
        here.checkpoint(number)  # before the target is made
        with open_target(target, to_option, unsafe, dry_run) as there:
            with progress_bar("copying") as move:
                copy = here.copy(number, there, replace, bytes_a_second, move, dry_run=dry_run)
            urls = here.url, url_of(there, target)
    seconds = time.perf_counter() - begun
    if json:
        facts = {"source": urls[0], "target": urls[1], "dry_run": dry_run, **as_json(copy)}
        print_json(to_json({**facts, "seconds": round(seconds, 3)}))
    elif copy.outcome == "there":
        out().print(Text(f"epoch {number} is in {clean(urls[1])} already"))
    elif dry_run:
        replaced = f"; {copy.reason}" if copy.reason else ""
        out().print(Text(f"epoch {number} would be copied to {clean(urls[1])}: {size(copy.bytes_state)}{replaced}"))
    else:
        sent = f"{size(copy.bytes_state)} of state, sent {size(copy.bytes_sent)}"
        out().print(Text(f"copied epoch {number} to {clean(urls[1])}: {sent} in {seconds:.1f} s"))
