"""Hosts in namespaces: whether this machine can create them, and the files of new ones before they boot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from skyfab._util.scripts import read

from . import programs, root, sshd, userns
from .host import UNSHARE, LabHost
from .network import INTERFACE, Network, free_ports, make_room_for_neighbours
from .plan import Plan

TRIAL = read("lab/trial.sh")


def make_room(folder: Path) -> str | None:
    """Prepares `folder` for the files of namespace hosts; returns why that is impossible, or None.

    Not every file system supports the upper layer of an overlay (in a container, for example); then a tmpfs is mounted.
    """
    if sys.platform != "linux":
        return f"network namespaces need Linux, not {sys.platform}"
    user = os.geteuid() != 0
    if missing := programs.missing(programs.NETWORK | (programs.USERS if user else {})):
        return f"packages are missing: {', '.join(missing)}"
    obstacle = _try(folder, userns.ENTER if user else ())
    if obstacle is None or user:
        return obstacle
    memory = ["mount", "-t", "tmpfs", "-o", "mode=700", "skyfab-lab", str(folder)]
    if subprocess.run(memory, capture_output=True).returncode:
        return obstacle
    return _try(folder)


def give_back(folder: Path) -> None:
    """Undoes `make_room`: unmounts the tmpfs, if there is one, and so deletes its files."""
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def _try(folder: Path, enter: Sequence[str] = ()) -> str | None:
    trial = folder / "trial"
    for name in ("upper", "work", "root"):
        (trial / name).mkdir(parents=True)
    words = [*enter, *UNSHARE, "--net", "sh", "-c", TRIAL, "trial", str(trial)]
    tried = subprocess.run(words, capture_output=True, text=True)
    subprocess.run([*enter, "rm", "-r", str(trial)])
    return None if tried.returncode == 0 else tried.stderr.strip() or "namespaces are refused"


def build(plan: Plan) -> list[LabHost]:
    """Creates the hosts' keys and their network. Nothing runs yet."""
    lent = tuple(root.lent(plan.python if plan.lends_python else None, plan.lend))
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda name: _key(plan.folder / name, name), plan.names))
    make_room_for_neighbours(plan.count)
    ports = free_ports(plan.count) if plan.forwarded else [22] * plan.count
    wires = Network.open(second=plan.second_network, isolated=plan.isolated, forwarded=plan.forwarded)
    return [
        LabHost(
            name=name,
            number=number,
            address="127.0.0.1" if plan.forwarded else wires.addresses(number)[INTERFACE],
            port=ports[number - 1],
            user=plan.user,
            host_key=key,
            python=plan.python,
            lent_python=plan.lends_python,
            folder=plan.folder / name,
            wires=wires,
            lent=lent,
        )
        for number, (name, key) in enumerate(zip(plan.names, keys, strict=True), 1)
    ]


def prepare(hosts: Sequence[LabHost], plan: Plan) -> None:
    """Fills the hosts' root folders before their first boot, and connects them to their network."""
    root.prepare_common(plan)
    everybody = {host.name: host.addresses[INTERFACE] for host in hosts}

    def fill(host: LabHost) -> None:
        names = everybody if plan.reverse_dns and not plan.forwarded else {host.name: "127.0.1.1"}
        root.prepare(host.folder, plan, host.name, names=names)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, hosts))
    hosts[0].network.plug([host.number for host in hosts])


def _key(folder: Path, name: str) -> str:
    for layer in ("root", "work"):
        (folder / layer).mkdir(parents=True)
    return sshd.make_key(folder / "key", name)
