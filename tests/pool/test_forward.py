"""compute.forward: ports of hosts as ports of this machine, over every transport."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from stage.server import given, pieces, serve, was_broken
from stage.spot import until
from stage.threads import begin

import skyfab as sky
from skyfab.pool.forward import Forward
from skyfab.protocol import messages
from skyfab.protocol.send_queue import FORWARD_WINDOW
from skyfab.session.channel import Channel
from skyfab.session.replies import Replies
from skyfab.ui.events import Event, Notice

MB = 1_000_000
MOST = 45 * MB
"""What queues, windows and the systems' buffers hold together, and no more."""


@pytest.fixture(scope="module")
def port(pool: sky.Compute) -> int:
    """At which a server listens, on the first host."""
    return pool.submit(serve(), on="head").result()


@pytest.fixture
def forward(pool: sky.Compute, port: int) -> Any:
    with pool.forward(port) as opened:
        yield opened


def connect(forward: Forward, line: str = "") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", forward.port), 60)
    connection.sendall(f"{line}\n".encode() if line else b"")
    return connection


def rest(connection: socket.socket) -> bytes:
    with connection, connection.makefile("rb") as file:
        return file.read()


def is_broken_off(forward: Forward) -> bool:
    """Whether a new connection is closed at once, without a regular end."""
    try:
        with connect(forward) as connection:
            connection.recv(1)
    except ConnectionError:
        return True
    return False


