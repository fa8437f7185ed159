"""``ckptstore preflight``: would a save of this size work here?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ckptstore import Preflight, RepositoryNotFoundError
from ckptstore.catalog import Catalog
from ckptstore.cli._common import Debug, Json, Options, Unsafe, Url, access, open_repository, out, print_json
from ckptstore.cli._format import clean, size, to_json
from ckptstore.errors import InvalidArgumentError, NotFoundError
from ckptstore.preflight import check_place
from ckptstore.stores import open_store

_WILL_FAIL = 5

_Bytes = Annotated[
    int | None,
    typer.Option("--bytes", metavar="N", min=0, show_default=False, help="Bytes of the state that is to be saved."),
]
_Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE]...", show_default=False, help="Files that are to be saved, in place of --bytes."),
]


def preflight(
    url: Url,
    files: _Files = None,
    nbytes: _Bytes = None,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Ask a place whether a save would work: permissions, space, files, quota, conditional puts.

    Writes a tiny object and removes it. The exit code is 5 if a save would fail.

    Example: [cyan]ckptstore preflight runs/demo model.bin optim.bin[/cyan]
    """
    if files and nbytes is not None:
        raise InvalidArgumentError("give either --bytes or files, not both")
    answer = _ask(url, _bytes_of(files) if files else nbytes or 0, option, unsafe)
    if json:
        print_json(to_json(answer.as_dict()))
    else:
        _print(answer)
    if not answer.ok:
        raise typer.Exit(_WILL_FAIL)


def _ask(url: str, nbytes: int, option: list[str] | None, unsafe: bool) -> Preflight:
    try:
        with open_repository(url, option, unsafe, create=False) as repo:
            return repo.preflight(nbytes)
    except RepositoryNotFoundError:  # not made yet: ask the bare place
        with open_store(url, **access(url, option), unsafe_single_writer=unsafe) as store:
            return check_place(Catalog(store), nbytes, None)


def _bytes_of(files: list[str]) -> int:
    total = 0
    for name in files:
        if not Path(name).is_file():
            raise NotFoundError(f"{clean(name)} is no file")
        total += Path(name).stat().st_size
    return total


def _print(answer: Preflight) -> None:
    console = out()
    verdict, style = ("ok", "bold green") if answer.ok else ("not ok", "bold red")
    console.print(Text.assemble((verdict, style), f"  {clean(answer.url)}: {clean(answer.reason)}"))
    if answer.advice:
        console.print(Text(f"        {clean(answer.advice)}"))
    console.print()
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _rows(answer):
        table.add_row(name, Text(value))
    console.print(table)


def _rows(answer: Preflight) -> list[tuple[str, str]]:
    rows = [
        ("can be written to", "yes" if answer.writable else "no"),
        ("conditional puts", {True: "honoured", False: "ignored", None: "unknown"}[answer.conditional_put]),
        ("free", _or_unknown(answer.free)),
        ("files that can be made", str(answer.files) if answer.files is not None else "no limit known"),
    ]
    if answer.quota is not None:
        rows.append(("left of the quota", size(answer.quota)))
    if answer.quota_files is not None:
        rows.append(("files left of the quota", str(answer.quota_files)))
    rows += [
        ("state to save", size(answer.bytes_state)),
        ("needs about", f"{size(answer.bytes_needed)}, at best {size(answer.bytes_least)}"),
        ("checkpoints there", size(answer.bytes_stored)),
        ("old and new together", size(answer.bytes_peak)),
        ("debris, or being saved", size(answer.bytes_debris)),
        ("could be deleted", _epochs(answer.deletable)),
    ]
    return rows


def _epochs(freed: dict[int, int]) -> str:
    if not freed:
        return "nothing"
    shown = [str(epoch) for epoch in freed]
    names = ", ".join(shown if len(shown) <= 12 else [*shown[:5], "…", *shown[-5:]])
    return f"{size(sum(freed.values()))}: epoch {names}"


def _or_unknown(nbytes: int | None) -> str:
    return size(nbytes) if nbytes is not None else "it does not tell"
