"""The sections of the page about what is there: time line, metrics, space, records, arrays, epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from ckptstore.report import charts
from ckptstore.report.facts import MAX_RECORDS, Facts, Metric, Row
from ckptstore.report.markup import (
    Html,
    count,
    details,
    esc,
    join,
    lasting,
    number,
    percent,
    section,
    table,
    tag,
    time_tag,
    when,
)
from ckptstore.wording import ratio, size

FATES = {"kept": "kept", "goes": "would go", "bad": "damaged"}

_BARS = 120
_CHARTS = 12  # more metrics than these stand in the table only
_ROWS = 200  # newest epochs in the table of all, and
_MORE_ROWS = 80  # of the others those that are pinned, quarantined or damaged
_SPARKS = 40


def time_line(facts: Facts, damaged: dict[int, str]) -> Html:
    """When epochs were saved, and what becomes of each."""
    rows = facts.rows
    fates = [fate(row.epoch, facts, damaged) for row in rows]
    told = f"{count(len(rows), 'epoch')}: " + ", ".join(f"{fates.count(f)} {word}" for f, word in FATES.items())
    title = "Epochs by the time that they were saved"
    many = len(rows) > charts.COLUMNS
    drawing = _density(rows, fates, title, told) if many else charts.ticks(_marks(facts, fates), title, told, "tl")
    ends = sorted({min(row.saved for row in rows), max(row.saved for row in rows)})
    keys = [(f"fill-{f}", f"{word} ({fates.count(f):,})") for f, word in FATES.items() if f in fates]
    if facts.pins and not many:
        keys.append(("tick-pin", f"pinned ({len(facts.pins):,})"))
    if facts.quarantined and not many:
        keys.append(("tick-aside", f"quarantined ({len(facts.quarantined):,})"))
    parts = [tag("p", _cadence(rows)), drawing, charts.axis([when(at) for at in ends]), charts.legend(keys)]
    if many:
        parts.append(_note(f"{len(rows):,} epochs are counted in {_BARS} slices of time."))
    if rows[-1].saved < rows[0].saved:
        parts.append(_note("Epochs were not saved in the order of their numbers."))
    return section("timeline", "Time line", *parts)


def fate(epoch: int, facts: Facts, damaged: dict[int, str]) -> str:
    """What becomes of an epoch: "kept", "goes", or "bad" where it is damaged."""
    if epoch in damaged:
        return "bad"
    return "goes" if facts.usage.plan is not None and epoch in facts.usage.plan.removed else "kept"


def _places(rows: Sequence[Row]) -> list[float]:
    """Where each epoch stands in time, from 0 to 1; side by side where there is but one time."""
    first, last = min(row.saved for row in rows), max(row.saved for row in rows)
    if last <= first:
        return [(i + 0.5) / len(rows) for i in range(len(rows))]
    return [0.005 + 0.99 * (row.saved - first) / (last - first) for row in rows]


def _marks(facts: Facts, fates: Sequence[str]) -> list[tuple[float, str, str]]:
    marks = []
    for row, place, kind in zip(facts.rows, _places(facts.rows), fates, strict=True):
        aside, pinned = row.epoch in facts.quarantined, row.epoch in facts.pins
        shape = " tick-aside" if aside else " tick-pin" if pinned else ""
        words = ", ".join([FATES[kind], *(["quarantined"] if aside else []), *(["pinned"] if pinned else [])])
        marks.append((place, f"tick-{kind}{shape}", f"epoch {row.epoch:,}, {when(row.saved)}: {words}"))
    return marks


def _density(rows: Sequence[Row], fates: Sequence[str], title: str, told: str) -> Html:
    counts = {kind: [0.0] * _BARS for kind in FATES}
    for place, kind in zip(_places(rows), fates, strict=True):
        counts[kind][min(_BARS - 1, int(place * _BARS))] += 1
    highest = int(max(map(sum, zip(*counts.values(), strict=True))))
    layers = [(f"fill-{kind}", counts[kind]) for kind in ("bad", "kept", "goes")]
    return charts.bars(layers, title, told, "tl", count(highest, "epoch"))


def _cadence(rows: Sequence[Row]) -> Html:
    if len(rows) == 1:
        return join(["One epoch, saved ", time_tag(rows[0].saved), "."])
    times = sorted(row.saved for row in rows)
    gaps = [after - before for before, after in pairwise(times)]
    usual, longest = median(gaps), max(gaps)
    text = f"{count(len(rows), 'epoch')} in {lasting(times[-1] - times[0])}, usually one every {lasting(usual)}"
    return esc(text + (f"; the longest gap was {lasting(longest)}." if longest > 2 * usual else "."))


def metrics(facts: Facts) -> Html:
    """Every number of the metadata as a curve."""
    if not facts.metrics:
        return section("metrics", "Metrics", tag("p", "The metadata of the epochs holds no numbers.", class_="dim"))
    every = sorted(facts.metrics, key=lambda metric: -len(metric.values))
    shown = every[:_CHARTS]
    figures = [_curve(metric, facts.rows, f"m{i}") for i, metric in enumerate(shown)]
    rows = [_metric_row(metric, facts.rows) for metric in every]
    head = ("metric", "epochs", "first", "last", "lowest", "at epoch", "highest", "at epoch", "NaN or infinite")
    parts = [tag("div", *figures, class_="grid"), details("Metrics in numbers", table("Metrics", head, rows))]
    if len(every) > len(shown):
        parts.append(_note(f"{len(every) - len(shown)} more metrics stand in the table only."))
    if facts.more_metrics:
        parts.append(_note(f"{count(facts.more_metrics, 'more name')} of numbers in the metadata are left out."))
    if any(len(metric.values) > charts.COLUMNS for metric in shown):
        text = f"At most {charts.COLUMNS} points a curve: the line is the mean of a group, the band reaches"
        parts.append(_note(f"{text} from its lowest to its highest value."))
    return section("metrics", "Metrics", *parts)


def _curve(metric: Metric, rows: Sequence[Row], name: str) -> Html:
    xs = [float(rows[i].epoch) for i in metric.rows]
    odd = sum(not math.isfinite(value) for value in metric.values)
    _, _, _, last, low, low_at, high, high_at, _ = _metric_row(metric, rows)
    told = f"last {last}, lowest {low} at epoch {low_at}, highest {high} at epoch {high_at}"
    if odd:
        told += f", not a finite number in {count(odd, 'epoch')}"
    caption = tag("figcaption", tag("span", esc(metric.name), class_="name"), tag("b", last))
    drawing = charts.line(metric.name, xs, metric.values, told, name)
    axis = charts.epochs_axis([rows[i].epoch for i in metric.rows], [rows[i].saved for i in metric.rows], even=False)
    facts = tag("p", f"lowest {low} at {low_at} · highest {high} at {high_at}", class_="dim small")
    odd_note = tag("p", f"NaN or infinite in {count(odd, 'epoch')}", class_="bad small") if odd else Html("")
    return tag("figure", caption, drawing, axis, facts, odd_note)


def _metric_row(metric: Metric, rows: Sequence[Row]) -> tuple[str, ...]:
    values = [(value, i) for value, i in zip(metric.values, metric.rows, strict=True) if math.isfinite(value)]
    odd = len(metric.values) - len(values)
    ends = ("–", "–", "–", "–")
    if values:
        low, high = min(values), max(values)
        ends = (number(low[0]), f"{rows[low[1]].epoch:,}", number(high[0]), f"{rows[high[1]].epoch:,}")
    first, last = number(metric.values[0]), number(metric.values[-1])
    return (esc(metric.name), f"{len(metric.values):,}", first, last, *ends, f"{odd:,}")


def space(facts: Facts) -> Html:
    """What takes how much, and what epochs share."""
    usage = facts.usage
    plan_frees = usage.bytes_freed
    parts = [
        ("fill-kept", max(0, usage.bytes_stored - plan_frees), "epochs that stay"),
        ("fill-goes", plan_frees, "a prune would free"),
        ("fill-debris", usage.bytes_debris, "debris, which gc removes"),
        ("fill-other", usage.bytes_in_progress, "saves under way"),
        ("fill-bad", usage.bytes_unknown, "perhaps needed by an epoch that cannot be read"),
        ("fill-rest", usage.bytes_other, "leases, pins and the reserve"),
    ]
    shown = [(kind, nbytes, f"{what}: {size(nbytes)}") for kind, nbytes, what in parts if nbytes]
    content = [
        charts.share_bar(shown, "What takes the space", "space"),
        charts.legend([(kind, told) for kind, _, told in shown]),
        _sharing(facts),
    ]
    if facts.rows:
        content.append(tag("div", _stored_chart(facts), _reuse_chart(facts), class_="grid two"))
        if len(facts.rows) > _BARS:
            text = f"{len(facts.rows):,} epochs are drawn as {_BARS} bars or fewer"
            content.append(_note(f"{text}: each is the mean of its group."))
    return section("space", "Space and reuse", *content)


def _sharing(facts: Facts) -> Html:
    usage = facts.usage
    one_by_one = sum(row.bytes_stored for row in usage.epochs)
    saved = max(0, one_by_one - usage.bytes_stored)
    rows = [
        ("state of all epochs, uncompressed", size(usage.bytes_state)),
        ("stored, if epochs shared nothing", size(one_by_one)),
        ("stored, each object once", size(usage.bytes_stored)),
        ("saved by sharing", f"{size(saved)} ({percent(saved, one_by_one)})"),
        ("bytes of state by stored byte", ratio(usage.bytes_state, usage.bytes_stored)),
        ("objects of epochs", f"{usage.objects:,}"),
    ]
    if usage.objects_missing:
        rows.append(("objects missing or cut", f"{usage.objects_missing:,}"))
    return table("What is shared", ("what", "value"), rows)


def _stored_chart(facts: Facts) -> Html:
    by_epoch = {row.epoch: row for row in facts.usage.epochs}
    found = [by_epoch.get(row.epoch) for row in facts.rows]
    alone = averaged([float(row.bytes_alone) if row else 0.0 for row in found])
    shared = averaged([float(row.bytes_shared) if row else 0.0 for row in found])
    top = size(max(map(sum, zip(alone, shared, strict=True)), default=0))
    own = size(sum(row.bytes_alone for row in facts.usage.epochs))
    told, title = f"up to {top} an epoch; {own} are needed by one epoch only", "Bytes that each epoch needs"
    drawing = charts.bars([("fill-shared", shared), ("fill-new", alone)], title, told, "stored", top)
    keys = charts.legend([("fill-new", "of this epoch alone"), ("fill-shared", "shared with others")])
    return tag("figure", tag("figcaption", title), drawing, _axis(facts.rows), keys)


def _reuse_chart(facts: Facts) -> Html:
    shares = [min(1.0, row.bytes_reused / row.bytes_state) if row.bytes_state else 0.0 for row in facts.rows]
    sent = [1.0 - share if row.bytes_state else 0.0 for row, share in zip(facts.rows, shares, strict=True)]
    state, reused = sum(row.bytes_state for row in facts.rows), sum(row.bytes_reused for row in facts.rows)
    told = f"{percent(reused, state)} of all state was there already and was not sent again"
    layers = [("fill-shared", averaged(shares)), ("fill-new", averaged(sent))]
    title = "Reuse from epoch to epoch"
    drawing = charts.bars(layers, title, told, "reuse", "100 %")
    keys = charts.legend([("fill-new", "sent"), ("fill-shared", f"reused ({percent(reused, state)} of all)")])
    return tag("figure", tag("figcaption", title), drawing, _axis(facts.rows), keys)


def averaged(values: Sequence[float]) -> list[float]:
    """At most ``_BARS`` values: means of groups of neighbours."""
    step = max(1, math.ceil(len(values) / _BARS))
    return [
        math.fsum(part) / len(part) for start in range(0, len(values), step) if (part := values[start : start + step])
    ]


def _axis(rows: Sequence[Row]) -> Html:
    return charts.epochs_axis([row.epoch for row in rows], [row.saved for row in rows], even=True)


def records(facts: Facts) -> Html:
    """Size and ratio of each record, in the newest epoch that has it and over time."""
    rows = []
    for i, record in enumerate(sorted(facts.records, key=lambda one: -max(one.stored, default=0))):
        last = max(n for n, nbytes in enumerate(record.stored) if nbytes or n == 0)
        state, stored = record.state[last], record.stored[last]
        course = [float(nbytes) for nbytes in record.stored if nbytes]
        curve = charts.spark(course, f"stored size of {record.name}", f"r{i}") if i < _SPARKS else "–"
        saving = join([charts.meter(stored / state if state else 0), f"{ratio(state, stored)}"], " ")
        epoch = f"{facts.rows[last].epoch:,}"
        rows.append((esc(record.name), f"{record.epochs:,}", epoch, size(state), size(stored), saving, curve))
    if not rows:
        return section("records", "Records", tag("p", "There are none.", class_="dim"))
    head = ("record", "epochs", "newest", "state", "stored", "ratio", "stored, over time")
    parts = [table("Records", head, rows)]
    if facts.more_records:
        others = count(facts.more_records, "other")
        parts.append(_note(f"Only the first {MAX_RECORDS} names are followed; {others} left out."))
    return section("records", "Records", *parts)


def arrays(facts: Facts) -> Html:
    """The largest arrays of the newest good epoch."""
    found = facts.arrays
    if found is None:
        why = "; ".join(facts.notes) or "There is no intact epoch to look at."
        return section("arrays", "Largest arrays", tag("p", why, class_="dim"))
    text = (
        f"Epoch {found.epoch:,} holds {count(found.count, 'array')} of {size(found.nbytes)}: "
        + ", ".join(f"{dtype} {percent(nbytes, found.nbytes)}" for dtype, nbytes in list(found.dtypes.items())[:6])
        + f". {percent(found.reused, found.nbytes)} was taken over from earlier epochs."
    )
    rows = [
        (
            esc(one.path),
            esc(one.record),
            esc(one.dtype, 40),
            esc("×".join(map(str, one.shape)) or "one number", 60),
            size(one.nbytes),
            percent(one.nbytes, found.nbytes),
            percent(one.reused, one.nbytes),
        )
        for one in found.largest
    ]
    head = ("array", "record", "type", "shape", "bytes", "of all", "unchanged since earlier")
    return section("arrays", "Largest arrays", tag("p", text), table("Largest arrays", head, rows, left=(0, 1, 2, 3)))


def epochs(facts: Facts, damaged: dict[int, str]) -> Html:
    """A line for each epoch; of very many the newest, and those that are special."""
    chosen = list(facts.rows[-_ROWS:])
    of_note = {*facts.pins, *facts.quarantined, *damaged}
    special = [row for row in facts.rows[:-_ROWS] if row.epoch in of_note]
    chosen = [*special[-_MORE_ROWS:], *chosen]
    by_epoch = {row.epoch: row for row in facts.usage.epochs}
    lines = []
    for row in reversed(chosen):
        used = by_epoch.get(row.epoch)
        alone = size(used.bytes_alone) if used else "–"
        kind = fate(row.epoch, facts, damaged)
        named = {"quarantined": facts.quarantined, "pinned": facts.pins}
        marks = [FATES[kind], *(name for name, those in named.items() if row.epoch in those)]
        marks += [row.run] if row.run else []
        lacks = f"without {', '.join(row.left_out[:8])}" if row.left_out else ""
        fates = tag("span", "; ".join([*marks, *([lacks] if lacks else [])]), class_=kind)
        sizes = (size(row.bytes_state), size(row.bytes_needed), ratio(row.bytes_state, row.bytes_needed), alone)
        lines.append((f"{row.epoch:,}", when(row.saved), *(("–",) * 4 if row.damaged else sizes), fates))
    head = ("epoch", "saved (UTC)", "state", "stored", "ratio", "alone", "")
    shown = table("Epochs, newest first", head, lines, left=(0, 1, 6))
    every = count(len(facts.rows), "epoch")
    title = f"All {every}" if len(chosen) == len(facts.rows) else f"{len(chosen):,} of {every}"
    note = Html("")
    if len(chosen) < len(facts.rows):
        note = _note(
            f"The newest {_ROWS} epochs, and older ones that are pinned, quarantined or damaged; --json has them all."
        )
    return section("epochs", "Epochs", details(title, shown), note)


def _note(text: str) -> Html:
    return tag("p", text, class_="dim small")
