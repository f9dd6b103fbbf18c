"""Lab hosts made of Linux namespaces, each with its own network, pids, hostname, mounts and root folder."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skyfab.errors import Unreachable

from . import accounts, delay, relay, root, sshd
from .boot import Start
from .host import LabHost, Plan
from .network import (
    GATEWAY,
    GUEST,
    INTERFACE,
    NAT_CABLE,
    Network,
    divert,
    divert_no_more,
    free_ports,
    ip,
    make_room_for_neighbours,
    shape,
)
from .process import LabProcess, Process, listed, spawn
from .root import PATH


@dataclass(frozen=True, kw_only=True)
class NamespaceHost(LabHost):
    """A host in namespaces of this machine. Its first process is its sshd."""

    kind: ClassVar[str] = "namespace"

    network: Network
    lent: tuple[str, ...]
    """Folders of this machine that are mounted read-only: those of its interpreter, and those requested."""

    def inside(self, argv: Sequence[str], user: str | None) -> tuple[Sequence[str], dict[str, str]]:
        account = accounts.find(self.path("/"), user or "root")
        enter = self._enter("mount", "uts", "ipc", "net", "pid")
        if account.uid:
            enter += [f"--setuid={account.uid}", f"--setgid={account.gid}"]
        environ = {"PATH": PATH, "HOME": account.home, "USER": account.name, "LOGNAME": account.name}
        return [*enter, "--root", "--wd", "--", *argv], environ

    def path(self, path: str) -> Path:
        return Path(f"/proc/{self.init.pid}/root") / path.lstrip("/")

    def processes(self) -> list[LabProcess]:
        space = _pid_space(self.init.pid)
        return listed(lambda pid: _pid_space(pid) == space)

    def add_user(
        self,
        name: str,
        *,
        shell: str = "/bin/sh",
        home: str | None = None,
        password: str | None = None,
        bashrc: str | None = None,
    ) -> None:
        account = accounts.add(self.path("/"), name, shell=shell, home=home, password=password)
        if bashrc is not None:
            file = self.path(account.home) / ".bashrc"
            file.write_text(bashrc)
            os.chown(file, account.uid, account.gid)

    def kill(self) -> None:
        delays = [path.stem for path in self.folder.glob("delay.*.pid")]
        for role in ("init", "parent", "nat", *delays):
            self._end(role)
        self.network.unplug(self.number)

    def _end(self, role: str) -> None:
        process = self.recorded(role)
        if process is not None:
            process.end()
            (self.folder / f"{role}.pid").unlink(missing_ok=True)

    def reboot(self) -> None:
        self.kill()
        boot([self])

    @property
    def addresses(self) -> dict[str, str]:
        return self.network.addresses(self.number)

    def cut(self, interface: str | None = None) -> None:
        self._switch(interface, "down")

    def restore(self, interface: str | None = None) -> None:
        self._switch(interface, "up")

    def slow(self, mbit: float | None) -> None:
        for device, inside in self._ends():
            shape(device, mbit, inside=inside)

    def delay(self, milliseconds: float | None) -> None:
        for device, inside in self._ends():
            divert_no_more(device, inside=inside)
            self._end(f"delay.{device}")
            if milliseconds is not None:
                self._hold(device, milliseconds / 2000, inside)

    def block(self, other: LabHost) -> None:
        for address in self._sees(other):
            self.run(["ip", "route", "replace", "blackhole", address])

    def unblock(self, other: LabHost) -> None:
        for address in self._sees(other):
            self.run(["ip", "route", "delete", "blackhole", address])

    def _switch(self, interface: str | None, state: str) -> None:
        for each in self.network.interfaces if interface is None else [interface]:
            cable = self.network.cable(self.number, each)
            ip(f"link set {cable} {state}", inside=self._beyond(cable))

    def _sees(self, other: LabHost) -> list[str]:
        """The addresses of another host, without those that this host has too, as behind forwarded ports."""
        return [address for address in other.addresses.values() if address not in self.addresses.values()]

    def small_disk(self, path: str, megabytes: float) -> None:
        self.run(["mkdir", "-p", path])
        was = self.path(path).stat()
        options = f"size={int(megabytes * 1024)}k,uid={was.st_uid},gid={was.st_gid},mode={was.st_mode & 0o7777:o}"
        self.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path])

    def _enter(self, *spaces: str) -> list[str]:
        return ["nsenter", f"--target={self.init.pid}", *(f"--{space}" for space in spaces)]

    def _ends(self) -> Iterator[tuple[str, list[str]]]:
        """Both ends of each of its cables, each with the command prefix for its network namespace."""
        for interface in self.network.interfaces:
            cable = self.network.cable(self.number, interface)
            yield cable, self._beyond(cable)
            yield interface, self._enter("net")

    def _hold(self, device: str, seconds: float, inside: Sequence[str]) -> None:
        """Holds back, for so long, what one end of a cable sends."""
        tap = f"{device}d"
        argv = [*inside, sys.executable, "-I", "-S", delay.__file__, tap, str(seconds)]
        _run(self, f"delay.{device}", argv, "it cannot be delayed")
        divert(device, tap, inside=inside)

    def _beyond(self, cable: str) -> list[str]:
        """The command prefix that runs a command in the network namespace of the cable's other end."""
        nat = self.recorded("nat") if cable == NAT_CABLE else None
        return ["nsenter", f"--target={nat.pid}", "--net"] if nat is not None else []


