"""Keys that are pressed while something runs: `d` hands it to its hosts."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from skyfab.calls.call import Call
from skyfab.detached.run import Run
from skyfab.pool.compute import Compute

R = TypeVar("R")


def broadcast(compute: Compute, call: Call[R], *, name: str) -> list[R] | Run:
    """``call @ compute``; or the run that it has become, when somebody has pressed `d` meanwhile."""
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        return compute.broadcast(call)
    future: Future[Any] = compute.submit(call, on="all")
    print("press d to detach: it goes on when this program ends", file=sys.stderr)
    try:
        with _unbuffered():
            while not future.done():
                if select.select([sys.stdin], [], [], 0.1)[0] and b"d" in os.read(sys.stdin.fileno(), 64).lower():
                    return compute.detach(name=name)
    except KeyboardInterrupt:
        future.cancel()
        raise
    found: list[R] = future.result()
    return found


@contextmanager
def _unbuffered() -> Iterator[None]:
    """Keys come as they are pressed, and are not shown."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def farewell(run: Run) -> None:
    """What to do with a run that was left to its hosts."""
    short = run.id[:8]
    print(f"run {short} goes on on {', '.join(run.hosts)}", file=sys.stderr)
    print(f"  skyfab attach {short}    skyfab logs {short} --follow    skyfab stop {short}", file=sys.stderr)
    print(short, flush=True)
