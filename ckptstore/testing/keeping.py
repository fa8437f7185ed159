"""KeepingMachine: RepositoryMachine with pins, and with policies for each record. Needs hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from ckptstore.errors import EpochNotFoundError
from ckptstore.policies import KeepLast, Policy
from ckptstore.testing.faults import When
from ckptstore.testing.machine import CRASHES, EPOCHS, RepositoryMachine

KEPT = st.tuples(st.integers(0, 2), st.integers(1, 2))  # so many optimizers, and so many models more


def _policies(kept: tuple[int, int]) -> dict[str, Policy]:
    return {"model": KeepLast(sum(kept)), "optim": KeepLast(max(1, kept[0]))}


class KeepingMachine(RepositoryMachine):
    """Epochs are pinned, and lose their optimizers: each stays whole without it, and its model stays bit for bit."""

    @initialize()
    def begin_run(self) -> None:
        """The first process has saved some epochs: there is something to keep."""
        super().begin_run()
        for epoch in range(4):
            self.save_and_learn(self.repo, epoch, epoch % 4, replace=False)

    @rule(epoch=EPOCHS, other=st.booleans())
    def pin(self, epoch: int, other: bool) -> None:
        """An epoch that is there is pinned; what is not there cannot be."""
        repo = self.process() if other else self.repo
        try:
            repo.pin(epoch, "the one in the paper")
        except EpochNotFoundError:
            assert epoch not in self.model.seeds
        else:
            self.model.pinned.add(epoch)
        assert set(repo.pins()) == self.model.pinned

    @rule(epoch=EPOCHS)
    def unpin(self, epoch: int) -> None:
        """It says whether there was a pin."""
        assert self.repo.unpin(epoch) == (epoch in self.model.pinned)
        self.model.pinned.discard(epoch)

    @rule(kept=KEPT, other=st.booleans())
    def drop_records(self, kept: tuple[int, int], other: bool) -> None:
        """P5: only optimizers go from epochs whose model stays, and nothing from the pinned and the newest intact."""
        repo = self.process() if other else self.repo
        intact, before = self.model.newest_intact(), set(self.model.seeds)
        report = repo.prune(_policies(kept))
        assert set(report.removed) | set(report.kept) == before
        assert not {*sorted(before)[-sum(kept) :], *self.model.pinned} & set(report.removed)
        assert not self.model.pinned & set(report.dropped)
        for epoch in report.removed:
            self.model.deleted(epoch)
        for epoch, names in report.dropped.items():
            assert set(names) == {"optim"}
            assert intact is None or epoch != intact.epoch
            self.model.thin.add(epoch)
        now = self.model.newest_intact()
        assert intact is None or (now is not None and now >= intact)

    @rule(kept=KEPT, crash=CRASHES)
    def crash_while_records_are_dropped(self, kept: tuple[int, int], crash: tuple[int, When]) -> None:
        """P1: each epoch is whole, whole without its optimizer, or absent; pinned ones are as they were."""
        before, keeping = dict(self.model.seeds), sorted(self.model.seeds)[-sum(kept) :]
        thin, pinned = set(self.model.thin), self.model.pinned & self.model.seeds.keys()
        self.crash(crash, lambda repo: repo.prune(_policies(kept)))
        for epoch, seed in before.items():
            now = self.model.seed_on_the_store(epoch)
            assert now in (None, seed)
            assert now is not None or epoch not in {*keeping, *pinned}
            self.model.settle(epoch, now)
        assert thin & self.model.seeds.keys() <= self.model.thin
        assert pinned & self.model.thin <= thin
