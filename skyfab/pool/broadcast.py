"""A broadcast: one attempt to run a call on every rank of a gang, the workers that run it together, one per rank.

The processes of a gang are kept for later calls. When one of them exits, the next call gets a new gang.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from skyfab.calls.pack import PackedCall
from skyfab.calls.results import deliver, in_order
from skyfab.errors import CallCancelled, HostLost, ProtocolError, RemoteTraceback, SkyfabError, broadcast_error
from skyfab.inventory.host import Host
from skyfab.pool.feeds import converse
from skyfab.pool.futures import CallFuture
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.rendezvous import Rendezvous
from skyfab.pool.streams import Conversation, RemoteIterator
from skyfab.protocol import messages

GRACE: Final = 2.0
"""Seconds until the other ranks are stopped after one has failed: they may be blocked in a collective with it."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank, and the node and worker that run it."""

    gang: Gang = field(repr=False)
    node: Node
    worker: str
    spec: WorkerSpec
    rank: int
    shown_rank: int | None
    """None in an elastic gang: there a worker has several ranks, which may change."""

    def exited(self) -> None:
        """Its process has exited: the next call gets a new gang."""
        self.gang.broken = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSpec:
    """Which nodes and ranks a gang has, and which project tree its workers import."""

    nodes: tuple[Node, ...]
    ranks: tuple[int, ...]
    """Number of ranks on each node."""
    tree: str
    attempt: int = 0
    """Number of earlier attempts of the call."""
    elastic_agents: bool = False
    """Each node has one worker that runs an elastic agent, which starts the ranks."""
    plain: bool = False
    """Its workers encode results as plain data."""


class Gang:
    """A set of workers with their ranks and rendezvous, ready to run broadcasts."""

    def __init__(
        self,
        spec: GangSpec,
        rendezvous: Rendezvous,
        env: Callable[[Host], Mapping[str, str]],
        *,
        name: str,
        job: str,
    ) -> None:
        """`env` returns the environment variables of a host's workers."""
        self.spec = spec
        self.nodes = list(spec.nodes)
        self.job = job
        self.broken = False
        """One of its processes has exited or is about to: the next call needs a new gang."""
        self.members: list[Member] = []
        common = {
            "total_nodes": len(spec.nodes),
            "world_size": sum(spec.ranks),
            "head_addr": rendezvous.addresses[0].address,
            "head_port": rendezvous.port,
            "total_accelerators": sum(len(node.gpus) for node in spec.nodes),
            "peers": [address.address for address in rendezvous.addresses],
            "job_id": job,
            "attempt": spec.attempt,
        }
        for address, node, local_world in zip(rendezvous.addresses, spec.nodes, spec.ranks, strict=True):
            for local in range(1 if spec.elastic_agents else local_world):
                info = {
                    **common,
                    "node": node.index,
                    "rank": len(self.members),
                    "local_rank": local,
                    "local_world_size": local_world,
                    "hostname": node.agent.hostname,
                    "accelerators": len(node.gpus),
                }
                ours = {**rank_env(info, node, address.interface), **env(node.host)}
                port = 0 if self.members else rendezvous.port
                worker = WorkerSpec(tree=spec.tree, env=ours, info=info, port=port, plain=spec.plain)
                rank = len(self.members)
                shown = None if spec.elastic_agents else rank
                self.members.append(Member(self, node, f"{name}.{local}", worker, rank, shown))

    def release(self) -> None:
        """Terminates its processes."""
        self.broken = True
        for member in self.members:
            try:
                member.node.release(member.worker)
            except SkyfabError:
                pass  # a lost host: there is nothing to release


def rank_env(info: Mapping[str, Any], node: Node, interface: str) -> dict[str, str]:
    """The environment variables that torchrun sets for one rank, and the network interface to the other hosts."""
    env = {
        "MASTER_ADDR": info["head_addr"],
        "MASTER_PORT": info["head_port"],
        "WORLD_SIZE": info["world_size"],
        "RANK": info["rank"],
        "LOCAL_RANK": info["local_rank"],
        "LOCAL_WORLD_SIZE": info["local_world_size"],
        "NODE_RANK": info["node"],
        "GROUP_RANK": info["node"],
        "GROUP_WORLD_SIZE": info["total_nodes"],
        "ROLE_NAME": "default",  # torchrun's name for its only role
        "ROLE_RANK": info["rank"],
        "ROLE_WORLD_SIZE": info["world_size"],
        "TORCHELASTIC_RUN_ID": info["job_id"],
        "TORCHELASTIC_RESTART_COUNT": info["attempt"],
        "TORCHELASTIC_MAX_RESTARTS": info["attempt"],  # the number of retries is not known here
        "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 listens at MASTER_PORT, not a launcher
    }
    if node.host.gpus != "auto":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.host.gpus))
    if info["local_world_size"] > 1:
        env["OMP_NUM_THREADS"] = 1
    if interface:
        env |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {key: str(value) for key, value in env.items()}


