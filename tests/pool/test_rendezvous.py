"""Rendezvouses: at which address hosts find each other, and what is said when they cannot.

A network is a table here: who is connected to by whom, at which address. Real ones are in test_networks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest

from skyfab.errors import PeersUnreachable, PoolError, ProtocolError
from skyfab.host.agent.poller import READ, Poller
from skyfab.host.agent.ports import PeerProbe, Ports
from skyfab.pool.addresses import Address, Candidates
from skyfab.pool.rendezvous import RendezvousFinder, strongest_need
from skyfab.protocol import messages
from skyfab.ui.events import Events


class Wires:
    """Who reaches whom: all, but those who are `cut`, a host and an address each."""

    def __init__(self) -> None:
        self.cut: set[tuple[str, str]] = set()
        self.late: set[str] = set()
        """Hosts that miss everything the first time."""
        self.probes = 0
        self.questions: list[tuple[str, str]] = []
        self.at: dict[str, str] = {}
        """Where an address leads: to the host of that name, or to another machine."""
        self.own: dict[tuple[str, str], str] = {}
        """The address from which a host connects to another's."""


class FakeSession:
    """A host that answers at once, as its wires allow."""

    def __init__(self, name: str, wires: Wires) -> None:
        self.name = name
        self.wires = wires
        self.word = ""

    def send(self, message: Any) -> int:
        self.wires.questions.append((self.name, message.op))
        return 1

    def ask(self, message: Any) -> Any:
        self.wires.questions.append((self.name, message.op))
        return self._answer(message)

    def _answer(self, message: Any) -> Any:
        if isinstance(message, messages.Listen):
            return messages.Done(text="4000")
        assert isinstance(message, messages.ProbePeers)
        late = self.name in self.wires.late
        self.wires.late.discard(self.name)
        found = []
        for address, port, word in message.peers:
            assert port == "4000" and len(word) == 32
            self.wires.probes += 1
            cut = late or (self.name, address) in self.wires.cut or address not in self.wires.at
            own = self.wires.own.get((self.name, address), f"10.0.0.{self.name.removeprefix('node')}")
            found.append(["no response", ""] if cut else ["", own])
        return messages.PeersProbed(found=found)


Make = Callable[..., Any]


@pytest.fixture
def wires() -> Wires:
    return Wires()


@pytest.fixture
def host(wires: Wires) -> Make:
    """``host(1, "eth0 10.0.0.1/24")``: a node that was reached at its first address, or as `reached` says."""

    def make(number: int, *told: str, reached: str = "", interface: str = "auto", network: str = "") -> Any:
        name = f"node{number}"
        addresses = [pair.split() for pair in told]
        for _, address in addresses:
            wires.at[address.partition("/")[0]] = name
        agent = messages.AgentHello(
            protocol=1,
            received=0,
            python="3.11",
            hostname=name,
            address=reached or addresses[0][1].partition("/")[0],
            addresses=addresses,
            network=network or name,
            gpus=0,
            platform="linux",
            pid=1,
            executable="python",
        )
        about = SimpleNamespace(interface=interface)
        return _Node(name=name, index=number, host=about, agent=agent, session=FakeSession(name, wires))

    return make


class _Node(SimpleNamespace):
    __hash__ = object.__hash__


def places(nodes: Sequence[Any]) -> list[str]:
    return [str(place) for place in Candidates(nodes).likely()]


# ---- what can be told without trying


def test_hosts_meet_where_this_machine_reaches_them(host: Make) -> None:
    nodes = [host(n, "docker0 172.17.0.1/16", f"eth0 10.0.0.{n}/24", reached=f"10.0.0.{n}") for n in (1, 2)]
    assert places(nodes) == ["10.0.0.1 (eth0)", "10.0.0.2 (eth0)"]


def test_hosts_behind_forwarded_ports_meet_on_their_private_network(host: Make) -> None:
    """As Vagrant's on VirtualBox: all of them are 10.0.2.15 to whoever logs in."""
    nodes = [
        host(1, "eth0 10.0.2.15/24", "eth1 192.168.56.11/24"),
        host(2, "eth0 10.0.2.15/24", "virbr0 192.168.122.1/24", "eth1 192.168.56.12/24"),
    ]
    assert places(nodes) == ["192.168.56.11 (eth1)", "192.168.56.12 (eth1)"]


def test_loopback_is_no_place_to_meet(host: Make) -> None:
    nodes = [host(n, f"eth0 10.0.0.{n}/24", reached="127.0.0.1") for n in (1, 2)]
    assert places(nodes) == ["10.0.0.1 (eth0)", "10.0.0.2 (eth0)"]


