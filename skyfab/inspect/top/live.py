"""`Live`: the loop of `skyfab top`: shows the latest snapshot, and does what keys ask for."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from skyfab.detached.run import Run
from skyfab.errors import SkyfabError
from skyfab.inspect.stacks import STACKS, describe, groups
from skyfab.inspect.top.fullscreen import FullScreen
from skyfab.inspect.top.monitor import Monitor
from skyfab.inspect.top.snapshot import Snapshot, snapshot
from skyfab.inspect.top.view import HELP, Action, View
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.ask import Asker
from skyfab.ui.suppressed import is_noise
from skyfab.ui.terminal import clean, clean_lines, put, settled

_PACE: Final = 0.5
"""Seconds between two frames, unless a key is pressed."""
_MOMENT: Final = 1.0
"""Seconds that the thread of a text has to end."""
_TAIL: Final = 500
"""Lines of a log that are read of what is there already."""

Tell = Callable[[str], None]
Text = Callable[[Tell, threading.Event], None]
"""Tells lines, which may take long, until the event is set."""


class Live:
    """The screen of `skyfab top`."""

    def __init__(self, hosts: Sequence[Host], inventory: Inventory, every: float) -> None:
        self._hosts = hosts
        self._inventory = inventory
        self._every = every
        self._view = View()

    def run(self) -> None:
        """Returns when the user quits."""
        with Monitor(self._hosts, self._inventory, self._every) as monitor, FullScreen() as screen:
            while self._step(screen, monitor):
                pass

    def _step(self, screen: FullScreen, monitor: Monitor) -> bool:
        """Draws once, and does what the next keys ask for. False: the user quits."""
        now = snapshot(monitor.seen(), self._inventory, every=self._every, clock=time.monotonic(), now=time.time())
        columns, lines = screen.size
        screen.draw(self._view.tables(now, columns, lines))
        for key in screen.keys(_PACE):
            action = self._view.press(key, now, lines)
            if action is not None and not self._do(action, now, screen):
                return False
        return True

    def _do(self, action: Action, now: Snapshot, screen: FullScreen) -> bool:
        if action.wish == "quit":
            return False
        run = now.found.get(action.name)
        if action.wish == "help":
            _show(screen, "keys", lambda tell, _: tell("\n".join(HELP)))
        elif action.wish == "log" and run is not None:
            _show(screen, f"log of {run.id[:8]}  {run.name}", functools.partial(_follow_log, run))
        elif action.wish == "stop":
            self._view.note = f"stopping {action.name[:8]}"
            threading.Thread(target=self._stop, args=(action.name, now), daemon=True, name="skyfab-top-stop").start()
        elif action.wish == "stacks":
            names = run.hosts if run is not None else [action.name]
            chosen = [host for host in self._hosts if host.name in names]
            title = f"run {run.id[:8]}" if run else action.name
            _show(screen, f"stacks of {title}", functools.partial(_tell_stacks, self._inventory, chosen, run))
        return True

    def _stop(self, run: str, now: Snapshot) -> None:
        try:
            now.found[run].stop()
            self._view.note = f"{run[:8]} is stopped"
        except SkyfabError as error:
            self._view.note = clean(str(error), colour=False)


def _show(screen: FullScreen, title: str, text: Text) -> None:
    """Prints a text on the terminal's own screen, where it can be scrolled, until the user wants to go back."""
    closed = threading.Event()

    def tell(line: str) -> None:
        if not closed.is_set():
            put(sys.stdout, clean_lines(line) + "\n")

    def read() -> None:
        try:
            text(tell, closed)
        except SkyfabError as error:
            tell(str(error))

    reader = threading.Thread(target=read, daemon=True, name="skyfab-top-text")
    with screen.aside():
        tell(f"{title}  (q: back)")
        reader.start()
        try:
            while not {"q", "escape", "left"}.intersection(screen.keys(_PACE)):
                pass
        finally:
            closed.set()
            reader.join(_MOMENT)


def _follow_log(run: Run, tell: Tell, closed: threading.Event) -> None:
    def trouble(error: SkyfabError) -> None:
        tell(f"{error.host}: {error.message}; trying again")

    for line in run.lines(follow=True, tail=_TAIL, trouble=trouble, stopped=closed.is_set):
        if not is_noise(line.text):
            rank = "" if run.world_size == 1 else f"[{line.rank}]"
            tell(f"{line.host}{rank} {settled(line.text)}")
    tell(f"— {run.state} —")


def _tell_stacks(inventory: Inventory, hosts: Sequence[Host], run: Run | None, tell: Tell, _: threading.Event) -> None:
    """The stacks of all ranks on these hosts, or of those of a run."""
    with Asker(hosts, inventory) as asker:
        outcomes = asker.ask(STACKS)
    pools = None if run is None else {part.pool for part in run.parts}
    answers = [stack for outcome in outcomes for stack in outcome.answer or () if stack.frames]
    found = [stack for stack in answers if pools is None or stack.pool in pools]
    errors = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    tell("\n".join([*map(describe, groups(found)), *errors] or ["no ranks are running"]))
