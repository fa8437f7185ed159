"""``ckptstore du``: what each epoch takes, what it shares, and what deleting would free."""

from __future__ import annotations

import time
from typing import Any

from rich.table import Table
from rich.text import Text

from ckptstore import Usage
from ckptstore.cli._common import Debug, Json, Options, Unsafe, Url, open_repository, out, print_json, progress_bar
from ckptstore.cli._format import clean, ratio, size, to_json
from ckptstore.cli.prune import Keep, Records, Run, policy_of


def du(
    url: Url,
    keep: Keep = None,
    record: Records = None,
    run: Run = "",
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Show what each epoch takes on the store, how much of it others share, and what would be freed if it alone went.

    With [cyan]--keep[/cyan] or [cyan]--record[/cyan] it also tells what a prune by that policy would free. Nothing is
    deleted, and no chunk is read.

    Example: [cyan]ckptstore du s3://runs/llama --keep 'KeepLast(5)'[/cyan]
    """
    policy = policy_of(keep, record) if keep is not None or record else None
    begun = time.perf_counter()
    with open_repository(url, option, unsafe, create=False, run=run) as repo:
        with progress_bar("counting", counting=True) as move:
            usage = repo.du(policy, move)
        seconds = time.perf_counter() - begun
        if json:
            print_json(to_json(_as_json(repo.url, usage, seconds)))
        else:
            _print(repo.url, usage)


def _as_json(url: str, usage: Usage, seconds: float) -> dict[str, Any]:
    names = [name for name in Usage.__dataclass_fields__ if name not in ("epochs", "plan")]
    facts = {name: getattr(usage, name) for name in names if usage.plan is not None or name != "bytes_freed"}
    epochs = []
    for row in usage.epochs:
        entry = {name: getattr(row, name) for name in type(row).__dataclass_fields__}
        if usage.plan is not None:
            entry["kept"] = row.epoch not in usage.plan.removed
            entry["dropped"] = sorted(usage.plan.dropped.get(row.epoch, ()))
        epochs.append(entry)
    return {"url": url, "bytes_total": usage.bytes_total, **facts, "seconds": round(seconds, 3), "epochs": epochs}


def _print(url: str, usage: Usage) -> None:
    console = out()
    if usage.epochs:
        console.print(_table(usage))
        console.print()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(justify="right")
    facts.add_column()
    facts.add_row("epochs", size(usage.bytes_stored), f"{usage.objects} objects, each counted once")
    if usage.objects_missing:
        facts.add_row("", "", Text(f"{usage.objects_missing} of them are missing or cut: see verify", "bold red"))
    if usage.bytes_debris:
        facts.add_row("debris", size(usage.bytes_debris), f"{usage.objects_debris} objects that gc removes")
    if usage.bytes_in_progress:
        facts.add_row("in progress", size(usage.bytes_in_progress), "of saves under way")
    if usage.bytes_unknown:
        facts.add_row("unknown", size(usage.bytes_unknown), "may be needed by an epoch that cannot be read")
    facts.add_row("other", size(usage.bytes_other), "leases, pins, the reserve")
    facts.add_row("total", size(usage.bytes_total), Text(f"in {clean(url)}"))
    if usage.plan is not None:
        dropped = sum(map(len, usage.plan.dropped.values()))
        more = f" and {dropped} records of others" if dropped else ""
        facts.add_row("a prune", size(usage.bytes_freed), f"freed: {len(usage.plan.removed)} epochs{more}")
    console.print(facts)


def _table(usage: Usage) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("epoch", "gen", "state", "stored", "ratio", "shared", "alone"):
        table.add_column(name, justify="right", no_wrap=True)
    if usage.plan is not None:
        table.add_column("prune", no_wrap=True)
    damaged = any(row.damaged for row in usage.epochs)
    if damaged:
        table.add_column("", overflow="fold")
    for row in usage.epochs:
        sizes = (size(row.bytes_state), size(row.bytes_stored), ratio(row.bytes_state, row.bytes_stored))
        cells: list[str | Text] = [str(row.epoch), str(row.generation), *sizes]
        cells += [size(row.bytes_shared), size(row.bytes_alone)]
        if usage.plan is not None:
            goes = row.epoch in usage.plan.removed
            fewer = ", ".join(sorted(usage.plan.dropped.get(row.epoch, ())))
            less = Text(clean(f"loses {fewer}"), "yellow") if fewer else Text("kept", "green")
            cells.append(Text("goes", "red") if goes else less)
        if damaged:
            cells.append(Text(clean(row.damaged), "red"))
        table.add_row(*cells)
    return table