def test_the_interface_that_is_named_is_where_they_meet(host: Make) -> None:
    told = [(f"eth0 10.0.0.{n}/24", f"fast0 10.1.0.{n}/24") for n in (1, 2, 3)]
    named = [host(n, *two, interface="fast0") for n, two in enumerate(told, 1)]
    assert places(named) == [f"10.1.0.{n} (fast0)" for n in (1, 2, 3)]
    two_of_them = [host(1, *told[0]), *named[1:]]
    assert places(two_of_them) == [f"10.1.0.{n} (fast0)" for n in (1, 2, 3)], "the first follows the others"


def test_two_names_of_one_machine_share_its_addresses(host: Make) -> None:
    one, same = (host(n, "eth0 10.0.0.1/24", reached="127.0.0.1", network="boot") for n in (1, 2))
    assert places([one, same]) == ["127.0.0.1", "127.0.0.1"]
    assert places([one, same, host(3, "eth0 10.0.0.3/24")]) == [f"10.0.0.{n} (eth0)" for n in (1, 1, 3)]


def test_an_ipv6_network_will_do(host: Make) -> None:
    nodes = [host(n, "eth0 10.0.2.15/24", f"eth1 fd00::{n}/64", reached="10.0.2.15") for n in (1, 2)]
    assert places(nodes) == ["fd00::1 (eth1)", "fd00::2 (eth1)"]
    by_link = [host(n, f"eth0 10.0.0.{n}/24", reached=f"fe80::{n}%eth0") for n in (1, 2)]
    assert places(by_link) == ["10.0.0.1 (eth0)", "10.0.0.2 (eth0)"]


def test_a_host_faces_another_with_an_address_of_the_same_kind(host: Make) -> None:
    nodes = [host(1, "eth0 10.0.0.1/24", "eth1 fd00::1/64"), host(2, "eth0 10.0.0.2/24")]
    found = Candidates(nodes)
    assert found.facing(nodes[0], Address("fd00::9"), "192.0.2.1").address == "fd00::1", "that of its own is unknown"
    assert found.facing(nodes[0], Address("10.0.0.9"), "192.0.2.1").address == "10.0.0.1"
    assert found.facing(nodes[0], Address("10.0.0.9"), "fd00::1").address == "fd00::1", "the one that it connects from"
    assert found.facing(nodes[1], Address("fd00::9"), "192.0.2.1").address == "10.0.0.2", "it has no other"


def test_without_any_network_the_address_of_the_login_stands_there(host: Make) -> None:
    assert places([host(n, "eth0 10.0.2.15/24") for n in (1, 2)]) == ["10.0.2.15", "10.0.2.15"]


@pytest.mark.parametrize(
    ("interface", "address"),
    [("eth0", "10.0.0.1; rm -rf ~"), ("eth0", "10.0.0.1/24/24"), ("e th", "10.0.0.1/24"), ("$(x)", "10.0.0.1/24")],
)
def test_what_is_no_address_is_refused(host: Make, interface: str, address: str) -> None:
    """It goes to other hosts, and into hints that people paste into a shell."""
    node = host(1, "eth0 10.0.0.1/24")
    node.agent.addresses[:] = [[interface, address]]
    with pytest.raises(ProtocolError):
        Candidates([node])
    liar = host(2, "eth0 10.0.0.2/24", reached="10.0.0.2 -j ACCEPT; reboot")
    with pytest.raises(ProtocolError):
        Candidates([liar])


# ---- what is found by trying


def test_the_work_grows_with_the_number_of_hosts(host: Make, wires: Wires) -> None:
    nodes = [host(n, f"eth0 10.0.0.{n}/16") for n in range(1, 65)]
    rendezvous = RendezvousFinder("needed").arrange(nodes)
    assert [place.address for place in rendezvous.addresses] == [f"10.0.0.{n}" for n in range(1, 65)]
    assert wires.probes <= 3 * len(nodes)


@pytest.mark.parametrize("need", ["unused", "wanted", "needed"])
def test_the_strongest_need_of_the_plugins_decides(need: str) -> None:
    weaker = ["unused", "wanted", "needed"][: ["unused", "wanted", "needed"].index(need)]
    plugins: list[Any] = [SimpleNamespace(network=each) for each in (*weaker, need, *weaker)]
    assert strongest_need(plugins) == need


def test_nothing_is_tried_where_no_plugin_needs_it(host: Make, wires: Wires) -> None:
    nodes = [host(n, f"eth0 10.0.0.{n}/24") for n in (1, 2)]
    wires.cut = {("node1", "10.0.0.2"), ("node2", "10.0.0.1")}
    assert RendezvousFinder().arrange(nodes).port == 4000
    assert not wires.probes


