"""``ckptstore pin``, ``unpin`` and ``rm``: single epochs, by hand."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from ckptstore.cli._common import (
    Debug,
    DryRun,
    Json,
    Options,
    Unsafe,
    Url,
    Yes,
    ask,
    open_repository,
    out,
    print_json,
)
from ckptstore.cli._format import clean, to_json
from ckptstore.errors import EpochNotFoundError, InvalidArgumentError
from ckptstore.manifest import check_epoch

_Epoch = Annotated[int, typer.Argument(metavar="EPOCH", show_default=False, help="The epoch.")]
_Epochs = Annotated[list[int], typer.Argument(metavar="EPOCH...", show_default=False, help="The epochs.")]
_Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", show_default=False, help="For whoever finds it later.")
]
_Force = Annotated[bool, typer.Option("--force", help="Also what is pinned or held by a reader.")]


def pin(
    url: Url,
    epoch: _Epoch,
    reason: _Reason,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Keep an epoch whatever a policy says, until it is unpinned.

    Example: [cyan]ckptstore pin s3://runs/llama 7 --reason "the one in the paper"[/cyan]
    """
    check_epoch(epoch)
    with open_repository(url, option, unsafe, create=False) as repo:
        repo.pin(epoch, reason)
        if json:
            print_json(to_json({"url": repo.url, "epoch": epoch, "reason": reason}))
        else:
            out().print(Text(f"epoch {epoch} of {clean(repo.url)} is pinned: {clean(reason)}"))


def unpin(
    url: Url,
    epoch: _Epoch,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Leave an epoch to the policies again.

    Example: [cyan]ckptstore unpin s3://runs/llama 7[/cyan]
    """
    check_epoch(epoch)
    with open_repository(url, option, unsafe, create=False) as repo:
        was = repo.unpin(epoch)
        if json:
            print_json(to_json({"url": repo.url, "epoch": epoch, "was_pinned": was}))
        else:
            out().print(Text(f"epoch {epoch} of {clean(repo.url)} {'is not pinned any more' if was else 'had no pin'}"))


def rm(
    url: Url,
    epochs: _Epochs,
    force: _Force = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Delete epochs by number: also the newest, also damaged ones. Those that are pinned, or held by
    a reader, only with --force.

    Example: [cyan]ckptstore rm s3://runs/llama 3 4[/cyan]
    """
    wanted = sorted({check_epoch(epoch) for epoch in epochs})
    with open_repository(url, option, unsafe, create=False) as repo:
        missing = sorted({*wanted} - {*repo.epochs()})
        if missing:
            names, there = (
                ", ".join(map(str, missing)),
                "there is no epoch" if len(missing) == 1 else "there are no epochs",
            )
            raise EpochNotFoundError(f"{there} {names} in {repo.url}; nothing was deleted", epoch=missing[0])
        pinned = {epoch: why for epoch, why in repo.pins().items() if epoch in wanted}
        if pinned and not force:
            epoch, why = next(iter(pinned.items()))
            raise InvalidArgumentError(f"epoch {epoch} is pinned ({why}): unpin it or add --force; nothing was deleted")
        held = {epoch: why for epoch, why in repo.holds().items() if epoch in wanted}
        if held and not force:
            epoch, why = next(iter(held.items()))
            raise InvalidArgumentError(f"epoch {epoch} is {why}: wait for it or add --force; nothing was deleted")
        if not dry_run:
            ask(f"Delete {'epoch' if len(wanted) == 1 else 'epochs'} {', '.join(map(str, wanted))} of {repo.url}?", yes)
            for epoch in wanted:
                repo.delete(epoch)
        if json:
            print_json(to_json({"url": repo.url, "dry_run": dry_run, "removed": wanted}))
        else:
            verb = "would be deleted" if dry_run else "deleted"
            out().print(Text(f"{', '.join(map(str, wanted))}: {verb}"))
