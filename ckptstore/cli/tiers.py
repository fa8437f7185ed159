"""``ckptstore tiers``: how old is the newest epoch in the bucket, and what is still to come?"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import ckptstore
from ckptstore import EpochInfo, RepositoryNotFoundError, Tier, TierStatus, parse_policy
from ckptstore.cli._common import (
    Debug,
    DryRun,
    Json,
    Options,
    Unsafe,
    access,
    open_repository,
    out,
    print_json,
    seconds_of,
    warn,
)
from ckptstore.cli._format import clean, size, to_json
from ckptstore.errors import InvalidArgumentError
from ckptstore.policies import Policy
from ckptstore.stores.opening import is_bucket
from ckptstore.telling import timestamp

_OLD, _UNAVAILABLE = 1, 5
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}

_Urls = Annotated[
    list[str], typer.Argument(metavar="URL...", show_default=False, help="The tiers, the fast one first; two or more.")
]
_Keep = Annotated[
    str | None,
    typer.Option(
        "--keep",
        metavar="POLICY",
        show_default=False,
        help="What the lower tiers are to have, e.g. 'KeepLast(5)': see prune. Default: every epoch. Nothing is pruned "
        "without [cyan]--copy[/cyan].",
    ),
]
_MaxAge = Annotated[
    str | None,
    typer.Option(
        "--max-age",
        metavar="TIME",
        show_default=False,
        help="Exit code 1 if the newest epoch of any tier is older, or there is none, e.g. 90min, 6h or 2d.",
    ),
]
_Copy = Annotated[
    str | None,
    typer.Option("--copy", metavar="TIME", show_default=False, help="Copy what is waiting first, for so long at most."),
]


def tiers(
    urls: _Urls,
    keep: _Keep = None,
    max_age: _MaxAge = None,
    copy: _Copy = None,
    dry_run: DryRun = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Show how each tier stands: its newest epoch, how old that is, and what it is still to get from the first tier.

    Without [cyan]--copy[/cyan] nothing is written; a trainer may be running. With it, [cyan]--dry-run[/cyan] says what
    would be copied, and what [cyan]--keep[/cyan] would then prune. The first tier must be there (exit code
    3): only a save makes it. Exit code 5: a tier does not answer.

    Example: [cyan]ckptstore tiers /nvme/run s3://bucket/run --max-age 6h[/cyan]
    """
    limit, seconds = _seconds("--max-age", max_age), _seconds("--copy", copy)
    policy = None if keep is None else parse_policy(keep)
    if len(urls) < 2:
        raise InvalidArgumentError("name two tiers or more, the fast one first")
    first = option if is_bucket(urls[0]) else None
    open_repository(urls[0], first, unsafe, create=False).close()  # a misspelt one is not to be made
    there = [option if is_bucket(url) else None for url in urls]
    places = [
        Tier(url, keep=None if number == 0 else policy, **access(url, there[number])) for number, url in enumerate(urls)
    ]
    options: dict[str, Any] = {"unsafe_single_writer": unsafe, "run_id": "", "exit_timeout": 0.0}
    with ckptstore.open(places, create=False, **options) as repo:
        if seconds is not None and not dry_run:
            repo.wait_for_tiers(min(seconds, 86_400.0))
        found = repo.tiers()
    pruned: dict[str, list[int]] = {}
    if dry_run and seconds is not None and policy is not None:
        pruned = {
            one.url: _would_go(one, url, urls[0], policy, option, unsafe)
            for one, url in zip(found[1:], urls[1:], strict=True)
        }
    late = [one for one in found if limit is not None and (one.age is None or one.age > limit)]
    if json:
        rows = [{**asdict(one), "to_prune": pruned.get(one.url, [])} for one in found]
        print_json(to_json({"tiers": rows, "too_old": [one.url for one in late], "dry_run": dry_run}))
    else:
        _print(found)
        for one in found[1:] if dry_run and seconds is not None else ():
            gone = ", ".join(map(str, pruned.get(one.url, []))) or "nothing"
            copied = ", ".join(map(str, one.waiting)) or "nothing"
            out().print(Text(f"{clean(one.url)}: would be copied: {copied}; would then be pruned: {gone}"))
    for one in late:
        said = "holds no epoch" if one.age is None else f"its newest epoch is {_age(one.age)} old"
        warn(f"{one.url}: {said}, and --max-age is {max_age}")
    if any(one.error for one in found):
        raise typer.Exit(_UNAVAILABLE)
    if late:
        raise typer.Exit(_OLD)


def _would_go(
    tier: TierStatus, url: str, first: str, policy: Policy, option: list[str] | None, unsafe: bool
) -> list[int]:
    """The epochs that a lower tier would let go of, once it has what is waiting."""
    with ExitStack() as opened:
        here, there = (option if is_bucket(place) else None for place in (first, url))
        source = opened.enter_context(open_repository(first, here, unsafe, create=False))
        coming = [
            EpochInfo(
                number, ckpt.metadata, timestamp(ckpt.created), sum(r.bytes_stored for r in ckpt.records.values())
            )
            for number in tier.waiting
            for ckpt in [source.checkpoint(number)]
        ]
        try:
            target = opened.enter_context(open_repository(url, there, unsafe, create=False))
        except RepositoryNotFoundError:
            return []
        return sorted(target.plan(policy, coming=coming).removed)


def _seconds(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    return seconds_of(text, option)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for limit, unit in ((120.0, "s"), (7200.0, "min"), (172_800.0, "h")):
        if seconds < limit:
            return f"{seconds / _UNITS[unit]:.0f} {unit}"
    return f"{seconds / _UNITS['d']:.0f} days"


def _print(found: list[TierStatus]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("tier", overflow="fold")
    for name in ("epochs", "newest", "age", "waiting", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for one in found:
        news = Text(clean(one.error), "bold red") if one.error else Text(_stuck(one), "yellow")
        number = "-" if one.newest is None else str(one.newest)
        count = "?" if one.epochs is None else str(one.epochs)
        waiting = Text(str(len(one.waiting)), "yellow" if one.waiting else "green")
        table.add_row(Text(clean(one.url)), count, number, _age(one.age), waiting, size(one.bytes_waiting), news)
    out().print(table)


def _stuck(one: TierStatus) -> str:
    return "; ".join(f"epoch {epoch}: {clean(reason)}" for epoch, reason in one.stuck.items())
