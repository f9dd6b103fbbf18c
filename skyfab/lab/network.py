"""The lab's own wires: one bridge or two, cables to each host, addresses that exist nowhere else."""

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
"""A /24 of 198.18.0.0/16 for each lab, and the same of 198.19.0.0/16 for its second network: both are set aside for
tests of networks (RFC 2544)."""
INTERFACE = "eth0"
"""What a host calls its end of the cable that SSH comes through."""
SECOND = "fast0"
"""What it calls its end of the second network's."""
GUEST, GATEWAY = "10.0.2.15", "10.0.2.2"
"""The addresses of every host behind forwarded ports, and of the NAT in front of it: VirtualBox's."""
NAT_CABLE = "nat0"
"""What that NAT calls its end of the cable."""


@dataclass(frozen=True, slots=True)
class Network:
    """One /24 on one bridge of this machine, which has its first address; and a second one where asked for."""

    number: int
    tag: str
    """Written on the bridge: a number that is used again is another network."""
    second: bool = False
    """Whether hosts have a second cable, to a bridge on which this machine has no address."""
    isolated: bool = False
    """Whether hosts see this machine only, and not each other, on the first bridge."""
    forwarded: bool = False
    """Whether each host is behind a NAT of its own instead of on the first bridge: all have the same address."""

    @classmethod
    def open(cls, *, second: bool = False, isolated: bool = False, forwarded: bool = False) -> Network:
        """Takes the first free /24: the kernel makes a bridge of a name once, so two labs never meet."""
        used = _ip("address show", "route show").stdout.split()
        for number in range(LABS):
            network = cls(number, secrets.token_hex(8), second, isolated, forwarded)
            prefix = network.address(0).removesuffix("0")
            if any(word.startswith(prefix) for word in used):  # on a lab's own host, say
                continue
            made = _ip(*network._bridges())
            if made.returncode == 0:
                return network
            network.close()
            if "File exists" not in made.stderr:
                raise UsageError(f"this machine lets no bridge be made: {made.stderr.strip()}")
        raise UsageError(f"{LABS} labs are up, and there is no room for more", hint="skyfab lab.down")

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
        """Removes the bridges, if they are there. The cables go with their hosts."""
        if self.ours:
            if self.second:
                _ip(f"link delete {self._bridge_of(SECOND)}")
            _ip(f"link delete {self.bridge}")

    @property
    def ours(self) -> bool:
        """Whether the bridge is there, and is not another lab's of a later day."""
        try:
            return Path(f"/sys/class/net/{self.bridge}/ifalias").read_text().strip() == self.tag
        except OSError:
            return False

    @property
    def bridge(self) -> str:
        return self._bridge_of(INTERFACE)

    @property
    def interfaces(self) -> tuple[str, ...]:
        """What each host has."""
        return (INTERFACE, SECOND) if self.second else (INTERFACE,)

    def addresses(self, host: int) -> dict[str, str]:
        """A host's own addresses, by interface."""
        first = GUEST if self.forwarded else self.address(10 + host)
        return {INTERFACE: first} | ({SECOND: self.address(10 + host, SECOND)} if self.second else {})

    def cable(self, host: int, interface: str = INTERFACE) -> str:
        """The other end of a host's cable: this machine's, or the one of the NAT in front of the host."""
        if self.forwarded and interface == INTERFACE:
            return NAT_CABLE
        return f"{self._bridge_of(interface)}n{host}"

    def hardware(self, host: int, interface: str = INTERFACE) -> str:
        """The hardware address of a host, or of the bridge (0): said, since one that changes, at a reboot
        or with the bridge's first cable, is looked for at the old place for seconds."""
        return f"02:53:4b:{self.interfaces.index(interface):02x}:{self.number:02x}:{host:02x}"

    def plug(self, pids: dict[int, int], nats: dict[int, int]) -> None:
        """Lays the cables to each host.

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
        """Removes the cables at once, if they are there; the kernel would do so later by itself."""
        if self.ours:
            for interface in self.interfaces:
                if self.cable(host, interface) != NAT_CABLE:
                    _ip(f"link delete {self.cable(host, interface)}")

    def _bridge_of(self, interface: str) -> str:
        return f"sky{self.number}" if interface == INTERFACE else f"sky{self.number}f"

    def address(self, last: int, interface: str = INTERFACE) -> str:
        """An address of the first network, or of the second; this machine is the first of the first."""
        return f"198.{18 + (interface == SECOND)}.{self.number}.{last}"


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago; all are held until the last is found, so they differ."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in held]


def make_room_for_neighbours(count: int) -> None:
    """Raises the kernel's limits on neighbours where root may.

    All namespaces share one table of 1,024 entries; when every one of 32 hosts talks to every other one it overflows,
    and connections fail as if a firewall were there. The limits stay raised: other labs may need them by then.
    """
    entries = 2 * count * (count + 1)
    for number in (1, 2, 3):
        path = Path(f"/proc/sys/net/ipv4/neigh/default/gc_thresh{number}")
        with suppress(OSError, ValueError):  # a container may not have it, or not let it be written
            if int(path.read_text()) < entries * number:
                path.write_text(str(entries * number))


def shape(device: str, mbit: float | None, *, inside: Sequence[str] = ()) -> None:
    """Limits what a device sends to that many megabits a second; None takes the limit away."""
    change = ["del", "dev", device, "root"]
    if mbit is not None:
        burst = max(16_384, int(mbit * 1e6 / 8 / 100))  # ten milliseconds' worth
        change = ["replace", "dev", device, "root", "tbf"]
        change += ["rate", f"{int(mbit * 1e6)}bit", "burst", str(burst), "latency", "200ms"]
    done = subprocess.run([*inside, "tc", "qdisc", *change], capture_output=True, text=True)
    if done.returncode and mbit is not None:
        raise UsageError(f"tc cannot slow {device}: {done.stderr.strip()}")


def ip(*lines: str, inside: Sequence[str] = ()) -> None:
    """Runs `ip` commands in one process. Raises UsageError with its words when one fails."""
    done = _ip(*lines, inside=inside)
    if done.returncode:
        raise UsageError(f"ip: {done.stderr.strip()}")


def _ip(*lines: str, inside: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    words = [*inside, "ip", "-batch", "-"]
    return subprocess.run(words, input="\n".join(lines) + "\n", capture_output=True, text=True)
