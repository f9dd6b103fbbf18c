"""From what a host has told to findings: pure functions, one for each thing that is looked at."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from skyfab._util import schema, toml
from skyfab._util.sizes import readable
from skyfab.env.torch_variants import DRIVERS, cuda_for
from skyfab.errors import AuthenticationRefused, HostKeyRefused, HostUnfit, ProtocolError, SkyfabError
from skyfab.inspect.doctor.finding import Finding, Level, Section
from skyfab.inspect.survey import LIMITS, Gpu, Survey
from skyfab.inventory.host import Host
from skyfab.session.ask import Question, Reply, only

_CLOCK: Final = 1.0
"""Seconds that a clock may be wrong: make, caches and the order of logs depend on it."""
_DISK_LEAST: Final = 500_000_000
_DISK_ADVICE: Final = 10_000_000_000
"""Bytes that an environment with torch for CUDA takes, and its packages beside it."""
_INODES_LEAST: Final = 20_000
"""Files of one environment with torch."""
_FILES: Final = 1024
_PROCESSES: Final = 512
_STARTUPS: Final = 10
_SLOW_NAME: Final = 1.0
_SLOW_SHELL: Final = 3.0
_NETWORK_HINT: Final = "a full disk of a server stops all hosts; programs start slowly from it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What `examine` has found on a host. None: unknown."""

    user: str
    cache: str | None = None
    filesystem: str | None = None
    networked: int | None = None
    noexec: int | None = None
    readonly: int | None = None
    disk_free: int | None = None
    inodes: int | None = None
    inodes_free: int | None = None
    other_free: int | None = None
    other_cache: str | None = None
    name_seconds: float | None = None
    name_error: str | None = None
    reverse_seconds: float | None = None
    shell: str | None = None
    shell_seconds: float | None = None
    shell_said: str | None = None
    startups: int | None = None
    startups_most: int | None = None
    sessions: int | None = None
    files: int | None = None
    processes: int | None = None
    kills: int | None = None
    lingers: int | None = None


@dataclass(frozen=True, slots=True)
class HostReport:
    """A host with all that is known of it."""

    host: Host
    seen: Examined
    survey: Survey
    offset: tuple[float, float] = (0.0, 0.0)
    """Seconds that its clock is ahead of this machine's, and by how many that may be wrong."""


def _parse(host: Host, replies: Iterator[Reply]) -> HostReport:
    found = only(replies)
    survey = found.pop("survey", None)
    if survey is None:
        hint = f"skyfab exec --hosts={host.name} -- nvidia-smi"
        raise HostUnfit("its system or its GPUs do not answer within 15 s", host=host.name, hint=hint)
    return HostReport(host, schema.parse(Examined, found, LIMITS), Survey.parse(survey))


EXAMINE: Final = Question("examine", _parse)
"""Asks a host for all that can be checked on it."""


def refused(host: Host, error: SkyfabError) -> Finding:
    """The finding for a host that could not be opened, or that answered nothing of use."""
    check = "reachability"
    if isinstance(error, HostKeyRefused):
        check = "host key"
    elif isinstance(error, AuthenticationRefused):
        check = "login"
    elif isinstance(error, (HostUnfit, ProtocolError)):
        check = "start"
    return Finding(
        section="login", check=check, host=host.name, level="failure", what=error.message, fix=error.hint or ""
    )


def findings(report: HostReport) -> list[Finding]:
    """All findings about one host."""
    return [finding for check in _CHECKS for finding in check(report)]


def _found(
    report: HostReport,
    section: Section,
    check: str,
    level: Level,
    what: str,
    fix: str = "",
    setting: tuple[str, str] | None = None,
) -> Finding:
    people = (report.seen.user, *(one.user for gpu in report.survey.gpus for one in gpu.processes if one.user))
    return Finding(
        section=section,
        check=check,
        host=report.host.name,
        level=level,
        what=what,
        fix=fix,
        setting=setting,
        people=tuple(dict.fromkeys(name for name in people if name in what + fix)),
    )


# ---- login


def _login(report: HostReport) -> Iterator[Finding]:
    yield _found(report, "login", "login", "ok", f"logged in as {report.seen.user}")


def _shell(report: HostReport) -> Iterator[Finding]:
    seen = report.seen
    if report.host.transport == "local":
        return
    if seen.shell_said:
        first = seen.shell_said.splitlines()[0][:60]
        what = f"its login shell {seen.shell} prints {first!r} when it runs a command: scp and rsync fail with that"
        fix = "print for people only, in ~/.bashrc: case $- in *i*) … ;; esac"
        yield _found(report, "login", "shell", "warning", what, fix)
    elif seen.shell_seconds is None or seen.shell_seconds > _SLOW_SHELL:
        what = f"its login shell takes more than {_SLOW_SHELL:.0f} s to start: every connection waits for it"
        yield _found(report, "login", "shell", "advice", what, "look what ~/.bashrc and the like start: conda, nvm")
    else:
        yield _found(report, "login", "shell", "ok", f"{seen.shell} starts silently")


