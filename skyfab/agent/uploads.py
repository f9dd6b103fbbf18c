"""Routes: where the data of large messages goes, piece by piece: to a rank, into a blob, into memory, or nowhere."""

from __future__ import annotations

from skyfab.agent.store import Writer
from skyfab.agent.worker_handle import WorkerHandle
from skyfab.errors import ProtocolError
from skyfab.protocol import messages
from skyfab.protocol.blobs import Assembly, inline_size
from skyfab.protocol.messages import Done, Failed

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from skyfab.protocol.mux import Mux

    Route = WorkerHandle | Writer | Assembly | None
    """None drops it."""

_FULL: Final = (28, 122)  # ENOSPC, EDQUOT


class Uploads:
    """One for each stream on which data is expected."""

    def __init__(self, mux: Mux) -> None:
        self._mux = mux
        self._uploads: dict[int, Route] = {}
        self._missing: dict[int, int] = {}

    def close(self) -> None:
        """Half a blob is nobody's."""
        for stream in list(self._uploads):
            self.abandon(stream)

    def place(self, stream: int, length: int) -> memoryview:
        route = self._uploads.get(stream)
        return route.place(length) if isinstance(route, Assembly) else memoryview(bytearray(length))

    def data(self, stream: int, view: memoryview) -> None:
        route = self._uploads.get(stream)
        if isinstance(route, WorkerHandle):
            route.give_data(stream, view)
        else:
            self._mux.used(stream, len(view))
            if isinstance(route, Assembly):
                route.advance(len(view))
            elif isinstance(route, Writer):
                self._keep(stream, route, view)
        left = self._missing.get(stream, 0) - len(view)
        self._missing[stream] = left
        if left <= 0:
            self._complete(stream)

    def expect(self, stream: int, parts: Sequence[messages.Part], route: Route) -> None:
        """The data of a large message will follow."""
        self._uploads[stream] = route
        self._missing[stream] = inline_size(parts)
        if not self._missing[stream]:
            self._complete(stream)

    def _complete(self, stream: int) -> None:
        """All data of a large message is here."""
        self._missing.pop(stream, None)
        route = self._uploads.pop(stream, None)
        if not isinstance(route, WorkerHandle):  # else some of it is still to be used
            self._mux.finish(stream)
        if isinstance(route, Writer):
            self._commit(stream, route)

    def abandon(self, stream: int) -> None:
        """Data still under way on this stream goes nowhere. It may also never come."""
        self._missing.pop(stream, None)
        route = self._uploads.pop(stream, None)
        if isinstance(route, Writer):
            route.abort()

    def fail(self, stream: int, error: Exception) -> None:
        """Tells the client why this came to nothing."""
        self.abandon(stream)
        full = isinstance(error, OSError) and error.errno in _FULL
        hint = "free some space there, or put the cache on another disk (cache = … in the inventory)" if full else None
        self._mux.send(stream, Failed(text=str(error), hint=hint).encode())

    def keep(self, stream: int, writer: Writer, data: memoryview) -> None:
        """All of it is here already."""
        if self._keep(stream, writer, data):
            self._commit(stream, writer)

    def _keep(self, stream: int, writer: Writer, view: memoryview) -> bool:
        try:
            writer.write(view)
        except OSError as error:
            writer.abort()
            self.fail(stream, error)
            return False
        return True

    def _commit(self, stream: int, writer: Writer) -> None:
        try:
            writer.commit()
        except (OSError, ProtocolError) as error:
            writer.abort()
            self.fail(stream, error)
        else:
            self._mux.send(stream, Done().encode())
