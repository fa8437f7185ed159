"""A lower tier behind a line that fails: the saves do not notice, and everything arrives."""

from __future__ import annotations

import pytest

from ckptstore import RetryPolicy, TieredRepository, replication
from ckptstore.replication import Lower
from ckptstore.stores import MemoryStore
from tests.faults.conftest import Way, every_way, holds, s3fs_way, state
from tests.proxy import Rule
from tests.proxy_faults import misbehaving, s3_error

PATIENT = RetryPolicy(attempts=50, deadline=120, base=0.002, cap=0.03)
HASTY = RetryPolicy(attempts=2, deadline=5, base=0.002, cap=0.01)


def tiered(way: Way, retry: RetryPolicy) -> TieredRepository:
    """A first tier in memory, the second beyond the proxy."""

    def opened() -> object:
        repo = way.repo(retry)
        way.lend()
        return repo

    lower = Lower(way.url, opened, opened, None, None)  # type: ignore[arg-type]
    return TieredRepository(MemoryStore(), lower=[lower], chunk_size=1 << 16, codec="raw", exit_timeout=30.0)


@every_way
def test_copies_on_a_bad_day(way: Way) -> None:
    """Refusals, resets, lost replies, cut and slow bodies."""
    rules = misbehaving(12, gcs=way.gcs, part=0.25, slow=0.02)
    with way.proxy.play(*rules), tiered(way, PATIENT) as repo:
        for epoch in (1, 2, 3):
            repo.save(epoch, state(epoch, 2))
        assert repo.wait_for_tiers(60)
    assert sum(rule.fired for rule in rules) >= 5
    assert all(holds(way.behind(), epoch, chunks=2) for epoch in (1, 2, 3))
    assert not way.debris()


@s3fs_way
def test_a_bucket_that_is_away_and_comes_back(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests are refused, amid the copies; then they are not, and the bucket catches up."""
    monkeypatch.setattr(replication, "FIRST_WAIT_SECONDS", 0.02)
    with tiered(way, HASTY) as repo:
        repo.save(1, state(1))
        assert repo.wait_for_tiers(30)
        away = Rule(s3_error(503, "ServiceUnavailable"), times=None)
        with way.proxy.play(away):
            for epoch in (2, 3):
                repo.save(epoch, state(epoch))
            assert not repo.wait_for_tiers(0.5)
            status = repo.tiers(look=False)[1]
            assert (status.newest, status.waiting) == (1, (2, 3))
        assert away.fired > 0
        assert repo.wait_for_tiers(30)
        assert repo.tiers()[1].error == ""
    assert all(holds(way.behind(), epoch) for epoch in (1, 2, 3))
    assert not way.debris()
