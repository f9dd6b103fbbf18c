"""A cable that is pulled at random moments, and put back: this machine's own, or one host's.

There are two ways. `LabHost.cut` takes the carrier from both ends, as a pulled plug does: the systems know that nothing
goes out, try every half second, and connections come back with it. `silence` loses the packets on their way, as the
world does: what is sent again is sent ever more rarely, and a new connection is faster than the old one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from skyfab.lab import Lab, LabHost
from skyfab.lab.network import INTERFACE, ip


def settle(hosts: Sequence[LabHost]) -> None:
    """Both ends of each cable know each other for good, as they know a router behind which packets are lost.

    Else they ask for each other's address all the time, and when there is an answer send all that waits for it.
    """
    for host in hosts:
        wires = host.network
        ip(f"neigh replace {host.address} lladdr {wires.hardware(host.number)} dev {wires.bridge} nud permanent")
        bridge = host.address.rpartition(".")[0] + ".1"
        gateway = ["neigh", "replace", bridge, "lladdr", wires.hardware(0)]
        host.run(["ip", *gateway, "dev", INTERFACE, "nud", "permanent"])


def silence(hosts: Sequence[LabHost]) -> None:
    """Whatever is sent to these hosts, or by them, is lost, and nobody is told."""
    ip(*(f"link set {_cable(host)} nomaster" for host in hosts))


def restore(hosts: Sequence[LabHost]) -> None:
    """Ends both kinds of cut. Hosts that are down have no cable."""
    for host in (host for host in hosts if host.up):
        ip(f"link set {_cable(host)} master {host.network.bridge} up")


def _cable(host: LabHost) -> str:
    return host.network.cable(host.number)


class Cable:
    """Pulls cables on a thread of its own: one cut of each length, in this order, with pauses between them.

    ``with Cable(lab, seed, [0.5, 1.0]) as cable:`` begins at once. At the end every cable is in again.
    """

    def __init__(
        self,
        lab: Lab,
        seed: int,
        lengths: Sequence[float],
        *,
        hosts: Sequence[LabHost] = (),
        longest: float = float("inf"),
        pause: tuple[float, float] = (0.1, 0.9),
    ) -> None:
        """`hosts` may lose theirs alone, for up to `longest` seconds; else it is all of them at once."""
        self._lab = lab
        self._random = random.Random(seed)
        self._lengths = lengths
        self._hosts = hosts
        self._longest = longest
        self._pause = pause
        self._stop = threading.Event()
        self.over = threading.Event()
        """Every cut has been made."""
        self._thread = threading.Thread(target=self._run, name=f"cable-{seed}", daemon=True)

    def __enter__(self) -> Cable:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        restore(self._lab.hosts)

    def wait(self) -> None:
        """Until every cut has been made."""
        assert self.over.wait(sum(self._lengths) + len(self._lengths) * (self._pause[1] + 5) + 10)

    def _run(self) -> None:
        began = time.monotonic()
        for length in self._lengths:
            if self._stop.wait(self._random.uniform(*self._pause)):
                return
            alone = self._random.choice([None, *self._hosts]) if length <= self._longest else None
            hosts = self._lab.hosts if alone is None else [alone]
            silently = length > 2 or self._random.random() < 0.5
            print(
                f"{time.monotonic() - began:6.2f} s: {' '.join(host.name for host in hosts)} cut"
                f" {'silently ' * silently}for {length:.2f} s"
            )
            if silently:
                silence(hosts)
            else:
                for host in hosts:
                    host.cut()
            self._stop.wait(length)
            restore(hosts)
        self._stop.wait(self._random.uniform(*self._pause))
        self.over.set()
