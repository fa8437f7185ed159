"""What ``watch`` and ``import`` share: how a folder is read, and how they say what became of an epoch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

import typer
from rich.text import Text

from ckptstore import Finding
from ckptstore.cli._common import out, print_json
from ckptstore.cli._format import clean, size, to_json

Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="NAME",
        show_default=False,
        help="How the trainer names its files: burn, hf, lightning or numbered. Default: by what there is.",
    ),
]
Pattern = Annotated[
    str | None,
    typer.Option(
        "--pattern",
        metavar="TEXT",
        show_default=False,
        help="Names of your own, e.g. '{record}-{epoch}.mpk' or 'step_{epoch}/{record}'.",
    ),
]
Need = Annotated[
    str | None,
    typer.Option(
        "--need",
        metavar="RECORDS",
        show_default=False,
        help="Records without which no epoch is complete, e.g. model,optimizer,scheduler. Default: those that come "
        "together in this layout, and those that other epochs have.",
    ),
]
ReplaceForeign = Annotated[
    bool,
    typer.Option("--replace", help="Replace also epochs of the same number that come from elsewhere."),
]
AcceptUnproven = Annotated[
    bool,
    typer.Option(
        "--accept-unproven",
        help="Take a file whose format cannot prove that it is whole for whole when it is still.",
    ),
]
BAD = frozenset({"torn", "refused", "conflict"})
_STYLES = {**dict.fromkeys(("saved", "replaced", "due"), "green"), **dict.fromkeys(BAD, "bold red")}


def names(text: str | None) -> list[str]:
    """``a,b`` as a list."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def tell(finding: Finding, json: bool) -> None:
    """One line on stdout."""
    if json:
        print_json(to_json(as_json(finding), line=True))
        return
    about = [f"{len(finding.files)} files, {size(finding.nbytes)}"]
    if finding.kind in ("saved", "replaced"):
        about.append(f"in {finding.seconds:.1f} s")
    if finding.reason:
        about.append(
            clean(finding.reason).replace("`need`", "--need").replace("`accept_unproven`", "--accept-unproven")
        )
    line = Text.assemble(f"epoch {finding.epoch}: ", (finding.kind, _STYLES.get(finding.kind, "")), "  ")
    out().print(line + Text(", ".join(about)))


def as_json(finding: Finding) -> dict[str, Any]:
    """Everything about it."""
    facts = {name: getattr(finding, name) for name in Finding.__dataclass_fields__}
    return {**facts, "files": dict(finding.files), "seconds": round(finding.seconds, 3)}


def counted(findings: Collection[Finding]) -> str:
    """How many epochs of each kind."""
    kinds = [finding.kind for finding in findings]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
