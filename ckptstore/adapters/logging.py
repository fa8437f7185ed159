"""Events as log records with structured fields: ``ckptstore.open(url, on_event=LogEvents())``.

The record has the fields of the event, and its name as ``event``, in one attribute, ``record.ckptstore``: a JSON
formatter writes it as an object. The text is for people.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from ckptstore import events

LEVELS: dict[type[Any], int] = {
    events.SaveFailed: logging.ERROR,
    events.DamageFound: logging.ERROR,
    events.SaveSkipped: logging.WARNING,
    events.TierFailed: logging.WARNING,  # it is tried again
    events.RetryEvent: logging.DEBUG,  # the logger "ckptstore" tells of them, and never floods
    events.SaveStarted: logging.DEBUG,
}
"""Of events that are more, or less, than information."""


class LogEvents:
    """A listener that logs.

    Args:
        logger: where to.
    """

    def __init__(self, logger: logging.Logger | str = "ckptstore.events") -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger

    def __call__(self, event: events.AnyEvent) -> None:
        """Log one event."""
        level = LEVELS.get(type(event), logging.INFO)
        if isinstance(event, events.PruneDone) and event.error:
            level = logging.WARNING
        if self._logger.isEnabledFor(level):
            facts = facts_of(event)
            text = " ".join(f"{name}={_short(value)}" for name, value in facts.items())
            self._logger.log(level, "%s", text, extra={"ckptstore": facts})


def facts_of(event: events.AnyEvent) -> dict[str, Any]:
    """The name of an event, as ``event``, and its attributes; plain values that JSON knows."""
    facts: dict[str, Any] = {"event": type(event).__name__}
    for field in fields(event):
        value = getattr(event, field.name)
        facts[field.name] = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else value
    for derived in ("ratio", "failure"):
        if hasattr(event, derived):
            facts[derived] = getattr(event, derived)
    return facts


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value) if isinstance(value, str) and (" " in value or not value) else str(value)
