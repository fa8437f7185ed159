"""``ckptstore restore``: the files of a checkpoint back into a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer
from rich.text import Text

from ckptstore import Checkpoint, Repository
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
from ckptstore.errors import CorruptionError, InvalidArgumentError, RecordNotFoundError
from ckptstore.placing import aside as _aside
from ckptstore.placing import folder as _folder
from ckptstore.placing import place as _place
from ckptstore.placing import refuse_existing
from ckptstore.placing import sync_folder as _sync_folder
from ckptstore.placing import writing as _writing
from ckptstore.watching.origin import origin_of

_To = Annotated[Path, typer.Option("--to", metavar="DIR", show_default=False, help="The folder, made if need be.")]
_Epoch = Annotated[
    int | None, typer.Option("--epoch", metavar="N", show_default=False, help="Default: the newest intact epoch.")
]
_Records = Annotated[
    list[str] | None,
    typer.Option("--record", metavar="NAME", show_default=False, help="Only this record. May be repeated."),
]
_Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]


def restore(
    url: Url,
    to: _To,
    epoch: _Epoch = None,
    record: _Records = None,
    force: _Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Write the file records of a checkpoint into a folder, each under the name its file had.

    Every byte is verified before a file appears under its name; existing files are refused, not overwritten. What
    [cyan]watch[/cyan] and [cyan]import[/cyan] took from a folder comes back under its path there. Without
    [cyan]--epoch[/cyan] it steps back over damaged epochs and says so. States (saved from Python) are no files: load
    them in Python.

    Example: [cyan]ckptstore restore s3://runs/llama --epoch 7 --to out/[/cyan]
    """
    number = checked_epoch(epoch)
    if to.exists() and not to.is_dir():
        raise InvalidArgumentError(f"{clean(str(to))} is no folder: choose another --to")
    begun = time.perf_counter()
    with open_repository(url, option, unsafe, create=False) as repo:
        ckpt, files = _restore(repo, number, record, to, force, dry_run)
    seconds = time.perf_counter() - begun
    if json:
        print_json(to_json(_as_json(repo.url, ckpt, files, dry_run, seconds)))
    else:
        _print(ckpt, files, dry_run, seconds)


def _as_json(url: str, ckpt: Checkpoint, files: dict[str, Path], dry_run: bool, seconds: float) -> dict[str, Any]:
    written: list[dict[str, Any]] = [
        {"record": name, "path": str(path), "bytes": ckpt.records[name].bytes_state} for name, path in files.items()
    ]
    for row in written if dry_run else ():
        row["overwrites"] = os.path.lexists(row["path"])
    return {
        "url": url,
        "epoch": ckpt.epoch,
        "dry_run": dry_run,
        "files": written,
        "bytes": sum(row["bytes"] for row in written),
        "skipped": [{"epoch": s.epoch, "key": s.key, "reason": s.reason} for s in ckpt.skipped],
        "seconds": round(seconds, 3),
    }


def _print(ckpt: Checkpoint, files: dict[str, Path], dry_run: bool, seconds: float) -> None:
    total = sum(ckpt.records[name].bytes_state for name in files)
    over = {name for name, path in files.items() if dry_run and os.path.lexists(path)}
    for name, path in files.items():
        mark = "  would be overwritten" if name in over else ""
        out().print(Text(f"{clean(str(path))}  {size(ckpt.records[name].bytes_state)}{mark}"))
    if dry_run:
        what = f"{len(files)} files, {size(total)}; {len(over)} would be overwritten"
        out().print(Text(f"epoch {ckpt.epoch} would be restored: {what}"))
        return
    out().print(Text(f"restored epoch {ckpt.epoch}: {len(files)} files, {size(total)}, in {seconds:.1f} s"))


def _restore(
    repo: Repository, epoch: int | None, wanted: Sequence[str] | None, to: Path, force: bool, dry_run: bool
) -> tuple[Checkpoint, dict[str, Path]]:
    """Restore; when no epoch was named and the newest turns out damaged, the next older one."""
    while True:
        ckpt = pick(repo, epoch)
        files = _choose(repo, ckpt, wanted, to)
        _refuse_existing(files, force)
        try:
            if not dry_run:
                _write(ckpt, files, to, force)
            return ckpt, files
        except CorruptionError as error:
            if epoch is not None:
                raise
            # The repository remembers the damage: latest() will step over this epoch, or say that none is left.
            warn(f"epoch {ckpt.epoch}: {error}")


