"""Store: bytes under keys. Five verbs; everything above is built on these and on nothing else.

What ckptstore assumes of a store, and what every implementation owes:

* **All or nothing.** Nobody ever sees a part of an object. A put that fails or dies leaves the old
  object or none.
* **Durable.** When ``put`` returns, the object survives a crash of the machine it is kept on.
* **Strong reads.** ``get``, ``info`` and ``list`` started after a put or delete returned see it.
* **Create-only.** ``put(if_absent=True)`` never changes an object that holds other bytes, however
  many writers race; exactly one of them wins.
* **A clock.** ``ObjectInfo.modified`` is stamped by the store and does not run backwards by more
  than the lease margin.

``put(if_absent=True)`` on a key that already holds *exactly these bytes* is a success. A reply can be
lost after the put took effect, and clients below us resend on their own; a second put then meets
its own ghost. Each object of ours carries something unique to its attempt, so equal bytes mean
that we put them.

Errors are those of :mod:`ckptstore.errors` and no others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from ckptstore.stores.space import Space

Body = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows of an object: key, size in bytes, time of the last put.

    ``modified`` is in seconds since 1970-01-01 UTC by the *store's* clock.
    """

    key: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """What a store can do.

    Attributes:
        url: where it is, for messages; never holds a secret.
        conditional_put: True when ``if_absent`` is known to be honoured, False when it is known
            to be ignored, None when only a probe can tell (see ``probe_conditional_put``).
        concurrency: how many requests it takes at once with profit.
        copies: whether a put holds a copy of its body meanwhile, so that fewer bytes may be in flight (P6).
        filesystem: of a folder, once it was looked at: its type as the mount table has it ("ext4", "fuse.rclone").
        network: whether others than this machine may change what is there, so that it may be seen late.
        create_only: of a folder, once it was asked: "link" and "rename" never overwrite, "look" does when two race.
        weak: what is weak about the place, in words.
    """

    url: str
    conditional_put: bool | None
    concurrency: int
    copies: bool = False
    filesystem: str | None = None
    network: bool = False
    create_only: Literal["link", "rename", "look"] | None = None
    weak: tuple[str, ...] = ()


class Store(ABC):
    """Bytes under keys. Thread-safe. Keys are checked by :func:`ckptstore.keys.check_key`."""

    @property
    @abstractmethod
    def traits(self) -> StoreTraits:
        """What this store can do."""

    @abstractmethod
    def put(self, key: str, data: Body, *, if_absent: bool = False) -> None:
        """Store ``data`` under ``key``, whole and durably, or not at all.

        The store does not keep ``data`` after returning. With ``if_absent`` the put is create-only.

        Raises:
            ObjectExistsError: with ``if_absent``, when the key holds other bytes.
            StoreError: the object holds its old content, or none, or (on ``TransientError`` and
                ``DeadlineError`` only) possibly already the new one.
        """

    @abstractmethod
    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes ``[start, end)`` of an object, fewer where it is shorter than ``end``.

        Raises:
            ObjectNotFoundError: no such object.
            InvalidArgumentError: ``start`` or ``end`` is negative.
            StoreError: it could not be read.
        """

    def fetch(self, key: str, start: int, end: int, room: memoryview) -> memoryview:
        """As ``get``, but may put the bytes into ``room``: fresh memory for every chunk costs more than reading it.

        Args:
            room: writable bytes, at least ``end - start`` of them.

        Returns:
            The bytes, in ``room`` or in memory of their own: good as long as the caller leaves ``room`` alone.

        Raises:
            DeadlineError: a read hangs, and may still write into ``room``: let go of it.
        """
        return memoryview(self.get(key, start, end))

    @abstractmethod
    def info(self, key: str) -> ObjectInfo:
        """Size and time of an object.

        Raises:
            ObjectNotFoundError: no such object.
            StoreError: the store did not answer.
        """

    @abstractmethod
    def list(self, prefix: str = "", *, partial: bool = False) -> Iterator[ObjectInfo]:
        """All objects whose key starts with ``prefix`` (a string, not a folder), in no order.

        An empty answer is proof that there are none; anything that prevents the proof raises.
        With ``partial``, the scratch objects of interrupted puts are listed *instead*, under keys that
        ``delete`` takes (stores whose puts leave nothing behind list nothing).

        Raises:
            InvalidArgumentError: no key can begin with ``prefix``.
            RepositoryNotFoundError: the bucket does not exist.
            StoreError: the listing is not complete.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object. One that is already gone is a success.

        Raises:
            StoreError: it may still be there.
        """

    def space(self) -> Space | None:
        """What is left to write to, where the store can tell without a request; None where not. Never raises."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release connections. The store must not be used afterwards. May be called twice."""

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
