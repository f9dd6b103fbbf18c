"""Reads the log or the stacks of a run or host, on a separate thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from skyfab.detached.run import Run
from skyfab.errors import SkyfabError
from skyfab.inspect.stacks import STACKS, describe, groups
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.ask import Asker
from skyfab.ui.suppressed import is_noise
from skyfab.ui.terminal import clean, settled

_TAIL: Final = 500
"""Lines of a log that are read of what is there already."""
_KEPT: Final = 5000
"""Lines of a text that are kept."""


class Reading:
    """A text that is being read, until it is closed."""

    def __init__(self, title: str, read: Callable[[Reading], None]) -> None:
        self.title = title
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(read,), daemon=True, name="skyfab-top-text")
        self._thread.start()

    def _run(self, read: Callable[[Reading], None]) -> None:
        try:
            read(self)
        except SkyfabError as error:
            self.add(str(error))

    def add(self, text: str) -> None:
        for line in text.split("\n"):
            self._lines.append(clean(line, colour=False).expandtabs())

    @property
    def lines(self) -> Sequence[str]:
        return list(self._lines) or (["loading …"] if self._thread.is_alive() else [])

    def close(self, timeout: float = 0.0) -> None:
        """Ends it, and waits for its thread, which stops as soon as it notices."""
        self.closed.set()
        self._thread.join(timeout)


def log_of(run: Run) -> Reading:
    """The log of a run, which is followed until it is closed or the run has ended."""

    def read(text: Reading) -> None:
        def trouble(error: SkyfabError) -> None:
            text.add(f"{error.host}: {error.message}; trying again")

        for line in run.lines(follow=True, tail=_TAIL, trouble=trouble, stopped=text.closed.is_set):
            if not is_noise(line.text):
                rank = "" if run.world_size == 1 else f"[{line.rank}]"
                text.add(f"{line.host}{rank} {settled(line.text)}")
            if text.closed.is_set():
                return
        text.add(f"— {run.state} —")

    return Reading(f"log of {run.id[:8]}  {clean(run.name, colour=False)}", read)


def stacks_of(inventory: Inventory, hosts: Sequence[Host], run: Run | None) -> Reading:
    """The stacks of all ranks on these hosts, or of those of a run."""

    def read(text: Reading) -> None:
        with Asker(hosts, inventory) as asker:
            outcomes = asker.ask(STACKS)
        pools = None if run is None else {part.pool for part in run.parts}
        answers = [stack for outcome in outcomes for stack in outcome.answer or () if stack.frames]
        found = [stack for stack in answers if pools is None or stack.pool in pools]
        for group in groups(found):
            text.add(describe(group))
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        for error in errors:
            text.add(str(error))
        if not found and not errors:
            text.add("no ranks are running")

    names = f"run {run.id[:8]}" if run else ", ".join(host.name for host in hosts)
    return Reading(f"stacks of {names}", read)
