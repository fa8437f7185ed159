"""``ckptstore save``: files of any trainer as one checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ckptstore import Checkpoint, Repository, Tally
from ckptstore.cli._common import (
    Debug,
    DryRun,
    Json,
    Options,
    Unsafe,
    Url,
    as_value,
    open_target,
    out,
    print_json,
    progress_bar,
    split_pairs,
    url_of,
)
from ckptstore.cli._format import clean, ratio, size, to_json
from ckptstore.errors import CorruptionError, EpochExistsError, InvalidRecordError, NotFoundError
from ckptstore.manifest import check_epoch, check_record_name

_Files = Annotated[
    list[str],
    typer.Argument(metavar="NAME=FILE", show_default=False, help="Records: a name and the file it is read from."),
]
_Epoch = Annotated[
    int, typer.Option("--epoch", metavar="N", show_default=False, help="The epoch or step to save it as.")
]
_Metadata = Annotated[
    list[str] | None,
    typer.Option(
        "--metadata",
        metavar="KEY=VALUE",
        show_default=False,
        help="About the checkpoint, e.g. loss=0.31. JSON where it can be read as such, else text. May be repeated.",
    ),
]
_Replace = Annotated[
    bool,
    typer.Option("--replace", help="Replace an existing epoch. Its old content stays until the new one is committed."),
]


def save(
    url: Url,
    records: _Files,
    epoch: _Epoch,
    metadata: _Metadata = None,
    replace: _Replace = False,
    dry_run: DryRun = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Save files as one checkpoint: all of them, durably, or nothing.

    Example: [cyan]ckptstore save runs/demo --epoch 7 model=model.bin optimizer=optim.bin --metadata loss=0.31[/cyan]
    """
    number = check_epoch(epoch)
    files = {check_record_name(name): _checked(path) for name, path in split_pairs(records, "NAME=FILE").items()}
    facts = {key: as_value(value) for key, value in split_pairs(metadata or (), "--metadata KEY=VALUE").items()}
    total = sum(path.stat().st_size for path in files.values())
    begun = time.perf_counter()
    with open_target(url, option, unsafe, dry_run) as repo:
        if dry_run:
            _plan(repo, url_of(repo, url), number, files, replace, json)
            return
        with progress_bar("saving") as move, repo.begin(number, facts, replace, progress=move, total=total) as txn:
            for name, path in files.items():
                txn.write_file(name, path)
            ckpt: Checkpoint = txn.commit()
        seconds = time.perf_counter() - begun
        report = ckpt.report or Tally()
        if json:
            print_json(to_json(_as_json(repo.url, ckpt, report, seconds)))
        else:
            _print(repo.url, ckpt, report, seconds)


def _plan(repo: Repository, url: str, epoch: int, files: dict[str, Path], replace: bool, json: bool) -> None:
    """Say what a save would do."""
    old: dict[str, Any] | None = None
    if epoch in repo.epochs():
        if not replace:
            raise EpochExistsError(
                f"epoch {epoch} is already committed in {url}: save another epoch, or pass replace=True", epoch=epoch
            )
        try:
            ckpt = repo.checkpoint(epoch)
            old = {"generation": ckpt.generation, "records": sorted(ckpt.records), "created": ckpt.created}
        except CorruptionError as error:
            old = {"damaged": error.message}
    total = sum(path.stat().st_size for path in files.values())
    if json:
        facts = {"url": url, "epoch": epoch, "dry_run": True, "records": sorted(files), "bytes_state": total}
        print_json(to_json({**facts, "replaces": old}))
        return
    what = f"{len(files)} record{'' if len(files) == 1 else 's'}, {size(total)}"
    out().print(Text(f"epoch {epoch} would be saved in {clean(url)}: {what}"))
    if old is not None:
        is_there = clean(old.get("damaged") or f"{', '.join(old['records'])}, of {old['created']}")
        out().print(Text(f"it would replace what is there under that number: {is_there}"))


def _print(url: str, ckpt: Checkpoint, report: Tally, seconds: float) -> None:
    stored = sum(record.bytes_stored for record in ckpt.records.values())
    sizes = f"{size(report.bytes_state)} as {size(stored)} (ratio {ratio(report.bytes_state, stored)})"
    records = f"{len(ckpt.records)} record{'' if len(ckpt.records) == 1 else 's'}"
    moved = f"sent {size(report.bytes_sent)}, found {size(report.bytes_reused)} there already"
    out().print(Text(f"saved epoch {ckpt.epoch} in {clean(url)}: {records}, {sizes}; {moved}, in {seconds:.1f} s"))


def _checked(text: str) -> Path:
    """A file that can be read, or an error before anything is opened or created."""
    path = Path(text)
    if not path.exists():
        raise NotFoundError(f"{clean(text)} does not exist: nothing was saved")
    if not path.is_file() or not os.access(path, os.R_OK):
        raise InvalidRecordError(f"{clean(text)} is no file that can be read: nothing was saved")
    return path


def _as_json(url: str, ckpt: Checkpoint, report: Tally, seconds: float) -> dict[str, Any]:
    return {
        "url": url,
        "epoch": ckpt.epoch,
        "dry_run": False,
        "generation": ckpt.generation,
        "records": sorted(ckpt.records),
        "bytes_state": report.bytes_state,
        "bytes_stored": sum(record.bytes_stored for record in ckpt.records.values()),
        "bytes_sent": report.bytes_sent,
        "bytes_reused": report.bytes_reused,
        "seconds": round(seconds, 3),
    }
