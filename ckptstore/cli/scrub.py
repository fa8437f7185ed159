"""``ckptstore scrub``: read what was checked longest ago; for a timer."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from rich.text import Text

from ckptstore import ScrubReport
from ckptstore.cli._common import (
    Debug,
    Json,
    Options,
    Unsafe,
    Url,
    open_repository,
    out,
    print_json,
    progress_bar,
    seconds_of,
)
from ckptstore.cli._copies import rate
from ckptstore.cli._format import clean, size, to_json
from ckptstore.errors import InvalidArgumentError

_CORRUPT = 4

_MaxBytes = Annotated[
    str | None,
    typer.Option("--max-bytes", metavar="SIZE", show_default=False, help="Read no more than this, e.g. 200GB."),
]
_MaxTime = Annotated[
    str | None,
    typer.Option("--max-time", metavar="TIME", show_default=False, help="End after this, e.g. 90s, 30m or 2h."),
]
_OlderThan = Annotated[
    str | None,
    typer.Option("--older-than", metavar="TIME", show_default=False, help="Leave out what was checked since, e.g. 7d."),
]
_Limit = Annotated[
    str | None,
    typer.Option("--limit", metavar="RATE", show_default=False, help="Read no faster on average, e.g. 50MB/s."),
]
_Quarantine = Annotated[bool, typer.Option("--quarantine", help="Set aside what is damaged: see quarantine.")]

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B")


def scrub(
    url: Url,
    max_bytes: _MaxBytes = None,
    max_time: _MaxTime = None,
    older_than: _OlderThan = None,
    limit: _Limit = None,
    quarantine: _Quarantine = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Read and check what was checked longest ago, as much as there is time for. Made to be called by a timer.

    How far it came is noted in the repository: the next one goes on there, also after a kill. Damage is listed, also
    that of earlier runs as long as it is there, and the exit code is 4.

    Example: [cyan]ckptstore scrub s3://runs/llama --max-time 2h --older-than 7d --limit 50MB/s[/cyan]
    """
    budget = {
        "max_bytes": None if max_bytes is None else size_of(max_bytes),
        "max_seconds": None if max_time is None else seconds_of(max_time),
        "older_than": 0.0 if older_than is None else seconds_of(older_than),
        "limit": rate(limit),
    }
    with open_repository(url, option, unsafe, create=False) as repo:
        with progress_bar("scrubbing") as move:
            report = repo.scrub(**budget, quarantine=quarantine, progress=move)  # type: ignore[arg-type]
        if json:
            print_json(to_json(_as_json(repo.url, report)))
        else:
            _print(repo.url, report)
    if not report.ok:
        raise typer.Exit(_CORRUPT)


def size_of(text: str) -> int:
    """Bytes: ``200GB``, ``1.5GiB``. InvalidArgumentError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidArgumentError(f"{clean(text)!r} is no size: use e.g. 500MB, 200GB or 1.5GiB")
    return int(float(match[1]) * (1024.0 if match[3] else 1000.0) ** " KMGT".index(match[2].upper() or " "))


def _as_json(url: str, report: ScrubReport) -> dict[str, Any]:
    names = ("chunks_read", "bytes_read", "chunks", "bytes_stored", "complete", "oldest_seconds", "recorded")
    damaged = [
        {"epoch": health.epoch, "problems": [{"key": p.key, "reason": p.reason} for p in health.problems]}
        for health in report.epochs
        if not health.ok
    ]
    return {"url": url, "ok": report.ok, **{name: getattr(report, name) for name in names}, "damaged": damaged}


def _print(url: str, report: ScrubReport) -> None:
    console = out()
    read = f"{report.chunks_read} of {report.chunks} chunks read ({size(report.bytes_read)})"
    left = "" if report.complete else "; the next one goes on from here"
    console.print(Text(f"{clean(url)}: {read}{left}"))
    age = report.oldest_seconds
    if age is not None and report.chunks:
        console.print(Text(f"every chunk was read within the last {_ago(age)}, or put since"))
    for health in report.epochs:
        for problem in health.problems:
            reason = problem.reason.replace(problem.key, "").strip(" :")
            where = Text(f"epoch {health.epoch}: {clean(problem.key)}: ", "red")
            console.print(where.append(clean(reason)), soft_wrap=True)


def _ago(seconds: float) -> str:
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
