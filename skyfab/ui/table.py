"""Prints tables: in the width of a terminal, or as plain columns in a pipe."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

from skyfab.ui.terminal import clean, is_rich, put

_LEAST: Final = 24
"""Columns of the last cell, at least, if it needs that many."""
_CUT: Final = 8
"""Columns that a cell has at least."""

_BETWEEN: Final = 3
"""Columns between two cells."""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    optional: Sequence[str] = (),
    widest: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Prints a table to stdout; the columns that `right` names are aligned to the right.

    On a narrow terminal, `optional` columns are left out, the first of them first. Cells are wrapped that are wider
    than `widest` says, or than there is room for.
    """
    cells = [[clean(cell, colour=False) for cell in row] for row in rows]
    if not is_rich(sys.stdout):
        put(sys.stdout, aligned(head, cells, right))
        return
    width = shutil.get_terminal_size().columns
    widths = column_widths(head, cells, width, optional=optional, widest=widest, least=_LEAST, between=_BETWEEN)
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for at, columns in widths.items():
        justify: Literal["left", "right"] = "right" if head[at] in right else "left"
        made.add_column(head[at], justify=justify, overflow="fold", max_width=max(columns, _CUT))
    for row in cells:
        made.add_row(*(Text(row[at]) for at in widths))
    Console(file=sys.stdout, width=width).print(made)


def column_widths(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: int,
    *,
    optional: Sequence[str],
    widest: Mapping[str, int],
    least: int,
    between: int,
) -> dict[int, int]:
    """How many columns of a terminal each cell takes, by its place; those that are left out are missing.

    The last one takes the rest: if it needs more than that, `optional` ones are left out for it until it has `least`,
    the first of them first, and then the widest ones are cut.
    """
    from rich.cells import cell_len

    last = len(head) - 1
    widths = {at: max(map(cell_len, (name, *(row[at] for row in rows)))) for at, name in enumerate(head)}
    if sum(widths.values()) + between * last > columns:
        widths = {at: min(widest.get(head[at], columns), width) for at, width in widths.items()}
    least = min(widths.pop(last), least)

    def left() -> int:
        return columns - sum(widths.values()) - between * len(widths)

    for name in optional:
        if name in head and left() < least:
            del widths[head.index(name)]
    for at in sorted(widths, key=lambda at: widths[at], reverse=True):
        widths[at] -= max(0, min(least - left(), widths[at] - _CUT))
    return {**widths, last: max(0, left())}


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """A table as plain text."""
    columns = []
    for name, *cells in zip(head, *rows, strict=True):
        width = max(map(len, (name, *cells)))
        columns.append([cell.rjust(width) if name in right else cell.ljust(width) for cell in (name, *cells)])
    return "".join("  ".join(row).rstrip() + "\n" for row in zip(*columns, strict=True))