def _choose(repo: Repository, ckpt: Checkpoint, wanted: Sequence[str] | None, to: Path) -> dict[str, Path]:
    """Record name → path. Everything that could go wrong by choice is refused here, before a byte is read."""
    names = list(dict.fromkeys(wanted or sorted(ckpt.records)))
    unknown = [name for name in names if name not in ckpt.records]
    if unknown:
        raise RecordNotFoundError(f"epoch {ckpt.epoch} has no record {unknown[0]!r}; it has {sorted(ckpt.records)}")
    states = [name for name in names if ckpt.records[name].kind != "file"]
    if states:
        files = [name for name in names if name not in states]
        are = "is a state, no file" if len(states) == 1 else "are states, no files"
        load = f"ckptstore.open({repo.url!r}).checkpoint({ckpt.epoch}).load({states[0]!r})"
        rest = "; the files alone: " + " ".join(f"--record {name}" for name in files) if files else ""
        raise InvalidArgumentError(
            f"{', '.join(states)} of epoch {ckpt.epoch} {are}: nothing was written. Load in Python: {load}{rest}",
            epoch=ckpt.epoch,
        )
    files_of: dict[str, Path] = {}
    owner: dict[str, str] = {}
    origin = origin_of(ckpt.metadata)
    paths = origin.paths if origin is not None else {}
    for name in names:
        file = paths.get(name) or _file_name(ckpt, name)
        if file in owner:
            raise InvalidArgumentError(
                f"records {owner[file]!r} and {name!r} were both files named {clean(file)!r}: restore them one by one, "
                "with --record and different --to"
            )
        owner[file] = name
        files_of[name] = to / file
    for file, name in owner.items():
        above = next((str(at) for at in PurePosixPath(file).parents if str(at) in owner), None)
        if above is not None:
            raise InvalidArgumentError(
                f"{clean(file)!r} of record {name!r} would lie below {clean(above)!r}, which is the file of record "
                f"{owner[above]!r}: restore them one by one, with --record and different --to"
            )
    return files_of


def _file_name(ckpt: Checkpoint, name: str) -> str:
    """A file name, whatever the store says: never a path that leads out of the folder."""
    file = ckpt.file_name(name).replace("/", "_").replace("\0", "_")
    return file if file not in ("", ".", "..") else "record"


def _refuse_existing(files: dict[str, Path], force: bool) -> None:
    for path in files.values():
        refuse_existing(path, force)


def _write(ckpt: Checkpoint, files: dict[str, Path], to: Path, force: bool) -> None:
    """All files first aside, verified and synced, then into place: a damaged record leaves nothing behind."""
    with _writing(to), _folder(to), _aside(to) as aside, progress_bar("restoring") as move:
        total = sum(ckpt.records[name].bytes_state for name in files)
        before = 0
        for number, name in enumerate(files):
            ckpt.read_file(name, aside / str(number), _shifted(move, before, total))
            before += ckpt.records[name].bytes_state
        _place_all([(aside / str(number), path) for number, path in enumerate(files.values())], to, force)


def _place_all(files: Sequence[tuple[Path, Path]], to: Path, force: bool) -> None:
    """All of them, or, where nothing is overwritten, none."""
    with ExitStack() as undo:
        for written, path in files:
            undo.enter_context(_folder(path.parent))
            _place(written, path, force)
            if not force:
                undo.push(_unless_all_are(path))
        for inner in {inner for _, path in files for inner in path.parents if inner == to or to in inner.parents}:
            _sync_folder(inner)


def _unless_all_are(path: Path) -> Callable[[object, object, object], None]:
    def remove(kind: object, error: object, trace: object) -> None:
        if kind is not None:
            path.unlink(missing_ok=True)

    return remove


def _shifted(move: Callable[[int, int], None], before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: move(before + done, total)
