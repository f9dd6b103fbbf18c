"""Measures the speed of this host, with torch if it is installed, and of its network to another host.

`listen` and `send` run in workers: both ends are there at the same time.
"""

from __future__ import annotations

import socket
import time

from skyfab.host.agent.ports import listen_everywhere

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Callable
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

    def multiply() -> None:
        _ = matrix @ matrix
        if device == "cuda":
            torch.cuda.synchronize()

    multiply()
    return {f"product, by torch on {device}": _best_rate(seconds, 2 * size**3, multiply)}


def _plain_product(seconds: float) -> float:
    size = 48
    rows = [[float(one * other % 7) for one in range(size)] for other in range(size)]
    columns = list(zip(*rows, strict=True))

    def multiply() -> None:
        [[sum(map(float.__mul__, row, column)) for column in columns] for row in rows]

    return _best_rate(seconds, 2 * size**3, multiply)


def _memory(seconds: float) -> float:
    """Bytes per second that are copied."""
    source, target = bytearray(64 * _BLOCK), memoryview(bytearray(64 * _BLOCK))

    def copy() -> None:
        target[:] = source

    return _best_rate(seconds, len(source), copy)


def _best_rate(seconds: float, amount: int, work: Callable[[], None]) -> float:
    """How much is done per second, the best of several times: `work` does this amount."""
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        work()
        best = max(best, amount / (time.perf_counter() - began))
    return best


# ---- the network


def listen(word: str, seconds: float) -> int:
    """Takes connections on a free port, in a thread: replies to clients that know the word with their rate."""
    import threading

    listener = listen_everywhere()
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
