"""Forwarded connections while the network goes and comes back: no byte is lost, and none comes twice."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable

import pytest
from cable import Cable
from stage.server import pieces, serve
from stage.spot import until
from stage.threads import begin
from test_cuts import states

import skyfab as sky
from skyfab.lab import Lab
from skyfab.pool.forward import Forward

pytestmark = [pytest.mark.lab, pytest.mark.slow]

SIZE = 100_000_000
SECONDS = 120.0


def digest(parts: list[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def connect(forward: Forward, line: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", forward.port), SECONDS)
    connection.sendall(f"{line}\n".encode())
    return connection


def fetched(forward: Forward) -> str:
    found = hashlib.sha256()
    with connect(forward, f"give {SIZE} 5") as connection:
        while data := connection.recv(1 << 20):
            found.update(data)
    return found.hexdigest()


def sent(forward: Forward) -> str:
    with connect(forward, "digest") as connection, connection.makefile("rb") as file:
        for piece in pieces(SIZE, 5):
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        return file.read().decode()


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize(("transport", "seed"), [("openssh", 21), ("fabric", 22)])
def test_a_hundred_megabytes_each_way_through_cuts(
    lab: Lab, open_pool: Callable[..., sky.Compute], transport: str, seed: int
) -> None:
    pool = open_pool(transport, count=1, lease=60, heartbeat_timeout=60)
    port = pool.submit(serve(), on="head").result()
    seen = states(pool)
    lab.hosts[0].slow(200)  # megabits: it is still under way when the cuts come
    with pool.forward(port) as forward, Cable(lab, seed, (0.3, 4.2, 1.0)) as cable:
        ways = [begin(lambda way=way: way(forward)) for way in (fetched, sent)]  # type: ignore[misc]
        found = [way.result(SECONDS) for way in ways]
        cable.wait()
    assert found == [digest(pieces(SIZE, 5))] * 2
    assert "reconnecting" in seen
    assert "lost" not in seen


@pytest.mark.usefixtures("hurry")
def test_a_lost_host_breaks_connections_off_and_serves_new_ones_when_it_is_back(
    lab: Lab, open_pool: Callable[..., sky.Compute]
) -> None:
    pool = open_pool("openssh", count=1, lease=2, heartbeat_timeout=2)
    port = pool.submit(serve(), on="head").result()
    with pool.forward(port) as forward, connect(forward, "echo") as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        with Cable(lab, 3, (8.0,)) as cable:
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
            cable.wait()
        until(lambda: pool.hosts[0].lost is None)
        assert pool.submit(serve(port), on="head").result() == port
        with connect(forward, "give 1000 1") as again, again.makefile("rb") as file:
            assert len(file.read()) == 1000
