"""``ckptstore mirror``: bring the epochs of one repository into another."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.text import Text

from ckptstore import MirrorReport, parse_policy
from ckptstore.cli._common import (
    Debug,
    DryRun,
    Json,
    Options,
    Unsafe,
    open_repository,
    open_target,
    out,
    print_json,
    progress_bar,
    url_of,
)
from ckptstore.cli._copies import Limit, Source, Target, ToOptions, as_json, chosen_epochs, print_copies, rate
from ckptstore.cli._format import clean, size, to_json
from ckptstore.errors import EpochNotFoundError

_CONFLICT, _CORRUPT = 1, 4

_Epochs = Annotated[
    str | None,
    typer.Option("--epochs", metavar="LIST", show_default=False, help="E.g. 7, 1,5-9 or 100-. Default: all."),
]
_Keep = Annotated[
    str | None,
    typer.Option(
        "--keep",
        metavar="POLICY",
        show_default=False,
        help="Only what it keeps, e.g. 'KeepLast(3)': see prune.",
    ),
]


def mirror(
    source: Source,
    target: Target,
    epochs: _Epochs = None,
    keep: _Keep = None,
    limit: Limit = None,
    dry_run: DryRun = False,
    json: Json = False,
    option: Options = None,
    to_option: ToOptions = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Copy the epochs that DST lacks from SRC, the newest first; each appears in DST when all of it is there.

    Every byte is checked before it is sent; what DST has is not sent again. It can be killed and called again at any
    time, also by several at once. Epochs that DST alone has stay. Damaged epochs of SRC are reported and skipped (exit
    code 4), and so are numbers under which DST has another content (exit code 1). Quarantined epochs are left out. What
    is pinned in SRC and is in DST is pinned there too; nothing is unpinned.

    Example: [cyan]ckptstore mirror /nvme/run s3://runs/llama --limit 50MB/s[/cyan]
    """
    bytes_a_second, policy = rate(limit), None if keep is None else parse_policy(keep)
    begun = time.perf_counter()
    with open_repository(source, option, False, create=False) as here:
        there_now = here.epochs() if epochs else []
        wanted = chosen_epochs(epochs, there_now)
        for epoch in wanted or ():
            if epoch not in there_now:  # found out before the target is made
                raise EpochNotFoundError(f"there is no epoch {epoch} in {here.url}", epoch=epoch)
        aside = here.quarantined() if wanted is None else {}
        with open_target(target, to_option, unsafe, dry_run) as there:
            with progress_bar("mirroring") as move:
                report = here.mirror(there, wanted, policy, limit=bytes_a_second, progress=move, dry_run=dry_run)
            urls = here.url, url_of(there, target)
    seconds = time.perf_counter() - begun
    if json:
        facts = {"source": urls[0], "target": urls[1], "ok": report.ok, "dry_run": dry_run}
        facts["bytes_sent"] = report.bytes_sent
        facts["left_out"], facts["pins"] = aside, dict(report.pins)
        print_json(to_json({**facts, "seconds": round(seconds, 3), "epochs": [as_json(c) for c in report.epochs]}))
    else:
        _print(urls[1], report, seconds)
        for epoch, why in report.pins.items():
            out().print(Text(f"epoch {epoch} {'would be' if dry_run else 'is now'} pinned there too: {clean(why)}"))
        for epoch, why in aside.items():
            out().print(Text(f"epoch {epoch} was left out: quarantined: {clean(why)}; --epochs copies it", "yellow"))
    if not report.ok:
        raise typer.Exit(_CORRUPT if report.of("damaged") else _CONFLICT)


def _print(target: str, report: MirrorReport, seconds: float) -> None:
    print_copies(report.epochs, dry_run=report.dry_run)
    words = {
        "copied": "to copy" if report.dry_run else "copied",
        "there": "there already",
        "newer": "newer there",
        "conflict": "of another content there",
        "damaged": "damaged in the source",
        "gone": "deleted meanwhile",
    }
    counts = [f"{len(report.of(outcome))} {word}" for outcome, word in words.items() if report.of(outcome)]  # type: ignore[arg-type]
    counted = ", ".join(counts) or "the source holds no checkpoint yet"
    if report.dry_run:
        state = sum(copy.bytes_state for copy in report.epochs if copy.outcome == "copied")
        out().print(Text(f"{clean(target)}: {counted}; {size(state)} of state"))
        return
    out().print(Text(f"{clean(target)}: {counted}; sent {size(report.bytes_sent)} in {seconds:.1f} s"))