class Broadcast:
    """One attempt to run a call on every rank, from its submission until all have replied.

    The result of its future is a list in rank order. When a call is retried, the next attempt has the same future.
    """

    def __init__(
        self,
        call: PackedCall,
        nodes: Sequence[Node] = (),
        *,
        after: Broadcast | None = None,
        min_hosts: int | None = None,
        untrusted: bool,
        ended: Callable[[Broadcast, BaseException | None], bool] = lambda broadcast, error: False,
    ) -> None:
        """`after` is the attempt before it, which failed; `nodes` are those of the pool.

        `min_hosts` is the number of members that is enough. Others, except the first, may be lost; their result is
        None. With `untrusted`, results may only be plain data. `ended` is called with the error, or None, before the
        future is resolved, which it prevents by returning True.
        """
        self.call = call
        self.nodes = nodes
        self.attempt: int = 0 if after is None else after.attempt + 1
        self.job: str | None = None if after is None else after.job
        """The id that all attempts have in common, once the first has begun."""
        self.untrusted = untrusted
        self.future: CallFuture = CallFuture() if after is None else after.future
        self.future.label = call.label
        self.conversations: list[Conversation] = []
        """The exchanges with each rank, if the call has some."""
        self._iterators: Callable[[], CallFuture | None] = lambda: None
        """A weak reference to the future of the ranks' iterators: those that nobody has are closed."""
        self._min_hosts = min_hosts
        self.gang: Gang | None = None
        """The gang that runs it, once it has begun."""
        self._ended = ended
        self._on_end: Callable[[BaseException | None], None] | None = None
        self._spare = 0
        """Members that may still be lost."""
        self._results: list[Any] = []
        self._streams: dict[int, int] = {}
        """The stream number of the call on each rank that it was sent to."""
        self._open: set[int] = set()
        self._stopping = False
        self._failures: list[Exception] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    # ---- beginning

    def begin(self, gang: Gang, on_end: Callable[[BaseException | None], None] | None = None) -> None:
        """Sends it to every rank. `on_end` is called with the error, or None, before the future is resolved."""
        size = len(gang.members)
        self._on_end = on_end
        self._spare = 0 if self._min_hosts is None else size - self._min_hosts
        self._results = [None] * size
        self._open = set(range(size))
        self.future.node = gang.members[0].node
        self.gang = gang
        self.job = gang.job
        self.future.on_cancel = self.stop
        if self.call.converses:
            self.conversations = converse(self.call, [CallFuture() for _ in range(size)], untrusted=self.untrusted)
            for member, conversation in zip(gang.members, self.conversations, strict=True):
                conversation.stop = functools.partial(self._stop_rank, member)
        for member in gang.members:
            self._start(member, shared=size > 1)
        if (iterators := self._iterators()) is not None:
            iterators.settle([RemoteIterator(conversation) for conversation in self.conversations])
        elif self.call.yields:
            for conversation in self.conversations:
                conversation.close(wait=False)

    def iterators(self) -> CallFuture:
        """The future of the iterators over the values of each rank, which is resolved when the call has begun."""
        future = CallFuture()
        future.label = self.call.label
        future.on_cancel = self.future.cancel
        self._iterators = weakref.ref(future)
        return future

    def _start(self, member: Member, *, shared: bool) -> None:
        store: Literal["all", "repeated"] = "all" if shared else "repeated"
        try:
            begin = self.conversations[member.rank].begin if self.conversations else None
            caller = _RankCall(self, member)
            member.node.call(member.worker, member.spec, self.call, caller=caller, store=store, begin=begin)
        except SkyfabError as error:
            self.note(member, None, error)

    @property
    def is_sent(self) -> bool:
        """It was sent to every rank."""
        return self.gang is not None and len(self._streams) == len(self.gang.members)

    @property
    def is_wanted(self) -> bool:
        return not self._stopping and not self.future.cancelled()

    def processes(self) -> list[tuple[Node, str, int | None]]:
        """Node, worker and rank of each of its processes, once it has begun."""
        return [] if self.gang is None else [(member.node, member.worker, member.rank) for member in self.gang.members]

    def sent(self, member: Member, stream: int) -> None:
        with self._lock:
            self._streams[member.rank] = stream
        if not self.is_wanted:  # it was cancelled while it was being sent
            self.stop()

    # ---- ending

    def note(self, member: Member, value: Any, error: Exception | None = None) -> None:
        """Records a rank's result or its error."""
        assert self.gang is not None
        with self._lock:
            if member.rank not in self._open:
                return
            self._open.discard(member.rank)
            self.gang.broken = self.gang.broken or isinstance(error, HostLost)
            if isinstance(error, HostLost) and self._spare > 0 and member.rank:
                self._spare -= 1
                error = None
            self._results[member.rank] = value if error is None else error
            if error is not None:
                # Without its frames: Python prints those of each error in a group.
                self._failures.append(error.with_traceback(None))
            done = not self._open
            timer = None
            if error is not None and len(self._failures) == 1 and not done:
                self._timer = timer = threading.Timer(GRACE, self.stop)
                timer.daemon = True
        if timer is not None:
            try:
                timer.start()
            except RuntimeError:  # this machine has no thread for it
                self.stop()
        if self.conversations:
            self.conversations[member.rank].end(None, error)
        if done:
            self._finish()

    @property
    def has_failed(self) -> bool:
        """A rank has failed: the others are stopped soon."""
        return bool(self._failures)

    def abandon(self, error: Exception) -> list[tuple[Member, Any, Exception | None]]:
        """Fails the future with `error` while the ranks continue. Nothing is stopped.

        Returns the members that have replied, each with its result or its error.
        """
        if self.gang is None:  # it has not begun
            self.end(None, error)
            return []
        with self._lock:
            replied = [member for member in self.gang.members if member.rank not in self._open]
            is_running = bool(self._open)
            self._open.clear()
        if is_running:
            self.end(None, error)
        found = [(member, self._results[member.rank]) for member in replied]
        failures = {id(failure) for failure in self._failures}
        return [(member, *((None, one) if id(one) in failures else (one, None))) for member, one in found]

    def end(self, result: Any, error: BaseException | None) -> None:
        """Resolves the future, unless there is another attempt."""
        if self._on_end is not None:
            self._on_end(error)
        if not self._ended(self, error):
            self.future.settle(result, error)
            self.future.on_cancel = None
            if (iterators := self._iterators()) is not None and not iterators.done():
                iterators.settle(None, error)

    def stop(self) -> None:
        """Cancels it on the ranks that have not replied. Must not stop any other call there."""
        assert self.gang is not None
        self._stopping = True
        self.gang.broken = True
        with self._lock:
            running = [
                (member.node, self._streams[member.rank])
                for member in self.gang.members
                if member.rank in self._open and member.rank in self._streams
            ]
        for node, stream in running:
            try:
                node.cancel(stream)
            except SkyfabError:
                pass  # the host is lost: its failure will be reported separately

    def _stop_rank(self, member: Member) -> None:
        """Cancels it on one rank."""
        stream = self._streams.get(member.rank)
        if stream is not None:  # else the conversation closes it once it was sent
            with suppress(SkyfabError):  # the host is lost: its failure will be reported separately
                member.node.cancel(stream)

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._failures and all(isinstance(one, CallCancelled) and one.__cause__ is None for one in self._failures):
            self.end(None, self._failures[0])  # the pool was closed
        elif self._failures:
            _fold(self._failures)
            self.end(None, broadcast_error(self.call.label, self._failures, self._results))
        elif self._min_hosts is None:
            self.end(self._results, None)
        else:
            self._finish_elastic()

    def _finish_elastic(self) -> None:
        try:
            results = in_order(self._results)
        except ProtocolError as error:
            self.end(None, error)
        else:
            self.end(results, None)


