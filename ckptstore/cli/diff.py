"""``ckptstore diff``: how two epochs differ."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ckptstore import ArrayDiff, Diff
from ckptstore.cli._common import Debug, Json, Options, Unsafe, Url, open_repository, out, print_json, progress_bar
from ckptstore.cli._format import clean, size, to_json
from ckptstore.manifest import check_epoch

_DIFFERENT = 1

_First = Annotated[int, typer.Argument(metavar="A", show_default=False, help="An epoch.")]
_Second = Annotated[int, typer.Argument(metavar="B", show_default=False, help="Another one.")]
_Record = Annotated[str | None, typer.Option("--record", metavar="NAME", show_default=False, help="Only this record.")]
_ExitCode = Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if they differ.")]
_All = Annotated[bool, typer.Option("--all", help="List what is equal, too.")]


def diff(
    url: Url,
    first: _First,
    second: _Second,
    record: _Record = None,
    show_all: _All = False,
    exit_code: _ExitCode = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Show how epoch B differs from epoch A: arrays (how many elements, how far), files, plain values and metadata.

    What has equal digests is not read. Equal means every bit: a NaN equals the same NaN, and 0.0 is not -0.0.

    Example: [cyan]ckptstore diff s3://runs/llama 40 41 --record model[/cyan]
    """
    one, two = check_epoch(first), check_epoch(second)
    begun = time.perf_counter()
    with open_repository(url, option, unsafe, create=False) as repo:
        with progress_bar("comparing") as move:
            found = repo.diff(one, two, record, move)
        seconds = time.perf_counter() - begun
        if json:
            print_json(to_json(_as_json(repo.url, found, seconds)))
        else:
            _print(found, show_all)
    if exit_code and not found.equal:
        raise typer.Exit(_DIFFERENT)


def _as_json(url: str, found: Diff, seconds: float) -> dict[str, Any]:
    return {
        "url": url,
        "first": found.first,
        "second": found.second,
        "equal": found.equal,
        "only_first": list(found.only_first),
        "only_second": list(found.only_second),
        "arrays": [_array(line) for line in found.arrays],
        "values": [
            {name: getattr(value, name) for name in ("record", "path", "first", "second")} for value in found.values
        ],
        "bytes_read": found.bytes_read,
        "seconds": round(seconds, 3),
    }


def _array(line: ArrayDiff) -> dict[str, Any]:
    facts = {name: getattr(line, name) for name in ("record", "path", "outcome")}
    for name, spec in (("first", line.first), ("second", line.second)):
        facts[name] = None if spec is None else {"kind": spec.kind, "dtype": spec.dtype, "shape": list(spec.shape)}
    return facts | {name: getattr(line, name) for name in ("elements", "changed", "largest", "incomparable")}


def _print(found: Diff, show_all: bool) -> None:
    console = out()
    for epoch, names in ((found.first, found.only_first), (found.second, found.only_second)):
        for name in names:
            console.print(Text(f"only epoch {epoch} has the record {clean(name)}", "yellow"))
    lines = [line for line in found.arrays if show_all or line.outcome != "equal"]
    if lines:
        table = _table("record", "array", "type", "difference")
        for line in lines:
            style = "" if line.outcome == "equal" else "yellow"
            table.add_row(Text(clean(line.record)), Text(clean(line.path)), _type(line), Text(_words(line), style))
        console.print(table)
    if found.values:
        table = _table("record", "value", f"in {found.first}", f"in {found.second}")
        for value in found.values:
            texts = ["-" if text is None else clean(text) for text in (value.first, value.second)]
            table.add_row(Text(clean(value.record)), Text(clean(value.path)), *map(Text, texts))
        console.print(table)
    if found.equal:
        console.print(Text(f"epochs {found.first} and {found.second} are equal, every bit", "green"))
    counts = Counter(line.outcome for line in found.arrays)
    counted = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "none"
    console.print(Text(f"{len(found.arrays)} arrays: {counted}; {len(found.values)} values differ; "), end="")
    console.print(Text(f"read {size(found.bytes_read)}"))


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _type(line: ArrayDiff) -> Text:
    spec = line.second if line.first is None else line.first
    assert spec is not None
    return Text(clean(f"{spec.dtype} {' × '.join(map(str, spec.shape)) or 'scalar'}"))


def _words(line: ArrayDiff) -> str:
    first, second = line.first, line.second
    if first is None or second is None or line.outcome == "equal":
        return line.outcome
    if line.outcome == "shape":
        return f"shape {list(first.shape)} → {list(second.shape)}"
    if line.outcome == "dtype":
        return clean(f"{first.dtype} → {second.dtype}" + ("" if first.shape == second.shape else ", another shape"))
    kinds = f"{first.kind} → {second.kind}" if first.kind != second.kind else ""
    if line.outcome == "kind":
        return kinds
    words = [f"{line.changed} of {line.elements} changed"]
    if line.largest is not None:
        words.append(f"by at most {line.largest:.9g}")
    if line.incomparable:
        words.append(f"{line.incomparable} from or to NaN")
    return ", ".join([*words, kinds] if kinds else words)
