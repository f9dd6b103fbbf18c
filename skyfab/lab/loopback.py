"""Lab hosts that need no root: an sshd of the current user on a high port of 127.0.0.1."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from . import sshd
from .host import LabHost, Plan
from .network import free_ports
from .process import LabProcess, Process, listed, spawn

LIMITS = (
    "All hosts share this machine's files, users, processes and hostname; only their caches differ.",
    "There is one user, and no password login.",
    "A host cannot be cut off, slowed, delayed, kept from its peers, or given a small disk.",
    "Hosts have whatever route to the internet this machine has.",
)
MARK = "SKYFAB_LAB_HOST"


@dataclass(frozen=True, kw_only=True)
class LoopbackHost(LabHost):
    """A host that is this machine on another port. Its processes are recognized by a variable in their environment."""

    kind: ClassVar[str] = "loopback"

    @property
    def mark(self) -> str:
        return f"{MARK}={self.folder}"

    def inside(self, argv: Sequence[str], user: str | None) -> tuple[Sequence[str], dict[str, str]]:
        if user not in (None, self.user):
            self._cannot("be another user")
        return argv, {**os.environ, MARK: str(self.folder)}

    def path(self, path: str) -> Path:
        return Path(path)

    def processes(self) -> list[LabProcess]:
        if not Path("/proc/self/environ").exists():
            self._cannot("list its processes here")
        return listed(self._ours)

    def kill(self) -> None:
        process = self.recorded("init")
        if process is not None:
            process.end()
        if Path("/proc/self/environ").exists():
            for left in self.processes():
                self._end(left)
        (self.folder / "init.pid").unlink(missing_ok=True)

    def reboot(self) -> None:
        self.kill()
        boot([self])

    def _ours(self, pid: int) -> bool:
        try:
            return self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def _end(self, left: LabProcess) -> None:
        try:
            process = Process.of(left.outside)
        except ProcessLookupError:
            return
        if self._ours(process.pid):  # checked again, because the pid may have been reused
            process.end()


def build(plan: Plan) -> list[LoopbackHost]:
    """Creates the hosts' keys and settings, and finds free ports. Nothing runs yet."""
    keys_file = plan.folder / "authorized_keys"
    keys_file.write_text(f"{plan.client_key}\n")
    return [_build(plan, number, port, keys_file) for number, port in enumerate(free_ports(plan.count), 1)]


def boot(hosts: Sequence[LoopbackHost]) -> None:
    """Starts the servers, and returns when all of them accept connections."""
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd requires it; not removed: other servers may use it
    for host in hosts:
        argv = [sshd.program(), "-D", "-e", "-f", str(host.folder / "sshd_config")]
        host.record("init", spawn(argv, env=os.environ, log=host.log))
    for host in hosts:
        sshd.wait(host)


def _build(plan: Plan, number: int, port: int, keys_file: Path) -> LoopbackHost:
    name = plan.names[number - 1]
    folder = plan.folder / name
    (folder / "cache").mkdir(parents=True)
    host = LoopbackHost(
        name=name,
        number=number,
        address="127.0.0.1",
        port=port,
        user=pwd.getpwuid(os.geteuid()).pw_name,
        identity=plan.identity,
        host_key=sshd.make_key(folder / "key", name),
        python=plan.python,
        lent_python=plan.lends_python,
        cache=str(folder / "cache"),
        folder=folder,
    )
    settings = sshd.Settings(
        host_key=folder / "key",
        authorized_keys=keys_file,
        port=port,
        listen="127.0.0.1",
        strict=False,
        mark=host.mark,
        other=plan.sshd,
    )
    (folder / "sshd_config").write_text(settings.text())
    return host
