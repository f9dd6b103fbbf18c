"""Traces: what a program of ours could leave behind, on this machine and on hosts."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from skyfab.lab import LabHost

kept: set[str] = set()
"""Folders of labs whose pool several modules share; processes that have one in their command line are not looked at."""


def threads() -> set[str]:
    torch = vars(sys.modules.get("torch.utils._functools", sys))
    own = torch["_prefetch_executor"]._threads if "_prefetch_executor" in torch else ()  # for imports in advance: stays
    return {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate() if thread not in own}


def descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the one that lists this folder
            continue
        if not target.startswith("/sys/devices/system/cpu/"):  # torch looks at the processor once, and holds on to it
            found.add(f"file descriptor {entry.name} → {target}")
    return found


def children() -> set[str]:
    """Child processes, those included that have ended and were not waited for.

    A lab's hosts are children too (`unshare`), and a reboot makes new ones: the lab's own tests look after them.
    """
    found = set(Path("/proc/thread-self/children").read_text().split())
    for _ in range(2):  # children of a thread that ends move to another one, which may have been looked at already
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended since
                found |= set((task / "children").read_text().split())
    named = {pid: _words(int(pid)) for pid in found}
    return {f"child {pid}: {words}" for pid, words in named.items() if not words.startswith("unshare ")}


def here(home: Path) -> set[str]:
    """Processes of this machine that work for a pool whose cache is below `home`."""
    found = set()
    for entry in Path("/proc").iterdir():
        words = _words(int(entry.name)) if entry.name.isdigit() and int(entry.name) != os.getpid() else ""
        if str(home) in words and not any(folder in words for folder in kept):
            found.add(f"process {entry.name}: {words}")
    return found


def on(host: LabHost) -> set[str]:
    """Whatever runs on a host beside its SSH server."""
    return {f"{host.name}: {process}" for process in host.processes() if "sshd" not in process.cmdline[0]}


def folders(host: LabHost) -> set[str]:
    """Run folders on a host: a pool has one while it is open."""
    homes = [host.path(host.cache)] if host.cache else [host.path("/root/.cache/skyfab")]
    if host.cache is None:
        homes += [home / ".cache/skyfab" for home in host.path("/home").iterdir()]
    return {f"{host.name}: {path}" for home in homes for path in home.glob("run/*/*")}


def left(looks: Sequence[Callable[[], set[str]]], before: set[str] | None = None, timeout: float = 10.0) -> set[str]:
    """What is there now and was not before, once it no longer goes away by itself.

    What follows a colon only describes a trace: a process may have become another program. What has taken the place of
    something from before is not left: on a busy machine a connection may be made anew.
    """
    known = {trace.partition(": ")[0] for trace in before or ()}
    deadline = time.monotonic() + timeout
    collected = False
    while True:
        found: set[str] = set()
        for look in looks:
            now = {trace.partition(": ")[0]: trace for trace in look()}
            gone = Counter(_kind(name) for name in known - now.keys())
            new = Counter(_kind(name) for name in now.keys() - known)
            found |= {
                trace for name, trace in now.items() if name not in known and new[_kind(name)] > gone[_kind(name)]
            }
        if not found or time.monotonic() > deadline:
            return found
        if not collected:
            gc.collect()
            collected = True
        time.sleep(0.01)


def _kind(trace: str) -> str:
    return trace.split(maxsplit=1)[0]


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
