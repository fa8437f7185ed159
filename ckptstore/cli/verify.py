"""``ckptstore verify``: is every byte of every checkpoint what was written?"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptstore import EpochHealth, VerifyReport
from ckptstore.cli._common import (
    Debug,
    Json,
    Options,
    Unsafe,
    Url,
    checked_epoch,
    open_repository,
    out,
    print_json,
    progress_bar,
)
from ckptstore.cli._format import clean, size, to_json
from ckptstore.errors import InvalidArgumentError

_CORRUPT = 4

_Epoch = Annotated[int | None, typer.Option("--epoch", metavar="N", show_default=False, help="Default: all epochs.")]
_Quick = Annotated[bool, typer.Option("--quick", help="Check names and sizes only; read no chunk.")]
_Sample = Annotated[
    str | None,
    typer.Option(
        "--sample", metavar="SHARE", show_default=False, help="Read only so much, chosen by chance: 5% or 0.05."
    ),
]
_Quarantine = Annotated[bool, typer.Option("--quarantine", help="Set aside what is damaged: see quarantine.")]
_Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where a verify --resume ended that did not come to its end.")
]


def verify(
    url: Url,
    epoch: _Epoch = None,
    quick: _Quick = False,
    sample: _Sample = None,
    quarantine: _Quarantine = False,
    resume: _Resume = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Read every byte and check it. Damaged objects are listed, and the exit code is 4.

    What several epochs share is read once. --sample reads a part of each epoch, another one each time.

    Example: [cyan]ckptstore verify gs://runs/llama --epoch 7[/cyan]
    """
    number, share = checked_epoch(epoch), _share(sample)
    if quick and sample is not None:
        raise InvalidArgumentError("--quick reads no chunk, so there is nothing to sample: give one of the two")
    if resume and (quick or sample is not None or epoch is not None):
        raise InvalidArgumentError("--resume is for every byte of all epochs: without --quick, --sample and --epoch")
    begun = time.perf_counter()
    with open_repository(url, option, unsafe, create=False) as repo:
        with progress_bar("verifying") as move:
            report = repo.verify(
                number, deep=not quick, progress=move, sample=share, quarantine=quarantine, resume=resume
            )
        seconds = time.perf_counter() - begun
        if json:
            print_json(to_json(_as_json(repo.url, report, seconds)))
        else:
            _print(repo.url, report, seconds)
    if not report.ok:
        raise typer.Exit(_CORRUPT)


def _share(text: str | None) -> float:
    if text is None:
        return 1.0
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidArgumentError(f"--sample {clean(text)!r} is no share: give e.g. 5% or 0.05")
    return share


def _as_json(url: str, report: VerifyReport, seconds: float) -> dict[str, Any]:
    return {
        "url": url,
        "ok": report.ok,
        "deep": report.deep,
        "sample": report.sample,
        "seconds": round(seconds, 3),
        "epochs": [
            {
                "epoch": health.epoch,
                "generation": health.generation,
                "ok": health.ok,
                "bytes_state": health.bytes_state,
                "problems": [{"key": problem.key, "reason": problem.reason} for problem in health.problems],
            }
            for health in report.epochs
        ],
    }


def _print(url: str, report: VerifyReport, seconds: float) -> None:
    console = out()
    if not report.epochs:
        console.print(Text(f"{clean(url)} holds no checkpoint yet."))
        return
    how = "every byte read" if report.deep else "names and sizes"
    if report.deep and report.sample < 1:
        how = f"{100 * report.sample:.3g}% of the chunks read"
    good = [health for health in report.epochs if health.ok]
    if good:
        state = size(sum(health.bytes_state for health in good))
        console.print(
            Text.assemble(("intact", "bold green"), f"   {_numbers(good)}: {state} of state, {how}, in {seconds:.1f} s")
        )
    bad = [health for health in report.epochs if not health.ok]
    if bad:
        console.print(Text.assemble(("damaged", "bold red"), f"  {_numbers(bad)}"))
        _print_problems(console, bad)


def _numbers(healths: list[EpochHealth]) -> str:
    numbers = [str(health.epoch) for health in healths]
    shown = numbers if len(numbers) <= 12 else [*numbers[:5], "…", *numbers[-5:]]
    return f"{'epoch' if len(numbers) == 1 else f'{len(numbers)} epochs:'} {', '.join(shown)}"


def _print_problems(console: Console, bad: list[EpochHealth]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column("object", overflow="fold")
    table.add_column("what is wrong", overflow="fold")
    for health in bad:
        for problem in health.problems:
            reason = problem.reason.replace(problem.key, "").strip(" :")
            table.add_row(str(health.epoch), Text(clean(problem.key), "red"), Text(clean(reason)))
    console.print()
    console.print(table)
