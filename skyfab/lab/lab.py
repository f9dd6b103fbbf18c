"""A lab: a set of temporary hosts, started and stopped together, and the folder that contains their files."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from skyfab._util import atomic, toml
from skyfab._util.reaper import Reaper
from skyfab._util.scripts import read
from skyfab.errors import UsageError

from . import loopback, namespace, root, userns
from . import sshd as server
from .host import IDENTITY, LabHost
from .loopback import LoopbackHost
from .network import Network
from .plan import Plan
from .process import Process

Kind = Literal["namespace", "loopback"]
MOST = 200
STATE, INVENTORY, OWNER = "state.json", "inventory.toml", "owner.pid"
_REAPER = read("lab/reaper.sh")
_reapers: dict[Path, Reaper] = {}
"""By the folder of a lab of this program, the process that takes it down when this program exits, even if killed."""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A running set of hosts. Leaving `with` stops them; so does the end of the program, even if it is killed.

    ::

        with Lab.start(count=2) as lab:
            compute = sky.Compute(hosts="lab", inventory=lab.inventory)

    A persistent lab stays up until `stop`; other programs open it with `Lab.load`.
    """

    folder: Path
    kind: Kind
    hosts: list[LabHost]
    password: str
    """The password of the user `pat` on namespace hosts."""
    limits: list[str]
    """What cannot be tested with these hosts, one sentence each."""

    @classmethod
    def start(
        cls,
        count: int = 4,
        *,
        kind: Literal["auto", "namespace", "loopback"] = "auto",
        folder: Path | str | None = None,
        user: str = "root",
        python: str | None = None,
        lend: Sequence[str] = (),
        second_network: bool = False,
        isolated: bool = False,
        forwarded: bool = False,
        reverse_dns: bool = True,
        shells: Mapping[str, str] | None = None,
        sshd: Mapping[str, str] | None = None,
        persistent: bool = False,
    ) -> Lab:
        """Starts hosts node1, node2 … and returns when the sshd of each one accepts connections.

        `user` is the login user in the inventory (on loopback: always the current one). A namespace host sees this
        machine's system folders, copy-on-write, and the folders that `lend` names, read-only; nothing else. It has the
        system's own Python, with the standard library only, and the inventory names no interpreter.

        Kinds of hosts, which can be combined; all but a lent interpreter need namespace hosts:

        - `python`: the path of an interpreter of this machine that is mounted into the hosts and named in the inventory
          (`sys.executable`: with all that this program can import). ``"none"``: hosts have no Python at all.
        - `second_network`: each host has a second interface, ``fast0``, on a network without this machine.
        - `isolated`: on ``eth0`` hosts reach this machine and not each other. With `second_network` they reach each
          other only there.
        - `forwarded`: this machine reaches each host through a port of 127.0.0.1. Every host has the address
          10.0.2.15 on ``eth0``, behind its own NAT, like Vagrant hosts in VirtualBox.
        - `reverse_dns=False`: addresses have no names, and a host's own name resolves to 127.0.1.1, Debian's default.
        - `shells`: login shells by user, for instance ``{"root": "/usr/bin/zsh", "ada": "/usr/bin/fish"}``.

        `sshd` has settings of the hosts' sshd, for instance ``{"MaxSessions": "2"}``.

        Raises UsageError if this machine does not support it.
        """
        if not 1 <= count <= MOST:
            raise UsageError(f"a lab has 1 to {MOST} hosts, not {count}")
        interpreter = _interpreter(python)
        for shell in (shells or {}).values():
            if not os.access(shell, os.X_OK):
                raise UsageError(f"no login shell at {shell}")
        server.program()
        place = _fresh(folder)
        try:
            _watch(place)
            special = second_network or isolated or forwarded or not reverse_dns or python == "none" or bool(shells)
            chosen, limits = _choose(kind, place / "hosts", special=special)
            plan = Plan(
                folder=place / "hosts",
                count=count,
                user=user,
                python=interpreter,
                lends_python=python not in (None, "none"),
                client_key=server.make_key(place / IDENTITY, "skyfab-lab"),
                password=secrets.token_urlsafe(9),
                lend=tuple(lend),
                second_network=second_network,
                isolated=isolated,
                forwarded=forwarded,
                reverse_dns=reverse_dns,
                shells=dict(shells or {}),
                sshd=dict(sshd or {}),
            )
            lab = cls._build(plan, chosen, limits)
            if persistent:
                (place / OWNER).unlink()
                _reapers.pop(place).close()
        except BaseException:
            take_down(place)
            raise
        return lab

    @classmethod
    def _build(cls, plan: Plan, kind: Kind, limits: Sequence[str]) -> Lab:
        """Writes the lab's files as soon as there is something to take down, then starts the hosts."""
        if kind == "namespace" and os.geteuid() != 0:
            place = plan.folder.parent
            userns.hold(place)
            userns.call(place, cls._build, plan, kind, limits)
            userns.connect(place, cls.load(place).hosts)
            lab = cls.load(place)
            atomic.write(lab.inventory, _inventory(lab.hosts))
            return lab
        hosts = [*(namespace.build(plan) if kind == "namespace" else loopback.build(plan))]
        lab = cls(folder=plan.folder.parent, kind=kind, hosts=hosts, password=plan.password, limits=[*limits])
        atomic.write(lab.inventory, _inventory(hosts))
        atomic.write(lab.folder / STATE, json.dumps(asdict(lab), default=str, indent=1))
        if kind == "namespace":
            namespace.prepare(hosts, plan)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda host: host.boot(), hosts))
        return lab

    @classmethod
    def load(cls, folder: Path | str) -> Lab:
        """Opens the lab in that folder, also one that another program started. Raises UsageError if there is none."""
        place = Path(folder).absolute()
        try:
            state = json.loads((place / STATE).read_text())
            hosts = [_host(state["kind"], fields) for fields in state["hosts"]]
            if os.geteuid() != 0:
                hosts = userns.outside(place, hosts)
            return cls(**state | {"folder": place, "hosts": hosts})
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"no lab is up in {place}", hint="skyfab lab.up") from None
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{place / STATE} is not the state of a lab: {error!r}") from error

    @property
    def inventory(self) -> Path:
        return self.folder / INVENTORY

    def stop(self) -> None:
        """Stops the hosts and all their processes, and removes the network and the folder. Idempotent."""
        take_down(self.folder)

    def __getitem__(self, name: str) -> LabHost:
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _interpreter(python: str | None) -> str:
    """The path of the interpreter on the hosts; empty for none."""
    if python is None or python == "none":
        return root.system_python() or "" if python is None else ""
    path = str(Path(python).absolute())
    if not os.access(path, os.X_OK):
        raise UsageError(f"no Python interpreter at {path}")
    return path


