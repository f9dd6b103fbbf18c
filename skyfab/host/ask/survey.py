"""The hardware and current state of this host: its system, load, memory, disk and GPUs."""

from __future__ import annotations

import os
import platform
import sys
import time

from skyfab.host.agent.host_info import HostInfo
from skyfab.host.ask.gpu_tools import look_at_gpus
from skyfab.host.gpu_locks import look

TYPE_CHECKING = False  # importing `typing` would slow the start of a worker
if TYPE_CHECKING:
    from typing import Any


def survey(cache: str) -> dict[str, Any]:
    """What there is to say about this host. `cache` is the folder whose disk counts. Null: it cannot be found out."""
    info = HostInfo()
    return {
        "os": _system(),
        "kernel": os.uname().release,
        "platform": info.platform,
        "python": ".".join(map(str, sys.version_info[:3])),
        "cpus": info.cpus,
        "load": _load(),
        "gpu_count": info.gpus,
        **memory(),
        **_disk(cache),
        **look_at_gpus(),
        "leases": [lease.facts for lease in look()],
    }


def clock(cache: str) -> float:
    """Seconds since 1970, by this host's clock."""
    return time.time()


def _system() -> str:
    """As people call it: ``Debian GNU/Linux 12 (bookworm)``."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, ValueError):
        return f"{os.uname().sysname} {os.uname().release}"


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def memory() -> dict[str, int | None]:
    """Bytes, as the kernel counts them; in a container its limit may be lower."""
    sizes: dict[str, int] = {}
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                name, _, rest = line.partition(":")
                sizes[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    total, free = sizes.get("MemTotal"), sizes.get("MemAvailable")
    if total is None:  # macOS
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"memory": total, "memory_free": free}


def existing(folder: str) -> str:
    """The folder, or the first one above it that exists."""
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


def _disk(folder: str) -> dict[str, int]:
    """Total and free bytes of the disk on which a folder is, or will be."""
    try:
        found = os.statvfs(existing(folder))
    except OSError:
        return {}
    return {"disk": found.f_frsize * found.f_blocks, "disk_free": found.f_frsize * found.f_bavail}
