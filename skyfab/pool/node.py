"""A node: one host of a pool, and what it has been told so far.

It sends a function, a tree or a blob when the host lacks it, and starts a process in a seat before the first
call there. Nothing here waits except `sync_project`.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from skyfab.calls.pack import PackedFunction
from skyfab.calls.project import Tree
from skyfab.errors import CallCancelled, HostError, HostLost, HostUnfit, SkyfabError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.workdir import Workdir
from skyfab.protocol import codec, messages
from skyfab.protocol.blobs import LARGE, name_of
from skyfab.protocol.frames import Buffer
from skyfab.protocol.messages import AgentHello
from skyfab.session.lines import Lines
from skyfab.session.replies import Failure, Reply
from skyfab.session.session import Session

if TYPE_CHECKING:
    import fabric

_FUNCTIONS: Final = 256
"""Functions that a host remembers; the one used longest ago is forgotten first."""
_SAMPLES: Final = 4096
"""Samples of large arguments that are remembered, to see whether one comes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What the process in a seat must be; another plan means another process."""

    tree: str
    env: Mapping[str, str] = field(repr=False)
    info: Mapping[str, Any]
    port: int = 0
    """One that the host's agent holds: the process takes it over."""


class Caller(Protocol):
    """Who makes a call, and is told what becomes of it. Exactly one of `answered` and `failed` is called, once."""

    def is_wanted(self) -> bool:
        """Asked just before the call is sent, which may be long after it was made: its arguments go first."""

    def sent(self, stream: int) -> None:
        """It is on its way, under this number."""

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        """The host's answer."""

    def failed(self, error: Exception) -> None:
        """There will be no answer."""


class Owner(Protocol):
    """The pool, as its nodes see it: it is told what they hear."""

    def on_output(self, node: Node, worker: str, lines: Lines) -> None:
        """A worker wrote these lines."""

    def on_exit(self, node: Node, worker: str) -> None:
        """A worker's process ended."""

    def on_lost(self, node: Node, error: HostError) -> None:
        """The host is gone."""

    def on_disconnect(self, node: Node, reason: str) -> None:
        """The connection is suspect, and others are attempted."""

    def on_reconnect(self, node: Node, seconds: float) -> None:
        """It is open again, after so long."""

    def others_respond(self, node: Node) -> bool:
        """Some other host has responded in the last seconds."""


