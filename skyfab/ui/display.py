"""Chooses the view that shows a pool's events: a notebook's, a live terminal's, or plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Literal, TextIO

from skyfab.ui.events import Events, Output
from skyfab.ui.notebook_view import NotebookView
from skyfab.ui.printer import TIMEOUT, Plain, View
from skyfab.ui.screen import Screen
from skyfab.ui.terminal import is_notebook, is_rich


def attach(
    events: Events,
    kind: Literal["auto", "rich", "plain"] = "auto",
    *,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    timeout: float = TIMEOUT,
    on_closed: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Shows a pool's events from now on; returns a function that writes the rest and stops.

    `auto` is a display of its own in a notebook, `rich` if stdout and stderr are both a capable terminal, else `plain`.
    A thread that emits an event waits up to `timeout` seconds for a slow output. `on_closed` is called, on another
    thread, when the output is a pipe that is no longer read.
    """
    files = stdout or sys.stdout, stderr or sys.stderr
    rich = kind == "rich" or (kind == "auto" and is_rich(*files))
    view: View
    if kind == "auto" and stdout is stderr is None and is_notebook():
        view = NotebookView(files[0], time.monotonic, timeout, events.waiting)
    elif rich:
        view = Screen(files[0], time.monotonic, timeout, events.waiting)
    else:
        view = Plain(stdout, stderr, time.monotonic, timeout)
    view.on_closed = on_closed
    unsubscribe = events.subscribe(view)

    def detach() -> None:
        unsubscribe()
        view.close()

    return detach


def line_format(stdout: TextIO, stderr: TextIO) -> Callable[[Output], str]:
    """How a worker's line is shown in these files, as `attach` does."""
    view: View = Screen(stdout, time.monotonic) if is_rich(stdout, stderr) else Plain(stdout, stderr, time.monotonic)
    return view.line
