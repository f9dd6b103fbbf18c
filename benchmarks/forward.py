"""Benchmark: a forwarded port, its throughput both ways and its round trips, against `ssh -L`."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.result import Bar, Result
from benchmarks.sample import alternate

_MIB = 1024**2


class Forward:
    name = "forward"
    about = "a forwarded port, bytes both ways and round trips, against `ssh -L`"

    def run(self, arena: Arena) -> Iterator[Result]:
        scale = arena.scale
        with arena.pool(arena.first) as compute:
            port = compute.run(sky.function(serve)())
            with compute.forward(port, local=0) as ours, by_ssh(arena, port) as theirs:
                for what, measure in (("back", give), ("out", take)):
                    seconds = alternate(
                        scale.trips,
                        lambda measure=measure: measure(ours.port, scale.file),  # type: ignore[misc]
                        lambda measure=measure: measure(theirs, scale.file),  # type: ignore[misc]
                    )
                    rates = [taken.each(lambda each: scale.file * _MIB / each / 1e6) for taken in seconds]
                    yield Result(
                        row=self.name,
                        what=f"{scale.file} MiB {what}",
                        unit="MB/s",
                        ours=rates[0],
                        baseline=rates[1],
                        against="ssh -L",
                        bar=Bar(0.9, "at least"),
                    )
                trips = alternate(scale.trips, lambda: echo(ours.port, scale.calls), lambda: echo(theirs, scale.calls))
                milliseconds = [taken.each(lambda each: each * 1000) for taken in trips]
                yield Result(
                    row=self.name,
                    what="round trip",
                    unit="ms",
                    ours=milliseconds[0],
                    baseline=milliseconds[1],
                    against="ssh -L",
                    bar=Bar(1.1),
                )


def serve() -> int:
    """Runs on the host: a server whose connections begin with a word. Returns its port."""
    import socketserver
    import threading

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            word, _, number = self.request.recv(16).decode().strip().partition(" ")
            block = bytes(1024**2)
            if word == "give":
                for _ in range(int(number)):
                    self.request.sendall(block)
            elif word == "take":
                view, left = memoryview(bytearray(1024**2)), int(number) * 1024**2
                while left:
                    left -= self.request.recv_into(view)
                self.request.sendall(b"!")
            else:
                while data := self.request.recv(16):
                    self.request.sendall(data)

    socketserver.ThreadingTCPServer.daemon_threads = True
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


@contextmanager
def by_ssh(arena: Arena, port: int) -> Iterator[int]:
    """A port that the ssh program forwards, with the options that a pool uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        here = int(free.getsockname()[1])
    with arena.ssh(arena.first, "cat") as argv:
        at = argv.index("ClearAllForwardings=yes")
        words = [*argv[: at - 1], "-L", f"127.0.0.1:{here}:127.0.0.1:{port}", *argv[at + 1 :]]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 10
            while True:
                try:
                    socket.create_connection(("127.0.0.1", here)).close()
                    break
                except ConnectionRefusedError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.02)
            yield here
        finally:
            process.communicate()


def _connect(port: int, line: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(line.ljust(16).encode())
    return connection


def give(port: int, size: int) -> float:
    """Seconds for so many MiB from the host."""
    view, left = memoryview(bytearray(_MIB)), size * _MIB
    began = time.perf_counter()
    with _connect(port, f"give {size}") as connection:
        while left:
            left -= connection.recv_into(view)
    return time.perf_counter() - began


def take(port: int, size: int) -> float:
    """Seconds for so many MiB to the host."""
    block = bytes(_MIB)
    began = time.perf_counter()
    with _connect(port, f"take {size}") as connection:
        for _ in range(size):
            connection.sendall(block)
        connection.recv(1)
    return time.perf_counter() - began


def echo(port: int, count: int) -> float:
    """Seconds for a byte there and back."""
    with _connect(port, "echo") as connection:
        began = time.perf_counter()
        for _ in range(count):
            connection.sendall(b"!")
            connection.recv(1)
        return (time.perf_counter() - began) / count
