"""Examines the host that it runs on, within seconds and with the standard library alone."""

from __future__ import annotations

import glob
import os
import socket
import time

from skyfab.host.ask.gpu_tools import user_name
from skyfab.host.ask.survey import existing, survey

TYPE_CHECKING = False  # importing `typing` would slow the start of a worker
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Final

    Found = dict[str, Any]

_PATIENCE: Final = 5.0
"""Seconds after which an answer of a resolver or of the login shell is not waited for."""
_TOOLS: Final = 15.0
"""The same, for the tools of GPUs."""
_PLACES: Final = ("/scratch", "/local", "/data", "/var/tmp")
"""Where machines have a large disk of their own."""
_NETWORKED: Final = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "fuse.sshfs", "afs")


def examine(cache: str) -> Found:
    """What there is to examine. `cache` is skyfab's folder. What cannot be found out is missing."""
    parts: list[tuple[float, Callable[[], Found]]] = [
        (_PATIENCE, lambda: _disk(cache)),  # a network file system may hang
        (_PATIENCE, _own_name),
        (_PATIENCE, _client_name),
        (_PATIENCE, _login_shell),
        (_PATIENCE, _sshd),
        (_TOOLS, lambda: {"survey": survey(cache)}),
    ]
    return {"user": user_name(os.getuid()), **_limits(), **_logind(), **_at_once(parts)}


def _at_once(parts: list[tuple[float, Callable[[], Found]]]) -> Found:
    """Does all parts in threads, and takes what is there in time."""
    import threading

    found: Found = {}
    began = time.monotonic()

    def do(part: Callable[[], Found]) -> None:
        try:
            found.update(part())
        except (OSError, ValueError):
            pass

    threads = [(limit, threading.Thread(target=do, args=(part,), daemon=True)) for limit, part in parts]
    for _, thread in threads:
        thread.start()
    for limit, thread in threads:
        thread.join(max(0.0, began + limit - time.monotonic()))
    return dict(found)


# ---- the disk


def _disk(cache: str) -> Found:
    place = existing(cache)
    about = os.statvfs(place)
    kind = file_system(place)
    found: Found = {
        "cache": cache,
        "filesystem": kind,
        "networked": int(is_networked(kind)),
        "noexec": int(bool(about.f_flag & getattr(os, "ST_NOEXEC", 8))),
        "readonly": int(bool(about.f_flag & os.ST_RDONLY)),
        "inodes": about.f_files,
        "inodes_free": about.f_favail,
    }
    best = max(_other_disks(os.stat(place).st_dev), default=None)
    if best is not None:
        found |= {"other_free": best[0], "other_cache": f"{best[1]}/{user_name(os.getuid())}/skyfab"}
    return found


def _other_disks(device: int) -> Iterator[tuple[int, str]]:
    """Free bytes and folder of other disks of this machine that could hold the cache."""
    for place in _PLACES:
        try:
            about, kind = os.statvfs(place), file_system(place)
            if os.stat(place).st_dev == device or not os.access(place, os.W_OK | os.X_OK) or is_networked(kind):
                continue
        except OSError:
            continue
        if not about.f_flag & (os.ST_RDONLY | getattr(os, "ST_NOEXEC", 8)) and kind != "tmpfs":
            yield about.f_frsize * about.f_bavail, place


def file_system(path: str) -> str:
    """Its kind, as ``ext4`` or ``nfs4``; empty where the system does not say."""
    best = ("", "")
    path = os.path.realpath(path)
    try:
        with open("/proc/self/mounts", errors="replace") as lines:
            for line in lines:
                _, point, kind, *_ = line.split(" ")
                point = point.replace("\\040", " ")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best[0]):
                    best = (point, kind)
    except (OSError, ValueError):
        pass
    return best[1]


def is_networked(kind: str) -> bool:
    return kind.startswith(_NETWORKED)


# ---- names, the login shell and sshd


