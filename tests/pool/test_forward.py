"""compute.forward: ports of hosts as ports of this machine, over every transport."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage.server import pieces, serve, was_broken
from stage.spot import until
from stage.threads import begin

import skyfab as sky
from skyfab.errors import AuthenticationRefused
from skyfab.inventory.ssh_config import CONFIG
from skyfab.lab import Lab
from skyfab.pool import forward as module
from skyfab.pool.forward import Forward, Forwards
from skyfab.ui.events import Event, Events, Notice

MB = 1_000_000
Open = Callable[..., Forward]


@pytest.fixture(scope="module")
def port(pool: sky.Compute) -> int:
    """At which a server listens, on the first host."""
    return pool.submit(serve(), on="head").result()


@pytest.fixture
def said() -> list[Event]:
    return []


@pytest.fixture
def open_here(said: list[Event]) -> Iterator[Open]:
    """Opens forwards to this machine, without a pool."""
    events = Events()
    events.subscribe(said.append)
    forwards, here = Forwards(events), sky.Host(name="here", transport="local")
    yield lambda port, local=None: forwards.open(here, sky.Inventory(hosts={}), port, local)
    forwards.close()


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


def is_ended(connection: socket.socket) -> bool:
    """Whether the connection ends without any data."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def is_refused(forward: Forward) -> bool:
    """Whether a new connection is closed at once."""
    with connect(forward) as connection:
        return is_ended(connection)


def digest(parts: list[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


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
def test_fifty_connections_at_once(forward: Forward) -> None:
    wanted = digest(pieces(300_000, 7))
    connections = [connect(forward, "give 300000 7") for _ in range(50)]
    answers = [begin(lambda one=one: rest(one)) for one in connections]  # type: ignore[misc]
    assert {digest([answer.result(170)]) for answer in answers} == {wanted}


@pytest.mark.lab
def test_a_port_where_nothing_listens(pool: sky.Compute, events: list[Event]) -> None:
    free = pool.submit(serve(), on="head").result() - 1 or 1
    with pool.forward(free) as forward:
        for _ in range(3):
            assert is_refused(forward)
        until(lambda: notices(events))
        assert notices(events) == [f"{pool.hosts[0].name}: nothing listens on port {free} yet"]
        assert pool.submit(serve(free), on="head").result() == free
        assert len(rest(connect(forward, "give 1000 1"))) == 1000


@pytest.mark.lab
def test_a_program_here_that_breaks_off_ends_the_one_there(pool: sky.Compute, forward: Forward) -> None:
    for _ in range(5):
        with connect(forward, f"give {200 * MB} 3") as connection:
            assert connection.recv(1)
        assert pool.submit(was_broken(30), on="head").result()


@pytest.mark.lab
def test_closing_ends_what_is_open(pool: sky.Compute, port: int) -> None:
    forward = pool.forward(port, local=0)
    assert repr(forward) == f"<Forward http://127.0.0.1:{forward.port} → {pool.hosts[0].name}:{port}>"
    with connect(forward, "echo") as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        forward.close()
        forward.close()
        assert is_ended(connection)
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


def test_what_is_no_port_is_refused(open_here: Open) -> None:
    for port in (0, 65536, True, "", "a:b:80", "name:"):
        with pytest.raises(sky.UsageError, match="is not a port"):
            open_here(port)
    assert open_here("[::1]:80", 0).to == "here:::1:80"


def test_a_port_here_that_is_in_use(open_here: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(sky.UsageError, match=f"port {taken} of this machine is not available"):
            open_here(1, taken)
    with pytest.raises(sky.UsageError, match="would forward to itself"):
        open_here(taken, taken)
    assert open_here(1, taken).port == taken
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == f"skyfab-forward-{taken}")


def test_what_becomes_of_a_port_is_told_until_a_login_is_refused(
    monkeypatch: pytest.MonkeyPatch, open_here: Open, said: list[Event]
) -> None:
    broken = SimpleNamespace(wait=lambda refused: sky.HostLost("it broke", host="here"), end=lambda: None)
    refused, away = AuthenticationRefused("no such key", host="here"), sky.HostLost("not yet", host="here")
    attempts = [refused, broken, OSError("no process can be started"), away, broken]

    def attempt(*_: object) -> Any:
        if isinstance(found := attempts.pop(), Exception):
            raise found
        return found

    monkeypatch.setattr(module, "transport_for", lambda *_: SimpleNamespace(forward=attempt, close=lambda: None))
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.001)
    forward = open_here(80, 0)
    until(lambda: forward.is_closed)
    disconnected = "disconnected, reconnecting: it broke"
    assert notices(said) == [
        f"here: port {forward.port} is {what}"
        for what in (disconnected, "connected again", disconnected, "closed: no such key")
    ]


@pytest.mark.lab
def test_a_forward_listens_at_the_loopback_address_alone(forward: Forward) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", forward.port), 60)


@pytest.mark.lab
@pytest.mark.parametrize("way", ["openssh", "fabric"])
def test_a_connection_that_breaks_is_made_again(open_pool: Callable[..., sky.Compute], way: str) -> None:
    pool = open_pool(way)
    events: list[Event] = []
    pool.events.subscribe(events.append)
    port = pool.submit(serve(), on="head").result()
    with pool.forward(port) as forward, connect(forward, "echo") as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        if way == "openssh":
            os.kill(forward._tunnel._stream._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        else:
            forward._transport._connection.transport.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        assert is_ended(connection)
        until(lambda: len(notices(events)) == 2)
        assert len(rest(connect(forward, "give 1000 1"))) == 1000
    name = pool.hosts[0].name
    assert notices(events)[0].startswith(f"{name}: port {forward.port} is disconnected, reconnecting: ")
    assert notices(events)[1] == f"{name}: port {forward.port} is connected again"


@pytest.mark.lab
def test_forwards_of_ssh_config_are_left_alone(
    open_pool: Callable[..., sky.Compute], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ports may be in use by the user's own ssh, and one may be the very port that is wanted."""
    pool = open_pool("openssh")
    port = pool.submit(serve(), on="head").result()
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = tmp_path / "config"
        config.write_text(f"LocalForward {port} localhost:1\nLocalForward {other.getsockname()[1]} localhost:1\n")
        monkeypatch.setenv(CONFIG, str(config))
        with pool.forward(port) as forward:
            assert len(rest(connect(forward, "give 1000 1"))) == 1000


@pytest.mark.lab
@pytest.mark.programs
def test_a_forward_ends_with_a_program_that_is_killed(lab: Lab, tmp_path: Path) -> None:
    """Also while a connection is open, which ssh would otherwise wait for."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
            import time
            import skyfab as sky

            with sky.Compute("node1", inventory={str(lab.inventory)!r}, ui="none") as compute:
                forward = compute.forward(22, local=0)
                print(forward.port, flush=True)
                time.sleep(600)
        """)
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            assert connection.recv(4) == b"SSH-"
            process.kill()
            while connection.recv(4096):
                pass

    def is_free() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 60).close()
            return False
        return True

    until(is_free)
