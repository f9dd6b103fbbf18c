"""All nodes of a pool: creates, opens and closes them in parallel."""

from __future__ import annotations

import atexit
import json
import resource
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from skyfab._util import schema
from skyfab.calls.call import as_function
from skyfab.calls.pack import PackedCall, pack_function
from skyfab.calls.results import unpack_result
from skyfab.detached.written import Written, event, parse
from skyfab.errors import HostError, HostUnfit, ProtocolError, SkyfabError, UsageError
from skyfab.host.agent.workdir import own_name
from skyfab.host.gpu_locks import hold_free
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.images import HostImages, Progress
from skyfab.pool.node import Node, Owner, WorkerSpec
from skyfab.pool.project_sync import ProjectSync
from skyfab.pool.recovery import Recovery
from skyfab.pool.scheduler import Scheduler
from skyfab.pool.workdir import Workdirs
from skyfab.protocol import codec, messages
from skyfab.session.bootstrap import Bootstrap
from skyfab.session.bundle import bundle
from skyfab.session.fanout import for_each_host, meanwhile, one_error, results_of
from skyfab.session.reader import SharedReader
from skyfab.session.replies import Reply
from skyfab.session.session import Session
from skyfab.session.shell import Shell
from skyfab.session.timing import Timing
from skyfab.ssh import transport_for
from skyfab.ssh.base import Transport
from skyfab.ssh.process import end_all
from skyfab.ui.events import Events, HostState

Prepare = Callable[[Shell], str | None]
_PER_HOST: Final = 8
"""File descriptors per host. A connection has five; while it is suspect, others are attempted in parallel."""
_SPARE: Final = 128
"""File descriptors left for the rest of the program."""
_WRITTEN: Final = 2.0
"""Timeout in seconds for the hosts' lists of written files, when a pool closes."""


class Nodes(Owner):
    """Creates nodes, without opening them, and owns those of the pool itself: `nodes`."""

    def __init__(
        self,
        images: HostImages,
        workdirs: Workdirs,
        timing: Timing,
        events: Events,
        scheduler: Scheduler,
        sync: ProjectSync,
    ) -> None:
        super().__init__(events)
        self.timing = timing
        self.job = secrets.token_hex(8)
        """Prefix of the pool's job ids."""
        self._inventory = Inventory(hosts={})
        self._reach: Callable[[Host], Transport] = lambda host: transport_for(host, self._inventory)
        self._images = images
        self._workdirs = workdirs
        self._scheduler = scheduler
        self._reader = SharedReader()
        self.recovery = Recovery(self._new_session, sync.take_back, events)

    def make_nodes(
        self, hosts: Sequence[Host], inventory: Inventory, reach: Callable[[Host], Transport]
    ) -> Sequence[Node]:
        """The nodes of the pool, one for each host of the inventory. `reach` makes transports."""
        self._inventory = inventory
        self._reach = reach
        self._images.begin(hosts)
        pool = _pool_name()
        self.nodes = [self._make(index, host, self, pool) for index, host in enumerate(hosts)]
        self.recovery.begin()
        return self.nodes

    def close(self) -> None:
        """Terminates every process of the pool on every host, also while another thread connects."""
        close_all(self.nodes)

    def on_lost(self, node: Node, error: HostError) -> None:
        if isinstance(error.__cause__, ProtocolError):  # the peer is not one of our agents
            node.lost = error
        else:
            self.recovery.expect(node, error)
        self.events.emit(HostState(host=node.name, state="lost", detail=error.message))
        self._scheduler.ended(node)

    def solo_spec(self, node: Node, tree: str) -> WorkerSpec:
        """The worker spec for solo calls on a node: a world of size 1."""
        info = {
            "node": node.index,
            "total_nodes": len(self.nodes),
            "hostname": node.agent.hostname,
            "head_addr": node.agent.address,
            "accelerators": len(node.gpus),
            "total_accelerators": len(node.gpus),
            "peers": [node.agent.address],
            "job_id": self.job,
        }
        env = self._images.variables(node.host)
        if node.host.gpus != "auto":
            env.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, node.host.gpus)))
        return WorkerSpec(tree=tree, env=env, info=info, plain=self._scheduler.untrusted)

    def take_free(self, nodes: Sequence[Node]) -> None:
        """From now on, a node has only the GPUs that nobody uses: a worker on each host holds them.

        Raises HostUnfit for a host without any, and closes all.
        """

        def take(node: Node) -> None:
            reply = Reply()
            arguments = codec.dumps((list(node.gpus), None))
            call = PackedCall(function=pack_function(as_function(hold_free)), arguments=arguments, label="gpus='free'")
            node.call("gpus", replace(self.solo_spec(node, ""), plain=True, claims=False), call, caller=reply)
            found = unpack_result(*reply.wait(), host=node.name, rank=None, label=call.label, untrusted=True)
            try:
                gpus, reason = schema.parse(tuple[tuple[int, ...], str], found)
            except schema.Invalid as error:
                raise ProtocolError(f"not a list of GPUs: {error}", host=node.name) from None
            if not gpus or not set(gpus) <= set(node.gpus):
                hint = "choose hosts by where='gpus.free >= 1', or wait: skyfab run --when-free"
                raise HostUnfit(f"no GPU is free: {reason}", host=node.name, hint=hint)
            node.host = replace(node.host, gpus=gpus)

        try:
            results_of(for_each_host(take, nodes))
        except BaseException:
            close_all(nodes)
            raise

    def copies(self, nodes: Sequence[Node]) -> list[Node]:
        """New nodes for the same hosts, with agents of their own. These share one pool name, as those of a pool do."""
        pool = _pool_name()
        made = [self._make(node.index, node.host, Owner(Events()), pool) for node in nodes]
        for copy, node in zip(made, nodes, strict=True):
            copy.workdir = node.workdir
        return made

    def helpers(self, hosts: Sequence[Host], lease: float) -> list[Node]:
        """New nodes for hosts that do not have their environment yet: they run any Python, for transfers only."""
        pool, timing = _pool_name(), replace(self.timing, lease=lease)
        made = [Node(index, host, self._inventory, Owner(Events())) for index, host in enumerate(hosts)]
        for node in made:
            node.reset(self._session(node, f"{pool}-{node.index}", ("any", None), timing))
        return made

    def _make(self, index: int, host: Host, owner: Owner, pool: str) -> Node:
        node = Node(index, host, self._inventory, owner)
        node.workdir = self._workdirs.of(host)
        node.owner = self.job
        node.reset(self._new_session(node, pool))
        return node

    def _new_session(self, node: Node, pool: str | None = None) -> Session:
        """A session with a new agent."""
        name = f"{pool or _pool_name()}-{node.index}"  # unique per node: two hosts may be the same machine
        found = self._images.interpreter(node.host, name, Progress(self.events, node.name))
        return self._session(node, name, found, self.timing)

    def _session(self, node: Node, name: str, interpreter: tuple[str, Prepare | None], timing: Timing) -> Session:
        host, (python, prepare) = node.host, interpreter
        return Session(
            Bootstrap(
                host=host,
                session=name,
                bundle=bundle(),
                python=python,
                prepare=prepare,
                setup=self._images.setup(host),
            ),
            lambda: self._reach(host),
            node,
            self._reader,
            timing,
        )


