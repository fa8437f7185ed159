"""How sizes and texts are shown to people, on a terminal as on a page."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes in binary units with three digits: ``512 B``, ``1.50 KiB``, ``31.5 MiB``."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while value >= 1023.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    if units[0] == "B":
        return f"{int(value)} B"
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {units[0]}"


def ratio(state: int, stored: int) -> str:
    """How many bytes of state one stored byte holds."""
    return f"{state / stored:.2f}" if stored and state else "-"


def clean(text: str) -> str:
    """``text`` with everything escaped that could move a cursor or break a line: it may come from anywhere."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
