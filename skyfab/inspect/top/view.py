"""`View`: which part of a snapshot is visible and selected, what each key does, and the lines of the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from skyfab._util.sizes import counted
from skyfab.inspect.top.snapshot import HOSTS, RUNS, Snapshot
from skyfab.ui.table import column_widths

Wish = Literal["log", "stacks", "stop", "help", "quit"]

HELP: Final = (
    "↑ ↓ or k j    the host or run above or below",
    "PgUp PgDn     a page up or down",
    "Home End      the first host, the last run",
    "Tab           switch between hosts and runs",
    "l or Enter    follow the log of the run, or of a run on the host",
    "s             the stacks of all ranks of the run or host",
    "x, then y     stop the run",
    "q             back; from the hosts, quit",
    "Ctrl-C        quit",
)
_KEYS: Final = "↑↓ select  Tab runs  l log  s stacks  x stop  ? keys  q quit"
_MOVES: Final = {"up": -1, "k": -1, "down": 1, "j": 1}
_PAGES: Final = {"pageup": -1, "pagedown": 1, " ": 1}
_FRAME: Final = 3
"""Lines that are neither a host nor a run: the summary, the head of the hosts and the keys."""
_RIGHT: Final = ("CPUs", "load", "age", "ranks")
_OPTIONAL: Final = ("address", "system", "python", "disk", "CPUs", "memory", "load", "ranks", "hosts", "age")
"""Columns that a narrow screen does without, the first of them first."""
_WIDEST: Final = {"host": 24, "GPUs": 80, "hosts": 24, "name": 24}
_LEAST: Final = 20
"""Columns of the last cell, at least; on a wide screen a third of it, if that is needed."""
_BETWEEN: Final = 2
_BOLD, _BAR, _PLAIN = "\x1b[1m", "\x1b[7m", "\x1b[0m"


class Action(NamedTuple):
    """What a key asks for, of a host or run."""

    wish: Wish
    name: str = ""
    """The name of a host or the id of a run."""


@dataclass(slots=True)
class View:
    """The state of the screen."""

    selected: str = ""
    """The name of a host or the id of a run."""
    stopping: str = ""
    """The id of the run of which is asked whether to stop it."""
    note: str = ""
    """Shown in the last line until the next key."""

    def press(self, key: str, now: Snapshot, lines: int) -> Action | None:
        """What is to be done after a key on a screen with this number of lines."""
        self.note = ""
        if self.stopping:
            run, self.stopping = self.stopping, ""
            if key in ("y", "Y"):
                return Action("stop", run)
            self.note = "not stopped"
            return None
        if key in ("q", "?"):
            return Action("quit" if key == "q" else "help")
        if key == "s":
            return Action("stacks", self._at(now))
        if key in ("l", "enter", "x"):
            return self._ask(key, now)
        self._move(key, now, lines)
        return None

    def _at(self, now: Snapshot) -> str:
        """What is selected; the first host, if that is gone."""
        return self.selected if self.selected in {**now.hosts, **now.runs} else next(iter(now.hosts))

    def _ask(self, key: str, now: Snapshot) -> Action | None:
        name = self._at(now)
        run = name if name in now.found else now.run_on(name)
        if run is None:
            self.note = f"no run on {name}"
        elif key != "x":
            return Action("log", run)
        elif name != run:
            self.note = "select a run to stop it: Tab selects the runs"
        elif now.found[run].has_ended:
            self.note = f"{run[:8]} has already ended"
        else:
            self.stopping = run
        return None

    def _move(self, key: str, now: Snapshot, lines: int) -> None:
        keys = [*now.hosts, *now.runs]
        at = keys.index(self._at(now))
        is_run = at >= len(now.hosts)
        if key == "tab":
            at = len(now.hosts) if now.runs and not is_run else 0
        elif key in ("home", "end"):
            at = 0 if key == "home" else len(keys)
        else:
            at += _MOVES.get(key, 0) + max(1, panes(now, lines)[is_run]) * _PAGES.get(key, 0)
        self.selected = keys[min(max(at, 0), len(keys) - 1)]

    # ---- the lines of the screen, each in its full width

    def tables(self, now: Snapshot, columns: int, lines: int) -> list[str]:
        """The hosts and the runs."""
        for_hosts, for_runs = panes(now, lines)
        made = [_BOLD + _fill(now.summary, columns) + _PLAIN, *self._table(HOSTS, now.hosts, now, columns, for_hosts)]
        if now.runs:
            made += self._table(RUNS, now.runs, now, columns, for_runs)
        if self.stopping in now.found:
            hosts = counted(len(now.found[self.stopping].hosts), "host")
            return _with_keys(made, f"stop {self.stopping[:8]} on {hosts}? y/n", columns, lines)
        return _with_keys(made, self.note or _KEYS, columns, lines)

    def _table(
        self, head: Sequence[str], rows: Mapping[str, Sequence[str]], now: Snapshot, columns: int, room: int
    ) -> list[str]:
        selected = self._at(now)
        names = list(rows)
        at = names.index(selected) if selected in rows else 0
        top = max(0, min(at - room // 2, len(rows) - room))
        least = max(_LEAST, columns // 3)
        cells = [*rows.values()]
        widths = column_widths(head, cells, columns, optional=_OPTIONAL, widest=_WIDEST, least=least, between=_BETWEEN)
        where = f" {top + 1}–{top + room} of {len(rows)}" if room < len(rows) else ""
        made = [_BOLD + _fill(_line(head, head, widths).rstrip(), columns - len(where)) + where + _PLAIN]
        for name in names[top : top + room]:
            line = _fill(_line(head, rows[name], widths), columns)
            made.append(_BAR + line + _PLAIN if name == selected else line)
        return made


def panes(now: Snapshot, lines: int) -> tuple[int, int]:
    """How many hosts and how many runs a screen with this number of lines has room for.

    Runs have at least a third of it, if there are as many, and what hosts do not need.
    """
    hosts, runs = len(now.hosts), len(now.runs)
    room = max(0, lines - _FRAME - (1 if runs else 0))  # runs have a head of their own
    for_runs = min(runs, max(room // 3, room - hosts))
    return min(hosts, room - for_runs), for_runs


def _with_keys(made: Sequence[str], keys: str, columns: int, lines: int) -> list[str]:
    blank = [" " * columns] * max(0, lines - 1 - len(made))
    return [*made[: lines - 1], *blank, _BAR + _fill(keys, columns) + _PLAIN]


def _line(head: Sequence[str], cells: Sequence[str], widths: dict[int, int]) -> str:
    made = [_fill(cells[at], columns, right=head[at] in _RIGHT) for at, columns in widths.items()]
    return (" " * _BETWEEN).join(made)


def _fill(text: str, columns: int, *, right: bool = False) -> str:
    """The text in exactly this number of columns, shortened with … where it is wider."""
    from rich.cells import cell_len, set_cell_size

    size = cell_len(text)
    if size > columns:
        return set_cell_size(set_cell_size(text, columns - 1) + "…", columns)
    return " " * (columns - size) + text if right else text + " " * (columns - size)
