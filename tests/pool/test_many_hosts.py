"""Many hosts: logins that servers bear, files that a program may open, and pools of 16 and 64 hosts."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from stage.labs import start
from stage.spot import until

import skyfab as sky
from skyfab.errors import HostLost
from skyfab.lab import Lab
from skyfab.session.fanout import for_each_host
from skyfab.ssh.logins import Logins, ServerBusy, retry
from skyfab.ssh.openssh import explain, servers_of
from skyfab.ui.events import Event, Output

# ---- logins


def begin(logins: Logins, *servers: str) -> tuple[list[ExitStack], threading.Thread]:
    """A login that waits for its turn, on a thread; the list has it when it is there."""
    there: list[ExitStack] = []
    thread = threading.Thread(target=lambda: there.append(logins.turn(servers)))
    thread.start()
    return there, thread


def test_a_server_bears_so_many_logins_and_others_do_not_wait_for_it() -> None:
    logins = Logins(most=10, per_server=2)
    held = [logins.turn(["gateway 22", f"node{n} 22"]) for n in (1, 2)]
    third, waiting = begin(logins, "gateway 22", "node3 22")
    logins.turn(["elsewhere 22"]).close()
    assert not third
    held[0].close()
    held[0].close()  # twice is fine, and counts once
    waiting.join()
    assert len(third) == 1
    fourth, still = begin(logins, "gateway 22", "node4 22")
    assert not fourth
    held[1].close()
    still.join()


def test_a_server_that_turned_a_login_away_gets_fewer_at_a_time() -> None:
    logins = Logins(most=10, per_server=3)
    for _ in range(5):
        logins.turned_away(["node1 22"])
    first = logins.turn(["node1 22"])
    second, waiting = begin(logins, "node1 22")
    assert not second
    first.close()
    waiting.join()
    assert second, "one at a time, at least"


def test_a_program_has_so_many_logins_under_way() -> None:
    logins = Logins(most=2, per_server=8)
    held = [logins.turn([f"node{n} 22"]) for n in (1, 2)]
    third, waiting = begin(logins, "node3 22")
    logins.turn([]).close()  # this machine itself needs none
    assert not third
    held[0].close()
    waiting.join()
    assert third


def test_a_pool_that_is_closed_waits_for_no_turn() -> None:
    logins = Logins(most=1, per_server=1)
    held = logins.turn(["node1 22"])
    with pytest.raises(HostLost):
        logins.turn(["node1 22"], lambda: True)
    held.close()
    logins.turn(["node1 22"]).close()


def test_the_servers_on_the_way_are_those_of_the_jump_hosts_too() -> None:
    gateway = sky.Host(name="gateway", address="10.0.0.1", port=2222)
    inside = sky.Host(name="inside", address="10.0.0.2", jump="gateway")
    inventory = sky.Inventory(hosts={host.name: host for host in (gateway, inside)})
    assert servers_of(inside, inventory) == ("10.0.0.1 2222", "10.0.0.2 22")


def test_a_login_that_was_turned_away_is_tried_again() -> None:
    tried: list[int] = []

    def log_in() -> str:
        tried.append(1)
        if len(tried) < 3:
            raise ServerBusy("busy", host="node1")
        return "in"

    assert retry(log_in, lambda: False, [0.01, 0.01]) == "in"
    tried.clear()
    with pytest.raises(sky.Unreachable, match=r"busy \(tried 2 times\)"):
        retry(log_in, lambda: False, [0.01])
    tried.clear()
    with pytest.raises(ServerBusy):
        retry(log_in, lambda: True, [60.0])
    assert len(tried) == 1, "a pool that is closed does not try again"


def test_what_ssh_says_of_a_busy_server_is_known() -> None:
    for said in (
        "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.1 port 22\n",
        "ssh_exchange_identification: Connection closed by remote host\n",
    ):
        error = explain([sky.Host(name="node1", address="10.0.0.1")], 255, said, sky.Inventory(hosts={}))
        assert isinstance(error, ServerBusy)
        assert "MaxStartups" in str(error.hint)


@pytest.mark.parametrize("transport", ["openssh", "fabric"])
@pytest.mark.slow
def test_a_server_that_turns_logins_away_is_asked_again(
    namespaces: Lab, hosts_of: Callable[..., list[sky.Host]], transport: str
) -> None:
    """Ten names of one machine, whose sshd takes three at a time and hangs up on the others."""
    node = namespaces.hosts[3]
    before = node.path("/etc/ssh/sshd_config").read_text()
    host = hosts_of(transport, 4)[3]
    names = [replace(host, name=f"name{number}") for number in range(10)]
    try:
        node.path("/etc/ssh/sshd_config").write_text(before + "MaxStartups 3:100:3\n")
        node.reboot()
        with sky.Compute(names, heartbeat_timeout=60, ui="none") as compute:
            assert len({info.hostname for info in sky.function(sky.instance_info)() @ compute}) == 1
    finally:
        node.path("/etc/ssh/sshd_config").write_text(before)
        node.reboot()


# ---- what this machine has for them


def test_more_hosts_than_threads_take_turns() -> None:
    at_once: list[int] = []
    running = 0
    lock = threading.Lock()

    def work(item: int) -> int:
        nonlocal running
        with lock:
            running += 1
            at_once.append(running)
        time.sleep(0.002)
        with lock:
            running -= 1
        return item

    assert for_each_host(work, range(700)) == list(range(700))
    assert max(at_once) <= 256


# ---- pools


class Connected(sky.plugins.Plugin):
    """Stands for any plugin whose ranks connect to each other."""

    network = "needed"


@sky.function
def meet() -> int:
    """Every rank says hello at the head's port, and the head waits for all of them."""
    import socket

    info = sky.instance_info()
    if info.rank:
        for _ in range(600):
            try:
                with socket.create_connection((info.head_addr, info.head_port), 10) as connection:
                    return len(connection.recv(1))
            except ConnectionError:  # the head's process has begun, and its function has not
                time.sleep(0.1)
    with socket.create_server((info.head_addr, info.head_port), backlog=256) as listener:
        listener.settimeout(60)
        for _ in range(info.world_size - 1):
            connection, _ = listener.accept()
            with connection:
                connection.send(b"!")
    return 1


