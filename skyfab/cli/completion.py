"""`skyfab completion`: prints scripts with which shells complete commands, options, hosts and runs (made by shtab)."""

from __future__ import annotations

from typing import Annotated, Final

from skyfab.cli import run_history
from skyfab.cli.command import Option, command
from skyfab.errors import SkyfabError, UsageError

_SHELLS: Final = ("bash", "zsh", "fish")
_NAMES: Final = {"HOSTS": "hosts", "HOST": "hosts", "RUN": "runs"}
"""What completes a value, by how the help shows that value."""


@command
def completion(shell: Annotated[str, Option("bash, zsh or fish", "SHELL")]) -> None:
    """Print a script that completes what you type.

    It completes commands, options, hosts and groups of the inventory, aliases of ssh_config, and runs that were started
    from this machine. It connects to no host. Put the line for your shell into its start-up file:

        eval "$(skyfab completion bash)"
        eval "$(skyfab completion zsh)"
        skyfab completion fish | source
    """
    if shell in _NAMES.values():  # what the scripts call
        print("\n".join(run_history.names() if shell == "runs" else _hosts()))
    elif shell in _SHELLS:
        print(_script(shell))
    else:
        what = f"unknown shell {shell!r}: choose from {', '.join(_SHELLS)}"
        raise UsageError(what, hint="skyfab completion bash")


def _script(shell: str) -> str:
    import shtab

    from skyfab.cli.parser import CommandLine
    from skyfab.cli.tasks import COMMANDS

    line = CommandLine(COMMANDS)
    for action in (one for actions in line.actions.values() for one in actions):
        if action.metavar in _NAMES:
            names = shtab.cmd(f"skyfab completion {_NAMES[action.metavar]} 2>/dev/null")
            action.complete = names  # type: ignore[attr-defined]
        elif action.nargs != 0:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(line.parser, shell))


def _hosts() -> list[str]:
    """Names of hosts, groups and tags; none if the inventory has mistakes, which other commands report."""
    from skyfab.inventory.inventory import Inventory
    from skyfab.inventory.ssh_config import aliases

    try:
        found = Inventory.of(None)
    except SkyfabError:
        return []
    tags = {tag for host in found.hosts.values() for tag in host.tags}
    return sorted({*found.hosts, *found.groups, *tags, *aliases(), "all", "local"})
