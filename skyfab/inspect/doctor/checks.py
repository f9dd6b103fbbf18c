"""The checks of a host: a function for each, listed in `CHECKS`."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from skyfab._util import toml
from skyfab._util.sizes import readable
from skyfab.env.facts import DRIVERS, cuda_for
from skyfab.inspect.doctor.finding import Facts, Finding, Findings, HostReport
from skyfab.inspect.survey import Gpu

_SLOW_SHELL: Final = 3.0


def shell(report: HostReport) -> Findings:
    """The login shell: what it prints when it runs a command, and how fast it starts."""
    facts = report.facts
    yield report.finding("login", "login", "ok", f"logged in as {facts.user}")
    if report.host.transport == "local" or report.host.inside:
        return
    if facts.shell_said:
        first = facts.shell_said.splitlines()[0][:60]
        what = f"its login shell {facts.shell} prints {first!r} when it runs a command: scp and rsync fail"
        fix = "print only in interactive shells, in ~/.bashrc: case $- in *i*) … ;; esac"
        yield report.finding("login", "shell", "warning", what, fix)
    elif facts.shell_seconds is None or facts.shell_seconds > _SLOW_SHELL:
        what = f"its login shell takes more than {_SLOW_SHELL:.0f} s to start: every connection waits for it"
        fix = "check what ~/.bashrc and similar files start, such as conda or nvm"
        yield report.finding("login", "shell", "advice", what, fix)
    else:
        yield report.finding("login", "shell", "ok", f"{facts.shell} starts silently")


_STARTUPS: Final = 10


def sshd(report: HostReport) -> Findings:
    """The limits of the SSH server on logins and sessions."""
    facts = report.facts
    if report.host.transport == "local" or report.host.inside:
        return
    if facts.startups is not None and facts.startups < _STARTUPS:
        what = f"its sshd drops logins while {facts.startups} others have not finished (MaxStartups)"
        fix = "in /etc/ssh/sshd_config: MaxStartups 10:30:100"
        yield report.finding("login", "MaxStartups", "advice", what, fix)
    if facts.sessions is not None and facts.sessions < 2:
        what = f"its sshd allows {facts.sessions} session for each connection (MaxSessions)"
        yield report.finding("login", "MaxSessions", "warning", what, "in /etc/ssh/sshd_config: MaxSessions 10")


_WRONG: Final = 1.0
"""Seconds that a clock may be wrong."""


def clock(report: HostReport) -> Findings:
    """The clock: make, caches and the order of logs depend on it."""
    offset, unsure = report.offset
    if abs(offset) - unsure > _WRONG:
        way = "ahead of" if offset > 0 else "behind"
        what = f"its clock is {abs(offset):,.1f} s {way} this machine's"
        fix = "sudo timedatectl set-ntp true, on the host or this machine: timedatectl says which is wrong"
        yield report.finding("system", "clock", "warning", what, fix)
    else:
        yield report.finding("system", "clock", "ok", f"within {max(unsure, 0.1):.1f} s of this machine's")


_SLOW_NAME: Final = 1.0


def names(report: HostReport) -> Findings:
    """How fast the host resolves its own name, and the address of this machine."""
    facts = report.facts
    fix = "add its name and address to its /etc/hosts: 10.0.0.11 node1"
    if facts.name_seconds is None or facts.name_seconds > _SLOW_NAME:
        what = f"looking up its own name takes {_within(facts.name_seconds)}, and frameworks do it in each process"
        yield report.finding("system", "name", "warning", what, fix)
    elif facts.name_error:
        yield report.finding("system", "name", "advice", f"it cannot resolve its own name: {facts.name_error}", fix)
    else:
        yield report.finding("system", "name", "ok", "resolves its own name quickly")
    if facts.reverse_seconds is None or facts.reverse_seconds > _SLOW_NAME:
        what = f"looking up the name of this machine's address takes {_within(facts.reverse_seconds)}"
        fix = "set UseDNS no in its /etc/ssh/sshd_config, or a working name server in its /etc/resolv.conf"
        yield report.finding("system", "reverse name", "advice", what, fix)


def _within(seconds: float | None) -> str:
    return "more than 5 s" if seconds is None else f"{seconds:.1f} s"


def python(report: HostReport) -> Findings:
    """Whether the host's Python has the same minor version as this machine's."""
    own, other = platform.python_version(), report.survey.python
    minor = ".".join(own.split(".")[:2])
    if minor == ".".join(other.split(".")[:2]):
        yield report.finding("system", "Python", "ok", f"Python {other}")
    else:
        what = f"it has Python {other}, this machine has {own}"
        fix = f'functions of notebooks and lambdas need the same one: Image(python="{minor}")'
        yield report.finding("system", "Python", "advice", what, fix)


def limits(report: HostReport) -> Findings:
    """The limits on open files and processes."""
    facts = report.facts
    for name, value, least, item in (
        ("open files", facts.files, 1024, "nofile"),
        ("processes", facts.processes, 512, "nproc"),
    ):
        if value and value < least:
            what = f"its limit on {name} is {value:,}"
            fix = f"in /etc/security/limits.conf: {shlex.quote(facts.user)} - {item} 65536, and log in again"
            yield report.finding("system", "limits", "warning", what, fix)


def logind(report: HostReport) -> Findings:
    """Whether systemd ends the processes of users who log out."""
    if report.facts.kills and not report.facts.lingers:
        what = "systemd kills a user's processes at logout (KillUserProcesses): detached runs and reconnects fail"
        fix = f"on the host: sudo loginctl enable-linger {shlex.quote(report.facts.user)}"
        yield report.finding("system", "KillUserProcesses", "warning", what, fix)


_LEAST: Final = 500_000_000
_ADVICE: Final = 10_000_000_000
"""Bytes that an environment with torch for CUDA takes, with its packages."""
_INODES: Final = 20_000
"""Files of one environment with torch."""


def disk(report: HostReport) -> Findings:
    """The disk of the cache: its free space, and whether programs can run from it."""
    facts, free = report.facts, report.survey.disk_free or 0
    setting = _other_cache(facts, free)
    fix = f"cache = {setting[1]} in the inventory" if setting else "cache = … in the inventory names another folder"
    room = f"{readable(free)} free for {facts.cache}"
    if free < _ADVICE:
        clean = f"skyfab gc --hosts={report.host.name} --days=7; or {fix}"
        yield report.finding("disk", "disk", "failure" if free < _LEAST else "advice", f"only {room}", clean, setting)
    else:
        yield report.finding("disk", "disk", "ok", room)
    if facts.inodes and facts.inodes_free is not None and facts.inodes_free < _INODES:
        what = f"only {facts.inodes_free:,} more files (inodes) on the disk of {facts.cache}"
        yield report.finding("disk", "inodes", "warning", what, fix, setting)
    if facts.noexec:
        what = f"programs cannot run from {facts.cache} (noexec): environments do not work"
        yield report.finding("disk", "noexec", "failure", what, fix, setting)
    if facts.readonly:
        yield report.finding("disk", "read-only", "failure", f"{facts.cache} is read-only", fix, setting)
    if facts.networked:
        what = f"{facts.cache} is on {facts.filesystem}, a network file system: programs start slowly from it, "
        what += "and if the disk of its server is full, all hosts stop"
        yield report.finding("disk", "network disk", "advice", what, fix, setting)


def _other_cache(facts: Facts, free: int) -> tuple[str, str] | None:
    better = max(_ADVICE, 0 if facts.noexec or facts.networked or facts.readonly else 2 * free)
    if facts.other_cache is None or (facts.other_free or 0) < better:
        return None
    return "cache", toml.dumps(facts.other_cache)


def driver(report: HostReport) -> Findings:
    """The GPUs' driver: whether nvidia-smi or rocm-smi works, and whether it is new enough for torch."""
    if report.survey.gpu_error is not None:
        fix = "on the host: sudo dmesg | grep -i nvrm; after a driver update, reboot"
        yield report.finding("GPUs", "GPU tool", "failure", report.survey.gpu_error, fix)
    driver = next((gpu.driver for gpu in report.survey.gpus if gpu.driver), None)
    if driver is None:
        return
    cuda = cuda_for(driver)
    if cuda is None or cuda < 12:
        oldest = ".".join(map(str, DRIVERS[12]))
        what = f"its driver {driver} is too old for CUDA 12, which torch needs: a CPU build is used, or an old torch"
        yield report.finding("GPUs", "driver", "warning", what, f"install driver {oldest} or newer on the host")
    else:
        yield report.finding("GPUs", "driver", "ok", f"driver {driver}: torch is chosen for CUDA {cuda}")


