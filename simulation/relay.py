"""The worker of a relay on a simulated host: answers the requests of `skyfab.pool.relay`, which is the real one.

Chunks between hosts are only counted: they take time on the links of both, and have no content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from simulation import functions
from skyfab.host.relay import BROKEN, chunks_of
from skyfab.protocol import codec, messages

if TYPE_CHECKING:
    from simulation.host import Agent

_AHEAD: Final = 3
"""Chunks that a host asks for at a time, as `skyfab.host.relay` does."""


class RelayWorker:
    """One host of a relay: what it has, where it takes the rest from, and who takes it from here."""

    def __init__(self, agent: Agent, spawn: messages.Spawn) -> None:
        self._agent = agent
        self._loop = agent.loop
        self._host = agent.host
        self._name, self._generation = spawn.worker, spawn.generation
        self._names: list[str] = []
        self._sizes: list[int] = []
        self.at = 0
        self._asked = 0
        """The first chunk that it has not asked its source for."""
        self._source: RelayWorker | None = None
        self._children: list[RelayWorker] = []
        self._problem = ""
        self._looking: list[Callable[[], None]] = []
        self.has_ended = False
        self._coming: dict[int, list[memoryview] | None] = {}

    @property
    def _is_reachable(self) -> bool:
        return self._host.is_reachable and not self.has_ended and not self._agent.is_dead

    # ---- requests

    def expect(self, stream: int) -> None:
        """A request begins to arrive: it is carried out after those before it."""
        self._coming[stream] = None

    def give(self, stream: int, call: messages.Call, buffers: list[memoryview]) -> None:
        self._coming[stream] = buffers
        while self._coming and (first := next(iter(self._coming.values()))) is not None:
            self._do(next(iter(self._coming)), first)

    def _do(self, stream: int, buffers: list[memoryview]) -> None:
        del self._coming[stream]
        request, *arguments, _ = codec.loads(buffers[0], buffers[1:])
        answer = getattr(self, f"_on_{request}")(stream, *arguments)
        if answer is not None:
            self._loop.after(0.001, lambda: self._reply(stream, answer[0]))

    def _reply(self, stream: int, value: Any) -> None:
        if not self.has_ended and not self._agent.is_dead:
            payload = codec.Payload(json.dumps({"value": value}).encode())
            self._agent.reply(stream, messages.Result(parts=[len(payload.data)], plain=True), payload)
            self._agent.flush()

    def _on_open(self, stream: int, items: Sequence[tuple[str, int]], keep: bool, keys: tuple[str, str]) -> tuple[Any]:
        self._names = [name for name, _ in items]
        self._sizes = [end - start for _, start, end in chunks_of([size for _, size in items])]
        lacking = [number for number, name in enumerate(self._names) if name not in self._host.blobs]
        self.at = 0 if lacking else len(self._sizes)
        return ([[number, 0] for number in lacking],)

    def _on_listen(self, stream: int, peer: str, addresses: Sequence[str]) -> tuple[Any]:
        port = self._agent.new_port()
        functions.PORTS.update({(address, port): self for address in addresses})
        return ([port] * len(addresses),)

    def _on_connect(self, stream: int, peer: str, endpoints: Sequence[tuple[str, int]]) -> None:
        found = next((functions.PORTS.get((address, port)) for address, port in endpoints), None)
        self._leave()

        def connected() -> None:
            is_there = isinstance(found, RelayWorker) and found._is_reachable  # noqa: SLF001
            if isinstance(found, RelayWorker) and is_there:
                self._source, self._asked, self._problem = found, self.at, ""
                found._children.append(self)  # noqa: SLF001
                self._ask()
            self._reply(stream, is_there)

        self._loop.after(4 * self._host.latency, connected)

    def _leave(self) -> None:
        if self._source is not None:
            self._source._children.remove(self)  # noqa: SLF001
            self._source = None

    def _on_look(self, stream: int, seconds: float, first: int, hashes: bytes) -> None:
        def answer() -> None:
            if answer in self._looking:
                self._looking.remove(answer)
                self._reply(stream, [self.at, self._problem, self.at])

        self._looking.append(answer)
        self._loop.after(0 if self._problem or self.at == len(self._sizes) else seconds, answer)

    def _on_chunk(self, stream: int, number: int, checksum: bytes, data: Any) -> tuple[Any]:
        self._leave()
        if number == self.at:
            self._arrived()
        return ([self.at, self._problem, 0],)

    def _on_commit(self, stream: int, verify: bool) -> tuple[Any]:
        assert self.at == len(self._sizes), "a relay is committed before all chunks have come"
        self._host.blobs.update(self._names)
        return (None,)

    # ---- chunks

    def _ask(self) -> None:
        """Has its source send what it has, a few chunks at a time."""
        source = self._source
        while source is not None and self._asked < min(source.at, self.at + _AHEAD, len(self._sizes)):
            size, up, down = self._sizes[self._asked], source._host.up, self._host.down  # noqa: SLF001
            self._asked += 1
            begin = max(self._loop.now, up.free_at, down.free_at)
            up.carry(size, begin)
            there = down.carry(size, begin) + source._host.latency + self._host.latency  # noqa: SLF001
            self._loop.after(there - self._loop.now, lambda source=source: self._comes_from(source))

    def _comes_from(self, source: RelayWorker) -> None:
        if self._source is source and self._is_reachable and source._is_reachable:
            self._arrived()
            self._ask()

    def _arrived(self) -> None:
        self.at += 1
        if self.at == len(self._sizes):
            self._wake()
        for child in list(self._children):
            child._ask()  # noqa: SLF001

    def _wake(self) -> None:
        for answer in list(self._looking):
            answer()

    # ---- as other workers

    def cancel(self, streams: Sequence[int], *, begun: bool) -> None:
        pass

    def end(self, why: str, running: str = "died") -> None:
        if not self.has_ended:
            self.stop()
            self._agent.reply(0, messages.Exited(worker=self._name, generation=self._generation))

    def stop(self) -> None:
        """Its process ends: hosts that take chunks from here see that the connection is broken."""
        self.has_ended = True
        self._leave()
        for child in list(self._children):
            if self._host.is_reachable:
                child._problem = BROKEN  # noqa: SLF001
                child._wake()  # noqa: SLF001
