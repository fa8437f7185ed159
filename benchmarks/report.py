"""What is made from a run's JSON file and from nothing else: tables for a terminal, and ``docs/benchmarks.md``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks import plots
from benchmarks.claims import MISSED, REACHED, UNKNOWN, Claim
from benchmarks.goals import claims
from benchmarks.losses import losses
from benchmarks.samples import Run, read
from benchmarks.tables import Table, tables

STYLES = {REACHED: "green", MISSED: "bold red", UNKNOWN: "yellow"}

HEAD = """\
# Benchmarks

```text
make bench                                       # all goals on states of 0.25 GiB: some ten minutes on two cores
make bench-full                                  # all states, sizes and rivals: some two hours
python -m benchmarks quick --only save --state adam --rival torch.save    # only these (--list shows the rivals)
python -m benchmarks dcp                         # torch DCP with our writer and reader, on one rank and on four
python -m benchmarks report RESULT.json          # writes this page and its pictures from a result
ckptstore bench s3://my-bucket/some/prefix       # your own store; needs neither torch nor this folder
```

The first run trains the model that all states come from, once: another minute or two. Results lie in
`benchmarks/results/`. This page was written by `report` from [benchmarks.json](benchmarks.json), where every single
measurement is: all numbers and verdicts come from there. Yours will differ: run it.
"""

DCP = "benchmarks-dcp.json"
"""The run of the profile ``dcp`` that the page shows beside the other."""

DCP_HEAD = """\
## torch DCP on one rank and on four

