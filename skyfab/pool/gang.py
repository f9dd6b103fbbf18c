"""Gangs: the workers that run a broadcast together, one per rank.

The processes are kept for later calls. When one of them exits, the next call gets a new gang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyfab.errors import SkyfabError
from skyfab.inventory.host import Host
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.rendezvous import Rendezvous


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