class Node:
    """One host of the pool: `name`, `host`, `agent` (what it said of itself), `connection`.

    It is its session's listener.
    """

    session: Session
    """The conversation with its agent; another one, when the host was lost and is there again."""

    def __init__(self, index: int, host: Host, inventory: Inventory, owner: Owner) -> None:
        self.index = index
        self.name = host.name
        self.host = host
        self.workdir = Workdir()
        """Where relative paths of its functions lead."""
        self.lost: Exception | None = None
        self._inventory = inventory
        self._owner = owner
        self._lock = threading.RLock()
        self._workers: dict[str, tuple[WorkerSpec, int]] = {}
        self._generation = 0
        self._functions: OrderedDict[str, None] = OrderedDict()
        self._trees = {""}
        self._blobs: set[str] = set()
        self._coming: dict[str, list[Callable[[Exception | None], None]]] = {}
        """Blobs on their way, with those who wait for them."""
        self._seen: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._connection: Any = None

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
            from skyfab.session.transport.fabric import Passwords, connection

            self._connection = connection(self.host, self._inventory, password=Passwords.known(self.host))
        return self._connection

    def note_lost(self, error: Exception) -> None:
        """A call has found the host gone. What is said of a session before this one does not count."""
        if self.lost is None and self.session.has_ended:
            self.lost = error

    def close(self) -> None:
        if self._connection is not None:
            from skyfab.session.transport.fabric import hang_up

            hang_up(self._connection)
        self.session.close()

    def reset(self, session: Session) -> None:
        """The host has a new agent, which has been told nothing yet."""
        with self._lock:
            coming, self._coming = self._coming, {}
            self.session = session
            self._workers.clear()
            self._functions.clear()
            self._trees = {""}
            self._blobs.clear()
            self._seen.clear()
        for listener in [listener for listeners in coming.values() for listener in listeners]:
            listener(HostLost("its agent was replaced", host=self.name))

    # ---- what its session hears

    def on_output(self, worker: str, lines: Lines) -> None:
        self._owner.on_output(self, worker, lines)

    def on_exit(self, worker: str, generation: int) -> None:
        with self._lock:
            if worker in self._workers and self._workers[worker][1] == generation:
                del self._workers[worker]
        self._owner.on_exit(self, worker)

    def on_lost(self, error: HostError) -> None:
        self._owner.on_lost(self, error)

    def on_disconnect(self, reason: str) -> None:
        self._owner.on_disconnect(self, reason)

    def on_reconnect(self, seconds: float) -> None:
        self._owner.on_reconnect(self, seconds)

    def others_respond(self) -> bool:
        return self._owner.others_respond(self)

    # ---- calls

    def call(
        self,
        worker: str,
        plan: WorkerSpec,
        function: PackedFunction,
        arguments: codec.Payload,
        *,
        timeout: float | None,
        caller: Caller,
        shared: bool = False,
        each: bool = False,
    ) -> None:
        """Runs a function in a seat, with `each` once for every item.

        With `shared`, large buffers go to the store, for other seats to use too. What the call refers to is there
        before it goes out. Raises HostLost when the host is gone.
        """
        names: dict[int, str] = {}
        content: dict[str, memoryview] = {}
        if function.payload.buffers or arguments.buffers:
            for payload, fits in ((function.payload, _is_large), (arguments, self._belongs_in_store)):
                for buffer in payload.buffers:
                    name = payload.refs.get(id(buffer))
                    if name is not None or fits(buffer, shared):
                        name = names[id(buffer)] = name or name_of(buffer)
                        content[name] = buffer

        def go() -> None:
            with self._lock:
                wanted = caller.is_wanted()
                if wanted:
                    self._worker(worker, plan)
                    self._send_function(function, names)
                    parts, inline = _parts(arguments, names)
                    head = messages.Call.head(
                        worker=worker, function=function.digest, parts=parts, timeout=timeout, each=each
                    )
                    caller.sent(
                        self.session.send(head, inline, answer=caller.answered, failure=caller.failed, worker=worker)
                    )
            if not wanted:  # told without the lock: what follows may be a call to another node
                caller.failed(CallCancelled("cancelled before it was sent", host=self.name))

        if names:
            self._store(content, go, caller.failed)
        else:
            go()

    def begin(
        self, worker: str, plan: WorkerSpec, function: PackedFunction, data: bytes, *, timeout: float | None
    ) -> Reply:
        """Starts a small call, whose answer this thread will read. Raises HostLost when the host is gone."""
        with self._lock:
            sitting = self._workers.get(worker)
            if sitting is None or sitting[0] is not plan:
                self._worker(worker, plan)
            self._send_function(function, {})
            head = messages.Call.head(worker=worker, function=function.digest, parts=(len(data),), timeout=timeout)
            return self.session.request(head, data, worker)

    def cancel(self, stream: int) -> None:
        self.session.send(messages.Cancel(stream=stream))

    def unassign(self, streams: list[int]) -> None:
        """Asks for calls back that have not begun."""
        self.session.send(messages.Unassign(streams=streams))

    def release(self, worker: str) -> None:
        """Ends the process in a seat."""
        with self._lock:
            if self._workers.pop(worker, None) is not None:
                self.session.send(messages.StopWorker(worker=worker))

    def _worker(self, worker: str, plan: WorkerSpec) -> None:
        """Starts a process for the plan, unless the seat has one."""
        sitting = self._workers.get(worker)
        if sitting is not None and (sitting[0] is plan or sitting[0] == plan):
            return
        self._generation += 1
        self.session.send(
            messages.Spawn(
                worker=worker,
                generation=self._generation,
                tree=plan.tree,
                env=dict(plan.env),
                info=dict(plan.info),
                port=plan.port,
                workdir=self.workdir.told,
                include=not self.workdir.callers,
            )
        )
        self._workers[worker] = (plan, self._generation)

    def _send_function(self, function: PackedFunction, names: Mapping[int, str]) -> None:
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
        with self._lock:
            known = sample in self._seen
            self._seen[sample] = None
            self._seen.move_to_end(sample)
            if len(self._seen) > _SAMPLES:
                self._seen.popitem(last=False)
        return known or shared

    def _store(self, content: dict[str, memoryview], then: Callable[[], None], failure: Failure) -> None:
        """Sends the blobs that the host lacks and that are not on their way already, then goes on."""
        with self._lock:
            waiting = {name for name in content if name not in self._blobs}
            new = [name for name in waiting if name not in self._coming]

            def settled(name: str, error: Exception | None) -> None:
                if error is not None and waiting:
                    waiting.clear()
                    failure(error)
                elif name in waiting:
                    waiting.discard(name)
                    if not waiting:
                        try:
                            then()
                        except SkyfabError as lost:
                            failure(lost)

            there = not waiting
            for name in waiting:
                self._coming.setdefault(name, []).append(functools.partial(settled, name))
        for name in new:
            self._send_blob(name, content[name])
        if there:
            then()

    def _send_blob(self, name: str, content: Buffer, *, keep: bool = False) -> None:
        session = self.session

        def done(error: Exception | None) -> None:
            with self._lock:
                if self.session is not session:  # `reset` has told those who waited
                    return
                if error is None:
                    self._blobs.add(name)
                listeners = self._coming.pop(name, [])
            for listener in listeners:
                listener(error)

        def answer(reply: messages.Message, _: list[memoryview]) -> None:
            failed = isinstance(reply, messages.Failed)
            done(HostUnfit(reply.text, host=self.name, hint=reply.hint) if failed else None)  # type: ignore[attr-defined]

        message = messages.Blob(name=name, parts=[len(content)], keep=keep)
        try:
            session.send(message, [content], answer=answer, failure=done)
        except SkyfabError as error:  # the host is gone: others may wait for this blob too
            done(error)

    def knows(self, tree: Tree) -> bool:
        return tree.digest in self._trees

    def sync_project(self, tree: Tree) -> bool:
        """Sends the project's files that the host lacks, and waits until they are laid out.

        False: a file has changed since the tree was read.
        """
        if tree.digest in self._trees:
            return True
        missing = self.session.ask(messages.Has(names=list(tree.sources)))
        assert isinstance(missing, messages.Missing)
        wanted = [name for name in missing.names if name in tree.sources]  # and nothing that was never offered
        left, errors = set(wanted), list[Exception]()

        def settled(name: str, error: Exception | None) -> None:
            left.discard(name)
            if error is not None:
                errors.append(error)

        for name in wanted:
            content = tree.content(name)
            if content is None:
                return False
            with self._lock:
                new = name not in self._coming
                self._coming.setdefault(name, []).append(functools.partial(settled, name))
            if new:
                self._send_blob(name, content, keep=True)
        self.session.wait(lambda: not left or bool(errors))
        if errors:
            raise errors[0]
        self.session.ask(messages.Tree(digest=tree.digest, files=[list(pair) for pair in tree.files]))
        self._trees.add(tree.digest)
        return True


def _is_large(buffer: memoryview, shared: bool) -> bool:
    return len(buffer) >= LARGE


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