Written by `report` from [benchmarks-dcp.json](benchmarks-dcp.json). Each rank is a fresh process of a gloo group. On
four ranks every tensor but scalars is a DTensor whose first dimension is sharded, as FSDP2 leaves it; on one rank all
are plain. The time is that of the slowest rank, CPU and memory are those of all ranks together. All save or load
something tiny first, so that neither imports nor first connections count. A stall is how long `dcp.async_save` blocks,
each with a stager that keeps its copy (ours, or DCP's `DefaultStager`); *until durable* runs from the same moment.
"""

HOW = """\
## How it is measured

- **Each measurement is a fresh process.** The rivals take turns, in opposite order every other round; the first round
  does not count, and before each measurement the disk has written what earlier ones left. *time* is the median,
  *spread* the smallest and the largest; *× ckptstore*, and each ratio in the goals, is the median of the ratios within
  a round.
- **Everything restored is compared** with what was saved, outside the time. A rival that fails or gives other bytes is
  listed below and has no row.
- **Restores fill a state that exists already** where the rival can, and read from the page cache; *without page cache*
  reads from the disk.
- **CPU** is that of the process, not of a server. **memory** is the peak of resident memory above what was there
  before, and above the state itself. **stored** is what lies on the store, **ratio** the state's bytes to that.
- **requests** are HTTP requests where all can be counted (s3fs's client), else ckptstore's calls of the store. Those
  that obstore and s3torchconnector send with clients of their own cannot be counted.
- **Durable and other rows never share a table.** Durable: what was saved survives a crash of the machine once the
  call has returned. What a rival leaves out (an fsync) is added in a row of its own, whose name says so.
- *In italics*: no checkpoints but limits, the same bytes without names, structure or checks.
- Not timed: opening the connection and the repository. Saves go to an empty place, so that nothing can be reused.
- The S3 server is SeaweedFS on the same cores: a comparison of clients, which says nothing about a real network or a
  cloud.
"""


def page(run: Run, folder: Path) -> str:
    """``docs/benchmarks.md``; ``folder`` is where it will lie, for the pictures."""
    parts = [HEAD]
    parts += [
        "## The machine and the run\n",
        _machine(run),
        "## Goals\n",
        _goals(run),
        "## Where we lose\n",
        *_losses(run),
    ]
    parts += [
        HOW,
        "### States\n",
        *_states(run),
        "\n### Rivals, and how they are used\n",
        *_rivals(run),
        *_troubles(run),
    ]
    parts += [_pictures(folder), "## Durable\n", *(t.markdown() for t in tables(run, durable=True))]
    rest = [t.markdown() for t in tables(run, durable=False)]
    parts += ["## Not durable, or no storage at all\n", *rest] if rest else []
    parts += _dcp(folder / DCP)
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _dcp(path: Path) -> Iterator[str]:
    """The part of the page that comes from the run of the profile ``dcp``, where there is one."""
    if path.exists():
        run = read(path)
        yield DCP_HEAD
        yield _machine(run)
        yield _goals(run)
        yield "### Where we lose with DCP\n"
        yield from _losses(run)
        yield "### Writers and readers\n"
        yield from _rivals(run)
        yield from _troubles(run)
        yield "\n### Tables\n"
        yield from (t.markdown() for t in tables(run))


def write(run: Run, folder: Path) -> str:
    """Write the page, its pictures and the JSON it was made from; why there are no new pictures, or nothing.

    A run of the profile ``dcp`` becomes its part of the page; the rest is made from what lies there.
    """
    if run.profile == "dcp":
        run.write(folder / DCP)
        (folder / "benchmarks.md").write_text(page(read(folder / "benchmarks.json"), folder))
        return "those of this profile are tables"
    reason = plots.available()
    if not reason:
        for old in (folder / "benchmarks").glob("*.svg"):
            old.unlink()
        plots.draw(run, folder / "benchmarks")
    run.write(folder / "benchmarks.json")
    (folder / "benchmarks.md").write_text(page(run, folder))
    return reason


def show(run: Run, console: Console) -> None:
    """All tables and the verdicts, on a terminal."""
    for table in tables(run):
        console.print(_rich(table))
    view = RichTable(title="Goals", title_justify="left")
    for column in ("", "what", "promised", "measured", "verdict", "detail"):
        view.add_column(column, overflow="fold")
    for claim in claims(run):
        style = STYLES.get(claim.verdict, "")
        view.add_row(
            str(claim.goal),
            claim.what,
            claim.target,
            claim.measured,
            f"[{style}]{claim.verdict}[/]" if style else claim.verdict,
            claim.detail,
        )
    console.print(view)
    for line in losses(run):
        console.print(f"[red]-[/] {line}", highlight=False)
    for trouble in run.troubles:
        word = "failed" if trouble.error else "not measured"
        what = ", ".join(filter(None, (trouble.rival, trouble.work, trouble.where, trouble.state)))
        console.print(f"{word}: {what}: {trouble.reason}", style="yellow", markup=False, highlight=False)


def _rich(table: Table) -> RichTable:
    view = RichTable(title=table.title, title_justify="left")
    for column in table.columns:
        view.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in table.rows:
        view.add_row(*row)
    return view


def _goals(run: Run) -> str:
    found = claims(run)
    count = {verdict: sum(claim.verdict == verdict for claim in found) for verdict in (REACHED, MISSED, UNKNOWN)}
    head = f"{count[REACHED]} claims reached, {count[MISSED]} not reached, {count[UNKNOWN]} not measured.\n"
    lines = [
        head,
        "| goal | what | promised | measured | verdict | detail |",
        "| ---: | --- | --- | ---: | --- | --- |",
    ]
    lines += [_goal_row(claim) for claim in found]
    return "\n".join(lines) + "\n"


def _goal_row(claim: Claim) -> str:
    verdict = f"**{claim.verdict}**" if claim.verdict == MISSED else claim.verdict
    cells = (str(claim.goal), claim.what, claim.target, claim.measured, verdict, claim.detail.replace("|", "/"))
    return f"| {' | '.join(cells)} |"


def _losses(run: Run) -> Iterator[str]:
    found = [f"- {line}" for line in losses(run)]
    yield "Found in the samples: against other rows of the same table, a time of 1.1 times or more, 32 MiB or more of"
    yield "memory, or more bytes stored; and the goals that are not reached.\n"
    yield "\n".join(found or ["- Nowhere in this run."]) + "\n"


def _machine(run: Run) -> str:
    lines = [f"- {name}: {value}" for name, value in run.machine.items()]
    lines.append(
        f"- measured by `{run.command}` in {run.seconds / 60:.0f} minutes: {len(run.samples)} measurements that count"
    )
    return "\n".join(lines) + "\n"


def _states(run: Run) -> Iterator[str]:
    for name, about in {facts["state"]: facts["about"] for facts in run.states}.items():
        found = sorted((facts["nbytes"], facts["tensors"]) for facts in run.states if facts["state"] == name)
        sizes = "; ".join(
            f"{nbytes / 1e6:.1f} MB in {tensors:,} tensor{'s' * (tensors > 1)}" for nbytes, tensors in found
        )
        yield f"- **{name}**: {about}: {sizes}."


def _rivals(run: Run) -> Iterator[str]:
    for name, facts in run.rivals.items():
        kind = "" if facts["durable"] or "codec" in name else " **Not durable.**"
        yield f"- **{name}**: {facts['about']}.{kind}"


def _troubles(run: Run) -> Iterator[str]:
    if run.troubles:
        yield "\n### Not measured\n"
    for t in run.troubles:
        word = "failed" if t.error else "left out"
        yield f"- {t.rival or t.state} ({t.work}, {t.where}, {t.state}): {word}: {t.reason}"


def _pictures(folder: Path) -> str:
    found = sorted((folder / "benchmarks").glob("*.svg"))
    shown = "\n".join(f"![{path.stem}](benchmarks/{path.name})\n" for path in found)
    return f"\n## Pictures\n\n{shown}" if found else ""
