"""A host of a lab: address and credentials, inspection, and fault injection (kill, cut, slow, delay, block)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skyfab._util.scripts import read
from skyfab.errors import Unreachable, UsageError

from . import accounts, delay, relay, sshd
from .network import GUEST, NAT_CABLE, Network, divert, divert_no_more, enter, ip, shape
from .process import LabProcess, Process, listed, spawn
from .root import PATH, SHARED

UNSHARE = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
SCRIPT = read("lab/boot.sh")
IDENTITY = "id_ed25519"
"""The name of the private key in the folder of a lab."""


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """One host, made of namespaces of this machine. Its first process is its sshd.

    It has no mutable state: pids are stored in its folder, so every process sees the same.
    """

    kind: ClassVar[str] = "namespace"

    name: str
    number: int
    address: str
    port: int
    user: str
    """The login user in the inventory."""
    host_key: str
    python: str
    """The interpreter on the host; empty for none."""
    lent_python: bool
    """Whether it is mounted from this machine; then the inventory names it."""
    folder: Path
    wires: Network | None = None
    """Its network; None for a loopback host."""
    lent: tuple[str, ...] = ()
    """Folders of this machine that are mounted read-only: those of its interpreter, and those requested."""

    def __str__(self) -> str:
        state = "up" if self.up else "down"
        return f"{self.name}  {self.user}@{self.address}:{self.port}  {self.kind}  {state}"

    @property
    def identity(self) -> Path:
        """The private key that every user accepts."""
        return self.folder.parents[1] / IDENTITY

    @property
    def cache(self) -> str | None:
        """The folder of skyfab's cache on the host; None for skyfab's default."""
        return None

    @property
    def log(self) -> Path:
        """The log of its sshd and of errors at boot."""
        return self.folder / "log"

    @property
    def network(self) -> Network:
        """Raises UsageError for a loopback host."""
        if self.wires is None:
            raise self._cannot()
        return self.wires

    @property
    def addresses(self) -> dict[str, str]:
        """Its own addresses, by interface. Behind a forwarded port, `address` is not among them."""
        return self.network.addresses(self.number)

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

    # ---- inspection

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
        account = accounts.find(self.path("/"), user or "root")
        words = ["nsenter", f"--target={self.init.pid}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        if account.pw_uid:
            words += [f"--setuid={account.pw_uid}", f"--setgid={account.pw_gid}"]
        environ = {"PATH": PATH, "HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
        return [*words, "--root", "--wd", "--", *argv], environ

    def path(self, path: str) -> Path:
        """The path on this machine of a host's file, which is given by its absolute path on the host.

        Do not follow a symlink to an absolute path: it would resolve to this machine's file.
        """
        return Path(f"/proc/{self.init.pid}/root") / path.lstrip("/")

    def processes(self) -> list[LabProcess]:
        """All processes of the host."""
        space = _pid_space(self.init.pid)
        return listed(lambda pid: _pid_space(pid) == space)

    # ---- beginning and end

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
        account = accounts.add(self.path("/"), name, shell=shell, home=home, password=password)
        if bashrc is not None:
            file = self.path(account.pw_dir) / ".bashrc"
            file.write_text(bashrc)
            os.chown(file, account.pw_uid, account.pw_gid)

    def boot(self) -> None:
        """Starts the host, whose network namespace exists; returns when its sshd accepts connections."""
        if self.network.forwarded:
            # The port is bound in this machine's namespace. The NAT has its own, in which the host's address is unique.
            with socket.create_server(("127.0.0.1", self.port), backlog=128) as listener:
                self._start("nat", self.network.nat(self.number), relay.__file__, GUEST, "22", stdin=listener.fileno())
        pairs = " ".join(f"{interface}={address}" for interface, address in self.addresses.items())
        words = ["sh", "-c", SCRIPT, "boot", str(self.folder), " ".join(SHARED), self.name, pairs]
        words += [sshd.program(), *self.lent]
        pid = self._spawn("parent", [*enter(self.network.space(self.number)), *UNSHARE, *words])
        with suppress(ProcessLookupError):  # it has exited already, which `wait` reports
            self.record("init", Process.of(int(pid)))
        self.wait()

    def wait(self, timeout: float = 60.0) -> None:
        """Waits for the banner of its sshd. Raises Unreachable, with the end of its log, on failure or timeout."""
        deadline = time.monotonic() + timeout
        while not (self.up and sshd.greets(self.address, self.port)):
            if not self.up or time.monotonic() > deadline:
                raise self._failed()
            time.sleep(0.01)

    def kill(self) -> None:
        """Stops the host at once, like a power failure; its files stay for `reboot`."""
        delays = [path.stem for path in self.folder.glob("delay.*.pid")]
        for role in ("init", "parent", "nat", *delays):
            self._end(role)
        self.network.unplug(self.number)

    def reboot(self) -> None:
        """Kills the host if it is up, and starts it again with the same files, keys and address."""
        self.kill()
        self.network.plug([self.number])
        self.boot()

    # ---- faults

    def cut(self, interface: str | None = None) -> None:
        """Disconnects an interface, or all: packets are lost in both directions, without an error to either side."""
        self._switch(interface, "down")

    def restore(self, interface: str | None = None) -> None:
        """Undoes `cut`."""
        self._switch(interface, "up")

    def slow(self, mbit: float | None) -> None:
        """Limits its interfaces, in each direction, to this many megabits per second; None removes the limit."""
        for device, space in self._ends():
            shape(device, mbit, space=space)

    def delay(self, milliseconds: float | None) -> None:
        """Adds this delay to each round trip, on any network, half in each direction; None removes it.

        Bandwidth stays as it is, also that of `slow`. What is on its way when the delay changes is lost.
        """
        for device, space in self._ends():
            divert_no_more(device, space=space)
            self._end(f"delay.{device}")
            if milliseconds is not None:
                tap = f"{device}d"
                self._start(f"delay.{device}", space, delay.__file__, tap, str(milliseconds / 2000))
                divert(device, tap, space=space)

    def block(self, other: LabHost) -> None:
        """Drops everything that this host sends to another one, on any network."""
        for address in self._sees(other):
            self.run(["ip", "route", "replace", "blackhole", address])

    def unblock(self, other: LabHost) -> None:
        """Undoes `block`."""
        for address in self._sees(other):
            self.run(["ip", "route", "delete", "blackhole", address])

    def small_disk(self, path: str, megabytes: float) -> None:
        """Mounts an empty disk of that size over a folder of the host, with the folder's owner and mode."""
        self.run(["mkdir", "-p", path])
        was = self.path(path).stat()
        options = f"size={int(megabytes * 1024)}k,uid={was.st_uid},gid={was.st_gid},mode={was.st_mode & 0o7777:o}"
        self.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path])

    def _switch(self, interface: str | None, state: str) -> None:
        for each in self.network.interfaces if interface is None else [interface]:
            cable = self.network.cable(self.number, each)
            ip(f"link set {cable} {state}", space=self._beyond(cable))

    def _sees(self, other: LabHost) -> list[str]:
        """The addresses of another host, without those that this host has too, as behind forwarded ports."""
        return [address for address in other.addresses.values() if address not in self.addresses.values()]

    def _ends(self) -> Iterator[tuple[str, str]]:
        """Both ends of each of its cables, each with its network namespace."""
        for interface in self.network.interfaces:
            cable = self.network.cable(self.number, interface)
            yield cable, self._beyond(cable)
            yield interface, self.network.space(self.number)

    def _beyond(self, cable: str) -> str:
        """The network namespace of the cable's other end."""
        return self.network.nat(self.number) if cable == NAT_CABLE else ""

    def _start(self, role: str, space: str, program: str, *words: str, stdin: int | None = None) -> None:
        """Starts a program of the lab in a network namespace; returns when it has said that it is up."""
        self._spawn(role, [*enter(space), sys.executable, "-I", "-S", program, *words], stdin=stdin)

    def _spawn(self, role: str, argv: Sequence[str], *, stdin: int | None = None) -> str:
        """Starts a process of the host; returns the first line that it prints. Raises Unreachable without one."""
        reads, writes = os.pipe()
        with os.fdopen(reads) as output:
            try:
                self.record(role, spawn(argv, env={"PATH": PATH}, stdin=stdin, stdout=writes, log=self.log))
            finally:
                os.close(writes)
            line = output.readline()
        if not line:
            raise self._failed()
        return line

    def _end(self, role: str) -> None:
        process = self.recorded(role)
        if process is not None:
            process.end()
            (self.folder / f"{role}.pid").unlink(missing_ok=True)

    def _failed(self) -> Unreachable:
        """The error for a host that did not start, with the end of its log on one line."""
        words = self.log.read_text(errors="replace").strip().splitlines()[-5:] if self.log.exists() else []
        return Unreachable(f"its sshd did not start: {' / '.join(words) or 'its log is empty'}", host=self.name)

    def _cannot(self) -> UsageError:
        hint = 'Lab.start(kind="namespace"), as root on Linux'
        return UsageError(f"a {self.kind} host cannot do that", host=self.name, hint=hint)


def _pid_space(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:  # it has exited meanwhile
        return None
