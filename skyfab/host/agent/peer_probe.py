"""Peer probe: checks which other hosts this host can connect to, at which addresses, and that the right host replies.

This takes seconds if a packet is lost or a machine is busy, so it runs on threads and does not block the agent's loop.
"""

from __future__ import annotations

import os
import select
import socket
import time
from errno import EINPROGRESS

from skyfab.host.agent.poller import READ, WRITE

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable

    from skyfab.host.agent.poller import Poller

_ABREAST = 128
"""Concurrent connections: the number of descriptors may be limited."""
_TRIES = 3
"""How often an address is tried if the connection fails: a busy machine may accept it a moment later."""
_PAUSE = 0.25
"""Seconds between tries."""
_MORE = 1.0
"""Seconds to wait for the other addresses of a host, once one of them has replied."""


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
        self._found = [["no answer", ""] for _ in peers]
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

        try:
            with ThreadPoolExecutor(_ABREAST) as threads:
                self._found = list(threads.map(lambda peer: self._probe(*peer), self._peers))
        finally:
            os.close(self._running)

    def _finish(self) -> None:
        self._poller.drop(self._over)
        os.close(self._over)
        self._done(self._found)

    def _probe(self, address: str, port: str, word: str) -> list[str]:
        found = ["no answer", ""]
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE)
            if self._is_over(word):
                break
            try:
                with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as peer:
                    peer.setblocking(False)
                    _check(peer.connect_ex((address, int(port))))
                    if not self._is_ready(peer, WRITE, word):
                        return ["no answer", ""]
                    _check(peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                    own = str(peer.getsockname()[0])
                    heard = self._hear(peer, word)
            except (OSError, OverflowError) as error:
                found = [(getattr(error, "strerror", None) or str(error)).lower(), ""]
                continue
            if heard is None:
                return ["it accepts connections and does not answer", own]
            if heard == word.encode():
                self._reached.setdefault(word, time.monotonic() + _MORE)
                return ["", own]
            found = ["another machine answers", ""]
        return found

    def _hear(self, peer: socket.socket, word: str) -> bytes | None:
        """What the peer sends, as much as the word has; None if it is silent."""
        heard = b""
        while len(heard) < len(word):
            if not self._is_ready(peer, READ, word):
                return None
            said = peer.recv(256)
            if not said:
                break
            heard += said
        return heard

    def _is_ready(self, peer: socket.socket, event: int, word: str) -> bool:
        """Waits for the socket. False: the time is over."""
        poll = select.poll()
        poll.register(peer, event)
        while not self._is_over(word):
            if poll.poll(50):
                return True
        return False

    def _is_over(self, word: str) -> bool:
        return time.monotonic() >= self._reached.get(word, self._deadline)


def _check(error: int) -> None:
    if error not in (0, EINPROGRESS):
        raise OSError(error, os.strerror(error))