def _choose(kind: str, folder: Path, *, special: bool) -> tuple[Kind, tuple[str, ...]]:
    """Chooses the kind of hosts, and lists what cannot be tested with it. `special` hosts cannot be loopback hosts."""
    folder.mkdir()
    if kind == "loopback" and special:
        raise UsageError("loopback hosts do not support this", hint='Lab.start(kind="namespace"), as root on Linux')
    if kind == "loopback":
        return "loopback", loopback.LIMITS
    obstacle = namespace.make_room(folder)
    if obstacle is None:
        return "namespace", userns.LIMITS if os.geteuid() != 0 else ()
    if kind == "namespace" or special:
        hint = None if special else 'Lab.start(kind="loopback")'
        raise UsageError(f"cannot create namespace hosts on this machine: {obstacle}", hint=hint)
    return "loopback", (f"No namespace hosts on this machine: {obstacle}.", *loopback.LIMITS)


def _fresh(folder: Path | str | None) -> Path:
    """Creates or claims an empty folder for this lab. Raises UsageError if it is in use or not empty."""
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="skyfab-lab-"))
    place = Path(folder).absolute()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (place / STATE).exists():
        raise UsageError(f"a lab is already in {place}", hint="skyfab lab.down")
    try:
        (place / OWNER).touch(exist_ok=False)  # if two programs start at once, one gets an error
        only = len(list(place.iterdir())) == 1
    except FileExistsError:
        hint = f"wait for it; if no program does, rm -r {place}"
        raise UsageError(f"another program is starting a lab in {place}", hint=hint) from None
    if not only:
        (place / OWNER).unlink()
        raise UsageError(f"{place} is not empty: a lab would remove what is in it", hint="name a new folder")
    place.chmod(0o700)
    return place


def take_down(folder: Path | str) -> None:
    """Stops the hosts of the lab in that folder, then removes the folder. Concurrent callers wait for each other."""
    place = Path(folder)
    with _alone(place) as there:
        if there:
            _remove(place)
    if reaper := _reapers.pop(place, None):
        reaper.close()


def _remove(place: Path) -> None:
    if os.geteuid() != 0 and (place / userns.HOLDER).exists():
        userns.end(place, _remove)
        return
    if (place / STATE).exists():
        _end(Lab.load(place).hosts)
    namespace.give_back(place / "hosts")
    if (place / "hosts").exists():  # may take long: if that is interrupted, the state is there for the next time
        shutil.rmtree(place / "hosts")
    shutil.rmtree(place)


def _watch(place: Path) -> None:
    """Makes this program the owner of the lab in that folder: the lab is taken down when this program exits."""
    owner = str(Process.of(os.getpid()))
    (place / OWNER).write_text(owner)
    package = str(Path(__file__).resolve().parents[2])
    _reapers[place] = Reaper(_REAPER, sys.executable, str(place), owner, package)


def _end(hosts: Sequence[LabHost]) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda host: host.kill(), hosts))
    if (wires := hosts[0].wires) is not None:
        wires.close()


@contextmanager
def _alone(place: Path) -> Iterator[bool]:
    """Locks the folder against other programs that would take it down; yields whether it still exists."""
    try:
        handle = os.open(place, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield place.exists()
    finally:
        os.close(handle)


def _inventory(hosts: Sequence[LabHost]) -> str:
    """The text of an inventory file; its group `lab` contains all hosts."""
    first = hosts[0]
    lines = ["[defaults]", f"user = {toml.dumps(first.user)}", f"identity = {toml.dumps(str(first.identity))}", ""]
    for host in hosts:
        lines += [
            f"[hosts.{host.name}]",
            f"address = {toml.dumps(host.address)}",
            f"port = {host.port}",
            f"host_key = {toml.dumps(host.host_key)}",
        ]
        if host.lent_python:
            lines.append(f"python = {toml.dumps(host.python)}")
        if host.cache is not None:
            lines.append(f"cache = {toml.dumps(host.cache)}")
        lines.append("")
    return "\n".join([*lines, "[groups]", f'lab = ["node[1-{len(hosts)}]"]', ""])


def _host(kind: Kind, fields: dict[str, Any]) -> LabHost:
    fields |= {"folder": Path(fields["folder"]), "lent": tuple(fields["lent"])}
    if kind == "loopback":
        return LoopbackHost(**fields)
    return LabHost(**fields | {"wires": Network(**fields["wires"])})
