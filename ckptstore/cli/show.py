"""``ckptstore show``: one checkpoint in full."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ckptstore import Checkpoint, Repository
from ckptstore.catalog import Catalog, Committed
from ckptstore.cli._common import (
    Debug,
    Json,
    Options,
    Unsafe,
    Url,
    checked_epoch,
    open_repository,
    out,
    print_json,
)
from ckptstore.cli._format import ago, clean, ratio, size, to_json
from ckptstore.errors import EpochNotFoundError
from ckptstore.manifest import Manifest, RecordEntry
from ckptstore.skeleton import leaf_paths

_Epoch = Annotated[int | None, typer.Argument(metavar="EPOCH", show_default=False, help="Default: the newest intact.")]
_Arrays = Annotated[bool, typer.Option("--arrays", help="List every array: path, type, shape, size.")]


def show(
    url: Url,
    epoch: _Epoch = None,
    arrays: _Arrays = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Show one checkpoint: its records, sizes and metadata, and whether it is pinned, quarantined or held by a reader.

    Example: [cyan]ckptstore show runs/demo 7 --arrays[/cyan]
    """
    number = checked_epoch(epoch)
    with open_repository(url, option, unsafe, create=False) as repo:
        ckpt = pick(repo, number)
        catalog = Catalog(repo.store)
        manifest = catalog.manifest(Committed(ckpt.epoch, ckpt.generation))
        listed = {entry.name: _arrays_of(catalog, entry) for entry in manifest.records} if arrays else None
        marks = _marks(repo, ckpt.epoch)
        if json:
            print_json(to_json({**_as_json(repo, ckpt, manifest, listed), **marks}))
        else:
            _print(repo, ckpt, manifest, listed, marks)


def pick(repo: Repository, epoch: int | None) -> Checkpoint:
    """The checkpoint of ``epoch``, by default the newest intact one. EpochNotFoundError if there is none."""
    ckpt = repo.latest() if epoch is None else repo.checkpoint(epoch)
    if ckpt is None:
        raise EpochNotFoundError(f"{repo.url} holds no checkpoint yet: save one with `ckptstore save` or from Python")
    return ckpt


def _arrays_of(catalog: Catalog, entry: RecordEntry) -> list[dict[str, Any]]:
    """Every array of a record: where it is in the state, and what it is."""
    index = catalog.index(entry)
    paths = leaf_paths(index.skeleton) if entry.kind == "state" else {0: ["(file)"]}
    return [
        {
            "paths": paths.get(number, []),
            "kind": array.kind,
            "dtype": array.dtype,
            "shape": list(array.shape),
            "bytes": sum(span.length for span in array.spans),
            "pieces": max(len(array.boxes), 1),
        }
        for number, array in enumerate(index.arrays)
    ]


def _marks(repo: Repository, epoch: int) -> dict[str, str | None]:
    """Why an epoch is not as others; None where it is."""
    found = {"quarantined": repo.quarantined(), "pinned": repo.pins(), "held": repo.holds()}
    return {name: marked.get(epoch) for name, marked in found.items()}


def _as_json(
    repo: Repository, ckpt: Checkpoint, manifest: Manifest, listed: dict[str, list[dict[str, Any]]] | None
) -> dict[str, Any]:
    records = []
    for entry in manifest.records:
        facts = {
            name: getattr(entry, name) for name in ("name", "kind", "arrays", "chunks", "bytes_state", "bytes_stored")
        }
        if entry.kind == "file":
            facts["file"] = ckpt.file_name(entry.name)
        if listed is not None:
            facts["array_list"] = listed[entry.name]
        records.append(facts)
    return {
        "url": repo.url,
        "epoch": ckpt.epoch,
        "generation": ckpt.generation,
        "created": ckpt.created,
        "writer": manifest.writer,
        "run": manifest.run,
        "writer_number": manifest.writer_number,
        "attempt": manifest.attempt,
        "bytes_state": manifest.bytes_state,
        "bytes_stored": manifest.bytes_needed,
        "bytes_sent": manifest.bytes_sent,
        "bytes_reused": manifest.bytes_reused,
        "metadata": ckpt.metadata,
        "left_out": ckpt.left_out,
        "records": records,
        "skipped": [{"epoch": s.epoch, "key": s.key, "reason": s.reason} for s in ckpt.skipped],
    }


def _print(
    repo: Repository,
    ckpt: Checkpoint,
    manifest: Manifest,
    listed: dict[str, list[dict[str, Any]]] | None,
    marks: dict[str, str | None],
) -> None:
    console = out()
    stored = manifest.bytes_needed
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    generation = f", generation {ckpt.generation}" if ckpt.generation > 1 else ""
    facts.add_row("epoch", f"{ckpt.epoch}{generation}")
    facts.add_row("in", Text(clean(repo.url)))
    facts.add_row("created", Text(f"{clean(ckpt.created)} ({ago(ckpt.created)}) by {clean(manifest.writer)}"))
    if manifest.run:
        facts.add_row("run", Text(f"{clean(manifest.run)}, writer {manifest.writer_number}"))
    for name, why in marks.items():
        if why is not None:
            facts.add_row(name, Text(clean(why), "yellow"))
    facts.add_row("state", size(manifest.bytes_state))
    facts.add_row("stored", f"{size(stored)}, ratio {ratio(manifest.bytes_state, stored)}")
    found = f"found {size(manifest.bytes_reused)} of the state there already"
    facts.add_row("its save", f"{found} and sent {size(manifest.bytes_sent)}")
    for name, why in ckpt.left_out.items():
        facts.add_row("left out", Text(f"{clean(name)}: {clean(why)}"))
    for key, value in ckpt.metadata.items():
        facts.add_row("metadata", Text(f"{clean(key)} = {clean(value if isinstance(value, str) else repr(value))}"))
    console.print(facts)
    console.print()
    console.print(_record_table(ckpt))
    for name, arrays in (listed or {}).items():
        console.print()
        console.print(_array_table(name, arrays))


def _record_table(ckpt: Checkpoint) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("record", overflow="fold")
    table.add_column("kind", overflow="fold")
    for name in ("arrays", "chunks", "state", "stored", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in ckpt.records.values():
        kind = f"file {ckpt.file_name(record.name)}" if record.kind == "file" else record.kind
        table.add_row(
            Text(clean(record.name)),
            Text(clean(kind)),
            str(record.arrays),
            str(record.chunks),
            size(record.bytes_state),
            size(record.bytes_stored),
            ratio(record.bytes_state, record.bytes_stored),
        )
    return table


def _array_table(name: str, arrays: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(Text(f"arrays of {clean(name)}"), overflow="fold")
    table.add_column("type", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for array in arrays:
        shape = " × ".join(map(str, array["shape"])) or "scalar"
        shape += f" in {array['pieces']} pieces" if array["pieces"] > 1 else ""
        kind = array["dtype"] if array["kind"] == "numpy" else f"{array['kind']} {array['dtype']}"
        table.add_row(Text(clean(", ".join(array["paths"]))), Text(clean(kind)), shape, size(array["bytes"]))
    return table
