"""Runs a broadcast and watches the keyboard: pressing `d` detaches it, so that it continues on the hosts."""

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
    """``call @ compute``; if the user presses `d` meanwhile, detaches it and returns the run."""
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
    """Disables line buffering and echo of stdin: keys can be read as they are pressed."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def tell_how_to_attach(run: Run) -> None:
    """Prints the commands for a detached run, and its id to stdout."""
    short = run.id[:8]
    print(f"run {short} goes on on {', '.join(run.hosts)}", file=sys.stderr)
    print(f"  skyfab attach {short}    skyfab logs {short} --follow    skyfab stop {short}", file=sys.stderr)
    print(short, flush=True)
