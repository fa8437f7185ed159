"""A cut line: the client lives in a network namespace whose only link to the S3 server is taken down and up again."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ckptstore

if TYPE_CHECKING:
    from tests.conftest import Bucket

if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
    pytest.skip("needs Linux, root and ip", allow_module_level=True)

CLIENT = """
import json, sys
import numpy as np
import ckptstore
from ckptstore import RetryPolicy

url, options, transport, deadline = json.loads(sys.argv[1])
retry = RetryPolicy(attempts=100, deadline=deadline, cap=0.5)
repo = ckptstore.open(url, options, retry=retry, transport=transport)
for line in sys.stdin:
    epoch = int(line)
    try:
        repo.save(epoch, {"model": np.random.default_rng(epoch).integers(0, 256, 4 << 20, "u1")})
        print("saved", flush=True)
    except ckptstore.CkptStoreError as error:
        print(type(error).__name__, flush=True)
"""


class Island:
    """A network namespace, and a line from it to a server on the loopback interface outside."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._name = f"ckpt{os.getpid()}"
        third = os.getpid() % 250  # of the network that is set aside for such measurements
        self._outside, inside = f"198.18.{third}.1", f"198.18.{third}.2"
        self._sockets: list[socket.socket] = []
        self._server = server
        _ip("netns", "add", self._name)
        _ip("link", "add", self._name, "type", "veth", "peer", "name", "line", "netns", self._name)
        _ip("addr", "add", f"{self._outside}/30", "dev", self._name)
        _ip("link", "set", self._name, "up")
        for rest in (["addr", "add", f"{inside}/30", "dev", "line"], ["link", "set", "line", "up"]):
            _ip("-n", self._name, *rest)
        self._listener = socket.create_server((self._outside, 0))
        self.endpoint = f"http://{self._outside}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """From now on every packet is lost, in both directions, and nobody is told."""
        _ip("link", "set", self._name, "down")

    def mend(self) -> None:
        _ip("link", "set", self._name, "up")

    def run(self, *command: str) -> subprocess.Popen[str]:
        """A process that sees nothing but the line."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self._name, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def close(self) -> None:
        self._listener.close()
        for end in self._sockets:
            with suppress(OSError):
                end.close()
        _ip("link", "del", self._name)
        _ip("netns", "del", self._name)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def island(s3: Bucket) -> Iterator[Island]:
    server = s3.server
    if server is None:
        pytest.skip("the server is somewhere else")
    found = Island(("127.0.0.1", server.port))
    yield found
    found.close()


class Client:
    """A trainer behind the line."""

    def __init__(self, island: Island, s3: Bucket, url: str, transport: str, deadline: float) -> None:
        config = {"connect_timeout": 1, "read_timeout": 2}
        options = {**s3.storage_options, "endpoint_url": island.endpoint, "config_kwargs": config}
        plan = json.dumps([url, options, transport, deadline])
        self._process = island.run(sys.executable, "-c", CLIENT, plan)

    def begin(self, epoch: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{epoch}\n")
        self._process.stdin.flush()

    def outcome(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize("transport", ["fsspec", "obstore"])
def test_a_cut_line_that_comes_back(s3: Bucket, island: Island, transport: str) -> None:
    """P6: a save during which the line is cut for two seconds succeeds once it is back."""
    url = s3.url()
    client = Client(island, s3, url, transport, deadline=60)
    try:
        client.begin(1)
        assert client.outcome() == "saved"
        island.cut()
        client.begin(2)
        threading.Timer(2.0, island.mend).start()
        assert client.outcome() == "saved"
    finally:
        client.end()
    _check(s3, url, [1, 2])


@pytest.mark.parametrize("transport", ["fsspec", "obstore"])
def test_a_cut_line_that_stays_cut(s3: Bucket, island: Island, transport: str) -> None:
    """P4, P6: a line that stays cut is a typed error within the deadline, and the epoch before is as it was."""
    url = s3.url()
    client = Client(island, s3, url, transport, deadline=4)
    try:
        client.begin(1)
        assert client.outcome() == "saved"
        island.cut()
        client.begin(2)
        assert client.outcome() == "RetriesExhaustedError"
        island.mend()
        client.begin(2)
        assert client.outcome() == "saved"
    finally:
        client.end()
    _check(s3, url, [1, 2])


def _check(s3: Bucket, url: str, epochs: list[int]) -> None:
    repo = ckptstore.open(url, s3.storage_options, create=False)
    assert repo.epochs() == epochs
    for epoch in epochs:
        wanted = np.random.default_rng(epoch).integers(0, 256, 4 << 20, "u1")
        assert np.array_equal(repo.checkpoint(epoch).load("model"), wanted)
