"""Verify: what is read, how often, and what a sample finds."""

from __future__ import annotations

from collections import Counter

import pytest

from ckptstore import InvalidArgumentError, Repository, keys
from ckptstore.stores import MemoryStore, OpLog, TraceStore


def filled(store: MemoryStore, log: OpLog | None = None) -> Repository:
    repo = Repository(TraceStore(store, log) if log is not None else store, chunk_size=64 * 1024, codec="raw")
    for epoch in (1, 2, 3):
        base = b"".join(bytes([number, number + 1]) * 32 * 1024 for number in range(40))
        repo.save(
            epoch, {"base": {"w": memoryview(base).cast("B")[:].tobytes()}, "head": {"w": bytes([epoch]) * 70_000}}
        )
    return repo


def chunk_reads(log: OpLog) -> Counter[str]:
    return Counter(event.key for event in log.events if event.verb == "get" and "/chunks/" in event.key)


def test_what_epochs_share_is_read_once() -> None:
    """A deep verify of all epochs reads each chunk once, and finds the same damage in all that need it."""
    store, log = MemoryStore(), OpLog()
    repo = filled(store, log)
    log.clear()
    assert repo.verify().ok
    reads = chunk_reads(log)
    assert {*reads} == {info.key for info in store.list(keys.ATTEMPTS) if "/chunks/" in info.key}
    assert {*reads.values()} == {1}
    manifest = repo.checkpoint(1)._manifest
    shared = repo._catalog.index(manifest.records[0]).chunks[0]
    frame = bytearray(store.get(shared.key))
    frame[-1] ^= 1
    store.put(shared.key, bytes(frame))
    report = repo.verify()
    assert [[problem.key for problem in health.problems] for health in report.epochs] == [[shared.key]] * 3


def test_a_sample_reads_its_share() -> None:
    """A sample reads so many chunks and no more, others each time, and in the end finds what is damaged."""
    store, log = MemoryStore(), OpLog()
    repo = filled(store, log)
    everything = {info.key for info in store.list(keys.ATTEMPTS) if "/chunks/" in info.key}
    seen: set[str] = set()
    for _ in range(400):
        log.clear()
        report = repo.verify(1, sample=0.1)
        assert (report.ok, report.sample) == (True, 0.1)
        reads = chunk_reads(log)
        assert 1 <= len(reads) <= len(everything) // 5
        seen |= {*reads}
    assert len(seen) > len(everything) // 2
    victim = next(iter(seen))
    frame = bytearray(store.get(victim))
    frame[len(frame) // 2] ^= 1
    store.put(victim, bytes(frame))
    assert any(not repo.verify(sample=0.2).ok for _ in range(200))
    assert not repo.verify(sample=0.01).ok  # an epoch that is known to be damaged is read in full


@pytest.mark.parametrize("sample", [0, -1, 1.1, True, "5%", None, float("nan")])
def test_nonsense_is_refused(sample: float) -> None:
    """A share is more than 0 and at most 1."""
    with pytest.raises(InvalidArgumentError):
        Repository(MemoryStore()).verify(sample=sample)
