"""A running Ray on hosts that have nothing of ours: tasks on all nodes, its token, a node that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from stage.ray_calls import MARK, connect, host_and_address, spread
from stage.ray_hosts import SMALL, assert_nothing_is_left, needs_ray, of_ray

import skyfab as sky
from skyfab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600), needs_ray]


@pytest.fixture(scope="module")
def hosts(hosts_of: Callable[..., list[sky.Host]]) -> list[sky.Host]:
    return hosts_of("openssh", 2, user="ada")


@pytest.fixture(scope="module")
def ray_pool(hosts: list[sky.Host]) -> Iterator[sky.Compute]:
    with sky.Compute(hosts, plugins=[sky.plugins.ray()], ui="none") as compute:
        yield compute


@pytest.fixture(scope="module")
def address(ray_pool: sky.Compute, lab: Lab) -> Iterator[str]:
    """That of a running Ray."""
    with ray_pool.ray(**SMALL) as address:
        yield address
    assert_nothing_is_left(lab)


def test_tasks_run_on_all_nodes_and_find_the_modules_of_the_project(
    ray_pool: sky.Compute, address: str, lab: Lab
) -> None:
    found = spread(2) >> ray_pool
    assert found == ({host.address for host in lab.hosts[:2]}, [1, 2, 3], MARK)
    assert address.rpartition(":")[0] == lab.hosts[0].address


def test_submit_runs_a_call_on_the_head_of_the_running_one(ray_pool: sky.Compute, address: str) -> None:
    assert ray_pool.ray().submit(host_and_address()) == (0, address)


def test_a_connection_without_the_token_is_refused(ray_pool: sky.Compute, address: str) -> None:
    said = ray_pool.submit(connect(), on="node2").result()
    assert "InvalidAuthToken" in said
    assert "connected" not in said.splitlines()


def test_a_second_one_on_the_pool_is_refused(ray_pool: sky.Compute, address: str) -> None:
    with pytest.raises(sky.UsageError, match="Ray is already running on this pool"), ray_pool.ray(**SMALL):
        pass


def test_another_one_of_the_same_user_is_refused_with_its_pid(hosts: list[sky.Host], address: str, lab: Lab) -> None:
    with (
        sky.Compute(hosts, plugins=[sky.plugins.ray()], ui="none") as other,
        pytest.raises(sky.HostUnfit, match="another Ray of this user is running") as raised,
        other.ray(**SMALL),
    ):
        pass
    assert raised.value.host == "node1"
    assert int(raised.value.message.rpartition(" ")[2]) in {process.pid for process in of_ray(lab.hosts[0])}


def test_tasks_go_on_without_a_node_that_is_killed(  # the last one: it takes a node away
    ray_pool: sky.Compute, address: str, lab: Lab
) -> None:
    (raylet,) = (one for one in of_ray(lab.hosts[1]) if one.cmdline[0].endswith("/raylet"))
    os.kill(raylet.outside, signal.SIGKILL)
    assert (spread(1) >> ray_pool) == ({lab.hosts[0].address}, [1, 2, 3], MARK)
