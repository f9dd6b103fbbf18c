"""Python stacks of workers: parses the answers of hosts, and groups identical stacks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from skyfab._util import schema
from skyfab.calls.project import with_local_paths
from skyfab.errors import located
from skyfab.inventory.host import Host
from skyfab.session.question import Question, Reply

_STARTS: Final = re.compile(r"(^|[/ ])(skyfab/calls/script\.py|runpy(\.py|>))$")
"""Files that start a script."""
_WORKER: Final = "skyfab/host/agent/worker.py"
"""The file that runs calls."""
_ACTORS: Final = "skyfab/host/agent/actors.py"
"""The file that calls actors."""
_AGENT: Final = re.compile(r"skyfab/(host/agent|protocol)/[^/]*$")
_FRAME: Final = re.compile(r'^ *File "((?!<frozen importlib).*)", line ([0-9]{1,9}) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One stack frame."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} at {self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The stack of one worker's main thread, innermost frame first."""

    host: str
    rank: int | None
    """None for a worker of solo calls."""
    pid: int
    pool: str
    frames: tuple[Frame, ...]

    @property
    def place(self) -> str:
        return f"{self.host} ({self.pid})" if self.rank is None and self.pid else located(self.host, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a host says of a worker."""

    rank: int | None
    pid: int
    pool: str
    text: str


def _parse(host: Host, replies: Iterator[Reply]) -> list[Stack]:
    found = [schema.parse(_Answer, reply.value) for reply in replies]
    return [
        Stack(host=host.name, rank=one.rank, pid=one.pid, pool=one.pool, frames=frames_of(one.text, host.name))
        for one in found
    ]


STACKS: Final = Question("stacks", _parse)
"""Asks a host for the stacks of all workers of its cache, whichever program started them."""


def frames_of(text: str, host: str) -> tuple[Frame, ...]:
    """The main thread's frames in faulthandler's output, which has it last; without those of skyfab and of importlib.

    Files of the project are named as they are here, or in their folder: hosts have them in different places.
    """
    threads = re.split(r"^(?:Current thread|Thread) .*$", with_local_paths(text, host), flags=re.MULTILINE)[1:]
    found = _FRAME.findall(threads[-1]) if threads else ()
    return _own([Frame(file=file, line=int(line), function=function) for file, line, function in found])


def _own(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Without the outer frames that belong to skyfab, and the inner ones where a function waits for an actor.

    Empty if the worker is waiting for a call.
    """
    outer = max((place for place, frame in enumerate(frames) if frame.file.endswith(_WORKER)), default=len(frames))
    while 0 < outer < len(frames) and _AGENT.search(frames[outer - 1].file):
        outer -= 1
    own = frames[:outer]
    while own and _STARTS.search(own[-1].file):
        own = own[:-1]
    inner = max((place + 1 for place, frame in enumerate(own) if frame.file.endswith(_ACTORS)), default=0)
    return tuple(own[inner:])


def groups(stacks: Sequence[Stack]) -> list[list[Stack]]:
    """Groups ranks with the same stack, the largest group first. The line in the innermost function is ignored."""
    alike: dict[tuple[str, tuple[Frame, ...]], list[Stack]] = {}
    for stack in stacks:
        alike.setdefault((stack.pool, likeness(stack)), []).append(stack)
    return sorted(alike.values(), key=len, reverse=True)


def likeness(stack: Stack) -> tuple[Frame, ...]:
    """The grouping key: the frames, without the line number of the innermost one."""
    return tuple(replace(frame, line=0) for frame in stack.frames[:1]) + stack.frames[1:]


def describe(group: Sequence[Stack]) -> str:
    """A group as text."""
    who = f"{len(group)} ranks" if len(group) > 1 else "1 rank"
    first = group[0]
    places = ", ".join(stack.place for stack in group)
    if not first.frames:
        return f"{who} waiting for a call: {places}"
    lines = [f"{who} in {first.frames[0]}: {places}"]
    return "\n".join([*lines, *(f"    {frame}" for frame in first.frames[1:])])