def digest(parts: list[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


class Nobody:
    """A listener and a receiver that hears nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def notices(events: list[Event]) -> list[str]:
    return [str(event) for event in events if isinstance(event, Notice)]


@pytest.mark.lab
def test_bytes_go_both_ways_and_each_way_ends_by_itself(forward: Forward) -> None:
    content = b"".join(pieces(3 * MB, 1))
    connection = connect(forward, "echo")
    answer = begin(lambda: rest(connection.dup()))
    connection.sendall(content)
    connection.shutdown(socket.SHUT_WR)
    assert answer.result(170) == content
    connection.close()


@pytest.mark.lab
def test_a_hundred_megabytes_there_and_back(forward: Forward) -> None:
    wanted = digest(pieces(100 * MB, 2))
    with connect(forward, f"give {100 * MB} 2") as connection, connection.makefile("rb") as file:
        found = hashlib.sha256()
        while data := file.read(1 << 20):
            found.update(data)
    assert found.hexdigest() == wanted
    connection = connect(forward, "digest")
    for piece in pieces(100 * MB, 2):
        connection.sendall(piece)
    connection.shutdown(socket.SHUT_WR)
    assert rest(connection).decode() == wanted


@pytest.mark.lab
def test_a_web_server(pool: sky.Compute) -> None:
    @sky.function
    def start() -> int:
        import http.server
        import tempfile
        from pathlib import Path

        os.chdir(tempfile.mkdtemp())
        Path("page.html").write_text("hello")
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.server_port

    last = pool.hosts[-1].name
    with pool.forward(pool.submit(start(), on=last).result(), on=last) as forward:
        assert urllib.request.urlopen(f"{forward.url}/page.html", timeout=170).read() == b"hello"


@pytest.mark.lab
def test_fifty_connections_at_once(forward: Forward) -> None:
    wanted = digest(pieces(300_000, 7))
    connections = [connect(forward, "give 300000 7") for _ in range(50)]
    answers = [begin(lambda one=one: rest(one)) for one in connections]  # type: ignore[misc]
    assert {digest([answer.result(170)]) for answer in answers} == {wanted}


@pytest.mark.lab
def test_a_program_here_that_does_not_read_fills_no_memory_and_delays_nobody(
    pool: sky.Compute, forward: Forward
) -> None:
    with connect(forward, f"give {400 * MB} 3") as lazy:
        lazy.recv(1)
        before = -1
        while before != (before := pool.submit(given(), on="head").result()):
            time.sleep(1)
        assert MB < before < MOST
        assert sum(one._channel._unused for one in forward._connections) <= FORWARD_WINDOW
        assert len(rest(connect(forward, "give 5000000 4"))) == 5 * MB
        assert len(rest(lazy.dup())) == 400 * MB - 1


@pytest.mark.lab
def test_a_program_there_that_does_not_read_fills_no_memory_and_delays_nobody(
    pool: sky.Compute, forward: Forward
) -> None:
    with connect(forward, "hush 30") as eager:
        eager.settimeout(2)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 400 * MB:
                sent += eager.send(bytes(MB))
        assert sent < MOST
        assert len(rest(connect(forward, "give 5000000 4"))) == 5 * MB
        assert pool.submit(given(), on="head").result() == 5 * MB


@pytest.mark.lab
def test_a_port_where_nothing_listens(pool: sky.Compute, events: list[Event]) -> None:
    free = pool.submit(serve(), on="head").result() - 1 or 1
    with pool.forward(free) as forward:
        for _ in range(3):
            assert is_broken_off(forward)
        assert notices(events) == [f"{pool.hosts[0].name}: nothing listens at port {free} yet"]
        assert pool.submit(serve(free), on="head").result() == free
        assert len(rest(connect(forward, "give 1000 1"))) == 1000


@pytest.mark.lab
def test_a_machine_that_the_host_can_reach(pool: sky.Compute, port: int, events: list[Event]) -> None:
    with pool.forward(f"localhost:{port}") as forward:
        assert forward.to == f"{pool.hosts[0].name}:localhost:{port}"
        assert len(rest(connect(forward, "give 1000 1"))) == 1000
    with pool.forward("nowhere.invalid:80") as forward:
        assert is_broken_off(forward)
    assert notices(events)[0].startswith(f"{pool.hosts[0].name}: nowhere.invalid:80 cannot be reached: ")


@pytest.mark.lab
def test_a_program_there_that_breaks_off_is_not_taken_for_one_that_ends(forward: Forward) -> None:
    with connect(forward, "crash 500000") as connection:
        found = 0
        while found < 500_000:
            found += len(connection.recv(1 << 20))
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


@pytest.mark.lab
def test_a_program_here_that_breaks_off_ends_the_one_there(pool: sky.Compute, forward: Forward) -> None:
    with connect(forward, f"give {200 * MB} 3") as connection:
        connection.recv(1)
    assert pool.submit(was_broken(60), on="head").result()
    until(lambda: not forward._connections)


@pytest.mark.lab
def test_closing_breaks_off_what_is_open(pool: sky.Compute, port: int) -> None:
    forward = pool.forward(port, local=0)
    assert repr(forward) == f"<Forward http://127.0.0.1:{forward.port} → {pool.hosts[0].name}:{port}>"
    with connect(forward, "hush 30") as connection:
        until(lambda: forward._connections)
        forward.close()
        forward.close()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert repr(forward).endswith(": closed>")
    with pytest.raises(ConnectionRefusedError):
        connect(forward)


def test_a_pool_that_closes_closes_its_forwards(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool()
    port = pool.submit(serve(), on="head").result()
    forwards = [pool.forward(port) for _ in range(3)]
    assert len({forward.port for forward in forwards} - {port}) == 3, "on this machine the port itself is taken"
    with connect(forwards[1], "hush 30"):
        pool.close()
    assert all(forward.is_closed for forward in forwards)
    with pytest.raises(sky.UsageError, match="not open"):
        pool.forward(port)


def test_a_forked_child_does_not_keep_the_port(open_pool: Callable[..., sky.Compute]) -> None:
    forward = open_pool().forward(1)
    (read, write), (here, there) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:  # lives until the test has looked
        os.close(write)
        os.write(there, b"!")
        os.read(read, 1)
        os._exit(0)
    os.read(here, 1)
    forward.close()
    with pytest.raises(ConnectionRefusedError):
        connect(forward)
    for fd in (read, write, here, there):
        os.close(fd)
    os.waitpid(child, 0)


@pytest.mark.parametrize("port", [0, 65536, -1, True, "", "x", "a:b:80", "80:name", "name:", "[::1]"])
def test_what_is_no_port_is_refused(open_pool: Callable[..., sky.Compute], port: Any) -> None:
    with pytest.raises(sky.UsageError, match="is not a port"):
        open_pool().forward(port)


def test_a_port_here_that_is_in_use(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(sky.UsageError, match=f"port {taken} of this machine cannot be used"):
            pool.forward(1, local=taken)
    with pytest.raises(sky.UsageError, match="on='all' is not one host"):
        pool.forward(1, on="all")
    with pytest.raises(sky.UsageError, match="local=70000 is not a port"):
        pool.forward(1, local=70000)
    with pytest.raises(sky.UsageError, match="is the one that it should lead to"):
        pool.forward(taken, local=taken)
    with pool.forward(1, local=taken) as forward:
        assert forward.port == taken


def test_a_forward_listens_at_the_loopback_address_alone(open_pool: Callable[..., sky.Compute]) -> None:
    assert open_pool().forward(1)._listener.getsockname()[0] == "127.0.0.1"


def test_a_host_that_sends_more_than_it_may_is_refused() -> None:
    replies = Replies("node1", Nobody(), time.monotonic)  # type: ignore[arg-type]
    place = SimpleNamespace(
        replies=replies, lock=threading.Lock(), ended=None, new_number=lambda: 1, flush=lambda: None
    )
    channel = Channel(place, messages.Connect(host="", port=1), Nobody())  # type: ignore[arg-type]
    replies.data(1, memoryview(bytes(FORWARD_WINDOW)))
    channel.used(10)
    replies.data(1, memoryview(bytes(10)))
    with pytest.raises(sky.ProtocolError, match="more data than it was allowed to send"):
        replies.data(1, memoryview(b"x"))
