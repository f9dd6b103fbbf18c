"""A node: one host of a pool, with its session and a record of what the host already has.

It sends a function, a project tree or a blob only if the host lacks it, and starts a worker before the first call to
it. Nothing here blocks except `sync_project`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from skyfab.calls.pack import PackedFunction, parts_of
from skyfab.calls.project import Tree
from skyfab.errors import CallCancelled, HostError, HostLost, HostUnfit, SkyfabError, UsageError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.reprs import ShownHost
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
    import torch

_FUNCTIONS: Final = 256
"""Functions that a host caches; the least recently used is dropped first."""
_SAMPLES: Final = 4096
"""Samples of large arguments that are kept, to detect repeated ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker process must be. A call with a different spec needs a new process."""

    tree: str
    env: Mapping[str, str] = field(repr=False)
    info: Mapping[str, Any]
    port: int = 0
    """A listening port that the host's agent holds, and passes on to the process."""
    pipelined: bool = False
    """Calls are passed on to the process before those before them have replies."""
    reported: bool = True
    """Whether the user is told which files it has written."""


class Caller(Protocol):
    """Callbacks of the code that makes a call. Exactly one of `answered` and `failed` is called, exactly once."""

    def is_wanted(self) -> bool:
        """Checked just before the call is sent, which may be long after it was made: blobs are uploaded first."""

    def sent(self, stream: int) -> None:
        """The call was sent, on this stream."""

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        """The host's reply."""

    def failed(self, error: Exception) -> None:
        """There will be no reply."""


class Owner(Protocol):
    """The pool, as its nodes see it: it receives their events."""

    def on_output(self, node: Node, worker: str, lines: Lines) -> None:
        """A worker wrote these lines."""

    def on_import(self, node: Node, worker: str, module: str) -> None:
        """A worker imports this package; none if it is empty."""

    def on_exit(self, node: Node, worker: str) -> None:
        """A worker's process exited."""

    def on_lost(self, node: Node, error: HostError) -> None:
        """The host is lost."""

    def on_disconnect(self, node: Node, reason: str) -> None:
        """The connection is suspect, and new ones are attempted."""

    def on_reconnect(self, node: Node, seconds: float) -> None:
        """The session has resumed after so many seconds."""

    def others_respond(self, node: Node) -> bool:
        """Another host has responded recently."""


