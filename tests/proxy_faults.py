"""What a proxy can do to a request (actions), when, and whole mixes of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

from tests.proxy import Action, Exchange, Rule
from tests.proxy_wire import Reply, Seen


def answer(reply: Reply, *, after: bool = False, name: str = "") -> Action:
    """Answer in place of the real server, or after it has done its work."""

    async def run(exchange: Exchange) -> None:
        if after:
            await exchange.forward()
        await exchange.send(reply)

    return Action(f"{reply.status} {name or len(reply.body)}{' after' if after else ''}", run)


def s3_error(status: int, code: str, extra: str = "", *, after: bool = False, **headers: str) -> Action:
    """Answer with an error document of S3; underscores in names of headers become hyphens."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>said so</Message>{extra}</Error>'
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    reply = Reply(status, body.encode(), {"Content-Type": "application/xml", **named})
    return answer(reply, after=after, name=code)


def gcs_error(status: int, message: str, *, after: bool = False, **headers: str) -> Action:
    """Answer with an error document of Google Cloud Storage."""
    body = f'{{"error": {{"code": {status}, "message": "{message}"}}}}'
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return answer(
        Reply(status, body.encode(), {"Content-Type": "application/json", **named}), after=after, name=message
    )


def delay(seconds: float) -> Action:
    """Pass it on, later."""

    async def run(exchange: Exchange) -> None:
        await asyncio.sleep(seconds)
        await exchange.send(await exchange.forward())

    return Action(f"delay {seconds} s", run)


def stall(*, after: bool = False, at: float | None = None) -> Action:
    """Never answer; ``after``: the real server has done it; ``at``: fall silent at that part of the reply's body."""

    async def run(exchange: Exchange) -> None:
        if after or at is not None:
            reply = await exchange.forward()
            if at is not None:
                await exchange.send(reply, int(at * len(reply.body)))
        await exchange.silence()

    return Action(f"stall (after={after}, at={at})", run)


def reset(*, after: bool = False, received: int | None = None) -> Action:
    """RST in place of a reply; ``after``: the reply of what was done is lost; ``received``: amid the upload."""

    async def run(exchange: Exchange) -> None:
        if after:
            await exchange.forward()
        else:
            await exchange.receive(received)
        exchange.reset()

    return Action(f"reset (after={after}, received={received})", run)


def cut(at: float, *, announce: bool = False, rst: bool = False) -> Action:
    """End the reply's body at ``at`` (a fraction below 1, else bytes), by FIN or RST.

    ``announce``: with a Content-Length that says that this was all.
    """

    async def run(exchange: Exchange) -> None:
        reply = await exchange.forward()
        end = int(at * len(reply.body)) if at < 1 else int(at)
        if announce:
            reply = replace(reply, body=reply.body[:end])
        await exchange.send(reply, end)
        if rst:
            await asyncio.sleep(0.02)  # else the RST overtakes the bytes
            exchange.reset()

    return Action(f"cut at {at} (announce={announce}, rst={rst})", run)


def edit(change: Callable[[Reply], Reply]) -> Action:
    """Pass on a changed reply."""

    async def run(exchange: Exchange) -> None:
        await exchange.send(change(await exchange.forward()))

    return Action(f"edit by {getattr(change, '__name__', change)}", run)


# --- when ---------------------------------------------------------------------------------------


class Chance:
    """True for a random part of all requests."""

    def __init__(self, part: float, seed: int) -> None:
        self._part = part
        self._random = random.Random(seed)

    def __call__(self, _: Seen) -> bool:
        return self._random.random() < self._part


class TooFast:
    """True for what exceeds so many requests a second, in all or (``per_key``) for one key."""

    def __init__(self, rate: float, *, burst: float = 1.0, per_key: bool = False) -> None:
        self._rate, self._burst, self._per_key = rate, burst, per_key
        self._buckets: dict[str, tuple[float, float]] = {}

    def __call__(self, seen: Seen) -> bool:
        key = seen.key if self._per_key else ""
        left, at = self._buckets.get(key, (self._burst, seen.at))
        left = min(self._burst, left + (seen.at - at) * self._rate)
        self._buckets[key] = (max(left - 1, 0.0) if left >= 1 else left, seen.at)
        return left < 1


PORTAL = answer(Reply(200, b"<html>Please log in</html>", {"Content-Type": "text/html"}), name="page of a portal")
GATEWAY = answer(Reply(502, b"<html>Bad Gateway</html>", {"Content-Type": "text/html"}), name="page of a gateway")


def misbehaving(
    seed: int, *, gcs: bool = False, part: float = 0.08, silent: bool = False, slow: float = 0.2
) -> list[Rule]:
    """Faults of bad days, on about ``part`` of all requests: refusals, resets, lost replies, cut and slow bodies.

    ``silent``: also requests that are never answered; give the clients read time-outs of a second or so.
    ``slow``: seconds of a delay.
    """
    chooser = random.Random(seed)
    error = gcs_error if gcs else s3_error
    mix: list[tuple[float, Action, str]] = [
        (3, error(503, "SlowDown"), ""),
        (2, error(429, "TooManyRequests", Retry_After="1"), ""),
        (2, error(500, "InternalError"), ""),
        (1, error(504, "GatewayTimeout"), ""),
        (1, GATEWAY, ""),
        (1, PORTAL, ""),
        (2, reset(), ""),
        (2, reset(after=True), "put delete"),
        (1, reset(received=1000), "put"),
        (1, error(500, "InternalError", after=True), "put delete"),
        (2, cut(0.6), "get list"),
        (1, cut(0.3, rst=True), "get list"),
        (1, cut(0.5, announce=True), "get"),
        (3, delay(slow), ""),
    ]
    if not gcs:
        mix += [(1, s3_error(400, "RequestTimeout"), "put"), (1, s3_error(200, "InternalError"), "put")]
    if silent:
        mix += [(1, stall(), ""), (1, stall(after=True), "put"), (1, stall(at=0.5), "get")]
    whole = sum(weight for weight, _, _ in mix)
    return [
        Rule(action, on, times=None, optional=True, when=Chance(part * weight / whole, chooser.randrange(1 << 30)))
        for weight, action, on in mix
    ]
