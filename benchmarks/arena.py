"""`Arena`: the lab's hosts that benchmarks run on, reached through a skyfab pool or through plain ssh."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import skyfab as sky
from benchmarks.result import Skip
from benchmarks.scale import Scale
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.lab import Lab, LabHost
from skyfab.ssh.openssh import OpenSSH


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Running lab hosts, and the scale of the benchmarks."""

    lab: Lab
    inventory: Inventory
    scale: Scale
    stack: ExitStack = field(default_factory=ExitStack)
    others: list[Arena] = field(default_factory=list)

    @classmethod
    @contextmanager
    def open(cls, scale: Scale, *, hosts: int = 4, lend: Sequence[str] = ()) -> Iterator[Arena]:
        """Starts a lab of its own. `lend` has folders of this machine that its hosts need."""
        default = {"KexAlgorithms": "+curve25519-sha256"}  # ssh's own choice: a lab leaves the slow one out
        with Lab.start(count=hosts, python=sys.executable, sshd=default, lend=lend) as lab, ExitStack() as stack:
            yield replace(cls.on(lab, scale), stack=stack)

    @classmethod
    def on(cls, lab: Lab, scale: Scale) -> Arena:
        """Uses the hosts of a running lab, with the OpenSSH transport."""
        found = Inventory.of(lab.inventory)
        by_ssh = {name: replace(host, transport="openssh") for name, host in found.hosts.items()}
        return cls(lab=lab, inventory=replace(found, hosts=by_ssh), scale=scale)

    def crowd(self) -> Arena:
        """As many hosts as the largest pool has: a lab that is started once, and stays until this one ends."""
        if not self.others:
            self.others.append(self.stack.enter_context(Arena.open(self.scale, hosts=max(self.scale.hosts))))
        return self.others[0]

    @property
    def hosts(self) -> list[Host]:
        return list(self.inventory.hosts.values())

    @property
    def first(self) -> Host:
        return self.hosts[0]

    @property
    def first_machine(self) -> LabHost:
        """The first host, as the lab's object."""
        return self.lab.hosts[0]

    @property
    def left(self) -> int:
        """Bytes that have left this machine for the hosts of the lab. Raises Skip where they cannot be counted."""
        if self.lab.kind != "namespace":
            raise Skip("links of this lab cannot be measured")
        return int(Path(f"/sys/class/net/{self.first_machine.network.bridge}/statistics/tx_bytes").read_text())

    def pool(self, *hosts: Host, **options: Any) -> sky.Compute:
        """A pool of these hosts, without output."""
        return sky.Compute(hosts, inventory=self.inventory, ui="none", **options)

    @contextmanager
    def ssh(self, host: Host, command: str) -> Iterator[list[str]]:
        """The command line that runs a command on a host with the same ssh and options that a pool uses."""
        transport = OpenSSH(host, self.inventory)
        try:
            yield transport.argv(command)
        finally:
            transport.close()

    @contextmanager
    def ssh_config(self) -> Iterator[Path]:
        """An ssh_config file with the same options, for ``ssh NAME`` or ``ssh ADDRESS`` to every host of the lab."""
        transports = {host.name: OpenSSH(host, self.inventory) for host in self.hosts}
        path = self.lab.folder / "ssh_config"
        with path.open("w") as file:
            for name, transport in transports.items():
                words = transport.argv("")
                options = [words[at + 1] for at, word in enumerate(words) if word == "-o"]
                file.write(f"Host {name} {words[-2]}\n  HostName {words[-2]}\n")
                file.writelines("  {} {}\n".format(*option.split("=", 1)) for option in options)
        try:
            yield path
        finally:
            path.unlink()
            for transport in transports.values():
                transport.close()