def _pool_name() -> str:
    """A new name each time a pool is opened: agents of the last time may still be exiting."""
    return secrets.token_hex(8)


def named(nodes: Sequence[Node], name: str) -> Node:
    """The node of that name; the first for "one" and "head". Raises UsageError."""
    for node in nodes:
        if name in (node.name, "one", "head"):
            return node
    what = "on='all' is not one host" if name == "all" else f"no host {name!r} in this pool"
    raise UsageError(what, hint=f'on is "head" or one of: {", ".join(node.name for node in nodes)}')


def open_all(
    nodes: Sequence[Node], events: Events, settled: Callable[[Node], None], also: Callable[[], None] = lambda: None
) -> None:
    """Opens every node's session. Raises the one failure, or a PoolError with all of them, and then leaves none open.

    `settled` is called with each node as soon as it is open or has failed, `also` on another thread.
    """
    make_room(len(nodes))
    errors: dict[int, Exception] = {}

    def enter(node: Node) -> None:
        try:
            agent = node.session.open()
        except Exception as error:
            errors[node.index] = error
            settled(node)
            if node.session.was_stopped:  # Ctrl-C, or another thread has closed the pool
                events.emit(HostState(host=node.name, state="closed"))
                return
            detail = (error.message if isinstance(error, SkyfabError) else str(error)).partition("\n")[0]
            events.emit(HostState(host=node.name, state="failed", detail=detail))
        else:
            settled(node)
            events.emit(HostState(host=node.name, state="ready", detail=f"Python {agent.python}"))

    for node in nodes:
        events.emit(HostState(host=node.name, state="connecting"))
    try:
        with meanwhile(also):
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
            f"{hosts} hosts need about {used + _PER_HOST * hosts} open files, but the limit is {hard}",
            hint="raise the limit (ulimit -n, LimitNOFILE= of a service), or use fewer hosts at a time",
        )
    wanted = used + 2 * _PER_HOST * hosts + _SPARE
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


def close_all(nodes: Sequence[Node]) -> None:
    """Terminates every process of the pool on every host. If interrupted, leaves that to the hosts."""
    try:
        results_of(for_each_host(Node.close, [node for node in nodes if not node.is_left]))
    except BaseException:
        for node in nodes:  # what called this may call it again
            node.is_left = True
        atexit.register(end_all)
        raise


def tell_files(nodes: Sequence[Node], inventory: Inventory, events: Events) -> None:
    """Emits events about files that were written on other machines. Hosts that do not reply in time are skipped."""
    if not events.active:
        return
    waiting: list[tuple[Node, Reply]] = []
    for node in nodes:
        is_kept = node.workdir.sent and not node.host.is_here
        if node.lost is None and is_kept and node.session.responds:
            reply = Reply()
            with suppress(SkyfabError):
                node.session.send(messages.Written(), answer=reply.answered, failure=reply.failed)
                waiting.append((node, reply))
    until = time.monotonic() + _WRITTEN
    for node, reply in waiting:

        def arrived(reply: Reply = reply) -> bool:
            return reply.is_there

        if node.session.wait(arrived, max(0.0, until - time.monotonic())):
            for written in _written(reply):
                if written.workdir in (node.workdir.sent, own_name(node.workdir.sent, node.owner)):
                    events.emit(event(node.host, inventory, written))


def _written(reply: Reply) -> Sequence[Written]:
    with suppress(SkyfabError, ValueError, RecursionError):
        message, _ = reply.wait()
        if isinstance(message, messages.Done):
            return parse(json.loads(message.text))
    return []
