"""`skyfab completion`: prints scripts with which shells complete commands, options and hosts (made by shtab)."""

from __future__ import annotations

from typing import Annotated, Final

from skyfab.cli.command import Option, command
from skyfab.errors import SkyfabError, UsageError

_SHELLS: Final = ("bash", "zsh", "fish")
_NAMES: Final = "hosts"
"""What the scripts call instead of a shell: lists names."""


@command
def completion(shell: Annotated[str, Option("bash, zsh or fish", "SHELL")]) -> None:
    """Print a shell completion script.

    It completes commands, options, hosts and groups of the inventory, and aliases of ssh_config. It does not connect to
    hosts. Put the line for your shell into its start-up file:

        eval "$(skyfab completion bash)"
        eval "$(skyfab completion zsh)"
        skyfab completion fish | source
    """
    if shell == _NAMES:
        print("\n".join(_hosts()))
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
    parser = line.parser
    for action in (one for each in line.parsers.values() for one in each.actions):
        if action.metavar in ("HOSTS", "HOST"):
            names = shtab.cmd(f"skyfab completion {_NAMES} 2>/dev/null")
            action.complete = names  # type: ignore[attr-defined]
        elif action.nargs != 0 and action.metavar != "RUN":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


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
