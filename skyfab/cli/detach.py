"""Runs a broadcast that Ctrl-C at a terminal can stop or detach, and says how to find a detached run again."""

from __future__ import annotations

import re
import shlex
import sys
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from skyfab._util.hints import HINTS
from skyfab.calls.call import Call
from skyfab.cli.sigterm import SIGTERM
from skyfab.detached.run import Run
from skyfab.pool.compute import Compute
from skyfab.pool.futures import note_stopped
from skyfab.ui.prompt import TERMINAL

R = TypeVar("R")

_QUESTION: Final = "interrupted: [s]top, [d]etach and leave it running, or [c]ontinue, then Enter:"


def broadcast(compute: Compute, call: Call[R], *, name: str) -> list[R] | Run:
    """``call @ compute``. At a terminal, Ctrl-C asks what to do; if that is to detach it, returns the run."""
    future: Future[Any] = compute.submit(call, on="all")
    while True:
        try:
            with compute.events.waiting:
                results: list[R] = future.result()
                return results
        except KeyboardInterrupt as error:
            choice = _asked(future)
            if choice == "stop":
                note_stopped(error, future, compute.hosts)
                raise
            if choice == "detach" and not future.done():
                return compute.detach(name=name)


def _asked(future: Future[Any]) -> str:
    """What the user wants after Ctrl-C: "stop", "detach" or "continue". Without a terminal it is to stop."""
    while not SIGTERM.came and TERMINAL.is_attended() and sys.stderr.isatty():
        try:
            answer = TERMINAL.ask(_QUESTION, future.done, echo=True)
        except KeyboardInterrupt:  # Ctrl-C again
            break
        if future.done():
            return "continue"
        if answer is None:  # Ctrl-D
            break
        for choice in ("stop", "detach", "continue"):
            if answer.strip() and choice.startswith(answer.strip().lower()):
                return choice
    return "stop"


def tell_how_to_attach(run: Run, name: str | None = None) -> None:
    """Prints the commands for a detached run, with the `name` that the user gave it, and its id to stdout."""
    short = run.id[:8]
    print(f"run {short} runs on {', '.join(run.hosts)}", file=sys.stderr)
    for host in run.in_workdirs():
        if re.fullmatch(r"[\w./~ -]+\.[0-9a-f]{8}", host.workdir):
            text = f"another run uses the folder of this project: this one works in a copy, {host.workdir}"
            print(f"{host.name}: {text}", file=sys.stderr)
    word = short if not name or name.startswith("-") else shlex.quote(name)
    for task in ("attach", "logs", "stop"):
        print(HINTS.adapted(f"  skyfab {task} {word}"), file=sys.stderr)
    if name and run.namesakes:
        ids = ", ".join(one.id[:8] for one in run.namesakes)
        print(f"also running under this name: {ids}; the name now refers to {short}", file=sys.stderr)
    print(short, flush=True)
