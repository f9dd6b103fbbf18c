"""`sky.device.profile()`: what a program sends to its remote devices, and the lines that wait for them."""

from __future__ import annotations

import linecache
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from skyfab._util.sizes import counted, readable
from skyfab.device import batches, call_site, stream
from skyfab.host.device import wire


@dataclass(slots=True)
class Line:
    """A line of the program that has waited."""

    site: str
    """File and line."""
    waits: int = 0
    seconds: float = 0.0
    longest: float = 0.0


class Profile:
    """Counts what is sent to all remote devices while it is entered. ``str()`` is a table of it."""

    def __init__(self) -> None:
        self.operations = 0
        """Operators that hosts were sent."""
        self.plans = 0
        """Kinds of operations that hosts were sent: none after the first steps of a program whose shapes repeat."""
        self.others = 0
        """Other instructions: views, uploads, values to send back, tensors to free."""
        self.batches = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.copies = 0
        """Tensors that one host sent to another. Copies that go through this program are waits."""
        self.bytes_copied = 0
        self.seconds = 0.0
        """How long the block took."""
        self._lines: dict[str, Line] = {}
        self._lock = threading.Lock()
        self._begin = 0.0

    @property
    def waits(self) -> int:
        """How often the program waited for a device."""
        return sum(line.waits for line in self.lines)

    @property
    def lines(self) -> list[Line]:
        """The lines that have waited, the slowest first."""
        with self._lock:
            return sorted(self._lines.values(), key=lambda line: -line.seconds)

    def __enter__(self) -> Profile:
        """Raises the error of an operation before it."""
        for one in stream.open_streams():
            one.flush()  # what came before is not counted
        batches.observers.append(self)
        self._begin = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        """Raises the error of an operation in it."""
        try:
            for one in stream.open_streams():
                if kind is None:
                    one.flush()
                else:
                    one.try_flush()  # raises nothing: the program has an error already
        finally:
            self.seconds += time.perf_counter() - self._begin
            batches.observers.remove(self)

    # ---- what streams report

    def sent(self, instructions: Sequence[Sequence[Any]], size: int) -> None:
        """A batch was sent."""
        codes = [instruction[0] for instruction in instructions]
        operations = sum(code >= 0 or code == wire.DYNAMIC for code in codes)
        plans = codes.count(wire.PLAN)
        copied = [instruction[-1] for instruction in instructions if instruction[0] == wire.RECEIVE]
        with self._lock:
            self.operations += operations
            self.plans += plans
            self.others += len(codes) - operations - plans
            self.batches += 1
            self.bytes_sent += size
            self.copies += len(copied)
            self.bytes_copied += sum(copied)

    def received(self, size: int) -> None:
        """A reply has come."""
        with self._lock:
            self.bytes_received += size

    def waited(self, site: call_site.CallSite, seconds: float) -> None:
        """The program has waited at a line."""
        name = call_site.describe(site) or "unknown line"
        with self._lock:
            line = self._lines.setdefault(name, Line(name))
            line.waits += 1
            line.seconds += seconds
            line.longest = max(line.longest, seconds)

    # ---- the table

    def __str__(self) -> str:
        lines = self.lines
        waited = sum(line.seconds for line in lines)
        text = [
            f"{self.seconds:.3f} s, {waited:.3f} s of it in {counted(self.waits, 'wait')}",
            f"{counted(self.operations, 'operation')}, {counted(self.plans, 'plan')} made, "
            f"{counted(self.others, 'other instruction')}, in {counted(self.batches, 'batch', 'batches')}",
            f"{readable(self.bytes_sent)} sent, {readable(self.bytes_received)} received",
        ]
        if self.copies:
            text.append(f"{counted(self.copies, 'copy', 'copies')} from host to host, {readable(self.bytes_copied)}")
        if lines:
            text += ["", "  waits  seconds  longest  line"]
        for line in lines:
            text.append(f"{line.waits:7,} {line.seconds:8.3f} {line.longest:8.3f}  {_shown(line.site)}")
        return "\n".join(text)


def profile() -> Profile:
    """Counts what all remote devices are sent in a ``with`` block, and finds the lines that wait for them.

    ``with sky.device.profile() as p: …``, then ``print(p)``.
    """
    return Profile()


def _shown(site: str) -> str:
    """A line as a person reads it: relative to the current folder if it is below it, and with its source."""
    file, _, number = site.rpartition(":")
    source = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    return f"{site.removeprefix(f'{Path.cwd()}/')}  {source}".rstrip()
