"""How the commands show values to people, and how they turn them into JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from ckptstore.report.charts import between
from ckptstore.watching.origin import KEY
from ckptstore.wording import clean, ratio, size

__all__ = ["ago", "brief", "clean", "plain", "ratio", "short_key", "size", "sparkline", "to_json"]

_BARS = "▁▂▃▄▅▆▇█"


def ago(created: str, now: datetime | None = None) -> str:
    """A point in time (RFC 3339) as its distance from now; as it is where that makes no sense."""
    try:
        seconds = ((now or datetime.now(timezone.utc)) - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):
        return clean(created)
    if seconds < -60:  # another machine's clock
        return clean(created)
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h"), (math.inf, 86_400, "days")):
        if seconds < limit:
            return f"{max(0, int(seconds // unit))} {name} ago"
    return clean(created)


def brief(metadata: Mapping[str, Any]) -> str:
    """Metadata in one short line: ``loss=2.31, tokens=40960``."""
    return ", ".join(f"{clean(key)}={_value(value)}" for key, value in metadata.items() if key != KEY)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = clean(value if isinstance(value, str) else repr(value))
    return text if len(text) <= 40 else text[:39] + "…"


def short_key(key: str) -> str:
    """An object's key with its digests cut to eight digits, for a line of eighty columns."""
    return "/".join(part if len(part) < 32 or not part.isalnum() else part[:8] + "…" for part in key.split("/"))


def sparkline(values: Sequence[float]) -> str:
    """Values as one line of bars, the lowest and the highest as the shortest and the tallest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join(_BARS[round(between(low, value, high) * (len(_BARS) - 1)) if low < high else 0] for value in values)


def plain(value: Any) -> Any:
    """``value`` as strict JSON can hold it: what JSON has no word for becomes text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return repr(value)


def to_json(value: Any, *, line: bool = False) -> str:
    """Strict JSON in ASCII, for every terminal and every parser; in one line, for a stream of such."""
    return json.dumps(plain(value), indent=None if line else 2, allow_nan=False)
