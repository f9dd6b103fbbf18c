"""A node: one host of a pool, with its session, its workers and its calls.

It starts a worker before the first call to it, and sends a function only if the host lacks it; `HostStore` does so for
content. Nothing here blocks.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from skyfab._util.html import ShownAsTable
from skyfab.calls.pack import PackedCall, PackedFunction, parts_of
from skyfab.errors import CallCancelled, HostError, HostLost, UsageError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.host_store import HostStore
from skyfab.pool.workdir import Workdir
from skyfab.protocol import messages
from skyfab.protocol.messages import AgentHello
from skyfab.session.lines import Lines
from skyfab.session.session import Session
from skyfab.ui.events import Events, HostState, Importing, Output

if TYPE_CHECKING:
    import fabric
    import torch

TABLE: Final = ("host", "login", "Python", "platform", "GPUs", "state")
"""The head of the table that shows nodes."""
_FUNCTIONS: Final = 256
"""Functions that a host caches; the least recently used is dropped first."""


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
    """Whether the files that it has written are reported to the user."""
    plain: bool = False
    """Whether it encodes results as plain data."""
    threads: int = 1
    """How many calls it runs at a time."""
    claims: bool = True
    """Whether it works in the project's folder, and not only looks at files."""


class Caller(Protocol):
    """Callbacks of the code that makes a call. Exactly one of `answered` and `failed` is called, exactly once."""

    def is_wanted(self) -> bool:
        """Checked just before the call is sent, which may be long after it was made: blobs are uploaded first."""
        return True

    def sent(self, stream: int) -> None:
        """The call was sent, on this stream."""
        return

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        """The host's reply."""

    def failed(self, error: Exception) -> None:
        """There will be no reply."""


