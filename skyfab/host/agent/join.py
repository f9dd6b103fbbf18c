"""How the worker of a device joins a device that stays: it gives its pipes to the process that has the tensors.

That process runs the call of a detached run (host/device/stay.py) and listens in the folder of its agent. As a link
does with an agent, the worker sends it its pipes, its stdout and stderr, and sleeps: no process copies data.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

from skyfab import context
from skyfab.errors import UsageError
from skyfab.host.ask.runs import agent_of, last_line, read, run_folder
from skyfab.host.device import wire
from skyfab.protocol import VERSION

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from typing import Any, Final

SOCKET: Final = "device.sock"
VERSIONS: Final = [VERSION, wire.INSTRUCTIONS]
"""What both processes must have in common."""
_HELD: Final = 15.0
"""Seconds to wait for another program: ten after it has ended, its agent ends too."""
_TICK: Final = 0.1


def hand_over(request: dict[str, Any], source: int, sink: int) -> Exception:
    """Gives the pipes of this process to that of a run, and ends when they are no longer used.

    Returns only if that is not possible: the reason.
    """
    run = run_folder(request["workdir"][1], request["env"][context.JOINED])
    about = {"holder": request["env"][context.HOLDER], "versions": VERSIONS, "device": os.path.basename(run)}
    about |= {"stores": request["stores"], "plain": request["plain"]}
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(_HELD)
    reply = b""
    with contextlib.suppress(OSError):
        os.chdir(read(f"{run}/agent").strip().split(" ", 2)[-1])  # the length of socket paths is limited
        while link.connect_ex(SOCKET) and agent_of(run)[0] is not None:  # it is being started
            time.sleep(_TICK)
        socket.send_fds(link, [json.dumps(about).encode()], [source, sink, 1, 2])
        reply = link.recv(4096)
    if reply != b"accepted":
        why = reply.decode(errors="replace") or last_line(f"{run}/logs") or "the device has ended"
        other = "" if reply else "end that program, or "
        hint = f"{other}delete the device with all that it keeps: skyfab stop {os.path.basename(run)[:8]}"
        return UsageError(why, hint=hint)
    for fd in (source, sink, 1, 2):
        os.close(fd)
    link.settimeout(None)
    with contextlib.suppress(OSError):
        link.recv(1)  # until the other process closes it, or has ended
    os._exit(1)
