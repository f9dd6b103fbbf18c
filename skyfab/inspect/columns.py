"""Formats a survey as the cells of a table: ``12 of 64 GB free``, ``2 H100 at 97 %, 9.1 GB free, ada``."""

from __future__ import annotations

from typing import Final

from skyfab._util.sizes import progress, readable
from skyfab.inspect.survey import Survey

NAMES: Final = ("system", "python", "CPUs", "load", "memory", "disk", "GPUs", "state")
"""Of the columns."""


def cells(now: Survey, gpus: int | None) -> tuple[str, ...]:
    """The cells of a host with this number of GPUs."""
    return (
        _short(now.os),
        now.python,
        str(now.cpus),
        "–" if now.load is None else f"{now.load:.1f}",
        _free(now.memory_free, now.memory),
        _free(now.disk_free, now.disk),
        "; ".join([_gpus(now, gpus), *(one.text for one in now.holds), *_queue(now)]),
        "ready" if now.gpu_error is None else f"ready, but {now.gpu_error}",
    )


def _gpus(now: Survey, count: int | None) -> str:
    """``2 H100 at 97 %, 9.1 GB free, ada``: how many, of which kind, how busy, and who uses them."""
    if not now.gpus:
        unknown = count and now.gpu_tool is None
        return f"{count}, use unknown: it has no nvidia-smi" if unknown else str(count)
    kinds = ", ".join(dict.fromkeys(_kind(gpu.name) for gpu in now.gpus))
    known = [gpu.memory_free for gpu in now.gpus if gpu.memory_free is not None]
    used = [gpu.use for gpu in now.gpus if gpu.use is not None]
    use = f" at {sum(used) / len(used):.0f} %" if any(used) else ""
    parts = [f"{len(now.gpus)} {kinds}{use}", *([f"{readable(min(known))} free"] if known else [])]
    if not used:
        parts.append("use unknown")
    users = dict.fromkeys(process.user or "?" for gpu in now.gpus for process in gpu.processes)
    idle = ["idle"] if used and not now.is_busy else []
    return ", ".join([*parts, *(users or idle or (["in use"] if now.is_busy else []))])


def _queue(now: Survey) -> list[str]:
    return [f"{len(now.queue)} waiting, first {now.queue[0].text}"] if now.queue else []


def _short(system: str) -> str:
    """
    >>> _short("Debian GNU/Linux 12 (bookworm)"), _short("Ubuntu 24.04.1 LTS")
    ('Debian 12', 'Ubuntu 24.04.1 LTS')
    """
    return system.replace("GNU/Linux ", "").partition(" (")[0]


def _kind(name: str) -> str:
    """
    >>> _kind("NVIDIA H100 80GB HBM3")
    'H100 80GB HBM3'
    """
    return name.removeprefix("NVIDIA ").removeprefix("AMD ")


def _free(free: int | None, total: int | None) -> str:
    """``12 of 64 GB free``, with what is known."""
    if total is None:
        return "–"
    return readable(total) if free is None else f"{progress(free, total)} free"
