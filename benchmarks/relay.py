"""A TCP relay that adds latency, to simulate a distant host."""

from __future__ import annotations

import queue
import socket
import threading
import time
from types import TracebackType


class Relay:
    """Listens on loopback and forwards everything to an address, with a delay of `delay` seconds in each direction."""

    def __init__(self, address: str, port: int, delay: float) -> None:
        self._target = (address, port)
        self.delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((near, far), (far, near)):
                waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()
                for action in (self._take, self._give):
                    thread = threading.Thread(target=action, args=(source, sink, waiting), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _take(self, source: socket.socket, sink: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self.delay, data))
            if not data:
                return

    def _give(self, source: socket.socket, sink: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
            except OSError:
                return
