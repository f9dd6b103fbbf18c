"""A node: one host of a pool, and what it has been told so far.

It sends a function, a tree or a blob when the host lacks it, and starts a process in a seat before the first
call there. Nothing here waits except `learn_tree`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skyfab.errors import HostUnfit
from skyfab.inventory import Host, Inventory
from skyfab.parcel import FunctionParcel
from skyfab.project import Tree
from skyfab.protocol import codec, messages
from skyfab.protocol.blobs import LARGE, name_of
from skyfab.protocol.messages import AgentHello
from skyfab.session import Answer, Failure, Session

if TYPE_CHECKING:
    import fabric

_FUNCTIONS: Final = 256
"""Functions that a host remembers; the one used longest ago is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatPlan:
    """What the process in a seat must be; another plan means another process."""

    tree: str
    env: Mapping[str, str]
    info: Mapping[str, Any]


class Node:
    """One host of the pool: `name`, `host`, `agent` (what it said of itself), `connection`."""

    def __init__(self, index: int, host: Host, inventory: Inventory, session: Session) -> None:
        self.index = index
        self.host = host
        self.session = session
        self.lost: Exception | None = None
        self._inventory = inventory
        self._lock = threading.RLock()
        self._seats: dict[str, SeatPlan] = {}
        self._functions: OrderedDict[str, None] = OrderedDict()
        self._trees = {""}
        self._blobs: set[str] = set()
        self._seen: set[tuple[int, bytes]] = set()
        self._connection: Any = None

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def agent(self) -> AgentHello:
        """What the host said of itself."""
        assert self.session.agent is not None, "the pool is not open"
        return self.session.agent

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(range(self.agent.gpus)) if self.host.gpus == "auto" else self.host.gpus

    @property
    def connection(self) -> fabric.Connection:
        """A `fabric.Connection` to the host, for everything else: ``run``, ``put``, ``forward_local``."""
        if self._connection is None:
            from skyfab.transport.fabric import connection

            self._connection = connection(self.host, self._inventory)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self.session.close()

    # ---- calls

    def call(
        self,
        seat: str,
        plan: SeatPlan,
        function: FunctionParcel,
        arguments: codec.Payload,
        *,
        timeout: float | None,
        answer: Answer,
        failure: Failure,
        sent: Callable[[int], None] = lambda stream: None,
        shared: bool = False,
        each: bool = False,
    ) -> None:
        """Runs a function in a seat, with `each` once for every item.

        With `shared`, large buffers go to the store, for other seats to use too.

        `sent` is told the stream's number. Raises HostLost when the host is gone.
        """
        stored = [buffer for buffer in function.payload.buffers if len(buffer) >= LARGE]
        stored += [buffer for buffer in arguments.buffers if self._belongs_in_store(buffer, shared)]
        names = {id(buffer): name_of(buffer) for buffer in stored}

        def go() -> None:
            with self._lock:
                if self._seats.get(seat) is not plan:
                    self._seat(seat, plan)
                self._teach(function, names)
                parts, inline = _parts(arguments, names)
                head = messages.Call.head(seat=seat, function=function.digest, parts=parts, timeout=timeout, each=each)
                sent(self.session.send(head, inline, answer=answer, failure=failure, seat=seat))

        if names:
            self._store({names[id(buffer)]: buffer for buffer in stored}, go, failure)
        else:
            go()

    def cancel(self, stream: int) -> None:
        self.session.send(messages.Cancel(stream=stream))

    def recall(self, streams: list[int]) -> None:
        """Asks for calls back that have not begun."""
        self.session.send(messages.Recall(streams=streams))

    def release(self, seat: str) -> None:
        """Ends the process in a seat."""
        with self._lock:
            if self._seats.pop(seat, None) is not None:
                self.session.send(messages.Release(seat=seat))

    def vacated(self, seat: str) -> None:
        """The process in a seat ended by itself."""
        with self._lock:
            self._seats.pop(seat, None)

    def _seat(self, seat: str, plan: SeatPlan) -> None:
        if self._seats.get(seat) != plan:
            self._seats[seat] = plan
            self.session.send(messages.Spawn(seat=seat, tree=plan.tree, env=dict(plan.env), info=dict(plan.info)))

    def _teach(self, function: FunctionParcel, names: Mapping[int, str]) -> None:
        if function.digest in self._functions:
            self._functions.move_to_end(function.digest)
            return
        parts, inline = _parts(function.payload, names)
        self.session.send(messages.Function(digest=function.digest, parts=parts), inline, urgent=True)
        self._functions[function.digest] = None
        if len(self._functions) > _FUNCTIONS:
            oldest, _ = self._functions.popitem(last=False)
            self.session.send(messages.Forget(digests=[oldest]))

    # ---- content

    def _belongs_in_store(self, buffer: memoryview, shared: bool) -> bool:
        """What is shared or comes a second time is stored; the rest goes straight to the one who asked for it.

        A sample tells whether it may have come before; its full name decides.
        """
        if len(buffer) < LARGE:
            return False
        step = len(buffer) // 64
        sample = (len(buffer), b"".join(bytes(buffer[at : at + 16]) for at in range(0, len(buffer), step)))
        known = sample in self._seen
        self._seen.add(sample)
        return known or shared

    def _store(self, content: dict[str, memoryview], then: Callable[[], None], failure: Failure) -> None:
        """Sends the blobs that the host lacks, then goes on."""
        with self._lock:
            missing = {name: buffer for name, buffer in content.items() if name not in self._blobs}
            waiting = set(missing)

        def stored(name: str, reply: messages.Message) -> None:
            if isinstance(reply, messages.Failed):
                waiting.clear()
                failure(HostUnfit(reply.text, host=self.name, hint=reply.hint))
            elif name in waiting:
                waiting.discard(name)
                self._blobs.add(name)
                if not waiting:
                    then()

        for name, buffer in missing.items():
            self.session.send(
                messages.Blob(name=name, parts=[len(buffer)]),
                [buffer],
                answer=lambda reply, _, name=name: stored(name, reply),  # type: ignore[misc]
                failure=failure,
            )
        if not missing:
            then()

    def knows(self, tree: Tree) -> bool:
        return tree.digest in self._trees

    def learn_tree(self, tree: Tree) -> None:
        """Sends the project's files that the host lacks, and waits until they are laid out."""
        if tree.digest in self._trees:
            return
        missing = self.session.ask(messages.Has(names=list(tree.sources)))
        assert isinstance(missing, messages.Missing)
        for name in missing.names:
            if name in tree.sources:  # else the host asks for what was never offered
                self._send_file(name, tree.sources[name])
        files = [list(pair) for pair in tree.files]
        self.session.ask(messages.Tree(digest=tree.digest, files=files))
        self._trees.add(tree.digest)

    def _send_file(self, name: str, path: Path) -> None:
        content = path.read_bytes()
        self.session.ask(messages.Blob(name=name, parts=[len(content)], keep=True), [content])


def _parts(payload: codec.Payload, names: Mapping[int, str]) -> tuple[tuple[messages.Part, ...], Sequence[Any]]:
    """How a payload travels: the pieces that are stored by name, the others inline."""
    if not names:
        return (len(payload.data), *map(len, payload.buffers)), (payload.data, *payload.buffers)
    parts: list[messages.Part] = [len(payload.data)]
    inline: list[Any] = [payload.data]
    for buffer in payload.buffers:
        name = names.get(id(buffer))
        if name is None:
            parts.append(len(buffer))
            inline.append(buffer)
        else:
            parts.append((name, len(buffer)))
    return tuple(parts), inline