@sky.function
def say() -> None:
    print("rank", sky.instance_info().rank)


@sky.function
def values_of_rank(count: int) -> Iterator[tuple[int, int]]:
    for number in range(count):
        yield sky.instance_info().rank, number


@pytest.fixture
def many(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with start(request.param, python=sys.executable) as lab:
        yield lab


@pytest.mark.lab
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "many", [4, *(pytest.param(count, marks=pytest.mark.soak) for count in (16, 64))], indirect=True
)
@pytest.mark.slow
def test_a_pool_of_many_hosts_opens_calls_maps_prints_and_closes(many: Lab) -> None:
    count = len(many.hosts)
    lines: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Output):
            lines.append(event.text)

    # All hosts share the cores of this machine: one may have to wait for its turn longer than a real one would.
    with sky.Compute(inventory=many.inventory, plugins=[Connected()], heartbeat_timeout=60, ui="none") as compute:
        assert meet() @ compute == [1] * count
        assert compute.map(abs, range(-10_000, 0)) == list(range(10_000, 0, -1))
        found = list(sky.merge(*(values_of_rank(100) @ compute)))
        assert sorted(found) == [(rank, (rank, number)) for rank in range(count) for number in range(100)]
        assert [number for rank, (_, number) in found if rank == count - 1] == list(range(100))
        compute.events.subscribe(note)
        say() @ compute
        until(lambda: len(lines) == count)
        assert sorted(lines, key=_number) == [f"rank {rank}" for rank in range(count)]
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("skyfab-")]
        assert len(threads) <= count + 2
    until(lambda: not _busy(many))


def _busy(lab: Lab) -> list[str]:
    return [host.name for host in lab.hosts if any("skyfab" in " ".join(one.cmdline) for one in host.processes())]


def _number(line: str) -> int:
    found = re.search(r"\d+$", line)
    assert found
    return int(found[0])