def _own_name() -> Found:
    """How long the host takes to find its own name, which frameworks look up when they start."""
    began = time.monotonic()
    try:
        socket.getaddrinfo(socket.gethostname(), None)
        error = ""
    except OSError as failed:
        error = failed.strerror or "unknown"
    return {"name_seconds": time.monotonic() - began, "name_error": error}


def _client_name() -> Found:
    """How long it takes to look up the name of the address that logins come from, as many sshd do at each login."""
    address = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    if not address:
        return {"reverse_seconds": 0.0}
    began = time.monotonic()
    try:
        socket.gethostbyaddr(address)
    except OSError:
        pass  # it may have no name
    return {"reverse_seconds": time.monotonic() - began}


def _login_shell() -> Found:
    """What the login shell prints and how long it takes, when it runs a command as for sshd."""
    import pwd
    import subprocess

    try:
        shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    except KeyError:
        shell = "/bin/sh"
    environ = {name: os.environ[name] for name in ("HOME", "USER", "LOGNAME", "PATH", "LANG") if name in os.environ}
    environ.update(SHELL=shell, SSH_CLIENT="127.0.0.1 1 22", SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22")
    began = time.monotonic()
    try:
        done = subprocess.run(
            [shell, "-c", "true"],
            env=environ,
            cwd=os.path.expanduser("~"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE - 0.5,
        )
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        said = ""
    return {"shell": shell, "shell_seconds": time.monotonic() - began, "shell_said": said[:200]}


def _sshd() -> Found:
    """Limits of the SSH server: those on logins from what it shows of itself, others from its settings."""
    found: Found = {}
    for title in _titles():
        words = title.split()
        if not title.startswith("sshd: ") or "[listener]" not in words:
            continue
        found["startups"] = int(words[words.index("startups") - 1].partition("-")[0])
        file = words[words.index("-f") + 1] if "-f" in words else "/etc/ssh/sshd_config"
        found["sessions"] = int(sshd_setting(file, "maxsessions") or 10)
        break
    return found


def _titles() -> Iterator[str]:
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                yield file.read(4096).replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue


def sshd_setting(file: str, name: str, depth: int = 0) -> str | None:
    """The first value of a setting of sshd, in a file and in those that it includes."""
    try:
        with open(file, errors="replace") as lines:
            words = [line.replace("=", " ", 1).split() for line in lines]
    except OSError:
        return None
    for key, *values in filter(None, words):
        if key.lower() == "match":
            return None
        if key.lower() == name and values:
            return values[0]
        if key.lower() == "include" and depth < 4:
            inner = [path for value in values for path in sorted(glob.glob(os.path.join("/etc/ssh", value)))]
            value = next((one for one in (sshd_setting(path, name, depth + 1) for path in inner) if one), None)
            if value is not None:
                return value
    return None


# ---- limits


def _limits() -> Found:
    import resource

    found = {}
    for name, which in (("files", resource.RLIMIT_NOFILE), ("processes", resource.RLIMIT_NPROC)):
        soft = resource.getrlimit(which)[0]
        found[name] = 0 if soft == resource.RLIM_INFINITY else soft
    return found


def _logind() -> Found:
    """Whether systemd ends the processes of a user who has logged out, and whether this user is an exception."""
    main = [f"{folder}/systemd/logind.conf" for folder in ("/usr/lib", "/etc", "/run")]
    kills = False
    for path in [path for file in main for path in (file, *sorted(glob.glob(f"{file}.d/*.conf")))]:
        try:
            with open(path, errors="replace") as lines:
                for line in lines:
                    name, _, value = line.partition("=")
                    if name.strip() == "KillUserProcesses":
                        kills = value.strip().lower() in ("yes", "true", "1", "on")
        except OSError:
            continue
    return {"kills": int(kills), "lingers": int(os.path.exists(f"/var/lib/systemd/linger/{user_name(os.getuid())}"))}
