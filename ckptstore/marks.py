"""Marks: what keeps single epochs from every prune: a pin, a quarantine, a reader who holds it.

A mark can be put while a prune is under way. Whoever puts one looks *after* that whether the epoch is there; so a prune
looks for marks not only before it deletes, but once more after, and takes back what it has done to an epoch that was
marked in between: either the one is told that the epoch is gone, or the other sees the mark.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.hold import holds
from ckptstore.manifest import Manifest
from ckptstore.pins import pinned
from ckptstore.quarantine import reason_of


def marks_of(catalog: Catalog, manifests: Mapping[Committed, Manifest]) -> dict[int, str]:
    """Which of these checkpoints are marked, by epoch, with the reason; they may be deleted by now. Three listings."""
    store = catalog.store
    aside = {keys.parse_quarantine_key(info.key) for info in store.list(keys.QUARANTINES)}
    found: dict[int, str] = {}
    for commit, manifest in manifests.items():
        if (commit.epoch, commit.generation) in aside:
            reason = reason_of(store, commit.epoch, commit.generation, manifest.attempt)
            if reason is not None:
                found[commit.epoch] = f"quarantined: {reason}"
    found.update((epoch, f"pinned: {reason}") for epoch, reason in pinned(store).items())
    found.update((commit.epoch, why) for commit, why in holds(catalog, writes=True).items())
    return {commit.epoch: found[commit.epoch] for commit in manifests if commit.epoch in found}
