"""The facts of a report for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ckptstore.report.facts import Facts
from ckptstore.report.verdict import checked, judge
from ckptstore.usage import Usage


def as_dict(facts: Facts) -> dict[str, Any]:
    """All that the page shows, of every epoch, in plain values; metrics may be NaN. Times in seconds since 1970."""
    damaged = facts.damaged
    level, sentence, more = judge(facts, damaged)
    usage, plan = facts.usage, facts.usage.plan
    sums = [name for name in Usage.__dataclass_fields__ if name not in ("epochs", "plan")]
    by_epoch = {row.epoch: row for row in usage.epochs}
    epochs = []
    for row in facts.rows:
        used = by_epoch.get(row.epoch)
        epochs.append(
            {
                **asdict(row),
                "damaged": damaged.get(row.epoch),
                "bytes_shared": used.bytes_shared if used else None,
                "bytes_alone": used.bytes_alone if used else None,
                "kept": plan is None or row.epoch not in plan.removed,
                "reason": None if plan is None else plan.kept.get(row.epoch, plan.removed.get(row.epoch)),
                "dropped": {} if plan is None else plan.dropped.get(row.epoch, {}),
                "pinned": facts.pins.get(row.epoch),
                "quarantined": facts.quarantined.get(row.epoch),
            }
        )
    return {
        "url": facts.url,
        "repository": facts.repository,
        "made": facts.made,
        "verdict": {"level": level, "text": " ".join(filter(None, (sentence, more)))},
        "newest": facts.newest,
        "skipped": [asdict(step) for step in facts.skipped],
        "checked": checked(facts),
        "policy": {"text": facts.policy, "example": facts.example, "run": facts.run},
        "usage": {"bytes_total": usage.bytes_total, **{name: getattr(usage, name) for name in sums}},
        "space": None if facts.space is None else asdict(facts.space),
        "epochs": epochs,
        "metrics": [
            {"name": m.name, "epochs": [facts.rows[i].epoch for i in m.rows], "values": list(m.values)}
            for m in facts.metrics
        ],
        "records": [
            {"name": r.name, "epochs": r.epochs, "bytes_state": list(r.state), "bytes_stored": list(r.stored)}
            for r in facts.records
        ],
        "left_out": {"metrics": facts.more_metrics, "records": facts.more_records},
        "arrays": None if facts.arrays is None else asdict(facts.arrays),
        "pins": {str(epoch): why for epoch, why in facts.pins.items()},
        "notes": list(facts.notes),
    }
