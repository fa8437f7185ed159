"""An S3 server that does nothing: it swallows every put and serves every get from memory, and checks no signature.

What a client needs for itself shows against a server that costs next to nothing. For ``transport.py``.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

BODY = bytes(range(256)) * (1 << 18)
_DATE = b"Last-Modified: Tue, 01 Dec 2026 00:00:00 GMT\r\n"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_RANGE = re.compile(rb"(?i)\r\nrange: *bytes=(\d+)-(\d+)")


class Null(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._room = bytearray(1 << 20)
        self._head = b""
        self._left = 0  # bytes of the body of a put that are still to come
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, _: int) -> bytearray:
        return self._room

    def buffer_updated(self, count: int) -> None:
        if self._left:
            self._left -= count
            if not self._left:
                self._created()
            return
        self._head += bytes(memoryview(self._room)[:count])
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found:
            return
        self._head = b""
        if head.startswith(b"PUT"):
            length = _LENGTH.search(head)
            self._left = (int(length[1]) if length else 0) - len(rest)
            if not self._left:
                self._created()
        else:
            self._serve(head)

    def _created(self) -> None:
        self._transport.write(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n')

    def _serve(self, head: bytes) -> None:
        asked = _RANGE.search(head)
        start, end = (int(asked[1]), min(int(asked[2]) + 1, self._size)) if asked else (0, self._size)
        lines = [
            b"HTTP/1.1 206 Partial Content\r\n" if asked else b"HTTP/1.1 200 OK\r\n",
            b"Content-Range: bytes %d-%d/%d\r\n" % (start, end - 1, self._size) if asked else b"",
            b'ETag: "e"\r\n' + _DATE + b"Content-Length: %d\r\n\r\n" % (end - start),
        ]
        self._transport.write(b"".join(lines))
        if not head.startswith(b"HEAD"):
            self._transport.write(memoryview(BODY)[start:end])


@contextmanager
def serving(size: int) -> Iterator[str]:
    """The endpoint of such a server, in a process of its own, whose objects all have ``size`` bytes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, size), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, size: int) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Null(size), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())
