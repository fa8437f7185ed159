"""Tables of a run, for a terminal and for Markdown. A table holds durable rows or others, never both."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.claims import OURS, size, time
from benchmarks.samples import Run, Sample, median, pairs

MB = 1e6
TITLES = {
    "save": "Save",
    "restore": "Restore",
    "restore cold": "Restore without page cache",
    "partial": "Restore the first layer only",
    "again": "Second save, 1 % changed",
    "stall": "Stall of a save in the background",
    "codec": "Codec, one thread",
    "latest": "latest() among many epochs",
    "prune": "Prune a repository to three epochs",
    "gc": "Collect the debris of a repository",
    "guards": "Saves with all guards, beside saves without any",
}
PLACES = {"folder": "folder", "s3": "S3", "memory": "memory"}
MEMORY_ONLY = ("codec",)


@dataclass(frozen=True)
class Table:
    """A title, the heads of the columns, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    durable: bool

    def markdown(self) -> str:
        """As Markdown."""
        lines = [f"**{self.title}**", "", f"| {' | '.join(self.columns)} |"]
        lines.append("| --- |" + " ---: |" * (len(self.columns) - 1))
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join(lines) + "\n"


def tables(run: Run, *, durable: bool | None = None) -> Iterator[Table]:
    """All tables; with ``durable``, those of durable rows only, or of the others only."""
    for work, where, state, mib, kind in run.tables():
        if durable is None or durable == kind:
            samples = run.select(work=work, where=where, state=state, mib=mib, durable=kind)
            yield table(samples, run)


def table(samples: list[Sample], run: Run) -> Table:
    """One table of samples of one work, place, state, size and durability.

    Raises:
        ValueError: they are of several.
    """
    if len({(s.work, s.where, s.state, s.mib, s.durable) for s in samples}) != 1:
        raise ValueError("a table holds one work, place, state and size, and never durable and other rows together")
    one = samples[0]
    names = dict.fromkeys(s.rival for s in samples)
    ours = [s for s in samples if s.rival == OURS]
    rows = [_row(name, [s for s in samples if s.rival == name], ours, run) for name in names]
    columns = ("", "time", "spread", "MB/s", "× ckptstore", "CPU", "memory", "stored", "ratio", *_more(one))
    if not ours or len(names) == 1:
        rows, columns = _without(rows, 4), (*columns[:4], *columns[5:])
    filled = [at for at in range(len(columns)) if at == 0 or any(row[at] for row in rows)]
    rows = [tuple(row[at] for at in filled) for row in rows]
    return Table(_title(one), tuple(columns[at] for at in filled), rows, one.durable)


def _without(rows: list[tuple[str, ...]], column: int) -> list[tuple[str, ...]]:
    return [(*row[:column], *row[column + 1 :]) for row in rows]


def _title(one: Sample) -> str:
    what = f"{one.mib:,} epochs" if one.state == "epochs" else f"{one.state}, {size(one.mib)}"
    place = f", {PLACES[one.where]}" if one.where != "memory" else ""
    kind = "" if one.work in MEMORY_ONLY else ", durable" if one.durable else ", not durable"
    return f"{TITLES[one.work]}{place}, {what}{kind}"


def _more(one: Sample) -> tuple[str, ...]:
    if one.work == "codec":
        return ("decode",)
    if one.work == "stall":
        return ("until durable",)
    return ("requests", "sent") if one.work == "again" else ("requests",)


def _row(name: str, mine: list[Sample], ours: list[Sample], run: Run) -> tuple[str, ...]:
    one = mine[0]
    times = [s.seconds for s in mine]
    middle = statistics.median(times)
    times_ours = pairs(mine, ours)
    stored = round(median(mine, "stored"))
    limit = run.rivals.get(name, {}).get("limit") and one.work not in MEMORY_ONLY
    return (
        f"*{name}*" if limit else name,
        time(middle),
        f"{time(min(times))}–{time(max(times))}" if len(times) > 1 else "",
        f"{one.nbytes / middle / MB:.0f}" if one.nbytes and one.work != "stall" else "",
        f"{statistics.median(times_ours):.2f}" if times_ours and one.work != "prune" else "",
        time(median(mine, "cpu")),
        f"+{median(mine, 'peak') / MB:.0f} MB" if one.work not in MEMORY_ONLY else "",
        f"{stored / MB:.1f} MB" if stored else "",
        f"{one.nbytes / stored:.3f}" if stored and one.work != "again" else "",
        *_more_cells(mine),
    )


def _more_cells(mine: list[Sample]) -> tuple[str, ...]:
    one = mine[0]
    if one.work == "codec":
        return (f"{one.nbytes / _fact(mine, 'decode') / MB:.0f} MB/s",)
    if one.work == "stall":
        return (time(_fact(mine, "until durable")),)
    counted = one.requests if one.requests is not None else one.facts.get("verbs")
    shown = f"{counted:.0f}" if counted is not None else ""
    if one.work == "again":
        return (shown, f"{_fact(mine, 'sent') / MB:.1f} MB" if "sent" in one.facts else "")
    return (shown,)


def _fact(mine: list[Sample], name: str) -> float:
    return statistics.median(s.facts[name] for s in mine)
