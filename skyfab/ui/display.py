"""Chooses the view that shows a pool's events: a notebook's, a live terminal's, or plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Literal

from skyfab.ui.events import Events, Output
from skyfab.ui.notebook_view import NotebookView
from skyfab.ui.printer import TIMEOUT, Plain, View
from skyfab.ui.screen import Screen
from skyfab.ui.terminal import is_notebook, is_rich


def attach(
    events: Events,
    kind: Literal["auto", "rich", "plain"] = "auto",
    *,
    timeout: float = TIMEOUT,
) -> Callable[[], None]:
    """Shows a pool's events from now on; returns a function that writes the rest and stops.

    `auto` is a display of its own in a notebook, `rich` if stdout and stderr are both a capable terminal, else `plain`.
    A thread that emits an event waits up to `timeout` seconds for a slow output.
    """
    view: View
    if kind == "auto" and is_notebook():
        view = NotebookView(time.monotonic, timeout, events.waiting)
    elif kind == "rich" or (kind == "auto" and is_rich(sys.stdout, sys.stderr)):
        view = Screen(time.monotonic, timeout, events.waiting)
    else:
        view = Plain(time.monotonic, timeout)
    view.unread = events.unread
    unsubscribe = events.subscribe(view)

    def detach() -> None:
        unsubscribe()
        view.close()

    return detach


def line_format() -> Callable[[Output], str]:
    """How a worker's line is shown, as `attach` does."""
    view: View = Screen(time.monotonic) if is_rich(sys.stdout, sys.stderr) else Plain(time.monotonic)
    return view.line
