"""Which hosts a command is for: those that were named, else all of the inventory, else this machine; asks them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from skyfab.errors import UsageError
from skyfab.inventory.host import LOCAL, Host
from skyfab.inventory.inventory import Inventory
from skyfab.inventory.selection import some
from skyfab.ui.terminal import clean

if TYPE_CHECKING:
    from skyfab.session.ask import Asker
    from skyfab.session.shell import Shell


def selected(
    hosts: str | None, inventory: str | None, *, quiet: bool = False, here: bool = False
) -> tuple[Inventory, tuple[Host, ...]]:
    """The inventory, and the hosts of it that a command is for. If none were named, prints which these are.

    With `here`, this machine is then one of them. Raises InventoryError, UnknownHost or UsageError.
    """
    found = Inventory.of(inventory)
    chosen = found.select(["all", LOCAL.name] if hosts is None and here else hosts)
    if hosts is None and not quiet:
        print(_line(found, chosen, here=here), file=sys.stderr, flush=True)
    return found, chosen


def selected_one(host: str | None, inventory: str | None) -> tuple[Inventory, Host]:
    """The inventory, and the one host of it that a command is for: the first, if none was named.

    Raises InventoryError, UnknownHost or UsageError.
    """
    found = Inventory.of(inventory)
    chosen = found.select(host)
    if host is not None and len(chosen) > 1:
        names = some([one.name for one in chosen])
        raise UsageError(
            f"{host} selects {len(chosen)} hosts, but this command takes one", hint=f"choose one of {names}"
        )
    return found, chosen[0]


def _line(inventory: Inventory, hosts: tuple[Host, ...], *, here: bool) -> str:
    if inventory.source is None:
        return "using this machine (no inventory, no --hosts)"
    also = ", and this machine" if here else ""
    return clean(f"using {some([host.name for host in hosts])}: all hosts of {inventory.source}{also}", colour=False)


@contextlib.contextmanager
def asking(hosts: Sequence[Host], inventory: Inventory, *, show: bool) -> Iterator[Asker]:
    """An asker whose events are shown. A host without Python gets one.

    If the output is no longer read (`| head`), raises BrokenPipeError.
    """
    from skyfab.session.ask import Asker  # here and below: commands that only name hosts need none of it
    from skyfab.ui.display import attach
    from skyfab.ui.events import Events

    events = Events()

    def prepare(host: Host, session: str) -> Callable[[Shell], str | None]:
        def install(shell: Shell) -> str | None:
            from skyfab.pool.images import install_python  # imported late: few hosts need it

            return install_python(events)(host, session)(shell)

        return install

    asker = Asker(hosts, inventory, events=events, prepare=prepare)
    events.unread.add_done_callback(lambda _: asker.stop())
    detach = attach(events) if show else lambda: None
    try:
        with asker:
            yield asker
    finally:
        detach()
    if events.unread.done():
        raise BrokenPipeError