class _RankCall:
    """One rank's part of a broadcast: the `Caller` of its node."""

    def __init__(self, broadcast: Broadcast, member: Member) -> None:
        self._broadcast = broadcast
        self._member = member

    def is_wanted(self) -> bool:
        return self._broadcast.is_wanted

    def sent(self, stream: int) -> None:
        self._broadcast.sent(self._member, stream)

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        broadcast, member = self._broadcast, self._member
        assert broadcast.gang is not None
        if isinstance(message, messages.Ended) and message.why not in ("unpicklable", "exit"):
            broadcast.gang.broken = True
        label, untrusted = broadcast.call.label, broadcast.untrusted
        done = functools.partial(broadcast.note, member)
        deliver(done, message, buffers, host=member.node.name, rank=member.rank, label=label, untrusted=untrusted)

    def failed(self, error: Exception) -> None:
        self._broadcast.note(self._member, None, error)


def _fold(failures: Sequence[Exception]) -> None:
    """Deduplicates tracebacks: the same one on several ranks is shown in full once, later ones refer to it."""
    seen: dict[tuple[type, str], RemoteTraceback] = {}
    for failure in failures:
        cause = failure.__cause__
        if isinstance(cause, RemoteTraceback):
            first = seen.setdefault((type(failure), cause.text), cause)
            if first is not cause:
                text = f"[the traceback is that of {first.place}]"
                repeated = RemoteTraceback(text, cause.host, cause.rank)
                object.__setattr__(failure, "__cause__", repeated)  # its class may forbid assignments
