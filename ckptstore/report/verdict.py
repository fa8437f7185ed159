"""The sections that answer a question: is the newest epoch good, what is broken, and what can go."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from itertools import groupby

from ckptstore.report.facts import Facts
from ckptstore.report.markup import (
    Html,
    code,
    count,
    details,
    esc,
    join,
    lasting,
    percent,
    section,
    table,
    tag,
    time_tag,
)
from ckptstore.wording import size

_SHOWN = 100
_REASONS = 200
_OLD = 24 * 3600.0  # seconds from which on the age of the newest epoch is worth a look


def headline(facts: Facts, damaged: Mapping[int, str]) -> Html:
    """One sentence, and four numbers."""
    level, sentence, more = judge(facts, damaged)
    words = {"good": "Good", "warn": "Look", "bad": "Bad"}
    banner = tag("p", tag("strong", words[level]), " ", sentence, class_=f"verdict {level}")
    extra = tag("p", more, class_="more") if more else Html("")
    tiles = [_newest_tile(facts), _space_tile(facts), _go_tile(facts), _health_tile(facts, damaged)]
    return tag("div", banner, extra, tag("div", *tiles, class_="tiles"))


def judge(facts: Facts, damaged: Mapping[int, str]) -> tuple[str, str, str]:
    """ "good", "warn" or "bad"; what the newest epoch is like; and what else there is to know."""
    if not facts.rows:
        return "warn", "There is no epoch here yet.", ""
    if facts.newest is None or facts.newest not in {row.epoch for row in facts.rows}:
        return "bad", "No epoch is intact: nothing here can be loaded as a whole.", "See Health for what is broken."
    if facts.newest in damaged:
        return "bad", f"The newest epoch, {facts.newest:,}, is damaged.", "See Health for what is broken."
    age = lasting(facts.made - newest_row(facts))
    last = facts.rows[-1].epoch
    if facts.newest < last:
        broken = {epoch for epoch in damaged if epoch > facts.newest}
        aside = {epoch for epoch in facts.quarantined if epoch > facts.newest} - broken
        what = f"{count(len(broken), 'newer one')} cannot be used" if broken else ""
        put = f"{count(len(aside), 'newer one')} quarantined" if aside else ""
        text = f"The newest good epoch is {facts.newest:,}, {age} old. {', '.join(filter(None, (what, put)))}."
        return "bad" if broken else "warn", text, "A run that starts again now goes on from there, and says so."
    text = f"Epoch {facts.newest:,}, the newest, is good and {age} old."
    if damaged:
        return "warn", text, f"{count(len(damaged), 'earlier epoch')} damaged: see Health."
    if facts.usage.objects_missing:
        lost = count(facts.usage.objects_missing, "object")
        return "warn", text, f"{lost} missing or cut: `ckptstore verify --quick` says of which epochs."
    room = _room(facts)
    if room is not None and room < 2 * _largest(facts):
        return "warn", text, f"Space is short: {size(room)} left, and an epoch takes up to {size(_largest(facts))}."
    return "good", text, ""


def newest_row(facts: Facts) -> float:
    """When the newest good epoch was saved."""
    return next(row.saved for row in reversed(facts.rows) if row.epoch == facts.newest)


def _room(facts: Facts) -> int | None:
    return None if facts.space is None else facts.space.room


def _largest(facts: Facts) -> int:
    return max((row.bytes_needed for row in facts.rows[-10:]), default=0)


def _tile(name: str, value: object, *below: object) -> Html:
    return tag("div", tag("h3", name), tag("b", value), *(tag("p", line) for line in below if line), class_="tile")


def _newest_tile(facts: Facts) -> Html:
    if facts.newest is None:
        return _tile("Newest good epoch", "none", "")
    saved = newest_row(facts)
    return _tile("Newest good epoch", f"{facts.newest:,}", f"{lasting(facts.made - saved)} old", time_tag(saved))


def _space_tile(facts: Facts) -> Html:
    room = _room(facts)
    left = f"{size(room)} left to write to" if room is not None else "the store does not tell what is left"
    return _tile("On the store", size(facts.usage.bytes_total), f"{count(len(facts.rows), 'epoch')}", left)


def _go_tile(facts: Facts) -> Html:
    usage, plan = facts.usage, facts.usage.plan
    pruned = f"{size(usage.bytes_freed)} by a prune" + (" (example)" if facts.example else "")
    what = f": {count(len(plan.removed), 'epoch')}" if plan is not None and plan.removed else ""
    debris = f"{size(usage.bytes_debris)} of debris, by gc" if usage.bytes_debris else "no debris"
    if usage.bytes_unknown:  # nobody can tell debris from what that epoch needs
        debris = f"{size(usage.bytes_unknown)} may belong to a damaged epoch"
    return _tile("Can go", size(usage.bytes_freed + usage.bytes_debris), pruned + what, debris)


def _health_tile(facts: Facts, damaged: Mapping[int, str]) -> Html:
    return _tile("Damaged", f"{len(damaged):,} of {len(facts.rows):,}", checked(facts))


def checked(facts: Facts) -> str:
    """How closely was looked."""
    report = facts.checked
    if report is None:
        return "all manifests and indexes; names and sizes of the newest"
    if not report.deep:
        return "names and sizes of all epochs"
    return "every byte read" if report.sample == 1 else f"{percent(report.sample, 1)} of the chunks read"


def health(facts: Facts, damaged: Mapping[int, str]) -> Html:
    """What is broken, how closely was looked, and what to do."""
    text = f"Looked at: {checked(facts)}. Bytes that rotted in place are found only by reading them: "
    looked = tag("p", text, code(_command("verify", facts)), ".")
    if facts.checked is not None and facts.checked.deep and facts.checked.sample == 1:
        looked = tag("p", "Every byte of every epoch was read.")
    if not damaged:
        parts = [tag("p", "Nothing wrong was found.", class_="good")]
    else:
        rows = [(f"{epoch:,}", esc(why, 400)) for epoch, why in list(damaged.items())[-_SHOWN:]]
        parts = [table("Damaged epochs", ("epoch", "what is wrong"), rows, left=(0, 1))]
        if len(damaged) > _SHOWN:
            parts.append(tag("p", f"The newest {_SHOWN} of {len(damaged):,}; --json has all.", class_="dim small"))
        text = "An epoch is lost only if it needs what is broken. latest() steps back to the newest intact one."
        parts.append(tag("p", text))
    return section("health", "Health", *parts, looked)


def prune(facts: Facts) -> Html:
    """What a prune would do, with the reason for every epoch, neighbours of one fate together."""
    plan = facts.usage.plan
    if plan is None or not facts.rows:
        return section("prune", "What a prune would do", tag("p", "There is nothing to prune.", class_="dim"))
    example = "Nobody gave a policy, so this is an example: " if facts.example else "By the policy "
    run = f" It concerns the epochs of run {facts.run}." if facts.run else ""
    freed = f"{count(len(plan.removed), 'epoch')} would go, {size(facts.usage.bytes_freed)} would be free"
    freed += f"; {count(len(plan.kept), 'epoch')} would stay.{run}"
    dropped = sum(map(len, plan.dropped.values()))
    if dropped:
        freed += f" {count(dropped, 'record')} would be dropped from epochs that stay."
    fates = [(epoch, "stays", why) for epoch, why in plan.kept.items()]
    fates += [(epoch, "goes", why) for epoch, why in plan.removed.items()]
    rows = list(_ranges(sorted(fates)))
    lines = [
        (span, tag("span", fate, class_="goes" if fate == "goes" else "kept"), esc(why, 400), f"{n:,}")
        for span, fate, n, why in rows[-_REASONS:]
    ]
    parts = [
        tag("p", example, code(facts.policy), ". ", freed),
        table("The plan", ("epochs", "", "why", "how many"), lines, left=(0, 1, 2)),
    ]
    if len(rows) > _REASONS:
        parts.append(
            tag("p", f"The newest {_REASONS} of {len(rows):,} lines; `ckptstore plan` has all.", class_="dim small")
        )
    if dropped:
        parts.append(_dropped(plan.dropped))
    steps = [("look again", _command("prune", facts, "--dry-run")), ("do it", _command("prune", facts))]
    if facts.usage.bytes_debris:
        steps.append(("remove debris", _command("gc", facts)))
    parts.append(tag("ul", *(tag("li", what, ": ", code(line)) for what, line in steps), class_="steps"))
    return section("prune", "What a prune would do", *parts)


def _ranges(fates: Iterable[tuple[int, str, str]]) -> Iterable[tuple[str, str, int, str]]:
    """Neighbours with one fate for one reason, as one line each."""
    for (what, why), group in groupby(fates, key=lambda one: one[1:]):
        numbers = [epoch for epoch, _, _ in group]
        span = f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} – {numbers[-1]:,}"
        yield span, what, len(numbers), why


def _dropped(dropped: Mapping[int, Mapping[str, str]]) -> Html:
    fates = [(e, ", ".join(sorted(why)), "; ".join(sorted({*why.values()}))) for e, why in sorted(dropped.items())]
    rows = [(span, esc(names), esc(why), f"{n:,}") for span, names, n, why in _ranges(fates)][-_REASONS:]
    shown = table("Records that would be dropped", ("epochs", "records", "why", "how many"), rows, left=(0, 1, 2))
    return details("Records that would be dropped", shown)


def pins(facts: Facts) -> Html:
    """Epochs that no prune takes, and why; those, too, that are set aside."""
    aside = Html("")
    if facts.quarantined:
        rows = [(f"{epoch:,}", esc(why, 400)) for epoch, why in list(facts.quarantined.items())[-_REASONS:]]
        aside = table("Quarantined epochs", ("epoch", "why nobody resumes from it"), rows, left=(0, 1))
    if not facts.pins:
        how = code(_command("pin", facts, "EPOCH --reason WHY"))
        return section("pins", "Pins", tag("p", "No epoch is pinned. To keep one from every prune: ", how), aside)
    there = {row.epoch for row in facts.rows}
    rows = [
        (f"{epoch:,}", join([esc(why, 400), "" if epoch in there else " (there is no such epoch any more)"]))
        for epoch, why in list(facts.pins.items())[-_REASONS:]
    ]
    more = (
        tag("p", f"The newest {_REASONS} of {len(facts.pins):,}.", class_="dim small")
        if len(facts.pins) > _REASONS
        else ""
    )
    return section("pins", "Pins", table("Pinned epochs", ("epoch", "reason"), rows, left=(0, 1)), more, aside)


def _command(name: str, facts: Facts, more: str = "") -> str:
    policy = facts.policy if name == "prune" else ""
    run = f"--run {shlex.quote(facts.run)}" if name == "prune" and facts.run else ""
    return " ".join(part for part in ("ckptstore", name, shlex.quote(facts.url), policy, run, more) if part)
