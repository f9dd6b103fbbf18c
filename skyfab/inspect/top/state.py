"""`View`: what of a snapshot is on the screen and selected, and what a key does. Pure: it draws and reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from skyfab.inspect.top.snapshot import Snapshot

Pane = Literal["host", "run"]
Wish = Literal["log", "stacks", "stop", "quit", "close"]

_MOVES: Final = {"up": -1, "k": -1, "down": 1, "j": 1}
_PAGES: Final = {"pageup": -1, "pagedown": 1, " ": 1}
_FRAME: Final = 3
"""Lines that are neither a host nor a run: the summary, the head of the hosts and the keys."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a key asks for: of a run if `run` is its id, else of the host."""

    wish: Wish
    run: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of the screen."""

    selected: tuple[Pane, str] = ("host", "")
    """What the bar is on: a host's name or a run's id."""
    tops: tuple[int, int] = (0, 0)
    """The first host and the first run that are shown."""
    text: str = ""
    """The title of the text that is shown instead: a log, stacks or the help."""
    is_followed: bool = False
    """The text grows, and its end is shown."""
    top: int = 0
    """The first line of the text that is shown, if its end is not."""
    stopping: str = ""
    """The id of the run of which is asked whether to stop it."""
    note: str = ""
    """Shown in the last line until the next key."""

    def press(self, key: str, snapshot: Snapshot, lines: int, length: int = 0) -> tuple[View, Action | None]:
        """The view after a key on a screen with so many lines, and what is to be done. A text has `length` lines."""
        if self.stopping:
            action = Action("stop", run=self.stopping) if key in ("y", "Y") else None
            return replace(self, stopping="", note="" if action else "not stopped"), action
        view = replace(self, note="")
        if self.text:
            return view._scroll(key, lines - 2, length)  # noqa: SLF001 - another View
        if key == "q":
            return view, Action("quit")
        if key == "?":
            return replace(view, text="keys", is_followed=False, top=0), None
        if key in ("l", "enter", "s", "x"):
            return view._ask(key, snapshot)  # noqa: SLF001
        return view._move(key, snapshot, lines), None  # noqa: SLF001

    def _ask(self, key: str, snapshot: Snapshot) -> tuple[View, Action | None]:
        pane, name = self.selected
        if key == "s":
            return self, Action("stacks", run=name) if pane == "run" else Action("stacks", host=name)
        run = name if pane == "run" else snapshot.run_on(name)
        if run is None or run not in snapshot.found:
            return replace(self, note=f"no run on {name}"), None
        if key != "x":
            return self, Action("log", run=run)
        if pane == "host":
            return replace(self, note="select a run to stop it: Tab goes to the runs"), None
        if snapshot.found[run].has_ended:
            return replace(self, note=f"{run[:8]} has ended already"), None
        return replace(self, stopping=run), None

    # ---- hosts and runs

    def _move(self, key: str, snapshot: Snapshot, lines: int) -> View:
        rows = _rows(snapshot)
        at = rows.index(self.selected) if self.selected in rows else 0
        page = max(1, panes(snapshot, lines)[self.selected[0] == "run"])
        if key == "tab":
            other = [row for row in rows if row[0] != self.selected[0]]
            return replace(self, selected=other[0]) if other else self
        if key == "home":
            at = 0
        elif key == "end":
            at = len(rows) - 1
        else:
            at += _MOVES.get(key, 0) + page * _PAGES.get(key, 0)
        return replace(self, selected=rows[min(max(at, 0), len(rows) - 1)]) if rows else self

    def settled(self, snapshot: Snapshot, lines: int) -> View:
        """With a selection that is there, and on the screen."""
        rows = _rows(snapshot)
        selected = self.selected if self.selected in rows else rows[0] if rows else self.selected
        tops = tuple(
            _visible(top, room, [row.key for row in some], selected[1] if selected[0] == pane else None)
            for top, room, some, pane in zip(
                self.tops, panes(snapshot, lines), (snapshot.hosts, snapshot.runs), ("host", "run"), strict=True
            )
        )
        return replace(self, selected=selected, tops=(tops[0], tops[1]))

    # ---- a text

    def opened(self, title: str, *, follow: bool) -> View:
        return replace(self, text=title, is_followed=follow, top=0)

    def _scroll(self, key: str, room: int, length: int) -> tuple[View, Action | None]:
        if key in ("q", "escape", "left"):
            return replace(self, text="", is_followed=False, top=0), Action("close")
        last = max(0, length - room)
        top = last if self.is_followed else min(self.top, last)
        if key == "home":
            top = 0
        elif key == "end":
            top = last
        else:
            top = min(max(0, top + _MOVES.get(key, 0) + room * _PAGES.get(key, 0)), last)
        return replace(
            self, top=top, is_followed=top == last and (self.is_followed or key in ("end", "pagedown"))
        ), None

    def part(self, text: Sequence[str], room: int) -> Sequence[str]:
        """The lines of a text that are on the screen."""
        last = max(0, len(text) - room)
        top = last if self.is_followed else min(self.top, last)
        return text[top : top + room]


def _rows(snapshot: Snapshot) -> list[tuple[Pane, str]]:
    hosts: list[tuple[Pane, str]] = [("host", row.key) for row in snapshot.hosts]
    return hosts + [("run", row.key) for row in snapshot.runs]


def panes(snapshot: Snapshot, lines: int) -> tuple[int, int]:
    """How many hosts and how many runs a screen with so many lines has room for.

    Runs have at least a third of it, if there are as many, and what hosts do not need.
    """
    hosts, runs = len(snapshot.hosts), len(snapshot.runs)
    room = max(0, lines - _FRAME - (1 if runs else 0))  # runs have a head of their own
    for_runs = min(runs, max(room // 3, room - hosts))
    return min(hosts, room - for_runs), for_runs


def _visible(top: int, room: int, keys: Sequence[str], selected: str | None) -> int:
    """The first row to show, near `top`, so that the selected one is on the screen."""
    if selected is not None and selected in keys:
        at = keys.index(selected)
        top = min(max(top, at - room + 1), at)
    return max(0, min(top, len(keys) - room))
