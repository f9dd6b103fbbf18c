"""Lab hosts that need no root: an sshd of the current user on a high port of 127.0.0.1."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from . import sshd
from .host import LabHost
from .network import free_ports
from .plan import Plan
from .process import LabProcess, Process, listed, spawn

LIMITS = (
    "All hosts share this machine's files, users, processes and hostname; only their caches differ.",
    "There is one user, and no password login.",
    "Hosts cannot be disconnected, slowed, delayed, blocked from each other, or given a small disk.",
    "Hosts have whatever route to the internet this machine has.",
)
MARK = "SKYFAB_LAB_HOST"


@dataclass(frozen=True, kw_only=True)
class LoopbackHost(LabHost):
    """A host that is this machine on another port. Its processes are recognized by a variable in their environment."""

    kind: ClassVar[str] = "loopback"

    @property
    def cache(self) -> str:
        return str(self.folder / "cache")

    def inside(self, argv: Sequence[str], user: str | None) -> tuple[Sequence[str], dict[str, str]]:
        if user not in (None, self.user):
            raise self._cannot()
        return argv, {**os.environ, MARK: str(self.folder)}

    def path(self, path: str) -> Path:
        return Path(path)

    def processes(self) -> list[LabProcess]:
        if not Path("/proc/self/environ").exists():
            raise self._cannot()
        return listed(self._ours)

    def add_user(self, name: str, **account: Any) -> None:
        raise self._cannot()

    def small_disk(self, path: str, megabytes: float) -> None:
        raise self._cannot()

    def boot(self) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd requires it; other servers may use it
        argv = [sshd.program(), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        self.record("init", spawn(argv, env=os.environ, log=self.log))
        self.wait()

    def kill(self) -> None:
        self._end("init")
        if Path("/proc/self/environ").exists():
            for left in self.processes():
                with suppress(ProcessLookupError):
                    process = Process.of(left.outside)
                    if self._ours(process.pid):  # checked again, because the pid may have been reused
                        process.end()

    def reboot(self) -> None:
        self.kill()
        self.boot()

    def _ours(self, pid: int) -> bool:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"{MARK}={self.folder}".encode() in variables


def build(plan: Plan) -> list[LoopbackHost]:
    """Creates the hosts' keys and settings, and finds free ports. Nothing runs yet."""
    keys_file = plan.folder / "authorized_keys"
    keys_file.write_text(f"{plan.client_key}\n")
    return [_build(plan, number, port, keys_file) for number, port in enumerate(free_ports(plan.count), 1)]


def _build(plan: Plan, number: int, port: int, keys_file: Path) -> LoopbackHost:
    name = plan.names[number - 1]
    folder = plan.folder / name
    (folder / "cache").mkdir(parents=True)
    settings = sshd.settings(
        host_key=folder / "key",
        authorized_keys=keys_file,
        other={
            **plan.sshd,
            "Port": str(port),
            "ListenAddress": "127.0.0.1",
            "StrictModes": "no",  # parent folders of the key files may belong to others
            "SetEnv": f'"{MARK}={folder}"',
        },
    )
    (folder / "sshd_config").write_text(settings)
    return LoopbackHost(
        name=name,
        number=number,
        address="127.0.0.1",
        port=port,
        user=pwd.getpwuid(os.geteuid()).pw_name,
        host_key=sshd.make_key(folder / "key", name),
        python=plan.python,
        lent_python=plan.lends_python,
        folder=folder,
    )
