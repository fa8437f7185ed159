"""Damage matrix: each object of a checkpoint, damaged in each way, is told or stepped over, and never a wrong array."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptstore import CorruptionError, EpochNotFoundError, Repository, keys
from ckptstore.stores import MemoryStore
from ckptstore.stores.base import Store
from ckptstore.stores.local import LocalStore
from tests.conftest import Count
from tests.repository.helpers import assert_same, contents, keys_of, make_state, manifests_of, open_repo, pour

Damage = Callable[[bytes, bytes], bytes | None]
"""The new content, from the old one and that of a sibling; None deletes the object."""


def flip(place: float) -> Damage:
    """Flip one bit at a place between 0 (the first byte) and 1 (the last)."""

    def damage(data: bytes, _: bytes) -> bytes:
        broken = bytearray(data)
        at = round(place * (len(data) - 1))
        broken[at] ^= 1 << (at % 8)
        return bytes(broken)

    return damage


DAMAGES: dict[str, Damage] = {
    **{f"flip at {place:.2f}": flip(place) for place in (0, 0.02, 0.25, 0.5, 0.75, 0.98, 1)},
    "cut to half": lambda data, _: data[: len(data) // 2],
    "cut by one": lambda data, _: data[:-1],
    "extended by one": lambda data, _: data + b"\0",
    "doubled": lambda data, _: data + data,
    "empty": lambda data, _: b"",
    "zeros": lambda data, _: bytes(len(data)),
    "a sibling's": lambda _, sibling: sibling,
    "a sibling's, in length": lambda data, sibling: (sibling * (len(data) // len(sibling) + 1))[: len(data)],
    "deleted": lambda data, _: None,
}


@pytest.fixture(params=["memory", "local"])
def new_store(request: pytest.FixtureRequest, fast_folder: Path) -> Callable[[], Store]:
    """Makes empty stores."""
    numbers = itertools.count()
    if request.param == "memory":
        return MemoryStore
    return lambda: LocalStore(fast_folder / str(next(numbers)))


def three_epochs() -> dict[str, bytes]:
    store = MemoryStore()
    repo = open_repo(store)
    for epoch in (1, 2, 3):
        repo.save(epoch, make_state(epoch))
    return contents(store)


def own_keys(objects: dict[str, bytes], epoch: int) -> dict[str, str]:
    """Keys that only one epoch needs → a sibling of the same kind from another epoch."""
    store = MemoryStore()
    pour(objects, store)
    attempts = {manifest.epoch: manifest.attempt for manifest in manifests_of(store)}
    other = epoch - 1
    found = {keys.manifest_key(epoch, 1): keys.manifest_key(other, 1)}
    for prefix in ("records", "chunks"):
        own = [key for key in objects if key.startswith(f"attempts/{attempts[epoch]}/{prefix}/")]
        siblings = [key for key in objects if key.startswith(f"attempts/{attempts[other]}/{prefix}/")]
        assert own
        assert siblings
        found.update(zip(own, itertools.cycle(siblings)))
    return found


def damaged_stores(
    objects: dict[str, bytes], new_store: Callable[[], Store], epoch: int
) -> Iterator[tuple[str, str, Store]]:
    """``(key, how, store)`` for each object of the epoch and each damage."""
    for key, sibling in own_keys(objects, epoch).items():
        for how, damage in DAMAGES.items():
            broken = damage(objects[key], objects[sibling])
            if broken == objects[key]:
                continue
            store = new_store()
            pour(objects, store)
            if broken is None:
                store.delete(key)
            else:
                store.put(key, broken)
            yield key, how, store


def test_damage_matrix(new_store: Callable[[], Store], count: Count) -> None:
    """P3: loading a damaged epoch raises CorruptionError that names the object; ``latest`` steps back and tells."""
    objects = three_epochs()
    cases = harmless = 0
    for key, how, store in damaged_stores(objects, new_store, 3):
        cases += 1
        case = f"{key} {how}"
        if key.startswith("manifests/") and how == "deleted":  # then the epoch does not exist
            with pytest.raises(EpochNotFoundError):
                open_repo(store).checkpoint(3)
        elif how.startswith("flip") and is_harmless(store, key):
            harmless += 1
            continue
        else:
            with pytest.raises(CorruptionError) as caught:
                open_repo(store).checkpoint(3).load()
            assert caught.value.key == key, case
            assert key in str(caught.value), case
            assert open_repo(store).verify().problems[0].key == key, case
        steps_back(store, key, how, objects, case)
        assert_same(open_repo(store).checkpoint(1).load(), make_state(1))
    assert harmless < cases / 50
    count("damage cases, of which without any effect", harmless)
    count("damage cases", cases)


def is_harmless(store: Store, key: str) -> bool:
    """Whether the flipped bit is one of the few that zstd does not look at, so that all content is still exact."""
    if not ("/records/" in key or "/chunks/" in key):
        return False
    try:
        loaded = open_repo(store).checkpoint(3).load()
    except CorruptionError:
        return False
    assert_same(loaded, make_state(3))
    return True


def steps_back(store: Store, key: str, how: str, objects: dict[str, bytes], case: str) -> None:
    gone = key.startswith("manifests/") and how == "deleted"
    latest = open_repo(store).latest(deep=True)
    assert latest is not None
    assert latest.epoch == 2, case
    assert [(s.epoch, s.key) for s in latest.skipped] == ([] if gone else [(3, key)]), case
    assert all(key in s.reason for s in latest.skipped), case
    assert_same(latest.load(), make_state(2))
    shallow = open_repo(store).latest()
    assert shallow is not None
    same_length = key in keys_of(store) and len(store.get(key)) == len(objects[key])
    if "/chunks/" in key and same_length:
        assert shallow.epoch == 3, case  # a shallow look reads no chunk; loading does
        return
    assert shallow.epoch == 2, case
    assert [s.key for s in shallow.skipped] == ([] if gone else [key]), case


def test_every_byte_of_every_object_counts() -> None:
    """P3: a flipped bit anywhere (each 389th byte, headers completely) is detected, or changes no loaded bit."""
    objects = three_epochs()
    store = MemoryStore()
    pour(objects, store)
    for key in own_keys(objects, 3):
        data = objects[key]
        for at in sorted({*range(min(64, len(data))), *range(0, len(data), 389), len(data) - 1}):
            broken = bytearray(data)
            broken[at] ^= 1 << (at % 8)
            store.put(key, broken)
            if is_harmless(store, key):
                continue
            with pytest.raises(CorruptionError) as caught:
                open_repo(store).checkpoint(3).load()
            assert caught.value.key == key, at
        store.put(key, data)
    assert_same(open_repo(store).checkpoint(3).load(), make_state(3))


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_marker(how: str) -> None:
    """P3: the marker is not the data: a repository whose marker is lost or damaged opens, loads and saves."""
    objects = three_epochs()
    store = MemoryStore()
    pour(objects, store)
    broken = DAMAGES[how](objects[keys.MARKER], objects[keys.manifest_key(1, 1)])
    if broken is None:
        store.delete(keys.MARKER)
    else:
        store.put(keys.MARKER, broken)
    before = contents(store)
    repo = open_repo(store, create=False)
    latest = repo.latest()
    assert latest is not None
    assert_same(latest.load(), make_state(3))
    assert contents(store) == before
    repo.save(4, make_state(4))
    assert_same(open_repo(store).checkpoint(4).load(), make_state(4))


@pytest.mark.parametrize("how", ["cut to half", "flip at 0.50", "empty", "zeros"])
def test_damaged_marker_of_an_empty_repository(how: str) -> None:
    """P4: a damaged marker without any manifest is damage and names the marker, not an empty repository."""
    store = MemoryStore()
    open_repo(store)
    broken = DAMAGES[how](store.get(keys.MARKER), b"x")
    assert broken is not None
    store.put(keys.MARKER, broken)
    with pytest.raises(CorruptionError) as caught:
        open_repo(store)
    assert caught.value.key == keys.MARKER


def test_all_epochs_damaged() -> None:
    """P4: epochs that exist but are all damaged are an error with every reason, never "no checkpoint"."""
    objects = three_epochs()
    store = MemoryStore()
    pour(objects, store)
    own = {epoch: next(k for k in own_keys(objects, epoch) if "/chunks/" in k) for epoch in (2, 3)}
    store.delete(own[3])
    store.put(own[2], bytes(len(objects[own[2]])))
    store.put(keys.manifest_key(1, 1), b"{}")
    with pytest.raises(CorruptionError) as caught:
        open_repo(store).latest(deep=True)
    for named in ("epoch 3", "epoch 2", "epoch 1", own[3], own[2], keys.manifest_key(1, 1)):
        assert named in str(caught.value)
    with pytest.raises(CorruptionError):
        open_repo(store).latest(deep=True)


def test_a_damaged_chunk_that_epochs_share() -> None:
    """P3: a chunk that several epochs reuse takes them all down when it is damaged, and each is told."""
    store = MemoryStore()
    repo = open_repo(store)
    state = make_state(1)
    for epoch in (1, 2, 3):
        repo.save(epoch, state)
    shared = next(key for key in keys_of(store) if "/chunks/" in key)
    store.put(shared, flip(0.5)(store.get(shared), b"") or b"")
    repo = open_repo(store)
    with pytest.raises(CorruptionError):
        repo.latest(deep=True)
    # The process that knows of the damage never builds on it: neither a new epoch nor a replaced one.
    for epoch, replace in ((4, False), (3, True)):
        report = repo.save(epoch, state, replace=replace).report
        assert report is not None
        health = open_repo(store).verify(epoch)
        assert health.ok, health.problems
        assert_same(open_repo(store).checkpoint(epoch).load(), state)
    latest = open_repo(store).latest(deep=True)
    assert latest is not None
    assert latest.epoch == 4


@pytest.mark.parametrize("found_by", ["latest", "load", "verify", "shallow"])
@pytest.mark.parametrize("how", ["flip at 0.50", "cut by one", "deleted", "zeros"])
def test_replace_after_a_step_back(how: str, found_by: str) -> None:
    """P3: after a step back, saving the damaged epoch again (and the next one) reuses nothing that is damaged."""
    objects = three_epochs()
    for key in [k for k in own_keys(objects, 3) if "/chunks/" in k]:
        store = MemoryStore()
        pour(objects, store)
        broken = DAMAGES[how](objects[key], b"x")
        if broken is None:
            store.delete(key)
        else:
            store.put(key, broken)
        if found_by == "shallow" and broken is not None and len(broken) == len(objects[key]):
            continue  # only a read can find it
        repo = open_repo(store)
        find(repo, found_by)
        repo.save(4, make_state(3))
        assert open_repo(store).verify(4).ok
        repo.save(3, make_state(3), replace=True)
        assert open_repo(store).verify().ok
        assert_same(open_repo(store).checkpoint(3).load(), make_state(3))
        assert open_repo(store).epochs() == [1, 2, 3, 4]


def find(repo: Repository, by: str) -> None:
    """Come upon the damage of epoch 3."""
    if by in ("latest", "shallow"):
        latest = repo.latest(deep=by == "latest")
        assert latest is not None
        assert latest.epoch == 2
    elif by == "verify":
        assert not repo.verify(3).ok
    else:
        with pytest.raises(CorruptionError):
            repo.checkpoint(3).load()


def test_a_wrong_byte_on_the_way_is_read_again() -> None:
    """P3: a byte that was wrong once, on the way, costs a second read and no epoch."""
    store = MemoryStore()
    open_repo(store).save(1, make_state(1))

    class Flaky(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[str] = set()

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            data = super().get(key, start, end)
            if "/chunks/" not in key or key in self.seen:
                return data
            self.seen.add(key)
            return flip(0.5)(data, b"") or b""

    flaky = Flaky()
    pour(contents(store), flaky)
    assert_same(open_repo(flaky).checkpoint(1).load(), make_state(1))
    assert flaky.seen


def test_in_place_load_of_a_damaged_epoch() -> None:
    """P3: a damaged chunk never reaches an existing array: it keeps its old bytes or has verified new ones."""
    objects = three_epochs()
    for key in [k for k in own_keys(objects, 3) if "/chunks/" in k]:
        store = MemoryStore()
        pour(objects, store)
        store.put(key, flip(0.5)(objects[key], b"") or b"")
        target, old, new = make_state(2), make_state(2), make_state(3)
        with pytest.raises(CorruptionError):
            open_repo(store).checkpoint(3).load(into=target)
        for record, name in (("model", "frozen"), ("model", "w"), ("model", "b"), ("optim", "m")):
            now = target[record][name]
            blocks = range(0, now.nbytes, 1024)
            for at in blocks:
                piece = now.tobytes()[at : at + 1024]
                assert piece in (
                    old[record][name].tobytes()[at : at + 1024],
                    new[record][name].tobytes()[at : at + 1024],
                )
