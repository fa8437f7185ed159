"""``ckptstore doctor``: is this a good place for checkpoints, and what is to be done about it?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ckptstore.cli._common import Debug, Json, Options, Unsafe, Url, err, out, print_json, storage_options
from ckptstore.cli._format import clean, to_json
from ckptstore.doctor import Diagnosis, examine

_FAILED = 1
_MARKS = {True: ("✔", "green"), False: ("✗", "bold red"), None: ("!", "yellow")}

_NoSpeed = Annotated[bool, typer.Option("--no-speed", help="Do not measure latency and throughput.")]


def doctor(
    url: Url,
    no_speed: _NoSpeed = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Try a place out, and say what is wrong with it and what to do: permissions, conditional puts, clock, reads after
    writes, mount, space, bucket rules, what lies there, and how fast it is.

    No repository is needed. Everything that is tried out is removed again, also after Ctrl-C. Measuring the speed takes
    some seconds and up to 220 MiB up and down. The exit code is 1 if a check failed (✗); warnings (!) do not count.

    Example: [cyan]ckptstore doctor s3://my-bucket/runs[/cyan]
    """
    with _spinner() as tell:
        diagnosis = examine(
            url, storage_options(option), unsafe_single_writer=unsafe, speed=not no_speed, on_check=tell
        )
    if json:
        print_json(to_json(diagnosis.as_dict()))
    else:
        _print(diagnosis)
    if not diagnosis.ok:
        raise typer.Exit(_FAILED)


@contextmanager
def _spinner() -> Iterator[Callable[[str], object]]:
    """Says on a terminal what is looked at."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with err().status("looking around") as status:
        yield lambda name: status.update(f"looking at: {name}")


def _print(diagnosis: Diagnosis) -> None:
    console = out()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "check", "found", "what to do"):
        table.add_column(name, no_wrap=name in ("", "check"), overflow="fold")
    for finding in diagnosis.findings:
        mark, style = _MARKS[finding.ok]
        table.add_row(Text(mark, style), finding.name, Text(clean(finding.found)), Text(clean(finding.advice)))
    console.print(Text(clean(diagnosis.url)))
    console.print(table)
    failed = [finding.name for finding in diagnosis.findings if finding.ok is False]
    warned = [finding.name for finding in diagnosis.findings if finding.ok is None]
    verdict = f"{len(failed)} failed: {', '.join(failed)}" if failed else "nothing failed"
    tail = f"; {len(warned)} to look at: {', '.join(warned)}" if warned else ""
    console.print(Text.assemble((verdict, "bold red" if failed else "bold green"), tail))