def test_one_that_is_late_gets_more_time(host: Make, wires: Wires) -> None:
    nodes = [host(n, f"eth0 10.0.0.{n}/24") for n in (1, 2, 3)]
    wires.late = {"node3"}
    assert len(RendezvousFinder("needed").arrange(nodes).addresses) == 3


def test_the_network_that_all_reach_is_found(host: Make, wires: Wires) -> None:
    """Nobody named it, and logins come through another one."""
    nodes = [host(n, f"eth0 10.0.0.{n}/24", f"fast0 10.1.0.{n}/24") for n in (1, 2, 3)]
    wires.cut = {(f"node{one}", f"10.0.0.{two}") for one in (1, 2, 3) for two in (1, 2, 3) if one != two}
    wires.own = {(f"node{n}", "10.1.0.1"): f"10.1.0.{n}" for n in (2, 3)}
    assert [str(place) for place in RendezvousFinder("needed").arrange(nodes).addresses] == [
        f"10.1.0.{n} (fast0)" for n in (1, 2, 3)
    ]


def test_who_cannot_reach_whom_is_said(host: Make, wires: Wires) -> None:
    nodes = [host(n, f"eth0 10.0.0.{n}/24") for n in (1, 2, 3, 4)]
    wires.cut = {("node3", "10.0.0.4")}  # neighbours; neither is the head
    with pytest.raises(PeersUnreachable, match=r"connect to node4 at 10\.0\.0\.4 \(eth0\): no response") as raised:
        RendezvousFinder("needed").arrange(nodes)
    assert raised.value.host == "node3"
    assert "from 10.0.0.3" in str(raised.value.hint)
    wires.cut = {("node3", "10.0.0.1"), ("node4", "10.0.0.1")}
    with pytest.raises(PoolError) as several:
        RendezvousFinder("needed").arrange(nodes)
    assert [error.host for error in several.value.exceptions] == ["node3", "node4"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("told", "interface", "message"),
    [
        ("eth0 10.0.2.15/24", "auto", "no address that other hosts can reach.*node1 and node2 have"),
        ("eth0 10.0.2.15/24", "fast0", "its interface fast0, which the inventory names, has no address; it has 10.0.2"),
    ],
)
def test_hosts_without_an_address_of_their_own_are_told_at_once(
    host: Make, wires: Wires, told: str, interface: str, message: str
) -> None:
    nodes = [host(n, told, interface=interface) for n in (1, 2)]
    with pytest.raises(PoolError) as raised:
        RendezvousFinder("needed").arrange(nodes)
    assert all(isinstance(error, PeersUnreachable) and error.hint for error in raised.value.exceptions)
    with pytest.raises(PeersUnreachable, match=message):
        raise raised.value.exceptions[0]
    assert not wires.questions, "nobody had to be asked for that"


def test_a_network_that_is_wanted_may_be_missing(host: Make, wires: Wires) -> None:
    nodes = [host(n, f"eth0 10.0.0.{n}/24") for n in (1, 2)]
    wires.cut = {("node2", "10.0.0.1")}
    said, events = list[str](), Events()
    events.subscribe(lambda event: said.append(str(event)))
    finder = RendezvousFinder("wanted", events)
    assert [place.address for place in finder.arrange(nodes).addresses] == ["10.0.0.1", "10.0.0.2"]
    assert len(said) == 1 and "node2: it cannot connect to node1 at 10.0.0.1" in said[0]


def test_what_is_known_is_not_tried_again_until_a_host_is_another(host: Make, wires: Wires) -> None:
    nodes = [host(n, f"eth0 10.0.0.{n}/24") for n in (1, 2, 3)]
    finder = RendezvousFinder("needed")
    first = finder.arrange(nodes)
    tried = wires.probes
    assert finder.arrange(nodes).addresses == first.addresses
    assert finder.arrange(nodes[1:]).addresses == first.addresses[1:]
    assert wires.probes == tried
    nodes[2].session = FakeSession("node3", wires)
    finder.arrange(nodes)
    assert wires.probes > tried


@pytest.mark.parametrize("text", ["", "²", "99999", "0", "-1", "4000x"])
def test_an_answer_that_names_no_port_is_refused(host: Make, text: str) -> None:
    node = host(1, "eth0 10.0.0.1/24")
    node.session._answer = lambda message: messages.Done(text=text)
    with pytest.raises(ProtocolError):
        RendezvousFinder().arrange([node])


