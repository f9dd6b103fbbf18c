"""Commands in a container of a host: podman, docker or apptainer around what a transport runs there."""

from __future__ import annotations

from typing import Final

from skyfab._util.scripts import one_line, read, spelled
from skyfab.errors import HostUnfit
from skyfab.inventory.host import Host

_SCRIPT: Final = one_line(read("ssh/container.sh"))
_FAILED: Final = (70, 125, 126, 127)
"""Exit codes of the script, and of podman and docker, if they could not run the command."""


def inside(host: Host, command: str) -> str:
    """The command line for a host's login shell; in its container, if it has one. `command` begins with ``exec``."""
    if not host.inside:
        return command
    programs = "podman docker" if host.container else "apptainer singularity"
    name = spelled(host.container or host.apptainer or "")
    return f"exec /bin/sh -c '{_SCRIPT}' skyfab '{programs}' '{name}' {command.removeprefix('exec ')}"


def refused(host: Host, code: int, said: str) -> HostUnfit | None:
    """The error for a container in which nothing could run; `said` is the last line of stderr."""
    if not host.inside or code not in _FAILED:
        return None
    why, _, hint = said.partition("|")
    if "/bin/sh" in why:
        why, hint = f"{host.inside} has no /bin/sh", "skyfab needs a shell in it: use another image"
    return HostUnfit(why if hint else f"{host.inside} does not run commands: {why}", host=host.name, hint=hint or None)
