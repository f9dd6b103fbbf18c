"""Forwarded ports while the network is down and when it is back."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import pytest
from cable import Cable
from stage.server import serve
from stage.spot import until

import skyfab as sky
from skyfab.lab import Lab
from skyfab.pool.forward import Forward
from skyfab.ssh import fabric

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def connect(forward: Forward, line: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", forward.port), 60)
    connection.sendall(f"{line}\n".encode())
    return connection


def is_served(forward: Forward) -> bool:
    with contextlib.suppress(OSError), connect(forward, "give 1000 1") as again, again.makefile("rb") as file:
        return len(file.read()) == 1000
    return False


@pytest.mark.usefixtures("hurry")
def test_a_connection_ends_with_the_network_and_new_ones_work_when_it_is_back(
    lab: Lab, open_pool: Callable[..., sky.Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fabric, "ALIVE_INTERVAL", 1)
    pool = open_pool("fabric", lease=60, heartbeat_timeout=60)
    port = pool.submit(serve(), on="head").result()
    with pool.forward(port) as forward, connect(forward, "echo") as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        with Cable(lab, 3, (12.0,)) as cable:
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
            cable.wait()
        until(lambda: is_served(forward))
