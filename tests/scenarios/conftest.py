"""Fixtures of the scenes."""

from __future__ import annotations

from tests.repository.conftest import fast_folder
from tests.stores.test_local import mount

__all__ = ["fast_folder", "mount"]
