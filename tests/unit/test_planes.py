"""Byte planes, pauses of the collector, rooms, pace, and the pipeline they feed."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from ckptstore import garbage
from ckptstore.pace import ENOUGH, Pace
from ckptstore.pipeline import Pipeline, Rooms
from ckptstore.planes import BLOCK, merge, split


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 3, 1000, BLOCK // 8 + 1])
def test_planes_are_the_bytes_of_the_elements(width: int, length: int) -> None:
    """Plane ``i`` has byte ``i`` of each element, and the way back gives every bit again, shown in order."""
    raw = np.random.default_rng(length).integers(0, 256, length * width, np.uint8)
    planes = [np.empty(length, np.uint8) for _ in range(width)]
    split(raw, planes)
    for i, plane in enumerate(planes):
        assert (plane == raw[i::width]).all()
    back, shown = np.zeros_like(raw), bytearray()
    merge(planes, back, shown.extend)
    assert bytes(shown) == back.tobytes() == raw.tobytes()


def test_planes_need_no_alignment() -> None:
    """Planes and words may begin at any address, as they do inside a frame."""
    raw = np.arange(8001, dtype=np.uint8)[1:]
    room = np.empty(8003, np.uint8)
    planes = [room[3 + i * 2000 : 3 + (i + 1) * 2000] for i in range(4)]
    split(raw, planes)
    back = np.empty(8001, np.uint8)[1:]
    merge(planes, back)
    assert (back == raw).all()


def test_the_collector_is_paused_and_comes_back() -> None:
    """However pauses overlap, the collector runs again after the last one, and stays off where it was off."""
    assert gc.isenabled()
    with garbage.paused():
        with garbage.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_rooms_are_used_again() -> None:
    """Memory that was given back is given out again, and memory in use never is."""
    rooms = Rooms()
    first, second = rooms.take(100_000), rooms.take(100_000)
    assert len(first) >= 100_000
    assert not np.shares_memory(np.frombuffer(first, np.uint8), np.frombuffer(second, np.uint8))
    rooms.give(first)
    assert rooms.take(90_000) is first


@pytest.mark.parametrize("nbytes", [0, 1, 65_536, 65_537, 1 << 20, (1 << 25) + 104])
def test_rooms_are_large_enough(nbytes: int) -> None:
    """A room has the bytes that were asked for, and hardly more."""
    assert nbytes <= len(Rooms().take(nbytes)) <= 1.15 * nbytes + 65_536


def test_rooms_hold_no_more_than_they_may() -> None:
    """P6: what is kept for later never adds up, whatever the sizes."""
    rooms = Rooms(keep=10 << 20)
    for nbytes in (1 << 20, 3 << 20, 11 << 20, 5 << 20):
        for room in [rooms.take(nbytes) for _ in range(6)]:
            rooms.give(room)
            assert rooms._held == sum(len(room) for kept in rooms._free.values() for room in kept) <= 10 << 20


def pace_of(monkeypatch: pytest.MonkeyPatch, codec_seconds: float, store_seconds: float, nbytes: int) -> Pace:
    """A pace that has seen ``nbytes`` go through both, by a clock of the test."""
    now = [0.0]
    monkeypatch.setattr("ckptstore.pace.time.perf_counter", lambda: now[0])
    pace = Pace()
    for rate, seconds in ((pace.codec, codec_seconds), (pace.store, store_seconds)):
        with rate.timed(nbytes), rate.timed(0):  # two threads at once count once
            now[0] += seconds
        now[0] += 100.0  # idle: counts for neither
    return pace


@pytest.mark.parametrize(
    ("codec_seconds", "store_seconds", "compress"), [(1.0, 10.0, True), (1.0, 0.5, True), (1.0, 0.25, False)]
)
def test_a_store_faster_than_the_codec_gets_plain_bytes(
    monkeypatch: pytest.MonkeyPatch, codec_seconds: float, store_seconds: float, compress: bool
) -> None:
    """``codec="auto"`` compresses unless the store is clearly faster."""
    assert pace_of(monkeypatch, codec_seconds, store_seconds, ENOUGH).compress is compress


def test_nothing_is_decided_on_a_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before enough has gone through, the default holds."""
    assert pace_of(monkeypatch, 1.0, 0.001, ENOUGH - 1).compress


def test_first_stages_are_waited_for() -> None:
    """Whoever waits for the first stages may change what they read, while later stages still run."""
    gate = threading.Event()
    read: list[int] = []
    with Pipeline(2) as pipeline:
        stages = (pipeline.cpu, lambda _: read.append(1)), (pipeline.io, lambda _: gate.wait(60))
        jobs = [pipeline.submit(1, *stages) for _ in range(2)]
        pipeline.wait_for_first_stages()
        assert read == [1, 1]
        assert not any(job.done() for job in jobs)
        gate.set()
        pipeline.finish()
    assert all(job.done() for job in jobs)


def test_first_stages_that_fail_are_over_too() -> None:
    """An error in a first stage ends the wait and is raised by the pipeline."""

    def fail(_: object) -> None:
        raise ValueError("no")

    with Pipeline(1) as pipeline:
        pipeline.submit(1, (pipeline.cpu, fail))
        pipeline.wait_for_first_stages()
        with pytest.raises(ValueError, match="no"):
            pipeline.finish()


def test_bytes_in_flight_are_bounded() -> None:
    """P6: no more than the window is in flight, whatever its jobs wait for."""
    lock, now, most = threading.Lock(), [0], [0]
    gate = threading.Semaphore(0)

    def hold(_: object) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        gate.acquire(timeout=60)
        with lock:
            now[0] -= 1

    with Pipeline(8, cpu=8, window=3) as pipeline:
        feeder = threading.Thread(target=lambda: [pipeline.submit(1, (pipeline.cpu, hold)) for _ in range(9)])
        feeder.start()
        for _ in range(9):
            gate.release()
        feeder.join()
        pipeline.finish()
    assert most[0] <= 3
