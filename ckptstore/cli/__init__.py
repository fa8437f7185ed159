"""The ``ckptstore`` command: one file a command, shared parts in ``_common`` and ``_format``."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (default: ``sys.argv[1:]``) and return its exit code.

    0 good · 1 usage · 2 other · 3 not found · 4 corrupt · 5 store unavailable
    """
    from ckptstore.cli._app import run  # typer and rich are loaded by those who use the command only

    return run(argv)
