"""Gangs: all ranks of all hosts, ready to meet before a function's first line; and what happens when one fails."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stage.fakes import FakeNode
from stage.remote import leave
from stage.spot import Spot, until
from stage.threads import at_once

import skyfab as sky
from skyfab.lab import Lab
from skyfab.pool.addresses import Address
from skyfab.pool.broadcast import Gang, GangSpec
from skyfab.pool.rendezvous import Rendezvous

OpenPool = Callable[..., sky.Compute]


@sky.function
def environment() -> dict[str, str]:
    return dict(os.environ)


@sky.function
def listens() -> tuple[int, bool]:
    """The head's port, and whether the head can bind it now."""
    info = sky.instance_info()
    if info.rank:
        return info.head_port, True
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", info.head_port))
        return info.head_port, True


# ---- members


def gang(elastic: bool = False) -> Gang:
    nodes: Any = (FakeNode(0), FakeNode(1, gpus=(1, 3)))
    spec = GangSpec(nodes=nodes, ranks=(1, 2), tree="tree", attempt=2, elastic_agents=elastic)
    meeting = Rendezvous(4000, (Address("192.0.2.1", "eth0"), Address("192.0.2.2")))
    return Gang(spec, meeting, lambda host: {"OF": host.name}, name="gang1", job="job")


def test_each_rank_has_a_worker_and_knows_its_place() -> None:
    members = gang().members
    assert [(one.node.name, one.worker, one.rank, one.shown_rank, one.spec.port) for one in members] == [
        ("node0", "gang1.0", 0, 0, 4000),
        ("node1", "gang1.0", 1, 1, 0),
        ("node1", "gang1.1", 2, 2, 0),
    ]
    first, _, last = (one.spec.env for one in members)
    assert (first["OF"], first["GLOO_SOCKET_IFNAME"], first["NCCL_SOCKET_IFNAME"]) == ("node0", "eth0", "eth0")
    assert first.keys().isdisjoint({"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}), "it may use all of its host"
    expected = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "4000", "WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "1"}
    expected |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "CUDA_VISIBLE_DEVICES": "1,3", "OMP_NUM_THREADS": "1"}
    expected |= {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert last.items() >= expected.items()
    assert "GLOO_SOCKET_IFNAME" not in last
    assert [(one.rank, one.shown_rank) for one in gang(elastic=True).members] == [(0, None), (1, None)]


# ---- meeting


@pytest.mark.slow
def test_two_gangs_on_one_host_never_share_a_port(open_pool: OpenPool) -> None:
    pools = [open_pool("local", ranks=2) for _ in range(4)]
    found = at_once(lambda pool: listens() @ pool, pools)
    assert len({port for ranks in found for port, _ in ranks}) == len(pools)


class Connected(sky.plugins.Plugin):
    """Stands for any plugin whose ranks connect to each other."""

    network = "needed"


def test_hosts_that_cannot_reach_each_other_are_told_before_a_plugin_waits(
    open_pool: OpenPool, namespaces: Lab
) -> None:
    first, second = namespaces.hosts[:2]
    pool = open_pool("openssh", count=2, plugins=[Connected()])
    second.block(first)
    try:
        with pytest.raises(sky.PeersUnreachable, match=f"it cannot connect to node1 at {first.address}") as raised:
            environment() @ pool
    finally:
        second.unblock(first)
    assert raised.value.host == "node2"
    assert "iptables" in str(raised.value.hint)
    assert len(environment() @ pool) == 2, "and it works once they do"


def test_hosts_that_only_this_machine_reaches_work_together(open_pool: OpenPool, namespaces: Lab) -> None:
    """In different places, say. Nothing between them is needed, tried or waited for."""
    first, second = namespaces.hosts[:2]
    first.block(second)
    second.block(first)
    try:
        found = sky.function(sky.instance_info)() @ open_pool("openssh", count=2)
    finally:
        first.unblock(second)
        second.unblock(first)
    assert [info.rank for info in found] == [0, 1]


def test_a_job_has_a_name_that_no_other_has(open_pool: OpenPool) -> None:
    """A folder for checkpoints may be named by it. What is tried again finds what it has saved."""

    @sky.function(retries=1)
    def name() -> str:
        info = sky.instance_info()
        if not info.attempt:
            raise ValueError(info.job_id)
        return f"{info.attempt} {info.job_id}"

    @sky.function
    def solo() -> str:
        return sky.instance_info().job_id

    pools = [open_pool(ranks=2) for _ in range(2)]
    found = [name() @ pool for pool in pools]
    assert all(one == other for one, other in found)
    (one, _), (other, _) = found
    assert one != other
    assert all(ranks[0].startswith(f"1 {solo() >> pool}-") for pool, ranks in zip(pools, found, strict=True))


# ---- failure


@pytest.mark.parametrize("how", ["raise", "die"])
def test_ranks_that_wait_for_one_that_failed_are_stopped(
    open_pool: OpenPool, spot: Spot, runs_on: Callable[[str, int], bool], how: str
) -> None:
    @sky.function
    def uneven() -> None:
        if sky.instance_info().rank == 1:
            if how == "die":
                os._exit(9)
            raise ValueError("only here")
        leave(path, str(os.getpid()))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # stuck, and deaf
        time.sleep(600)

    path = spot / "pid"
    pool = open_pool("openssh", count=2, ranks=1)
    with pytest.raises(sky.BroadcastError) as raised:
        uneven() @ pool
    (first,) = raised.value.exceptions
    if how == "die":
        assert isinstance(first, sky.WorkerDied)
        assert (first.exitcode, first.rank, first.host) == (9, 1, pool.hosts[1].name)
        assert f"{pool.hosts[1].name}[1]" in str(first)
    else:
        assert isinstance(first, ValueError)
    stopped = raised.value.results[0]
    assert isinstance(stopped, sky.CallCancelled)
    assert (stopped.rank, stopped.host) == (0, pool.hosts[0].name)
    for machine, pid in spot.notes("pid").items():
        until(lambda machine=machine, pid=pid: not runs_on(machine, int(pid)), "the end of the rank that waited")
    assert [info.rank for info in sky.function(sky.instance_info)() @ pool] == [0, 1], "the pool goes on"


def test_a_rank_that_is_stopped_may_say_goodbye(open_pool: OpenPool, spot: Spot) -> None:
    mark = spot / "saved"

    @sky.function
    def train() -> None:
        def save(*_: object) -> None:
            Path(mark).write_text("checkpoint")
            os._exit(0)

        if sky.instance_info().rank == 1:
            raise ValueError("here")
        signal.signal(signal.SIGTERM, save)
        time.sleep(600)

    with pytest.raises(sky.BroadcastError):
        train() @ open_pool("local", count=2)
    assert Path(mark).read_text() == "checkpoint"
