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
        used = _ip("address show", "route show").stdout.split()
        for number in range(LABS):
            network = cls(number, secrets.token_hex(8), second, isolated, forwarded)
            prefix = network.address(0).removesuffix("0")
            if any(word.startswith(prefix) for word in used):  # for example, when this machine is a lab's host
                continue
            made = _ip(*network._bridges())
            if made.returncode == 0:
                return network
            network.close()
            if "File exists" not in made.stderr:
                raise UsageError(f"cannot make a bridge on this machine: {made.stderr.strip()}")
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
                _ip(f"link delete {self._bridge_of(SECOND)}")
            _ip(f"link delete {self.bridge}")

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

    def plug(self, pids: dict[int, int], nats: dict[int, int]) -> None:
        """Creates the cables to each host.

        Hosts, and the NATs in front of them, are given as number: pid of a process in their network namespace.
        """
        lines: list[str] = []
        for host, pid in pids.items():
            for interface in self.interfaces:
                cable = self.cable(host, interface)
                end = f"name {interface} address {self.hardware(host, interface)} netns {pid}"
                if cable == NAT_CABLE:
                    lines.append(f"link add {cable} netns {nats[host]} type veth peer {end}")
                    continue
                lines.append(f"link add {cable} type veth peer {end}")
                lines.append(f"link set {cable} master {self._bridge_of(interface)} up")
                if self.isolated and interface == INTERFACE:
                    lines.append(f"link set {cable} type bridge_slave isolated on")
        ip(*lines)

    def unplug(self, host: int) -> None:
        """Removes a host's cables at once, if they exist; the kernel would do so later."""
        if self.ours:
            for interface in self.interfaces:
                if self.cable(host, interface) != NAT_CABLE:
                    _ip(f"link delete {self.cable(host, interface)}")

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


def shape(device: str, mbit: float | None, *, inside: Sequence[str] = ()) -> None:
    """Limits what a device sends to that many megabits per second; None removes the limit. Raises UsageError."""
    change = ["del", "dev", device, "root"]
    if mbit is not None:
        burst = max(16_384, int(mbit * 1e6 / 8 / 100))  # what is sent in 10 ms
        change = ["replace", "dev", device, "root", "tbf"]
        change += ["rate", f"{int(mbit * 1e6)}bit", "burst", str(burst), "latency", "600ms"]
    done = subprocess.run([*inside, "tc", "qdisc", *change], capture_output=True, text=True)
    if done.returncode and mbit is not None:
        raise UsageError(f"tc cannot slow {device}: {done.stderr.strip()}")


def divert(device: str, tap: str, *, inside: Sequence[str] = ()) -> None:
    """Sends to a tap device what a device would send, and by the device what is written to the tap.

    A limit of `shape` comes after that. Raises UsageError.
    """
    everything = "protocol all u32 match u32 0 0"
    ip(f"link set {tap} txqueuelen 10000 up", inside=inside)
    lines = [
        f"qdisc add dev {tap} clsact",
        f"filter add dev {tap} ingress {everything} action mirred egress redirect dev {device}",
        f"qdisc add dev {device} clsact",
        f"filter add dev {device} egress pref 1 {everything} indev {tap} flowid :1",
        f"filter add dev {device} egress pref 2 {everything} action mirred egress redirect dev {tap}",
    ]
    done = _batch("tc", lines, inside)
    if done.returncode:
        raise UsageError(f"tc cannot delay {device}: {done.stderr.strip()}")


def divert_no_more(device: str, *, inside: Sequence[str] = ()) -> None:
    _batch("tc", [f"qdisc del dev {device} clsact"], inside)


def ip(*lines: str, inside: Sequence[str] = ()) -> None:
    """Runs `ip` commands in one process. Raises UsageError with its error output if one fails."""
    done = _ip(*lines, inside=inside)
    if done.returncode:
        raise UsageError(f"ip: {done.stderr.strip()}")


def _ip(*lines: str, inside: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return _batch("ip", lines, inside)


def _batch(program: str, lines: Sequence[str], inside: Sequence[str]) -> subprocess.CompletedProcess[str]:
    words = [*inside, program, "-batch", "-"]
    return subprocess.run(words, input="\n".join(lines) + "\n", capture_output=True, text=True)
