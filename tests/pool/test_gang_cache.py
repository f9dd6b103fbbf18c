"""Gangs without hosts: which processes they have, and when a gang is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stage.fakes import FakeNode

import skyfab as sky
from skyfab.plugins.base import Elastic
from skyfab.pool.gang import Gang, GangCache, GangSpec, remaining


def place(index: int, interface: str = "") -> Any:
    return SimpleNamespace(address=f"192.0.2.{index}", interface=interface)


def spec(nodes: list[FakeNode], ranks: tuple[int, ...], **options: Any) -> GangSpec:
    return GangSpec(nodes=tuple(nodes), ranks=ranks, **{"tree": "tree", **options})  # type: ignore[arg-type]


def gang_of(nodes: list[FakeNode], ranks: tuple[int, ...], interface: str = "", **options: Any) -> Gang:
    places = tuple(place(node.index, interface) for node in nodes)
    rendezvous: Any = SimpleNamespace(port=4242, addresses=places)
    return Gang(spec(nodes, ranks, **options), rendezvous, lambda host: {"OF": host.name}, name="gang1", job="job")


# ---- ranks


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
    nodes[0].is_gone = True
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
