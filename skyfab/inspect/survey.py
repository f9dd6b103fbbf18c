"""`Survey`: the hardware and current state of a host; each field is checked, because hosts are not trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from skyfab._util import schema
from skyfab.inventory.host import Host
from skyfab.session.question import Question, only

LIMITS: Final = schema.Limits(characters=300, items=1000)
"""For what a host says about itself."""
_IDLE: Final = 10
"""Percent. A GPU that is used less, and by no process, is free: a desktop draws on some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int
    user: str | None = None
    """None if the host could not find out."""
    command: str | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. Sizes are bytes; None is what the tool cannot know."""

    index: int
    name: str
    memory: int | None = None
    memory_used: int | None = None
    use: int | None = None
    """Percent."""
    temperature: int | None = None
    """Degrees Celsius."""
    driver: str | None = None
    throttled: tuple[str, ...] = ()
    """Why it runs slower than it could."""
    ecc_errors: int | None = None
    """Memory errors that could not be corrected, since the driver was loaded."""
    processes: tuple[GpuProcess, ...] = ()

    @property
    def memory_free(self) -> int | None:
        return None if self.memory is None or self.memory_used is None else self.memory - self.memory_used

    @property
    def is_busy(self) -> bool:
        return bool(self.processes) or (self.use or 0) > _IDLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """GPUs that a run of skyfab holds, or waits for."""

    user: str
    run: str
    """Its name, if it has one."""
    gpus: tuple[int, ...]
    waits: bool
    seconds: float
    """Since when."""
    text: str
    """All of it, for users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A host at one moment."""

    os: str
    kernel: str
    python: str
    """The version of the interpreter that answered."""
    cpus: int
    platform: str = ""
    load: float | None = None
    """Processes that ran or waited for a processor, on average over a minute."""
    memory: int | None = None
    memory_free: int | None = None
    disk: int | None = None
    disk_free: int | None = None
    """Of the disk on which the cache is."""
    gpu_count: int = 0
    """GPUs that the driver knows, also without a tool."""
    gpus: tuple[Gpu, ...] = ()
    gpu_tool: str | None = None
    """The program that lists the GPUs."""
    gpu_error: str | None = None
    """Why it could not."""
    leases: tuple[Lease, ...] = ()
    """Who holds GPUs or waits for them, in the order of the queue."""

    @property
    def holds(self) -> list[Lease]:
        return [lease for lease in self.leases if not lease.waits]

    @property
    def queue(self) -> list[Lease]:
        return [lease for lease in self.leases if lease.waits]

    @property
    def is_busy(self) -> bool:
        """A GPU is in use; where there is none, all processors are."""
        if self.gpus or self.holds:
            return bool(self.holds) or any(gpu.is_busy for gpu in self.gpus)
        return self.load is not None and self.load >= self.cpus

    def gpus_of(self, host: Host) -> int:
        """How many GPUs the host has, by what its driver, its tool or the inventory says."""
        return max(self.gpu_count, len(self.gpus)) if host.gpus == "auto" else len(host.gpus)

    def free_gpus(self, host: Host) -> int:
        """How many of them neither a run of skyfab nor another program uses, and nobody waits for."""
        numbers = set(range(self.gpu_count) if host.gpus == "auto" else host.gpus)
        numbers -= {gpu.index for gpu in self.gpus if gpu.is_busy}
        return len(numbers.difference(*(lease.gpus for lease in self.leases)))


SURVEY: Final = Question("survey", lambda host, replies: schema.parse(Survey, only(replies), LIMITS))
"""Asks a host for its survey."""
