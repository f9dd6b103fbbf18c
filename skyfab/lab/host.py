"""One host of a lab, whatever it is made of: where it is, what can be seen of it, what can befall it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

from skyfab.errors import Unreachable, UsageError

from .process import LabProcess, Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the hosts of a lab have in common before there are any."""

    folder: Path
    """Each host has a folder of its name in it."""
    count: int
    user: str
    python: str
    """The interpreter that hosts have; empty where they are to have none."""
    lends_python: bool
    """Whether it is lent to them, and the inventory names it; else it is the system's own."""
    identity: Path
    client_key: str
    password: str
    lend: tuple[str, ...]
    """Folders that namespace hosts see besides the system's, read-only."""
    second_network: bool
    isolated: bool
    forwarded: bool
    reverse_dns: bool
    shells: Mapping[str, str]
    """Login shells by user, where they are not to have the usual one."""

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.count + 1)]


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """One host: data only. What runs is written in its folder, so any process sees the same."""

    kind: ClassVar[str]

    name: str
    number: int
    address: str
    port: int
    user: str
    """Who the inventory logs in as."""
    identity: Path
    """The private key that lets every user in."""
    host_key: str
    python: str
    """An interpreter there; empty where there is none."""
    lent_python: bool
    """Whether it is lent from this machine: then the inventory names it."""
    cache: str | None
    """Where skyfab keeps its files there; None is skyfab's own default."""
    folder: Path

    @property
    def log(self) -> Path:
        """What its sshd wrote, and what went wrong at boot."""
        return self.folder / "log"

    @property
    def init(self) -> Process:
        """Its first process. Raises Unreachable when it was never started or is gone."""
        process = self.recorded("init")
        if process is None or not process.alive:
            raise Unreachable("the lab host is down", host=self.name, hint="host.reboot()")
        return process

    @property
    def up(self) -> bool:
        process = self.recorded("init")
        return process is not None and process.alive

    def record(self, role: str, process: Process) -> None:
        """Writes down a process of this host, to be ended later by whoever stops the lab."""
        (self.folder / f"{role}.pid").write_text(str(process))

    def recorded(self, role: str) -> Process | None:
        try:
            return Process.parse((self.folder / f"{role}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def addresses(self) -> dict[str, str]:
        """Its own addresses, by interface. Behind a forwarded port `address` is none of them."""
        self._cannot("say its addresses")

    def __str__(self) -> str:
        return f"{self.name} {self.user}@{self.address}:{self.port}"

    # What follows is real on namespace hosts; a host that cannot do it says so.

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        stdin: str | None = None,
        check: bool = True,
        timeout: float | None = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host without SSH, as root where nobody is named, and returns its output as text."""
        self._cannot("run commands without SSH")

    def path(self, path: str) -> Path:
        """Where a file of the host, named by its absolute path there, is found from here.

        Do not follow a link to an absolute path: from here it leads to this machine's file.
        """
        self._cannot("show its files")

    def processes(self) -> list[LabProcess]:
        """Everything that runs on the host."""
        self._cannot("list its processes")

    def add_user(
        self,
        name: str,
        *,
        shell: str = "/bin/sh",
        home: str | None = None,
        password: str | None = None,
        bashrc: str | None = None,
    ) -> None:
        """Adds a user who can log in with the lab's key, and with the password if one is given."""
        self._cannot("have more users")

    def kill(self) -> None:
        """The host is gone at once, as when its power fails; its files stay for `reboot`."""
        self._cannot("be killed")

    def reboot(self) -> None:
        """Kills the host if it is up and starts it again: same files, keys and address."""
        self._cannot("reboot")

    def cut(self, interface: str | None = None) -> None:
        """Pulls a cable, or all: packets are lost both ways, nothing is told to anyone."""
        self._cannot("be cut off")

    def restore(self, interface: str | None = None) -> None:
        """Puts it back."""
        self._cannot("be cut off")

    def slow(self, mbit: float | None) -> None:
        """Limits its cables, each way, to so many megabits a second; None ends it."""
        self._cannot("be slowed")

    def block(self, other: LabHost) -> None:
        """Hides another host from this one: nothing it sends there goes out, on any network."""
        self._cannot("be kept from its peers")

    def unblock(self, other: LabHost) -> None:
        """Ends `block`."""
        self._cannot("be kept from its peers")

    def small_disk(self, path: str, megabytes: float) -> None:
        """Puts an empty disk of that size at a folder of the host, owned as the folder was."""
        self._cannot("have a small disk")

    def _cannot(self, what: str) -> NoReturn:
        raise UsageError(
            f"a {self.kind} host cannot {what}", host=self.name, hint='Lab.start(kind="namespace"), as root on Linux'
        )
