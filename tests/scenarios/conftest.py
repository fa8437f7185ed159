"""Fixtures of the scenes."""

from __future__ import annotations

from tests.repository.conftest import fast_folder

__all__ = ["fast_folder"]
