"""Runs a broadcast that Ctrl-C at a terminal can stop or detach, and says how to find a detached run again."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Final, TypeVar

from skyfab._util.hints import HINTS
from skyfab.calls.call import Call
from skyfab.cli.sigterm import SIGTERM
from skyfab.detached.run import Run
from skyfab.detached.sweep import LABEL
from skyfab.errors import UsageError
from skyfab.pool.compute import Compute
from skyfab.pool.futures import note_stopped
from skyfab.ui.prompt import TERMINAL
from skyfab.ui.terminal import clean

R = TypeVar("R")

_QUESTION: Final = "interrupted: [s]top, [d]etach and leave it running, or [c]ontinue, then Enter:"


def broadcast(compute: Compute, call: Call[R], *, name: str) -> list[R] | Run:
    """``call @ compute``. At a terminal, Ctrl-C asks what to do; if that is to detach it, returns the run.

    If the output is no longer read (`| head`), stops the call and raises BrokenPipeError.
    """
    future: Future[Any] = compute.submit(call, on="all")
    unread = compute.events.unread
    unread.add_done_callback(lambda _: future.cancel())
    while True:
        try:
            with compute.events.waiting:
                results: list[R] = future.result()
                return results
        except CancelledError:
            if not unread.done():
                raise
            raise BrokenPipeError from None
        except KeyboardInterrupt as error:
            choice = asked(future.done)
            if choice == "stop":
                note_stopped(error, future, compute.hosts)
                raise
            if choice == "detach" and not future.done():
                try:
                    return compute.detach(name=name)
                except UsageError as refused:  # its arguments are still being sent
                    print(f"not detached: {refused}", file=sys.stderr)


def asked(is_over: Callable[[], bool]) -> str:
    """What the user wants after Ctrl-C: "stop", "detach" or "continue". Without a terminal it is to stop."""
    while not SIGTERM.came and TERMINAL.is_attended() and sys.stderr.isatty():
        try:
            answer = TERMINAL.ask(_QUESTION, is_over, echo=True)
        except KeyboardInterrupt:  # Ctrl-C again
            break
        if is_over():
            return "continue"
        if answer is None:  # Ctrl-D
            break
        for choice in ("stop", "detach", "continue"):
            if answer.strip() and choice.startswith(answer.strip().lower()):
                return choice
    return "stop"


def tell_how_to_attach(run: Run, name: str | None = None, get: Sequence[str] = (), container: str = "") -> None:
    """Prints the commands for a detached run, with the user's options, and its id to stdout."""
    short = run.id[:8]
    phase, where = run.phase, ", ".join(run.hosts)
    state = f"is waiting on {where}: {phase.text}" if phase and phase.phase == "waiting" else f"was started on {where}"
    print(clean(f"run {short} {state}", colour=False), file=sys.stderr)
    used = {(host.name, host.workdir): one for one in run.others for host in one.in_workdirs()}
    for host in run.in_workdirs():
        if re.fullmatch(r"[\w./~ -]+\.[0-9a-f]{8}", host.workdir):
            other = used.get((host.name, host.workdir[: -len(".01234567")]))
            who = f"run {other.id[:8]} ({other.name})" if other else "another run"
            text = f"{who} uses the folder of this project: this one works in a copy, {host.workdir}"
            print(clean(f"{host.name}: {text}", colour=False), file=sys.stderr)
    word = short if not name or name.startswith("-") else shlex.quote(name)
    if container:
        word += " --hosts=" + shlex.quote(",".join(f"{host}/{container}" for host in run.hosts))
    for task in ("sweep" if run.function.startswith(LABEL) else "attach", "logs", "stop"):
        print(HINTS.adapted(f"  skyfab {task} {word}"), file=sys.stderr)
    if get and run.in_workdirs():
        text = f"skyfab attach {word} fetches {', '.join(get)} into {Path.cwd()} when the run has ended"
        print(HINTS.adapted(text), file=sys.stderr)
    namesakes = ", ".join(one.id[:8] for one in run.others if one.name == run.name)
    if name and namesakes:
        print(f"also running under this name: {namesakes}; the name now refers to {short}", file=sys.stderr)
    print(short, flush=True)
