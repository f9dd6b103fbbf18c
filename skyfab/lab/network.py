"""The lab's own wires: one bridge, one cable to each host, addresses that exist nowhere else."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skyfab.errors import UsageError

LABS = 512  # the /24s of 198.18.0.0/15, set aside for tests of networks (RFC 2544)
INTERFACE = "eth0"
"""What a host calls its end of the cable."""


@dataclass(frozen=True, slots=True)
class Network:
    """One /24 on one bridge of this machine, which has its first address."""

    number: int
    tag: str
    """Written on the bridge: a number that is used again is another network."""

    @classmethod
    def open(cls) -> Network:
        """Takes the first free /24: the kernel makes a bridge of a name once, so two labs never meet."""
        used = _ip("address show", "route show").stdout.split()
        for number in range(LABS):
            network = cls(number, secrets.token_hex(8))
            prefix = network.address(0).removesuffix("0")
            if any(word.startswith(prefix) for word in used):  # on a lab's own host, say
                continue
            bridge = network.bridge
            made = _ip(
                f"link add {bridge} address {network.hardware(0)} type bridge",
                f"link set {bridge} alias {network.tag}",
                f"address add {network.address(1)}/24 dev {bridge}",
                f"link set {bridge} up",
            )
            if made.returncode == 0:
                return network
            network.close()
            if "File exists" not in made.stderr:
                raise UsageError(f"this machine lets no bridge be made: {made.stderr.strip()}")
        raise UsageError(f"{LABS} labs are up, and there is no room for more", hint="skyfab lab.down")

    def close(self) -> None:
        """Removes the bridge, if it is there. The cables go with their hosts."""
        if self.ours:
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
        return f"sky{self.number}"

    def cable(self, host: int) -> str:
        """This machine's end of the cable to that host."""
        return f"{self.bridge}n{host}"

    def address(self, last: int) -> str:
        return f"198.{18 + self.number // 256}.{self.number % 256}.{last}"

    def hardware(self, host: int) -> str:
        """The hardware address of a host, or of the bridge (0): said, since one that changes, at a reboot
        or with the bridge's first cable, is looked for at the old place for seconds."""
        return f"02:53:4b:{self.number // 256:02x}:{self.number % 256:02x}:{host:02x}"

    def plug(self, pids: dict[int, int]) -> None:
        """Lays a cable to each host, given as number: pid of a process in its network namespace."""
        lines: list[str] = []
        for host, pid in pids.items():
            end = f"name {INTERFACE} address {self.hardware(host)} netns {pid}"
            lines += [
                f"link add {self.cable(host)} type veth peer {end}",
                f"link set {self.cable(host)} master {self.bridge} up",
            ]
        ip(*lines)

    def unplug(self, host: int) -> None:
        """Removes the cable at once, if it is there; the kernel would do so later by itself."""
        if self.ours:
            _ip(f"link delete {self.cable(host)}")

    def switch(self, hosts: Sequence[int], *, on: bool) -> None:
        """Takes cables down, or up again: what is sent meanwhile is lost without a word."""
        ip(*(f"link set {self.cable(host)} {'up' if on else 'down'}" for host in hosts))


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


def ip(*lines: str) -> None:
    """Runs `ip` commands in one process. Raises UsageError with its words when one fails."""
    done = _ip(*lines)
    if done.returncode:
        raise UsageError(f"ip: {done.stderr.strip()}")


def _ip(*lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True)
