"""Simulated hosts: a login shell that answers the first command, and an agent that answers messages with real frames.

The agent is a model: the real one needs processes, pipes and signals. It uses the real `Mux`, `Lease`, messages and
codec, and runs the functions that it is sent, for which the seed says how long they take. Its workers print nothing.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from simulation import functions
from simulation.network import Link, Network, Wire
from simulation.relay import RelayWorker
from skyfab.errors import Unreachable
from skyfab.host.agent.functions import load_function
from skyfab.host.agent.lease import Lease
from skyfab.host.agent.outcomes import describe
from skyfab.inventory.host import Host
from skyfab.protocol import NO_AGENT, VERSION, codec, messages
from skyfab.protocol.batches import as_group, of_group
from skyfab.protocol.blobs import Assembly, names_blobs, split
from skyfab.protocol.frames import CHUNK
from skyfab.protocol.mux import SMALL, Mux
from skyfab.session.bootstrap import local_python
from skyfab.ssh.base import ended

CONNECT_TIMEOUT: Final = 10.0
"""Seconds after which the ssh program gives up on a host that does not answer."""
_START: Final = 0.15
"""Seconds that an agent takes to start."""
_FORK: Final = 0.02
"""Seconds until a new worker can run a call."""

Loss = Literal["killed", "off", "silent", "rebooted"]
"""killed: its agent ends, and the host can be reached. off: it never answers again. silent: it does not answer for some
seconds, and then as if nothing had been. rebooted: it does not answer for some seconds, and then has no agent."""


@dataclass
class Figures:
    """What all hosts have counted."""

    frames: Counter[int]
    """Received from the client, by kind."""
    replies: int = 0
    """Messages to the client."""
    agents: int = 0
    """Agents that run now."""


class SimulatedHost:
    """One host: its link, its login shell and its agents."""

    def __init__(self, network: Network, host: Host, figures: Figures, bandwidth: float) -> None:
        self.network = network
        self.loop = network.loop
        self.host = host
        self.figures = figures
        chance = self.loop.random
        self.latency = chance.uniform(0.0002, 0.02)
        """Seconds in one direction."""
        self.login = 8 * self.latency + chance.uniform(0.1, 0.4)
        """Seconds from the connection to the first command."""
        self.pace = chance.uniform(0.8, 1.25)
        """How many times slower than others it computes."""
        self.up, self.down = Link(bandwidth), Link(bandwidth)
        self.is_reachable = True
        self.has_bundle = True
        self.blobs: set[str] = set()
        self.trees: set[str] = set()
        self.agents: dict[str, Agent] = {}
        self.wires: set[Wire] = set()

    # ---- what happens to it

    def lose(self, how: Loss, seconds: float = 8.0) -> None:
        if how == "killed":
            for agent in list(self.agents.values()):
                agent.die()
            for wire in self.wires:
                wire.end(ended(self.host, 1, ""))
            self.wires.clear()
            return
        self.is_reachable = False
        for wire in self.wires:
            wire.is_cut = True
        self.wires.clear()
        for agent in list(self.agents.values()):
            agent.wire = None
            if how == "silent":
                agent.disconnected()
            else:
                agent.die()
        if how != "off":
            self.loop.after(seconds, self._return)

    def _return(self) -> None:
        self.is_reachable = True

    # ---- its login shell

    def connect(self, command: str) -> Wire:
        """This machine's end of a connection that runs `command` once the login is complete."""
        wire = Wire(self.network, self)
        self.network.logins += 1
        self.loop.after(self.login if self.is_reachable else CONNECT_TIMEOUT, lambda: self._logged_in(wire, command))
        return wire

    def _logged_in(self, wire: Wire, command: str) -> None:
        if wire.is_closed:
            return
        if not self.is_reachable:
            left = CONNECT_TIMEOUT - self.login
            self.loop.after(max(0.0, left), lambda: wire.end(Unreachable("connection timed out", host=self.host.name)))
            return
        self.wires.add(wire)
        wire.on_close = lambda: self.wires.discard(wire)
        *_, session, mode = re.findall("'([^']*)'", command)
        if self.has_bundle:
            self._start(wire, session, mode)
            return
        self.say(wire, session, "bundle")
        wire.on_data = _Bundle(lambda: self._unpacked(wire, session, mode)).arrived

    def _unpacked(self, wire: Wire, session: str, mode: str) -> None:
        self.has_bundle = True
        self._start(wire, session, mode)

    def say(self, wire: Wire, session: str, word: str) -> None:
        wire.reply([f"=skyfab={session}={word}\n".encode()])

    def _start(self, wire: Wire, session: str, mode: str) -> None:
        self.say(wire, session, "link")
        agent = self.agents.get(session)
        if mode == "resume" and agent is None:
            wire.end(ended(self.host, NO_AGENT, "skyfab: the pool's agent no longer runs on this host"))
            return
        if agent is not None:
            agent.take(wire)
            return
        agent = self.agents[session] = Agent(self, session)
        early: list[bytes] = []
        wire.on_data = early.append

        def begin() -> None:
            if self.agents.get(session) is agent and wire in self.wires:
                agent.take(wire)
                for data in early:
                    agent.receive(data)

        self.loop.after(_START * self.pace, begin)