class Node(ShownHost):
    """One host of the pool: `name`, `host`, `agent` (what the agent reported), `connection`.

    It is the listener of its own session.
    """

    session: Session
    """The session with its agent. Replaced when a lost host has recovered."""

    def __init__(self, index: int, host: Host, inventory: Inventory, owner: Owner) -> None:
        self.index = index
        self.name = host.name
        self.host = host
        self.workdir = Workdir()
        """The working directory of its functions."""
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
        """Blobs that are being sent, with the callbacks that wait for them."""
        self._seen: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._connection: Any = None
        self.open_device: weakref.WeakMethod[Callable[..., torch.device]] | None = None
        """The pool's own method, once it is open."""

    @property
    def agent(self) -> AgentHello:
        """What the agent reported about itself and the host when the session was opened."""
        assert self.session.agent is not None, "the pool is not open"
        return self.session.agent

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(range(self.agent.gpus)) if self.host.gpus == "auto" else self.host.gpus

    @property
    def connection(self) -> fabric.Connection:
        """A `fabric.Connection` to the host, for anything else: ``run``, ``put``, ``forward_local``."""
        if self._connection is None:
            from skyfab.ssh.fabric import connection

            self._connection = connection(self.host, self._inventory)
        return self._connection

    def device(self, kind: str = "auto") -> torch.device:
        """A device of this host: see `Compute.device`."""
        opened = self.open_device() if self.open_device is not None else None
        if opened is None:
            raise UsageError("the pool is not open", host=self.name)
        return opened(kind, on=self.name)

    def note_lost(self, error: Exception) -> None:
        """A call failed because the host is lost. Ignored if the error is about an earlier session."""
        if self.lost is None and self.session.has_ended:
            self.lost = error

    def close(self) -> None:
        if self._connection is not None:
            from skyfab.ssh.fabric import hang_up

            hang_up(self._connection)
        self.session.close()

    def reset(self, session: Session) -> None:
        """Switches to a session with a new agent, which has nothing yet."""
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

    # ---- events of its session

    def on_output(self, worker: str, lines: Lines) -> None:
        self._owner.on_output(self, worker, lines)

    def on_import(self, worker: str, module: str) -> None:
        with self._lock:
            known = worker in self._workers
        if known:
            self._owner.on_import(self, worker, module)

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
        """Runs a function in a worker; with `each`, once for every item.

        With `shared`, large buffers are put in the host's store, for other workers to use too. The call is sent once
        the blobs that it refers to are there. Raises HostLost.
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
                    parts, inline = parts_of(arguments, names)
                    head = messages.Call.head(
                        worker=worker, function=function.digest, parts=parts, timeout=timeout, each=each
                    )
                    caller.sent(
                        self.session.send(head, inline, answer=caller.answered, failure=caller.failed, worker=worker)
                    )
            if not wanted:  # called without the lock: the callback may make a call to another node
                caller.failed(CallCancelled("cancelled before it was sent", host=self.name))

        if names:
            self._store(content, go, caller.failed)
        else:
            go()

    def begin(
        self, worker: str, plan: WorkerSpec, function: PackedFunction, data: bytes, *, timeout: float | None
    ) -> Reply:
        """Starts a small call, whose reply this thread will read. Raises HostLost."""
        with self._lock:
            sitting = self._workers.get(worker)
            if sitting is None or sitting[0] is not plan:
                self._worker(worker, plan)
            self._send_function(function, {})
            head = messages.Call.head(worker=worker, function=function.digest, parts=(len(data),), timeout=timeout)
            return self.session.request(head, data, worker)

    def call_in_order(
        self,
        worker: str,
        plan: WorkerSpec,
        function: PackedFunction,
        arguments: codec.Payload,
        *,
        timeout: float | None,
        caller: Caller,
    ) -> int:
        """Sends a call at once: calls begin in their order. Returns the worker's generation. Raises HostLost."""
        with self._lock:
            self._worker(worker, plan)
            self._send_function(function, {})
            parts, inline = parts_of(arguments, {})  # nothing goes to the store, which would take time
            head = messages.Call(worker=worker, function=function.digest, parts=parts, timeout=timeout).encode()
            self.session.send(head, inline, answer=caller.answered, failure=caller.failed, worker=worker)
            return self._workers[worker][1]

    def has_worker(self, worker: str, generation: int) -> bool:
        """Whether a worker still is the process of that generation, as far as is known here."""
        return self._workers.get(worker, (None, 0))[1] == generation

    def cancel(self, stream: int) -> None:
        self.session.send(messages.Cancel(stream=stream))

    def unassign(self, streams: list[int]) -> None:
        """Asks the host to return calls that have not begun."""
        self.session.send(messages.Unassign(streams=streams))

    def release(self, worker: str) -> None:
        """Terminates a worker."""
        with self._lock:
            if self._workers.pop(worker, None) is not None:
                self.session.send(messages.StopWorker(worker=worker))

    def _worker(self, worker: str, plan: WorkerSpec) -> None:
        """Starts a process for the spec, unless the worker has one already."""
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
                pipelined=plan.pipelined,
                reported=plan.reported,
            )
        )
        self._workers[worker] = (plan, self._generation)

    def _send_function(self, function: PackedFunction, names: Mapping[int, str]) -> None:
        if function.digest in self._functions:
            self._functions.move_to_end(function.digest)
            return
        parts, inline = parts_of(function.payload, names)
        self.session.send(messages.Function(digest=function.digest, parts=parts), inline, urgent=True)
        self._functions[function.digest] = None
        if len(self._functions) > _FUNCTIONS:
            oldest, _ = self._functions.popitem(last=False)
            self.session.send(messages.Forget(digests=[oldest]))

    # ---- content

    def _belongs_in_store(self, buffer: memoryview, shared: bool) -> bool:
        """Buffers that are shared or repeated go to the host's store; others are sent inline, with the call.

        A sample decides whether a buffer may be a repeated one. The store then goes by the hash of the full content.
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
        """Sends the blobs that the host lacks and that are not being sent already, then calls `then`."""
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
                if self.session is not session:  # `reset` has called the listeners
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
        except SkyfabError as error:  # the host is lost: other calls may wait for this blob too
            done(error)

    def knows(self, tree: Tree) -> bool:
        return tree.digest in self._trees

    def sync_project(self, tree: Tree) -> bool:
        """Sends the project's files that the host lacks, and waits until the tree is laid out there.

        Returns False if a file has changed since the tree was read.
        """
        if tree.digest in self._trees:
            return True
        missing = self.session.ask(messages.Has(names=list(tree.sources)))
        assert isinstance(missing, messages.Missing)
        wanted = [name for name in missing.names if name in tree.sources]  # never send a file that was not offered
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
