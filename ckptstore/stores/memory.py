"""MemoryStore: objects in a dictionary. The reference for what every other store must do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptstore.errors import InvalidArgumentError, ObjectExistsError, ObjectNotFoundError
from ckptstore.keys import check_key
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits


@dataclass(slots=True)
class _Space:
    """What all stores of one name share: ``key -> (body, modified)``."""

    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_spaces: dict[str, _Space] = {}
_spaces_lock = threading.Lock()


class MemoryStore(Store):
    """Objects in the memory of this process, gone with it.

    Args:
        name: stores of the same name hold the same objects; without one the store is private.
        clock: the clock that stamps ``ObjectInfo.modified``.
    """

    def __init__(self, name: str | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._clock = clock
        if name is None:
            self._space = _Space()
        else:
            with _spaces_lock:
                self._space = _spaces.setdefault(name, _Space())

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(url=f"memory://{self._name or ''}", conditional_put=True, concurrency=4)

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        check_key(key)
        body = bytes(data)
        objects = self._space.objects
        with self._space.lock:
            if if_absent and key in objects:
                if objects[key][0] != body:
                    raise ObjectExistsError(f"{key!r} already holds other bytes in {self.traits.url}", key=key)
                return
            objects[key] = (body, self._clock())

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if start < 0 or (end is not None and end < 0):
            raise InvalidArgumentError(f"range [{start}, {end}) of {key!r}: use offsets from 0", key=key)
        return self._find(key)[0][start:end]

    def info(self, key: str) -> ObjectInfo:
        body, modified = self._find(key)
        return ObjectInfo(key, len(body), modified)

    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        if prefix:
            check_key(prefix + "0")  # a prefix is sound when some key can start with it
        if partial:
            return iter(())
        with self._space.lock:
            objects = tuple(self._space.objects.items())
        return iter([ObjectInfo(k, len(body), when) for k, (body, when) in objects if k.startswith(prefix)])

    def delete(self, key: str) -> None:
        check_key(key)
        with self._space.lock:
            self._space.objects.pop(key, None)

    def close(self) -> None:
        """Nothing to release; the objects stay for other stores of the same name."""

    def _find(self, key: str) -> tuple[bytes, float]:
        check_key(key)
        with self._space.lock:
            found = self._space.objects.get(key)
        if found is None:
            raise ObjectNotFoundError(f"no object {key!r} in {self.traits.url}", key=key)
        return found
