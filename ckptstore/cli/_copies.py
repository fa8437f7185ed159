"""What ``mirror`` and ``cp`` share: their options, and how they say what became of each epoch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ckptstore import EpochCopy
from ckptstore.cli._common import out
from ckptstore.cli._format import clean, short_key, size
from ckptstore.errors import InvalidArgumentError
from ckptstore.manifest import check_epoch

Source = Annotated[str, typer.Argument(metavar="SRC", show_default=False, help="The repository to copy from.")]
Target = Annotated[
    str, typer.Argument(metavar="DST", show_default=False, help="The one to copy to, on any store; made if need be.")
]
Limit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar="RATE",
        show_default=False,
        help="Send no more than this on average, e.g. 50MB/s, 20MiB/s or 400Mbit/s.",
    ),
]
ToOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--to-option", metavar="KEY=VALUE", show_default=False, help="As --option, for DST; --option is for SRC."
    ),
]

_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)(B|bit)(?:/s|ps)?")
_RANGE = re.compile(r"(\d+)(?:(-)(\d*))?")
_STYLES = {"copied": "bold green", "there": "green", "newer": "yellow", "conflict": "bold red", "damaged": "bold red"}


def rate(text: str | None) -> float | None:
    """Bytes a second: ``50MB/s``, ``1.5 GiB/s``, ``400Mbit/s``.

    Raises:
        InvalidArgumentError: anything else.
    """
    if text is None:
        return None
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise InvalidArgumentError(f"{clean(text)!r} is no rate: use e.g. 50MB/s, 20MiB/s or 400Mbit/s")
    factor = (1024.0 if match[3] else 1000.0) ** " KMGT".index(match[2].upper() or " ")
    return float(match[1]) * factor / (8 if match[4] == "bit" else 1)


def chosen_epochs(text: str | None, there: Sequence[int]) -> list[int] | None:
    """The epochs that ``1,5-9,100-`` means. A range takes those that are there; a single number must be.

    Raises:
        InvalidArgumentError: it means nothing.
    """
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise InvalidArgumentError(f"{clean(text)!r} names no epochs: use e.g. 7, 1,5-9 or 100-")
        first = check_epoch(int(match[1]))
        if match[2] is None:
            found.add(first)
        else:
            last = int(match[3]) if match[3] else None
            found.update(epoch for epoch in there if first <= epoch and (last is None or epoch <= last))
    return sorted(found)


def as_json(copy: EpochCopy) -> dict[str, Any]:
    """Everything about it."""
    return {name: getattr(copy, name) for name in EpochCopy.__dataclass_fields__}


def print_copies(copies: Sequence[EpochCopy], *, dry_run: bool = False) -> None:
    """A line for each epoch, but one for all that were there already."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("epoch", "state", "found there", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for copy in copies:
        if copy.outcome == "there":
            continue
        sizes = ["-"] * 3
        if copy.outcome == "copied":
            sizes = [size(n) for n in (copy.bytes_state, copy.bytes_reused, copy.bytes_sent)]
        reason = copy.reason.replace(copy.key, short_key(copy.key)) if copy.key else copy.reason
        if dry_run and copy.outcome == "copied":
            sizes[1:] = "--"
        word = "to copy" if dry_run and copy.outcome == "copied" else copy.outcome
        outcome = Text(word, _STYLES.get(copy.outcome, ""))
        table.add_row(str(copy.epoch), *sizes, Text.assemble(outcome, f": {clean(reason)}" if reason else ""))
    if table.row_count:
        out().print(table)
