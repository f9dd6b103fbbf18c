"""Answers questions in the link's own process: no agent, zygote or worker is started for them.

A question is a frame with the name of a module of this package and the arguments of the function of that name in it, or
of another one: ``runs.stop``. The function returns one value, or yields several; a value is JSON, or a pair of JSON and
bytes. Each is one frame of the reply. Questions are answered one after another, until the client closes the stream or
is silent for too long.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import queue
import re
import select
import signal
import threading

from skyfab.errors import ProtocolError
from skyfab.protocol.frames import HEAD, LIMIT, PING, PONG, Reader, frame

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Final

SILENCE: Final = 60.0
"""Seconds without a frame of the client after which it is gone: it sends one every few seconds while it waits."""


class Server:
    """Reads questions on one thread and answers them on another."""

    def __init__(self, cache: str, source: int, sink: int) -> None:
        self._cache = cache
        self._source = source
        self._sink = sink
        self._writing = threading.Lock()
        self._questions: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()

    def run(self) -> None:
        """Returns never: when the client is gone, `end` terminates the process."""
        threading.Thread(target=self._answer_all, daemon=True).start()
        reader, recv_into = Reader(self), io.FileIO(self._source, closefd=False).readinto
        try:
            while select.select([self._source], [], [], SILENCE)[0] and reader.pump(recv_into):
                pass
        except (OSError, ProtocolError):
            pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a client on this machine sends if `end` takes long
            end()

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        if kind == PING:
            self._write(frame(PONG, stream))
        elif kind == HEAD:
            self._questions.put((stream, bytes(payload)))

    def place(self, stream: int, length: int) -> memoryview:
        raise ProtocolError("a question has no data")

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        with self._writing:
            while rest:
                rest = rest[os.write(self._sink, rest) :]

    def _answer_all(self) -> None:
        while True:
            stream, payload = self._questions.get()
            try:
                for value, data in self._replies(payload):
                    self._reply(stream, {"value": value}, data)
                self._reply(stream, {"end": True})
            except BrokenPipeError:
                end()
            except BaseException as error:
                about: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:4000]}
                if isinstance(error, OSError):
                    about = {"error": str(error)[:4000], "errno": error.errno}
                self._reply(stream, about)

    def _replies(self, payload: bytes) -> Iterator[tuple[Any, bytes]]:
        question = json.loads(payload)
        name = question["name"]
        if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", name):
            raise ValueError(f"unknown question: {name}")
        if name == "become":
            self._become(question["arguments"]["command"])
        module, _, inner = name.partition(".")
        function = getattr(importlib.import_module(f"skyfab.host.ask.{module}"), inner or module)
        found = function(self._cache, **question["arguments"])
        for value in found if hasattr(found, "__next__") else (found,):
            yield value if isinstance(value, tuple) else (value, b"")

    def _become(self, command: str) -> None:
        """Replaces this process by a shell that runs `command` on the stream, as after a login."""
        os.dup2(self._source, 0)
        os.dup2(self._sink, 1)
        os.execv("/bin/sh", ["/bin/sh", "-c", command])

    def _reply(self, stream: int, about: dict[str, Any], data: bytes = b"") -> None:
        head = json.dumps(about).encode()
        size = len(head) if len(head) < 65536 else 0  # 0: all of it is JSON
        if len(head) + len(data) > LIMIT or (data and not size):
            raise ValueError("too large for one reply")
        self._write(frame(HEAD, stream, head + data, size))


AT_END: list[Callable[[], None]] = []
"""Called when the client is gone: a question ends there what it has started."""
_ENDING: Final = threading.Lock()
"""Held at the end: both threads may find that the client is gone."""


def end() -> None:
    """Ends the process, and what its questions have started."""
    with _ENDING:
        for action in AT_END:
            action()
        os._exit(0)


def serve(cache: str) -> None:
    """Answers on the standard streams, which a question's own prints no longer reach. Does not return."""
    source, sink = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    Server(cache, source, sink).run()
