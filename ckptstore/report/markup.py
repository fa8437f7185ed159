"""Small pieces of HTML. Whatever comes from a repository is hostile: it becomes text here, and nowhere else markup."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from ckptstore.wording import clean

_LONGEST = 160
_SHORT = 20  # characters that are better scrolled to than broken
_LONGEST_TEXT = 4000
_UNCUT = 2**31  # attributes are ours: a curve is long
_YEAR_9999 = 253_402_300_000


class Html(str):
    """Text that is markup already. Everything else is escaped before it is put into a page."""

    __slots__ = ()


def esc(value: object, longest: int = _LONGEST) -> Html:
    """``value`` as text of a page or of a quoted attribute: control and bidi characters made visible, long ones cut."""
    if isinstance(value, Html):
        return value
    text = str(value)
    return Html(html.escape(clean(text if len(text) <= longest else text[: longest - 1] + "…"), quote=True))


def tag(name: str, *content: object, **attributes: object) -> Html:
    """An element; what is not markup is escaped.

    A trailing underscore of an attribute's name is dropped, others become hyphens; None leaves the attribute out.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{esc(value, _UNCUT)}"')
    return Html(f"<{' '.join(words)}>{join(content)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    """Pieces one after the other."""
    return Html(between.join(esc(part, _LONGEST_TEXT) for part in parts))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], *, left: Sequence[int] = (0,)) -> Html:
    """A table that scrolls by itself where it is too wide. Columns but those of ``left`` hold numbers."""

    def cell(number: int, value: object) -> Html:
        kind = "n" if number not in left else "short" if len(str(value)) <= _SHORT else None
        if number == 0:
            return tag("th", value, scope="row", class_=kind)
        return tag("td", value, class_=kind)

    top = tag("tr", *(tag("th", name, scope="col", class_=None if i in left else "n") for i, name in enumerate(head)))
    body = join(tag("tr", *(cell(i, value) for i, value in enumerate(row))) for row in rows)
    inner = tag("table", tag("caption", caption), tag("thead", top), tag("tbody", body))
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def section(name: str, title: str, *content: object) -> Html:
    """A part of the page with a title, to which ``#name`` leads."""
    return tag("section", tag("h2", title, id=f"h-{name}"), *content, id=name, aria_labelledby=f"h-{name}")


def details(summary: str, content: Html) -> Html:
    """What is there for whoever wants it; printed in full."""
    return tag("details", tag("summary", summary), content)


def code(text: str) -> Html:
    """A command, or the name of something."""
    return tag("code", esc(text, 1000))


def when(seconds: float, *, short: bool = False) -> str:
    """A point in time in UTC: ``3 Dec 2026, 14:05 UTC``."""
    if not 0 < seconds < _YEAR_9999:
        return "time unknown"
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return f"{moment.day} {moment:%b}, {moment:%H:%M}" if short else f"{moment.day} {moment:%b %Y}, {moment:%H:%M} UTC"


def time_tag(seconds: float) -> Html:
    """The same for people and for programs."""
    if not 0 < seconds < _YEAR_9999:
        return esc(when(seconds))
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return tag("time", when(seconds), datetime=moment.isoformat(timespec="seconds"))


def lasting(seconds: float) -> str:
    """A length of time in its two largest units at most: ``42 s``, ``12 min``, ``3 h 10 min``, ``5 days``."""
    if not math.isfinite(seconds):
        return "unknown"
    seconds = max(0.0, seconds)
    if seconds < 59.5:
        return f"{seconds:.0f} s" if seconds >= 1 or seconds == 0 else "less than 1 s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h" + (f" {minutes} min" if minutes and hours < 10 else "")
    return f"{round(seconds / 86_400)} days"


def number(value: float) -> str:
    """A metric with four digits, or all of a whole number below 10 million; NaN and infinity by name."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value}"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 10_000_000 else f"{value:.4g}"


def count(n: int, what: str, many: str | None = None) -> str:
    """``1 epoch``, ``1,200 epochs``."""
    return f"{n:,} {what if n == 1 else many or what + 's'}"


def percent(part: float, whole: float) -> str:
    """``42 %``; never 0 % or 100 % for what is only close to it."""
    if whole <= 0:
        return "–"
    share = 100 * part / whole
    if 0 < share < 1:
        return "under 1 %"
    if 99 < share < 100:
        return "over 99 %"
    return f"{share:.0f} %"
