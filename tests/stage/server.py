"""A TCP server that runs in a worker on a host, for forwarded connections. The first line of a connection says what
it does."""

from __future__ import annotations

import hashlib
import random
import socketserver
import threading
import time

import skyfab as sky

_given = 0
_broken = threading.Event()


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        word, *numbers = self.rfile.readline().split()
        getattr(self, f"do_{word.decode()}")(*map(int, numbers))

    def do_echo(self) -> None:
        while data := self.rfile.read1(65536):
            self.request.sendall(data)

    def do_digest(self) -> None:
        found = hashlib.sha256()
        while data := self.rfile.read1(65536):
            found.update(data)
        self.request.sendall(found.hexdigest().encode())

    def do_give(self, size: int, seed: int) -> None:
        global _given
        _given = 0
        try:
            for piece in pieces(size, seed):
                self.request.sendall(piece)
                _given += len(piece)
        except OSError:
            _broken.set()

    def do_hush(self, seconds: int) -> None:
        time.sleep(seconds)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 100

    def handle_error(self, request: object, address: object) -> None: ...


def pieces(size: int, seed: int) -> list[bytes]:
    """Data that a digest tells from any other."""
    content = random.Random(seed).randbytes(1 << 20)
    whole, rest = divmod(size, len(content))
    return [content] * whole + [content[:rest]]


@sky.function
def serve(port: int = 0) -> int:
    """Listens until the worker ends; returns the port."""
    _Server.allow_reuse_address = True
    server = _Server(("127.0.0.1", port), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


@sky.function
def given() -> int:
    """How many bytes the last `give` could write."""
    return _given


@sky.function
def was_broken(seconds: float) -> bool:
    """Whether a client of `give` went away since the last time."""
    found = _broken.wait(seconds)
    _broken.clear()
    return found
