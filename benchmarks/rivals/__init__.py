"""The ways to save and to restore that are compared: one file a family, all behind ``base.Rival``."""

from __future__ import annotations

from benchmarks.rivals.base import Place, Rival
from benchmarks.rivals.dcp import DCP
from benchmarks.rivals.files import FILES
from benchmarks.rivals.limits import LIMITS
from benchmarks.rivals.objects import OBJECTS
from benchmarks.rivals.orbax import ORBAX
from benchmarks.rivals.ours import OURS
from benchmarks.rivals.ranks import RANKS as OF_RANKS
from benchmarks.rivals.ranks import OfRanks
from benchmarks.rivals.s3torch import S3TORCH

ALL: dict[str, type[Rival]] = {
    kind.name: kind for family in (OURS, LIMITS, FILES, DCP, ORBAX, OBJECTS, S3TORCH) for kind in family
}
RANKS: dict[str, type[OfRanks]] = {kind.name: kind for kind in OF_RANKS}

__all__ = ["ALL", "RANKS", "Place", "Rival", "chosen"]


def chosen(work: str, where: str, pattern: str = "") -> list[str]:
    """Names of the rivals that know a work in a place and whose name contains one of ``pattern``'s words."""
    words = [word.strip() for word in pattern.split(";") if word.strip()]
    found = [name for name, kind in ALL.items() if work in kind.works and where in kind.where]
    return [name for name in found if not words or any(word in name for word in words)]