def gpus(report: HostReport) -> Findings:
    """GPUs whose memory had errors, GPUs that are slowed down, and GPUs that others use."""
    gpus = report.survey.gpus
    yield from _damaged(report)
    fix = "check fans, dust and the power limit: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
    for reasons, some in _alike(gpus, lambda gpu: ", ".join(gpu.throttled)):
        what = f"{_numbers(some)} slowed down by {reasons}{_range([gpu.temperature for gpu in some], 'at ', ' °C')}"
        yield report.finding("GPUs", "throttling", "warning", what, fix)
    fix = "wait, or use hosts that are free: --where='not busy'"
    for users, some in _alike(gpus, _users):
        what = f"{_numbers(some)} in use by {users}{_range([gpu.use for gpu in some], '', ' %')}"
        yield report.finding("GPUs", "in use", "advice", what, fix)
    for gpu in gpus:
        if not gpu.is_busy:
            yield report.finding("GPUs", "in use", "ok", f"GPU {gpu.index}, {gpu.name}, is free")


def _damaged(report: HostReport) -> Findings:
    damaged = [gpu.index for gpu in report.survey.gpus if gpu.ecc_errors]
    whole = [gpu.index for gpu in report.survey.gpus if not gpu.ecc_errors]
    if damaged:
        which = ", ".join(map(str, damaged))
        what = f"GPU {which} had uncorrectable memory errors: results may be wrong"
        fix = "on the host: sudo nvidia-smi --gpu-reset, or a reboot; if the errors return, it is broken"
        fix += f": gpus = {whole} in the inventory excludes it" if whole else ""
        setting = ("gpus", str(whole)) if whole else None
        yield report.finding("GPUs", "ECC", "failure", what, fix, setting)


