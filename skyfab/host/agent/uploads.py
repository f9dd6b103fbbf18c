"""Routes the data of large messages, as it is received, to a worker, a blob file or memory, or drops it."""

from __future__ import annotations

from skyfab.errors import ProtocolError
from skyfab.host.agent.store import Writer
from skyfab.host.agent.worker_handle import WorkerHandle
from skyfab.protocol import messages
from skyfab.protocol.blobs import Assembly, inline_size
from skyfab.protocol.frames import Spare
from skyfab.protocol.messages import Done, Failed

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from skyfab.protocol.mux import Mux

    Route = WorkerHandle | Writer | Assembly | None
    """The destination of a stream's data. None drops it."""

_FULL: Final = (28, 122)  # ENOSPC, EDQUOT


class Uploads:
    """The destination and the missing bytes of each stream on which data is expected."""

    def __init__(self, mux: Mux) -> None:
        self._mux = mux
        self._uploads: dict[int, Route] = {}
        self._missing: dict[int, int] = {}
        self._spare = Spare()

    def close(self) -> None:
        """Deletes partially received blobs."""
        for stream in list(self._uploads):
            self.abandon(stream)

    def place(self, stream: int, length: int) -> memoryview:
        route = self._uploads.get(stream)
        return route.place(length) if isinstance(route, Assembly) else self._spare.take(length)

    def data(self, stream: int, view: memoryview) -> None:
        route = self._uploads.get(stream)
        if isinstance(route, WorkerHandle):
            route.give_data(stream, view)
        else:
            self._mux.used(stream, len(view))
            if isinstance(route, Assembly):
                route.advance(len(view))
            elif isinstance(route, Writer):
                try:
                    route.write(view)
                except OSError as error:
                    self.fail(stream, error)
        left = self._missing.get(stream, 0) - len(view)
        self._missing[stream] = left
        if left <= 0:
            self._complete(stream)

    def expect(self, stream: int, parts: Sequence[messages.Part], route: Route) -> None:
        """The data of a large message will follow on this stream, for this destination."""
        self._uploads[stream] = route
        self._missing[stream] = inline_size(parts)
        if not self._missing[stream]:
            self._complete(stream)

    def _complete(self, stream: int) -> None:
        """All data of a large message has been received."""
        self._missing.pop(stream, None)
        route = self._uploads.pop(stream, None)
        if not isinstance(route, WorkerHandle):  # a worker may not have consumed all of it yet
            self._mux.finish(stream)
        if isinstance(route, Writer):
            try:
                route.commit()
                self._mux.send(stream, Done().encode())
            except (OSError, ProtocolError) as error:
                route.abort()
                self.fail(stream, error)

    def abandon(self, stream: int) -> None:
        """Drops data of this stream that is still to be received. The client may also have stopped sending it."""
        self._missing.pop(stream, None)
        route = self._uploads.pop(stream, None)
        if isinstance(route, Writer):
            route.abort()

    def fail(self, stream: int, error: Exception) -> None:
        """Drops the stream's data and sends the client the error."""
        self.abandon(stream)
        full = isinstance(error, OSError) and error.errno in _FULL
        hint: str | None = "free some space, or put the cache on another disk (cache = … in the inventory)"
        hint = hint if full else getattr(error, "hint", None)
        self._mux.send(stream, Failed(text=str(error), hint=hint).encode())
