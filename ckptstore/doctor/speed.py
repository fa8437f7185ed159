"""How fast is the store, at a few sizes and concurrencies, and what settings does that recommend?

Bounded in time and bytes: a few seconds, at most some 220 MiB up and down again; what would take longer by what was
measured so far is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

from ckptstore import keys
from ckptstore.chunks import CHUNK_SIZE
from ckptstore.doctor.findings import Finding
from ckptstore.doctor.patient import Patient
from ckptstore.pipeline import side_by_side
from ckptstore.preflight import human
from ckptstore.stores import Store

SIZES = (64 * 1024, 1024 * 1024, 8 * 1024 * 1024)
WIDTHS = (1, 4, 16)
SECONDS = 8.0
"""Nothing is begun after so many seconds."""
_CELL_SECONDS = 0.3
"""A thread puts once more only before so much time has passed."""
_LONGEST_CELL = 3.0
"""A cell that would take longer, by what was measured so far, is left out."""
_MOST_EACH = {64 * 1024: 8, 1024 * 1024: 2}
_GOOD = 0.9
_SLOWEST_REQUEST = 20.0
_SHARE_OF_LATENCY = 0.1
_LEAST_CHUNK, _MOST_CHUNK = 1024 * 1024, 32 * 1024 * 1024
_SLOW_LATENCY, _SLOW_RATE = 1.0, 1024 * 1024.0


@dataclass(frozen=True, slots=True)
class Cell:
    """What so many requests at once, of so many bytes each, came to.

    Attributes:
        size: bytes of each.
        concurrency: requests at once.
        requests: puts that were made; as many gets.
        put_seconds, get_seconds: of one request, the median.
        put_rate, get_rate: bytes per second of all together.
    """

    size: int
    concurrency: int
    requests: int
    put_seconds: float
    get_seconds: float
    put_rate: float
    get_rate: float


@dataclass(frozen=True, slots=True)
class Settings:
    """What to hand to ``ckptstore.open``; None: the default will do."""

    concurrency: int | None
    chunk_size: int | None


def measure(
    store: Store, sizes: Sequence[int] = SIZES, widths: Sequence[int] = WIDTHS, *, create: bool = True
) -> list[Cell]:
    """Put and get random bytes, and delete them again.

    Args:
        create: put as saves do, create-only.
    """
    end = time.monotonic() + SECONDS
    cells: list[Cell] = []
    for size in sizes:
        body = os.urandom(size)  # as hard to compress as weights are
        for width in widths:
            room = store.space()
            if room is not None and room.room is not None and room.room < 4 * size * width * _MOST_EACH.get(size, 1):
                continue  # others need it more
            best = max((cell.put_rate for cell in cells), default=0.0)
            if time.monotonic() < end and (not cells or size * width / max(best, 1.0) <= _LONGEST_CELL):
                cells.append(_cell(store, body, width, create))
    return cells


def _cell(store: Store, body: bytes, width: int, create: bool) -> Cell:
    made: list[list[str]] = [[] for _ in range(width)]
    puts: list[float] = []
    gets: list[float] = []

    def put(number: int) -> None:
        end = time.monotonic() + _CELL_SECONDS
        for _ in range(_MOST_EACH.get(len(body), 1)):
            key = keys.probe_key()
            made[number].append(key)
            puts.append(_timed(partial(store.put, key, body, if_absent=create)))
            if time.monotonic() > end:
                return

    def get(number: int) -> None:
        gets.extend(_timed(partial(store.get, key, 0, len(body))) for key in made[number])

    try:
        put_wall = _timed(lambda: side_by_side(width, put, range(width)))
        get_wall = _timed(lambda: side_by_side(width, get, range(width)))
    finally:
        mine = [key for some in made for key in some]
        side_by_side(width, store.delete, mine)
    total = len(puts) * len(body)
    return Cell(len(body), width, len(puts), median(puts), median(gets), total / put_wall, total / get_wall)


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return max(time.perf_counter() - begun, 1e-9)


def recommend(cells: Sequence[Cell], default: int) -> Settings:
    """Settings by what was measured.

    The concurrency is the smallest with nine tenths of the best rate, up and down; the default wherever it is as good.
    A chunk is as large as by default, but not so small that the distance to the store takes over a tenth of a request,
    nor so large that one request takes over 20 s: a request that fails begins anew.

    Args:
        default: concurrency by default.
    """
    rates = {
        width: tuple(
            max(getattr(cell, rate) for cell in cells if cell.concurrency == width) for rate in ("put_rate", "get_rate")
        )
        for width in sorted({cell.concurrency for cell in cells})
    }
    best = [max(rate[way] for rate in rates.values()) for way in (0, 1)]
    good = [width for width, rate in rates.items() if all(r >= _GOOD * b for r, b in zip(rate, best, strict=True))]
    width = default if default in good else min(good, default=default)
    latency = min(cell.put_seconds for cell in cells if cell.size == min(c.size for c in cells))
    alone = max(cell.size / cell.put_seconds for cell in cells if cell.concurrency <= width)
    least = latency / _SHARE_OF_LATENCY * alone
    chunk = min(max(CHUNK_SIZE, least), _SLOWEST_REQUEST * alone)
    chunk = 1 << round(max(_LEAST_CHUNK, min(chunk, _MOST_CHUNK))).bit_length() - 1
    return Settings(None if width == default else width, None if chunk == CHUNK_SIZE else chunk)


def check_speed(patient: Patient) -> Iterator[Finding]:
    """How long does a small request take, how many bytes a second go up and down, and what follows from that?"""
    why = _why_not(patient)
    if why:
        yield Finding("speed", None, f"not measured: {why}")
        return
    cells = measure(patient.store, SIZES, WIDTHS, create=patient.conditional is not False)
    if not cells:
        yield Finding("speed", None, "not measured: there is too little room to try")
        return
    small = min(cells, key=lambda cell: (cell.size, cell.concurrency))
    put, get = small.put_seconds, small.get_seconds
    said = f"{human_seconds(put)} for a put of {small.size // 1024} KiB, {human_seconds(get)} for a get"
    slow = max(put, get) > _SLOW_LATENCY
    advice = "each save makes some eight requests one after the other: use a store that is nearer" if slow else ""
    yield Finding("latency", None if slow else True, said, advice, {"put_seconds": put, "get_seconds": get})

    up, down = (max(cells, key=lambda cell, r=rate: getattr(cell, r)) for rate in ("put_rate", "get_rate"))  # type: ignore[misc]
    said = f"up {human(up.put_rate)}/s ({_cell_words(up)}), down {human(down.get_rate)}/s ({_cell_words(down)})"
    slow = min(up.put_rate, down.get_rate) < _SLOW_RATE
    advice = "a GB takes over a quarter of an hour: look at the network, or use a store that is nearer" if slow else ""
    facts = {"put_bytes_per_second": up.put_rate, "get_bytes_per_second": down.get_rate}
    yield Finding("throughput", None if slow else True, said, advice, {**facts, "cells": [asdict(c) for c in cells]})
    yield _settings(recommend(cells, patient.concurrency), patient.concurrency)


def _why_not(patient: Patient) -> str:
    if not (patient.may_put and patient.may_delete):
        return "something could not be put and deleted"
    if patient.locked:
        return f"what is put would stay for {patient.locked}"
    return ""


def _settings(settings: Settings, concurrency: int) -> Finding:
    facts = {"concurrency": settings.concurrency or concurrency, "chunk_size": settings.chunk_size or CHUNK_SIZE}
    chosen = {name: value for name, value in asdict(settings).items() if value is not None}
    if not chosen:
        said = f"the defaults fit: concurrency={concurrency}, chunk_size={CHUNK_SIZE // 1024**2} MiB"
        return Finding("settings", True, said, facts=facts)
    said = ", ".join(f"{n}={v}" if n == "concurrency" else f"{n}={v} ({v // 1024**2} MiB)" for n, v in chosen.items())
    call = ", ".join(f"{name}={value}" for name, value in chosen.items())
    return Finding("settings", True, f"best here: {said}", f"ckptstore.open(url, {call})", facts)


def _cell_words(cell: Cell) -> str:
    size = f"{cell.size // 1024} KiB" if cell.size < 1024 * 1024 else f"{cell.size // 1024**2} MiB"
    return f"{cell.concurrency} × {size}"


def human_seconds(value: float) -> str:
    """Seconds for a message."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"
