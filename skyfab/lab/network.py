"""The network of a lab: one bridge or two, a veth pair ("cable") to each host, addresses reserved for tests."""

from __future__ import annotations

import secrets
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from skyfab.errors import UsageError

LABS = 256
"""Maximum number of labs. Each has a /24 of 198.18.0.0/16, and one of 198.19.0.0/16 for its second network: both are
reserved for network tests (RFC 2544)."""
INTERFACE = "eth0"
"""The host's interface on the first network, which SSH uses."""
SECOND = "fast0"
"""The host's interface on the second network."""
GUEST, GATEWAY = "10.0.2.15", "10.0.2.2"
"""The address of every host behind forwarded ports, and of its NAT: the same as in VirtualBox."""
NAT_CABLE = "nat0"
"""The NAT's interface to its host."""


@dataclass(frozen=True, slots=True)
class Network:
    """One /24 on a bridge of this machine, which has the first address; and optionally a second network."""

    number: int
    tag: str
    """Stored as the bridge's alias, to recognize it: another lab may use the same number later."""
    second: bool = False
    """Whether hosts have a second interface, on a bridge on which this machine has no address."""
    isolated: bool = False
    """Whether hosts reach only this machine, and not each other, on the first bridge."""
    forwarded: bool = False
    """Whether each host is behind its own NAT instead of on the first bridge; all have the same address then."""

    @classmethod
    def open(cls, *, second: bool = False, isolated: bool = False, forwarded: bool = False) -> Network:
        """Takes the first free /24. The kernel creates a bridge of a given name only once, so labs never share one.

        Raises UsageError if a bridge cannot be created or no network is free.
        """
        used = _batch("ip", ["address show", "route show"]).stdout.split()
        for number in range(LABS):
            network = cls(number, secrets.token_hex(8), second, isolated, forwarded)
            prefix = network.address(0).removesuffix("0")
            if any(word.startswith(prefix) for word in used):  # for example, when this machine is a lab's host
                continue
            made = _batch("ip", network._bridges())
            if made.returncode == 0:
                return network
            network.close()
            if "File exists" not in made.stderr:
                raise UsageError(f"cannot create a bridge on this machine: {made.stderr.strip()}")
        raise UsageError(f"{LABS} labs are up: a machine cannot have more", hint="skyfab lab.down")

    def _bridges(self) -> list[str]:
        lines = [
            f"link add {self.bridge} address {self.hardware(0)} type bridge",
            f"link set {self.bridge} alias {self.tag}",
            f"address add {self.address(1)}/24 dev {self.bridge}",
            f"link set {self.bridge} up",
        ]
        if self.second:
            bridge = self._bridge_of(SECOND)
            lines += [f"link add {bridge} address {self.hardware(0, SECOND)} type bridge", f"link set {bridge} up"]
        return lines

    def close(self) -> None:
        """Removes the bridges, if they exist. The cables disappear with their hosts."""
        if self.ours:
            if self.second:
                _batch("ip", [f"link delete {self._bridge_of(SECOND)}"])
            _batch("ip", [f"link delete {self.bridge}"])

    @property
    def ours(self) -> bool:
        """Whether the bridge exists, and does not belong to a later lab."""
        try:
            return Path(f"/sys/class/net/{self.bridge}/ifalias").read_text().strip() == self.tag
        except OSError:
            return False

    @property
    def bridge(self) -> str:
        return self._bridge_of(INTERFACE)

    @property
    def interfaces(self) -> tuple[str, ...]:
        """The interfaces of each host."""
        return (INTERFACE, SECOND) if self.second else (INTERFACE,)

    def addresses(self, host: int) -> dict[str, str]:
        """A host's own addresses, by interface."""
        first = GUEST if self.forwarded else self.address(10 + host)
        return {INTERFACE: first} | ({SECOND: self.address(10 + host, SECOND)} if self.second else {})

    def cable(self, host: int, interface: str = INTERFACE) -> str:
        """The name of the other end of a host's cable, on this machine or on the host's NAT."""
        if self.forwarded and interface == INTERFACE:
            return NAT_CABLE
        return f"{self._bridge_of(interface)}n{host}"

    def hardware(self, host: int, interface: str = INTERFACE) -> str:
        """The MAC address of a host, or of the bridge (0).

        It is fixed, because neighbours would use an old one for seconds after it changes: at a reboot, or when the
        bridge gets its first cable.
        """
        return f"02:53:4b:{self.interfaces.index(interface):02x}:{self.number:02x}:{host:02x}"

    def space(self, host: int) -> str:
        """The name of a host's network namespace."""
        return f"{self.bridge}n{host}"

    def nat(self, host: int) -> str:
        """The name of the network namespace of a host's NAT."""
        return f"{self.bridge}n{host}-nat"

    def plug(self, hosts: Sequence[int]) -> None:
        """Creates the network namespaces of hosts, and of the NATs in front of them, with the cables to them."""
        lines: list[str] = []
        for host in hosts:
            lines += [f"netns add {space}" for space in self._spaces(host)]
            for interface in self.interfaces:
                cable = self.cable(host, interface)
                end = f"name {interface} address {self.hardware(host, interface)} netns {self.space(host)}"
                if cable == NAT_CABLE:
                    lines.append(f"link add {cable} netns {self.nat(host)} type veth peer {end}")
                    continue
                lines.append(f"link add {cable} type veth peer {end}")
                lines.append(f"link set {cable} master {self._bridge_of(interface)} up")
                if self.isolated and interface == INTERFACE:
                    lines.append(f"link set {cable} type bridge_slave isolated on")
        ip(*lines)
        for host in hosts if self.forwarded else ():
            up = ("link set lo up", f"address add {GATEWAY}/24 dev {NAT_CABLE}", f"link set {NAT_CABLE} up")
            ip(*up, space=self.nat(host))

    def unplug(self, host: int) -> None:
        """Removes a host's cables and network namespaces at once, if they exist."""
        if self.ours:
            cables = [self.cable(host, interface) for interface in self.interfaces]
            lines = [f"link delete {cable}" for cable in cables if cable != NAT_CABLE]
            for line in (*lines, *(f"netns delete {space}" for space in self._spaces(host))):
                _batch("ip", [line])

    def _spaces(self, host: int) -> list[str]:
        return [self.space(host), *([self.nat(host)] if self.forwarded else [])]

    def _bridge_of(self, interface: str) -> str:
        return f"sky{self.number}" if interface == INTERFACE else f"sky{self.number}f"

    def address(self, last: int, interface: str = INTERFACE) -> str:
        """An address of the first or the second network; this machine has address 1 of the first."""
        return f"198.{18 + (interface == SECOND)}.{self.number}.{last}"


