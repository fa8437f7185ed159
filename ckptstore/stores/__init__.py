"""Stores: bytes under keys, on disks and in buckets, behind five verbs.

:func:`open_store` turns a URL into a store with retries. The classes are for tests, tools and stores of
your own: anything that passes ``ckptstore.testing.StoreSuite`` will do.
"""

from __future__ import annotations

from ckptstore.events import RetryEvent
from ckptstore.stores.base import Body, ObjectInfo, Store, StoreTraits
from ckptstore.stores.limit import LimitStore
from ckptstore.stores.local import LocalStore
from ckptstore.stores.memory import MemoryStore
from ckptstore.stores.opening import open_store, probe_conditional_put
from ckptstore.stores.remote import RemoteStore
from ckptstore.stores.retry import RetryPolicy, RetryStore
from ckptstore.stores.space import Space
from ckptstore.stores.trace import OpLog, StoreEvent, TraceStore
from ckptstore.stores.watch import WatchStore

__all__ = [
    "Body",
    "LimitStore",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "OpLog",
    "RemoteStore",
    "RetryEvent",
    "RetryPolicy",
    "RetryStore",
    "Space",
    "Store",
    "StoreEvent",
    "StoreTraits",
    "TraceStore",
    "WatchStore",
    "open_store",
    "probe_conditional_put",
]
