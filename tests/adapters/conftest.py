"""The adapters' tests: each module says at its top which framework it needs, and is skipped by name without it.

That is a line such as ``pytest.importorskip("jax.numpy", reason="needs jax: make test-adapters")``. A module inside the
framework is named, because a folder of tests could be called like the framework itself.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them carry the mark, so that ``-m "not adapters"`` leaves them out."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.adapters)


@pytest.fixture(scope="session")
def entry_points() -> None:
    """What is installed has the entry points of pyproject.toml: an editable install keeps those of when it was made."""
    text = (HERE.parents[1] / "pyproject.toml").read_text("utf-8")
    section = text.split('[project.entry-points."ckptstore.states"]\n', 1)[1].split("\n[", 1)[0]
    wanted = dict(re.findall(r'^(\w+) = "(.+)"$', section, re.MULTILINE))
    found = {point.name: point.value for point in metadata.entry_points(group="ckptstore.states")}
    missing = sorted(wanted.items() - found.items())
    assert wanted
    assert not missing, f"the installed metadata of ckptstore is too old, `pip install -e .` again: {missing} not there"