def _sshd(report: HostReport) -> Iterator[Finding]:
    seen = report.seen
    if report.host.transport == "local":
        return
    if seen.startups is not None and seen.startups < _STARTUPS:
        what = f"its sshd drops logins while {seen.startups} others have not finished (MaxStartups)"
        fix = "in /etc/ssh/sshd_config: MaxStartups 10:30:100"
        yield _found(report, "login", "MaxStartups", "advice", what, fix)
    if seen.sessions is not None and seen.sessions < 2:
        what = f"its sshd allows {seen.sessions} session for each connection (MaxSessions)"
        fix = "in /etc/ssh/sshd_config: MaxSessions 10"
        yield _found(report, "login", "MaxSessions", "warning", what, fix)


# ---- system


def _clock(report: HostReport) -> Iterator[Finding]:
    offset, unsure = report.offset
    if abs(offset) - unsure > _CLOCK:
        way = "ahead of" if offset > 0 else "behind"
        what = f"its clock is {abs(offset):,.1f} s {way} this machine's"
        fix = "sudo timedatectl set-ntp true, there or here: timedatectl says which is wrong"
        yield _found(report, "system", "clock", "warning", what, fix)
    else:
        yield _found(report, "system", "clock", "ok", f"within {max(unsure, 0.1):.1f} s of this machine's")


def _names(report: HostReport) -> Iterator[Finding]:
    seen = report.seen
    if seen.name_seconds is None or seen.name_seconds > _SLOW_NAME:
        what = f"it looks up its own name in {_within(seen.name_seconds)}: frameworks do that for each process"
        fix = "its name and address in /etc/hosts there: 10.0.0.11 node1"
        yield _found(report, "system", "name", "warning", what, fix)
    elif seen.name_error:
        what = f"it does not find its own name: {seen.name_error}"
        yield _found(report, "system", "name", "advice", what, "its name and address in /etc/hosts there")
    else:
        yield _found(report, "system", "name", "ok", "finds its own name at once")
    if seen.reverse_seconds is None or seen.reverse_seconds > _SLOW_NAME:
        what = f"it looks up the name of this machine's address in {_within(seen.reverse_seconds)}"
        fix = "UseDNS no in /etc/ssh/sshd_config, or a name server that answers in /etc/resolv.conf there"
        yield _found(report, "system", "reverse name", "advice", what, fix)


def _within(seconds: float | None) -> str:
    return "more than 5 s" if seconds is None else f"{seconds:.1f} s"


def _python(report: HostReport) -> Iterator[Finding]:
    here, there = platform.python_version(), report.survey.python
    if here.split(".")[:2] != there.split(".")[:2]:
        what = f"it has Python {there}, and this machine {here}"
        fix = f'functions of notebooks and lambdas need the same one: Image(python="{".".join(here.split(".")[:2])}")'
        yield _found(report, "system", "Python", "advice", what, fix)
    else:
        yield _found(report, "system", "Python", "ok", f"Python {there}")


def _limits(report: HostReport) -> Iterator[Finding]:
    seen = report.seen
    for name, value, least, item in (
        ("open files", seen.files, _FILES, "nofile"),
        ("processes", seen.processes, _PROCESSES, "nproc"),
    ):
        if value and value < least:
            what = f"its limit of {name} is {value:,}"
            fix = f"in /etc/security/limits.conf: {seen.user} - {item} 65536, and log in again"
            yield _found(report, "system", "limits", "warning", what, fix)


def _logind(report: HostReport) -> Iterator[Finding]:
    if report.seen.kills and not report.seen.lingers:
        what = "systemd ends all processes of a user who logs out (KillUserProcesses): detached runs, and reconnects"
        fix = f"sudo loginctl enable-linger {report.seen.user}, there"
        yield _found(report, "system", "KillUserProcesses", "warning", what, fix)


# ---- disk


