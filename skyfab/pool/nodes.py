"""All nodes of a pool: creates, opens and closes them in parallel, and forwards their events to the pool."""

from __future__ import annotations

import atexit
import resource
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from skyfab.errors import HostError, ProtocolError, SkyfabError, UsageError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.gang import GangCache
from skyfab.pool.images import HostImages, Progress
from skyfab.pool.node import Node, Owner
from skyfab.pool.recovery import OnRecovered, Recovery
from skyfab.pool.scheduler import Scheduler
from skyfab.pool.workdir import Workdirs
from skyfab.session.bootstrap import Bootstrap
from skyfab.session.bundle import bundle
from skyfab.session.fanout import for_each_host, one_error, results_of
from skyfab.session.lines import Lines
from skyfab.session.reader import SharedReader
from skyfab.session.session import Session
from skyfab.session.timing import Timing
from skyfab.ssh import transport_for
from skyfab.ssh.process import end_all
from skyfab.ui.events import Events, HostState, Importing, Output

_PER_HOST: Final = 8
"""File descriptors per host. A connection has five; while it is suspect, others are attempted in parallel."""
_SPARE: Final = 128
"""File descriptors left for the rest of the program."""


class PoolOwner:
    """Handles the events of a pool's nodes: emits them to subscribers, and informs gangs, scheduler and recovery."""

    def __init__(self, events: Events, gang_cache: GangCache, scheduler: Scheduler) -> None:
        self.events = events
        self._gang_cache = gang_cache
        self._scheduler = scheduler
        self.nodes: Sequence[Node] = ()
        self.recovery: Recovery | None = None

    def on_output(self, node: Node, worker: str, lines: Lines) -> None:
        if self.events.active:
            rank = self._gang_cache.rank_of(node, worker)
            for text, end in lines:
                self.events.emit(Output(host=node.name, rank=rank, stream=lines.stream, text=text, end=end))

    def on_import(self, node: Node, worker: str, module: str) -> None:
        rank = self._gang_cache.rank_of(node, worker)
        self.events.emit(Importing(host=node.name, rank=rank, worker=worker, module=module))

    def on_exit(self, node: Node, worker: str) -> None:
        self._gang_cache.worker_exited(node, worker)

    def on_lost(self, node: Node, error: HostError) -> None:
        stranger = isinstance(error.__cause__, ProtocolError)  # the peer is not one of our agents
        if self.recovery is not None and not stranger:
            self.recovery.expect(node, error)
        else:
            node.lost = error
        self.events.emit(HostState(host=node.name, state="lost", detail=error.message))
        self._scheduler.advance()

    def on_disconnect(self, node: Node, reason: str) -> None:
        others = [other for other in self.nodes if other is not node and other.lost is None]
        others_respond = self.others_respond(node)
        if others and not others_respond:
            reason += "; no host answers: is this machine's network up?"
        timing = node.session.connection.timing
        limit = timing.heartbeat_timeout if others_respond else timing.lease
        self.events.emit(HostState(host=node.name, state="reconnecting", detail=reason, limit=limit))

    def on_reconnect(self, node: Node, seconds: float) -> None:
        self.events.emit(HostState(host=node.name, state="ready", detail=f"back after {seconds:.1f} s"))

    def others_respond(self, node: Node) -> bool:
        return any(other.session.responds for other in self.nodes if other is not node)


class _NoOwner:
    """For nodes of a detached run: events are ignored, and a lost node is not recovered."""

    def on_output(self, node: Node, worker: str, lines: Lines) -> None: ...
    def on_import(self, node: Node, worker: str, module: str) -> None: ...
    def on_exit(self, node: Node, worker: str) -> None: ...
    def on_disconnect(self, node: Node, reason: str) -> None: ...
    def on_reconnect(self, node: Node, seconds: float) -> None: ...

    def on_lost(self, node: Node, error: HostError) -> None:
        node.lost = error

    def others_respond(self, node: Node) -> bool:
        return False


