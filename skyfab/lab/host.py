"""Base class of lab hosts: address and credentials, inspection, and fault injection (kill, cut, slow, delay, block)."""

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
    """The settings for the hosts of a new lab."""

    folder: Path
    """Contains a folder for each host, by name."""
    count: int
    user: str
    python: str
    """The interpreter that hosts have; empty for none."""
    lends_python: bool
    """Whether it is mounted into the hosts and named in the inventory; else it is the system's own."""
    identity: Path
    client_key: str
    password: str
    lend: tuple[str, ...]
    """Folders that are mounted read-only into namespace hosts, besides the system's."""
    second_network: bool
    isolated: bool
    forwarded: bool
    reverse_dns: bool
    shells: Mapping[str, str]
    """Login shells by user, other than the default."""
    sshd: Mapping[str, str]
    """Settings of sshd, other than the lab's."""
    passwords: tuple[str, ...]
    """Hosts that take passwords and no keys."""
    codes: tuple[str, ...]
    """Hosts that ask for a password and a one-time code, and take no keys."""

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.count + 1)]


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """One host. It has no mutable state: pids are stored in its folder, so every process sees the same."""

    kind: ClassVar[str]

    name: str
    number: int
    address: str
    port: int
    user: str
    """The login user in the inventory."""
    identity: Path
    """The private key that every user accepts."""
    host_key: str
    python: str
    """The interpreter on the host; empty for none."""
    lent_python: bool
    """Whether it is mounted from this machine; then the inventory names it."""
    cache: str | None
    """The folder of skyfab's cache there; None for skyfab's default."""
    folder: Path

    @property
    def log(self) -> Path:
        """The log of its sshd and of errors at boot."""
        return self.folder / "log"

    @property
    def init(self) -> Process:
        """Its first process. Raises Unreachable if that was never started or has exited."""
        process = self.recorded("init")
        if process is None or not process.alive:
            raise Unreachable("the lab host is down", host=self.name, hint="host.reboot()")
        return process

    @property
    def up(self) -> bool:
        process = self.recorded("init")
        return process is not None and process.alive

    def record(self, role: str, process: Process) -> None:
        """Stores the pid of a process of this host, so that any program can stop it later."""
        (self.folder / f"{role}.pid").write_text(str(process))

    def recorded(self, role: str) -> Process | None:
        try:
            return Process.parse((self.folder / f"{role}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def addresses(self) -> dict[str, str]:
        """Its own addresses, by interface. Behind a forwarded port, `address` is not among them."""
        self._cannot("say its addresses")

    def __str__(self) -> str:
        return f"{self.name} {self.user}@{self.address}:{self.port}"

    # Namespace hosts implement all of the following; other hosts raise UsageError for what they cannot do.

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        stdin: str | None = None,
        check: bool = True,
        timeout: float | None = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host without SSH, as root unless `user` is given, and returns its output as text."""
        words, environ = self.inside(argv, user)
        return subprocess.run(
            words, env=environ, input=stdin or "", capture_output=True, text=True, check=check, timeout=timeout
        )

    def inside(self, argv: Sequence[str], user: str | None) -> tuple[Sequence[str], dict[str, str]]:
        """The command of this machine that runs a command on the host, and its environment."""
        self._cannot("run commands without SSH")

    def path(self, path: str) -> Path:
        """The path on this machine of a host's file, which is given by its absolute path on the host.

        Do not follow a symlink to an absolute path: it would resolve to this machine's file.
        """
        self._cannot("show its files")

    def processes(self) -> list[LabProcess]:
        """All processes of the host."""
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
        """Adds a user who can log in with the lab's key, and with the password if given."""
        self._cannot("have more users")

    def kill(self) -> None:
        """Stops the host at once, like a power failure; its files stay for `reboot`."""
        self._cannot("be killed")

    def reboot(self) -> None:
        """Kills the host if it is up, and starts it again with the same files, keys and address."""
        self._cannot("reboot")

    def cut(self, interface: str | None = None) -> None:
        """Disconnects an interface, or all: packets are lost in both directions, without an error to either side."""
        self._cannot("be cut off")

    def restore(self, interface: str | None = None) -> None:
        """Undoes `cut`."""
        self._cannot("be cut off")

    def slow(self, mbit: float | None) -> None:
        """Limits its interfaces, in each direction, to so many megabits per second; None removes the limit."""
        self._cannot("be slowed")

    def delay(self, milliseconds: float | None) -> None:
        """Lets a round trip to it, on any network, take so much longer, half in each direction; None ends that.

        Bandwidth stays as it is, also that of `slow`. What is on its way when the delay changes is lost.
        """
        self._cannot("be delayed")

    def block(self, other: LabHost) -> None:
        """Drops everything that this host sends to another one, on any network."""
        self._cannot("be kept from its peers")

    def unblock(self, other: LabHost) -> None:
        """Undoes `block`."""
        self._cannot("be kept from its peers")

    def small_disk(self, path: str, megabytes: float) -> None:
        """Mounts an empty disk of that size over a folder of the host, with the folder's owner and mode."""
        self._cannot("have a small disk")

    def _cannot(self, what: str) -> NoReturn:
        raise UsageError(
            f"a {self.kind} host cannot {what}", host=self.name, hint='Lab.start(kind="namespace"), as root on Linux'
        )
