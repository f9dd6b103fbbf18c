"""A gang: one process per rank on every node, each with its place in the whole.

Its processes stay for later calls. When one of them ends, the next call gets a new gang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from skyfab.calls.pack import FunctionParcel
from skyfab.calls.results import not_unpickled, resolve
from skyfab.errors import BroadcastError, HostLost, RemoteTraceback, SkyfabError
from skyfab.pool.futures import CallFuture
from skyfab.pool.node import Node, SeatPlan
from skyfab.pool.rendezvous import Meeting
from skyfab.protocol import codec, messages

GRACE: Final = 2.0
"""Seconds that the other ranks have left when one has failed: they may wait for it in vain."""


class Member:
    """One rank: the node and seat where it lives."""

    __slots__ = ("node", "plan", "rank", "seat")

    def __init__(self, node: Node, seat: str, plan: SeatPlan, rank: int) -> None:
        self.node = node
        self.seat = seat
        self.plan = plan
        self.rank = rank


class Gang:
    """The ranks of a pool, ready to be called together."""

    def __init__(
        self,
        nodes: Sequence[Node],
        ranks: Sequence[int],
        *,
        name: str,
        job: str,
        tree: str,
        meeting: Meeting,
        attempt: int,
        env: Callable[[Node], Mapping[str, str]],
        conducted: bool = False,
    ) -> None:
        self.nodes = list(nodes)
        self.tree = tree
        self.attempt = attempt
        self.job = job
        self.broken = False
        """One of its processes has ended, or is about to: the next call needs another gang."""
        self.members: list[Member] = []
        world = sum(ranks)
        for place, (node, local_world) in enumerate(zip(nodes, ranks, strict=True)):
            for local in range(1 if conducted else local_world):
                info = {
                    "node": node.index,
                    "total_nodes": len(nodes),
                    "rank": len(self.members),
                    "world_size": world,
                    "local_rank": local,
                    "local_world_size": local_world,
                    "head_addr": meeting.places[0].address,
                    "head_port": meeting.port,
                    "hostname": node.agent.hostname,
                    "accelerators": len(node.gpus),
                    "total_accelerators": sum(len(n.gpus) for n in nodes),
                    "peers": [other.address for other in meeting.places],
                    "job_id": job,
                    "attempt": attempt,
                }
                ours = {**rank_env(info, node, meeting.places[place].interface), **env(node)}
                plan = SeatPlan(tree=tree, env=ours, info=info, port=0 if self.members else meeting.port)
                self.members.append(Member(node, f"{name}.{local}", plan, len(self.members)))

    def release(self) -> None:
        """Ends its processes at once."""
        self.broken = True
        for member in self.members:
            try:
                member.node.release(member.seat)
            except SkyfabError:
                pass  # a lost host has nothing left to release


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """What is to run on every rank."""

    function: FunctionParcel
    arguments: codec.Payload
    label: str
    timeout: float | None = None
    min_hosts: int | None = None
    """So many members are enough: others but the first may be lost, and their result is None."""
    wary: bool = False
    """Hosts are not trusted: results are plain data."""


class GangCall:
    """One broadcast, from when it is asked for until every rank has answered. Its result is a list in rank order."""

    def __init__(self, broadcast: Broadcast, ended: Callable[[GangCall], None] = lambda call: None) -> None:
        """`ended` is called once every rank has answered, before the future is resolved."""
        self.broadcast = broadcast
        self.future = CallFuture()
        self.gang: Gang | None = None
        """Who runs it, once it has begun."""
        self._ended = ended
        self._told: Callable[[BaseException | None], None] = lambda error: None
        self._spare = 0
        """Members that may still be lost."""
        self._results: list[Any] = []
        self._streams: dict[int, int] = {}
        """The number of the call on each rank that it was sent to."""
        self._open: set[int] = set()
        self._stopping = False
        self._failures: list[Exception] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    # ---- beginning

    def begin(self, gang: Gang, told: Callable[[BaseException | None], None]) -> None:
        """Hands it to every rank. `told` hears the failure, if any, before the future is resolved."""
        size = len(gang.members)
        self._told = told
        self._spare = 0 if self.broadcast.min_hosts is None else size - self.broadcast.min_hosts
        self._results = [None] * size
        self._open = set(range(size))
        self.future.node = gang.members[0].node
        self.gang = gang
        self.future.on_cancel = self.stop
        for member in gang.members:
            self._start(member, shared=size > 1)

    def _start(self, member: Member, *, shared: bool) -> None:
        broadcast = self.broadcast
        try:
            member.node.call(
                member.seat,
                member.plan,
                broadcast.function,
                broadcast.arguments,
                timeout=broadcast.timeout,
                caller=_RankCall(self, member),
                shared=shared,
            )
        except SkyfabError as error:
            self.note(member, error, failed=True)

    @property
    def is_sent(self) -> bool:
        """It is on its way to every rank."""
        return self.gang is not None and len(self._streams) == len(self.gang.members)

    @property
    def is_wanted(self) -> bool:
        return not self._stopping and not self.future.cancelled()

    def places(self) -> list[tuple[Node, str, int | None]]:
        """Where its processes are, once it has begun."""
        return [] if self.gang is None else [(member.node, member.seat, member.rank) for member in self.gang.members]

    def sent(self, member: Member, stream: int) -> None:
        with self._lock:
            self._streams[member.rank] = stream
        if not self.is_wanted:  # in this very moment
            self.stop()

    # ---- ending

    def note(self, member: Member, value: Any, *, failed: bool) -> None:
        """A rank's result, or why there is none."""
        assert self.gang is not None
        with self._lock:
            if member.rank not in self._open:
                return
            self._open.discard(member.rank)
            if isinstance(value, HostLost) and self._spare > 0 and member.rank:
                self._spare -= 1
                self.gang.broken = True
                value, failed = None, False
            self._results[member.rank] = value
            first = failed and not self._failures
            if failed:
                self._failures.append(value)
                self.gang.broken = self.gang.broken or isinstance(value, HostLost)
            done = not self._open
            if first and not done:
                self._timer = threading.Timer(GRACE, self.stop)
                self._timer.daemon = True
                self._timer.start()
        if done:
            self._finish()

    def abandon(self, error: Exception) -> None:
        """It goes on without us: what waits for it is told so, and nothing stops it."""
        with self._lock:
            self._open.clear()
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """It will have no result."""
        self._ended(self)
        self._told(error)
        self.future.settle(None, error)
        self.future.on_cancel = None

    def stop(self) -> None:
        """Stops it on the ranks that have not answered, and on no account anything else there."""
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
                pass  # lost: its failure is on its way

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._failures:
            self._ended(self)
            self._told(None)
            self.future.settle(self._results)
            self.future.on_cancel = None
            return
        _fold(self._failures)
        count, total = len(self._failures), len(self._results)
        label = self.broadcast.label
        self.fail(BroadcastError(f"{label} failed on {count} of {total} ranks", self._failures, self._results))