def _users(gpu: Gpu) -> str:
    users = dict.fromkeys(f"{one.user or '?'} ({one.command or one.pid})" for one in gpu.processes)
    return (", ".join(users) or "an unknown user") if gpu.is_busy else ""


def _alike(gpus: Sequence[Gpu], text_of: Callable[[Gpu], str]) -> Iterable[tuple[str, list[Gpu]]]:
    """GPUs with the same text, together: a host may have sixteen. Those without a text are left out."""
    found: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        if text := text_of(gpu):
            found.setdefault(text, []).append(gpu)
    return found.items()


def _numbers(gpus: Sequence[Gpu]) -> str:
    return f"GPU {', '.join(str(gpu.index) for gpu in gpus)} {'is' if len(gpus) == 1 else 'are'}"


def _range(values: Sequence[int | None], before: str, unit: str) -> str:
    known = sorted({value for value in values if value is not None})
    return f", {before}{' to '.join(map(str, dict.fromkeys((known[0], known[-1]))))}{unit}" if known else ""


CHECKS: Final = (shell, sshd, clock, names, python, limits, logind, disk, driver, gpus)
"""In the order of the report."""


def findings(report: HostReport) -> list[Finding]:
    """All findings about one host."""
    return [finding for check in CHECKS for finding in check(report)]