class Nodes:
    """Creates nodes, without opening them. `all` are those of the pool itself."""

    def __init__(
        self,
        images: HostImages,
        workdirs: Workdirs,
        timing: Timing,
        owner: PoolOwner,
        on_recovered: OnRecovered,
    ) -> None:
        """`on_recovered` is called with a lost node that is back, and a function that accepts it for calls."""
        self._inventory = Inventory(hosts={})
        self._images = images
        self._workdirs = workdirs
        self._timing = timing
        self._owner = owner
        self._reader = SharedReader()
        self.recovery = owner.recovery = Recovery(self._new_session, on_recovered, owner.events)
        self.all: Sequence[Node] = ()

    def make_nodes(self, hosts: Sequence[Host], inventory: Inventory) -> Sequence[Node]:
        """The nodes of the pool, one for each host of the inventory."""
        self._inventory = inventory
        self._images.begin(hosts)
        pool = _pool_name()
        self.all = self._owner.nodes = [self._make(index, host, self._owner, pool) for index, host in enumerate(hosts)]
        self.recovery.begin()
        return self.all

    def count(self) -> int:
        """How many the pool has."""
        return len(self.all)

    def copies(self, nodes: Sequence[Node]) -> list[Node]:
        """New nodes for the same hosts, with agents of their own. These share one pool name, as those of a pool do."""
        pool = _pool_name()
        made = [self._make(node.index, node.host, _NoOwner(), pool) for node in nodes]
        for copy, node in zip(made, nodes, strict=True):
            copy.workdir = node.workdir
        return made

    def _make(self, index: int, host: Host, owner: Owner, pool: str) -> Node:
        node = Node(index, host, self._inventory, owner)
        node.workdir = self._workdirs.of(host)
        node.session = self._new_session(node, pool)
        return node

    def _new_session(self, node: Node, pool: str | None = None) -> Session:
        """A session with a new agent."""
        host = node.host
        name = f"{pool or _pool_name()}-{node.index}"  # unique per node: two hosts may be the same machine
        python, prepare = self._images.interpreter(host, name, Progress(self._owner.events, host.name))
        return Session(
            Bootstrap(
                host=host,
                session=name,
                bundle=bundle(),
                python=python,
                prepare=prepare,
                setup=self._images.setup(host),
            ),
            lambda: transport_for(host, self._inventory),
            node,
            self._reader,
            self._timing,
        )


def _pool_name() -> str:
    """A new name each time a pool is opened: agents of the last time may still be exiting."""
    return secrets.token_hex(8)


def named(nodes: Sequence[Node], name: str) -> Node:
    """The node of that name; the first for "one" and "head". Raises UsageError."""
    for node in nodes:
        if name in (node.name, "one", "head"):
            return node
    names = ", ".join(node.name for node in nodes)
    if name == "all":
        raise UsageError("on='all' is not one host", hint=f'on is "head" or one of: {names}')
    raise UsageError(f"no host {name!r} in this pool", hint=f'on is "one", "all", "head" or one of: {names}')


def open_all(nodes: Sequence[Node], events: Events, failed: Callable[[Node], None]) -> None:
    """Opens every node's session. Raises the one failure, or a PoolError with all of them, and then leaves none open.

    `failed` is called with each node as soon as it fails.
    """
    make_room(len(nodes))
    errors: dict[int, Exception] = {}

    def enter(node: Node) -> None:
        try:
            agent = node.session.open()
        except Exception as error:
            errors[node.index] = error
            failed(node)
            if node.session.was_stopped:  # Ctrl-C, or another thread has closed the pool
                events.emit(HostState(host=node.name, state="closed"))
                return
            detail = (error.message if isinstance(error, SkyfabError) else str(error)).partition("\n")[0]
            events.emit(HostState(host=node.name, state="failed", detail=detail))
        else:
            events.emit(HostState(host=node.name, state="ready", detail=f"Python {agent.python}"))

    for node in nodes:
        events.emit(HostState(host=node.name, state="connecting"))
    try:
        results_of(for_each_host(enter, nodes))
    except BaseException:  # Ctrl-C: also stops those that are still connecting
        close_all(nodes)
        raise
    if errors:
        close_all([node for node in nodes if node.index not in errors])
        raise one_error([errors[index] for index in sorted(errors)], len(nodes))


def make_room(hosts: int) -> None:
    """Increases the limit of open files to what the hosts need. Raises UsageError if that is more than is allowed."""
    soft, hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    used = len(list(Path("/dev/fd").iterdir()))
    if used + _PER_HOST * hosts > hard:
        raise UsageError(
            f"{hosts} hosts need about {used + _PER_HOST * hosts} open files, and this program may have {hard}",
            hint="a larger limit (ulimit -n, LimitNOFILE= of a service), or fewer hosts at a time",
        )
    wanted = used + 2 * _PER_HOST * hosts + _SPARE
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


def close_all(nodes: Sequence[Node]) -> None:
    """Terminates every process of the pool on every host. If interrupted, leaves that to the hosts."""
    try:
        results_of(for_each_host(Node.close, nodes))
    except KeyboardInterrupt:
        atexit.register(end_all)
        raise
