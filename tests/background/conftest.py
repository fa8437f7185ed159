"""Fixtures of the tests of background saves."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder where a sync costs nothing, if there is such a place: for tests that make thousands."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="ckptstore-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