def free_ports(count: int) -> list[int]:
    """Free ports of 127.0.0.1. All are held until the last is found, so they differ; later, others may take them."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in held]


def make_room_for_neighbours(count: int) -> None:
    """Raises the kernel's limits for the neighbour (ARP) table, if permitted.

    All namespaces share one table of 1,024 entries. When each of 32 hosts connects to every other one, it overflows,
    and connections fail as if a firewall blocked them. The limits stay raised: by then, other labs may need them.
    """
    entries = 2 * count * (count + 1)
    for number in (1, 2, 3):
        path = Path(f"/proc/sys/net/ipv4/neigh/default/gc_thresh{number}")
        with suppress(OSError, ValueError):  # a container may not have it, or not let it be written
            if int(path.read_text()) < entries * number:
                path.write_text(str(entries * number))


def shape(device: str, mbit: float | None, *, space: str = "") -> None:
    """Limits what a device sends to that many megabits per second; None removes the limit. Raises UsageError."""
    if mbit is None:
        _batch("tc", [f"qdisc del dev {device} root"], space)
        return
    burst = max(16_384, int(mbit * 1e6 / 8 / 100))  # what is sent in 10 ms
    limit = f"tbf rate {int(mbit * 1e6)}bit burst {burst} latency 600ms"
    _batch("tc", [f"qdisc replace dev {device} root {limit}"], space, check=True)


def divert(device: str, tap: str, *, space: str = "") -> None:
    """Sends to a tap device what a device would send, and by the device what is written to the tap.

    A limit of `shape` comes after that. Raises UsageError.
    """
    everything = "protocol all u32 match u32 0 0"
    ip(f"link set {tap} txqueuelen 10000 up", space=space)
    lines = [
        f"qdisc add dev {tap} clsact",
        f"filter add dev {tap} ingress {everything} action mirred egress redirect dev {device}",
        f"qdisc add dev {device} clsact",
        f"filter add dev {device} egress pref 1 {everything} indev {tap} flowid :1",
        f"filter add dev {device} egress pref 2 {everything} action mirred egress redirect dev {tap}",
    ]
    _batch("tc", lines, space, check=True)


def divert_no_more(device: str, *, space: str = "") -> None:
    _batch("tc", [f"qdisc del dev {device} clsact"], space)


def enter(space: str) -> list[str]:
    """The prefix of a command that is to run in a network namespace; empty for this program's own."""
    return ["nsenter", f"--net=/run/netns/{space}"] if space else []


def ip(*lines: str, space: str = "") -> None:
    """Runs `ip` commands in one process. Raises UsageError with its error output if one fails."""
    _batch("ip", lines, space, check=True)


def _batch(
    program: str, lines: Sequence[str], space: str = "", *, check: bool = False
) -> subprocess.CompletedProcess[str]:
    words = [program, *(["-n", space] if space else []), "-batch", "-"]
    done = subprocess.run(words, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if check and done.returncode:
        raise UsageError(f"{program}: {done.stderr.strip()}")
    return done
