"""The kinds of lab hosts: each is one argument of the lab, and is what real hosts are."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stage.labs import answers, greeting, needs_taps, ssh, start
from stage.spot import until

import skyfab as sky
from skyfab.errors import UsageError
from skyfab.lab import Lab, LabHost
from skyfab.lab.root import PATH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.lab


def reaches(host: LabHost, address: str) -> bool:
    """Whether a host gets an answer from the SSH server of another one at that address."""
    code = f"import socket; print(socket.create_connection(({address!r}, 22), 2).recv(4))"
    return host.run(["python3", "-c", code], check=False).stdout.strip() == "b'SSH-'"


def addresses_on(host: LabHost) -> dict[str, str]:
    """What the host itself says."""
    lines = host.run(["ip", "-4", "-brief", "address"]).stdout.splitlines()
    found = {line.split()[0].partition("@")[0]: line.split()[2].partition("/")[0] for line in lines}
    return {name: address for name, address in found.items() if name != "lo"}


# A second network


def test_hosts_have_a_second_network_that_this_machine_is_not_on() -> None:
    with start(2, second_network=True) as lab:
        first, second = lab.hosts
        assert list(first.addresses) == ["eth0", "fast0"]
        assert addresses_on(first) == first.addresses
        assert ssh(first, "echo $SSH_CONNECTION").split()[2] == first.address == first.addresses["eth0"]
        assert all(reaches(first, address) for address in second.addresses.values())
        ours = subprocess.run(["ip", "-brief", "address"], capture_output=True, text=True, check=True).stdout
        assert first.addresses["fast0"].rpartition(".")[0] not in ours
        first.cut("fast0")
        assert answers(first)
        assert not reaches(first, second.addresses["fast0"])
        first.restore("fast0")
        until(lambda: reaches(first, second.addresses["fast0"]))
        first.block(second)
        assert not any(reaches(first, address) for address in second.addresses.values())
        first.reboot()
        assert all(reaches(second, address) for address in first.addresses.values())


@pytest.mark.parametrize("second_network", [False, True])
def test_isolated_hosts_see_this_machine_and_each_other_only_on_a_second_network(second_network: bool) -> None:
    with start(2, isolated=True, second_network=second_network) as lab:
        first, second = lab.hosts
        second.reboot()
        assert all(answers(host) for host in lab.hosts)
        assert [reaches(first, address) for address in second.addresses.values()] == [False, True][: 1 + second_network]


# Behind forwarded ports


@pytest.fixture(scope="module")
def forwarded() -> Iterator[Lab]:
    with start(2, forwarded=True, second_network=True) as lab:
        yield lab


def test_hosts_behind_forwarded_ports_have_one_address_and_ports_of_this_machine(forwarded: Lab) -> None:
    first, second = forwarded.hosts
    assert (first.address, second.address) == ("127.0.0.1", "127.0.0.1")
    assert first.port != second.port
    for host in forwarded.hosts:
        assert ssh(host, "hostname").strip() == host.name
        assert ssh(host, "echo $SSH_CONNECTION").split()[::2] == ["10.0.2.2", "10.0.2.15"]
        assert addresses_on(host) == host.addresses
        assert host.run(["getent", "hosts", host.name]).stdout.split() == ["127.0.1.1", host.name]
    assert first.addresses["eth0"] == second.addresses["eth0"] == "10.0.2.15"
    assert reaches(first, second.addresses["fast0"])


def test_calls_reach_hosts_behind_forwarded_ports(forwarded: Lab) -> None:
    with sky.Compute("lab", inventory=forwarded.inventory, ui="none") as compute:
        assert compute.map(len, ["a" * 3_000_000, "bb"]) == [3_000_000, 2]
        assert [host.name for host in compute.hosts] == ["node1", "node2"]


@needs_taps
def test_a_host_behind_a_forwarded_port_can_be_delayed(forwarded: Lab) -> None:
    host = forwarded.hosts[0]
    assert greeting(host) < 0.5
    host.delay(500)
    assert greeting(host) >= 0.74
    host.delay(None)
    assert greeting(host) < 0.5


def test_a_cut_behind_a_forwarded_port_is_silence_and_a_reboot_keeps_the_port(forwarded: Lab) -> None:
    host = forwarded.hosts[0]
    host.cut()
    assert not answers(host)
    host.restore()
    until(lambda: answers(host))
    host.kill()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host.address, host.port), 5)
    host.reboot()
    assert answers(host)
    assert Lab.load(forwarded.folder) == forwarded


# Interpreters


def test_a_host_has_the_systems_own_python_and_nothing_of_this_programs() -> None:
    with start(1) as lab:
        host = lab.hosts[0]
        assert "python" not in tomllib.loads(lab.inventory.read_text())["hosts"]["node1"]
        same = shutil.which(f"python3.{sys.version_info.minor}", path=PATH)
        assert host.python == (same or shutil.which("python3", path=PATH))
        said = host.run([host.python, "-c", "import sys; print(sys.prefix, *sys.path)"]).stdout.split()
        assert said[0] != sys.prefix
        assert not any(path.startswith(sys.prefix) for path in said)
        listed = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
        assert host.run([host.python, "-c", listed]).stdout.split() == []
        assert not host.path(sys.executable).exists()


def test_a_host_without_python_has_none_that_a_shell_finds() -> None:
    with start(1, python="none") as lab:
        host = lab.hosts[0]
        assert host.python == ""
        names = [f"{name}{number}" for name in ("python", "pypy") for number in ("", 3, *(f"3.{n}" for n in range(20)))]
        assert ssh(host, f"for name in {' '.join(names)}; do command -v $name; done; true") == ""
        assert shutil.which("python3")  # here it still is


# Names and shells


def test_without_reverse_dns_addresses_have_no_names() -> None:
    with start(2, reverse_dns=False) as lab:
        first, second = lab.hosts
        code = f"import socket; print(socket.getnameinfo(({second.address!r}, 1), socket.NI_NAMEREQD))"
        assert "gaierror" in first.run([first.python, "-c", code], check=False).stderr
        assert first.run(["getent", "hosts", "node1"]).stdout.split() == ["127.0.1.1", "node1"]
        assert first.run(["getent", "hosts", "node2"], check=False).returncode != 0


def test_users_have_the_login_shells_that_they_are_given() -> None:
    with start(1, shells={"root": "/bin/dash", "ada": "/bin/sh"}) as lab:
        for user, shell in (("root", "/bin/dash"), ("ada", "/bin/sh")):
            assert ssh(lab.hosts[0], "echo $SHELL", user).strip() == shell
    with pytest.raises(UsageError, match="the host has no user 'eve'"):
        Lab.start(1, shells={"eve": "/bin/sh"})
    with pytest.raises(UsageError, match="no login shell at /no/shell"):
        Lab.start(1, shells={"root": "/no/shell"})


# Many of them


@pytest.mark.slow
def test_sixty_four_hosts_start_and_reach_each_other() -> None:
    """More neighbours than the kernel's table has room for by default."""
    with start(64) as lab:
        others = [host.address for host in lab.hosts]
        code = f"""
import socket
for address in {others!r}:
    try:
        socket.create_connection((address, 9), 20)
    except ConnectionRefusedError:  # it answers
        pass
"""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda host: host.run([host.python, "-I", "-S", "-c", code]), lab.hosts))


# Loopback


@pytest.mark.parametrize("kind", [{"isolated": True}, {"reverse_dns": False}, {"shells": {"root": "/bin/sh"}}])
def test_loopback_hosts_have_no_kinds(kind: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="loopback hosts do not support this"):
        Lab.start(1, kind="loopback", **kind)
