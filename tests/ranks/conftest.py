"""Fixtures of the tests of ranks."""

from tests.repository.conftest import fast_folder

__all__ = ["fast_folder"]
