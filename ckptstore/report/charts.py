"""Charts as SVG. A drawing is stretched to the width of the page, lines and dots are not; all words are HTML around it,
so that they have the same size on a phone as on a screen. To whoever cannot see it, title and ``desc`` tell it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptstore.report.markup import Html, esc, join, number, tag, when

COLUMNS = 240
"""More points than this are put together in groups."""

WIDTH = 1000.0
HEIGHT = 100.0
_LOG_FROM = 1000  # the largest value by the smallest, from which on a scale of powers shows more


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring values as one: where, the mean, the lowest and the highest."""

    x: float
    mean: float
    low: float
    high: float


def grouped(xs: Sequence[float], ys: Sequence[float], columns: int = COLUMNS) -> list[Group]:
    """Finite values in order of ``xs``; more than ``columns`` of them are put together, equally many in each group."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    size = max(1, math.ceil(len(points) / columns))
    groups = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [y for _, y in part]
        mean = math.fsum(y / len(values) for y in values)
        groups.append(Group(part[len(part) // 2][0], mean, min(values), max(values)))
    return groups


def between(low: float, value: float, high: float) -> float:
    """Where a value lies, from 0 at ``low`` to 1 at ``high``, which is larger. All are finite."""
    if math.isinf(high - low):
        low, value, high = low / 2, value / 2, high / 2
    return (value - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places: linear, or by powers."""

    low: float
    high: float
    span: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.high <= self.low:
            return self.span / 2
        if self.log:
            # Differences, because the largest by the smallest may overflow.
            low = math.log(self.low)
            return self.span * (math.log(value) - low) / (math.log(self.high) - low)
        return self.span * between(self.low, value, self.high)


def svg(drawing: Iterable[Html], title: str, description: str, name: str) -> Html:
    """A drawing of ``WIDTH`` by ``HEIGHT`` that is stretched. ``name`` is unique in the page."""
    return tag(
        "svg",
        tag("title", esc(title), id=f"{name}-t"),
        tag("desc", esc(description, 1000), id=f"{name}-d"),
        *drawing,
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        preserveAspectRatio="none",
        role="img",
        aria_labelledby=f"{name}-t {name}-d",
    )


def line(metric: str, xs: Sequence[float], ys: Sequence[float], description: str, name: str) -> Html:
    """A curve, with the band between lowest and highest where points are grouped. Marks show where it is not finite."""
    groups = grouped(xs, ys)
    x = Scale(min(xs), max(xs), WIDTH)
    lows, highs = [g.low for g in groups], [g.high for g in groups]
    low, high = (min(lows), max(highs)) if groups else (0.0, 0.0)
    log = low > 0 and high / low > _LOG_FROM
    y = Scale(low, high, HEIGHT, log)

    def at(group: Group, value: float) -> str:
        return f"{x(group.x):.1f} {HEIGHT - y(value):.1f}"

    drawing = []
    if any(g.low < g.high for g in groups):
        there = [at(g, g.high) for g in groups]
        back = [at(g, g.low) for g in reversed(groups)]
        drawing.append(tag("path", class_="band", d="M" + " L".join(there + back) + "Z"))
    if len(groups) > 1:
        drawing.append(tag("path", class_="curve", d="M" + " L".join(at(g, g.mean) for g in groups)))
    if 0 < len(groups) <= 40:
        drawing += [_dot(at(g, g.mean), "dot", f"{g.x:.0f}: {number(g.mean)}") for g in groups]
    drawing += [_dot(f"{x(place):.1f} {HEIGHT:.0f}", "gone", "") for place in _thinly(xs, ys)]
    above = number(high) + (" (scale of powers)" if log else "")
    return _framed(svg(drawing, metric, description, name), above if groups else "", number(low) if groups else "")


def _dot(place: str, kind: str, title: str) -> Html:
    # A line without length has round ends: a circle that no stretching deforms.
    return tag("path", tag("title", title) if title else Html(""), class_=kind, d=f"M{place}h0")


