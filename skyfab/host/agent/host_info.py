"""Facts about the host that its agent reports: name, addresses, CPUs and GPUs; and why a process was killed."""

from __future__ import annotations

import os
import signal
import socket
import sys

from skyfab.protocol import VERSION
from skyfab.protocol.messages import AgentHello


class HostInfo:
    """Facts about this host that are cheap to read."""

    def __init__(self) -> None:
        self._name = socket.gethostname()
        self._address = "127.0.0.1"
        self.cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.gpus = _gpus()
        self.platform = f"{sys.platform}-{os.uname().machine}"
        self._kills = _out_of_memory_kills()

    def reached_through(self, connection: str) -> None:
        """Takes the host's address from sshd's ``SSH_CONNECTION``, because that one is known to work."""
        words = connection.split()
        if len(words) == 4:
            self._address = words[2]

    def hello(self, received: int) -> AgentHello:
        """The agent's first message on a connection; `received` is the number of frames received before."""
        return AgentHello(
            protocol=VERSION,
            received=received,
            python=f"{sys.version_info[0]}.{sys.version_info[1]}",
            hostname=self._name,
            address=self._address,
            addresses=addresses(),
            network=self._network(),
            gpus=self.gpus,
            platform=self.platform,
            pid=os.getpid(),
            executable=sys.executable,
        )

    def _network(self) -> str:
        """Identifies the network stack. Agents with the same value reach each other at any address, even loopback."""
        try:
            return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"
        except OSError:
            return self._name

    def describe_end(self, exitcode: int) -> str:
        """Describes how a process with this exit code ended."""
        kills = _out_of_memory_kills()
        if -exitcode == signal.SIGKILL and kills > self._kills:
            self._kills = kills
            return "its process was killed because the host ran out of memory"
        return f"its process {how_it_ended(exitcode)}"


def how_it_ended(code: int) -> str:
    """
    >>> how_it_ended(3), how_it_ended(-9)
    ('ended with exit code 3', 'was killed by SIGKILL')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    known = {one.value: one.name for one in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"


def boot_id() -> str:
    """Identifies the current boot of the machine; a question mark if the system is not Linux."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "?"


def addresses() -> list[list[str]]:
    """Addresses at which other hosts may reach this one: pairs of interface, and address with prefix length.

    Loopback and IPv6 link-local addresses are left out, and so are IPv4 interfaces that are down. Empty if the system
    is not Linux.
    """
    return [*_ipv4(), *_ipv6()] if sys.platform.startswith("linux") else []


_UP, _LOOPBACK = 0x1, 0x8
_INTERFACES, _FLAGS, _NETMASK = 0x8912, 0x8913, 0x891B
"""Linux's SIOCGIFCONF, SIOCGIFFLAGS, SIOCGIFNETMASK."""


def _ipv4() -> list[list[str]]:
    import array
    import fcntl
    import struct

    entry = 40 if struct.calcsize("P") == 8 else 32
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            room = array.array("B", bytes(entry * 256))
            request = struct.pack("iP", len(room), room.buffer_info()[0])
            (size, _) = struct.unpack("iP", fcntl.ioctl(probe, _INTERFACES, request))
            for at in range(0, size, entry):
                name = bytes(room[at : at + 16])
                (flags,) = struct.unpack("H", fcntl.ioctl(probe, _FLAGS, name + bytes(24))[16:18])
                if flags & _UP and not flags & _LOOPBACK:
                    mask = fcntl.ioctl(probe, _NETMASK, name + bytes(24))[20:24]
                    prefix = int.from_bytes(mask, "big").bit_count()
                    address = socket.inet_ntoa(bytes(room[at + 20 : at + 24]))
                    found.append([name.partition(b"\0")[0].decode(errors="replace"), f"{address}/{prefix}"])
        except OSError:  # an interface was removed meanwhile
            pass
    return found


def _ipv6() -> list[list[str]]:
    """Global addresses, without those that the system itself would not use (tentative, failed, deprecated)."""
    try:
        with open("/proc/net/if_inet6") as lines:
            words = [line.split() for line in lines]
    except OSError:  # the system has no IPv6
        return []
    return [
        [name, f"{socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))}/{int(prefix, 16)}"]
        for address, _, prefix, scope, flags, name in words
        if scope == "00" and not int(flags, 16) & 0x68
    ]


def _gpus() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def _out_of_memory_kills() -> int:
    """The kernel's count of out-of-memory kills, which any user may read."""
    try:
        with open("/proc/vmstat") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except OSError:
        return 0
