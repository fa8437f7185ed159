"""Tools for testing code that uses ckptstore, and stores of your own. ``StoreSuite`` needs pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.testing.faults import CrashStore, Fault, FaultStore, SimulatedCrash

if TYPE_CHECKING:
    from ckptstore.testing.suite import StoreSuite

__all__ = ["CrashStore", "Fault", "FaultStore", "SimulatedCrash", "StoreSuite"]


def __getattr__(name: str) -> object:
    # Only here is pytest imported: it is no dependency of ckptstore.
    if name == "StoreSuite":
        from ckptstore.testing.suite import StoreSuite

        return StoreSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
