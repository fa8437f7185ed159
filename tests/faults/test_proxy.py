"""The proxy itself: what passes is untouched, what is scripted happens, and what never happened is an error."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from ckptstore import KeepLast
from tests.conftest import Bucket
from tests.faults.conftest import Way, holds, state
from tests.proxy import Action, Proxy, Rule
from tests.proxy_faults import Chance, TooFast, answer, cut, delay, edit, gcs_error, misbehaving, reset, stall
from tests.proxy_wire import Reply, Seen

BODY = bytes(range(256)) * 40


def test_passes_everything_untouched(way: Way) -> None:
    """Signed requests of all clients pass, and each is told apart."""
    with way.proxy.play() as seen:
        repo = way.repo(keep=KeepLast(1))
        repo.save(1, state(1))
        repo.save(2, state(2))
        assert holds(repo, 2)
    assert {one.verb for one in seen} == {"create", "put", "get", "info", "list", "delete"}
    assert {one.key.partition("/")[0] for one in seen} == {way.prefix}
    assert all(one.status is not None and not one.rule for one in seen)


@pytest.fixture
def wire(gcs: Bucket, proxy_of: Callable[[str], Proxy]) -> tuple[Proxy, Callable[..., tuple[int, bytes]]]:
    """A proxy, and a bare client that puts or gets one object of a server that wants no signatures."""
    proxy, name = proxy_of("gcs"), gcs.prefix()

    def ask(method: str = "GET", body: bytes = b"", key: str = name) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=0.3)
        upload = f"/upload/storage/v1/b/{gcs.name}/o?uploadType=media&name={key}"
        try:
            connection.request(method, upload if body else f"/storage/v1/b/{gcs.name}/o/{key}?alt=media", body or None)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    assert ask("POST", BODY)[0] == 200
    return proxy, ask


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        (gcs_error(503, "busy"), 503),
        (answer(Reply(204)), 204),
        (delay(0.01), 200),
        (edit(lambda reply: replace(reply, body=b"other")), b"other"),
        (cut(0.25, announce=True), BODY[:2560]),
        (cut(100), http.client.IncompleteRead),
        (cut(100, rst=True), ConnectionResetError),
        (reset(), ConnectionResetError),
        (reset(after=True), ConnectionResetError),
        (stall(), TimeoutError),
        (stall(at=0.5), TimeoutError),
    ],
    ids=lambda value: value.name if isinstance(value, Action) else "",
)
def test_each_action(wire: tuple[Proxy, Callable[..., tuple[int, bytes]]], action: Action, outcome: object) -> None:
    """What a client meets is what the script says, once; then the object is as it was."""
    proxy, ask = wire
    with proxy.play(Rule(action, on="get")) as seen:
        if isinstance(outcome, type):
            with pytest.raises(outcome):
                ask()
        else:
            status, body = ask()
            assert outcome in (status, body)
        assert ask() == (200, BODY)
    assert [one.rule for one in seen] == [action.name, ""]


@pytest.mark.parametrize(
    ("action", "stored"),
    [(reset(after=True), b"new"), (stall(after=True), b"new"), (reset(), BODY), (reset(received=1), BODY)],
    ids=lambda value: value.name if isinstance(value, Action) else "",
)
def test_before_and_after(wire: tuple[Proxy, Callable[..., tuple[int, bytes]]], action: Action, stored: bytes) -> None:
    """A lost reply is of a request that took effect, a lost request is of one that did not."""
    proxy, ask = wire
    key = f"new-{time.monotonic_ns()}"
    with proxy.play():
        ask("POST", BODY, key)
    with proxy.play(Rule(action, on="multipart")), pytest.raises((ConnectionError, TimeoutError)):
        ask("POST", b"new", key)
    assert ask(key=key) == (200, stored)


def test_counting(wire: tuple[Proxy, Callable[..., tuple[int, bytes]]]) -> None:
    """Rules count matches, tries of each key, and rates."""
    proxy, ask = wire
    error = gcs_error(503, "busy")
    with proxy.play(Rule(error, skip=1, times=2)):
        assert [ask()[0] for _ in range(4)] == [200, 503, 503, 200]
    with proxy.play(Rule(error, each=1)):
        assert [ask(key=key)[0] for key in ("a", "b", "a", "b")] == [503, 503, 404, 404]
    with proxy.play(Rule(error, times=None, when=TooFast(0.01, burst=2))):
        assert [ask()[0] for _ in range(4)] == [200, 200, 503, 503]
    with proxy.play(Rule(error, times=None, when=Chance(0.5, 7))):
        assert {ask()[0] for _ in range(20)} == {200, 503}


def test_a_rule_that_never_fired_is_an_error(wire: tuple[Proxy, Callable[..., tuple[int, bytes]]]) -> None:
    """A test that did not meet its fault proves nothing."""
    proxy, ask = wire
    for rule in (Rule(reset(), on="delete"), Rule(reset(), key="no such key"), Rule(reset(), skip=1)):
        with pytest.raises(AssertionError, match="reset"), proxy.play(rule):
            ask()
    with proxy.play(*misbehaving(1, part=0.0)):
        assert ask() == (200, BODY)


def test_outage(wire: tuple[Proxy, Callable[..., tuple[int, bytes]]]) -> None:
    """While it is down connections are refused and old ones are dead; then the same address answers again."""
    proxy, ask = wire
    with socket.create_connection(("127.0.0.1", proxy.port)) as idle:
        ask()
        proxy.outage(0.3)
        with pytest.raises(ConnectionResetError):
            idle.recv(1)
        with pytest.raises(ConnectionRefusedError):
            ask()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                assert ask() == (200, BODY)
                return
            except ConnectionRefusedError:
                time.sleep(0.05)
    pytest.fail("it stayed down")


def test_a_mix_is_the_same_for_the_same_seed() -> None:
    """Seeds make soaks repeatable, and every fault of the mix comes up."""

    def play(seed: int) -> list[str]:
        rules = misbehaving(seed)
        asked = [Seen("PUT", "/b/k", {}, verb, "k", 0.0) for verb in ("put", "get", "list", "delete") * 1000]
        return [next((rule.action.name for rule in rules if rule.fires(one)), "") for one in asked]

    assert play(1) == play(1) != play(2)
    assert 0.03 < sum(map(bool, play(1))) / 4000 < 0.15
    assert {rule.action.name for rule in misbehaving(1)} <= {*play(1)}
