"""Reads the folders of detached runs, on the host: what detached/look.sh prints, without a process for each run.

A live view asks every two seconds; the shell script starts about ten processes for each run that is there.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing `typing` would slow the start of a worker
if TYPE_CHECKING:
    from typing import Final

_MOST: Final = 65536
"""Bytes of a description."""
_TAIL: Final = 2000
"""Bytes of a log in which its last line is looked for."""


def look_at_runs(cache: str, ended: int = 8) -> str:
    """For each run the four lines of look.sh. Of runs that have ended, only the last `ended`."""
    folder = os.path.join(os.path.expanduser(cache), "runs")
    try:
        runs = sorted(os.scandir(folder), key=lambda run: run.name)
    except OSError:
        return ""
    found = []
    for run in runs:
        about, status = _read(f"{run.path}/about"), _read(f"{run.path}/status")
        if about:
            alive = _is_alive(run.path)
            lines = (
                f"=run {run.name} {'yes' if alive else 'no'}\n{about}\n{status}\n=last {_last(run.path + '/logs')}\n"
            )
            found.append((alive, _changed(f"{run.path}/status"), lines))
    found.sort(reverse=True)
    alive_ones = [lines for alive, _, lines in found if alive]
    return "".join(alive_ones + [lines for alive, _, lines in found if not alive][:ended])


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(_MOST).replace("\n", "")
    except OSError:
        return ""


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _is_alive(run: str) -> bool:
    """Whether the agent of a run lives; see detached/alive.sh."""
    pid, boot, folder = [*_read(f"{run}/agent").split(" ", 2), "", ""][:3]
    if not pid.isdigit() or boot != (_read("/proc/sys/kernel/random/boot_id") or "?"):
        return False
    try:
        if os.path.isdir("/proc/self"):
            # at its end its folder goes first, and then it writes how the run ended
            return os.readlink(f"/proc/{pid}/cwd") in (folder, f"{folder} (deleted)")
        os.kill(int(pid), 0)
    except (OSError, OverflowError):
        return False
    return True


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
