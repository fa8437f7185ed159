"""A proxy that misbehaves as told, in front of a real S3 or GCS server.

Requests pass byte for byte, the Host header included, so signatures hold: give clients the address of the proxy as
their endpoint. Loopback only; asyncio in a thread; no root needed. ::

    from tests.proxy import Proxy, Rule
    from tests.proxy_faults import misbehaving, reset, s3_error

    with Proxy(bucket.endpoint) as proxy:
        options = {**bucket.storage_options, "endpoint_url": proxy.endpoint}
        with proxy.play(
            Rule(reset(after=True), on="put", key="manifests/"),  # the commit arrives, its reply is lost
            Rule(s3_error(503, "SlowDown"), on="get", each=2),  # the first two tries of each key
        ) as seen:
            ckptstore.open("s3://bucket/run", options).save(1, state)
        assert [one.verb for one in seen if one.key.startswith("manifests/")] == ["put", "get"]

``play`` fails at its end when a rule did not fire as often as it should (``optional`` rules may stay silent). The first
rule that matches a request acts on it. For soaks: ``proxy.play(*misbehaving(seed))``, and ``proxy.outage(30)`` refuses
all connections for that time (``down()`` and ``up()`` do it by hand). What was seen is in ``proxy.requests``.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.proxy_wire import Reply, Seen, abort, classify, parse_head, read_reply
from tests.servers import unused_endpoint

T = TypeVar("T")
_HEAD = 4096
"""So much of a body is read before a rule is chosen: the key of a GCS upload stands there."""
_LIMIT = 1 << 20


@dataclass(frozen=True)
class Action:
    """What a rule does with a request; ``run`` is free to use every method of the exchange."""

    name: str
    run: Callable[[Exchange], Awaitable[None]] = field(repr=False)


@dataclass(eq=False)
class Rule:
    """Which requests meet which action.

    Attributes:
        on: verbs (see :class:`Seen`; "put" is also "create") or HTTP methods in capitals, separated by blanks.
        key: pattern to search for in the key.
        query: pattern to search for in the query string.
        skip: so many matching requests pass first.
        times: how often it fires and has to fire; None: each time, at least once.
        each: fires on the first ``each`` tries of every verb and key, in place of ``times``.
        when: asked last, with the request; for rates and chances.
        optional: need not fire.
    """

    action: Action
    on: str = ""
    key: str = ""
    query: str = ""
    skip: int = 0
    times: int | None = 1
    each: int | None = None
    when: Callable[[Seen], bool] | None = None
    optional: bool = False
    fired: int = 0
    _met: int = 0
    _tries: Counter[tuple[str, str, str]] = field(default_factory=Counter, repr=False)

    def fires(self, seen: Seen) -> bool:
        """Whether it acts on this request. Counts: ask once for each request."""
        verbs = {seen.method, seen.verb, *(("put",) if seen.verb == "create" else ())}
        if self.on and not verbs & set(self.on.split()):
            return False
        if not re.search(self.key, seen.key) or not re.search(self.query, urllib.parse.urlsplit(seen.target).query):
            return False
        self._met += 1
        if self._met <= self.skip:
            return False
        if self.each is not None:
            this = (seen.verb, seen.key, seen.headers.get("range", ""))
            self._tries[this] += 1
            due = self._tries[this] <= self.each
        else:
            due = self.times is None or self.fired < self.times
        if not due or (self.when is not None and not self.when(seen)):
            return False
        self.fired += 1
        return True

    def idle(self) -> bool:
        """Whether it did not fire as often as it should have."""
        return not self.optional and self.fired < (1 if self.each is not None else self.times or 1)


class Proxy:
    """Listens on a loopback port of its own and passes requests to ``upstream`` (``http://host:port``)."""

    def __init__(self, upstream: str, rules: Sequence[Rule] = ()) -> None:
        address = urllib.parse.urlsplit(upstream)
        self.upstream = (address.hostname or "", address.port or 80)
        self.rules = list(rules)
        self.requests: list[Seen] = []
        self.port = int(
            unused_endpoint().rsplit(":", 1)[1]
        )  # below the ephemeral range: nobody takes it during an outage
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.down()
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        if kind is None:
            assert_all_fired(self.rules)

    @contextmanager
    def play(self, *rules: Rule) -> Iterator[list[Seen]]:
        """Follow these rules in the block; gives the list of the requests that come meanwhile.

        Raises:
            AssertionError: a rule did not fire as often as it should.
        """
        before, self.rules = self.rules, list(rules)
        kept, self.requests = self.requests, []
        try:
            yield self.requests
        finally:
            self.rules, self.requests = before, [*kept, *self.requests]
        assert_all_fired(rules)

    def down(self) -> None:
        """Reset all connections, and refuse new ones until ``up``."""
        self._do(self._down())

    def up(self) -> None:
        """Take connections."""
        self._do(self._up())

    def outage(self, seconds: float) -> None:
        """``down`` now, ``up`` after that time; returns at once."""
        self.down()
        self._timer = threading.Timer(seconds, self.up)
        self._timer.daemon = True
        self._timer.start()

    def _do(self, step: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(30)

    async def _up(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, limit=_LIMIT)

    async def _down(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            abort(writer)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            with suppress(OSError, EOFError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            self._open.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; False when the connection is of no more use."""
        head = await reader.readuntil(b"\r\n\r\n")
        exchange = Exchange(self, head, reader, writer)
        await exchange.look()
        seen = exchange.seen
        rule = next((rule for rule in self.rules if rule.fires(seen)), None)
        self.requests.append(seen)
        if rule is None:
            await exchange.send(await exchange.forward())
        else:
            seen.rule = rule.action.name
            await rule.action.run(exchange)
        return not exchange.spent


class Exchange:
    """One request on its way: what actions are made of."""

    def __init__(self, proxy: Proxy, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._upstream = proxy.upstream
        self._head = head
        self._reader, self._writer = reader, writer
        self._body = bytearray()
        (method, target), headers = parse_head(head)
        self._length = int(headers.get("content-length", 0))
        verb, key = classify(method, target, headers, b"")
        self.seen = Seen(method, target, headers, verb, key, time.monotonic(), self._length)
        self.spent = False
        """Whether the connection cannot be used again."""

    async def look(self) -> None:
        """Read enough of the body to know what is asked."""
        if self.seen.headers.get("expect"):
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in self.seen.headers.get("transfer-encoding", ""):
            raise ConnectionError("no client of ours sends bodies of unknown length")
        await self.receive(_HEAD)
        seen = self.seen
        seen.verb, seen.key = classify(seen.method, seen.target, seen.headers, bytes(self._body))

    async def receive(self, upto: int | None = None) -> bytes:
        """The first ``upto`` bytes of the body, by default all of it."""
        end = self._length if upto is None else min(upto, self._length)
        while len(self._body) < end:
            piece = await self._reader.read(end - len(self._body))
            if not piece:
                raise EOFError
            self._body += piece
        return bytes(self._body)

    async def forward(self, instead: bytes | None = None) -> Reply:
        """Let the real server do it, maybe with another body."""
        body, head = await self.receive(), self._head
        if instead is not None:
            body, head = instead, re.sub(rb"(?i)(content-length: )\d+", rb"\g<1>%d" % len(instead), head)
        reader, writer = await asyncio.open_connection(*self._upstream, limit=_LIMIT)
        try:
            writer.write(head + body)
            await writer.drain()
            return await read_reply(reader, self.seen.method)
        finally:
            writer.close()

    async def send(self, reply: Reply, upto: int | None = None) -> None:
        """Answer, with no more than the first ``upto`` bytes of the body."""
        await self.receive()
        self.seen.status = reply.status
        length = len(reply.body) if reply.announce is None else reply.announce
        lines = [f"HTTP/1.1 {reply.status} Said So", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if self.seen.method != "HEAD":
            self._writer.write(reply.body[:upto])
            if length != len(reply.body[:upto]):
                self.spent = True
        await self._writer.drain()

    async def silence(self) -> None:
        """Wait until the client gives up."""
        self.spent = True
        while await self._reader.read(_LIMIT):
            pass

    def reset(self) -> None:
        """End the connection by RST."""
        self.spent = True
        abort(self._writer)


def assert_all_fired(rules: Sequence[Rule]) -> None:
    """Fail when a rule did not fire as often as it should."""
    idle = [
        f"{rule.action.name} on {rule.on or 'all'} {rule.key!r} fired {rule.fired} times"
        for rule in rules
        if rule.idle()
    ]
    assert not idle, "rules that did not fire: " + "; ".join(idle)
