"""The simulated network: links with latency and bandwidth, SSH connections over them, and what waits for their data."""

from __future__ import annotations

import hashlib
import select
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from simulation.threads import FOREVER, Loop, Thread
from skyfab.protocol.frames import Buffer

if TYPE_CHECKING:
    from simulation.host import SimulatedHost

_PIECE: Final = 64 * 1024
"""Bytes that a link carries in one go: transfers over one link share it in such pieces."""
_BUFFER: Final = 256 * 1024
"""Bytes of a connection that this machine holds until its own link has carried them."""


@dataclass(slots=True)
class Link:
    """One direction of a link: what is sent over it waits for what was sent before."""

    bandwidth: float
    """Bytes a second."""
    free_at: float = 0.0
    carried: int = 0

    def carry(self, size: int, begin: float) -> float:
        """Sends `size` bytes, not before `begin`. Returns when the last has left."""
        self.carried += size
        self.free_at = max(begin, self.free_at) + size / self.bandwidth
        return self.free_at


class Network:
    """The links of this machine, and all connections."""

    def __init__(self, loop: Loop, bandwidth: float) -> None:
        self.loop = loop
        self.up, self.down = Link(bandwidth), Link(bandwidth)
        self.logins = 0
        self.connections: set[Wire] = set()
        self.most_connections = 0
        self.sides: dict[int, Side] = {}
        """By descriptor: what a program waits for."""
        self._descriptors = 100
        self._trace = hashlib.sha256()

    def note(self, what: str, host: str, size: int) -> None:
        """Adds to the trace what happens now."""
        self._trace.update(f"{self.loop.now:.9f} {what} {host} {size}\n".encode())

    @property
    def trace(self) -> str:
        """Names all that has happened so far: when, at which host, and how many bytes."""
        return self._trace.hexdigest()[:16]

    def descriptor(self, side: Side) -> int:
        self._descriptors += 1
        self.sides[self._descriptors] = side
        return self._descriptors


