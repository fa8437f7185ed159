"""A pin, a quarantine or a hold that comes while a prune is under way: who was told that it stands, it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import ckptstore
from ckptstore import EpochNotFoundError, KeepLast, Policy, Repository
from ckptstore.keys import parse_manifest_key
from ckptstore.spares import saved_at
from ckptstore.stores import StoreEvent

Mark = Callable[[Repository, int], object]
EPOCHS = 8


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def marks(held: ExitStack) -> dict[str, Mark]:
    return {
        "pin": lambda repo, epoch: repo.pin(epoch, "for the paper"),
        "quarantine": lambda repo, epoch: repo.quarantine(epoch, "it exploded"),
        "hold": lambda repo, epoch: held.enter_context(repo.hold(epoch)),
    }


def state(epoch: int) -> dict[str, object]:
    return {"model": {"w": b"%d" % epoch * 1000}, "optimizer": {"m": b"%d" % epoch * 3000}}


def saved(repo: Repository, epoch: int) -> float:
    return saved_at(repo._catalog, repo.checkpoint(epoch)._manifest)


@pytest.mark.parametrize("kind", ["pin", "quarantine", "hold"])
@pytest.mark.parametrize("policy", [KeepLast(1), {"model": KeepLast(50), "optimizer": KeepLast(1)}], ids=["go", "thin"])
def test_what_is_marked_during_a_prune_stays(
    tmp_path: Path, held: ExitStack, kind: str, policy: Policy | dict[str, Policy]
) -> None:
    """At the first manifest that goes all epochs are marked: some are gone, the others are next in turn."""
    mark = marks(held)[kind]
    accepted: list[int] = []

    def meanwhile(event: StoreEvent) -> None:
        if event.verb != "delete" or parse_manifest_key(event.key) is None or accepted:
            return
        for epoch in range(EPOCHS):
            try:
                whole = not other.checkpoint(epoch).left_out
                mark(other, epoch)
            except EpochNotFoundError:
                continue
            if whole:
                accepted.append(epoch)

    with ckptstore.open(tmp_path / "run") as other:
        for epoch in range(EPOCHS):
            other.save(epoch, state(epoch), {"epoch": epoch})
        before = {epoch: saved(other, epoch) for epoch in range(EPOCHS)}
        with ckptstore.open(tmp_path / "run", create=False, on_request=meanwhile) as repo:
            report = repo.prune(policy)
        assert len(accepted) > EPOCHS // 2
        for epoch in accepted:
            assert other.checkpoint(epoch).load() == state(epoch)
            assert saved(other, epoch) == before[epoch]
            assert epoch in report.kept
        assert not set(accepted) & (report.removed.keys() | report.dropped.keys())
        assert other.epochs() == sorted(report.kept)
        held.close()
        assert other.verify().ok
