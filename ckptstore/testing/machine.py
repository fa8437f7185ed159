"""RepositoryMachine: a repository against a model, by random steps with crashes, damage and time. Needs hypothesis.

::

    class MyMachine(RepositoryMachine):
        def make_store(self) -> Store:
            return MyStore(...)

    TestMyMachine = MyMachine.TestCase
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptstore import lease
from ckptstore.catalog import Catalog, Committed
from ckptstore.errors import (
    CorruptionError,
    EpochExistsError,
    EpochNotFoundError,
    OutcomeUnknownError,
    StoreError,
    TransactionError,
    TransientError,
)
from ckptstore.lease import EXPIRY
from ckptstore.policies import KeepLast
from ckptstore.repository import Repository
from ckptstore.stores.base import Store
from ckptstore.stores.memory import MemoryStore
from ckptstore.stores.retry import RetryPolicy, RetryStore
from ckptstore.testing.faults import CrashStore, Fault, FaultStore, SimulatedCrash, When
from ckptstore.testing.model import CHUNK, DAMAGES, Model, is_state, scribble, state_of
from ckptstore.transaction import Transaction

EPOCHS = st.integers(0, 4)
SEEDS = st.integers(0, 3)
CRASHES = st.tuples(st.integers(1, 14), st.sampled_from(("before", "after", "torn")))
LOST = st.sampled_from(("before", "after"))
Verb = Literal["put", "get", "info", "list", "delete"]
VERBS: tuple[Verb, ...] = ("put", "get", "info", "list", "delete")
WRITERS = st.sampled_from(("first", "second"))
RETRIES = RetryPolicy(attempts=4, base=0.0, cap=0.0)


@dataclass
class Meets:
    """Which calls a fault meets, once it is armed: the one with a number, of those whose key has a prefix.

    Attributes:
        stays: and all after it.
    """

    prefix: str
    number: int
    stays: bool = False
    armed: bool = False
    calls: int = 0
    hits: int = 0

    def __call__(self, key: str) -> bool:
        if not (self.armed and key.startswith(self.prefix)):
            return False
        self.calls += 1
        hit = self.calls == self.number or (self.stays and self.calls > self.number)
        self.hits += hit
        return hit


class RepositoryMachine(RuleBasedStateMachine):
    """Saves, replaces, deletes, prunes, collects, crashes, damages and waits; after each step the promises are checked.

    Override :meth:`make_store` to run it on a store of your own.

    Attributes:
        now: the store's clock, in seconds.
        local: the clock of this machine; the two need not agree.
        counts: of all machines of a class together: "steps", "faults" (crashes, damages and lost replies), "committed"
            and "refused" saves, "checked" (epochs that were loaded and compared).
    """

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.local = 500.0
        self.store = self.make_store()
        self.model = Model(self.store)
        self.txns: dict[str, tuple[Transaction, int]] = {}
        self._clock = patch.object(lease, "clock", lambda: self.local)
        self._clock.start()

    def make_store(self) -> Store:
        """A new, empty store. Its clock should be ``self.now`` where that is possible."""
        return MemoryStore(clock=lambda: self.now)

    @initialize()
    def begin_run(self) -> None:
        """The first process starts."""
        self.repo = self.process()
        self.counts["steps"] -= 1  # the promises are checked here too

    def teardown(self) -> None:
        """End what is still open."""
        for txn, _ in self.txns.values():
            txn._lease.stop()
        self._clock.stop()
        self.store.close()

    # ---- steps -----------------------------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        """Another process takes over."""
        self.repo = self.process()

    @rule(epoch=EPOCHS, seed=SEEDS, replace=st.booleans(), other=st.booleans(), background=st.booleans())
    def save(self, epoch: int, seed: int, replace: bool, other: bool, background: bool) -> None:
        """A save succeeds if its epoch is free or to be replaced; else it says that it exists."""
        repo = self.process() if other else self.repo
        self.save_and_learn(repo, epoch, seed, replace, background)

    @rule(epoch=EPOCHS, other=st.booleans())
    def delete(self, epoch: int, other: bool) -> None:
        """A delete removes its epoch and no other."""
        repo = self.process() if other else self.repo
        try:
            repo.delete(epoch)
        except EpochNotFoundError:
            assert epoch not in self.model.seeds
        self.model.deleted(epoch)

    @rule(keep=st.integers(1, 3), other=st.booleans())
    def prune(self, keep: int, other: bool) -> None:
        """P5: a prune keeps the last, the newest intact, and what the run resumed from."""
        repo = self.process() if other else self.repo
        intact = self.model.newest_intact()
        report = repo.prune(KeepLast(keep))
        assert set(report.removed) | set(report.kept) == set(self.model.seeds)
        assert not {*sorted(self.model.seeds)[-keep:], *self.model.pinned} & set(report.removed)
        assert intact == self.model.newest_intact()
        for epoch in report.removed:
            self.model.deleted(epoch)

    @rule(grace=st.sampled_from((0.0, 60.0, EXPIRY)), other=st.booleans())
    def gc(self, grace: float, other: bool) -> None:
        """A gc changes no epoch; with no grace and nothing damaged it leaves no debris."""
        repo = self.process() if other else self.repo
        intact = self.model.newest_intact()
        repo.gc(grace=grace)
        assert intact == self.model.newest_intact()
        if grace == 0 and not self.model.broken_now() and not self.txns:
            assert {info.key for info in self.store.list()} == self.model.expected_objects()
            assert [info.key for info in self.store.list("", partial=True)] == []

    @rule(number=st.integers(0, 2))
    def leave_a_note(self, number: int) -> None:
        """Somebody keeps files of their own in the same place: no step ever touches them."""
        key = ("notes/readme.txt", "attempts/readme.txt", "manifests/readme.txt")[number]
        self.model.foreign[key] = b"not yours"
        self.store.put(key, b"not yours")

    # ---- crashes ---------------------------------------------------------------------------------------------

    @rule(epoch=EPOCHS, seed=SEEDS, replace=st.booleans(), crash=CRASHES)
    def crash_in_a_save(self, epoch: int, seed: int, replace: bool, crash: tuple[int, When]) -> None:
        """P1: after a crash in a save, its epoch is the old one or the new one."""
        if epoch in self.model.seeds and not replace:
            return
        done = self.crash(crash, lambda repo: repo.save(epoch, state_of(seed), {"seed": seed}, replace=replace))
        now = self.model.seed_on_the_store(epoch)
        assert now == seed if done else now in (self.model.seeds.get(epoch), seed)
        self.model.settle(epoch, now)

    @rule(epoch=EPOCHS, crash=CRASHES)
    def crash_in_a_delete(self, epoch: int, crash: tuple[int, When]) -> None:
        """P1: after a crash in a delete, its epoch is whole or absent."""
        if epoch in self.model.seeds:
            self.crash(crash, lambda repo: repo.delete(epoch))
            self.model.settle(epoch, self.model.seed_on_the_store(epoch))

    @rule(keep=st.integers(1, 3), crash=CRASHES)
    def crash_in_a_prune(self, keep: int, crash: tuple[int, When]) -> None:
        """P1: after a crash in a prune, each epoch is whole or absent, and what is kept is there."""
        keeping = sorted(self.model.seeds)[-keep:]
        self.crash(crash, lambda repo: repo.prune(KeepLast(keep)))
        for epoch in list(self.model.seeds):
            now = self.model.seed_on_the_store(epoch)
            assert now is not None or epoch not in keeping
            self.model.settle(epoch, now)

    @rule(crash=CRASHES, grace=st.sampled_from((0.0, EXPIRY)))
    def crash_in_a_gc(self, crash: tuple[int, When], grace: float) -> None:
        """P1: a crash in a gc changes no epoch."""
        self.crash(crash, lambda repo: repo.gc(grace=grace))

    # ---- lost requests and replies ---------------------------------------------------------------------------

    @rule(epoch=EPOCHS, seed=SEEDS, replace=st.booleans(), when=LOST, retries=st.booleans())
    def lose_a_commit(self, epoch: int, seed: int, replace: bool, when: When, retries: bool) -> None:
        """P4: the request that commits is lost, or its reply."""
        self.save_amid(Meets("manifests/", 1), "put", when, retries, epoch, seed, replace)

    @rule(
        epoch=EPOCHS,
        seed=SEEDS,
        replace=st.booleans(),
        verb=st.sampled_from(VERBS),
        number=st.integers(1, 9),
        when=LOST,
        stays=st.booleans(),
        retries=st.booleans(),
    )
    def save_amid_faults(
        self, epoch: int, seed: int, replace: bool, verb: Verb, number: int, when: When, stays: bool, retries: bool
    ) -> None:
        """P1, P4: a request or reply is lost, or from then on all of a kind. Success is told only of what is there."""
        self.save_amid(Meets("", number, stays), verb, when, retries, epoch, seed, replace)

    def save_amid(
        self, meets: Meets, verb: Verb, when: When, retries: bool, epoch: int, seed: int, replace: bool
    ) -> None:
        """Save in a process whose store loses what ``meets`` says."""
        fault = Fault(verb, meets, when, lambda: TransientError("the connection was reset"), None)
        store: Store = FaultStore(self.store, [fault])
        repo = self.process(RetryStore(store, RETRIES, sleep=lambda seconds: None) if retries else store)
        meets.armed = True
        try:
            self.save_and_learn(repo, epoch, seed, replace)
        except (StoreError, OutcomeUnknownError):
            assert meets.stays or not retries, "one fault was too much"
            self.counts["refused"] += 1
            now = self.model.seed_on_the_store(epoch)
            assert now in (self.model.seeds.get(epoch), seed)
            self.model.settle(epoch, now)
        finally:
            self.counts["faults"] += meets.hits

    # ---- time --------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from((1.0, 200.0, 2000.0)))
    def wait(self, seconds: float) -> None:
        """Time goes by: leases of the dead, and of a silent writer, expire."""
        self.now += seconds
        self.local += seconds

    @rule(seconds=st.sampled_from((-4000.0, -100.0, 100.0, 4000.0)), stores=st.booleans())
    def clock_jumps(self, seconds: float, stores: bool) -> None:
        """The store's clock is set, or that of this machine; or one of the two stood still for a while."""
        if stores:
            self.now += seconds
        else:
            self.local += seconds

    # ---- writers beside all other steps --------------------------------------------------------------------

    @rule(writer=WRITERS, epoch=EPOCHS, seed=SEEDS, replace=st.booleans(), other=st.booleans())
    def begin(self, writer: str, epoch: int, seed: int, replace: bool, other: bool) -> None:
        """A writer begins a save beside all the other steps, and writes everything."""
        if writer in self.txns or (epoch in self.model.seeds and not replace):
            return
        repo = self.process() if other else self.repo
        txn = repo.begin(epoch, {"seed": seed}, replace=replace)
        for name, state in state_of(seed).items():
            txn.write(name, state)
        self.txns[writer] = txn, seed

    @precondition(lambda self: self.txns)
    @rule(writer=WRITERS)
    def commit(self, writer: str) -> None:
        """The writer commits: its epoch is there, or it hears that another was first or that it was silent too long."""
        if writer not in self.txns:
            return
        txn, seed = self.txns.pop(writer)
        try:
            txn.commit()
        except (EpochExistsError, TransactionError) as error:
            self.counts["refused"] += 1
            txn._give_up(error)
        else:
            self.counts["committed"] += 1
            self.model.saved(txn.epoch, seed)

    @precondition(lambda self: self.txns)
    @rule(writer=WRITERS)
    def abort(self, writer: str) -> None:
        """The writer gives up."""
        if writer in self.txns:
            self.txns.pop(writer)[0].abort()

    @rule(where=st.integers(0, 59), how=st.sampled_from(sorted(DAMAGES)))
    def damage(self, where: int, how: str) -> None:
        """An object that an epoch needs is damaged, or goes."""
        self.counts["faults"] += self.model.damage(where, how)

    @precondition(lambda self: self.model.broken)
    @rule()
    def heal(self) -> None:
        """The damaged objects come back from a copy."""
        self.model.heal()

    # ---- promises --------------------------------------------------------------------------------------------

    @invariant()
    def every_epoch_is_whole_or_told(self) -> None:
        """P1, P2, P3, P7: the epochs are those of the model; each loads bit for bit, or its damage is told."""
        self.counts["steps"] += 1
        assert self.repo.epochs() == sorted(self.model.seeds)
        for epoch, seed in self.model.seeds.items():
            damaged = self.model.damaged(epoch)
            try:
                checkpoint = self.repo.checkpoint(epoch)
                loaded = checkpoint.load()
            except CorruptionError as error:
                assert damaged
                assert error.key in damaged  # noqa: PT017  (an invariant, no test of its own)
            else:
                # An index that was read and verified before it was damaged may be remembered.
                assert all("/records/" in key for key in damaged)
                thin = {"optim"} if epoch in self.model.thin else set()
                assert set(checkpoint.left_out) == thin
                assert is_state(loaded, seed, thin)
                assert checkpoint.metadata == {"seed": seed}
                self.counts["checked"] += 1
        self.repo._resumed.clear()  # looking is not resuming

    @invariant()
    def latest_is_the_newest_intact(self) -> None:
        """P3, P4: ``latest`` is the newest intact checkpoint and names what it skipped; None only if there is none."""
        expected = self.model.newest_intact()
        try:
            latest = self.repo.latest(deep=True)
        except CorruptionError:
            assert self.model.seeds
            assert expected is None
            return
        if latest is None:
            assert not self.model.seeds
            return
        assert expected == Committed(latest.epoch, latest.generation)
        newer = [commit for commit in reversed(Catalog(self.store).committed()) if commit > expected]
        assert [(skip.epoch, skip.generation) for skip in latest.skipped] == [(c.epoch, c.generation) for c in newer]
        assert all(skip.key in self.model.broken for skip in latest.skipped)
        assert is_state(latest.load(), latest.metadata["seed"], latest.left_out)
        self.repo._resumed.clear()

    @invariant()
    def notes_of_others_stay(self) -> None:
        """P5: what ckptstore has not written, it never touches."""
        assert all(self.store.get(key) == data for key, data in self.model.foreign.items())

    # ---- inside ----------------------------------------------------------------------------------------------

    def process(self, store: Store | None = None) -> Repository:
        """A process that remembers nothing, and first looks at all epochs: so it knows of every damage."""
        repo = Repository(store or self.store, chunk_size=CHUNK)
        repo.verify()
        return repo

    def save_and_learn(self, repo: Repository, epoch: int, seed: int, replace: bool, background: bool = False) -> None:
        """Save; the model learns what was said."""
        state = state_of(seed)
        try:
            if background:
                handle = repo.save_async(epoch, state, {"seed": seed}, replace=replace)
                scribble(state)  # the trainer goes on
                handle.result()
            else:
                repo.save(epoch, state, {"seed": seed}, replace=replace)
        except EpochExistsError:
            assert epoch in self.model.seeds
            assert not replace
            self.counts["refused"] += 1
            return
        assert replace or epoch not in self.model.seeds
        self.counts["committed"] += 1
        self.model.saved(epoch, seed)
        assert not self.model.damaged(epoch), "a save built on what was known to be damaged"

    def crash(self, crash: tuple[int, When], act: Callable[[Repository], object]) -> bool:
        """Run ``act`` in a process that dies at a mutation; whether it came to its end before."""
        doomed = self.process(CrashStore(self.store, *crash))
        try:
            act(doomed)
        except SimulatedCrash:
            self.counts["faults"] += 1
            return False
        return True
