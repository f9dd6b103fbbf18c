"""Remains: what a pool could leave on a host. Processes, sockets, run folders, and what was never finished."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from skyfab.lab import LabHost
from stage import traces


def on(host: LabHost) -> set[str]:
    """Everything of that kind that is there now."""
    return traces.on(host) | traces.folders(host) | sockets(host) | drafts(host)


def after(hosts: Sequence[LabHost], *, seconds: float) -> set[str]:
    """What is still there after that long; returns as soon as nothing is."""
    up = [host for host in hosts if host.up]
    return traces.left([lambda host=host: on(host) for host in up], timeout=seconds)  # type: ignore[misc]


def caches(host: LabHost) -> list[Path]:
    homes = [host.path("/root"), *host.path("/home").iterdir()]
    return [cache for home in homes if (cache := home / ".cache/skyfab").is_dir()]


def drafts(host: LabHost) -> set[str]:
    """A finished one has a name without a dot in it."""
    found = set()
    for cache in caches(host):
        for kind in ("blobs", "trees", "bundles", "envs", "packages"):
            entries = (cache / kind).iterdir() if (cache / kind).is_dir() else ()
            found |= {f"{host.name}: {entry}" for entry in entries if entry.name.startswith(".") and _is_draft(entry)}
            found |= {f"{host.name}: {entry}" for entry in cache.glob("bundles/*.*")}
    return found


def _is_draft(entry: Path) -> bool:
    return not entry.name.startswith(".lock-")


def sockets(host: LabHost) -> set[str]:
    """Agents' sockets, which have a name in the host's file system."""
    with contextlib.suppress(OSError):  # its first process has just ended
        lines = Path(f"/proc/{host.init.pid}/net/unix").read_text().splitlines()[1:]
        return {f"{host.name}: socket {line.split()[-1]}" for line in lines if line.endswith("agent.sock")}
    return set()


def sweep(hosts: Sequence[LabHost]) -> None:
    """What one test has left is not the next one's."""
    for host in (host for host in hosts if host.up):
        for process in host.processes():
            if "sshd" not in process.cmdline[0]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.outside, signal.SIGKILL)
        for cache in caches(host):
            for folder in cache.glob("run/*/*"):
                shutil.rmtree(folder, ignore_errors=True)
