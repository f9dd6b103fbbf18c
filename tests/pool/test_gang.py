"""GangCache: all ranks of all hosts, ready to meet before a function's first line; and what happens when one fails."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from stage.spot import Spot
from stage.threads import at_once

import skyfab as sky
from skyfab.lab import Lab

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


# ---- meeting


def test_a_port_is_bound_until_the_function_may_have_it(open_pool: OpenPool) -> None:
    pool = open_pool("local", ranks=2)
    (port, bound), (same, _) = listens() @ pool
    assert port == same > 0
    assert bound


@pytest.mark.slow
def test_two_gangs_on_one_host_never_share_a_port(open_pool: OpenPool) -> None:
    pools = [open_pool("local", ranks=2) for _ in range(4)]
    found = at_once(lambda pool: listens() @ pool, pools)
    assert len({port for ranks in found for port, _ in ranks}) == len(pools)


def test_ranks_of_several_hosts_know_the_interface_between_them(open_pool: OpenPool, namespaces: Lab) -> None:
    for env in environment() @ open_pool("openssh", count=2):
        assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"]
        assert env["GLOO_SOCKET_IFNAME"] not in ("", "lo")


def test_an_interface_can_be_named(open_pool: OpenPool, namespaces: Lab) -> None:
    (env,) = environment() @ open_pool("openssh", host={"interface": "lo"})
    assert env["GLOO_SOCKET_IFNAME"] == "lo"


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


@pytest.mark.parametrize("retries", [0, 1])
def test_a_job_has_a_name_that_no_other_has(open_pool: OpenPool, retries: int) -> None:
    """A folder for checkpoints may be named by it. What is tried again finds what it has saved."""

    @sky.function(retries=retries)
    def name() -> str:
        info = sky.instance_info()
        if info.attempt < retries:
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
    assert all(ranks[0].startswith(f"{retries} {solo() >> pool}-") for pool, ranks in zip(pools, found, strict=True))


def test_hosts_may_have_different_numbers_of_ranks(hosts_of: Callable[..., list[sky.Host]]) -> None:
    one, two = hosts_of("local", 2)
    hosts = [replace(one, gpus=(0, 3)), replace(two, gpus=(1,))]
    with sky.Compute(hosts, ui="none") as pool:
        found = environment() @ pool
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    assert [[env[name] for name in names] for env in found] == [
        ["0", "0", "2", "0", "3", "0,3"],
        ["1", "1", "2", "0", "3", "0,3"],
        ["2", "0", "1", "1", "3", "1"],
    ]


# ---- failure


@pytest.mark.parametrize("transport", ["local", "openssh"])
def test_ranks_that_wait_for_one_that_failed_are_stopped(open_pool: OpenPool, transport: str) -> None:
    @sky.function
    def uneven() -> None:
        if sky.instance_info().rank == 1:
            raise ValueError("only here")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # stuck, and deaf
        time.sleep(600)

    pool = open_pool(transport, count=2, ranks=1)
    with pytest.raises(sky.BroadcastError) as raised:
        uneven() @ pool
    assert isinstance(raised.value.exceptions[0], ValueError)
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


def test_a_call_is_started_again_as_often_as_it_says(open_pool: OpenPool) -> None:
    @sky.function(retries=2)
    def third_time() -> int:
        attempt = sky.instance_info().attempt
        if attempt < 2 and sky.instance_info().rank == 1:
            os._exit(3)
        return attempt

    pool = open_pool("local", ranks=2)
    assert third_time() @ pool == [2, 2]
    assert [info.attempt for info in sky.function(sky.instance_info)() @ pool] == [0, 0]


def test_a_call_that_fails_every_time_raises_its_last_failure(open_pool: OpenPool) -> None:
    @sky.function(retries=1)
    def never() -> None:
        raise ValueError(f"attempt {sky.instance_info().attempt}")

    with pytest.raises(sky.BroadcastError) as raised:
        never() @ open_pool("local", ranks=2)
    assert str(raised.value.exceptions[0]) == "attempt 1"


def test_what_all_ranks_say_alike_is_said_once(open_pool: Callable[..., sky.Compute]) -> None:
    def fail() -> None:
        rank = sky.instance_info().rank
        raise ValueError("alike") if rank else KeyError("other")

    with pytest.raises(sky.BroadcastError) as raised:
        sky.function(fail)() @ open_pool(ranks=3)
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("in fail\n") == 2
    assert text.count("[the traceback is that of here1[") == 1
    assert {str(failure.__cause__).splitlines()[0] for failure in raised.value.exceptions} == {
        f"on here1[{rank}]" for rank in range(3)
    }