@pytest.mark.parametrize("found", [[], [["", ""]], [["", "10.0.0.1; x"]], [[""]], [["", "10.0.0.2"]] * 2])
def test_an_answer_that_was_not_asked_for_is_refused(host: Make, found: list[list[str]]) -> None:
    nodes = [host(n, f"eth0 10.0.0.{n}/24") for n in (1, 2)]
    before = nodes[1].session._answer

    def answer(message: Any) -> Any:
        return messages.PeersProbed(found=found) if isinstance(message, messages.ProbePeers) else before(message)

    nodes[1].session._answer = answer
    with pytest.raises(ProtocolError):
        RendezvousFinder("needed").arrange(nodes)


def test_what_a_host_says_of_another_cannot_steer_the_terminal(host: Make) -> None:
    nodes = [host(n, f"eth0 10.0.0.{n}/24") for n in (1, 2)]
    before = nodes[1].session._answer

    def answer(message: Any) -> Any:
        found = [["\x1b[2Jno response\n", ""]]
        return messages.PeersProbed(found=found) if isinstance(message, messages.ProbePeers) else before(message)

    nodes[1].session._answer = answer
    with pytest.raises(PeersUnreachable) as raised:
        RendezvousFinder("needed").arrange(nodes)
    assert raised.value.message.isprintable() and raised.value.message.endswith("no response")


# ---- on a host


@pytest.fixture
def watch() -> Iterator[Poller]:
    made = Poller()
    yield made
    made._poll.close()


@pytest.fixture
def ports(watch: Poller) -> Iterator[Ports]:
    made = Ports(watch)
    yield made
    for port in list(made._sockets):
        made.close(port)


def tried(watch: Poller, peers: list[list[str]], patience: float = 30.0) -> list[list[str]]:
    found: list[list[list[str]]] = []
    PeerProbe(peers, patience, watch, found.append)
    while not found:
        watch.wait(1.0)
    return found[0]


def test_a_host_that_answers_has_been_reached(watch: Poller, ports: Ports) -> None:
    port = str(ports.open(word="here"))
    addresses = ["127.0.0.1", *(["::1"] if socket.has_ipv6 and _has_ipv6_loopback() else [])]
    assert tried(watch, [[address, port, "here"] for address in addresses]) == [["", one] for one in addresses]


def test_at_an_address_there_may_be_another_machine(watch: Poller, ports: Ports) -> None:
    port = str(ports.open(word="somebody else"))
    assert tried(watch, [["127.0.0.1", port, "here"]]) == [["another machine has this address", ""]]


def test_a_port_that_is_closed_is_said_and_so_is_what_is_no_address(watch: Poller, ports: Ports) -> None:
    port = ports.open(word="here")
    ports.close(port)
    (closed, _), (nothing, _) = tried(watch, [["127.0.0.1", str(port), "here"], ["nowhere.invalid", "1", "here"]])
    assert closed == "connection refused"
    assert nothing


def test_the_agent_goes_on_while_a_host_does_not_answer(watch: Poller, ports: Ports) -> None:
    """Its loop turns, and other conversations with it."""
    silent = str(ports.open())  # it is connected to, and that is all
    bell, rope = os.pipe()
    rung: list[int] = []
    watch.add(bell, READ, lambda: rung.append(len(os.read(bell, 1))))
    try:
        found: list[list[list[str]]] = []
        PeerProbe([["127.0.0.1", silent, "here"]], 1.0, watch, found.append)
        for number in range(1, 4):
            os.write(rope, b"!")
            watch.wait(10)
            assert len(rung) == number and not found
        while not found:
            watch.wait(1)
        assert found == [[["it accepts connections but does not respond", "127.0.0.1"]]]
    finally:
        watch.drop(bell)
        os.close(bell)
        os.close(rope)


def test_other_addresses_of_a_host_that_was_reached_are_not_waited_for(watch: Poller, ports: Ports) -> None:
    silent, port = str(ports.open()), str(ports.open(word="here"))
    began = time.monotonic()
    found = tried(watch, [["127.0.0.1", silent, "here"], ["127.0.0.1", port, "here"]], patience=60.0)
    assert [reason for reason, _ in found] == ["it accepts connections but does not respond", ""]
    assert time.monotonic() - began < 30


def test_more_hosts_than_a_process_has_descriptors_are_tried_in_turns(watch: Poller, ports: Ports) -> None:
    port = str(ports.open(word="here"))
    assert tried(watch, [["127.0.0.1", port, "here"]] * 300) == [["", "127.0.0.1"]] * 300


def _has_ipv6_loopback() -> bool:
    with ExitStack() as stack:
        try:
            stack.enter_context(closing(socket.socket(socket.AF_INET6))).bind(("::1", 0))
        except OSError:
            return False
    return True
