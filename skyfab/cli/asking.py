"""Asks hosts a question for a command: shows connections, installations and output, and stops at Ctrl-C."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.ask import Asker
from skyfab.session.shell import Shell
from skyfab.ui.display import attach
from skyfab.ui.events import Events


@contextlib.contextmanager
def asking(hosts: Sequence[Host], inventory: Inventory, *, show: bool) -> Iterator[Asker]:
    """An asker whose events are shown. A host without Python gets one.

    If the output is no longer read (`| head`), raises BrokenPipeError.
    """
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