class Side:
    """What a descriptor stands for."""

    def __init__(self) -> None:
        self.watchers: list[Callable[[], None]] = []
        """Called when it may have become ready."""

    def is_readable(self) -> bool:
        return False

    def is_writable(self) -> bool:
        return False

    def changed(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()


class Wire(Side):
    """One SSH connection, as both ends have it. For this machine it is a `Stream` of `skyfab.ssh.base`."""

    def __init__(self, network: Network, host: SimulatedHost) -> None:
        super().__init__()
        self._network = network
        self._loop = network.loop
        self._serial = network.loop.serial()
        self.host = host
        self._arrived: deque[memoryview] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._unsent = 0
        self.is_closed = False
        self.is_cut = False
        """What is sent in either direction is lost."""
        self.on_data: Callable[[bytes], None] = lambda data: None
        """Called on the host with what arrives there."""
        self.on_close: Callable[[], None] = lambda: None
        self._fd = network.descriptor(self)
        network.connections.add(self)
        network.most_connections = max(network.most_connections, len(network.connections))

    def __hash__(self) -> int:
        return self._serial

    # ---- this machine's end

    def fileno(self) -> int:
        return self._fd

    def sink(self) -> int:
        return self._fd + _WRITING

    def stderr(self) -> None:
        return None

    def drain(self) -> bytes:
        return b""

    def is_readable(self) -> bool:
        return bool(self._arrived) or self._ended

    def is_writable(self) -> bool:
        return self._unsent < _BUFFER or self._ended

    def recv_into(self, view: memoryview) -> int | None:
        if not self._arrived:
            if self._ended:
                return 0
            raise BlockingIOError
        first = self._arrived[0]
        count = min(len(view), len(first))
        view[:count] = first[:count]
        if count == len(first):
            self._arrived.popleft()
        else:
            self._arrived[0] = first[count:]
        return count

    def send(self, buffers: Sequence[Buffer]) -> int:
        if self._ended or self.is_closed:
            raise BrokenPipeError
        room = _BUFFER - self._unsent
        if room <= 0:
            raise BlockingIOError
        data = b"".join(buffers)[:room]
        for at in range(0, len(data), _PIECE):
            self._leave(data[at : at + _PIECE])
        return len(data)

    def _leave(self, piece: bytes) -> None:
        loop, network = self._loop, self._network
        left = network.up.carry(len(piece), loop.now)
        there = self.host.down.carry(len(piece), left) + self.host.latency
        self._unsent += len(piece)
        if left > loop.now:
            loop.after(left - loop.now, lambda: self._left(len(piece)))
        else:
            self._unsent -= len(piece)
        loop.after(there - loop.now, lambda: self._reaches_host(piece))

    def _left(self, size: int) -> None:
        was_full = self._unsent >= _BUFFER
        self._unsent -= size
        if was_full:
            self.changed()

    def _reaches_host(self, piece: bytes) -> None:
        if not self.is_cut and not self._ended and self.host.is_reachable:
            self._network.note("out", self.host.host.name, len(piece))
            self.on_data(piece)

    def explain(self) -> Exception:
        assert self._error is not None, "the connection has not ended"
        return self._error

    def close(self) -> None:
        """Closes this machine's end. The host learns of that if it can be reached."""
        if self.is_closed:
            return
        self.is_closed = True
        self._network.sides.pop(self._fd, None)
        self._network.connections.discard(self)
        self._loop.after(self.host.latency, self._closes_on_host)

    def _closes_on_host(self) -> None:
        if not self.is_cut and self.host.is_reachable:
            self.on_close()

    # ---- the host's end

    def reply(self, buffers: Sequence[Buffer]) -> int:
        """Sends from the host. Its link accepts any amount."""
        data = b"".join(buffers)
        for at in range(0, len(data), _PIECE):
            piece = memoryview(data)[at : at + _PIECE]
            left = self.host.up.carry(len(piece), self._loop.now)
            here = self._network.down.carry(len(piece), left) + self.host.latency
            self._loop.after(here - self._loop.now, lambda piece=piece: self._reaches_client(piece))
        return len(data)

    def _reaches_client(self, piece: memoryview) -> None:
        if not self.is_cut and not self.is_closed and self.host.is_reachable:
            self._network.note("in", self.host.host.name, len(piece))
            self._arrived.append(piece)
            self.changed()

    def end(self, error: Exception) -> None:
        """The host, or the network, ends the connection: this machine learns of it after what was sent before."""

        def end() -> None:
            if not self.is_cut and not self._ended:
                self._ended, self._error = True, error
                self.changed()

        self._loop.after(
            max(self.host.up.free_at, self._network.down.free_at, self._loop.now) + self.host.latency - self._loop.now,
            end,
        )


_WRITING: Final = 1_000_000_000
"""Added to a descriptor for its writing end: a real connection has two."""


class _Waiting:
    """The descriptors that one selector watches."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._loop = network.loop
        self._watched: dict[int, tuple[Side, Callable[[], None]]] = {}
        self._maybe: dict[int, None] = {}
        """Those that may be ready."""
        self._thread: Thread | None = None

    def register(self, fd: int, events: int = 0) -> None:
        side = self._network.sides[fd % _WRITING]

        def changed() -> None:
            self._maybe[fd] = None
            if self._thread is not None:
                self._loop.wake(self._thread)

        self._watched[fd] = side, changed
        side.watchers.append(changed)
        changed()

    def unregister(self, fd: int) -> None:
        side, changed = self._watched.pop(fd)
        side.watchers.remove(changed)
        self._maybe.pop(fd, None)

    def close(self) -> None:
        for fd in list(self._watched):
            self.unregister(fd)

    def poll(self, seconds: float | None) -> list[tuple[int, int]]:
        until = FOREVER if seconds is None else self._loop.now + seconds
        while not (found := self._ready()) and self._loop.now < until:
            self._thread = self._loop.current
            try:
                self._loop.wait(until)
            finally:
                self._thread = None
        return found

    def _ready(self) -> list[tuple[int, int]]:
        found = []
        for fd in list(self._maybe):
            side = self._watched[fd][0]
            if side.is_writable() if fd >= _WRITING else side.is_readable():
                found.append((fd, 1))
            else:
                del self._maybe[fd]
        return found


class _Poll(_Waiting):
    """As `select.poll`, which counts in milliseconds."""

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        try:
            return super().poll(None if milliseconds is None else milliseconds / 1000)
        finally:
            self.close()  # the real one is closed when nobody refers to it any more


class Select:
    """Stands for the module `select`, and for the `epoll` of the reader."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.POLLIN, self.POLLOUT = select.POLLIN, select.POLLOUT

    def poll(self) -> _Poll:
        return _Poll(self._network)

    def epoll(self) -> _Waiting:
        return _Waiting(self._network)


class _Pipe(Side):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def is_readable(self) -> bool:
        return self.count > 0


class Os:
    """Stands for the module `os` where the reader makes a pipe to wake itself."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def pipe(self) -> tuple[int, int]:
        pipe = _Pipe()
        return self._network.descriptor(pipe), self._network.descriptor(pipe)

    def set_blocking(self, fd: int, blocking: bool) -> None:
        pass

    def write(self, fd: int, data: bytes) -> int:
        pipe: Any = self._network.sides[fd]
        pipe.count += len(data)
        pipe.changed()
        return len(data)

    def read(self, fd: int, size: int) -> bytes:
        pipe: Any = self._network.sides[fd]
        count, pipe.count = pipe.count, 0
        if not count:
            raise BlockingIOError
        return b"!" * count

    def close(self, fd: int) -> None:
        del self._network.sides[fd]
