"""What an examination says: a finding for each check, and all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        name: of the check.
        ok: True: as it should be. False: saves fail there, or what was saved is in danger. None: a warning, or it could
            not be found out.
        found: what was found.
        advice: what to do; empty where there is nothing to do.
        facts: the same in numbers, for programs: bytes, seconds, counts.
    """

    name: str
    ok: bool | None
    found: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about one place, in the order of the checks."""

    url: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed. Warnings do not count."""
        return all(finding.ok is not False for finding in self.findings)

    def finding(self, name: str) -> Finding | None:
        """The finding of one check; None where it does not apply to the place."""
        return next((finding for finding in self.findings if finding.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"url": self.url, "ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}


def what_failed(error: BaseException) -> str:
    """The message of an error without the advice at its end, for findings that have a better one."""
    message = str(error) or type(error).__name__
    return message.rpartition("; ")[0] or message


def days(count: object) -> str:
    """A number of days in words."""
    return f"{count} day{'' if str(count) == '1' else 's'}"
