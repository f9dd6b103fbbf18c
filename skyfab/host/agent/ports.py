"""TCP between hosts: the agent's listening sockets, for a gang's rendezvous and for probes, and probes of other hosts.

A rendezvous port is bound before its number is sent, so that no other process can take it. Probes take seconds if a
packet is lost or a machine is busy, so they run on threads and do not block the agent's loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from skyfab.host.agent.poller import READ

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable

    from skyfab.host.agent.poller import Poller

_BACKLOG = 2048
_ABREAST = 128
"""Concurrent connections: the number of descriptors may be limited."""
_TRIES = 3
"""How often an address is tried if the connection fails: a busy machine may accept it a moment later."""
_PAUSE = 0.25
"""Seconds between tries."""
_MORE = 1.0
"""Seconds to wait for the other addresses of a host, once one of them has replied."""
_TICK = 0.05


class PeerProbe:
    """Tries to connect to peers (address, port, word).

    `done` is called in the agent's loop, with a pair for each peer: the error or an empty string; and this host's own
    address on the route to it.
    """

    def __init__(
        self, peers: list[list[str]], timeout: float, watch: Poller, done: Callable[[list[list[str]]], None]
    ) -> None:
        from threading import Thread  # imported late: few agents need it

        self._peers = peers
        self._found = [["no response", ""] for _ in peers]
        self._deadline = time.monotonic() + timeout
        self._reached: dict[str, float] = {}
        """By word, when to stop trying the other addresses of a host that has been reached."""
        self._poller = watch
        self._done = done
        self._over, self._running = os.pipe()
        watch.add(self._over, READ, self._finish)
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        threads = ThreadPoolExecutor(_ABREAST)
        try:
            tried = [threads.submit(self._probe, number, *peer) for number, peer in enumerate(self._peers)]
            words = [word for _, _, word in self._peers]
            while any(not one.done() and not self._is_over(word) for one, word in zip(tried, words, strict=True)):
                time.sleep(_TICK)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # those that still wait end at the deadline
            os.close(self._running)

    def _finish(self) -> None:
        self._poller.drop(self._over)
        os.close(self._over)
        self._done([*self._found])

    def _probe(self, number: int, address: str, port: str, word: str) -> None:
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE)
            if self._is_over(word):
                return
            try:
                left = max(_TICK, self._deadline - time.monotonic())
                with socket.create_connection((address, int(port)), left) as peer, peer.makefile("rb") as said:
                    own = str(peer.getsockname()[0])
                    self._found[number] = ["it accepts connections but does not respond", own]
                    if said.read(len(word)) == word.encode():
                        self._reached.setdefault(word, time.monotonic() + _MORE)
                        self._found[number] = ["", own]
                        return
                    self._found[number] = ["another machine has this address", ""]
            except TimeoutError:
                return
            except (OSError, OverflowError) as error:
                self._found[number] = [(getattr(error, "strerror", None) or str(error)).lower(), ""]

    def _is_over(self, word: str) -> bool:
        return time.monotonic() >= self._reached.get(word, self._deadline)


class Ports:
    """Listening sockets, until they are passed to a process or closed."""

    def __init__(self, watch: Poller) -> None:
        self._poller = watch
        self._sockets: dict[int, socket.socket] = {}

    def open(self, address: str = "", word: str = "") -> int:
        """Listens on a free port of this address, or of all addresses if it is not this host's; returns the port.

        With a `word`, listens on all addresses of the host and sends the word to each peer that connects.
        """
        listener = listen_everywhere() if word else _at(address)
        port = int(listener.getsockname()[1])
        self._sockets[port] = listener
        if word:
            listener.setblocking(False)
            self._poller.add(listener.fileno(), READ, lambda: _tell(listener, word))
        return port

    def hand_over(self, port: int) -> int:
        """The descriptor of the socket that listens on the port, which the caller must close; -1 if there is none."""
        listener = self._sockets.pop(port, None)
        if listener is None:
            return -1
        self._poller.drop(listener.fileno())
        return listener.detach()

    def close(self, port: int) -> None:
        fd = self.hand_over(port)
        if fd >= 0:
            os.close(fd)


def _at(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=_BACKLOG)


def listen_everywhere() -> socket.socket:
    """A socket for all IPv4 and IPv6 addresses; IPv4 only if the system has no IPv6."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    except (OSError, ValueError):
        return _at("")


def _tell(listener: socket.socket, word: str) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:  # the peer has already disconnected
        return
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(word.encode())
