"""RepositoryMachine: a repository against a model, by random steps with crashes, damage and time. Needs hypothesis.

::

    class MyMachine(RepositoryMachine):
        def make_store(self) -> Store:
            return MyStore(...)

    TestMyMachine = MyMachine.TestCase
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptstore import keys
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import CorruptionError, EpochExistsError, EpochNotFoundError, TransactionError
from ckptstore.lease import EXPIRY
from ckptstore.repository import Repository
from ckptstore.retention import KeepLast
from ckptstore.stores.base import Store
from ckptstore.stores.memory import MemoryStore
from ckptstore.testing.faults import CrashStore, SimulatedCrash, When
from ckptstore.transaction import Transaction

CHUNK = 64 * 1024
EPOCHS = st.integers(0, 4)
SEEDS = st.integers(0, 3)
CRASHES = st.tuples(st.integers(1, 14), st.sampled_from(("before", "after", "torn")))
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flip": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "cut": lambda data: data[:-1],
    "zero": lambda data: bytes(len(data)),
}

State = dict[str, dict[str, Any]]


def state_of(seed: int) -> State:
    """Two records: one array that all seeds share, one of three chunks, small ones, plain values."""
    noise = np.random.default_rng(seed)
    frozen = np.random.default_rng(99).integers(0, 256, CHUNK, dtype=np.uint8)
    wide = noise.integers(0, 256, 2 * CHUNK + 8, dtype=np.uint8)
    return {"model": {"frozen": frozen, "w": wide}, "optim": {"m": noise.random(8), "step": seed}}


def is_state(loaded: State, seed: int) -> bool:
    """Whether a loaded state is that of the seed, bit for bit."""
    wanted = state_of(seed)
    return bool(
        loaded.keys() == wanted.keys()
        and all(loaded[name].keys() == wanted[name].keys() for name in wanted)
        and loaded["optim"]["step"] == seed
        and all(
            np.array_equal(loaded[name][key].view(np.uint8), wanted[name][key].view(np.uint8))
            for name, key in (("model", "frozen"), ("model", "w"), ("optim", "m"))
        )
    )


class RepositoryMachine(RuleBasedStateMachine):
    """Saves, replaces, deletes, prunes, collects, crashes, damages and waits; after each step the promises are checked.

    Override :meth:`make_store` to run it on a store of your own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.model: dict[int, int] = {}
        """Epoch → seed of its content."""
        self.broken: dict[str, bytes] = {}
        """Key → what a damage has put there."""
        self.store = self.make_store()
        self.txn: tuple[Transaction, int] | None = None

    def make_store(self) -> Store:
        """A new, empty store. Its clock should be ``self.now`` where that is possible."""
        return MemoryStore(clock=lambda: self.now)

    @initialize()
    def open(self) -> None:
        """A process starts with nothing remembered, and first looks at all epochs."""
        self.repo = Repository(self.store, chunk_size=CHUNK)
        self.repo.verify()

    def teardown(self) -> None:
        """End what is still open."""
        if self.txn is not None:
            self.txn[0]._lease.stop()
        self.store.close()

    # ---- steps -----------------------------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        """Another process takes over."""
        self.open()

    @rule(epoch=EPOCHS, seed=SEEDS, replace=st.booleans())
    def save(self, epoch: int, seed: int, replace: bool) -> None:
        """A save succeeds if its epoch is free or to be replaced; else it says that it exists."""
        try:
            self.repo.save(epoch, state_of(seed), {"seed": seed}, replace=replace)
        except EpochExistsError:
            assert epoch in self.model
            assert not replace
            return
        assert replace or epoch not in self.model
        self.model[epoch] = seed
        assert not self.damaged(epoch), "a save built on what was known to be damaged"

    @rule(epoch=EPOCHS)
    def delete(self, epoch: int) -> None:
        """A delete removes its epoch and no other."""
        try:
            self.repo.delete(epoch)
        except EpochNotFoundError:
            assert epoch not in self.model
        self.model.pop(epoch, None)

    @rule(keep=st.integers(1, 3))
    def prune(self, keep: int) -> None:
        """P5: a prune keeps the last, the newest intact, and what the run resumed from."""
        intact = self.newest_intact()
        report = self.repo.prune(KeepLast(keep))
        assert set(report.removed) | set(report.kept) == set(self.model)
        assert not set(sorted(self.model)[-keep:]) & set(report.removed)
        assert intact == self.newest_intact()
        for epoch in report.removed:
            del self.model[epoch]

    @rule(grace=st.sampled_from((0.0, 60.0, EXPIRY)))
    def gc(self, grace: float) -> None:
        """A gc changes no epoch; with no grace and nothing damaged it leaves no debris."""
        intact = self.newest_intact()
        self.repo.gc(grace=grace)
        assert intact == self.newest_intact()
        if grace == 0 and not self.broken_now() and self.txn is None:
            assert {info.key for info in self.store.list()} == self.reached()
            assert [info.key for info in self.store.list("", partial=True)] == []

    @rule(epoch=EPOCHS, seed=SEEDS, replace=st.booleans(), crash=CRASHES)
    def crash_in_a_save(self, epoch: int, seed: int, replace: bool, crash: tuple[int, When]) -> None:
        """P1: after a crash in a save, its epoch is the old one or the new one."""
        if epoch in self.model and not replace:
            return
        self.crash(crash, lambda repo: repo.save(epoch, state_of(seed), {"seed": seed}, replace=replace))
        now = self.seed_on_the_store(epoch)
        assert now in (self.model.get(epoch), seed)
        self.settle(epoch, now)

    @rule(epoch=EPOCHS, crash=CRASHES)
    def crash_in_a_delete(self, epoch: int, crash: tuple[int, When]) -> None:
        """P1: after a crash in a delete, its epoch is whole or absent."""
        if epoch in self.model:
            self.crash(crash, lambda repo: repo.delete(epoch))
            self.settle(epoch, self.seed_on_the_store(epoch))

    @rule(keep=st.integers(1, 3), crash=CRASHES)
    def crash_in_a_prune(self, keep: int, crash: tuple[int, When]) -> None:
        """P1: after a crash in a prune, each epoch is whole or absent, and what is kept is there."""
        keeping = sorted(self.model)[-keep:]
        self.crash(crash, lambda repo: repo.prune(KeepLast(keep)))
        for epoch in list(self.model):
            now = self.seed_on_the_store(epoch)
            assert now is not None or epoch not in keeping
            self.settle(epoch, now)

    @rule(crash=CRASHES, grace=st.sampled_from((0.0, EXPIRY)))
    def crash_in_a_gc(self, crash: tuple[int, When], grace: float) -> None:
        """P1: a crash in a gc changes no epoch."""
        self.crash(crash, lambda repo: repo.gc(grace=grace))

    @rule(seconds=st.sampled_from((1.0, 200.0, 2000.0)))
    def wait(self, seconds: float) -> None:
        """Time goes by: leases of the dead, and of a silent writer, expire."""
        self.now += seconds

    @precondition(lambda self: self.txn is None)
    @rule(epoch=EPOCHS, seed=SEEDS, replace=st.booleans())
    def begin(self, epoch: int, seed: int, replace: bool) -> None:
        """A writer begins a save beside all the other steps, and writes everything."""
        if epoch not in self.model or replace:
            txn = self.repo.begin(epoch, {"seed": seed}, replace=replace)
            for name, state in state_of(seed).items():
                txn.write(name, state)
            self.txn = txn, seed

    @precondition(lambda self: self.txn is not None)
    @rule()
    def commit(self) -> None:
        """The writer commits: its epoch is there, or it hears that another was first or that it was silent too long."""
        assert self.txn is not None
        (txn, seed), self.txn = self.txn, None
        try:
            txn.commit()
        except (EpochExistsError, TransactionError) as error:
            txn._give_up(error)
        else:
            self.model[txn.epoch] = seed

    @precondition(lambda self: self.txn is not None)
    @rule()
    def abort(self) -> None:
        """The writer gives up."""
        assert self.txn is not None
        self.txn[0].abort()
        self.txn = None

    @rule(where=st.integers(0, 59), how=st.sampled_from(sorted(DAMAGES)))
    def damage(self, where: int, how: str) -> None:
        """An object that an epoch needs is damaged; at most two at a time, so that something is left to promise."""
        objects = [key for epoch in sorted(self.model) for key in self.needs(epoch) if key not in self.broken]
        if objects and len(self.broken_now()) < 2:
            key = objects[where % len(objects)]
            self.broken[key] = DAMAGES[how](self.store.get(key))
            self.store.put(key, self.broken[key])

    # ---- promises --------------------------------------------------------------------------------------------

    @invariant()
    def every_epoch_is_whole_or_told(self) -> None:
        """P1, P2, P3, P7: the epochs are those of the model; each loads bit for bit, or its damage is told."""
        assert self.repo.epochs() == sorted(self.model)
        for epoch, seed in self.model.items():
            damaged = self.damaged(epoch)
            try:
                checkpoint = self.repo.checkpoint(epoch)
                loaded = checkpoint.load()
            except CorruptionError as error:
                assert damaged
                assert error.key in self.broken_now()  # noqa: PT017  (an invariant, no test of its own)
            else:
                # An index that was read and verified before it was damaged may be remembered.
                assert all("/records/" in key for key in damaged)
                assert is_state(loaded, seed)
                assert checkpoint.metadata == {"seed": seed}
        self.repo._resumed.clear()  # looking is not resuming

    @invariant()
    def latest_is_the_newest_intact(self) -> None:
        """P3, P4: ``latest`` is the newest intact checkpoint and names what it skipped; None only if there is none."""
        expected = self.newest_intact()
        try:
            latest = self.repo.latest(deep=True)
        except CorruptionError:
            assert self.model
            assert expected is None
            return
        if latest is None:
            assert not self.model
            return
        assert expected == Committed(latest.epoch, latest.generation)
        newer = [commit for commit in reversed(Catalog(self.store).committed()) if commit > expected]
        assert [(skip.epoch, skip.generation) for skip in latest.skipped] == [(c.epoch, c.generation) for c in newer]
        assert all(skip.key in self.broken for skip in latest.skipped)
        assert is_state(latest.load(), latest.metadata["seed"])
        self.repo._resumed.clear()

    # ---- inside ----------------------------------------------------------------------------------------------

    def crash(self, crash: tuple[int, When], act: Callable[[Repository], object]) -> None:
        """Run ``act`` in a process that dies at a mutation. Like the others it has looked at all epochs first."""
        doomed = Repository(CrashStore(self.store, *crash), chunk_size=CHUNK)
        doomed.verify()
        try:
            act(doomed)
        except SimulatedCrash:
            pass

    def settle(self, epoch: int, seed: int | None) -> None:
        if seed is None:
            self.model.pop(epoch, None)
        else:
            self.model[epoch] = seed

    def seed_on_the_store(self, epoch: int) -> int | None:
        """The seed of an epoch as its manifest tells it; that of the model if the manifest is damaged."""
        try:
            seed: int = Repository(self.store).checkpoint(epoch).metadata["seed"]
        except EpochNotFoundError:
            return None
        except CorruptionError:
            return self.model.get(epoch)
        return seed

    def newest_intact(self) -> Committed | None:
        """The newest checkpoint that needs nothing damaged; it may be one whose replacement is damaged."""
        broken = self.broken_now()
        commits = reversed(Catalog(self.store).committed())
        return next((commit for commit in commits if not broken.intersection(self.needs_of(commit))), None)

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
            try:
                found += [chunk.key for chunk in catalog.index(entry).chunks]
            except CorruptionError:
                pass
        return list(dict.fromkeys(found))

    def damaged(self, epoch: int) -> set[str]:
        """The damaged objects that an epoch needs."""
        return self.broken_now().intersection(self.needs(epoch))

    def broken_now(self) -> set[str]:
        """The objects that are damaged and have not been removed or put anew since."""
        there = {info.key for info in self.store.list()}
        return {key for key, data in self.broken.items() if key in there and self.store.get(key) == data}

    def reached(self) -> set[str]:
        """The marker and what the epochs need."""
        return {keys.MARKER}.union(*(self.needs(epoch) for epoch in self.model))
