"""Gangs: the workers that run a broadcast together, one per rank, and the cache of a pool's current gang.

The processes are kept for later calls. When one of them exits, the next call gets a new gang.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyfab.errors import HostLost, SkyfabError
from skyfab.inventory.host import Host
from skyfab.plugins.base import Elastic
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.rendezvous import Rendezvous, RendezvousFinder


class Member:
    """One rank, and the node and worker that run it."""

    __slots__ = ("_gang", "node", "rank", "shown_rank", "spec", "worker")

    def __init__(self, gang: Gang, node: Node, worker: str, spec: WorkerSpec, rank: int) -> None:
        self._gang = gang
        self.node = node
        self.worker = worker
        self.spec = spec
        self.rank = rank
        self.shown_rank = None if gang.spec.elastic_agents else rank
        """None in an elastic gang: there a worker has several ranks, which may change."""

    def exited(self) -> None:
        """Its process has exited: the next call gets a new gang."""
        self._gang.broken = True


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
                self.members.append(Member(self, node, f"{name}.{local}", worker, len(self.members)))

    def release(self) -> None:
        """Terminates its processes."""
        self.broken = True
        for member in self.members:
            try:
                member.node.release(member.worker)
            except SkyfabError:
                pass  # a lost host: there is nothing to release


class GangCache:
    """Keeps one gang while its processes run and its spec, which includes the project's code, stays the same."""

    def __init__(self, env: Callable[[Host], Mapping[str, str]], pool: str, finder: RendezvousFinder) -> None:
        """`env` returns the environment variables of a host's workers; `pool` is a unique name."""
        self._env = env
        self._pool = pool
        self._finder = finder
        self._gang: Gang | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def current(self, spec: GangSpec, *, job: str | None = None) -> Gang:
        """The gang for a call. Raises the error of a lost node.

        A call that is retried gets a new gang, with the `job` of its earlier attempts.
        """
        with self._lock:
            gang = self._gang
            if gang is not None and not gang.broken and gang.spec == spec:
                return gang
            if gang is not None:
                gang.release()  # nothing runs in it: a pool runs one broadcast at a time
            for node in spec.nodes:
                if node.lost is not None:
                    raise node.lost
            rendezvous = self._finder.arrange(spec.nodes)
            number = next(self._numbers)
            job = job or f"{self._pool}-{number}"
            gang = Gang(spec, rendezvous, self._env, name=f"gang{number}", job=job)
            before, self._gang = self._gang, gang
            known = [*(before.members if before is not None else ()), *gang.members]
            for node in {member.node for member in known}:  # output of the previous gang may still arrive
                node.members = {member.worker: member for member in known if member.node is node}
            return gang


def remaining(nodes: Sequence[Node], elastic: Elastic) -> list[Node]:
    """The nodes that are available for an elastic gang now. Raises HostLost if they are too few."""
    found = [node for node in nodes if node.lost is None]
    if len(found) < elastic.min_hosts:
        raise HostLost(
            f"{len(found)} of {len(nodes)} hosts are left, and elastic={elastic.min_hosts, elastic.max_hosts} needs"
            f" {elastic.min_hosts} at least"
        )
    return found[: elastic.max_hosts]


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
