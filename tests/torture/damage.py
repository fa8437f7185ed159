"""Campaign ``damage``: every object of a repository, damaged in every way: told by name, or stepped over, or harmless.

The repository holds three epochs that share chunks, a replaced one among them. After each damage every epoch either
loads bit for bit or ends in a ``CorruptionError`` that names the object, and ``latest`` is the newest intact one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptstore import CkptStoreError, CorruptionError, Repository, keys
from ckptstore.stores import LocalStore, MemoryStore
from ckptstore.stores.base import Store
from tests.repository.helpers import contents
from tests.repository.test_damage import DAMAGES, flip
from tests.torture.content import CHUNK, content, what_differs
from tests.torture.work import Work

VERSIONS = {1: 1, 2: 2, 3: 4}
STRIDE = 397  # bytes from one flipped bit to the next, in the full profile

Damage = Callable[[bytes, bytes], bytes | None]


def run(work: Work) -> None:
    """``size`` cases of each store, chosen by dice; 0: all of them."""
    objects = _prepare()
    for kind in ("memory", "folder"):
        store: Store = MemoryStore() if kind == "memory" else LocalStore(work.folder / "repo")
        for key, data in objects.items():
            store.put(key, data)
        cases = list(_cases(objects))
        if work.size:
            cases = work.dice(kind).sample(cases, min(work.size, len(cases)))
        for key, how, damage in cases:
            broken = damage(objects[key], objects[_sibling(objects, key)])
            if broken != objects[key]:
                _one(work, f"{kind}/{key}/{how}", store, key, broken)
                store.put(key, objects[key])
            work.done()
            if work.enough:
                return


def number_of_cases() -> int:
    """How many cases there are on one store."""
    return sum(1 for _ in _cases(_prepare()))


def _prepare() -> dict[str, bytes]:
    store = MemoryStore()
    repo = Repository(store, chunk_size=CHUNK)
    for epoch, version in ((1, 1), (2, 2), (3, 3)):
        repo.save(epoch, content(epoch, version), {"version": version})
    repo.save(3, content(3, 4), {"version": 4}, replace=True)
    return contents(store)


def _cases(objects: dict[str, bytes]) -> Iterator[tuple[str, str, Damage]]:
    for key, data in sorted(objects.items()):
        yield from ((key, how, damage) for how, damage in DAMAGES.items())
        for at in range(0, len(data), STRIDE):
            yield key, f"flip of byte {at}", flip(at / max(1, len(data) - 1))


def _sibling(objects: dict[str, bytes], key: str) -> str:
    """Another object of the same kind, if there is one."""

    def kind(key: str) -> str:
        parsed = keys.parse_content_key(key)
        return parsed[1] if parsed is not None else key.partition("/")[0]

    return next((other for other in sorted(objects) if other != key and kind(other) == kind(key)), key)


def _one(work: Work, step: str, store: Store, key: str, broken: bytes | None) -> None:
    if broken is None:
        store.delete(key)
    else:
        store.put(key, broken)
    work.count(attempts=1, faults=1)
    try:
        repo = Repository(store, create=False, chunk_size=CHUNK)
        intact = [epoch for epoch in sorted(VERSIONS) if _loads(work, step, repo, key, epoch)]
        try:
            latest = repo.latest(deep=True)
        except CorruptionError:
            if intact:
                raise
            return  # a chunk that all three share
        if (latest.epoch if latest is not None else None) != max(intact, default=None):
            work.blame("other", step, f"latest is {latest}, intact are {intact}")
    except CkptStoreError as error:
        work.blame("other", step, f"the repository is of no use: {error!r}")
    except Exception as error:  # noqa: BLE001 (that is the question)
        work.blame("untyped", step, repr(error))


def _loads(work: Work, step: str, repo: Repository, key: str, epoch: int) -> bool:
    """Whether the epoch is intact. If it is not, what is raised must name the object."""
    gone = key == keys.manifest_key(epoch, 1 + (epoch == 3)) and step.endswith("deleted")
    try:
        checkpoint = repo.checkpoint(epoch)
        wrong = what_differs(checkpoint.load(), epoch, VERSIONS[epoch])
    except CorruptionError as error:
        work.count(refused=1)
        if error.key != key:
            work.blame("lost", step, f"epoch {epoch} does not load, and the damage is elsewhere: {error!r}")
        return False
    except CkptStoreError as error:
        if not gone:
            work.blame("lost", step, f"epoch {epoch} is not there: {error!r}")
        return False
    work.count(checked=1)
    if wrong:
        work.blame("lost", step, f"epoch {epoch} loads other bits: {wrong}")
    return True
