"""`Contest`: contestants in turns, job by job, on hosts of the lab."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.arena import Arena
from benchmarks.peers import gang, work
from benchmarks.peers.contestants import OURS, Contestant
from benchmarks.peers.environment import Environment
from benchmarks.peers.jobs import PROGRAMS, SESSIONS, Job, Size
from benchmarks.peers.program import Failed, Session, run
from benchmarks.peers.session import SESSION
from benchmarks.peers.site import Site
from benchmarks.sample import Sample
from skyfab.lab.network import INTERFACE
from skyfab.lab.process import Process

_ROOT: Final = Path(__file__).resolve().parents[2]
_TARGET: Final = "/var/tmp/skyfab-peers"
_CONNECT: Final = 90.0
"""Seconds until a session has to be ready: Ray starts a dozen processes."""
_LIMIT: Final = 60.0
"""Seconds for one measurement."""
_LONG: Final = 15.0
"""Seconds after which a measurement is not repeated: the whole has to end in ten minutes."""
_JOB, _SESSIONS = 60.0, 240.0
"""Seconds for a job, and for all sessions, after which nothing is repeated: a busy machine takes fewer rounds."""


@dataclass(slots=True)
class Contest:
    """The measurements so far."""

    arena: Arena
    site: Site
    path: Path
    """The site as a file."""
    size: Size
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """By job and contestant."""
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why a contestant has no figure for a job that it would take."""
    deadline: float = 0.0
    """When repetitions end, by the clock of `time.monotonic`."""

    @classmethod
    @contextmanager
    def open(cls, arena: Arena, environment: Environment, size: Size) -> Iterator[Contest]:
        with tempfile.TemporaryDirectory(prefix="skyfab-peers-") as folder:
            site = _site(arena, environment, size, Path(folder))
            path = Path(folder) / "site.json"
            site.write(path)
            (Path(folder) / "gang.py").write_text(Path(gang.__file__).read_text())
            yield cls(arena, site, path, size)

    # ---- programs

    def programs(self, contestants: Sequence[Contestant], jobs: Sequence[Job] = PROGRAMS) -> None:
        self._visit(contestants)
        for job in jobs:
            rivals = [each for each in contestants if each.takes(job.name)]
            self.deadline = time.monotonic() + _JOB
            with _said(job, rivals):
                for turn in range(self.size.rounds or job.rounds):
                    self._new_files(job)
                    for contestant in _in_turn(rivals, turn):
                        if self._again(job, contestant):
                            self._program(job, contestant)

    def _visit(self, contestants: Sequence[Contestant]) -> None:
        """skyfab sends itself to a host at its first visit; a user's next command finds it there."""
        for each in contestants:
            if each.name == OURS:
                before = self._before(None)
                argv = each.argv(self.site, str(self.path), "commands")
                try:
                    run(argv, limit=_LIMIT, cwd=self.path.parent, env=self._environ())
                except Failed:
                    pass  # the jobs will say so
                self._clean(before)

    def _program(self, job: Job, contestant: Contestant) -> None:
        before = self._before(job)
        try:
            argv = contestant.argv(self.site, str(self.path), job.name)
            taken, output = run(argv, limit=_LIMIT, cwd=self.path.parent, env=self._environ())
            self._check(job, output)
            self._count(job, contestant, taken)
        except Failed as reason:
            self.reasons[job.name, contestant.name] = str(reason)
        finally:
            self._clean(before)

    def _check(self, job: Job, output: str) -> None:
        """Raises Failed if a program did not do what it was asked for."""
        if job.name in ("command", "commands"):
            hosts = self.site.names[: 1 if job.name == "command" else work.MANY]
            wrong = [name for name in hosts if name not in output.split()]
        elif job.name == "gang":
            right = f"sum {sum(range(1, work.RANKS + 1))}"
            wrong = [] if output.count(right) == work.RANKS else [right]
        elif job.name == "file":
            size = self.size.file << 20
            hosts = self.site.names[: work.HOSTS]
            wrong = [name for name in hosts if self._on(name, f"stat -c %s {_TARGET}/large") != str(size)]
        else:
            found = self._on(self.site.names[0], f"find {_TARGET}/small -type f | wc -l")
            wrong = [] if found == str(self.size.files) else [f"{found} of {self.size.files} files"]
        if wrong:
            raise Failed(f"wrong result: {', '.join(wrong)[:100]}; it printed {output.strip()[-100:]!r}")

    # ---- sessions

    def sessions(self, contestants: Sequence[Contestant], jobs: Sequence[Job] = SESSIONS) -> None:
        rivals = [each for each in contestants if each.in_session]
        self.deadline = time.monotonic() + _SESSIONS
        for turn in range(self.size.rounds or max((job.rounds for job in jobs), default=0)):
            for contestant in _in_turn(rivals, turn):
                left = [job for job in jobs if contestant.takes(job.name) and self._again(job, contestant)]
                with _said(None, [contestant]):
                    while left:
                        left = self._session(contestant, left)

    def _session(self, contestant: Contestant, jobs: Sequence[Job]) -> list[Job]:
        """Does these jobs; returns those that are left after one that failed: they need another session."""
        before = self._before(None)
        left = list(jobs)
        try:
            argv = contestant.argv(self.site, str(self.path), SESSION)
            with Session(argv, limit=_CONNECT, cwd=self.path.parent, env=self._environ()) as session:
                while left:
                    job = left[0]
                    for _ in range(job.repeats):
                        if self._again(job, contestant):
                            self._count(job, contestant, session.seconds(job.name, limit=_LIMIT))
                    left.pop(0)
            return []
        except Failed as reason:
            connected = len(left) < len(jobs) or "connect" not in str(reason)
            failed = left[:1] if connected and "it ended" not in str(reason) else left
            for job in failed:
                self.reasons[job.name, contestant.name] = str(reason)
            return left[len(failed) :]
        finally:
            self._clean(before)

    # ---- what both have

    def _again(self, job: Job, contestant: Contestant) -> bool:
        key = job.name, contestant.name
        found = self.seconds.get(key, ())
        late = bool(found) and time.monotonic() > self.deadline
        return key not in self.reasons and not late and not any(value > _LONG for value in found)

    def _count(self, job: Job, contestant: Contestant, seconds: float) -> None:
        self.seconds.setdefault((job.name, contestant.name), []).append(seconds)

    def sample(self, job: Job, contestant: Contestant) -> Sample | None:
        """What was measured. A contestant that failed at last has no figure."""
        key = job.name, contestant.name
        if key in self.reasons or key not in self.seconds:
            return None
        return Sample(tuple(map(job.number, self.seconds[key])))

    def _environ(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}

    def _before(self, job: Job | None) -> list[set[int]]:
        """Prepares the hosts; returns their processes."""
        if job is not None and job.name in ("file", "folder", "gang"):
            for host in self.arena.lab.hosts[: work.HOSTS]:
                host.run(["sh", "-c", f"rm -rf {_TARGET}; mkdir -p {_TARGET}"])
                host.run(["sh", "-c", f"cat > {_TARGET}/gang.py"], stdin=Path(gang.__file__).read_text())
        return [{process.outside for process in host.processes()} for host in self.arena.lab.hosts]

    def _clean(self, before: Sequence[set[int]]) -> None:
        """Ends the processes that a contestant has left on the hosts, each by its pid."""
        deadline = time.monotonic() + 2  # most are about to end
        while self._left(before) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in self._left(before):
            try:
                Process.of(pid).end()
            except ProcessLookupError:
                continue

    def _left(self, before: Sequence[set[int]]) -> list[int]:
        hosts = zip(self.arena.lab.hosts, before, strict=True)
        return [process.outside for host, old in hosts for process in host.processes() if process.outside not in old]

    def _new_files(self, job: Job) -> None:
        """Content that no host has: in each round, as some contestants keep what they have sent."""
        folder = Path(self.site.folder)
        if job.name == "file":
            (folder / "alone").mkdir(parents=True, exist_ok=True)
            with (folder / "alone" / "large").open("wb") as file:
                for _ in range(self.size.file):
                    file.write(os.urandom(1 << 20))
            (folder / "large").unlink(missing_ok=True)
            (folder / "large").hardlink_to(folder / "alone" / "large")
        elif job.name == "folder":
            for number in range(self.size.files):
                inner = folder / "small" / str(number % 50)
                inner.mkdir(parents=True, exist_ok=True)
                (inner / f"{number}.txt").write_bytes(os.urandom(1000 + number % 4000))

    def _on(self, name: str, command: str) -> str:
        """What a command prints on a host, which is reached without ssh."""
        host = self.arena.lab.hosts[self.site.names.index(name)]
        return host.run(["sh", "-c", command], check=False).stdout.strip()


