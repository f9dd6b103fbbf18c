"""An interactive shell on a host: builds the ssh command line with which this process replaces itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from skyfab._util.scripts import given, read, spelled
from skyfab.errors import ProtocolError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.ask import Asker
from skyfab.session.question import Question, only
from skyfab.ssh.container import inside
from skyfab.ssh.openssh import OpenSSH

_SCRIPT: Final = read("session/interactive.sh")
_LOGIN: Final = 'b=$(command -v bash) || b=/bin/sh; exec "$b" -l -c "$(printf %b "$1")" skyfab'


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractiveShell:
    """Where on a host the shell begins, and with what."""

    host: Host
    folder: str
    """The working folder: a path, or the name of a folder in the cache; empty to stay where it is."""
    programs: str = ""
    """The folder that comes first on PATH, or ``env/DIGEST``."""
    otherwise: str = ""
    """What is said where that is not there."""
    tree: str = ""
    """The digest of the project tree whose folders are on PYTHONPATH."""
    setup: str = ""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    command: str = ""
    """What is run instead of a shell."""

    def argv(self, inventory: Inventory, *, terminal: bool) -> list[str]:
        """The command line; with `terminal`, on a terminal there too. Raises a HostError.

        Values of variables are in no command line: a file takes them to the host, which the shell there deletes.
        """
        if self.host.is_here:
            return ["/bin/sh", "-c", self.script()]
        name = ""
        if self.variables:
            values = {"values": dict(self.variables)}
            question = Question("command.variables", lambda host, replies: str(only(replies)), values)
            with Asker([self.host], inventory) as asker:
                name = asker.ask_one(question, self.host)
            if not re.fullmatch("ssh-[0-9a-f]+", name):
                raise ProtocolError("invalid reply to variables", host=self.host.name)
        login = inside(self.host, f"exec /bin/sh -c '{_LOGIN}' skyfab '{spelled(self.script(name))}'")
        if self.host.transport == "local":
            return ["/bin/sh", "-c", login]
        return OpenSSH(self.host, inventory).by_hand(login, terminal=terminal)

    def script(self, variables: str = "") -> str:
        """The lines for a shell; `variables` is the file that has them."""
        return (
            given(
                cache=self.host.cache,
                folder=self.folder,
                programs=self.programs,
                otherwise=self.otherwise,
                tree=self.tree,
                variables=variables,
                setup=self.setup,
                command=self.command,
            )
            + _SCRIPT
        )
