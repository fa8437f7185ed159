"""``ckptstore quarantine``: set an epoch aside, or release it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from ckptstore.cli._common import Debug, Json, Options, Unsafe, Url, open_repository, out, print_json
from ckptstore.cli._format import clean, to_json
from ckptstore.errors import InvalidArgumentError
from ckptstore.manifest import check_epoch

_Epoch = Annotated[int, typer.Argument(metavar="EPOCH", show_default=False, help="The epoch.")]
_Reason = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", show_default=False, help="For whoever finds it later.")
]
_Release = Annotated[bool, typer.Option("--release", help="Take it out of quarantine.")]


def quarantine(
    url: Url,
    epoch: _Epoch,
    reason: _Reason = None,
    release: _Release = False,
    json: Json = False,
    option: Options = None,
    unsafe: Unsafe = False,
    debug: Debug = False,
) -> None:
    """Set an epoch aside: nobody resumes from it or builds on it, and no prune takes it, until it is released.

    It stays as it is and can be restored by its number. A save that replaces it is not set aside.

    Example: [cyan]ckptstore quarantine s3://runs/llama 7 --reason "the loss exploded"[/cyan]
    """
    check_epoch(epoch)
    if (reason is None) == (not release):
        raise InvalidArgumentError("say why with --reason TEXT, or --release it")
    with open_repository(url, option, unsafe, create=False) as repo:
        was = epoch in repo.quarantined()
        if reason is not None:
            repo.quarantine(epoch, reason)
        else:
            was = repo.release(epoch)
        if json:
            state = {"quarantined": not release, "was_quarantined": was, "reason": reason}
            print_json(to_json({"url": repo.url, "epoch": epoch, **state}))
            return
        what = f"is quarantined: {clean(reason)}" if reason is not None else "was not quarantined"
        if release and was:
            what = "is released from quarantine"
        out().print(Text(f"epoch {epoch} of {clean(repo.url)} {what}"))
