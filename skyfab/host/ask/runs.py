"""Detached runs on this host: reads their folders, which host/agent/run_folder.py writes, and stops them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

from skyfab.host.agent.host_info import boot_id
from skyfab.host.ask.gpu_tools import look_at_gpus

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

_MOST: Final = 65536
"""Bytes of a description."""
_TAIL: Final = 2000
"""Bytes of a log in which its last line is looked for."""
_PIECE: Final = 1024 * 1024
_STOP: Final = 10.0
"""Seconds in which an agent ends."""
_TICK: Final = 0.1


def runs(cache: str, *, run: str = "", ended: int | None = None, gpus: bool = False) -> Iterator[dict[str, Any]]:
    """Yields what each run is and does: all of them, or one.

    Of runs that have ended, only the last `ended`. With `gpus` then also how busy the host's GPUs are, which may take a
    second to find out.
    """
    folder = os.path.join(cache, "runs")
    names = [run] if run else listed(folder)
    found = [one for one in (_described(os.path.join(folder, name)) for name in names) if one is not None]
    if ended is not None:
        over = sorted((one for one in found if not one["alive"]), key=lambda one: one["changed"], reverse=True)
        found = [one for one in found if one["alive"]] + over[:ended]
    yield from found
    if gpus:
        found = look_at_gpus()["gpus"]
        yield {"gpus": [{"percent": gpu.get("use"), "memory": gpu.get("memory_used")} for gpu in found]}


def _described(run: str) -> dict[str, Any] | None:
    """What a run is and does; None for a folder that has no description yet."""
    pid, pool = agent_of(run)  # first: an agent that ends now has written the status before
    try:
        about, status = json.loads(read(f"{run}/about")), json.loads(read(f"{run}/status"))
        if about["id"] != os.path.basename(run):
            return None
        return {
            **status,
            "state": "lost" if status["state"] == "running" and pid is None else status["state"],
            "about": about,
            "alive": pid is not None,
            "changed": os.stat(f"{run}/status").st_mtime,
            "pool": pool,
            "last": last_line(f"{run}/logs"),
            "error": _error(run, status.get("failed") or {}),
            "phase": next((json.loads(text) for rank in about["ranks"] if (text := read(f"{run}/phase.{rank}"))), None),
        }
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _error(run: str, failed: dict[str, float]) -> str:
    """What the rank that failed first has raised, in one line; empty if none has."""
    for rank in sorted(failed, key=lambda rank: failed[rank]):
        try:
            with open(f"{run}/result.{rank}", "rb") as file:
                message = json.loads(file.read(int.from_bytes(file.read(4), "big")))
            kind, text = message.get("kind", ""), message["text"].strip().split("\n")[0][:_TAIL]
            return text if kind.startswith("skyfab.") else f"{kind.removeprefix('builtins.')}: {text}".strip(": ")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # its disk was full
            continue
    return ""


def listed(folder: str) -> list[str]:
    """The names in a folder; empty if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def read(path: str) -> str:
    """The beginning of a small file; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read(_MOST)
    except OSError:
        return ""


def agent_of(run: str) -> tuple[int | None, str]:
    """The process of a run's agent, None if it does not live; and the name of the pool that its workers belong to.

    A process with this number is the agent only if the machine was not started again since then, and if it is in the
    agent's folder.
    """
    pid, boot, folder = [*read(f"{run}/agent").strip().split(" ", 2), "", ""][:3]
    pool = os.path.basename(folder).rpartition("-")[0]  # it begins the name of the agent's folder
    if not pid.isdigit() or boot != boot_id():
        return None, pool
    try:
        if os.path.isdir("/proc/self"):
            # at its end its folder goes first, and then it writes how the run ended
            here = os.readlink(f"/proc/{pid}/cwd")
            return (int(pid) if here in (folder, f"{folder} (deleted)") else None), pool
        os.kill(int(pid), 0)
    except (OSError, OverflowError):
        return None, pool
    return int(pid), pool


def last_line(logs: str) -> str:
    """The last line of the log that was written last, of those that have one."""
    try:
        files = sorted(os.scandir(logs), key=lambda file: (-file.stat().st_mtime_ns, file.name))
    except OSError:
        return ""
    return next((line for file in files if (line := end_of_log(file.path))), "")


def end_of_log(path: str) -> str:
    """The last line of a log that is not empty, nor the hint of an error before it."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
            lines = log.read(_TAIL).replace(b"\0", b"").decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip() and not line.startswith("hint: ")), "")


def content(cache: str, *, run: str, name: str, start: int = 0) -> Iterator[Any]:
    """Yields whether a file of a run is there, and then its content from `start` on, in pieces."""
    try:
        with open(os.path.join(run_folder(cache, run), os.path.basename(name)), "rb") as file:
            yield True
            file.seek(start)
            while piece := file.read(_PIECE):
                yield None, piece
    except FileNotFoundError:
        yield False


def fetched(cache: str, *, run: str) -> None:
    """Marks a run whose results were fetched: `gc` deletes it sooner. Raises OSError on a full disk."""
    with open(os.path.join(run_folder(cache, run), "fetched"), "w"):
        pass


def stop(cache: str, *, run: str) -> int | None:
    """Terminates the agent of a run and waits until it has ended. Returns its process id if it has not."""
    folder = run_folder(cache, run)
    pid, _ = agent_of(folder)
    if pid is None:
        return None
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP
    while time.monotonic() < deadline:
        if agent_of(folder)[0] is None:
            return None
        time.sleep(_TICK)
    return pid


def run_folder(cache: str, run: str) -> str:
    return os.path.join(cache, "runs", os.path.basename(run))
