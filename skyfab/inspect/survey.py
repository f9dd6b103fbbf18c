"""`Survey`: what a host has told about itself, checked field by field, since hosts are not trusted."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from skyfab.errors import ProtocolError

_MOST_GPUS: Final = 256
_MOST_PROCESSES: Final = 1000
_LONGEST: Final = 300
"""Characters of a text."""
_MOST: Final = 2**63
_IDLE: Final = 10
"""A GPU that is used by no more than so many percent, and by no process, is free: a desktop draws on some."""


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
class Survey:
    """A host at one moment."""

    os: str
    kernel: str
    python: str
    cpus: int
    load: float | None = None
    """Processes that ran or waited for a processor, on average over a minute."""
    memory: int | None = None
    memory_free: int | None = None
    disk: int | None = None
    disk_free: int | None = None
    """Of the disk on which the cache is."""
    gpus: tuple[Gpu, ...] = ()
    gpu_tool: str | None = None
    """The program that told about the GPUs."""
    gpu_error: str | None = None
    """Why it could not."""

    @property
    def is_busy(self) -> bool:
        """A GPU is in use; where there is none, all processors are."""
        if self.gpus:
            return any(gpu.is_busy for gpu in self.gpus)
        return self.load is not None and self.load >= self.cpus

    @classmethod
    def parse(cls, text: str, host: str) -> Survey:
        """Reads what `look` has returned on a host. Raises ProtocolError."""
        try:
            found = json.loads(text)
            disk, disk_free = found.get("disk") or (None, None)
            gpus = tuple(_gpu(one) for one in _list(found.get("gpus"), _MOST_GPUS))
            return checked(cls, {**found, "disk": disk, "disk_free": disk_free, "gpus": gpus})
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ProtocolError(f"not a survey of a host: {error}", host=host) from None


def _gpu(found: Any) -> Gpu:
    processes = tuple(checked(GpuProcess, one) for one in _list(found.get("processes"), _MOST_PROCESSES))
    throttled = tuple(str(one)[:_LONGEST] for one in _list(found.get("throttled"), 16))
    return checked(Gpu, {**found, "processes": processes, "throttled": throttled})


def _list(value: Any, most: int) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError("a list was expected")
    return value[:most]


T = TypeVar("T")
_KINDS: Final[dict[str, Any]] = {"int": int, "str": str, "float": (int, float)}


def checked(kind: type[T], found: dict[str, Any]) -> T:
    """Makes a dataclass of those values that it has fields for. Raises TypeError or ValueError for other types."""
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in found:
            continue
        value, (name, *none) = found[field.name], str(field.type).split(" | ")
        if name in _KINDS and not (value is None and none):
            if not isinstance(value, _KINDS[name]) or isinstance(value, bool):
                raise TypeError(f"{field.name} is a {type(value).__name__}")
            if not isinstance(value, str) and not abs(value) < _MOST:
                raise ValueError(f"{field.name} is {value}")
            value = value[:_LONGEST] if isinstance(value, str) else value
        values[field.name] = value
    return kind(**values)
