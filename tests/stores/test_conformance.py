"""Every store and every wrapper keeps the whole contract of ``ckptstore.stores.base``."""

from __future__ import annotations

from ckptstore.stores.base import Store
from ckptstore.stores.limit import LimitStore
from ckptstore.stores.local import LocalStore
from ckptstore.stores.memory import MemoryStore
from ckptstore.stores.retry import RetryPolicy, RetryStore
from ckptstore.stores.trace import OpLog, TraceStore
from ckptstore.stores.watch import WatchStore
from ckptstore.testing.faults import CrashStore, FaultStore
from ckptstore.testing.suite import StoreSuite


class TestMemory(StoreSuite):
    def make_store(self) -> Store:
        return MemoryStore()


class TestLocal(StoreSuite):
    def make_store(self) -> Store:
        return LocalStore(self.folder / "made" / "by the first put")


class TestLimitOverMemory(TestMemory):
    def make_store(self) -> Store:
        return LimitStore(super().make_store(), 2)


class TestTraceOverMemory(TestMemory):
    def make_store(self) -> Store:
        return TraceStore(super().make_store(), OpLog())


class TestRetryOverMemory(TestMemory):
    def make_store(self) -> Store:
        return RetryStore(super().make_store(), RetryPolicy(attempts=2))


class TestCrashOverMemory(TestMemory):
    def make_store(self) -> Store:
        return CrashStore(super().make_store(), at=10**9, mode="torn")


class TestFaultOverMemory(TestMemory):
    def make_store(self) -> Store:
        return FaultStore(super().make_store(), [])


class _Local(TestLocal):
    many = 50  # TestLocal has the long listing; a put to disk takes its time


class TestWatchOverLocal(_Local):
    def make_store(self) -> Store:
        return WatchStore(super().make_store(), 60.0)


class TestLimitOverLocal(_Local):
    def make_store(self) -> Store:
        return LimitStore(super().make_store(), 2)


class TestTraceOverLocal(_Local):
    def make_store(self) -> Store:
        return TraceStore(super().make_store(), OpLog())


class TestRetryOverLocal(_Local):
    def make_store(self) -> Store:
        return RetryStore(super().make_store(), RetryPolicy(attempts=2))


class TestCrashOverLocal(_Local):
    def make_store(self) -> Store:
        return CrashStore(super().make_store(), at=10**9, mode="torn")


class TestFaultOverLocal(_Local):
    def make_store(self) -> Store:
        return FaultStore(super().make_store(), [])


class TestFullStack(_Local):
    def make_store(self) -> Store:
        return RetryStore(LimitStore(TraceStore(super().make_store(), OpLog()), 3))
