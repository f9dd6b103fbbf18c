"""`Live`: the loop of `skyfab top`: shows what is known, and does what keys ask for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from skyfab.errors import SkyfabError
from skyfab.inspect.top.frame import HELP, table_frame, text_frame
from skyfab.inspect.top.fullscreen import FullScreen
from skyfab.inspect.top.monitor import Monitor
from skyfab.inspect.top.reading import Reading, log_of, stacks_of
from skyfab.inspect.top.snapshot import Snapshot, snapshot
from skyfab.inspect.top.state import Action, View
from skyfab.inspect.top.width import wrap
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory

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
        self._said: list[str] = []
        """What has become of runs that were to be stopped."""

    def run(self) -> None:
        """Returns when the user quits."""
        with Monitor(self._hosts, self._inventory, self._every) as monitor:
            try:
                with FullScreen() as screen:
                    while self._step(screen, monitor):
                        pass
            finally:
                if (text := self._text) is not None:
                    text.close()
                    text.join(_MOMENT)

    def _step(self, screen: FullScreen, monitor: Monitor) -> bool:
        """Draws once, and does what the next keys ask for. False: the user quits."""
        now = snapshot(monitor.seen(), self._inventory, every=self._every, clock=time.monotonic(), now=time.time())
        columns, lines = screen.size
        if self._said:
            self._view = replace(self._view, note=self._said.pop(0))
        self._view = self._view.settled(now, lines)
        text = [part for line in (self._text.lines if self._text else HELP) for part in wrap(line, columns)]
        if self._view.text:
            screen.draw(text_frame(self._view.text, text, self._view, columns, lines))
        else:
            screen.draw(table_frame(now, self._view, columns, lines))
        for key in screen.keys(_PACE):
            self._view, action = self._view.press(key, now, lines, len(text))
            if action is not None and not self._do(action, now):
                return False
        return True

    def _do(self, action: Action, now: Snapshot) -> bool:
        if action.wish == "quit":
            return False
        self._close_text()
        run = now.found.get(action.run)
        if action.wish == "log" and run is not None:
            self._open(log_of(run), follow=True)
        elif action.wish == "stop" and run is not None:
            self._view = replace(self._view, note=f"stopping {run.id[:8]}")
            threading.Thread(target=self._stop, args=(action.run, now), daemon=True, name="skyfab-top-stop").start()
        elif action.wish == "stacks":
            names = run.hosts if run is not None else [action.host]
            chosen = [host for host in self._hosts if host.name in names]
            self._open(stacks_of(self._inventory, chosen, run), follow=False)
        return True

    def _open(self, text: Reading, *, follow: bool) -> None:
        self._text = text
        self._view = self._view.opened(text.title, follow=follow)

    def _close_text(self) -> None:
        if self._text is not None:
            self._text.close()
            self._text = None

    def _stop(self, id_: str, now: Snapshot) -> None:
        try:
            now.found[id_].stop()
            self._said.append(f"{id_[:8]} is stopped")
        except SkyfabError as error:
            self._said.append(str(error))
