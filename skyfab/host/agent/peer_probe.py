"""Peer probe: checks which other hosts this host can connect to, at which addresses, and that the right host replies.

This takes seconds if a packet is lost or a machine is busy, so it runs on a thread and does not block the agent's loop.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque

from skyfab.host.agent.poller import READ

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
_LONGEST = 60.0


class PeerProbe:
    """Tries to connect to peers (address, port, word) on a thread.

    `done` is called in the agent's loop, with a pair for each peer: the error or an empty string; and this host's own
    address on the route to it.
    """

    def __init__(
        self, peers: list[list[str]], timeout: float, watch: Poller, done: Callable[[list[list[str]]], None]
    ) -> None:
        from threading import Thread  # imported late: few agents need it

        self._peers = [_Peer(*peer) for peer in peers]
        self._timeout = timeout
        self._poller = watch
        self._done = done
        self._over, self._running = os.pipe()
        watch.add(self._over, READ, self._finish)
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            _try_all(self._peers, min(self._timeout, _LONGEST))
        finally:
            os.close(self._running)

    def _finish(self) -> None:
        self._poller.drop(self._over)
        os.close(self._over)
        self._done([[peer.reason, peer.own] for peer in self._peers])


class _Peer:
    """One address, and the state of the attempt to connect to it."""

    def __init__(self, address: str, port: str, word: str) -> None:
        self.word = word
        self.own = ""
        self.reason = "no answer"
        self.over = False
        self.socket: socket.socket | None = None
        self.due = 0.0
        """When the next attempt may start."""
        self._where = (address, int(port))
        self._heard = b""
        self._tries = 0

    def begin(self) -> bool:
        """Starts to connect. Returns False if that failed at once."""
        self._heard = b""
        try:
            self.socket = socket.socket(socket.AF_INET6 if ":" in self._where[0] else socket.AF_INET)
            self.socket.setblocking(False)
            self.socket.connect(self._where)
        except BlockingIOError:
            pass
        except (OSError, OverflowError) as error:
            self._fail(_words(error))
        return self.socket is not None

    def go_on(self) -> bool:
        """Handles the socket's next event. Returns False if the attempt is over: `reason` is empty on success."""
        assert self.socket is not None
        try:
            if not self.own:
                error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                self.own = str(self.socket.getsockname()[0])
                self.reason = "it accepts connections and does not answer"
                return True
            said = self.socket.recv(256)
        except BlockingIOError:
            return True
        except OSError as error:
            self._fail(_words(error))
            return False
        self._heard += said
        if said and len(self._heard) < len(self.word):
            return True
        if self._heard == self.word.encode():
            self.reason, self.over = "", True
            self.leave()
        else:
            self._fail("another machine answers there")
        return False

    def _fail(self, reason: str) -> None:
        self.leave()
        self.reason, self.own = reason, ""
        self._tries += 1
        self.over = self._tries >= _TRIES
        self.due = time.monotonic() + _PAUSE

    def leave(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def _words(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def _try_all(peers: list[_Peer], timeout: float) -> None:
    poll = select.poll()
    waiting = deque(peers)
    open_: dict[int, _Peer] = {}
    deadline = time.monotonic() + timeout
    reached: dict[str, float] = {}
    """By word, when to stop trying the other addresses of a host that has been reached."""
    try:
        while (waiting or open_) and (now := time.monotonic()) < deadline:
            for _ in range(len(waiting)):
                peer = waiting.popleft()
                if now >= reached.get(peer.word, deadline):
                    continue
                if peer.due > now or len(open_) >= _ABREAST or not peer.begin():
                    if not peer.over:
                        waiting.append(peer)
                    continue
                assert peer.socket is not None
                open_[peer.socket.fileno()] = peer
                poll.register(peer.socket, select.POLLOUT)
            for fd, _ in poll.poll(50):
                peer = open_[fd]
                poll.unregister(fd)
                if peer.go_on():
                    poll.register(fd, select.POLLIN)
                    continue
                del open_[fd]
                if not peer.reason:
                    reached.setdefault(peer.word, time.monotonic() + _MORE)
                elif not peer.over:
                    waiting.append(peer)
            for fd, peer in list(open_.items()):
                if now >= reached.get(peer.word, deadline):
                    poll.unregister(fd)
                    del open_[fd]
                    peer.leave()
    finally:
        for peer in peers:
            peer.leave()
