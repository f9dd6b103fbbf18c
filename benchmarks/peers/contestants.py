"""Who takes part in which job, and with which command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers import work
from benchmarks.peers.site import Site

Command = Callable[[Site], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    name: str
    package: str = ""
    """Its package in the peers' environment."""
    requirements: str = ""
    """What is installed for it, if that is not the package alone."""
    programs: tuple[str, ...] = ()
    """The programs that it needs on this machine."""
    module: str = ""
    """Its ``by_NAME``, for the jobs that `commands` does not have."""
    jobs: tuple[str, ...] = ()
    commands: Mapping[str, Command] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    """How it is called in a job, if not by its name."""

    def takes(self, job: str) -> bool:
        return job in self.jobs or job in self.commands

    @property
    def in_session(self) -> bool:
        return any(job in self.jobs for job in WARM)

    def argv(self, site: Site, path: str, job: str) -> list[str]:
        """The command line for a program job, or for a session."""
        if job in self.commands:
            return self.commands[job](site)
        python = sys.executable if self.name == OURS else site.python
        return [python, "-W", "ignore", "-m", f"benchmarks.peers.{self.module}", path, job]

    def label(self, job: str) -> str:
        return self.labels.get(job, self.name)


OURS = "skyfab"
WARM = ("calls", "everywhere", "map", "array")
_COLD = ("command", "commands")
_SENT = ("file", "folder")


def _skyfab(*words: str) -> list[str]:
    return [sys.executable, "-m", "skyfab", *words]


def _exec(site: Site, count: int) -> list[str]:
    return _skyfab("exec", f"--inventory={site.inventory}", ",".join(site.names[:count]), "--", "hostname")


def _put(site: Site, name: str, count: int) -> list[str]:
    hosts = ",".join(site.names[:count])
    where = [f"--inventory={site.inventory}", f"--hosts={hosts}", f"--to={site.target}/{name}"]
    return _skyfab("put", *where, f"{site.folder}/{name}")


def _run(site: Site) -> list[str]:
    hosts = ",".join(site.names[: work.RANKS])
    return _skyfab("run", f"--inventory={site.inventory}", f"--hosts={hosts}", "--ranks=1", "gang.py")


def _parallel(commands: Sequence[str]) -> list[str]:
    """A shell that runs commands in parallel; its exit code is the last one's."""
    started = " ".join(f"{command} & set -- $* $!;" for command in commands)
    return ["sh", "-c", f"set --; {started} for pid; do wait $pid || exit 1; done"]


def _ssh(site: Site, address: str, command: str) -> str:
    return shlex.join(["ssh", "-F", site.config, address, command])


def _hostnames(site: Site) -> list[str]:
    return _parallel([_ssh(site, address, "hostname") for address in site.first(work.MANY)])


def _scp(site: Site, name: str, count: int) -> list[str]:
    source = f"{site.folder}/{name}"
    return _parallel(
        [shlex.join(["scp", "-qr", "-F", site.config, source, f"{each}:{site.target}/"]) for each in site.first(count)]
    )


def _rsync(site: Site, name: str, count: int) -> list[str]:
    source, ssh = f"{site.folder}/{name}", shlex.join(["ssh", "-F", site.config])
    return _parallel(
        [shlex.join(["rsync", "-a", "-e", ssh, source, f"{each}:{site.target}/"]) for each in site.first(count)]
    )


def _tar(site: Site) -> list[str]:
    there = _ssh(site, site.addresses[0], f"tar xf - -C {site.target}")
    return ["sh", "-c", f"tar cf - -C {shlex.quote(site.folder)} small | {there}"]


def _torchrun(site: Site) -> list[str]:
    """The script is on the hosts already."""
    environ = f"OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME={site.interface}"
    words = [f"--nnodes={work.RANKS}", "--nproc-per-node=1", f"--master-addr={site.addresses[0]}"]
    torchrun = f"{environ} {shlex.join([site.python, '-m', 'torch.distributed.run', *words])} --master-port=29400"
    return _parallel(
        [
            _ssh(site, each, f"{torchrun} --node-rank={rank} {site.target}/gang.py")
            for rank, each in enumerate(site.first(work.RANKS))
        ]
    )


CONTESTANTS: Sequence[Contestant] = (
    Contestant(
        name=OURS,
        module="by_skyfab",
        jobs=WARM,
        commands={
            "command": lambda site: _exec(site, 1),
            "commands": lambda site: _exec(site, work.MANY),
            "file": lambda site: _put(site, "large", work.HOSTS),
            "folder": lambda site: _put(site, "small", 1),
            "gang": _run,
        },
    ),
    Contestant(
        name="ssh",
        programs=("ssh",),
        commands={
            "command": lambda site: shlex.split(_ssh(site, site.addresses[0], "hostname")),
            "commands": _hostnames,
            "folder": _tar,
        },
        labels={"folder": "tar | ssh"},
    ),
    Contestant(
        name="scp",
        programs=("scp",),
        commands={
            "file": lambda site: _scp(site, "large", work.HOSTS),
            "folder": lambda site: _scp(site, "small", 1),
        },
    ),
    Contestant(
        name="rsync",
        programs=("rsync",),
        commands={
            "file": lambda site: _rsync(site, "large", work.HOSTS),
            "folder": lambda site: _rsync(site, "small", 1),
        },
    ),
    Contestant(name="fabric", package="fabric", module="by_fabric", jobs=(*_COLD, "file")),
    Contestant(name="asyncssh", package="asyncssh", module="by_asyncssh", jobs=(*_COLD, *_SENT)),
    Contestant(name="parallel-ssh", package="parallel-ssh", module="by_parallel_ssh", jobs=(*_COLD, *_SENT)),
    Contestant(name="execnet", package="execnet", module="by_execnet", jobs=(*_COLD, *_SENT, *WARM)),
    Contestant(name="mitogen", package="mitogen", module="by_mitogen", jobs=(*_COLD, *WARM)),
    Contestant(name="Dask", package="distributed", requirements="distributed asyncssh", module="by_dask", jobs=WARM),
    Contestant(name="Ray", package="ray", requirements="ray[client]", module="by_ray", jobs=WARM),
    Contestant(name="Monarch", package="torchmonarch", module="by_monarch", jobs=("gang", *WARM)),
    Contestant(
        name="torchrun",
        package="torch",
        programs=("ssh",),
        commands={"gang": _torchrun},
        labels={"gang": "torchrun by ssh"},
    ),
    Contestant(name="torchrunx", package="torchrunx", module="by_torchrunx", jobs=("gang",)),
)
