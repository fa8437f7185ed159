"""``ckptstore ls``: all checkpoints of a repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from ckptstore import Repository
from ckptstore.catalog import Catalog, Committed
from ckptstore.checkpoint import metadata_of
from ckptstore.cli._common import (
    Debug,
    Json,
    Options,
    Unsafe,
    Url,
    open_repository,
    out,
    print_json,
    warn,
)
from ckptstore.cli._format import ago, brief, clean, ratio, size, to_json
from ckptstore.errors import CorruptionError
from ckptstore.manifest import Manifest

_WIDE = 100  # columns from which on the records are listed by name
_RUN = 24  # columns for the name of a run
_Listing = list[tuple[Committed, Manifest | CorruptionError]]


@dataclass(frozen=True)
class _Marks:
    """Why epochs are not as others: by the key of their manifest, and by their number."""

    aside: dict[str, str | None]
    pins: dict[int, str]
    holds: dict[int, str]

    def of(self, commit: Committed) -> dict[str, str | None]:
        """As JSON has it."""
        pinned, held = self.pins.get(commit.epoch), self.holds.get(commit.epoch)
        return {"quarantined": self.aside.get(commit.key), "pinned": pinned, "held": held}

    def text(self, commit: Committed) -> Text:
        """For people."""
        found = self.of(commit)
        words = [f"{name.upper()}: {why}" for name, why in found.items() if why is not None and name != "held"]
        words += [found["held"]] if found["held"] is not None else []
        return _line("; ".join(words), "bold yellow" if found["quarantined"] is not None else "bold")


def ls(url: Url, json: Json = False, option: Options = None, unsafe: Unsafe = False, debug: Debug = False) -> None:
    """List all checkpoints.

    One small read an epoch; no chunk is looked at (that is [bold]verify[/bold]). What is pinned, quarantined or held by
    a reader says so. An epoch whose manifest is damaged is listed as damaged, and the exit code is 0 all the same: the
    listing itself is complete.

    Example: [cyan]ckptstore ls s3://runs/llama[/cyan]
    """
    with open_repository(url, option, unsafe, create=False) as repo:
        catalog = Catalog(repo.store)
        listing: _Listing = catalog.manifests(catalog.committed())
        aside = {c.key: _why(catalog, c, found) for c, found in listing if c.quarantined}
        marks = _Marks(aside, repo.pins(), repo.holds())
        if json:
            print_json(to_json(_as_json(repo, listing, marks)))
        else:
            _print(repo, listing, marks)
    damaged = sum(isinstance(found, CorruptionError) for _, found in listing)
    if damaged:
        warn(f"{damaged} of {len(listing)} manifests are damaged: see `ckptstore verify`")


def _why(catalog: Catalog, commit: Committed, found: Manifest | CorruptionError) -> str | None:
    return catalog.set_aside(commit, found if isinstance(found, Manifest) else None)


def _as_json(repo: Repository, listing: _Listing, marks: _Marks) -> dict[str, Any]:
    epochs = [{**_entry(*pair), **marks.of(pair[0])} for pair in listing]
    return {"url": repo.url, "repository": repo.id, "epochs": epochs}


def _entry(commit: Committed, found: Manifest | CorruptionError) -> dict[str, Any]:
    entry: dict[str, Any] = {"epoch": commit.epoch, "generation": commit.generation, "key": commit.key}
    if isinstance(found, CorruptionError):
        return {**entry, "damaged": found.message}
    return {
        **entry,
        "damaged": None,
        "created": found.created,
        "run": found.run,
        "records": [record.name for record in found.records],
        "left_out": dict(found.left_out),
        "bytes_state": found.bytes_state,
        "bytes_stored": found.bytes_needed,
        "bytes_sent": found.bytes_sent,
        "metadata": metadata_of(found),
    }


def _print(repo: Repository, listing: _Listing, marks: _Marks) -> None:
    console = out()
    if not listing:
        console.print(Text(f"{repo.url} holds no checkpoint yet."))
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("epoch", "gen", "state", "stored", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("created", no_wrap=True)
    runs = {found.run for _, found in listing if isinstance(found, Manifest)}
    if len(runs) > 1:
        table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=_RUN)
    wide = console.width >= _WIDE
    table.add_column("records", no_wrap=True, overflow="ellipsis", justify="left" if wide else "right")
    table.add_column("metadata")  # the only one that may shrink
    for commit, found in listing:
        number, generation = str(commit.epoch), str(commit.generation)
        if isinstance(found, CorruptionError):
            reason = Text(
                clean(found.message.replace(commit.key, "manifest", 1)), "red", no_wrap=True, overflow="ellipsis"
            )
            run = ["-"] if len(runs) > 1 else []
            table.add_row(number, generation, "-", "-", "-", Text("DAMAGED", "bold red"), *run, "-", reason)
            continue
        stored, mark = found.bytes_needed, marks.text(commit)
        facts = _line(brief(metadata_of(found)))
        names = clean(" ".join(record.name for record in found.records)) if wide else str(len(found.records))
        sizes = (size(found.bytes_state), size(stored), ratio(found.bytes_state, stored))
        table.add_row(
            number,
            generation,
            *sizes,
            ago(found.created),
            *([Text(clean(found.run or "-"))] if len(runs) > 1 else []),
            Text(names),
            Text("; ", no_wrap=True, overflow="ellipsis").join([part for part in (mark, facts) if part]),
        )
    console.print(table)


def _line(text: str, style: str = "") -> Text:
    return Text(clean(text), style, no_wrap=True, overflow="ellipsis")
