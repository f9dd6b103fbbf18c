"""The lines of the screen: a snapshot and a view at a width and a height. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from skyfab._util.sizes import counted
from skyfab.inspect.top.snapshot import HOSTS, RUNS, Row, Snapshot
from skyfab.inspect.top.state import Pane, View, panes
from skyfab.inspect.top.width import cut, fill, width

_RIGHT: Final = ("CPUs", "load", "age", "ranks")
_OPTIONAL: Final = ("address", "system", "python", "disk", "CPUs", "memory", "load", "ranks", "hosts", "age")
"""Columns that a narrow screen does without, the first of them first."""
_LONGEST: Final = {"host": 24, "GPUs": 48, "hosts": 24, "name": 24}
"""Columns of these cells at most; those of the last cell are what is left."""
_LEAST: Final = 20
"""Columns that are left for the last cell at least; on a wide screen a third of it, if that is needed."""
_BETWEEN: Final = "  "
_KEYS: Final = "↑↓ select  Tab runs  l log  s stacks  x stop  ? keys  q quit"
_TEXT_KEYS: Final = "q back  ↑↓ PgUp PgDn scroll  End follow"
_BOLD, _BAR, _PLAIN = "\x1b[1m", "\x1b[7m", "\x1b[0m"

HELP: Final = (
    "↑ ↓ or k j    the host or run above or below",
    "PgUp PgDn     a page up or down",
    "Home End      the first host, the last run",
    "Tab           from the hosts to the runs and back",
    "l or Enter    follow the log of the run, or of the host's",
    "s             the stacks of all ranks of the run or host",
    "x, then y     stop the run",
    "q             back; from the hosts, quit",
    "Ctrl-C        quit",
)


def table_frame(snapshot: Snapshot, view: View, columns: int, lines: int) -> list[str]:
    """A screen with the hosts and the runs; `view` is settled."""
    for_hosts, for_runs = panes(snapshot, lines)
    made = [_BOLD + fill(snapshot.summary, columns) + _PLAIN]
    made += _pane("host", HOSTS, snapshot.hosts, view, columns, for_hosts)
    if snapshot.runs:
        made += _pane("run", RUNS, snapshot.runs, view, columns, for_runs)
    return _with_keys(made, _last_line(snapshot, view), columns, lines)


def text_frame(title: str, text: Sequence[str], view: View, columns: int, lines: int) -> list[str]:
    """A screen with a text."""
    made = [_BOLD + fill(title, columns) + _PLAIN, *(fill(line, columns) for line in view.part(text, lines - 2))]
    return _with_keys(made, view.note or _TEXT_KEYS, columns, lines)


def _last_line(snapshot: Snapshot, view: View) -> str:
    if view.stopping and view.stopping in snapshot.found:
        run = snapshot.found[view.stopping]
        return f"stop {run.id[:8]} on {counted(len(run.hosts), 'host')}? y/n"
    return view.note or _KEYS


def _with_keys(made: Sequence[str], keys: str, columns: int, lines: int) -> list[str]:
    blank = [" " * columns] * max(0, lines - 1 - len(made))
    return [*made[: lines - 1], *blank, _BAR + fill(keys, columns) + _PLAIN]


def _pane(pane: Pane, head: Sequence[str], rows: Sequence[Row], view: View, columns: int, room: int) -> list[str]:
    top = view.tops[pane == "run"]
    widths = column_widths(head, rows, columns)
    where = f" {top + 1}–{top + room} of {len(rows)}" if room < len(rows) else ""
    made = [_BOLD + fill(_line(head, head, widths).rstrip(), columns - len(where)) + where + _PLAIN]
    for row in rows[top : top + room]:
        line = fill(_line(head, row.cells, widths), columns)
        made.append(_BAR + line + _PLAIN if view.selected == (pane, row.key) else line)
    return made


def column_widths(head: Sequence[str], rows: Sequence[Row], columns: int) -> dict[int, int]:
    """How many columns the cells take, by their place; those that are not in it are left out."""
    widest = [
        min(_LONGEST.get(name, columns), max(width(name), *(width(row.cells[at]) for row in rows), 1))
        for at, name in enumerate(head)
    ]
    least = min(widest[-1], max(_LEAST, columns // 3))
    kept = list(range(len(head)))
    for name in (*[name for name in _OPTIONAL if name in head], ""):
        fixed = sum(widest[at] + len(_BETWEEN) for at in kept[:-1])
        if fixed + least <= columns or not name:
            break
        kept.remove(head.index(name))
    widths = {at: widest[at] for at in kept}
    over = sum(widths[at] + len(_BETWEEN) for at in kept[:-1]) + least - columns
    for at in sorted(kept[:-1], key=lambda at: widths[at], reverse=True):  # still too wide: the widest ones are cut
        less = max(0, min(over, widths[at] - 8))
        widths[at] -= less
        over -= less
    widths[kept[-1]] = max(0, columns - sum(widths[at] + len(_BETWEEN) for at in kept[:-1]))
    return widths


def _line(head: Sequence[str], cells: Sequence[str], widths: dict[int, int]) -> str:
    made = [fill(cells[at], columns, right=head[at] in _RIGHT) for at, columns in widths.items()]
    return cut(_BETWEEN.join(made), sum(widths.values()) + len(_BETWEEN) * (len(widths) - 1))
