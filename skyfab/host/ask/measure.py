"""Measures how fast this host is, with torch where that is installed, and its network to another host.

`listen` and `send` run in workers: both ends are there at the same time.
"""

from __future__ import annotations

import socket
import time

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from typing import Final

_BLOCK: Final = 1 << 20
_PATIENCE: Final = 10.0
_CONNECT: Final = 3.0
_OPEN: Final = 120.0
"""Seconds for which a host takes connections."""


def measure(cache: str, *, seconds: float) -> dict[str, float]:
    """Matrix products and copies of memory, for `seconds` each: rates by what was measured."""
    return {**_product(seconds), "memory": _memory(seconds)}


def _product(seconds: float) -> dict[str, float]:
    """Operations per second of a matrix product, by who does it: only the same may be compared."""
    try:
        import site

        site.main()  # finds installed packages: the link runs without
        import torch
    except Exception:  # it may be there and broken
        return {"product, in Python": _plain_product(seconds)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4096 if device == "cuda" else 512
    matrix = torch.ones(size, size, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    _ = matrix @ matrix
    wait()
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        _ = matrix @ matrix
        wait()
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return {f"product, by torch on {device}": best}


def _plain_product(seconds: float) -> float:
    size = 48
    rows = [[float(one * other % 7) for one in range(size)] for other in range(size)]
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        columns = list(zip(*rows, strict=True))
        [[sum(map(float.__mul__, row, column)) for column in columns] for row in rows]
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def _memory(seconds: float) -> float:
    """Bytes per second that are copied, the best of several times."""
    source, target = bytearray(64 * _BLOCK), memoryview(bytearray(64 * _BLOCK))
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        target[:] = source
        best = max(best, len(source) / (time.perf_counter() - began))
    return best


# ---- the network


def listen(word: str, seconds: float) -> int:
    """Takes connections on a free port, in a thread: replies to clients that know the word with their rate."""
    import threading

    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, backlog=64, dualstack_ipv6=both)
    listener.settimeout(_OPEN)

    def accept() -> None:
        try:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=_take, args=(connection, word.encode(), seconds), daemon=True).start()
        except OSError:
            listener.close()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def _take(connection: socket.socket, word: bytes, seconds: float) -> None:
    room = bytearray(_BLOCK)
    try:
        with connection:
            connection.settimeout(_PATIENCE)
            if connection.recv(len(word), socket.MSG_WAITALL) != word:
                return
            count, began = 0, time.monotonic()
            while time.monotonic() < began + seconds:
                count += connection.recv_into(room)
            connection.sendall(str(count / (time.monotonic() - began)).encode())
            while connection.recv_into(room):  # closing now would take the reply back
                pass
    except OSError:
        pass


def send(address: str, port: int, word: str) -> dict[str, float | str]:
    """Sends zeros until the other host replies. Returns its `rate`, in bytes per second, or an `error`."""
    from select import select

    block = bytes(_BLOCK)
    try:
        with socket.create_connection((address, port), _CONNECT) as connection:
            connection.sendall(word.encode())
            connection.setblocking(False)
            while True:
                readable, writable, _ = select([connection], [connection], [], _PATIENCE)
                if readable:
                    return {"rate": float(connection.recv(64) or b"0")}
                if not writable:
                    return {"error": f"no data was sent for {_PATIENCE:.0f} s"}
                connection.send(block)
    except (OSError, ValueError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}