def _thinly(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    places = [x for x, y in zip(xs, ys, strict=True) if not math.isfinite(y)]
    return places[:: max(1, math.ceil(len(places) / 60))]


def bars(layers: Sequence[tuple[str, Sequence[float]]], title: str, description: str, name: str, top: str) -> Html:
    """Bars of layers, one above the other. ``layers``: class, and a value for each bar. ``top`` names the highest."""
    sums = [math.fsum(column) for column in zip(*(values for _, values in layers), strict=True)]
    high = max(sums, default=0) or 1.0
    step = WIDTH / max(1, len(sums))
    wide = step * (0.8 if len(sums) <= 60 else 1.0)
    below = [0.0] * len(sums)
    drawing = []
    for kind, values in layers:
        parts = []
        for i, value in enumerate(values):
            tall = HEIGHT * value / high
            if tall > 0:
                left = i * step + (step - wide) / 2
                parts.append(f"M{left:.1f} {HEIGHT - below[i]:.1f}h{wide:.1f}v{-tall:.1f}h{-wide:.1f}z")
                below[i] += tall
        if parts:
            drawing.append(tag("path", class_=kind, d="".join(parts)))
    return _framed(svg(drawing, title, description, name), top, "0")


def ticks(marks: Sequence[tuple[float, str, str]], title: str, description: str, name: str) -> Html:
    """Upright marks. ``marks``: place from 0 to 1, class, and what a pointer is told."""
    drawing = [
        tag("path", tag("title", told) if told else Html(""), class_=kind, d=f"M{WIDTH * place:.1f} 0v{HEIGHT:.0f}")
        for place, kind, told in marks
    ]
    return tag("div", svg(drawing, title, description, name), class_="plot strip")


def share_bar(parts: Sequence[tuple[str, float, str]], title: str, name: str) -> Html:
    """One bar of parts: class, size, and what each is."""
    whole = math.fsum(size for _, size, _ in parts) or 1.0
    left, drawing = 0.0, []
    for kind, size, told in parts:
        wide = WIDTH * size / whole
        if wide > 0:
            shape = f"M{left:.1f} 0h{wide:.1f}v{HEIGHT:.0f}h{-wide:.1f}z"
            drawing.append(tag("path", tag("title", told), class_=kind, d=shape))
            left += wide
    told = "; ".join(what for _, size, what in parts if size)
    return tag("div", svg(drawing, title, told, name), class_="plot share")


def spark(values: Sequence[float], label: str, name: str) -> Html:
    """A small curve for a cell of a table, from zero up."""
    groups = grouped(range(len(values)), values, 60)
    high = max((g.high for g in groups), default=0) or 1.0
    x = Scale(0, max(1, len(values) - 1), WIDTH)
    points = [f"{x(g.x):.0f} {HEIGHT - 0.9 * HEIGHT * g.mean / high:.0f}" for g in groups]
    if len(points) == 1:
        points.append(f"{WIDTH:.0f} {points[0].split()[1]}")
    drawing = [tag("path", class_="curve", d="M" + " L".join(points))] if points else []
    return tag("div", svg(drawing, label, "", name), class_="plot spark")


def meter(share: float) -> Html:
    """A share from 0 to 1 as a short bar; the number stands beside it in the table."""
    wide = 100 * max(0.0, min(1.0, share))
    inner = tag("rect", width=f"{wide:.1f}", height="8", class_="fill-new")
    return tag("svg", inner, class_="meter", viewBox="0 0 100 8", preserveAspectRatio="none", aria_hidden="true")


def axis(labels: Sequence[object]) -> Html:
    """Words below a chart, from its left edge to its right."""
    return tag("div", *(tag("span", label) for label in labels), class_="axis", aria_hidden="true")


def epochs_axis(epochs: Sequence[int], times: Sequence[float], *, even: bool) -> Html:
    """The first, the middle and the last epoch of a chart, and when they were saved.

    Args:
        even: the epochs stand side by side, whatever their numbers; else the middle one is left out if it would stand
            elsewhere.
    """
    first, last = epochs[0], epochs[-1]
    middle = (len(epochs) - 1) // 2
    if not even:
        middle = min(range(len(epochs)), key=lambda i: abs(2 * epochs[i] - first - last))
    beside = not even and 10 * abs(2 * epochs[middle] - first - last) > last - first
    chosen = sorted({0, len(epochs) - 1} | ({middle} if len(epochs) > 4 and not beside else set()))
    return axis([join([f"{epochs[i]:,}", tag("small", when(times[i], short=True))]) for i in chosen])


def legend(entries: Sequence[tuple[str, object]]) -> Html:
    """What the colours mean."""
    return tag("ul", *(tag("li", tag("i", class_=kind), text) for kind, text in entries), class_="legend")


def _framed(drawing: Html, top: str, bottom: str) -> Html:
    labels = tag("span", top, class_="top"), tag("span", bottom, class_="bottom")
    return tag("div", drawing, *labels, class_="plot framed")
