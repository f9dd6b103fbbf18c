"""Tunnels: forward a port of this machine to one of a host, with the ssh program or with threads."""

from __future__ import annotations

import contextlib
import re
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from skyfab.errors import HostLost, UsageError
from skyfab.ssh.process import ProcessStream

LOOPBACK: Final = "127.0.0.1"
_CHUNK: Final = 256 * 1024
_INTERVAL: Final = 0.2
"""Seconds between two looks at whether a tunnel was closed."""
_OPEN_FAILED: Final = re.compile(r"^channel \d+: open failed: (?:connect failed: )?(.*?)\s*$", re.MULTILINE)
"""What ssh reports about a connection that the host did not make."""

PROHIBITED: Final = "administratively prohibited"
"""Part of the reason if the SSH server does not allow forwarding."""

Refused = Callable[[str], None]
"""Called with the reason if the host could not make a connection."""


class Tunnel(Protocol):
    """A port of 127.0.0.1 that leads to a port of a host, for as long as one SSH connection lasts."""

    def wait(self, refused: Refused) -> Exception:
        """Blocks until the tunnel has ended, and returns the reason. Its port is free then."""

    def end(self) -> None:
        """Makes `wait` return. Thread-safe."""

    def leave_to_parent(self) -> None:
        """In a forked child: closes what it shares with the parent, whose tunnel stays open."""


class ProcessTunnel:
    """The tunnel of an ssh process that listens already."""

    def __init__(self, stream: ProcessStream) -> None:
        self._stream = stream

    def wait(self, refused: Refused) -> Exception:
        while not self._stream.has_ended:
            is_ready(self._stream.stderr())
            for reason in _OPEN_FAILED.findall(self._stream.drain().decode(errors="replace")):
                refused(reason.lower())
        error = self._stream.explain()
        self._stream.close()
        return error

    def end(self) -> None:
        self._stream.end(signal.SIGTERM)

    def leave_to_parent(self) -> None:
        """Every stream does that by itself."""


def is_ready(*fds: int | None) -> bool:
    """Waits a moment for data on one of these descriptors; returns whether the first one has some, or has ended."""
    poll = select.poll()
    for fd in fds:
        if fd is not None:
            poll.register(fd, select.POLLIN)
    return fds[0] in dict(poll.poll(1000 * _INTERVAL))


class ThreadTunnel:
    """The tunnel of a transport without a program of its own: threads pass on the bytes of each connection."""

    def __init__(self, port: int, connect: Callable[[], Any], is_alive: Callable[[], bool] = lambda: True) -> None:
        """`connect` returns a socket or a channel to the host's port, or raises OSError. Raises UsageError."""
        self._connect = connect
        self._is_alive = is_alive
        self._ended = False
        self._lock = threading.Lock()
        self._open: set[Any] = set()
        """Sockets and channels."""
        try:
            self._listener = socket.create_server((LOOPBACK, port), backlog=128)
        except OSError as error:
            raise not_available(port, error.strerror or str(error)) from error
        self._listener.settimeout(_INTERVAL)

    def wait(self, refused: Refused) -> Exception:
        while not self._ended and self._is_alive():
            with contextlib.suppress(OSError):  # most often the timeout
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(accepted, refused), daemon=True).start()
        self._ended = True
        self._listener.close()
        with self._lock:
            for one in self._open:
                _close(one)
        return HostLost("the connection ended")

    def end(self) -> None:
        self._ended = True

    def leave_to_parent(self) -> None:
        self._listener.close()
        for one in self._open:
            if isinstance(one, socket.socket):
                one.close()

    def _serve(self, accepted: socket.socket, refused: Refused) -> None:
        accepted.settimeout(None)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            channel = self._connect()
        except OSError as error:
            accepted.close()
            if not self._ended:
                refused((error.strerror or str(error)).lower())
            return
        with self._lock:
            self._open |= {accepted, channel}
            if self._ended:
                _close(accepted)
                _close(channel)
        back = threading.Thread(target=_pass_on, args=(channel, accepted), daemon=True)
        back.start()
        _pass_on(accepted, channel)
        back.join()
        with self._lock:
            self._open -= {accepted, channel}
        for one in (accepted, channel):
            one.close()


def not_available(port: int, reason: str) -> UsageError:
    """The error for a port of this machine at which nothing of ours may listen."""
    return UsageError(f"port {port} of this machine is not available: {reason.lower()}", hint="local=0 uses a free one")


def _pass_on(source: Any, sink: Any) -> None:
    """Copies bytes until the source ends. An error ends both directions."""
    try:
        while data := source.recv(_CHUNK):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        _close(source)
        _close(sink)


def _close(one: Any) -> None:
    """Ends both directions, so that no thread waits for it.

    A program at the other end that still sends gets an error when the socket is closed, and not only after a minute.
    """
    with contextlib.suppress(OSError):
        if isinstance(one, socket.socket):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RDWR)
