"""A gang: one process per rank on every node, each with its place in the whole.

Its processes stay for later calls. When one of them ends, the next call gets a new gang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from skyfab.answers import resolve
from skyfab.dispatch import CallFuture
from skyfab.errors import BroadcastError, HostLost, RemoteTraceback, SkyfabError
from skyfab.meeting import Meeting
from skyfab.node import Node, SeatPlan
from skyfab.parcel import FunctionParcel
from skyfab.protocol import codec, messages

GRACE: Final = 2.0
"""Seconds that the other ranks have left when one has failed: they may wait for it in vain."""


class Member:
    """One rank: the node and seat where it lives."""

    __slots__ = ("node", "plan", "rank", "seat", "stream")

    def __init__(self, node: Node, seat: str, plan: SeatPlan, rank: int) -> None:
        self.node = node
        self.seat = seat
        self.plan = plan
        self.rank = rank
        self.stream = 0


class Gang:
    """The ranks of a pool, ready to be called together."""

    def __init__(
        self,
        nodes: Sequence[Node],
        ranks: Sequence[int],
        *,
        name: str,
        tree: str,
        meeting: Meeting,
        attempt: int,
        env: Callable[[Node], Mapping[str, str]],
        conducted: bool = False,
    ) -> None:
        self.nodes = list(nodes)
        self.tree = tree
        self.attempt = attempt
        self.label = ""
        """The function of its last call."""
        self._round: _Round | None = None
        self.broken = False
        self.rounds = 0
        """Calls under way."""
        self._retired = False
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
                    "head_addr": nodes[0].agent.address,
                    "head_port": meeting.port,
                    "hostname": node.agent.hostname,
                    "accelerators": len(node.gpus),
                    "total_accelerators": sum(len(n.gpus) for n in nodes),
                    "peers": [n.agent.address for n in nodes],
                    "job_id": name,
                    "attempt": attempt,
                }
                ours = {**rank_env(info, node, meeting.interfaces[place]), **env(node)}
                plan = SeatPlan(tree=tree, env=ours, info=info, port=0 if self.members else meeting.port)
                self.members.append(Member(node, f"{name}.{local}", plan, len(self.members)))

    def retire(self) -> None:
        """Ends its processes, once nothing runs in them."""
        self._retired = True
        if not self.rounds or self.broken:
            self.release()

    def left(self) -> None:
        """A call is over."""
        self.rounds -= 1
        if self._retired and not self.rounds:
            self.release()

    def release(self) -> None:
        """Ends its processes at once."""
        self.broken = True
        for member in self.members:
            try:
                member.node.release(member.seat)
            except SkyfabError:
                pass  # a lost host has nothing left to release

    def hand_over(self, error: Exception) -> None:
        """Its call goes on without us: whoever waits for it is told so, and nobody stops it."""
        if self._round is not None:
            self._round.abandon(error)

    def call(
        self,
        function: FunctionParcel,
        arguments: codec.Payload,
        *,
        timeout: float | None,
        label: str,
        ended: Callable[[BaseException | None], None],
        least: int | None = None,
        wary: bool = False,
    ) -> CallFuture:
        """Runs a function on every rank; the future's result is a list in rank order.

        `ended` is called with the failure, if any, before the future is resolved. With `least`, so many members are
        enough: others but the first may be lost, and their result is None. With `wary`, results are plain data.
        """
        round_ = _Round(self, label, ended, least, wary)
        self.label = label
        self._round = round_
        self.rounds += 1
        for member in self.members:
            round_.start(member, function, arguments, timeout)
        return round_.future


class _Round:
    """One call of a gang, while it is under way."""

    def __init__(
        self, gang: Gang, label: str, ended: Callable[[BaseException | None], None], least: int | None, wary: bool
    ) -> None:
        self._told = ended
        self._wary = wary
        self._spare = 0 if least is None else len(gang.members) - least
        """Members that may still be lost."""
        self.future = CallFuture()
        self.future.node = gang.members[0].node
        self.future.on_cancel = self._stop_others
        self._gang = gang
        self._label = label
        self._results: list[Any] = [None] * len(gang.members)
        self._open = set(range(len(gang.members)))
        self._failures: list[Exception] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def start(self, member: Member, function: FunctionParcel, arguments: codec.Payload, timeout: float | None) -> None:
        def answer(message: messages.Message, buffers: list[memoryview]) -> None:
            self._answered(member, message, buffers)

        try:
            member.node.call(
                member.seat,
                member.plan,
                function,
                arguments,
                timeout=timeout,
                answer=answer,
                failure=lambda error: self._ended(member, error, failed=True),
                sent=lambda stream: setattr(member, "stream", stream),
                shared=len(self._gang.members) > 1,
            )
        except SkyfabError as error:
            self._ended(member, error, failed=True)

    def _answered(self, member: Member, message: messages.Message, buffers: list[memoryview]) -> None:
        if isinstance(message, messages.Ended) and message.why not in ("unpicklable", "exit"):
            self._gang.broken = True
        try:
            value = resolve(
                message,
                buffers,
                host=member.node.name,
                rank=member.rank,
                label=self._label,
                wary=self._wary,
            )
        except BaseException as error:
            self._ended(member, error, failed=True)
        else:
            self._ended(member, value, failed=False)

    def _ended(self, member: Member, value: Any, *, failed: bool) -> None:
        with self._lock:
            if member.rank not in self._open:
                return
            self._open.discard(member.rank)
            if isinstance(value, HostLost) and self._spare > 0 and member.rank:
                self._spare -= 1
                self._gang.broken = True
                value, failed = None, False
            self._results[member.rank] = value
            first = failed and not self._failures
            if failed:
                self._failures.append(value)
                self._gang.broken = self._gang.broken or isinstance(value, HostLost)
            done = not self._open
        if done:
            self._finish()
        elif first:
            self._timer = threading.Timer(GRACE, self._stop_others)
            self._timer.daemon = True
            self._timer.start()

    def abandon(self, error: Exception) -> None:
        """Nothing more is heard of it."""
        with self._lock:
            self._open.clear()
        self._told(error)
        self.future.settle(None, error)

    def _stop_others(self) -> None:
        self._gang.broken = True
        with self._lock:
            waiting = [member for member in self._gang.members if member.rank in self._open]
        for member in waiting:
            try:
                member.node.cancel(member.stream)
            except SkyfabError:
                pass  # lost: its failure is on its way

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._gang.left()
        if self._failures:
            _fold(self._failures)
            count, total = len(self._failures), len(self._results)
            error = BroadcastError(f"{self._label} failed on {count} of {total} ranks", self._failures, self._results)
            self._told(error)
            self.future.settle(None, error)
        else:
            self._told(None)
            self.future.settle(self._results)


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
