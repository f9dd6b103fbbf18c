"""`skyfab serve`: starts a server on all ranks, which outlives this program, and forwards its port."""

from __future__ import annotations

import re
import shlex
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

from skyfab.cli.command import COMMAND, Option, command
from skyfab.cli.run_options import GpuOptions, ScriptOptions
from skyfab.errors import BroadcastError, UsageError, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skyfab.detached.run import Run
    from skyfab.inventory.host import Host

_PACE: Final = 1.0
"""Seconds between checks of whether it is ready."""


@command
def serve(
    name: Annotated[str, Option("a name for the server, for skyfab runs, logs and stop", "NAME")],
    *words: Annotated[str, Option("the program and its arguments", "-- COMMAND")],
    options: ScriptOptions,
    claim: GpuOptions,
    ranks: Annotated[int, Option("ranks on each host", "N")] = 1,
    ready: Annotated[
        str,
        Option(
            "the server is ready when this URL or port of the first host responds, or rank 0 prints this text",
            "URL|PORT|TEXT",
            default="as soon as it has started",
        ),
    ] = "",
    port: Annotated[int, Option("the port to forward, on the first host", "PORT", default="that of --ready")] = 0,
    local: Annotated[int | None, Option("the port on this machine", "PORT", default="the same, if it is free")] = None,
    restarts: Annotated[int, Option("how many times all ranks are restarted when one ends", "N", least=0)] = 3,
    timeout: Annotated[int, Option("restart the server if it is not ready after this time", "SECONDS")] = 1800,
    sync: Annotated[
        bool, Option("first copy the current folder to the hosts, except what .gitignore excludes")
    ] = False,
    detach: Annotated[bool, Option("start the server and return, without forwarding its port")] = False,
) -> None:
    """Start a server on hosts, and forward its port to 127.0.0.1.

    Runs COMMAND on every host as a detached run, with the variables, placeholders, environment and files of skyfab
    run -- COMMAND. If a rank ends, all ranks are restarted together, after a pause; after --restarts restarts, the run
    fails. Once the server has been ready for ten minutes, earlier restarts do not count. skyfab runs shows starting,
    ready, restarting or failed. Ctrl-C closes the port on this machine; the server continues until skyfab stop NAME.
    --gpus and --when-free work as in skyfab run; the ranks of a host share the GPUs, and keep them during restarts.

        skyfab serve chat --hosts=node1 --ready=8000 -- vllm serve MODEL --host=127.0.0.1
        skyfab serve files --hosts=node1 --ready=http://127.0.0.1:8000/ -- python3 -m http.server --bind=127.0.0.1
        skyfab stop chat
    """
    from skyfab.calls.call import as_function
    from skyfab.cli.detach import tell_how_to_attach
    from skyfab.cli.run import lay_out, parsed
    from skyfab.cli.run_environment import pool_of, project_of
    from skyfab.host.command import execute
    from skyfab.plugins.base import OwnPort

    script, _ = parsed(COMMAND, words, task=f"serve {name}")
    if port > 65535:
        raise UsageError(f"invalid --port={port}", hint="expected a number from 1 to 65535")
    port = port or _port_of(ready)
    settings = project_of(options, script)
    with pool_of(claim.added_to(options), script, settings, ranks=ranks, here=1, plugins=[OwnPort()]) as compute:
        folder = lay_out(compute, script.parent) if sync else None
        function = as_function(execute)
        function.label = f"serve {name}"
        server = {"ready": ready, "port": port, "restarts": restarts, "timeout": timeout}
        call = claim.supervised(function(list(words), folder), compute, name, server)
        run, hosts = compute.launch(call, name=name), [node.host for node in compute.hosts]
    tell_how_to_attach(run, name, container=options.container)
    if not detach:
        _follow(run, name, hosts, port, local)


def _port_of(ready: str) -> int:
    """The port that --ready names; 0 if it names none. Raises UsageError."""
    try:
        port = urlsplit(f"//:{ready}" if ready.isdigit() else ready).port
    except ValueError:
        port = 0
    if port == 0 or re.match(r"(?!https?://)\w+://", ready) or (ready.isdigit() and port is None):
        hint = "expected an http or https URL, a port from 1 to 65535, or a text"
        raise UsageError(f"invalid --ready={ready}", hint=hint)
    return port or 0


def _follow(run: Run, name: str, hosts: Sequence[Host], port: int, local: int | None) -> None:
    """Reports the server's state, and forwards its port once it is ready, until Ctrl-C. Raises the server's error."""
    from skyfab.detached.find import attached
    from skyfab.host.phase import without_times
    from skyfab.pool.forward import Forwards
    from skyfab.ui.events import Events
    from skyfab.ui.failure import left_running
    from skyfab.ui.terminal import clean

    events = Events()
    events.subscribe(lambda event: print(event, file=sys.stderr, flush=True))
    said, is_open = "", False
    following = attached(run.id, hosts, inventory=run.inventory)
    port_hint = f"; to forward its port: skyfab forward {port} --host={hosts[0].name}" if port else ""
    continues = f"{name} continues on {', '.join(run.hosts)}{port_hint}; to stop it: skyfab stop {shlex.quote(name)}"
    with left_running(name, continues), closing(Forwards(events)) as forwards, following as found:
        while found.state in ("running", "unreachable"):
            phase = found.phase
            text = "" if phase is None else ": ".join(filter(None, (phase.phase, phase.text)))
            if text and without_times(text) != said:
                print(clean(f"{name}: {text}", colour=False), file=sys.stderr, flush=True)
                said = without_times(text)
            if phase is not None and phase.phase == "ready" and not is_open:
                if not port:
                    return
                forward = forwards.open(hosts[0], found.inventory, port, local)
                taken = f"port {port} is in use on this machine" if forward.port != (local or port) else ""
                others = f"it also runs on {', '.join(run.hosts[1:])}" if run.hosts[1:] else ""
                print("; ".join(filter(None, (f"{forward.url} → {forward.to}", taken, others))), flush=True)
                is_open = True
            time.sleep(_PACE)
            found.look()
        if found.state != "stopped":
            try:
                found.result()
            except BroadcastError as error:
                if isinstance(error.exceptions[0], WorkerDied):
                    last = f"its last line of output: {found.last}; " if found.last else ""
                    error.hint = f"{last}all output: skyfab logs {shlex.quote(name)}"
                raise