class Owner:
    """The owner of nodes: has the subscribers of their events, and is notified if one is lost. A pool extends it."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.nodes: Sequence[Node] = ()

    def on_lost(self, node: Node, error: HostError) -> None:
        node.lost = error


class Node(ShownAsTable):
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
        """The working folder of its functions."""
        self.owner = ""
        """Who works there: the pool, or a run that it has launched."""
        self.lost: Exception | None = None
        self.is_left = False
        """It ends what runs there by itself: closing was interrupted."""
        self._inventory = inventory
        self._owner = owner
        self._lock = threading.RLock()
        self._workers: dict[str, tuple[WorkerSpec, int]] = {}
        self._generation = 0
        self._functions: OrderedDict[str, None] = OrderedDict()
        self.store = HostStore(host.name)
        """What the host has been sent: large arguments and the project's files."""
        self._connection: Any = None
        self.members: Mapping[str, Any] = {}
        """The workers that belong to a gang, or did until just now, and the members (broadcast.py) that they are."""
        self.on_found: Callable[[Node, str, int, Sequence[Any]], None] = lambda *_: None
        """Called with the worker and its generation when streams or actors are sent to it, in a call's arguments."""
        self.on_exited: Callable[[str], None] = lambda worker: None
        """Called with a worker that has exited."""
        self.on_imports: Callable[[], None] = lambda: None
        """Called when a worker begins or ends to import a package."""
        self.open_device: weakref.WeakMethod[Callable[..., torch.device]] | None = None
        """The pool's own method, once it is open."""

    @property
    def agent(self) -> AgentHello:
        """What the agent reported about itself and the host when the session was opened."""
        agent = self.session.connection.agent
        assert agent is not None, "the pool is not open"
        return agent

    @property
    def state(self) -> str:
        """ "ready", "lost" or "closed"."""
        return "lost" if self.lost is not None else "closed" if self.session.has_ended else "ready"

    def __repr__(self) -> str:
        return f"<Host {self.name}: {self.state}>"

    @property
    def row(self) -> Sequence[object]:
        """The cells of `TABLE` for it."""
        agent = self.session.agent
        known = ("–", "–", "–") if agent is None else (agent.python, agent.platform, len(self.gpus))
        return (self.name, self.host.login, *known, self.state)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        return TABLE, [self.row]

    @property
    def gpus(self) -> tuple[int, ...]:
        """Their numbers."""
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
            self.lost = copy.copy(error)

    def close(self) -> None:
        if self._connection is not None:
            from skyfab.ssh.fabric import hang_up

            hang_up(self._connection)
        self.session.close()

    def reset(self, session: Session) -> None:
        """Switches to a session with an agent that has nothing yet; also before the first one is opened."""
        with self._lock:
            self.session = session
            self._workers.clear()
            self._functions.clear()
            waiting = self.store.reset(session)
        for failed in waiting:
            failed(HostLost("its agent was replaced", host=self.name))

    # ---- events of its session

    def on_output(self, worker: str, lines: Lines) -> None:
        events = self._owner.events
        if events.active:
            rank = self._rank_of(worker)
            for text, end in lines:
                events.emit(Output(host=self.name, rank=rank, stream=lines.stream, text=text, end=end))

    def on_import(self, worker: str, module: str) -> None:
        if worker in self._workers:
            self.on_imports()
            rank = self._rank_of(worker)
            self._owner.events.emit(Importing(host=self.name, rank=rank, worker=worker, module=module))

    def _rank_of(self, worker: str) -> int | None:
        member = self.members.get(worker)
        return None if member is None else member.shown_rank

    def on_exit(self, worker: str, generation: int) -> None:
        with self._lock:
            current = self._workers.get(worker, (None, generation))[1] == generation
            if current:
                self._workers.pop(worker, None)
        if current:  # else another process has its place already
            self.on_exited(worker)
        if (member := self.members.get(worker)) is not None:
            member.exited()

    def on_lost(self, error: HostError) -> None:
        self._owner.on_lost(self, error)

    def on_disconnect(self, reason: str) -> None:
        others = [other for other in self._owner.nodes if other is not self and other.lost is None]
        others_respond = self.others_respond()
        if others and not others_respond:
            reason += "; no host responds: is your network up?"
        timing = self.session.connection.timing
        limit = min(timing.heartbeat_timeout, timing.lease) if others_respond else timing.lease
        self._owner.events.emit(HostState(host=self.name, state="reconnecting", detail=reason, limit=limit))

    def on_reconnect(self, seconds: float) -> None:
        self._owner.events.emit(HostState(host=self.name, state="ready", detail=f"back after {seconds:.1f} s"))

    def others_respond(self) -> bool:
        return any(other.session.responds for other in self._owner.nodes if other is not self)

    # ---- calls

    def call(
        self,
        worker: str,
        spec: WorkerSpec,
        call: PackedCall,
        *,
        caller: Caller,
        store: Literal["repeated", "all", "none"] = "repeated",
        each: bool = False,
        begin: Callable[[Node, str, int], object] | None = None,
    ) -> int:
        """Runs a function in a worker; with `each`, once for every item. `begin` is called when it was sent, and where.

        Large buffers of the arguments are put in the host's store if they are repeated or, for other workers to use
        them too, if `store` is "all". The call is sent once the blobs that it refers to are there; with "none", at
        once: such calls begin in their order. Returns the generation of the worker's process, 0 if the call is not sent
        yet. Raises HostLost.
        """
        function, arguments = call.function, call.arguments
        names: dict[int, str] = {}
        if store != "none" and (function.payload.buffers or arguments.buffers):
            names, content = self.store.large(call, shared=store == "all")

        def go() -> int:
            with self._lock:
                wanted = caller.is_wanted()
                if wanted:
                    generation = self._worker(worker, spec)
                    self._send_function(function, names)
                    parts, inline = parts_of(arguments, names)
                    head = _head(worker, call, parts, each=each)
                    stream = self.session.send(head, inline, answer=answered, failure=caller.failed, worker=worker)
                    if begin is not None:
                        begin(self, worker, stream)
                    caller.sent(stream)
                    if call.found:
                        self.on_found(self, worker, generation, call.found)
                    return generation
            # Without the lock: the callback may make a call to another node.
            caller.failed(CallCancelled("cancelled before it was sent", host=self.name))
            return 0

        def answered(message: messages.Message, buffers: list[memoryview]) -> None:
            if isinstance(message, messages.Ended) and message.why == "unstored":
                self.store.forget(names.values())
            caller.answered(message, buffers)

        if not names:
            return go()
        self.store.add(content, go, caller.failed)
        return 0

    def has_worker(self, worker: str, generation: int) -> bool:
        """Whether a worker still is the process of that generation, as known to this program."""
        return self._workers.get(worker, (None, 0))[1] == generation

    def cancel(self, *streams: int, begun: bool = True) -> None:
        """Asks the host to stop calls; without `begun`, to return those of them that have not begun."""
        self.session.send(messages.Cancel(streams=list(streams), begun=begun))

    def release(self, worker: str) -> bool:
        """Terminates a worker. Returns False if it has no process."""
        with self._lock:
            runs = self._workers.pop(worker, None) is not None
            if runs:
                self.session.send(messages.StopWorker(worker=worker))
        return runs

    def _worker(self, worker: str, spec: WorkerSpec) -> int:
        """Starts a process for the spec, unless the worker has one already. Returns its generation."""
        current = self._workers.get(worker)
        if current is not None and (current[0] is spec or current[0] == spec):
            return current[1]
        self._generation += 1
        self.session.send(
            messages.Spawn(
                worker=worker,
                generation=self._generation,
                tree=spec.tree,
                env=dict(spec.env),
                info=dict(spec.info),
                port=spec.port,
                workdir=self.workdir.sent,
                owner=self.owner if spec.claims else "",
                include=not self.workdir.callers,
                pipelined=spec.pipelined,
                reported=spec.reported,
                plain=spec.plain,
                threads=spec.threads,
            )
        )
        self._workers[worker] = (spec, self._generation)
        return self._generation

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


def _head(worker: str, call: PackedCall, parts: tuple[messages.Part, ...], *, each: bool) -> bytes:
    return messages.Call.head(
        worker=worker,
        function=call.function.digest,
        parts=parts,
        timeout=call.timeout,
        each=each,
        streams=call.converses,
        ask=call.batch,
        same_gpus=call.same_gpus,
    )