class _RankCall:
    """One rank's part of a broadcast: the `Caller` of its node."""

    __slots__ = ("_call", "_member")

    def __init__(self, call: GangCall, member: Member) -> None:
        self._call = call
        self._member = member

    def is_wanted(self) -> bool:
        return self._call.is_wanted

    def sent(self, stream: int) -> None:
        self._call.sent(self._member, stream)

    def answered(self, message: messages.Message, buffers: list[memoryview]) -> None:
        call, member = self._call, self._member
        assert call.gang is not None
        if isinstance(message, messages.Ended) and message.why not in ("unpicklable", "exit"):
            call.gang.broken = True
        label, wary = call.broadcast.label, call.broadcast.wary
        try:
            value = resolve(message, buffers, host=member.node.name, rank=member.rank, label=label, wary=wary)
        except Exception as error:
            call.note(member, error, failed=True)
        except BaseException as error:  # of the result itself, or of a signal handler of the program's
            call.note(member, not_unpickled(error, host=member.node.name, rank=member.rank, label=label), failed=True)
            raise
        else:
            call.note(member, value, failed=False)

    def failed(self, error: Exception) -> None:
        self._call.note(self._member, error, failed=True)


def _fold(failures: Sequence[Exception]) -> None:
    """What several ranks have in common is shown once: the traceback of the first of them."""
    seen: dict[tuple[type, str], RemoteTraceback] = {}
    for failure in failures:
        cause = failure.__cause__
        if isinstance(cause, RemoteTraceback):
            first = seen.setdefault((type(failure), cause.text), cause)
            if first is not cause:
                where = first.host if first.rank is None else f"{first.host}[{first.rank}]"
                failure.__cause__ = RemoteTraceback(f"[the traceback is that of {where}]", cause.host, cause.rank)


def rank_env(info: Mapping[str, Any], node: Node, interface: str) -> dict[str, str]:
    """The variables that torchrun sets, for one rank, and the interface that leads to the others."""
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
        "ROLE_NAME": "default",  # torchrun's word for its only role: all ranks have it
        "ROLE_RANK": info["rank"],
        "ROLE_WORLD_SIZE": info["world_size"],
        "TORCHELASTIC_RUN_ID": info["job_id"],
        "TORCHELASTIC_RESTART_COUNT": info["attempt"],
        "TORCHELASTIC_MAX_RESTARTS": info["attempt"],  # who starts it again, and how often, is not known here
        "TORCHELASTIC_USE_AGENT_STORE": False,  # the head's process listens at MASTER_PORT, and no launcher
    }
    if node.host.gpus != "auto":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.host.gpus))
    if info["local_world_size"] > 1:
        env["OMP_NUM_THREADS"] = 1
    if interface:
        env |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {key: str(value) for key, value in env.items()}
