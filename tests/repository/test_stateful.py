"""Random steps against a model: see ``ckptstore.testing.machine``."""

from __future__ import annotations

import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

from ckptstore.stores.base import Store
from ckptstore.stores.local import LocalStore
from ckptstore.testing.keeping import KeepingMachine
from ckptstore.testing.machine import RepositoryMachine

ROUNDS = settings(
    max_examples=settings().max_examples,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class LocalMachine(RepositoryMachine):
    """The same on a folder. Its clock is that of the file system, so nothing expires there."""

    def make_store(self) -> Store:
        self.folder = tempfile.mkdtemp(prefix="ckptstore-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        return LocalStore(self.folder)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder, ignore_errors=True)


class TestMemory(RepositoryMachine.TestCase):  # type: ignore[misc,valid-type]
    """P1 to P5 hold on a memory store after every step of random runs."""

    settings = ROUNDS


class TestLocal(LocalMachine.TestCase):  # type: ignore[misc,valid-type]
    """P1 to P5 hold on a folder after every step of random runs."""

    settings = settings(ROUNDS, max_examples=max(5, ROUNDS.max_examples // 4))


class TestKeeping(KeepingMachine.TestCase):  # type: ignore[misc,valid-type]
    """P1 to P5 hold after every step, with pins and with policies for each record."""

    settings = settings(ROUNDS, max_examples=max(10, ROUNDS.max_examples // 4))
