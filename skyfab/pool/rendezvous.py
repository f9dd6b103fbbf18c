"""Rendezvous of a gang: an address for each host, and a port at the head (the first host), for the ranks to connect to.

The port is bound before it is announced. Where a plugin needs the network, connections are probed beforehand: a
firewall is reported within seconds instead of causing a hang. Every host connects to the head, the head to every host,
and each host to the next: the work grows with the number of hosts, not with its square.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from skyfab.errors import PeersUnreachable, PoolError, ProtocolError, SkyfabError
from skyfab.plugins.base import Network, Plugin
from skyfab.pool.addresses import Address, Candidates, ip
from skyfab.pool.node import Node
from skyfab.protocol.messages import Done, Listen, Message, PeersProbed, ProbePeers, Unlisten
from skyfab.session.fanout import for_each_host, results_of
from skyfab.session.session import Session
from skyfab.ui.events import Events, Notice

TIMEOUT: Final = 5.0
"""Timeout in seconds of a connection from one host to another."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a gang connect to each other."""

    port: int
    """The head's port. The head listens there already."""
    addresses: tuple[Address, ...]
    """For each node, the address that the others use."""


class RendezvousFinder:
    """Makes the rendezvous of a pool's gangs. Addresses are cached while the nodes have the same sessions."""

    def __init__(self, network: Network = "unused", events: Events | None = None) -> None:
        """A `Notice` reports a network that is "wanted" and does not work."""
        self._network = network
        self._events = events or Events()
        self._known: weakref.WeakKeyDictionary[Session, Address] = weakref.WeakKeyDictionary()

    def arrange(self, nodes: Sequence[Node]) -> Rendezvous:
        """A rendezvous for a gang. If the network is "needed", raises PeersUnreachable, or a PoolError with several."""
        head, addresses = nodes[0], self.addresses(nodes)
        return Rendezvous(_port(head, head.session.ask(Listen(address=addresses[0].address))), addresses)

    def addresses(self, nodes: Sequence[Node]) -> tuple[Address, ...]:
        """For each node, the address that the others use. Raises as `arrange` does."""
        known = [self._known.get(node.session) for node in nodes]
        addresses = [one for one in known if one is not None]
        if len(addresses) < len(nodes):
            addresses = self._choose(nodes)
            for node, address in zip(nodes, addresses, strict=True):
                self._known[node.session] = address
        return tuple(addresses)

    def _choose(self, nodes: Sequence[Node]) -> list[Address]:
        candidates = Candidates(nodes)
        if self._network == "unused" or candidates.one_machine:
            return candidates.likely()
        try:
            return _Search(nodes, candidates).run()
        except (PeersUnreachable, PoolError) as error:
            if self._network == "needed":
                raise
            first = error if isinstance(error, PeersUnreachable) else error.exceptions[0]
            self._events.emit(Notice(host=nodes[0].name, text=f"ranks may be unable to reach each other: {first}"))
            return candidates.likely()


def peer_addresses(nodes: Sequence[Node]) -> list[str]:
    """For each node, the address at which the others reach it: loopback, if all of them are one machine.

    Raises PeersUnreachable, or a PoolError with several.
    """
    if Candidates(nodes).one_machine:
        return ["127.0.0.1"] * len(nodes)
    return [one.address for one in RendezvousFinder("needed").addresses(nodes)]


def strongest_need(plugins: Iterable[Plugin]) -> Network:
    """The strongest need for a network among the plugins."""
    asked = {plugin.network for plugin in plugins}
    return "needed" if "needed" in asked else "wanted" if "wanted" in asked else "unused"


