"""The lab of an ordinary user, in a user namespace: inside it this user is root, and starts namespace hosts.

A process (the holder) keeps the namespaces of a lab: those of users, networks and mounts. Programs outside reach the
hosts through ports of 127.0.0.1, and start a program inside for what needs root.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Final

from skyfab._util.scripts import read
from skyfab.errors import UsageError

from . import relay
from .host import LabHost
from .process import Process, spawn
from .root import PATH

ENTER: Final = (
    *("unshare", "--user", "--map-root-user", "--map-auto", "--net", "--mount"),
    *("sh", "-c", read("lab/userns.sh"), "userns"),
)
"""The prefix of a command that is to run in a new user namespace."""
HOLDER, PORTS = "holder.pid", "ports.json"
"""In the folder of a lab: its holder, and the ports of 127.0.0.1 that lead to the hosts."""
LIMITS = ("`host.path` can read only those files of a host that belong to its root, or that everyone may read.",)
_CALL = "import pickle, sys; function, words, options = pickle.load(sys.stdin.buffer); function(*words, **options)"


@dataclass(frozen=True, kw_only=True)
class NestedHost(LabHost):
    """A host in a user namespace, seen from outside."""

    at: tuple[str, int]
    """Its address and port inside."""

    def inside(self, argv: Sequence[str], user: str | None) -> tuple[Sequence[str], dict[str, str]]:
        (program, *words), environ = super().inside(argv, user)
        return [program, "--user", *words], environ

    def _as_root(self, method: str, *arguments: object, **options: object) -> None:
        address, port = self.at
        fields = {name: value for name, value in vars(self).items() if name != "at"}
        host = LabHost(**fields | {"address": address, "port": port})
        call(self.folder.parents[1], getattr(LabHost, method), host, *arguments, **options)

    add_user = partialmethod(_as_root, "add_user")
    kill = partialmethod(_as_root, "kill")
    reboot = partialmethod(_as_root, "reboot")
    cut = partialmethod(_as_root, "cut")
    restore = partialmethod(_as_root, "restore")
    slow = partialmethod(_as_root, "slow")
    delay = partialmethod(_as_root, "delay")
    small_disk = partialmethod(_as_root, "small_disk")


def hold(folder: Path) -> None:
    """Starts the holder of the lab in that folder."""
    reads, writes = os.pipe()
    with os.fdopen(reads) as output:
        holder = spawn([*ENTER, "sh", "-c", "echo up; exec sleep infinity >&2"], env=os.environ, stdout=writes)
        (folder / HOLDER).write_text(str(holder))
        os.close(writes)
        if not output.read():
            raise UsageError("cannot create a user namespace on this machine")


def call(folder: Path, function: Callable[..., object], *arguments: object, **options: object) -> None:
    """Calls a function as root, in the namespaces of the lab in that folder. Raises UsageError if it fails.

    If the holder has ended, as after a restart of this machine, the call has new namespaces with the same users.
    """
    done = subprocess.run(
        [*_enter(folder), sys.executable, "-c", _CALL],
        input=pickle.dumps((function, arguments, options)),
        env={**os.environ, "PATH": PATH, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
    )
    if done.returncode:
        raise UsageError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])


def connect(folder: Path, hosts: Sequence[LabHost]) -> None:
    """Relays ports of 127.0.0.1 to hosts, until `end`."""
    ports = []
    for host in hosts:
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            ports.append(listener.getsockname()[1])
            words = [*_enter(folder), sys.executable, "-I", "-S", relay.__file__, host.address, str(host.port)]
            host.record("relay", spawn(words, env=os.environ, stdin=listener.fileno(), log=host.log))
    (folder / PORTS).write_text(json.dumps(ports))


def outside(folder: Path, hosts: Sequence[LabHost]) -> list[LabHost]:
    """The hosts of the lab in that folder, as this program reaches them."""
    try:
        ports = json.loads((folder / PORTS).read_text())
    except FileNotFoundError:
        return [*hosts]
    return [
        NestedHost(**vars(host) | {"address": "127.0.0.1", "port": port, "at": (host.address, host.port)})
        for host, port in zip(hosts, ports, strict=True)
    ]


def end(folder: Path, remove: Callable[[Path], None]) -> None:
    """Ends the relays and the holder of the lab in that folder; has it removed by `remove` meanwhile, as root."""
    holder = Process.parse((folder / HOLDER).read_text())
    for path in folder.glob("hosts/*/relay.pid"):
        Process.parse(path.read_text()).end()
    call(folder, remove, folder)
    holder.end()


def _enter(folder: Path) -> Sequence[str]:
    """The prefix of a command that is to run in the namespaces of the lab in that folder."""
    holder = Process.parse((folder / HOLDER).read_text())
    if not holder.alive:
        return ENTER
    return ["nsenter", f"--target={holder.pid}", "--user", "--net", "--mount", "--"]
