"""Detached runs on this host: reads their folders, which host/agent/run_folder.py writes."""

from __future__ import annotations

import json
import os

from skyfab.host.ask.gpu_tools import look_at_gpus

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

_MOST: Final = 65536
"""Bytes of a description."""
_TAIL: Final = 2000
"""Bytes of a log in which its last line is looked for."""


def runs(cache: str, *, run: str = "", ended: int | None = None, gpus: bool = False) -> Iterator[dict[str, Any]]:
    """Yields what each run is and does: all of them, or one.

    Of runs that have ended, only the last `ended`. With `gpus` then also how busy the host's GPUs are, which may take a
    second to find out.
    """
    folder = os.path.join(cache, "runs")
    try:
        names = [run] if run else sorted(os.listdir(folder))
    except OSError:
        names = []
    found = [one for one in (_described(os.path.join(folder, name)) for name in names) if one is not None]
    if ended is not None:
        over = sorted((one for one in found if not one["alive"]), key=lambda one: one["changed"], reverse=True)
        found = [one for one in found if one["alive"]] + over[:ended]
    yield from found
    if gpus:
        yield {"gpus": [[gpu.get("use"), gpu.get("memory_used")] for gpu in look_at_gpus()["gpus"]]}


def _described(run: str) -> dict[str, Any] | None:
    """What a run is and does; None for a folder that has no description yet."""
    try:
        about, status = json.loads(read(f"{run}/about")), json.loads(read(f"{run}/status"))
        changed = os.stat(f"{run}/status").st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    return {
        "id": os.path.basename(run),
        "alive": agent_of(run) is not None,
        "pool": _pool_of(run),
        "about": about,
        "status": status,
        "changed": changed,
        "last": _last(f"{run}/logs"),
    }


def read(path: str) -> str:
    """The beginning of a small file; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read(_MOST)
    except OSError:
        return ""


def agent_of(run: str) -> int | None:
    """The process of a run's agent; None if it does not live.

    A process with this number is the agent only if the machine was not started again since then, and if it is in the
    agent's folder.
    """
    pid, boot, folder = [*read(f"{run}/agent").strip().split(" ", 2), "", ""][:3]
    if not pid.isdigit() or boot != (read("/proc/sys/kernel/random/boot_id").strip() or "?"):
        return None
    try:
        if os.path.isdir("/proc/self"):
            # at its end its folder goes first, and then it writes how the run ended
            here = os.readlink(f"/proc/{pid}/cwd")
            return int(pid) if here in (folder, f"{folder} (deleted)") else None
        os.kill(int(pid), 0)
    except (OSError, OverflowError):
        return None
    return int(pid)


def _pool_of(run: str) -> str:
    """The name of the pool that the workers of a run belong to: it begins the name of its agent's folder."""
    folder = [*read(f"{run}/agent").strip().split(" ", 2), "", ""][2]
    return os.path.basename(folder).rpartition("-")[0]


def _last(logs: str) -> str:
    """The last line of the log that was written last, of those that have one."""
    try:
        files = sorted(os.scandir(logs), key=lambda file: (-file.stat().st_mtime_ns, file.name))
    except OSError:
        return ""
    for file in files:
        try:
            with open(file.path, "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
                lines = log.read(_TAIL).replace(b"\0", b"").split(b"\n")
        except OSError:
            continue
        if line := next((line for line in reversed(lines) if line), b""):
            return line.decode(errors="replace")
    return ""
