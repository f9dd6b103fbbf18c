"""Ray on hosts that have nothing of ours: what is refused, and that nothing stays."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stage.ray_calls import host_and_address
from stage.ray_hosts import SMALL, assert_nothing_is_left, needs_ray, of_ray

import skyfab as sky
from skyfab.lab import Lab

PROGRAM = f"""
import sys
from dataclasses import replace

import skyfab as sky

found = list(sky.Inventory.of(sys.argv[1]).hosts.values())[:2]
with sky.Compute([replace(host, user="ada") for host in found], plugins=[sky.plugins.ray()], ui="none") as compute:
    with compute.ray(**{SMALL}):
        print("ready", flush=True)
        sys.stdin.read()
"""

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hosts(hosts_of: Callable[..., list[sky.Host]]) -> list[sky.Host]:
    return hosts_of("openssh", 2, user="ada")


@pytest.fixture(scope="module")
def ray_pool(hosts: list[sky.Host]) -> Iterator[sky.Compute]:
    with sky.Compute(hosts, plugins=[sky.plugins.ray()], ui="none") as compute:
        yield compute


@needs_ray
def test_it_ends_with_its_block(ray_pool: sky.Compute, lab: Lab) -> None:
    """One on two hosts, and one that a call alone has started, on one host."""
    with ray_pool.ray(**SMALL) as address:
        assert host_and_address() >> ray_pool == (0, address)
    assert_nothing_is_left(lab)
    assert host_and_address() >> ray_pool == (0, None)
    with sky.Compute(ray_pool.selected[:1], plugins=[sky.plugins.ray()], ui="none") as compute:
        node, found = compute.ray(**SMALL).submit(host_and_address())
        assert node == 0
        assert found is not None
        assert_nothing_is_left(lab)


@needs_ray
def test_nothing_is_left_of_a_program_that_is_killed(hosts: list[sky.Host], lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    argv = [sys.executable, str(path), str(lab.inventory)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        assert all(map(of_ray, lab.hosts[:2]))
        program.kill()
    deadline = time.monotonic() + 60
    while any(map(of_ray, lab.hosts)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert_nothing_is_left(lab)


# ---- what is refused


@needs_ray
def test_hosts_that_do_not_reach_each_other_are_named(ray_pool: sky.Compute, namespaces: Lab) -> None:
    first, second = namespaces.hosts[:2]
    first.block(second)
    try:
        with pytest.raises(sky.PeersUnreachable, match="cannot connect to node") as raised, ray_pool.ray(**SMALL):
            pass
    finally:
        first.unblock(second)
    assert raised.value.host in ("node1", "node2")
    assert_nothing_is_left(namespaces)


def test_a_host_without_ray_says_so(hosts: list[sky.Host], lab: Lab) -> None:
    image = sky.Image(python=lab.hosts[0].python or sys.executable)
    with (
        sky.Compute(hosts[:1], image=image, plugins=[sky.plugins.ray()], ui="none") as compute,
        pytest.raises(sky.HostUnfit, match="Ray is not installed for /") as raised,
        compute.ray(),
    ):
        pass
    assert raised.value.host == "node1"
    assert str(raised.value.hint).endswith(f": uv pip install --python={image.python} ray"), (
        "the plugin is in use already"
    )
