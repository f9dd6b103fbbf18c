"""Hosts on networks as people have them: a second one between them, forwarded ports, none at all."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from stage.labs import start

import skyfab as sky
from skyfab import plugins
from skyfab.lab import Lab

pytestmark = pytest.mark.lab


@sky.function
def summed() -> float:
    """What all ranks have together, by gloo; and it is from the others that it comes."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([sky.instance_info().rank + 1.0])
    dist.all_reduce(total)
    return float(total)


@sky.function
def place() -> tuple[str, str, str, str]:
    info = sky.instance_info()
    environment = (os.environ["MASTER_ADDR"], os.environ.get("GLOO_SOCKET_IFNAME", ""))
    return info.head_addr, info.peers[info.rank], *environment


def pool_of(lab: Lab, *, interface: str = "auto", **options: object) -> sky.Compute:
    text = lab.inventory.read_text()
    if interface != "auto":
        text = text.replace("[defaults]\n", f'[defaults]\ninterface = "{interface}"\n')
    path = lab.folder / f"inventory-{interface}.toml"
    path.write_text(text)
    return sky.Compute(inventory=path, ui="none", **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fast() -> Iterator[Lab]:
    """On eth0 hosts see this machine only, on fast0 each other."""
    with start(3, second_network=True, isolated=True, python=sys.executable) as lab:
        yield lab


@pytest.mark.slow
def test_hosts_meet_on_the_interface_that_the_inventory_names(fast: Lab) -> None:
    with pool_of(fast, interface="fast0", plugins=[plugins.torch()]) as compute:
        found = place() @ compute
        assert summed() @ compute == [6.0] * 3
    addresses = [host.addresses["fast0"] for host in fast.hosts]
    assert found == [(addresses[0], address, addresses[0], "fast0") for address in addresses]


@pytest.mark.slow
def test_hosts_find_the_network_between_them(fast: Lab) -> None:
    with pool_of(fast, plugins=[plugins.torch()]) as compute:
        assert summed() @ compute == [6.0] * 3
        assert {name for *_, name in place() @ compute} == {"fast0"}


def test_an_interface_that_no_host_has_is_told_at_once(fast: Lab) -> None:
    with pool_of(fast, interface="ib0", plugins=[plugins.torch()]) as compute:
        with pytest.raises(sky.PoolError) as raised:
            summed() @ compute
        assert {type(error) for error in raised.value.exceptions} == {sky.PeersUnreachable}
        assert "fast0" in str(raised.value.exceptions[0])


@pytest.fixture(scope="module")
def private() -> Iterator[Lab]:
    """As Vagrant's: forwarded ports, one address for all of them, and a private network."""
    with start(2, forwarded=True, second_network=True, python=sys.executable) as lab:
        yield lab


@pytest.mark.slow
def test_hosts_behind_forwarded_ports_meet_on_a_private_network(private: Lab) -> None:
    with pool_of(private, plugins=[plugins.torch()]) as compute:
        assert summed() @ compute == [3.0] * 2
    with pool_of(private) as compute:  # nothing is tried, and it is the same
        addresses = [host.addresses["fast0"] for host in private.hosts]
        assert place() @ compute == [(addresses[0], address, addresses[0], "fast0") for address in addresses]


@pytest.mark.slow
def test_hosts_meet_by_ipv6_where_they_have_nothing_else(private: Lab) -> None:
    for number, host in enumerate(private.hosts, 1):
        host.run(["ip", "address", "flush", "dev", "fast0"])
        host.run(["ip", "address", "add", f"fd53:4b::{number}/64", "dev", "fast0", "nodad"])
    try:
        with pool_of(private, plugins=[plugins.torch()]) as compute:
            assert summed() @ compute == [3.0] * 2
            assert (place() @ compute)[0][0] == "fd53:4b::1"
    finally:
        for host in private.hosts:
            host.run(["ip", "address", "flush", "dev", "fast0"])
            host.run(["ip", "address", "add", f"{host.addresses['fast0']}/24", "dev", "fast0"])


@pytest.fixture(scope="module")
def apart() -> Iterator[Lab]:
    """Forwarded ports, and no network between them."""
    with start(2, forwarded=True, python=sys.executable) as lab:
        yield lab


def test_hosts_without_a_network_between_them_run_what_needs_none(apart: Lab) -> None:
    with pool_of(apart) as compute:
        assert [info.rank for info in sky.function(sky.instance_info)() @ compute] == [0, 1]
        assert compute.map(abs, range(-10, 0)) == list(range(10, 0, -1))


def test_a_plugin_that_needs_a_network_says_so_at_once(apart: Lab) -> None:
    with pool_of(apart, plugins=[plugins.torch()]) as compute:
        began = time.monotonic()
        with pytest.raises(sky.PoolError) as raised:
            summed() @ compute
        assert time.monotonic() - began < 30, "torch's own patience is 60 s"
    for error in raised.value.exceptions:
        assert isinstance(error, sky.PeersUnreachable)
        assert "10.0.2.15" in error.message and "node1 and node2" in error.message
        assert error.hint


def test_a_script_runs_where_hosts_do_not_reach_each_other(
    apart: Lab, tmp_path: os.PathLike[str], skyfab: Callable[..., str]
) -> None:
    """One that was written for torchrun may connect to MASTER_ADDR; this one does not."""
    script = tmp_path / "hello.py"  # type: ignore[operator]
    script.write_text("import os\nprint('hello from', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    said = skyfab("run", f"--inventory={apart.inventory}", str(script))
    assert "hello from 0 of 2" in said and "hello from 1 of 2" in said
    assert "ranks may be unable to reach each other" in said and "10.0.2.15" in said


@pytest.fixture
def skyfab() -> Callable[..., str]:
    """Runs the command; what it printed on either stream."""
    import subprocess

    def run(*words: str) -> str:
        command = [sys.executable, "-c", "from skyfab.cli import main; main()", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run