def _in_turn(contestants: Sequence[Contestant], turn: int) -> Sequence[Contestant]:
    """Every other round in reverse, so that none is always first."""
    return contestants if turn % 2 == 0 else contestants[::-1]


@contextmanager
def _said(job: Job | None, contestants: Sequence[Contestant]) -> Iterator[None]:
    names = ", ".join(each.name for each in contestants)
    print(f"{job.name if job else 'session'}: {names}", file=sys.stderr)
    started = time.monotonic()
    yield
    print(f"  {time.monotonic() - started:.0f} s", file=sys.stderr)


def _site(arena: Arena, environment: Environment, size: Size, folder: Path) -> Site:
    """Writes an ssh_config with the options that a pool of skyfab uses, as far as they change the speed."""
    hosts = arena.hosts
    known, config = folder / "known_hosts", folder / "ssh_config"
    known.write_text("".join(f"{host.address} {host.host_key}\n" for host in hosts))
    lines = [
        f"Host {host.name} {host.address}\n HostName {host.address}\n Port {host.port}\n User {host.user}\n"
        f" IdentityFile {host.identity}\n"
        for host in hosts
    ]
    common = ["IdentitiesOnly yes", "BatchMode yes", "StrictHostKeyChecking yes", f"UserKnownHostsFile {known}"]
    common += ["GlobalKnownHostsFile none", "Ciphers ^aes128-gcm@openssh.com", "LogLevel ERROR"]
    config.write_text("".join([*lines, "Host *\n", *(f" {line}\n" for line in common)]))
    (folder / "files").mkdir()
    return Site(
        names=tuple(host.name for host in hosts),
        addresses=tuple(str(host.address) for host in hosts),
        user=str(hosts[0].user),
        key=str(hosts[0].identity),
        config=str(config),
        inventory=str(arena.lab.inventory),
        python=str(environment.python),
        interface=INTERFACE,
        own_interface=arena.first_machine.network.bridge,
        own_address=_own_address(str(hosts[0].address)),
        folder=str(folder / "files"),
        target=_TARGET,
        calls=size.calls,
        tasks=size.tasks,
        array=size.array,
    )


def _own_address(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