class _Search:
    """Finds addresses at which the hosts reach each other, by probing."""

    def __init__(self, nodes: Sequence[Node], candidates: Candidates) -> None:
        self._nodes = nodes
        self._head, *self._others = nodes
        self._candidates = candidates
        self._words = {node: secrets.token_hex(16) for node in nodes}
        """A random word that each host sends to a peer that connects: another machine may have the same address."""
        self._ports: dict[Node, int] = {}

    def run(self) -> list[Address]:
        """An address for each node. Raises PeersUnreachable, or a PoolError with several."""
        _raise(apart for node in self._nodes if (apart := self._candidates.none_of(node)) is not None)
        answers = ask_all({node: Listen(word=word) for node, word in self._words.items()})
        self._ports = {node: _port(node, answer) for node, answer in answers.items()}
        try:
            addresses = self._addresses()
            self._check(addresses)
        finally:
            for node, port in self._ports.items():
                try:
                    node.session.send(Unlisten(port=port))
                except SkyfabError:
                    pass  # it is lost, and its port with it
        return [addresses[node] for node in self._nodes]

    def _addresses(self) -> dict[Node, Address]:
        """Every host probes every address of the head. The one that most of them reach is used for all."""
        options = self._candidates.of(self._head)
        tried = self._reach({node: [(self._head, option) for option in options] for node in self._others})
        counts = [sum(not found[at][0] for found in tried.values()) for at in range(len(options))]
        at = counts.index(max(counts))
        missing = [node for node, found in tried.items() if found[at][0]]
        if counts[at] and missing:  # others reach it: probe it again, alone, with the whole timeout
            again = self._reach({node: [(self._head, options[at])] for node in missing})
            for node, (one,) in again.items():
                tried[node][at] = one
        _raise(
            self._apart(node, self._head, list(zip(options, (reason for reason, _ in found), strict=True)))
            for node, found in tried.items()
            if found[at][0]
        )
        addresses = {node: self._candidates.facing(node, options[at], found[at][1]) for node, found in tried.items()}
        return {self._head: options[at], **addresses}

    def _check(self, addresses: Mapping[Node, Address]) -> None:
        """Probes from the head to every host, and from every host to the next. Other pairs are not probed."""
        asked = {self._head: [(node, addresses[node]) for node in self._others]}
        for node, after in zip(self._others, self._others[1:], strict=False):
            asked[node] = [(after, addresses[after])]
        _raise(
            self._apart(node, other, [(address, reason)])
            for node, found in self._reach(asked).items()
            for (other, address), (reason, _) in zip(asked[node], found, strict=True)
            if reason
        )

    def _reach(self, asked: Mapping[Node, Sequence[tuple[Node, Address]]]) -> dict[Node, list[tuple[str, str]]]:
        """Probes. For each node and each address: what went wrong, or "", and the local address of the connection."""
        answers = ask_all(
            {
                node: ProbePeers(
                    peers=[[address.address, str(self._ports[other]), self._words[other]] for other, address in wanted],
                    timeout=TIMEOUT,
                )
                for node, wanted in asked.items()
            }
        )
        return {node: _found(node, answers[node], len(wanted)) for node, wanted in asked.items()}

    def _apart(self, node: Node, other: Node, tried: Sequence[tuple[Address, str]]) -> PeersUnreachable:
        if len(tried) == 1:
            ((address, reason),) = tried
            message = f"it cannot connect to {other.name} at {address}: {reason}"
        else:
            message = f"it cannot connect to {other.name}: " + "; ".join(
                f"{address} {reason}" for address, reason in tried
            )
        here = self._candidates.of(node)[0].address
        return PeersUnreachable(
            message,
            host=node.name,
            hint=f"ranks on different hosts connect over TCP; allow it on {other.name}: "
            f"sudo ufw allow proto tcp from {here}, or sudo iptables -I INPUT -p tcp -s {here} -j ACCEPT; "
            "or select another network with interface = … in the inventory",
        )


def ask_all(asked: Mapping[Node, Message]) -> dict[Node, Message]:
    """Sends requests to all nodes, and waits for all replies. Raises the first failure, in the order of the nodes."""
    replies = for_each_host(lambda item: item[0].session.ask(item[1]), list(asked.items()))
    return dict(zip(asked, results_of(replies), strict=True))


def _port(node: Node, answer: Message) -> int:
    text = answer.text if isinstance(answer, Done) else ""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536):
        raise ProtocolError("invalid reply to listen", host=node.name)
    return int(text)


def _found(node: Node, answer: Message, count: int) -> list[tuple[str, str]]:
    found = answer.found if isinstance(answer, PeersProbed) else []
    if len(found) != count or not all(len(pair) == 2 for pair in found):
        raise ProtocolError("invalid reply to a probe of its peers", host=node.name)
    for reason, own in found:
        if not reason and ip(own) is None:
            raise ProtocolError(f"not an address: {own!r:.80}", host=node.name)
    return [(_clean(reason) if reason else "", own) for reason, own in found]


def _clean(reason: str) -> str:
    return "".join(filter(str.isprintable, reason[:200])) or "reason unknown"


def _raise(errors: Iterable[PeersUnreachable]) -> None:
    found = list(errors)
    if found:
        raise found[0] if len(found) == 1 else PoolError("some hosts cannot reach each other", found)