def build(plan: Plan) -> list[NamespaceHost]:
    """Creates the hosts' keys and their network. Nothing runs yet."""
    lent = tuple(root.lent(plan.python if plan.lends_python else None, plan.lend))
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda name: _key(plan.folder / name, name), plan.names))
    make_room_for_neighbours(plan.count)
    ports = free_ports(plan.count) if plan.forwarded else [22] * plan.count
    wires = Network.open(second=plan.second_network, isolated=plan.isolated, forwarded=plan.forwarded)
    return [
        NamespaceHost(
            name=name,
            number=number,
            address="127.0.0.1" if plan.forwarded else wires.addresses(number)[INTERFACE],
            port=ports[number - 1],
            user=plan.user,
            identity=plan.identity,
            host_key=key,
            python=plan.python,
            lent_python=plan.lends_python,
            cache=None,
            folder=plan.folder / name,
            network=wires,
            lent=lent,
        )
        for number, (name, key) in enumerate(zip(plan.names, keys, strict=True), 1)
    ]


def prepare(hosts: Sequence[NamespaceHost], plan: Plan) -> None:
    """Fills the hosts' root folders before their first boot."""
    root.prepare_common(plan)
    everybody = {host.name: host.addresses[INTERFACE] for host in hosts}

    def fill(host: NamespaceHost) -> None:
        names = everybody if plan.reverse_dns and not plan.forwarded else {host.name: "127.0.1.1"}
        root.prepare(host.folder / "upper", plan, host.name, names=names, key=host.folder / "key")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, hosts))


def boot(hosts: Sequence[NamespaceHost]) -> None:
    """Starts hosts in parallel, and returns when all of them accept connections."""
    with ExitStack() as stack:
        starting = [(host, stack.enter_context(_start(host))) for host in hosts]
        nats = {host.number: _nat(host) for host in hosts if host.network.forwarded}
        pids = {host.number: _first(host, start) for host, start in starting}
        hosts[0].network.plug(pids, nats)
        for pid in nats.values():
            up = ("link set lo up", f"address add {GATEWAY}/24 dev {NAT_CABLE}", f"link set {NAT_CABLE} up")
            ip(*up, inside=["nsenter", f"--target={pid}", "--net"])
        for _, start in starting:
            start.go()
        for host, start in starting:
            if not start.up():
                raise Unreachable(f"it did not come up: {sshd.last_words(host.log)}", host=host.name)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(sshd.wait, hosts))


def _pid_space(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:  # it has exited meanwhile
        return None


def _key(folder: Path, name: str) -> str:
    folder.mkdir(parents=True)
    return sshd.make_key(folder / "key", name)


def _start(host: NamespaceHost) -> Start:
    start = Start.begin(host.folder, name=host.name, addresses=host.addresses, lent=host.lent, log=host.log)
    host.record("parent", start.process)
    return start


def _nat(host: NamespaceHost) -> int:
    """Starts the NAT in front of a host, which forwards the host's port; returns its pid.

    The port is bound in this machine's namespace. The NAT has its own namespace, in which the host's address is unique.
    """
    with socket.create_server(("127.0.0.1", host.port), backlog=128) as listener:
        argv = ["unshare", "--net", sys.executable, "-I", "-S", relay.__file__, GUEST, "22"]
        return _run(host, "nat", argv, "its port could not be forwarded", stdin=listener.fileno()).pid


def _run(host: NamespaceHost, role: str, argv: Sequence[str], failure: str, *, stdin: int | None = None) -> Process:
    """Starts a program of the lab for a host, and returns when it has said that it is up."""
    told, tells = os.pipe()
    try:
        try:
            process = spawn(argv, env={"PATH": PATH}, stdin=stdin, stdout=tells, log=host.log)
        finally:
            os.close(tells)
        host.record(role, process)
        if not os.read(told, 32):
            raise Unreachable(f"{failure}: {sshd.last_words(host.log)}", host=host.name)
    finally:
        os.close(told)
    return process


def _first(host: NamespaceHost, start: Start) -> int:
    """The pid, on this machine, of the host's first process."""
    try:
        pid = start.first()
        host.record("init", Process.of(pid))
    except (EOFError, ProcessLookupError):
        raise Unreachable(f"cannot make its namespaces: {sshd.last_words(host.log)}", host=host.name) from None
    return pid
