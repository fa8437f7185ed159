"""What the tests of a repository share: small states, exact comparison, and what may be left on a store."""

from __future__ import annotations

import math
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ckptstore import Repository, keys
from ckptstore.catalog import Catalog
from ckptstore.manifest import Manifest
from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from ckptstore.stores.local import LocalStore

CHUNK = 64 * 1024
State = dict[str, dict[str, Any]]


class Clock:
    """The store's clock. It stands still unless it is told to go."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds


class Interfering(MemoryStore):
    """Calls ``interfere`` once, right before or after the first call that ``at`` picks."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(clock=inner._clock)
        self._space = inner._space
        self.at: Callable[[str, str], bool] = lambda verb, key: False
        self.after = True
        self.interfere: Callable[[], object] | None = None

    def _hook(self, verb: str, key: str, after: bool) -> None:
        if self.interfere is not None and self.after == after and self.at(verb, key):
            act, self.interfere = self.interfere, None
            act()

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        self._hook("put", key, False)
        super().put(key, data, if_absent=if_absent)
        self._hook("put", key, True)

    def info(self, key: str) -> Any:
        self._hook("info", key, False)
        try:
            return super().info(key)
        finally:
            self._hook("info", key, True)

    def list(self, prefix: str = "", *, partial: bool = False) -> Any:
        self._hook("list", prefix, False)
        found = tuple(super().list(prefix, partial=partial))
        self._hook("list", prefix, True)
        return iter(found)


def make_state(seed: int, *, items: int = 12_000) -> State:
    """A model and an optimizer. What depends on ``seed`` differs between epochs, ``frozen`` never does."""
    noise = np.random.default_rng(seed)
    frozen = np.random.default_rng(0).standard_normal(items)
    return {
        "model": {
            "frozen": frozen,
            "w": noise.standard_normal(items),
            "b": noise.standard_normal(16).astype(np.float32),
        },
        "optim": {"m": noise.standard_normal(items).astype(np.float32), "step": seed, "lr": 0.1 / (seed + 1)},
    }


def tiny_state(seed: int) -> State:
    """One record with one chunk that changes and one that does not: few requests, for slow stores."""
    fixed = np.random.default_rng(0).integers(0, 256, CHUNK, dtype=np.uint8)
    return {"model": {"fixed": fixed, "w": np.random.default_rng(seed).standard_normal(64), "step": seed}}


def open_repo(store: Store, **options: Any) -> Repository:
    """A fresh repository object over ``store``: nothing remembered."""
    options.setdefault("chunk_size", CHUNK)
    return Repository(store, **options)


def keys_of(store: Store) -> list[str]:
    """The sorted keys of all objects."""
    return sorted(info.key for info in store.list())


def contents(store: Store) -> dict[str, bytes]:
    """Everything on a store."""
    return {key: store.get(key) for key in keys_of(store)}


def pour(objects: dict[str, bytes], store: Store) -> None:
    """Put all of ``objects`` on a store."""
    for key, data in objects.items():
        store.put(key, data)


def manifests_of(store: Store) -> list[Manifest]:
    """The manifests of all committed checkpoints."""
    catalog = Catalog(store)
    return [catalog.manifest(commit) for commit in catalog.committed()]


def reached(store: Store) -> set[str]:
    """The marker, the reserve and the record of checks if there are any, all manifests, and what they reach."""
    catalog = Catalog(store)
    found = {keys.MARKER, *(info.key for prefix in (keys.RESERVE, keys.CHECKED) for info in store.list(prefix))}
    for manifest in manifests_of(store):
        found |= {manifest.key} | catalog.reach(manifest)
    return found


def assert_no_debris(store: Store) -> None:
    """The store holds exactly what the marker and the manifests need, and no scratch file."""
    there, needed = set(keys_of(store)), reached(store)
    assert there == needed, (sorted(there - needed), sorted(needed - there))
    assert [info.key for info in store.list("", partial=True)] == []
    local = find_local(store)
    if local is not None:
        files = {
            os.path.relpath(os.path.join(at, name), local.root)
            for at, _, names in os.walk(local.root)
            for name in names
        }
        assert files == reached(store)


def find_local(store: Store | None) -> LocalStore | None:
    """The local store below any wrappers, if there is one."""
    while store is not None and not isinstance(store, LocalStore):
        store = getattr(store, "inner", None)
    return store


def differences(a: object, b: object, path: str = "state") -> Iterator[str]:
    """Where two states are not the same bit for bit, types and order included."""
    if type(a) is not type(b):
        yield f"{path}: {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, dict) and isinstance(b, dict):
        keys_a, keys_b = list(a), list(b)
        if [(type(key), repr(key)) for key in keys_a] != [(type(key), repr(key)) for key in keys_b]:
            yield f"{path}: keys {keys_a} and {keys_b}"
            return
        if isinstance(a, OrderedDict) and vars(a) != vars(b):
            yield f"{path}: attributes"
        for key, other in zip(keys_a, keys_b, strict=True):
            yield from differences(a[key], b[other], f"{path}.{key}")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            yield f"{path}: {len(a)} and {len(b)} items"
        for number, (left, right) in enumerate(zip(a, b, strict=False)):
            yield from differences(left, right, f"{path}.{number}")
    elif not _same_leaf(a, b):
        yield f"{path}: {a!r:.60} and {b!r:.60}"


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if type(a).__module__ == "torch":
        return _same_tensor(a, b)
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return _same_leaf(a.real, b.real) and _same_leaf(a.imag, b.imag)
    return bool(a == b)


def _same_tensor(a: Any, b: Any) -> bool:
    import torch

    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if math.prod(a.shape) == 0:
        return True
    raw_a, raw_b = (t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(raw_a, raw_b))


def assert_same(a: object, b: object) -> None:
    """Bit for bit, types and order included."""
    found = list(differences(a, b))
    assert not found, found[:10]
