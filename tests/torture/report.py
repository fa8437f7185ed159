"""What is seen of a run: a progress bar on a terminal, lines elsewhere, a table at the end, or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.torture.work import Tally

EVERY = 10.0  # seconds between two lines where there is no terminal
COLUMNS = {
    "attempts": "attempts",
    "faults": "faults fired",
    "committed": "saves committed",
    "refused": "refused or failed",
    "checked": "checked bit for bit",
    "lost": "lost",
    "phantom": "phantom",
    "untyped": "untyped",
    "other": "other",
}


class Report:
    """Writes to standard output; with ``as_json`` nothing but one JSON document at the end."""

    def __init__(self, as_json: bool, console: Console | None = None) -> None:
        self._as_json = as_json
        self._console = console or Console(width=None if Console().is_terminal else 160, highlight=False)

    @contextmanager
    def campaign(self, tally: Tally, what: str, steps: int) -> Iterator[Callable[[int], None]]:
        """Show that a campaign is running. Gives the function that is told how many steps are done."""
        start = time.monotonic()
        if self._as_json:
            yield lambda done: None
        elif self._console.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(f"{tally.campaign}: {what}", total=steps or None, found="")

                def tell(done: int) -> None:
                    bar.update(task, completed=done, found=_found(tally))

                yield tell
        else:
            self._console.print(f"{tally.campaign}: {what}", soft_wrap=True)
            yield self._lines(tally, steps)
        tally.seconds = time.monotonic() - start
        if not self._as_json:
            self._console.print(f"{tally.campaign}: {_found(tally)}, {tally.seconds:.0f} s", soft_wrap=True)

    def _bar(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, TextColumn("{task.fields[found]}"), console=self._console, transient=True)

    def _lines(self, tally: Tally, steps: int) -> Callable[[int], None]:
        said = time.monotonic()

        def tell(done: int) -> None:
            nonlocal said
            if time.monotonic() - said >= EVERY:
                said = time.monotonic()
                of = f" of {steps}" if steps else ""
                self._console.print(f"  {tally.campaign}: {done}{of}; {_found(tally)}", soft_wrap=True)

        return tell

    def end(self, tallies: list[Tally], head: dict[str, Any]) -> None:
        """The table and the verdict, or the JSON document."""
        broken = sum(tally.broken for tally in tallies)
        if self._as_json:
            document = {**head, "campaigns": [tally.as_json() for tally in tallies], "broken": broken}
            self._console.file.write(json.dumps(document, indent=1) + "\n")
            return
        table = Table("campaign", *COLUMNS.values(), "seconds")
        for column in table.columns[1:]:
            column.justify = "right"
        for tally in [*tallies, _sum(tallies)]:
            numbers = [f"{getattr(tally, name):,}" for name in COLUMNS]
            table.add_row(tally.campaign, *numbers, f"{tally.seconds:,.0f}", end_section=tally is tallies[-1])
        self._console.print(table)
        for tally in tallies:
            for what, number in sorted(tally.notes.items()):
                self._console.print(f"{tally.campaign}, {what}: {number:,}", soft_wrap=True)
        for tally in tallies:
            for problem in tally.problems:
                self._console.print(problem, soft_wrap=True, markup=False)
            if tally.broken:
                again = f"again: python -m tests.torture {head['arguments']} --seed {head['seed']}"
                self._console.print(f"{again} --only {tally.campaign}", soft_wrap=True)
        self._console.print(f"seed: {head['seed']}")
        self._console.print(f"lost: {sum(tally.lost for tally in tallies)}")


def _found(tally: Tally) -> str:
    return f"{tally.faults:,} faults, {tally.checked:,} epochs checked, lost: {tally.lost}" + (
        f", other broken promises: {tally.broken - tally.lost}" if tally.broken > tally.lost else ""
    )


def _sum(tallies: list[Tally]) -> Tally:
    total = Tally("all")
    for name in (*COLUMNS, "seconds"):
        setattr(total, name, sum(getattr(tally, name) for tally in tallies))
    return total
