"""Fixtures and the summary of the repository tests: what was counted is printed at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_COUNTED = "counted: "
Count = Callable[..., None]


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """``count(what, n=1)``: add to a number that is printed in the summary."""

    def add(what: str, n: int = 1) -> None:
        record_property(_COUNTED + what, n)

    return add


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder where a sync costs nothing, if there is such a place: for tests that make thousands."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="ckptstore-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            # Reports travel with their properties, also from the workers of a parallel run.
            if getattr(report, "when", "") == "call":
                for name, value in report.user_properties:
                    if name.startswith(_COUNTED):
                        totals[name.removeprefix(_COUNTED)] += value
    if totals:
        terminalreporter.section("counted by the repository tests")
        for what, n in sorted(totals.items()):
            terminalreporter.write_line(f"{what}: {n}")
