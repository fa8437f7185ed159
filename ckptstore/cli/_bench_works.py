"""What ``ckptstore bench`` measures: the bare store, a save, a restore, a second save, small requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

import ckptstore
from ckptstore import codecs
from ckptstore.errors import CorruptionError
from ckptstore.manifest import digest_of
from ckptstore.pipeline import Progress, cores
from ckptstore.stores import OpLog, Store, open_store

PART = 32 * 1024 * 1024
SMALL = 10
"""Small requests of each kind, one after the other."""
CHANGED = 0.01

Bar = Callable[[str], AbstractContextManager[Progress]]
State = dict[str, dict[str, npt.NDArray[np.float32]]]


@dataclass
class Found:
    """Seconds of each work in each round, and what the last round moved."""

    bytes_state: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)
    stall: str = ""
    """Why the stall was not measured."""

    def add(self, work: str, seconds: float) -> None:
        """One more measurement."""
        self.seconds.setdefault(work, []).append(seconds)

    def median(self, work: str) -> float:
        """Seconds of a work."""
        return median(self.seconds[work])


def make_state(nbytes: int, seed: int = 7) -> State:
    """fp32 weights, both moments of Adam, adapters of one hundredth: numbers distributed as training leaves them."""
    rng = np.random.default_rng(seed)
    adapter = max(int(nbytes * CHANGED) // 4, 1)
    each = max((nbytes // 4 - adapter) // 3, 1)
    state: State = {"model": {"adapter": rng.standard_normal(adapter, np.float32)}, "optimizer": {}}
    for number, start in enumerate(range(0, each, PART // 8)):
        count = min(PART // 8, each - start)
        scale = np.exp(rng.standard_normal(count // 256 + 1, np.float32) - 9).repeat(256)[:count]
        moment = rng.standard_normal(count, np.float32) * scale
        state["model"][f"{number}.weight"] = rng.standard_normal(count, np.float32) * np.float32(0.02)
        state["optimizer"] |= {f"{number}.exp_avg": moment, f"{number}.exp_avg_sq": moment * moment}
    return state


def arrays(state: State) -> Iterator[npt.NDArray[np.float32]]:
    """All arrays of a state."""
    for record in state.values():
        yield from record.values()


def small_requests(store: Store, found: Found) -> None:
    """The time of one request that carries almost nothing: what the distance to the store costs."""
    body = b"x" * 100
    for number in range(SMALL):
        key = f"small/{number}"
        calls: dict[str, Callable[[], object]] = {
            "put": lambda key=key: store.put(key, body, if_absent=True),  # type: ignore[misc]
            "get": lambda key=key: store.get(key),  # type: ignore[misc]
            "info": lambda key=key: store.info(key),  # type: ignore[misc]
            "list": lambda: list(store.list("small/")),
            "delete": lambda key=key: store.delete(key),  # type: ignore[misc]
        }
        for verb, call in calls.items():
            found.add(f"small {verb}", _timed(call))


def codec_speed(state: State, found: Found) -> None:
    """Digest and codec in memory, on all cores: what a save could do on an infinitely fast store."""
    pieces = [array.reshape(-1)[: PART // 4].data.cast("B") for array in list(arrays(state))[:4]]
    nbytes = sum(piece.nbytes for piece in pieces) * cores()

    def one(piece: memoryview) -> None:
        digest_of(piece)
        codecs.encode(piece, 4)

    with ThreadPoolExecutor(cores()) as pool:
        times = [_timed(lambda: list(pool.map(one, pieces * cores()))) for _ in range(2)]
    found.add("codec", min(times))  # the first time, each thread makes its tools
    found.facts["bytes codec"] = nbytes


def round_of(place: str, options: Mapping[str, Any], state: State, number: int, found: Found, bar: Bar) -> None:
    """One round: every work once, in an own prefix, which is emptied at its end."""
    with open_store(f"{place}/raw{number}", **options) as store:
        try:
            _raw(store, state, found, bar)
        finally:
            empty(store)
    log = OpLog()
    with ckptstore.open(f"{place}/repo{number}", **options, on_request=log) as repo:
        try:
            _repository(repo, log, state, found, bar)
        finally:
            empty(repo.store)


def _raw(store: Store, state: State, found: Found, bar: Bar) -> None:
    # Cut as a save would cut, but never below one part an array: the limit is that of large objects.
    joined = np.concatenate([array.reshape(-1) for array in arrays(state)]).data.cast("B")
    parts = {f"{start:015d}": joined[start : start + PART] for start in range(0, joined.nbytes, PART)}
    with ThreadPoolExecutor(store.traits.concurrency) as pool:
        for work, call in (("raw put", lambda item: store.put(*item)), ("raw get", lambda item: store.get(item[0]))):
            with bar(work) as move:
                found.add(work, _timed(lambda: _all(pool, call, parts, move, joined.nbytes)))  # noqa: B023


def _all(
    pool: ThreadPoolExecutor,
    call: Callable[[tuple[str, memoryview]], object],
    parts: dict[str, memoryview],
    move: Progress,
    total: int,
) -> None:
    done = 0
    for (_, part), _result in zip(parts.items(), pool.map(call, parts.items()), strict=True):
        done += part.nbytes
        move(done, total)


def _repository(repo: ckptstore.Repository, log: OpLog, state: State, found: Found, bar: Bar) -> None:
    log.clear()
    with bar("save") as move:
        saved = _result(found, "save", lambda: repo.save(1, state, progress=move))
    stored = sum(record.bytes_stored for record in saved.records.values())
    found.facts |= {"requests save": log.count(), "bytes stored": stored}
    found.facts["chunks"] = sum(record.chunks for record in saved.records.values())

    target = {name: {key: np.zeros_like(array) for key, array in record.items()} for name, record in state.items()}
    log.clear()
    with bar("restore") as move:
        _result(found, "restore", lambda: repo.checkpoint(1).load(into=target, progress=move))
    found.facts["requests restore"] = log.count()
    for ours, theirs in zip(arrays(state), arrays(target), strict=True):
        if not np.array_equal(ours.view(np.uint32), theirs.view(np.uint32)):
            raise CorruptionError(f"a restore from {repo.url} gave other bytes than were saved: please report this")

    state["model"]["adapter"] *= np.float32(1.01)
    log.clear()
    with bar("second save") as move:
        again = _result(found, "second save", lambda: repo.save(2, state, progress=move))
    found.facts |= {"requests second save": log.count(), "bytes changed": state["model"]["adapter"].nbytes}
    found.facts["bytes sent again"] = again.report.bytes_sent if again.report else 0
    _stall(repo, state, found)


def _stall(repo: ckptstore.Repository, state: State, found: Found) -> None:
    save_async: Any = getattr(repo, "save_async", None)
    if save_async is None:
        found.stall = "this version has no save_async"
        return
    save_async(3, state).result()  # the first one allocates the copy
    begun = time.perf_counter()
    handle = save_async(4, state)
    found.add("stall", time.perf_counter() - begun)
    handle.result()


def _result(found: Found, work: str, call: Callable[[], Any]) -> Any:
    begun = time.perf_counter()
    result = call()
    found.add(work, time.perf_counter() - begun)
    return result


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def empty(store: Store) -> None:
    """Delete all that a store holds, and the scratch files of what was interrupted."""
    keys = [info.key for partial in (False, True) for info in store.list(partial=partial)]
    with ThreadPoolExecutor(store.traits.concurrency) as pool:
        list(pool.map(store.delete, keys))