class _Bundle:
    """Receives a program and an archive, each after a line with its size."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._data = bytearray()

    def arrived(self, data: bytes) -> None:
        self._data += data
        at = 0
        for _ in range(2):
            end = self._data.find(b"\n", at)
            if end < 0:
                return
            at = end + 1 + int(self._data[at:end])
        if len(self._data) >= at:
            self._data = bytearray()
            self._done()


class _CountingMux(Mux):
    def __init__(self, agent: Agent, figures: Figures) -> None:
        super().__init__(agent, clock=agent.loop.clock)
        self._figures = figures

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        self._figures.frames[kind] += 1
        super().arrived(kind, stream, payload, head)


class Agent:
    """The agent of one session."""

    def __init__(self, host: SimulatedHost, session: str) -> None:
        self.host = host
        self.loop = host.loop
        self.session = session
        self.wire: Wire | None = None
        self.mux = _CountingMux(self, host.figures)
        self.workers: dict[str, Worker | RelayWorker] = {}
        self.functions: dict[str, list[memoryview]] = {}
        self.blobs: set[str] = set()
        self.is_dead = False
        self._arrived: deque[memoryview] = deque()
        self._coming: dict[int, tuple[messages.Message, Assembly]] = {}
        self._lease = Lease(self.loop.clock)
        self._ports = 20000
        host.figures.agents += 1
        self.loop.after(self._lease.seconds, self._look_at_lease)

    # ---- its connection

    def take(self, wire: Wire) -> None:
        self.wire = wire
        wire.on_data = self.receive
        wire.on_close = lambda: self._closed(wire)
        self.mux.attach(self._hello().encode())
        self.flush()

    def _hello(self) -> messages.AgentHello:
        name, address = self.host.host.name, str(self.host.host.address)
        return messages.AgentHello(
            protocol=VERSION,
            received=self.mux.received,
            python=local_python(),
            hostname=name,
            address=address,
            addresses=[["eth0", f"{address}/8"]],
            network=name,
            gpus=0,
            platform="linux-x86_64",
            pid=1,
            executable="/usr/bin/python3",
        )

    def receive(self, data: bytes) -> None:
        if self.is_dead:
            return
        self._arrived.append(memoryview(data))
        while self._arrived and not self.is_dead:
            self.mux.read(self._recv_into)
        self.flush()

    def _recv_into(self, view: memoryview) -> int:
        first = self._arrived[0]
        count = min(len(view), len(first))
        view[:count] = first[:count]
        if count == len(first):
            self._arrived.popleft()
        else:
            self._arrived[0] = first[count:]
        return count

    def flush(self) -> None:
        if self.wire is not None and not self.is_dead:
            self.mux.flush(self.wire.reply)

    def _closed(self, wire: Wire) -> None:
        self.host.wires.discard(wire)
        if self.wire is wire:
            self.wire = None
            self.disconnected()

    def disconnected(self) -> None:
        self._arrived.clear()
        self._lease.disconnected()
        self.loop.after(self._lease.seconds, self._look_at_lease)

    def _look_at_lease(self) -> None:
        if self.is_dead:
            return
        until = self._lease.until(self.mux.last_received if self.wire is not None else None)
        if self.loop.now >= until:
            self._end()
        elif self.wire is not None:
            self.loop.after(until - self.loop.now, self._look_at_lease)

    def die(self) -> None:
        """Its process ends, and with it all workers."""
        if not self.is_dead:
            self.is_dead = True
            self.host.figures.agents -= 1
            self.host.agents.pop(self.session, None)
            for worker in self.workers.values():
                worker.stop()
            self.workers.clear()

    def _end(self) -> None:
        wire = self.wire
        if wire is not None:
            self.mux.bye("done")
            self.flush()
            wire.end(ended(self.host.host, 0, ""))
        self.die()

    # ---- callbacks of the mux

    def hello(self, payload: bytes) -> None:
        hello = messages.expect(messages.ClientHello, payload)
        self._lease.agree(hello.lease)
        self.mux.resume(hello.received)

    def bye(self, reason: str) -> None:
        self.loop.after(_FORK, self._end)

    def opened(self, stream: int, head: bytes, data: memoryview | None) -> None:
        message = messages.decode(head)
        parts = getattr(message, "parts", ())
        if isinstance(message, messages.Call) and (worker := self.workers.get(message.worker)) is not None:
            worker.expect(stream)
        if data is not None and not names_blobs(parts):
            self._do(stream, message, split(parts, data))
            return
        assembly = Assembly(parts, resolve=functions.BLOBS.__getitem__)
        if data is not None:
            assembly.fill(data)
        self._coming[stream] = message, assembly
        self._look_whether_whole(stream)

    def place(self, stream: int, length: int) -> memoryview:
        return self._coming[stream][1].place(length)

    def data(self, stream: int, view: memoryview) -> None:
        self.mux.used(stream, len(view))
        self._coming[stream][1].advance(len(view))
        self._look_whether_whole(stream)

    def _look_whether_whole(self, stream: int) -> None:
        message, assembly = self._coming[stream]
        if not assembly.missing:
            del self._coming[stream]
            self.mux.finish(stream)
            self._do(stream, message, assembly.buffers())

    def reply(self, stream: int, message: messages.Message | bytes, payload: codec.Payload | None = None) -> None:
        """Sends a message, as a worker and the agent do: in one frame if it is small."""
        self.host.figures.replies += 1
        head = message if isinstance(message, bytes) else message.encode()
        pieces = () if payload is None else (payload.data, *payload.buffers)
        small = sum(map(len, pieces)) <= SMALL
        self.mux.send(stream, head, pieces if small else ())
        for piece in () if small else map(memoryview, pieces):
            for at in range(0, len(piece), CHUNK):
                self.mux.send_data(stream, piece[at : at + CHUNK])
        if not small:
            self.mux.finish(stream)

    # ---- messages

    def _do(self, stream: int, message: messages.Message, buffers: list[memoryview]) -> None:
        match message:
            case messages.Spawn():
                self._stop(message.worker)
                kind = RelayWorker if message.pipelined else Worker
                self.workers[message.worker] = kind(self, message)
            case messages.Function():
                self.functions[message.digest] = buffers
            case messages.Call():
                worker = self.workers.get(message.worker)
                if worker is None:
                    self.reply(stream, messages.Ended(why="unstarted"))
                else:
                    worker.give(stream, message, buffers)
            case messages.Cancel():
                for worker in list(self.workers.values()):
                    worker.cancel(message.streams, begun=message.begun)
            case messages.StopWorker():
                self._stop(message.worker)
            case messages.Has():
                known = self.host.blobs | self.blobs
                self.reply(stream, messages.Missing(names=[name for name in message.names if name not in known]))
            case messages.Blob():
                functions.BLOBS.setdefault(message.name, buffers[0])  # all hosts of the simulation share one copy
                (self.host.blobs if message.keep else self.blobs).add(message.name)
                self.reply(stream, messages.Done())
            case messages.Tree():
                self.host.trees.add(message.digest)
                self.reply(stream, messages.Done())
            case messages.Listen():
                self.reply(stream, messages.Done(text=str(self.new_port())))
            case messages.ProbePeers():
                found = [["", str(self.host.host.address)] for _ in message.peers]
                self.reply(stream, messages.PeersProbed(found=found))
            case messages.Written():
                self.reply(stream, messages.Done(text="[]"))
            case messages.Forget():
                for digest in message.digests:
                    self.functions.pop(digest, None)
            case messages.Unlisten():
                pass
            case _:
                raise AssertionError(f"simulated hosts do not know {message.op}")

    def new_port(self) -> int:
        self._ports += 1
        return self._ports

    def _stop(self, name: str) -> None:
        if (worker := self.workers.pop(name, None)) is not None:
            worker.end("unstarted")


class Worker:
    """A worker process: runs one call after another."""

    def __init__(self, agent: Agent, spawn: messages.Spawn) -> None:
        self._agent = agent
        self._loop = agent.loop
        self.name = spawn.worker
        self._generation = spawn.generation
        self._info = spawn.info
        self._ready_at = self._loop.now + _FORK
        self._calls: deque[tuple[int, messages.Call, list[memoryview]]] = deque()
        self._has_ended = False

    def expect(self, stream: int) -> None:
        """A call begins to arrive."""

    def give(self, stream: int, call: messages.Call, buffers: list[memoryview]) -> None:
        self._calls.append((stream, call, buffers))
        if len(self._calls) == 1:
            self._begin()

    def _begin(self) -> None:
        stream, call, buffers = self._calls[0]
        count = len(of_group(buffers)) if call.each else 1
        seconds = functions.duration(self._loop.random) * self._agent.host.pace * count
        wait = max(self._ready_at, self._loop.now) - self._loop.now
        self._loop.after(wait + seconds, lambda: self._done(stream, call, buffers, seconds))

    def _done(self, stream: int, call: messages.Call, buffers: list[memoryview], seconds: float) -> None:
        if self._has_ended or self._agent.is_dead or not self._calls or self._calls[0][0] != stream:
            return
        self._calls.popleft()
        try:
            payload = self._result(call, buffers, seconds)
        except Exception as error:
            message, raised = describe(error, codec, item=None, plain=False)
            self._agent.reply(stream, message, raised)
        else:
            sizes = tuple(map(len, (payload.data, *payload.buffers)))
            self._agent.reply(stream, messages.Result.head(parts=sizes, plain=False), payload)
        self._agent.flush()
        if self._calls:
            self._begin()

    def _result(self, call: messages.Call, buffers: list[memoryview], seconds: float) -> codec.Payload:
        function, plugins = _loaded(call.function, self._agent.functions[call.function])
        functions.enter(self._agent.host.host.name, self._info)
        if call.each:
            results = [function(*codec.loads(data, more)) for data, *more in of_group(buffers)]
            return as_group([*map(codec.dumps, (seconds, *results))])
        *args, kwargs = codec.loads(buffers[0], buffers[1:])
        value = function(*args, **(kwargs or {}))
        is_elastic = any(plugin.elastic for plugin in plugins) and "rank" in self._info
        return codec.dumps([(self._info["rank"], value)] if is_elastic else value)

    def cancel(self, streams: Sequence[int], *, begun: bool) -> None:
        for call in list(self._calls):
            if call[0] not in streams:
                continue
            if call is not self._calls[0]:
                self._calls.remove(call)
                self._agent.reply(call[0], messages.Ended(why="cancelled" if begun else "unassigned"))
            elif begun:
                if self._agent.workers.get(self.name) is self:
                    del self._agent.workers[self.name]
                self.end("unstarted", running="cancelled")

    def stop(self) -> None:
        self._has_ended = True

    def end(self, why: str, running: str = "died") -> None:
        """Its process ends: replies to the call that runs, and returns the others."""
        self._has_ended = True
        self._agent.reply(0, messages.Exited(worker=self.name, generation=self._generation))
        for number, (stream, _, _) in enumerate(self._calls):
            self._agent.reply(stream, messages.Ended(why=why if number else running, exitcode=-15))
        self._calls.clear()


_FUNCTIONS: Final[dict[str, Any]] = {}


def _loaded(digest: str, pickled: list[memoryview]) -> Any:
    """The function and the plugins of its pickle, which is read once for all hosts."""
    if digest not in _FUNCTIONS:
        load = codec.loader(pickled[0], pickled[1:])
        plugins = load()
        _FUNCTIONS[digest] = load_function(load, ()), plugins
    return _FUNCTIONS[digest]


class SimulatedTransport:
    """A `Transport` of `skyfab.ssh.base` to a simulated host."""

    def __init__(self, host: SimulatedHost) -> None:
        self._host = host
        self.servers = (f"{host.host.address} 22",)

    def open(self, command: str, stopped: Callable[[], bool] = lambda: False) -> Wire:
        return self._host.connect(command)

    def joined(self) -> None:
        pass

    def close(self) -> None:
        pass
