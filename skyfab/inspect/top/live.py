"""`Live`: the loop of `skyfab top`: shows the latest snapshot, and handles keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from skyfab.errors import SkyfabError
from skyfab.inspect.top.fullscreen import FullScreen
from skyfab.inspect.top.monitor import Monitor
from skyfab.inspect.top.reading import Reading, log_of, stacks_of
from skyfab.inspect.top.snapshot import Snapshot, snapshot
from skyfab.inspect.top.view import HELP, Action, View, wrap
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.ui.terminal import clean

_PACE: Final = 0.5
"""Seconds between two frames, unless a key is pressed."""
_MOMENT: Final = 1.0
"""Seconds that the thread of a text has to end."""


class Live:
    """The screen of `skyfab top`."""

    def __init__(self, hosts: Sequence[Host], inventory: Inventory, every: float) -> None:
        self._hosts = hosts
        self._inventory = inventory
        self._every = every
        self._view = View()
        self._text: Reading | None = None

    def run(self) -> None:
        """Returns when the user quits."""
        with Monitor(self._hosts, self._inventory, self._every) as monitor:
            try:
                with FullScreen() as screen:
                    while self._step(screen, monitor):
                        pass
            finally:
                if self._text is not None:
                    self._text.close(_MOMENT)

    def _step(self, screen: FullScreen, monitor: Monitor) -> bool:
        """Draws once, and does what the next keys ask for. False: the user quits."""
        now = snapshot(monitor.seen(), self._inventory, every=self._every, clock=time.monotonic(), now=time.time())
        columns, lines = screen.size
        text = [part for line in (self._text.lines if self._text else HELP) for part in wrap(line, columns)]
        view = self._view
        screen.draw(view.text(text, columns, lines) if view.title else view.tables(now, columns, lines))
        for key in screen.keys(_PACE):
            action = view.press(key, now, lines, len(text))
            if action is not None and not self._do(action, now):
                return False
        return True

    def _do(self, action: Action, now: Snapshot) -> bool:
        if action.wish == "quit":
            return False
        if self._text is not None:
            self._text.close()
            self._text = None
        run = now.found.get(action.name)
        if action.wish == "help":
            self._view.open("keys", follow=False)
        elif action.wish == "log" and run is not None:
            self._open(log_of(run), follow=True)
        elif action.wish == "stop":
            self._view.note = f"stopping {action.name[:8]}"
            threading.Thread(target=self._stop, args=(action.name, now), daemon=True, name="skyfab-top-stop").start()
        elif action.wish == "stacks":
            names = run.hosts if run is not None else [action.name]
            chosen = [host for host in self._hosts if host.name in names]
            self._open(stacks_of(self._inventory, chosen, run), follow=False)
        return True

    def _open(self, text: Reading, *, follow: bool) -> None:
        self._text = text
        self._view.open(text.title, follow=follow)

    def _stop(self, run: str, now: Snapshot) -> None:
        try:
            now.found[run].stop()
            self._view.note = f"{run[:8]} is stopped"
        except SkyfabError as error:
            self._view.note = clean(str(error), colour=False)
