"""Candidate network addresses of a pool's hosts: which ones other hosts may be able to connect to, before probing."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from skyfab.errors import PeersUnreachable, ProtocolError
from skyfab.pool.node import Node
from skyfab.protocol.messages import AgentHello

IP = ipaddress.IPv4Address | ipaddress.IPv6Address
_MOST: Final = 8
"""Most addresses of one host that are considered."""


@dataclass(frozen=True, slots=True)
class Address:
    """One address of a host."""

    address: str
    interface: str = ""
    """The interface that has it; empty if unknown or irrelevant."""
    network: str = ""

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})" if self.interface else self.address


def ip(text: str) -> IP | None:
    """Parses an address that a host reported; None if it is not a valid one."""
    try:
        return ipaddress.ip_address(text) if re.fullmatch(r"[\w.:%-]{2,64}", text, re.ASCII) else None
    except ValueError:
        return None


class Candidates:
    """The addresses that the hosts of a gang reported, and which of them other hosts may use."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        """Raises ProtocolError for an invalid address."""
        self._nodes = nodes
        self._reported = {node: _reported(node) for node in nodes}
        self._machines = {node: machine_of(node) for node in nodes}
        """The machine of each node. Two hosts may be the same machine; then they may share addresses."""
        self._owners: dict[str, set[object]] = {}
        for node in nodes:
            for one in self._reported[node]:
                self._owners.setdefault(one.address, set()).add(self._machines[node])
        self._preferred = {
            one.network
            for node in nodes
            for one in self._reported[node]
            if one.interface and one.interface == _named(node)
        }
        """Networks of the interfaces that the inventory names. Preferred also on hosts without a named interface."""
        self._options = {node: self._of(node) for node in nodes}

    @property
    def one_machine(self) -> bool:
        return len(set(self._machines.values())) == 1

    def of(self, node: Node) -> list[Address]:
        """Addresses for other hosts to connect to, the likeliest first.

        Only those of the interface that the inventory names, if it names one. Addresses that another machine has too
        are left out: that machine would connect to itself.
        """
        return self._options[node]

    def _of(self, node: Node) -> list[Address]:
        named = _named(node)
        found = [
            one
            for one in self._reported[node]
            if (not named or one.interface == named) and _is_public(one) and len(self._owners[one.address]) == 1
        ]
        return sorted(found, key=lambda one: one.network not in self._preferred)[:_MOST]

    def likely(self) -> list[Address]:
        """A best guess for each node, without probing."""
        return [self._likely(node) for node in self._nodes]

    def _likely(self, node: Node) -> Address:
        own = Address(node.agent.address, _named(node))
        if self.one_machine:
            return own
        options = self.of(node)
        if not options:
            return own
        if options[0].address == own.address:
            return options[0]
        common = [one for one in options if all(self._is_near(other, one) for other in self._nodes)]
        return (common or options)[0]

    def _is_near(self, node: Node, option: Address) -> bool:
        return any(one.network == option.network for one in self.of(node))

    def facing(self, node: Node, head: Address, own: str) -> Address:
        """The address to use for a node that connects to `head` from its address `own`."""
        options = self.of(node)
        alike = [one for one in options if (":" in one.address) == (":" in head.address)]
        return next((one for one in options if one.address == own), (alike or options)[0])

    def none_of(self, node: Node) -> PeersUnreachable | None:
        """The error for a node that has no address for other hosts to use; None if it has one."""
        if self.of(node):
            return None
        named = _named(node)
        reported = ", ".join(f"{one}{self._why_not(one)}" for one in self._reported[node]) or node.agent.address
        if named and all(one.interface != named for one in self._reported[node]):
            message = f"its interface {named}, which the inventory names, has no address; it has {reported}"
            hint = f"set interface = … under [hosts.{node.name}] to one that `ip address` shows on the host"
        else:
            message = f"it has no address that other hosts can reach: {reported}"
            hint = (
                "connect the hosts with a network, for instance a VPN; "
                "without plugins that need a network, @ works without one"
            )
        return PeersUnreachable(message, host=node.name, hint=hint)

    def _why_not(self, one: Address) -> str:
        twins = [node.name for node in self._nodes if any(each.address == one.address for each in self._reported[node])]
        if not _is_public(one):
            return ", which only the host itself can use"
        return f", which {' and '.join(twins[:3])} have" if len(self._owners[one.address]) > 1 else ""


def meeting_addresses(node: Node, other: Node) -> list[str]:
    """Addresses of a host at which another one may reach it. Raises ProtocolError."""
    candidates = Candidates([node, other])
    return ["127.0.0.1"] if candidates.one_machine else [one.address for one in candidates.of(node)]


def machine_of(node: Node) -> object:
    """Equal for two agents on one machine. Addresses are part of it: a cloned machine may differ in nothing else."""
    return node.agent.network or node.name, frozenset(map(tuple, node.agent.addresses))


def _named(node: Node) -> str:
    return "" if node.host.interface == "auto" else node.host.interface


def _is_public(one: Address) -> bool:
    found = ip(one.address)
    if found is None or found.is_loopback or found.is_unspecified or found.is_multicast:
        return False
    return found.version == 4 or not found.is_link_local  # IPv6 link-local addresses need an interface name


def _reported(node: Node) -> list[Address]:
    """A host's addresses: first the one that this machine connected to, then IPv4, then IPv6."""
    agent = node.agent
    check_addresses(agent, node.name)
    reached = str(ip(agent.address))
    found = []
    for interface, text in agent.addresses:
        one = ipaddress.ip_interface(text)
        found.append(Address(str(one.ip), interface, str(one.network)))
    found.sort(key=lambda one: (one.address != reached, ":" in one.address))
    if not any(one.address == reached for one in found):
        found.insert(0, Address(reached))
    return found


def check_addresses(agent: AgentHello, host: str) -> None:
    """Validates reported addresses: they are sent to other hosts, and shown in hints that users may type.

    Raises ProtocolError.
    """
    try:
        fine = ip(agent.address) is not None and len(agent.addresses) <= 1024
        for interface, text in agent.addresses:
            fine = fine and re.fullmatch(r"[\w.:@+-]{1,32}", interface, re.ASCII) is not None and "%" not in text
            ipaddress.ip_interface(text)
    except ValueError:
        fine = False
    if not fine:
        raise ProtocolError("invalid addresses", host=host)
