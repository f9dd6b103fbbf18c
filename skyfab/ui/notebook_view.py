"""Shows a pool's events in a notebook: lines below the cell that runs, and the live lines as one display, in place."""

from __future__ import annotations

import contextvars
import secrets
import threading
from collections.abc import Sequence
from html import escape
from typing import Any, Final

from skyfab.errors import located
from skyfab.ui.events import Event, Output
from skyfab.ui.printer import Line, put_lines
from skyfab.ui.screen import Screen
from skyfab.ui.terminal import fitting, ipython

_TICK: Final = 0.5
"""Seconds between updates: each is a message to the browser."""
_MOST: Final = 12
"""Lines of the display."""


class NotebookView(Screen):
    """The cell that runs, or of which a call still runs."""

    _spinners = ("",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shell = ipython()
        self._context = contextvars.copy_context()
        """That of the cell: the kernel tells by it to which one belongs what is written."""
        self._display = ""
        self._cell = -1
        """The number of the cell that has the display."""
        self._shown = ""

    def __call__(self, event: Event) -> None:
        if threading.current_thread() is threading.main_thread():
            self._context = contextvars.copy_context()
        super().__call__(event)

    def _prefix(self, event: Output) -> str:
        return located(event.host, event.rank)

    def _is_waited_for(self) -> bool:
        return True  # nothing that the program prints can get into the display

    def _draw(self, lines: list[Line], live: Sequence[str]) -> None:
        self._context.copy().run(self._put, lines, live)

    def _put(self, lines: list[Line], live: Sequence[str]) -> None:
        put_lines(lines)
        shown = "\n".join(fitting(live, _MOST))
        cell = self._shell.execution_count
        if shown and cell != self._cell:
            if self._shown:
                self._publish("", update=True)  # the lines continue below this cell
            self._cell, self._display = cell, secrets.token_hex(8)
            self._publish(shown, update=False)
        elif shown != self._shown:
            self._publish(shown, update=True)
        self._shown = shown

    def _publish(self, text: str, *, update: bool) -> None:
        html = f"<pre>{escape(text)}</pre>" if text else ""
        where = {"display_id": self._display}
        self._shell.display_pub.publish({"text/plain": text, "text/html": html}, transient=where, update=update)

    def _restless(self) -> float | None:
        return None if super()._restless() is None else _TICK
