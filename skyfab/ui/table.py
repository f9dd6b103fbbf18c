"""Prints tables: in the width of a terminal, as records if that is too narrow, or as plain columns in a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import Final

from skyfab.ui.terminal import clean, is_rich, put

_LEAST: Final = 24
"""Columns that the last cells of a table may be wrapped to; the others are not wrapped."""

_BETWEEN: Final = 3
"""Columns between two cells."""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Prints a table to stdout; the columns that `right` names are aligned to the right.

    On a narrow terminal, `optional` columns are left out, the first of them first.
    """
    cells = [[clean(cell, colour=False) for cell in row] for row in rows]
    if not is_rich(sys.stdout):
        put(sys.stdout, aligned(head, cells, right))
        return
    width = shutil.get_terminal_size().columns
    fitting = _narrowed(head, cells, optional, width)
    if fitting is None:
        put(sys.stdout, _records(head, cells, width))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    head, rows = fitting
    for name in head:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=name != head[-1])
    for row in rows:
        made.add_row(*map(Text, row))
    Console(file=sys.stdout, width=width).print(made)


def _narrowed(
    head: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str], width: int
) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
    """The head and rows that fit into a width, without as few optional columns as possible; None if nothing fits."""
    for count in range(len(optional) + 1):
        kept = [column for column in zip(head, *rows, strict=True) if column[0] not in optional[:count]]
        *fixed, last = [max(map(len, column)) for column in kept]
        if sum(fixed) + _BETWEEN * len(fixed) + min(last, _LEAST) <= width:
            head, *rows = zip(*kept, strict=True)
            return head, rows
    return None


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """A table as plain text."""
    columns = []
    for name, *cells in zip(head, *rows, strict=True):
        width = max(map(len, (name, *cells)))
        columns.append([cell.rjust(width) if name in right else cell.ljust(width) for cell in (name, *cells)])
    return "".join("  ".join(row).rstrip() + "\n" for row in zip(*columns, strict=True))


def _records(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """One row below the other, a line for each cell."""
    lines = []
    for first, *cells in rows:
        lines.append(first)
        for name, cell in zip(head[1:], cells, strict=True):
            text = f"{name}: {cell}"
            lines += textwrap.wrap(text, max(width, 12), initial_indent="  ", subsequent_indent="    ") if cell else []
    return "".join(f"{line}\n" for line in lines)
