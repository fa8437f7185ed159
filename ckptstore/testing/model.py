"""The model that :class:`RepositoryMachine` compares a repository with: what should be there, and what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import numpy as np

from ckptstore import keys, pins
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import CorruptionError, EpochNotFoundError
from ckptstore.repository import Repository
from ckptstore.stores.base import Store

CHUNK = 64 * 1024

State = dict[str, dict[str, Any]]

Damage = Callable[[bytes], bytes | None]
"""The new content of an object; None: it goes."""

DAMAGES: dict[str, Damage] = {
    "flip": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "cut": lambda data: data[:-1],
    "zero": lambda data: bytes(len(data)),
    "gone": lambda data: None,
}


def state_of(seed: int) -> State:
    """Two records: one array that all seeds share, one of three chunks, small ones, plain values."""
    noise = np.random.default_rng(seed)
    frozen = np.random.default_rng(99).integers(0, 256, CHUNK, dtype=np.uint8)
    wide = noise.integers(0, 256, 2 * CHUNK + 8, dtype=np.uint8)
    return {"model": {"frozen": frozen, "w": wide}, "optim": {"m": noise.random(8), "step": seed}}


def is_state(loaded: State, seed: int, without: Collection[str] = ()) -> bool:
    """Whether a loaded state is that of the seed, bit for bit, ``without`` some of its records."""
    wanted = {name: record for name, record in state_of(seed).items() if name not in without}
    return bool(
        loaded.keys() == wanted.keys()
        and all(loaded[name].keys() == wanted[name].keys() for name in wanted)
        and all(_same(loaded[name][key], value) for name in wanted for key, value in wanted[name].items())
    )


def _same(loaded: Any, wanted: Any) -> bool:
    if not isinstance(wanted, np.ndarray):
        return bool(loaded == wanted)
    return loaded.dtype == wanted.dtype and np.array_equal(loaded.view(np.uint8), wanted.view(np.uint8))


def scribble(state: State) -> None:
    """Change everything in a state, as a trainer does that goes on while it is saved."""
    for record in state.values():
        for name, value in record.items():
            if isinstance(value, np.ndarray):
                value.fill(0)
            else:
                record[name] = -1


class Model:
    """What a repository on ``store`` should hold.

    Attributes:
        seeds: epoch → seed of its content.
        thin: epochs whose optimizer was dropped.
        pinned: epochs that no prune may take.
        broken: key → what a damage has put there; None: it is gone.
        whole: key → what was there before.
        foreign: key → content of what others have put beside the repository.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.seeds: dict[int, int] = {}
        self.thin: set[int] = set()
        self.pinned: set[int] = set()
        self.broken: dict[str, bytes | None] = {}
        self.whole: dict[str, bytes] = {}
        self.foreign: dict[str, bytes] = {}
        self._chunks: dict[str, list[str]] = {}  # key of a record index → what it listed before anybody damaged it

    def saved(self, epoch: int, seed: int) -> None:
        """A save has committed."""
        self.seeds[epoch] = seed
        self.thin.discard(epoch)

    def deleted(self, epoch: int) -> None:
        """The epoch is gone, and its pin with it."""
        self.seeds.pop(epoch, None)
        self.thin.discard(epoch)
        self.pinned.discard(epoch)

    def settle(self, epoch: int, seed: int | None) -> None:
        """The epoch is this now, after something that may have come to its end or not."""
        self.pinned = set(pins.pinned(self.store))
        if seed is None:
            self.seeds.pop(epoch, None)
            self.thin.discard(epoch)
            return
        self.seeds[epoch] = seed
        with suppress(CorruptionError):
            left_out = Repository(self.store).checkpoint(epoch).left_out
            self.thin = self.thin | {epoch} if left_out else self.thin - {epoch}

    def seed_on_the_store(self, epoch: int) -> int | None:
        """The seed of an epoch as its manifest tells it; that of the model if the manifest is damaged."""
        try:
            seed: int = Repository(self.store).checkpoint(epoch).metadata["seed"]
        except EpochNotFoundError:
            return None
        except CorruptionError:
            return self.seeds.get(epoch)
        return seed

    # ---- damage --------------------------------------------------------------------------------------------

    def damage(self, where: int, how: str) -> bool:
        """Damage an object that an epoch needs; at most two at a time, so that something is left to promise."""
        objects = [key for epoch in sorted(self.seeds) for key in self.needs(epoch) if key not in self.broken]
        if how == "gone":  # without its manifest an epoch does not exist: that is a delete
            objects = [key for key in objects if keys.parse_content_key(key) is not None]
        if not objects or len(self.broken_now()) >= 2:
            return False
        key = objects[where % len(objects)]
        self.whole[key] = self.store.get(key)
        broken = self.broken[key] = DAMAGES[how](self.whole[key])
        if broken is None:
            self.store.delete(key)
        else:
            self.store.put(key, broken)
        return True

    def heal(self) -> None:
        """Put back what was there before the damages, as from a copy."""
        while broken := self.broken_now():  # behind a damaged manifest others may come to light
            for key in broken:
                self.store.put(key, self.whole[key])
        self.broken.clear()

    def broken_now(self) -> set[str]:
        """The objects that are damaged, are still needed, and have not been removed or put anew since."""
        there = {info.key for info in self.store.list()}
        changed = {key for key, data in self.broken.items() if key in there and self.store.get(key) == data}
        gone = {key for key, data in self.broken.items() if data is None and key not in there}
        if gone:
            gone &= {key for commit in Catalog(self.store).committed() for key in self.needs_of(commit)}
        return changed | gone

    def damaged(self, epoch: int) -> set[str]:
        """The damaged objects that an epoch needs."""
        return self.broken_now().intersection(self.needs(epoch))

    def newest_intact(self) -> Committed | None:
        """The newest checkpoint that needs nothing damaged; it may be one whose replacement is damaged."""
        broken = self.broken_now()
        commits = reversed(Catalog(self.store).committed())
        return next((commit for commit in commits if not broken.intersection(self.needs_of(commit))), None)

    # ---- what checkpoints need -----------------------------------------------------------------------------

    def needs(self, epoch: int) -> list[str]:
        """What the newest generation of an epoch needs."""
        commits = Catalog(self.store).committed(epoch)
        return self.needs_of(commits[-1]) if commits else []

    def needs_of(self, commit: Committed) -> list[str]:
        """What a checkpoint needs, as far as it can be read, in an order that is the same in every run."""
        catalog = Catalog(self.store)
        found = [commit.key]
        try:
            manifest = catalog.manifest(commit)
        except CorruptionError:
            return found
        for entry in manifest.records:
            found.append(entry.key)
            with suppress(CorruptionError):
                self._chunks[entry.key] = [chunk.key for chunk in catalog.index(entry).chunks]
            found += self._chunks.get(entry.key, [])
        return list(dict.fromkeys(found))

    def expected_objects(self) -> set[str]:
        """What a repository without debris holds: marker, pins, maybe a reserve, what epochs need, what is not ours."""
        reserve = [info.key for info in self.store.list(keys.RESERVE)]
        pinned = map(keys.pin_key, self.pinned)
        return {keys.MARKER}.union(reserve, pinned, self.foreign, *(self.needs(epoch) for epoch in self.seeds))
