"""Unauthenticated peers at the port of the link: large bodies, half-open connections, slow
requests."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from deployed import Deployment
from forked import Command

from fedgen.deployment.flower_limits import (
    MAX_ANONYMOUS_BODY,
    MAX_CONNECTIONS,
    MIN_BYTES_PER_SECOND,
    TIMEOUT_SECONDS,
    BodyLimit,
    _network,
)
from fedgen.federation import messages

SECONDS = float(os.environ.get("FEDGEN_STRANGER_SECONDS", 12))
STRANGER = ("127.0.0.2", 0)
MEGABYTE = 2**20


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Deployment]:
    place = Deployment(tmp_path, 1)
    place.start_link()
    yield place
    place.end()


@contextmanager
def training(place: Deployment) -> Iterator[Callable[[], int]]:
    """Train with one node for the duration of the block; yield the number of its responses so
    far."""
    place.allow(0)
    place.accept(0)
    place.start_node(0)
    words = ["method=dpgan_small", "rounds=100000", "privacy.target_epsilon=5"]
    run = Command(place.asked(*words, f"run_dir={place.place / 'run'}"))

    def responses() -> int:
        assert run.poll() is None, run.errors
        log = place.home(0) / "log.jsonl"
        lines = place.log(0) if log.exists() else []
        return sum(line.get("kind") == messages.ASK for line in lines)

    try:
        end = time.monotonic() + 120
        while not responses():
            assert time.monotonic() < end
            time.sleep(0.2)
        yield responses
    finally:
        run.send_signal(9)
        run.wait(30)


def connect(port: int, tls: bool = True) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", port), timeout=30, source_address=STRANGER)
    if not tls:
        return raw
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(raw)


def post(port: int, path: str, length: int, more: str = "", body: int = 0) -> bytes:
    """Return the status line for a body of this length, of which ``body`` bytes are sent."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/protobuf\r\n"
    size = f"Content-Length: {length}\r\n" if length >= 0 else "Transfer-Encoding: chunked\r\n"
    with connect(port) as connection:
        with suppress(OSError):
            connection.sendall(f"{head}{size}{more}\r\n".encode())
            for _ in range(body // MEGABYTE):
                connection.sendall(bytes(MEGABYTE))
        try:
            return connection.recv(4096).partition(b"\r\n")[0]
        except OSError:
            return b"closed"


def resident(place: Deployment) -> float:
    """Return the memory of the link in megabytes."""
    assert place.link is not None
    return psutil.Process(place.link.pid).memory_info().rss / MEGABYTE


def healthy(place: Deployment) -> float:
    """Return the seconds until the link responds to its own machine."""
    context, begin = ssl.create_default_context(cafile=str(place.ca)), time.monotonic()
    url = f"https://127.0.0.1:{place.port}/health"
    urllib.request.urlopen(url, timeout=20, context=context).close()
    return time.monotonic() - begin


@pytest.mark.slow
def test_an_unauthenticated_peer_does_not_stop_a_run(link: Deployment, nothing_left: None) -> None:
    """For ``FEDGEN_STRANGER_SECONDS``: the run of a node continues, and the link responds to others
    within its memory."""
    with training(link) as responses:
        _attack(link, responses)


def _attack(link: Deployment, responses: Callable[[], int]) -> None:
    port, begin, first = link.port, time.monotonic(), resident(link)
    before = responses()
    assert b" 413 " in post(port, "/v1/fleet/pull-messages", 400 * MEGABYTE, body=40 * MEGABYTE)
    assert b" 411 " in post(port, "/v1/fleet/pull-messages", -1)
    signed = "flwr-public-key: AAAA\r\nflwr-signature: AAAA\r\nflwr-timestamp: 2020-01-01T00:00\r\n"
    assert b" 413 " in post(port, "/v1/fleet/pull-messages", MEGABYTE, signed)
    over = threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            with suppress(OSError):
                held.append(connect(port, tls=len(held) % 2 == 0))
                if len(held) % 3 == 0:
                    held[-1].sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost")
            if len(held) > 500:
                held.pop(0).close()

    floods = [threading.Thread(target=flood) for _ in range(4)]
    for each in floods:
        each.start()
    slowest, most = 0.0, 0.0
    while time.monotonic() - begin < SECONDS:
        with suppress(OSError):
            post(port, "/v1/fleet/pull-messages", 100 * MEGABYTE, body=2 * MEGABYTE)
        slowest, most = max(slowest, healthy(link)), max(most, resident(link))
    over.set()
    for each in floods:
        each.join()
    done = responses() - before
    print(f"{SECONDS:g} s: {done} responses of a node, slowest answer {slowest:.2f} s, ", end="")
    print(f"memory {first:.0f} to {most:.0f} MB")
    assert done > SECONDS / 20
    assert slowest < 15
    assert most - first < 200


@pytest.mark.slow
def test_unfinished_requests_are_closed_in_time(link: Deployment, nothing_left: None) -> None:
    """Each address has a limited number of connections, each for the time that its request
    takes."""
    port, halves = link.port, []
    body = b"POST /x HTTP/1.1\r\nContent-Length: 9\r\n\r\n"
    kinds = [b"", b"POST /v1/fleet/pull-messages HT", body]
    for number in range(MAX_CONNECTIONS + 20):
        with suppress(OSError):
            raw = number % 4 == 3
            halves.append(connect(port, tls=not raw))
            if not raw:
                halves[-1].sendall(kinds[number % 3])
    assert len(halves) <= MAX_CONNECTIONS + 20
    assert link.link is not None
    served = [
        each
        for each in psutil.Process(link.link.pid).net_connections()
        if each.raddr and each.raddr.ip == STRANGER[0]
    ]
    assert len(served) <= MAX_CONNECTIONS
    end = time.monotonic() + 3 * TIMEOUT_SECONDS
    while served and time.monotonic() < end:
        time.sleep(0.5)
        served = [
            each
            for each in psutil.Process(link.link.pid).net_connections()
            if each.raddr and each.raddr.ip == STRANGER[0]
        ]
    assert not served
    assert healthy(link) < 10
    for each in halves:
        each.close()


@pytest.mark.slow
def test_pipelined_requests_and_unread_responses_are_closed(
    link: Deployment, nothing_left: None
) -> None:
    """Each would be queued, and its response kept until it is read."""
    first = resident(link)
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    held = []
    for _ in range(4):
        held.append(connect(link.port))
        held[-1].settimeout(3)
        with suppress(OSError):
            for _ in range(40):
                held[-1].sendall(4000 * request)
    one_by_one = connect(link.port)  # and never read
    one_by_one.settimeout(3)
    with suppress(OSError):
        for _ in range(2000):
            one_by_one.sendall(request)
            time.sleep(0.002)
    end = time.monotonic() + 5 * TIMEOUT_SECONDS
    assert link.link is not None
    process = psutil.Process(link.link.pid)
    while time.monotonic() < end:
        left = [c for c in process.net_connections() if c.raddr and c.raddr.ip == STRANGER[0]]
        if not left:
            break
        time.sleep(0.5)
    assert not left
    assert resident(link) - first < 100
    assert healthy(link) < 10
    for each in (*held, one_by_one):
        each.close()


def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    one, other, elsewhere = "2001:db8:0:1::1", "2001:db8:0:1:ffff::2", "2001:db8:0:2::1"
    assert _network(one) == _network(other) != _network(elsewhere)
    assert [_network(each) for each in ("10.0.0.7", "::1")] == ["10.0.0.7", "::1"]


@pytest.mark.parametrize(
    ("length", "caller", "status"),
    [
        (b"0", "10.0.0.7", None),
        (str(MAX_ANONYMOUS_BODY).encode(), "10.0.0.7", None),
        (str(MAX_ANONYMOUS_BODY + 1).encode(), "10.0.0.7", 413),
        (str(MAX_ANONYMOUS_BODY + 1).encode(), "127.0.0.1", None),
        (str(MIN_BYTES_PER_SECOND + 1).encode(), "127.0.0.1", 413),
        (b"-1", "127.0.0.1", 411),
        (b"many", "10.0.0.7", 411),
    ],
)
def test_bodies_are_refused_by_their_length(length: bytes, caller: str, status: int | None) -> None:
    reached, sent = [], []

    async def app(scope: dict, receive: object, send: object) -> None:
        reached.append(scope["path"])

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/fleet/x", "client": (caller, 1), "method": "POST"}
    scope["headers"] = [(b"content-length", length)]
    asyncio.run(BodyLimit(app, MIN_BYTES_PER_SECOND)(scope, None, send))
    assert bool(reached) == (status is None)
    assert [each["status"] for each in sent if "status" in each] == ([status] if status else [])
