"""Asks hosts for a command of `skyfab`: connections, installations and output are shown, and Ctrl-C ends all of it."""

from __future__ import annotations

import contextlib
import signal
import threading
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

    If the output is not read any more (`| head`), raises BrokenPipeError.
    """
    events = Events()
    reader = _Reader()
    detach = attach(events, "auto", on_closed=reader.left) if show else lambda: None

    def prepare(host: Host, session: str) -> Callable[[Shell], str | None]:
        return lambda shell: _install_python(host, session, shell, events)

    try:
        with reader, Asker(hosts, inventory, events=events, prepare=prepare) as asker:
            yield asker
    finally:
        detach()


def _install_python(host: Host, session: str, shell: Shell, events: Events) -> str | None:
    from skyfab.pool.images import install_python  # imported late: few hosts need it

    return install_python(events)(host, session)(shell)


class _Reader:
    """Who reads the output. Leaves the block with BrokenPipeError when that one is gone, as Ctrl-C leaves it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_waited_for = self._is_gone = False
        self._thread = threading.get_ident()

    def left(self) -> None:
        with self._lock:
            if self._is_waited_for:
                self._is_gone = True
                signal.pthread_kill(self._thread, signal.SIGINT)

    def __enter__(self) -> None:
        self._is_waited_for = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._is_waited_for = False
        if self._is_gone and kind is KeyboardInterrupt:
            raise BrokenPipeError from None
