"""Gangs without hosts: which process gets which rank and variables, and when a gang is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import skyfab as sky
from skyfab.plugins.base import Elastic
from skyfab.pool.gang import Gang, GangCache, GangSpec, remaining


class FakeNode:
    def __init__(self, index: int, gpus: Any = "auto") -> None:
        self.index = index
        self.host = sky.Host(name=f"node{index}", gpus=gpus)
        self.agent = SimpleNamespace(hostname=f"box{index}")
        self.gpus = (0, 1)
        self.lost: Exception | None = None
        self.released: list[str] = []
        self.members: dict[str, Any] = {}

    def release(self, worker: str) -> None:
        if self.lost is not None:
            raise self.lost
        self.released.append(worker)


def place(index: int, interface: str = "") -> Any:
    return SimpleNamespace(address=f"192.0.2.{index}", interface=interface)


def spec(nodes: list[FakeNode], ranks: tuple[int, ...], **options: Any) -> GangSpec:
    return GangSpec(nodes=tuple(nodes), ranks=ranks, **{"tree": "tree", **options})  # type: ignore[arg-type]


def gang_of(nodes: list[FakeNode], ranks: tuple[int, ...], interface: str = "", **options: Any) -> Gang:
    places = tuple(place(node.index, interface) for node in nodes)
    rendezvous: Any = SimpleNamespace(port=4242, addresses=places)
    return Gang(spec(nodes, ranks, **options), rendezvous, lambda host: {"OF": host.name}, name="gang1", job="job")


# ---- ranks


def test_ranks_count_over_all_hosts() -> None:
    gang = gang_of([FakeNode(0), FakeNode(1)], (2, 1), attempt=3)
    assert [(member.node.index, member.worker, member.rank) for member in gang.members] == [
        *((0, "gang1.0", 0), (0, "gang1.1", 1), (1, "gang1.0", 2))
    ]
    common = {
        "total_nodes": 2,
        "world_size": 3,
        "head_addr": "192.0.2.0",
        "head_port": 4242,
        "total_accelerators": 4,
        "peers": ["192.0.2.0", "192.0.2.1"],
        "job_id": "job",
        "attempt": 3,
        "accelerators": 2,
    }
    assert [dict(member.spec.info) for member in gang.members] == [
        {**common, "node": 0, "rank": 0, "local_rank": 0, "local_world_size": 2, "hostname": "box0"},
        {**common, "node": 0, "rank": 1, "local_rank": 1, "local_world_size": 2, "hostname": "box0"},
        {**common, "node": 1, "rank": 2, "local_rank": 0, "local_world_size": 1, "hostname": "box1"},
    ]
    assert [member.spec.tree for member in gang.members] == ["tree"] * 3
    assert not gang.broken


def test_the_first_rank_gets_the_port_that_its_host_holds() -> None:
    gang = gang_of([FakeNode(0), FakeNode(1)], (2, 1))
    assert [member.spec.port for member in gang.members] == [4242, 0, 0]


def test_variables_are_those_of_torchrun() -> None:
    gang = gang_of([FakeNode(0), FakeNode(1)], (2, 1), interface="eth1", attempt=1)
    assert dict(gang.members[1].spec.env) == {
        "MASTER_ADDR": "192.0.2.0",
        "MASTER_PORT": "4242",
        "WORLD_SIZE": "3",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "3",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "eth1",
        "OF": "node0",
    }


def test_a_rank_alone_on_its_host_may_use_all_cores_and_named_gpus() -> None:
    env = gang_of([FakeNode(0, gpus=(1, 3))], (1,)).members[0].spec.env
    assert "OMP_NUM_THREADS" not in env
    assert "GLOO_SOCKET_IFNAME" not in env
    assert env["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_an_elastic_host_has_one_process_for_all_its_ranks() -> None:
    gang = gang_of([FakeNode(0), FakeNode(1)], (2, 2), elastic_agents=True)
    assert [member.worker for member in gang.members] == ["gang1.0", "gang1.0"]
    assert gang.members[1].spec.info["world_size"] == 4


def test_releasing_a_gang_ends_its_processes_and_minds_no_lost_host() -> None:
    nodes = [FakeNode(0), FakeNode(1)]
    gang = gang_of(nodes, (1, 2))
    nodes[0].lost = sky.HostLost("gone", host="node0")
    gang.release()
    assert gang.broken
    assert nodes[1].released == ["gang1.0", "gang1.1"]


# ---- the gang that is kept


class FakeFinder:
    def __init__(self) -> None:
        self.asked = 0

    def arrange(self, nodes: Any) -> Any:
        self.asked += 1
        return SimpleNamespace(port=4242, addresses=tuple(place(node.index) for node in nodes))


@pytest.fixture
def nodes() -> list[FakeNode]:
    return [FakeNode(0), FakeNode(1)]


@pytest.fixture
def cache() -> GangCache:
    return GangCache(lambda node: {}, "pool", FakeFinder())  # type: ignore[arg-type]


def test_a_gang_is_kept_while_it_is_what_is_wanted(cache: GangCache, nodes: list[FakeNode]) -> None:
    first = cache.current(spec(nodes, (1, 1)))
    assert cache.current(spec(nodes, (1, 1))) is first
    assert first.job == "pool-1"
    assert nodes[0].released == []
    other = cache.current(spec(nodes, (1, 1), tree="changed"))
    assert other is not first
    assert first.broken
    assert nodes[0].released == ["gang1.0"]
    assert other.members[0].worker == "gang2.0"
    assert other.job == "pool-2"


def test_a_broken_gang_is_replaced(cache: GangCache, nodes: list[FakeNode]) -> None:
    first = cache.current(spec(nodes, (1, 1)))
    first.broken = True
    assert cache.current(spec(nodes, (1, 1)), job="the same job").job == "the same job"


def test_there_is_no_gang_with_a_lost_host(cache: GangCache, nodes: list[FakeNode]) -> None:
    nodes[1].lost = sky.HostLost("gone", host="node1")
    with pytest.raises(sky.HostLost, match="gone"):
        cache.current(spec(nodes, (1, 1)))


def test_a_gang_is_replaced_after_the_exit_of_a_member(cache: GangCache, nodes: list[FakeNode]) -> None:
    gang = cache.current(spec(nodes, (2, 1)))
    assert sorted(nodes[0].members) == ["gang1.0", "gang1.1"]
    assert not gang.broken
    nodes[0].members["gang1.1"].exited()
    assert gang.broken
    assert cache.current(spec(nodes, (2, 1))) is not gang


def test_output_has_the_rank_of_its_process_also_just_after_its_gang(cache: GangCache, nodes: list[FakeNode]) -> None:
    for number in (1, 2, 3):
        cache.current(spec(nodes, (2, 1))).broken = True
        assert nodes[1].members[f"gang{number}.0"].shown_rank == 2
    assert nodes[0].members["gang2.1"].shown_rank == 1
    assert "gang1.1" not in nodes[0].members


def test_elastic_processes_have_no_rank_of_their_own(cache: GangCache, nodes: list[FakeNode]) -> None:
    cache.current(spec(nodes, (2, 2), elastic_agents=True))
    assert nodes[0].members["gang1.0"].shown_rank is None


def test_an_elastic_gang_takes_the_hosts_that_are_left_within_its_limits() -> None:
    nodes: Any = [FakeNode(index) for index in range(4)]
    elastic = Elastic(min_hosts=2, max_hosts=3, max_restarts=1)
    assert remaining(nodes, elastic) == nodes[:3]
    nodes[0].lost = nodes[1].lost = sky.HostLost("gone")
    assert remaining(nodes, elastic) == nodes[2:]
    nodes[2].lost = sky.HostLost("gone")
    with pytest.raises(sky.HostLost, match="1 of 4 hosts"):
        remaining(nodes, elastic)
