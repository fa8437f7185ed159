"""The adapters' tests: each module says at its top which framework it needs, and is skipped by name without it.

That is a line such as ``pytest.importorskip("jax.numpy", reason="needs jax: make test-adapters")``. A module inside the
framework is named, because a folder of tests could be called like the framework itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them carry the mark, so that ``-m "not adapters"`` leaves them out."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.adapters)