def _disk(report: HostReport) -> Iterator[Finding]:
    seen = report.seen
    if seen.disk_free is None:
        what = f"the disk of {report.host.cache} does not answer within 5 s"
        fix = "is its server up? cache = … in the inventory names another folder"
        yield _found(report, "disk", "disk", "failure", what, fix)
        return
    setting = _other_cache(seen)
    fix = f"cache = {setting[1]} in the inventory" if setting else "cache = … in the inventory names another folder"
    free = f"{readable(seen.disk_free)} free for {seen.cache}"
    if seen.disk_free < _DISK_ADVICE:
        level: Level = "failure" if seen.disk_free < _DISK_LEAST else "advice"
        clean = f"skyfab gc --hosts={report.host.name} --days=7; or {fix}"
        yield _found(report, "disk", "disk", level, f"only {free}", clean, setting)
    else:
        yield _found(report, "disk", "disk", "ok", free)
    if seen.inodes and seen.inodes_free is not None and seen.inodes_free < _INODES_LEAST:
        what = f"only {seen.inodes_free:,} more files (inodes) on the disk of {seen.cache}"
        yield _found(report, "disk", "inodes", "warning", what, fix, setting)
    if seen.noexec:
        what = f"no program may be started from {seen.cache} (noexec): environments cannot be used"
        yield _found(report, "disk", "noexec", "failure", what, fix, setting)
    if seen.readonly:
        yield _found(report, "disk", "read-only", "failure", f"{seen.cache} cannot be written to", fix, setting)
    if seen.networked:
        what = f"{seen.cache} is on {seen.filesystem}, a network file system: {_NETWORK_HINT}"
        yield _found(report, "disk", "network disk", "advice", what, fix, setting)


def _other_cache(seen: Examined) -> tuple[str, str] | None:
    better = max(_DISK_ADVICE, 0 if seen.noexec or seen.networked or seen.readonly else 2 * (seen.disk_free or 0))
    if seen.other_cache is None or (seen.other_free or 0) < better:
        return None
    return "cache", toml.dumps(seen.other_cache)


# ---- GPUs


def _gpus(report: HostReport) -> Iterator[Finding]:
    survey = report.survey
    if survey.gpu_error is not None:
        fix = "sudo dmesg | grep -i nvrm, there; after an update of the driver the machine needs a reboot"
        yield _found(report, "GPUs", "GPU tool", "failure", survey.gpu_error, fix)
    damaged = [gpu.index for gpu in survey.gpus if gpu.ecc_errors]
    whole = [gpu.index for gpu in survey.gpus if not gpu.ecc_errors]
    yield from _slow_gpus(report)
    yield from _busy_gpus(report)
    if damaged:
        setting = ("gpus", str(whole)) if whole else None
        which = ", ".join(map(str, damaged))
        what = f"GPU {which} had memory errors that could not be corrected: results may be wrong"
        fix = "sudo nvidia-smi --gpu-reset, there, or a reboot; if they come back it is broken"
        fix += f": gpus = {whole} in the inventory leaves it out" if whole else ""
        yield _found(report, "GPUs", "ECC", "failure", what, fix, setting)
    driver = next((gpu.driver for gpu in survey.gpus if gpu.driver), None)
    if driver is not None:
        yield _driver(report, driver)


def _slow_gpus(report: HostReport) -> Iterator[Finding]:
    fix = "look at fans, dust and the power limit: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
    for reasons, gpus in _alike(report.survey.gpus, lambda gpu: ", ".join(gpu.throttled)):
        what = f"{_numbers(gpus)} slowed down by {reasons}{_range([gpu.temperature for gpu in gpus], 'at ', ' °C')}"
        yield _found(report, "GPUs", "throttling", "warning", what, fix)


def _busy_gpus(report: HostReport) -> Iterator[Finding]:
    fix = "wait, or take hosts that are free: --where='not busy'"
    for users, gpus in _alike(report.survey.gpus, _users):
        what = f"{_numbers(gpus)} in use by {users}{_range([gpu.use for gpu in gpus], '', ' %')}"
        yield _found(report, "GPUs", "in use", "advice", what, fix)
    for gpu in report.survey.gpus:
        if not gpu.is_busy:
            yield _found(report, "GPUs", "in use", "ok", f"GPU {gpu.index}, {gpu.name}, is free")


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


def _driver(report: HostReport, driver: str) -> Finding:
    cuda = cuda_for(driver)
    if cuda is None or cuda < 12:
        oldest = ".".join(map(str, DRIVERS[12]))
        what = f"its driver {driver} is too old for the CUDA 12 of today's torch: the CPU is used, or an old torch"
        return _found(report, "GPUs", "driver", "warning", what, f"a driver from {oldest} on, there")
    return _found(report, "GPUs", "driver", "ok", f"driver {driver}: torch is chosen for CUDA {cuda}")


_CHECKS: Final[tuple[Callable[[HostReport], Iterator[Finding]], ...]] = (
    *(_login, _shell, _sshd),
    *(_clock, _names, _python, _limits, _logind),
    *(_disk, _gpus),
)
