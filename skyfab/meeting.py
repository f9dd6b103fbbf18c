"""The meeting: where the ranks of a gang find each other.

A port that is bound before it is named, and a look beforehand whether every host reaches every other one: a firewall is
told in a second, and not by a hang.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from skyfab.errors import HostError, PeersApart, PoolError, ProtocolError
from skyfab.node import Node
from skyfab.protocol.messages import Done, Port, Reach, Reached, Unport

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Meeting:
    """How ranks meet."""

    port: int
    """At the head, which listens there already."""
    interfaces: tuple[str, ...]
    """For each node the network interface that leads to the others; empty where it does not matter."""


def arrange(nodes: Sequence[Node], known: Mapping[int, str]) -> Meeting:
    """A place to meet. `known` are the interfaces of nodes, where a look has been taken before.

    Raises PeersApart, or a PoolError with several of them.
    """
    if len(nodes) == 1 or all(node.index in known for node in nodes):
        return Meeting(_port(nodes[0]), tuple(known.get(node.index, _named(node)) for node in nodes))
    ports = _all(_port, nodes)
    try:
        answers = _all(lambda node: _look(node, nodes, ports), nodes)
    finally:
        for node, port in list(zip(nodes, ports, strict=True))[1:]:
            node.session.send(Unport(port=port))
    apart = [
        _apart(node, next(other for other in nodes if other.agent.address == address), reason)
        for node, answer in zip(nodes, answers, strict=True)
        for address, reason in answer.failed
    ]
    if apart:
        nodes[0].session.send(Unport(port=ports[0]))
        raise apart[0] if len(apart) == 1 else PoolError("some hosts cannot reach each other", apart)
    found = [_named(node) or answer.interface for node, answer in zip(nodes, answers, strict=True)]
    return Meeting(ports[0], tuple(found))


def _port(node: Node) -> int:
    answer = node.session.ask(Port())
    if not isinstance(answer, Done) or not re.fullmatch("[0-9]{1,5}", answer.text):
        raise ProtocolError("its answer names no port", host=node.name)
    return int(answer.text)


def _look(node: Node, nodes: Sequence[Node], ports: Sequence[int]) -> Reached:
    peers = [
        [other.agent.address, str(port)]
        for other, port in zip(nodes, ports, strict=True)
        if other is not node and other.agent.address != node.agent.address
    ]
    answer = node.session.ask(Reach(peers=peers))
    asked = [address for address, _ in peers]
    if not isinstance(answer, Reached) or not all(len(one) == 2 and one[0] in asked for one in answer.failed):
        raise ProtocolError("its answer names nobody that was asked for", host=node.name)
    return answer


def _named(node: Node) -> str:
    return "" if node.host.interface == "auto" else node.host.interface


def _apart(node: Node, other: Node, reason: str) -> HostError:
    here, there = node.agent.address, other.agent.address
    return PeersApart(
        f"it cannot connect to {other.name} ({there}): {reason}",
        host=node.name,
        hint=f"ranks on different hosts talk over TCP; let them, on {other.name}: "
        f"sudo ufw allow proto tcp from {here}, or sudo iptables -I INPUT -p tcp -s {here} -j ACCEPT",
    )


def _all(ask: Callable[[Node], R], nodes: Sequence[Node]) -> list[R]:
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(ask, nodes))
