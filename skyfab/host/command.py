"""Runs any program as a rank: as a child of the worker, with the variables, environment and modules of the rank."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys

from skyfab import context
from skyfab.errors import HostUnfit, WorkerDied
from skyfab.host.agent.host_info import how_it_ended
from skyfab.host.agent.processes import end_children

TYPE_CHECKING = False  # as in all modules that hosts import
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Program = subprocess.Popen[bytes]

_PLACEHOLDER = re.compile(r"\{(\{)?(rank|world_size|local_rank|node|nodes|head|port)\}(?(1)\})")
"""With double braces it is not replaced, but written with single ones."""


def execute(words: Sequence[str], folder: str | None = None) -> int:
    """Runs a program until it ends, in the working folder or in `folder`. Returns 0; raises WorkerDied, HostUnfit."""
    # The agent sends SIGTERM to the whole process group: this process must not end before the program does.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        code = start(words, cwd=folder).wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    if code:
        raise WorkerDied(f"{words[0]} {how_it_ended(code)}", exitcode=code, rank=context.instance_info().rank)
    return code


def start(
    words: Sequence[str],
    *,
    port: int = 0,
    placeholders: bool = True,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Program:
    """Starts a program in the process group of this worker. Raises HostUnfit if it cannot be started.

    With `placeholders`, {rank} and so on are replaced in its words. `port` replaces the rendezvous port, in variables
    too; `env` and other `options` are those of Popen.
    """
    info = context.instance_info()
    values = {
        "rank": info.rank,
        "world_size": info.world_size,
        "local_rank": info.local_rank,
        "node": info.node,
        "nodes": info.total_nodes,
        "head": info.head_addr,
        "port": port or info.head_port,
    }
    if placeholders:
        words = [
            _PLACEHOLDER.sub(lambda found: found[0][1:-1] if found[1] else str(values[found[2]]), word)
            for word in words
        ]
    variables = {**_environment(), **({"MASTER_PORT": str(port)} if port else {}), **(env or {})}
    try:
        return subprocess.Popen(words, env=variables, stdin=subprocess.DEVNULL, **options)
    except FileNotFoundError as error:
        if error.filename == options.get("cwd"):
            raise
        hint = "--pip=… installs its package, --sync copies the files of this folder to the hosts"
        raise unfit(f"command not found: {words[0]}", rank=info.rank, hint=hint) from None
    except (OSError, ValueError) as error:
        raise unfit(f"cannot start {words[0]}: {error}", rank=info.rank) from None


def unfit(message: str, **place: Any) -> HostUnfit:
    """The error of a host that lacks what this run needs: for the command line not one that was lost."""
    error = HostUnfit(message, **place)
    error.exit_code = 1
    return error


def end(program: Program, grace: float) -> None:
    """Ends a program and all that it has started, `grace` seconds after SIGTERM.

    The signal goes to the process group: this process must ignore it, and be the subreaper of what it has started.
    """
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(grace)
    program.kill()
    program.wait()
    end_children()


def _environment() -> dict[str, str]:
    """That of this worker; the programs of its Python come first, and its own modules can be imported."""
    env = {"PYTHONUNBUFFERED": "1", **os.environ}  # else Python shows the lines of a program late
    bundle = os.path.dirname(os.path.dirname(context.__file__))
    own = sys.path[: sys.path.index(bundle) + 1]  # the project's folders are before it
    env["PYTHONPATH"] = os.pathsep.join([*own, *filter(None, [env.get("PYTHONPATH")])])
    programs = os.path.dirname(sys.executable)
    if sys.prefix != sys.base_prefix or programs not in env.get("PATH", os.defpath).split(os.pathsep):
        env["PATH"] = os.pathsep.join([programs, env.get("PATH", os.defpath)])
    return env
